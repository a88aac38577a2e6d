"""Remove reads of the device that nothing needs: `.cpu()`, `.item()`, `.tolist()`, and what is computed from them.

    longest = seq_lens.max().item()
    mha_draft_decode(q, ..., max_seq_len=longest)
->
    mha_draft_decode(q, ..., max_seq_len=block_tables.shape[1] * page_size)

`max_seq_len` is a bound, and the width of the page table is a bound that the host knows. After this a read whose value reaches
neither the graph's output nor an op with effects is dead, together with its symbolic arithmetic. Runtime asserts would keep it
alive, because FX counts them as effects. Asserts that tracing made by itself, because a read once sized a tensor, are removed
with the read. Asserts that the user wrote stay, and so does the read. A read that stays is reported with what needs it.

Tracing places its own asserts at the read, and also those that it derives from a Python `assert`. Hence only conditions that
hold whenever the values read are not negative are removed. A user's `assert n >= 0` alone looks the same, and is removed too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from spec_ops.passes.analysis.counts import is_host_copy
from spec_ops.passes.analysis.graph import ATTENTION_OPS, arg, attention_calls, has_arg, set_arg, source_line, value
from spec_ops.passes.base import GraphPass, PassContext, PassResult

ITEM = torch.ops.aten._local_scalar_dense.default
_ASSERT = torch.ops.aten._assert_scalar.default
_RANGES = (torch.ops.aten.sym_constrain_range.default, torch.ops.aten.sym_constrain_range_for_size.default)
_SCALARS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_sync(node: fx.Node) -> bool:
    """Whether the host waits for the device at `node`: a copy to it, a scalar read, or a shape that depends on data."""
    if node.op != "call_function":
        return False
    return node.target is ITEM or bool(node.meta.get("unbacked_bindings")) or is_host_copy(node)


class ElideHostSyncs(GraphPass):
    name = "elide_host_syncs"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        _use_static_bounds(graph, result)
        syncs = [node for node in graph.nodes if is_sync(node)]
        if not syncs:
            return
        removable = [node for node in graph.nodes if _from_tracing(node)]
        live = _live(graph, removable)
        for node in reversed(removable):
            if node not in live:
                graph.erase_node(node)
        for node in syncs:
            if node in live:
                result.refuse(node, f"{_kind(node)} stays: needed by {_needs(node, live)}")
            else:
                result.did(node, f"{_kind(node)}: nothing needs it")


def _use_static_bounds(graph: fx.Graph, result: PassResult) -> None:
    for node in attention_calls(graph):
        length, op = arg(node, "max_seq_len"), ATTENTION_OPS[node.target]
        if not isinstance(length, fx.Node) or not (reads := _reads(length)):
            continue
        bound = _page_table_width(node)
        if bound is None:
            result.refuse(node, f"{op}: max_seq_len is read from the device; the page table has no static width to bound it")
            continue
        set_arg(node, "max_seq_len", bound)
        places = ", ".join(dict.fromkeys(map(source_line, reads)))
        result.did(node, f"{op}: max_seq_len is the page table's width, {bound}, instead of a read at {places}")


def _page_table_width(node: fx.Node) -> int | None:
    """How many tokens the page table of an attention call can hold, if that is static."""
    tables = value(arg(node, "block_tables"))
    cache = value(arg(node, "k_cache" if has_arg(node, "k_cache") else "kv_cache"))
    if not isinstance(tables, torch.Tensor) or not isinstance(cache, torch.Tensor):
        return None
    pages, page_size = tables.shape[1], cache.shape[1]
    # 0 is not a valid max_seq_len.
    return pages * page_size or None if isinstance(pages, int) and isinstance(page_size, int) else None


def _reads(node: fx.Node) -> list[fx.Node]:
    """The syncs that a symbolic scalar was computed from, in scalar arithmetic."""
    found: dict[fx.Node, None] = {}
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if is_sync(current):
            found[current] = None
        elif isinstance(value(current), _SCALARS):
            stack += (fresh := [n for n in current.all_input_nodes if n not in seen])
            seen.update(fresh)
    return list(found)


def _from_tracing(node: fx.Node) -> bool:
    """Whether `node` is an assert on a read that tracing made by itself; False if in doubt."""
    if node.op != "call_function" or node.target not in (_ASSERT, *_RANGES):
        return False
    condition = node.args[0]
    if not isinstance(condition, fx.Node):
        return node.target is _ASSERT and condition is True
    reads = _reads(condition)
    if not reads:
        return False
    if node.target in _RANGES:
        low, high = arg(node, "min"), arg(node, "max")
        sized = node.target is _RANGES[1]
        return high is None and (low is None or (sized and isinstance(low, int) and low <= 0))
    trace = node.meta.get("stack_trace")
    if not trace or not any(read.meta.get("stack_trace") == trace for read in reads):
        return False
    code = trace.rsplit('File "', 1)[-1].partition("\n")[2]
    if "check" in code or "assert" in code:  # the read is part of the user's own check
        return False
    return _holds_unless_negative(value(condition))


def _holds_unless_negative(condition: object) -> bool:
    """Whether a symbolic condition follows from its symbols being at least 0."""
    if isinstance(condition, bool):
        return condition
    if not isinstance(condition, torch.SymBool):
        return False
    expression = condition.node.expr
    if not all(symbol.is_integer for symbol in expression.free_symbols):
        return False
    result = bound_sympy(expression, {symbol: ValueRanges(0, int_oo) for symbol in expression.free_symbols})
    return bool(result.is_bool and result.lower)


def _effect(node: fx.Node) -> bool:
    """Whether `node` must stay even if nothing uses its result."""
    if node.op in ("placeholder", "get_attr"):
        return False
    mutates = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return mutates or node.is_impure()


def _live(graph: fx.Graph, removable: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that the graph's outputs and effects need. An assert in `removable` counts only if one of its reads is needed
    anyway."""
    pending = set(removable)
    live: set[fx.Node] = set()
    stack = [node for node in graph.nodes if node not in pending and _effect(node)]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += node.all_input_nodes
        if not stack:
            stack = [a for a in pending if not a.all_input_nodes or any(read in live for read in _reads(a.all_input_nodes[0]))]
            pending.difference_update(stack)
    return live


