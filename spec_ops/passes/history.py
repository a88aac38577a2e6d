"""What each pass did to each node of a graph, for a report that shows the graph before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from spec_ops.passes.analysis.graph import source_line, value


class Form(NamedTuple):
    """A node as text: what it calls, and with what."""

    target: str
    args: str


@dataclass
class Record:
    """One node over all passes. `passes`: what each did, in order; `before` and `after` are None where it is not there."""

    name: str
    where: str
    result: str
    before: Form | None
    after: Form | None
    passes: list[tuple[str, str]] = field(default_factory=list)


class History:
    """The calls of a graph, in the order in which they stand or stood. Holds text alone, so that it outlives the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.records: list[Record] = []
        self._of: dict[fx.Node, Record] = {}
        for node in graph.nodes:
            if node.op == "call_function":
                form = _form(node)
                self._of[node] = record = Record(node.name, source_line(node), _result(node), form, form)
                self.records.append(record)

    def note(self, graph: fx.Graph, name: str) -> None:
        """Compare with the state before the pass `name`."""
        live = [node for node in graph.nodes if node.op == "call_function"]
        order: list[Record] = []
        for node in live:
            form = _form(node)
            if (record := self._of.get(node)) is None:
                self._of[node] = record = Record(node.name, source_line(node), _result(node), None, form, [(name, "added")])
            elif form != record.after:
                target = record.after is not None and form.target != record.after.target
                record.passes.append((name, "became " + form.target if target else "other inputs"))
                record.after = form
            order.append(record)
        alive = set(live)
        for node, record in self._of.items():
            if node not in alive and record.after is not None:
                record.after = None
                record.passes.append((name, "removed"))
        self.records = _merged(self.records, order)

    def close(self) -> None:
        """Let the graph go."""
        self._of.clear()


def _merged(old: list[Record], new: list[Record]) -> list[Record]:
    """`new`, with those of `old` that are gone after what they followed."""
    present = set(map(id, new))
    followers: dict[int | None, list[Record]] = {}
    last: int | None = None
    for record in old:
        if id(record) in present:
            last = id(record)
        else:
            followers.setdefault(last, []).append(record)
    merged = list(followers.get(None, ()))
    for record in new:
        merged += [record, *followers.get(id(record), ())]
    return merged


def _form(node: fx.Node) -> Form:
    shown = [*map(str, node.args), *(f"{name}={given}" for name, given in node.kwargs.items())]
    is_op = isinstance(node.target, (torch._ops.OpOverload, str))
    return Form(str(node.target) if is_op else getattr(node.target, "__name__", str(node.target)), ", ".join(shown))


def _result(node: fx.Node) -> str:
    """`bfloat16[2, 64]`, of several tensors each; empty for what is no tensor."""
    leaves = torch.utils._pytree.tree_leaves(value(node))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}[{', '.join(map(str, t.shape))}]" for t in tensors)
