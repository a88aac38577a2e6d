"""What users see of a graph's results, which no pass may change: shapes, dtypes, strides, and which share memory.

A defect of a pass would otherwise show as a wrong value far away: one output changes when a caller writes another in place.
So the manager compares after every pass, and raises. It does not take the pass back: the graph is changed by then, a defect
that repairs itself is never found, and a user can switch off the pass that the error names.
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
        """Compare after a pass; bring fake values up to date with what it replaced, if it rewrote anything.

        Raises:
            PassError: an output has another shape, dtype, device or strides than before, or it came to share memory with an
                input or another output, or ceased to.
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
    """One result: its fake value (None if it is no tensor), and its memory as an input or as the first output that has it."""

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
    """Fake values of a graph while passes rewrite it: what reads a node that was replaced gets a new one if it needs one, views
    above all. Inductor's own passes take two tensors with fake values of one storage for tensors that share memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._read = {node: _read_values(node) for node in graph.nodes}

    def update(self) -> None:
        """After a pass."""
        read: dict[fx.Node, list[Any]] = {}
        computed: set[fx.Node] = set()
        for node in self._graph.nodes:
            read[node] = now = _read_values(node)
            before = self._read.get(node)
            if before is None:  # whoever inserted it computed it, of the values of then
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
    """Whether two fake values describe the same tensor, but for its memory."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b
    return all(not _differ(_fact(a, what), _fact(b, what)) for what in ("dtype", "device", "shape", "strides"))


def _computed(node: fx.Node) -> Any:
    """The fake value of `node` anew; None where it stays as it is: what an op of ours returns, whose strides depend on no
    input's, a write, a call whose sizes depend on data."""
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
