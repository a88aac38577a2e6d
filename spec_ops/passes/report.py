"""What the passes did to a graph, in numbers and in words."""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import fx

from spec_ops.passes.analysis.graph import ATTENTION_OPS, INDEX_OPS, op_of, value
from spec_ops.passes.analysis.lengths import INTEGERS
from spec_ops.passes.analysis.rows import RESHAPES, is_product
from spec_ops.passes.base import PassResult

KV_GENERATIONS, PAGE_TABLES = "kv-index generations", "page tables"
HOST_COPIES, ITEMS = "device-to-host copies", "item calls"
METADATA_LAUNCHES, HEAD_ROWS, PREFILLS = "metadata launches", "LM-head rows in extend", "extends on a prefill kernel"
HOST_PLANNED, CUDA_GRAPHS = "host-planned calls", "CUDA graphs"
SUMMARY = (
    KV_GENERATIONS, PAGE_TABLES, HOST_COPIES, ITEMS, METADATA_LAUNCHES, HEAD_ROWS, PREFILLS, HOST_PLANNED, CUDA_GRAPHS,
)  # fmt: skip

aten = torch.ops.aten
_VIEWS = RESHAPES | {aten.select.int, aten.slice.Tensor, aten.expand.default, aten.permute.default}
_METADATA = {"block_tables", "seq_lens", "q_indptr", "kv_indptr", "kv_indices", "slots", "src_slots", "dst_slots"}


def is_host_copy(node: fx.Node) -> bool:
    """Whether `node` copies a tensor from another device to the CPU."""
    if node.op != "call_function" or not isinstance(out := value(node), torch.Tensor) or out.device.type != "cpu":
        return False
    return any(isinstance(v := value(n), torch.Tensor) and v.device.type != "cpu" for n in node.all_input_nodes)


def is_item(node: fx.Node) -> bool:
    return node.target is aten._local_scalar_dense.default


def plans_on_host(node: fx.Node) -> bool:
    """Whether `node` calls an op of ours that Inductor keeps out of CUDA graphs."""
    op = op_of(node)
    return op is not None and torch.Tag.cudagraph_unsafe in op.tags


def count_nodes(graph: fx.Graph) -> dict[str, int]:
    """Counts of what the passes are after (`SUMMARY`), of our ops by name, and of all calls.

    * metadata launches: page tables and kv-indices, and integer tensors that only describe where keys lie (lengths, slots) and
      are computed for an op of ours; each is a kernel of its own unless it finds one to ride on. Rows of one tensor count once.
    * LM-head rows in extend: rows of matrix products that choose tokens after an extend, in the example that was traced.
    * CUDA graphs: runs of work between what cannot be recorded, in the order of the graph; Inductor may reorder to fewer.
    """
    found: Counter[str] = Counter(dict.fromkeys(SUMMARY, 0))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found["calls"] += 1
        found[HOST_COPIES] += is_host_copy(node)
        found[ITEMS] += is_item(node)
        found[HOST_PLANNED] += plans_on_host(node)
        if (op := op_of(node)) is None:
            continue
        name = op._schema.name.removeprefix("spec_ops::")
        found[name] += 1
        found[PAGE_TABLES] += name == "page_table"
        found[KV_GENERATIONS] += name in INDEX_OPS.values() and name != "page_table"
        found[PREFILLS] += name in ("mha_extend", "mla_extend")
    found[METADATA_LAUNCHES] = found[PAGE_TABLES] + found[KV_GENERATIONS] + len(_computed_metadata(graph))
    found[HEAD_ROWS] = _head_rows(graph)
    found[CUDA_GRAPHS] = cuda_graphs(graph)
    return dict(found)


def _computed_metadata(graph: fx.Graph) -> set[fx.Node]:
    """Integer tensors that ops of ours take as metadata and that plain tensor ops compute."""
    made: set[fx.Node] = set()
    for call in graph.nodes:
        if (op := op_of(call)) is None:
            continue
        names = [argument.name for argument in op._schema.arguments]
        given = {**dict(zip(names, call.args if call.target is op else (), strict=False)), **call.kwargs}
        for node in (given[name] for name in _METADATA & given.keys()):
            while isinstance(node, fx.Node) and node.target in _VIEWS:
                node = node.args[0]
            plain = isinstance(node, fx.Node) and node.op == "call_function" and node.target is not operator.getitem
            if plain and op_of(node) is None and value(node).dtype in INTEGERS:
                made.add(node)
    return made