def _kind(node: fx.Node) -> str:
    if node.target is ITEM:
        return "item"
    return "device-to-host copy" if is_host_copy(node) else f"{node.target} (a size that depends on data)"


def _needs(sync: fx.Node, live: set[fx.Node]) -> str:
    """The ops that use the value that was read, directly or through scalar arithmetic and work on the host copy."""
    if _effect(sync):
        return "the tensor that it writes"
    needs: dict[str, None] = {}
    seen, queue = {sync}, [sync]
    while queue:
        node = queue.pop(0)
        for user in (u for u in node.users if u in live and u not in seen):
            seen.add(user)
            if _passes_on(user, on_host=is_host_copy(sync)):
                queue.append(user)
            else:
                needs[_describe(user, node)] = None
    names = list(needs)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _passes_on(node: fx.Node, on_host: bool) -> bool:
    if node.op != "call_function" or _effect(node):
        return False
    if is_sync(node) or isinstance(value(node), _SCALARS):
        return True
    out = value(node)
    parts = out if isinstance(out, (list, tuple)) else [out]
    plain = node.target is operator.getitem or getattr(node.target, "namespace", "") in ("aten", "prims")
    return on_host and plain and all(isinstance(part, torch.Tensor) and part.device.type == "cpu" for part in parts)


def _describe(node: fx.Node, read: fx.Node) -> str:
    if node.op == "output":
        return "the graph's output"
    if node.target in (_ASSERT, *_RANGES):
        return f"the check at {source_line(node)}"
    if node.target in ATTENTION_OPS:
        inputs = [a.name for a in node.target._schema.arguments if arg(node, a.name) is read]  # type: ignore[union-attr]
        return f"{ATTENTION_OPS[node.target]} ({', '.join(inputs)}, backend {arg(node, 'backend')})"
    return str(node.target)
