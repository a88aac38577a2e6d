"""What the passes did to a graph, in numbers and in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import fx

from spec_ops.passes.base import PassResult
from spec_ops.passes.graph import op_of, value

HOST_COPIES, ITEMS = "device-to-host copies", "item calls"


def is_host_copy(node: fx.Node) -> bool:
    """Whether `node` copies a tensor from another device to the CPU."""
    if node.op != "call_function" or not isinstance(out := value(node), torch.Tensor) or out.device.type != "cpu":
        return False
    return any(isinstance(v := value(n), torch.Tensor) and v.device.type != "cpu" for n in node.all_input_nodes)


def count_nodes(graph: fx.Graph) -> dict[str, int]:
    """Counts of what the passes are after: our ops by name, copies to the host, `item` calls, and all calls."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found["calls"] += 1
        found[HOST_COPIES] += is_host_copy(node)
        found[ITEMS] += node.target is torch.ops.aten._local_scalar_dense.default
        if (op := op_of(node)) is not None:
            found[op._schema.name.removeprefix("spec_ops::")] += 1
    return dict(found)


@dataclass
class GraphReport:
    """One compiled graph: counts before and after, and every pass's result."""

    before: dict[str, int]
    after: dict[str, int] = field(default_factory=dict)
    results: list[PassResult] = field(default_factory=list)

    def matches(self, name: str) -> int:
        return sum(result.matches for result in self.results if result.name == name)

    def kernels(self) -> list[str]:
        """The selections, in call order."""
        return [note.text for result in self.results if result.name == "select_backends" for note in result.done]

    def __str__(self) -> str:
        names = sorted(self.before.keys() | self.after.keys(), key=lambda n: (n == "calls", n))
        rows = [(n, self.before.get(n, 0), self.after.get(n, 0)) for n in names]
        lines = [f"{'':28s} {'before':>8s} {'after':>8s}"]
        lines += [f"{name:28s} {before:8d} {after:8d}" for name, before, after in rows if before or after]
        for result in self.results:
            lines.append(f"{result.name}: {result.matches}")
            for verb, notes in (("", result.done), ("refused: ", result.refused)):
                for (text, where), times in Counter((n.text, n.where) for n in notes).items():
                    lines.append(f"  {verb}{text}" + (f" (x{times})" if times > 1 else "") + f"  [{where}]")
        return "\n".join(lines)