def _head_rows(graph: fx.Graph) -> int:
    """Rows of the matrix products from which token ids come, if the last attention call above them is an extend."""
    chooses: set[fx.Node] = set()  # values from which ids or probabilities come without another matrix product
    for node in reversed(graph.nodes):
        for user in node.users:
            parts = value(user)
            ids = isinstance(parts, torch.Tensor) and parts.dtype in INTEGERS
            sampled = (op := op_of(user)) is not None and op._schema.name.removeprefix("spec_ops::") == "sampling_probs"
            if ids or sampled or (user in chooses and not is_product(user) and op is None):
                chooses.add(node)
    last: dict[fx.Node, tuple[int, str]] = {}  # the last attention call above a value: its place and step
    rows = 0
    for place, node in enumerate(graph.nodes):
        last[node] = max((last[n] for n in node.all_input_nodes), default=(-1, ""))
        if node.target in ATTENTION_OPS:
            last[node] = (place, ATTENTION_OPS[node.target])
        elif is_product(node) and node in chooses and last[node][1].endswith("_extend"):
            rows += math.prod(map(_example, value(node).shape[:-1]))
    return rows


def _example(size: int | torch.SymInt) -> int:
    """A dynamic size as it is in the example that is traced, without a guard; 1 where only the device knows it."""
    return size if isinstance(size, int) else size.node.hint or 1


def cuda_graphs(graph: fx.Graph) -> int:
    """Runs of nodes that do work, between calls that CUDA graphs cannot record."""
    runs, inside = 0, False
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or node.target in _VIEWS:
            continue
        if plans_on_host(node) or is_host_copy(node) or is_item(node):
            inside = False
        elif not inside and (op_of(node) is not None or isinstance(value(node), (torch.Tensor, tuple, list))):
            runs, inside = runs + 1, True
    return runs


@dataclass
class GraphReport:
    """One compiled graph: counts before and after (`count_nodes`), and every pass's result."""

    before: dict[str, int]
    after: dict[str, int] = field(default_factory=dict)
    results: list[PassResult] = field(default_factory=list)

    def matches(self, name: str) -> int:
        return sum(result.matches for result in self.results if result.name == name)

    def kernels(self) -> list[str]:
        """The selections, in call order."""
        return [note.text for result in self.results if result.name == "select_backends" for note in result.done]

    def warnings(self) -> list[str]:
        """What is slow and need not be, each once: calls without a kernel on a GPU."""
        return list(dict.fromkeys(note.text for result in self.results for note in result.warnings))

    def host_plan_cost(self) -> str | None:
        """What calls that plan on the host cost; None if there are none."""
        if not (calls := self.after.get(HOST_PLANNED, 0)):
            return None
        graphs = self.after[CUDA_GRAPHS]
        return f"{calls} calls plan on the host and run outside CUDA graphs: {graphs} graphs instead of 1"

    def __str__(self) -> str:
        others = sorted((self.before.keys() | self.after.keys()) - {*SUMMARY, "calls"})
        counts = [(name, self.before.get(name, 0), self.after.get(name, 0)) for name in (*SUMMARY, *others, "calls")]
        lines = [f"{'':28s} {'before':>8s} {'after':>8s}"]
        lines += [f"{name:28s} {before:8d} {after:8d}" for name, before, after in counts]
        lines += [cost] if (cost := self.host_plan_cost()) else []
        lines += [f"warning: {text}" for text in self.warnings()]
        for result in self.results:
            lines.append(f"{result.name}: {result.matches}")
            for verb, notes in (("", result.done), ("refused: ", result.refused)):
                for (text, where), times in Counter((n.text, n.where) for n in notes).items():
                    lines.append(f"  {verb}{text}" + (f" (x{times})" if times > 1 else "") + f"  [{where}]")
        return "\n".join(lines)
