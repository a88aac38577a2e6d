"""Runs a random program eagerly and through passes, and says what differs: values, shapes, dtypes, strides, mutated inputs, and
which results change when another one, or an input, is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from spec_ops.passes import PassManager, pass_names
from tests.helpers.random_programs import Program

ALL = "all passes"


@dataclass
class Outcome:
    """What a run of a program leaves."""

    results: list[torch.Tensor]
    inputs: dict[str, torch.Tensor]

    def reached(self) -> list[frozenset[str]]:
        """For each result, which other results and inputs change when it is written."""
        everything = {**{f"output {i}": result for i, result in enumerate(self.results)}, **self.inputs}
        found = []
        for i, result in enumerate(self.results):
            before = {name: tensor.clone() for name, tensor in everything.items()}
            torch.as_strided(result, (1,) * result.dim(), (1,) * result.dim()).zero_().sub_(3) if result.numel() else None
            found.append(
                frozenset(name for name, old in before.items() if name != f"output {i}" and not _same(everything[name], old))
            )
            for name, old in before.items():
                everything[name].copy_(old) if not _overlaps_itself(everything[name]) else None
        return found


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, 0, 0, equal_nan=True))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _run(function: Callable[..., Any], program: Program) -> Outcome:
    inputs = program.inputs()
    with torch.no_grad():
        return Outcome(list(function(*inputs.values())), inputs)


class Traced:
    """The graph of a program, traced once; `run` runs it as a pass leaves it, with AOTAutograd's code around it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.module: fx.GraphModule | None = None
        self._current: Callable[..., Any] | None = None

        def compiler(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            self.module = module
            self._current = _lowered(fx.GraphModule(module, copy.deepcopy(module.graph)))
            return make_boxed_func(lambda *args: self._current(*args))  # type: ignore[misc]

        options = {
            "inference_compiler": compiler,
            "decompositions": select_decomp_table,
            "keep_inference_input_mutations": True,
        }
        if any(".item()" in line for line in program.lines):  # only Dynamo makes a symbol of it
            torch._dynamo.reset()
            backend = aot_autograd(fw_compiler=compiler, **options)
            self._function = torch.compile(program.function(), backend=backend, fullgraph=True, dynamic=False)
        else:  # twice as fast
            options["decompositions"] = select_decomp_table()
            self._function = aot_function(program.function(), fw_compiler=compiler, **options)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            self.plain = _run(self._function, program)

    def run(self, *names: str) -> Outcome | None:
        """The outcome with these passes on; None if they leave the graph as it is."""
        assert self.module is not None
        module = fx.GraphModule(self.module, copy.deepcopy(self.module.graph))
        before = str(module.graph)
        with torch.no_grad():
            PassManager({name: name in names for name in pass_names()})(module.graph)
        if str(module.graph) == before:
            return None
        self._current = _lowered(module)
        return _run(self._function, self.program)


def _lowered(module: fx.GraphModule) -> Callable[..., Any]:
    """As Inductor goes on after the passes: `copy(old, new)` becomes `new`, which must be as it was where it is read.

    Its `remove_noop_ops` does the same to `clone`. That is left out: it makes one tensor of two clones that are returned.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        old, new = (argument.meta["val"] for argument in node.args[:2])
        if (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride()):
            node.replace_all_uses_with(node.args[1])
            module.graph.erase_node(node)
    module.recompile()
    return module.forward


def _differences(got: Outcome, want: Outcome, plain: Outcome) -> Iterator[str]:
    for i, (a, b, traced) in enumerate(zip(got.results, want.results, plain.results, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"output {i} is {a.dtype} {tuple(a.shape)}, eager {b.dtype} {tuple(b.shape)}"
        elif _strides(a) != _strides(traced):
            yield f"output {i} has strides {a.stride()}, without passes {traced.stride()}"
        elif not _close(a, b):
            yield f"output {i} differs"
    for name, old in want.inputs.items():
        if not _close(got.inputs[name], old):
            yield f"input {name} differs"


def _strides(tensor: torch.Tensor) -> list[int]:
    """Those that say where an element is."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Rows are selected before a matrix product instead of after it: another order of summation.
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)


def check(program: Program, names: Sequence[str] = (ALL, *pass_names())) -> dict[str, str]:
    """What goes wrong with each pass, and with all of them: nothing, if the passes are right.

    A program that differs without passes, or that torch cannot trace, says nothing about them: none goes wrong.
    """
    want = _run(program.function(), program)
    try:
        graph = Traced(program)
    except (RuntimeError, TorchDynamoException, GuardOnDataDependentSymNode):
        return {}
    if any(_differences(graph.plain, want, graph.plain)):
        return {}
    reached: list[frozenset[str]] | None = None
    wrong: dict[str, str] = {}
    for name in names:
        try:
            got = graph.run(*(pass_names() if name == ALL else (name,)))
        except Exception as error:  # whatever a pass or its graph raises is what we look for
            wrong[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        if got is None:
            continue
        found = list(_differences(got, want, graph.plain))
        reached = graph.plain.reached() if reached is None else reached
        for i, (now, before) in enumerate(zip(got.reached(), reached, strict=True)):
            if now != before:
                found.append(f"writing output {i} changes {sorted(now)}, without passes {sorted(before)}")
        if found:
            wrong[name] = "; ".join(found)
    return wrong


def smallest(program: Program, names: Sequence[str]) -> Program:
    """`program` with as few lines and results as still go wrong with one of the passes `names`."""

    def fails(candidate: Program) -> bool:
        try:
            return bool(check(candidate, names))
        except Exception:  # a line is gone that others need
            return False

    changed = True
    while changed:
        changed = False
        for candidate in _smaller(program):
            if fails(candidate):
                program, changed = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for i in range(len(program.results)):
        yield replace(program, results=program.results[:i] + program.results[i + 1 :])
    for i in reversed(range(len(program.lines))):
        yield replace(program, lines=program.lines[:i] + program.lines[i + 1 :])
