"""Properties of a graph's results that no pass may change: shapes, dtypes, strides, and which results share memory.

A defect of a pass would otherwise show as a wrong value somewhere else: one output changes when a caller writes another in
place. So the manager compares after every pass, and raises. It does not undo the pass: the graph has changed by then, a defect
that is repaired silently is never found, and a user can switch off the pass that the error names.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from spec_ops.passes.analysis.graph import source_line, value
from spec_ops.passes.analysis.storage import Storage, base_of, is_view, may_copy, storage_of
from spec_ops.passes.base import PassResult

aten = torch.ops.aten


class PassError(RuntimeError):
    """A defect of a pass: it changed what users see of a graph's results."""


class Watch:
    """Compares a graph's outputs after each pass with those before."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._fakes = _FakeValues(graph)
        self._outputs = _outputs(graph)

    def check(self, result: PassResult) -> None:
        """Compare after a pass. If the pass rewrote anything, update the fake values that depend on what it replaced.

        Raises:
            PassError: an output has another shape, dtype, device or strides than before, or shares memory with another input or
                output than before.
        """
        name = result.name
        if result.matches:
            self._fakes.update()
        for place, (old, new) in enumerate(zip(self._outputs, _outputs(self._graph), strict=True)):
            if (change := _change(old, new)) is not None:
                where = source_line(old.node) if isinstance(old.node, fx.Node) else "a constant"
                raise PassError(
                    f"spec_ops: internal error: the pass `{name}` changed output {place} of the graph [{where}]: {change}. "
                    f"Please report it; `passes={{'{name}': False}}` compiles without the pass."
                )


@dataclass(frozen=True)
class _Output:
    """One result.

    Attributes:
        node: what is returned.
        fake: its fake value; None if it is not a tensor.
        memory: an input's storage, or the number of the first output with the same storage.
        owner: the same in words.
    """

    node: Any
    fake: torch.Tensor | None = None
    memory: Storage = None
    owner: str = ""


def _outputs(graph: fx.Graph) -> list[_Output]:
    found: list[_Output] = []
    first: dict[Storage, int] = {}
    for place, node in enumerate(torch.utils._pytree.tree_leaves(graph.output_node().args)):
        fake = value(node)
        if not isinstance(node, fx.Node) or not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
            found.append(_Output(node))
            continue
        storage = storage_of(node, written=True)
        base = base_of(node, written=True)
        if base.op == "call_function":
            found.append(_Output(node, fake, first.setdefault(storage, place), f"output {first[storage]}"))
        else:
            found.append(_Output(node, fake, storage, f"input {base.name}"))
    return found


def _change(old: _Output, new: _Output) -> str | None:
    if old.fake is None or new.fake is None:
        return None if old.fake is new.fake else "a tensor became none, or none a tensor"
    for what in ("dtype", "device", "shape", "strides"):
        before, after = (_fact(fake, what) for fake in (old.fake, new.fake))
        if _differ(before, after):
            return f"{what} {before} became {after}"
    if old.memory != new.memory:
        return f"memory of {old.owner} became memory of {new.owner}"
    return None


def _fact(fake: torch.Tensor, what: str) -> Any:
    if what != "strides":
        return getattr(fake, what)
    # A dimension of size 1 may have any stride.
    return tuple(0 if statically_known_true(n == 1) else stride for n, stride in zip(fake.shape, fake.stride(), strict=True))


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) != len(b) or any(statically_known_true(x != y) for x, y in zip(a, b, strict=True))
    return a != b


class _FakeValues:
    """The fake values of a graph while passes rewrite it. A reader of a node that was replaced gets a new fake value if it
    needs one, as views do: Inductor's own passes assume that tensors share memory if their fake values have one storage."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._read = {node: _read_values(node) for node in graph.nodes}

    def update(self) -> None:
        """Compute the fake values that a pass made stale."""
        read: dict[fx.Node, list[Any]] = {}
        computed: set[fx.Node] = set()
        for node in self._graph.nodes:
            read[node] = now = _read_values(node)
            before = self._read.get(node)
            if before is None:  # inserted by the pass, its fake value computed from the values at that time
                stale = not computed.isdisjoint(node.all_input_nodes)
            elif len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True)):
                continue
            else:
                # Where the number of inputs changed, a pass rewrote the call itself, and knows its result.
                unlike = len(before) == len(now) and not all(map(_alike, before, now))
                stale = unlike or is_view(node) or may_copy(node)
            if stale and (new := _computed(node)) is not None:
                node.meta["val"] = new
                computed.add(node)
        self._read = read


def _read_values(node: fx.Node) -> list[Any]:
    return [source.meta.get("val") for source in node.all_input_nodes]


def _alike(a: Any, b: Any) -> bool:
    """Whether two fake values describe the same tensor, apart from its memory."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b
    return all(not _differ(_fact(a, what), _fact(b, what)) for what in ("dtype", "device", "shape", "strides"))


def _computed(node: fx.Node) -> Any:
    """The fake value of `node`, computed again. None where it stays as it is: for a call of our ops, whose strides do not
    depend on the inputs' strides, for a write, and for a call whose sizes depend on data."""
    if node.target is operator.getitem:
        return value(node.args[0])[node.args[1]]
    # Inductor takes both for `reshape`.
    target: Any = aten.reshape.default if node.target is aten.view.default else node.target
    if getattr(target, "namespace", None) not in ("aten", "prims") or target._schema.is_mutable:
        return None
    mode = next((fake.fake_mode for fake in _read_values(node) if isinstance(fake, FakeTensor)), None)
    if mode is None or node.meta.get("unbacked_bindings"):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    with mode, torch.no_grad():
        return target(*args, **kwargs)
