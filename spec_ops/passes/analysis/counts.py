"""Counts of what costs time in a graph and what the passes remove: syncs, metadata, rows, CUDA graphs."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
from torch import fx

from spec_ops.passes.analysis.graph import ATTENTION_OPS, INDEX_OPS, group_of, op_of, value
from spec_ops.passes.analysis.lengths import INTEGERS
from spec_ops.passes.analysis.rows import RESHAPES, is_product
from spec_ops.passes.analysis.storage import Storage, storage_of
from spec_ops.passes.analysis.stored_weights import weight_bytes

KV_GENERATIONS, PAGE_TABLES = "kv-index generations", "page tables"
HOST_COPIES, ITEMS = "device-to-host copies", "item calls"
METADATA_LAUNCHES, HEAD_ROWS, PREFILLS = "metadata launches", "LM-head rows in extend", "extends on a prefill kernel"
HOST_PLANNED, CUDA_GRAPHS = "host-planned calls", "CUDA graphs"
COLLECTIVES, WEIGHTS = "NCCL collectives", "MiB moved for weights"
SUMMARY = (
    KV_GENERATIONS, PAGE_TABLES, HOST_COPIES, ITEMS, METADATA_LAUNCHES, HEAD_ROWS, PREFILLS, HOST_PLANNED, CUDA_GRAPHS,
    COLLECTIVES, WEIGHTS,
)  # fmt: skip

aten = torch.ops.aten
_VIEWS = RESHAPES | {aten.select.int, aten.slice.Tensor, aten.expand.default, aten.permute.default}
_METADATA = {"block_tables", "seq_lens", "q_indptr", "kv_indptr", "kv_indices", "slots", "src_slots", "dst_slots"}

# What takes logits.
_SAMPLING = {"sampling_probs", "sampling_support", "sample_logits", "accept_sampled_logits", "topk_logits"}


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
    * CUDA graphs: as few as the data allow, which is how Inductor orders the work unless that takes a tenth more memory.
    * NCCL collectives: torch's own, which a backend of its process groups computes.
    * MiB moved for weights: of products; a weight of 8 bits that is dequantized before one is read, written and read again.
    """
    found: Counter[str] = Counter(dict.fromkeys(SUMMARY, 0))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found["calls"] += 1
        found[HOST_COPIES] += is_host_copy(node)
        found[ITEMS] += is_item(node)
        found[HOST_PLANNED] += plans_on_host(node)
        found[COLLECTIVES] += group_of(node) is not None
        if (op := op_of(node)) is None:
            continue
        name = op._schema.name.removeprefix("spec_ops::")
        found[name] += 1
        found[PAGE_TABLES] += name == "page_table"
        found[KV_GENERATIONS] += name in INDEX_OPS.values() and name != "page_table"
        found[PREFILLS] += name in ("mha_extend", "mla_extend")
    found[METADATA_LAUNCHES] = found[PAGE_TABLES] + found[KV_GENERATIONS] + len(_computed_metadata(graph))
    found[HEAD_ROWS] = _head_rows(graph)
    found[CUDA_GRAPHS] = fewest_cuda_graphs(graph)
    found[WEIGHTS] = -(-sum(map(weight_bytes, graph.nodes)) // 2**20)
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
            sampled = (op := op_of(user)) is not None and op._schema.name.removeprefix("spec_ops::") in _SAMPLING
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
    """Runs of work, in the order of the graph, between calls that CUDA graphs cannot record. Inductor reorders to fewer."""
    runs, inside = 0, False
    for node in graph.nodes:
        if (recorded := _is_recorded(node)) is None:
            continue
        runs, inside = runs + (recorded and not inside), recorded
    return runs


def fewest_cuda_graphs(graph: fx.Graph) -> int:
    """As `cuda_graphs`, in the order with the fewest runs: all that is ready and cannot be recorded, then all that can be."""
    waiting: dict[fx.Node, int] = {}
    followers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, earlier in _dependencies(graph):
        waiting[node] = len(earlier)
        for other in earlier:
            followers[other].append(node)
    ready: dict[bool, list[fx.Node]] = {False: [], True: []}
    runs, recording = 0, False

    def release(node: fx.Node) -> None:
        stack = [node]
        while stack:  # what does no work of its own, such as a view, is passed through at once
            current = stack.pop()
            recorded = _is_recorded(current)
            if recorded is not None and current is not node:
                ready[recorded].append(current)
                continue
            for follower in followers[current]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    stack.append(follower)

    for node in [node for node, count in waiting.items() if not count]:
        if (recorded := _is_recorded(node)) is None:
            release(node)
        else:
            ready[recorded].append(node)
    while ready[False] or ready[True]:
        runs += recording and bool(ready[True])
        while ready[recording]:
            release(ready[recording].pop())
        recording = not recording
    return runs


def _is_recorded(node: fx.Node) -> bool | None:
    """Whether a CUDA graph can hold the work of `node`; None if it does none."""
    if node.op != "call_function" or node.target is operator.getitem or node.target in _VIEWS:
        return None
    if plans_on_host(node) or is_host_copy(node) or is_item(node):
        return False
    return True if op_of(node) is not None or isinstance(value(node), (torch.Tensor, tuple, list)) else None


def _dependencies(graph: fx.Graph) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Each node with those that must run before it: what it reads, and where memory is written in place, who used it before."""
    written = {memory for node in graph.nodes for memory in _writes(node)}
    writers: dict[Storage, fx.Node] = {}
    readers: dict[Storage, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        earlier = set(node.all_input_nodes)
        if written:
            memories = {storage_of(n) for n in node.all_input_nodes if isinstance(value(n), torch.Tensor)} & written
            changed = set(_writes(node))
            for memory in memories:
                earlier |= {writers[memory]} if memory in writers else set()
                if memory in changed:
                    earlier.update(readers.pop(memory, ()))
                    writers[memory] = node
                else:
                    readers[memory].append(node)
        yield node, earlier


def _writes(node: fx.Node) -> Iterator[Storage]:
    """The memory that `node` changes; nothing for the calls of a functional graph."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return
    given = {**{a.name: v for a, v in zip(schema.arguments, node.args, strict=False)}, **node.kwargs}
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for item in torch.utils._pytree.tree_leaves(given.get(argument.name)):
                if isinstance(item, fx.Node):
                    yield storage_of(item)
