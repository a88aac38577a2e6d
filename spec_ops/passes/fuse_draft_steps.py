"""Compute in one launch what an unrolled draft loop computes in every step: page tables, kv-indices, lengths and slots.

    len1 = where(active, base + 1, 0); t1 = page_table(r, req, len1, ps, n)
    ip0, ix0 = draft_kv_indices(r, req, base, 0, 2, ...)
    mha_draft_decode(..., t1, len1, kv_indptr=ip0, kv_indices=ix0)
    len2 = where(active, base + 2, 0); t2 = page_table(r, req, len2, ps, n)
    ip1, ix1 = draft_kv_indices(r, req, base, 1, 2, ...)
    mha_draft_decode(..., t2, len2, kv_indptr=ip1, kv_indices=ix1)
->
    lens = where(active, base.unsqueeze(0) + [[1], [2]], 0); len1, len2 = lens[0], lens[1]
    t = page_table(r, req, len2, ps, n)
    ips, ixs = draft_kv_indices_steps(r, req, base, 2, ...)
    mha_draft_decode(..., t, len1, kv_indptr=ips[0], kv_indices=ixs[0])
    mha_draft_decode(..., t, len2, kv_indptr=ips[1], kv_indices=ixs[1])

Steps may be any calls, in any order: they belong together if their table, requests and base length are the same values and
their lengths differ by constants (`lengths.py`).

* Identical metadata calls become one. A value that is returned keeps its own call: two results of a graph must not share
  memory, since the caller may write one of them in place.
* Page tables. An attention call never reads a table past its own `seq_lens`, so the table for the largest offset serves every
  attention call whose `seq_lens` provably lies within the length that its own table was built for. It also serves every gather
  of the pages of positions within that length (`table_reads.py`). Past that length the old table held zeros and the new one
  does not, so a table with any other reader stays. A gather that may read an entry of an empty row is multiplied by 0 there.
* kv-indices. One launch computes all steps up to the last one that is used. With top-k 1 the layout does not depend on
  `num_steps`, so calls that differ in it are fused too.
* Lengths, slots, positions: every integer tensor that an op of ours takes (`stacking.py`). Positions that only feed RoPE need
  no launch: Inductor inlines them. Everything moves up only as far as its inputs allow.

Limits: values of different shapes (one token of a draft step, all tokens of verify) are not rows of one launch. Constant
lengths are not fused.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from spec_ops.ops.kv_indices import draft_kv_indices_op, draft_kv_indices_steps_op, page_table_op
from spec_ops.passes.analysis.graph import (
    ATTENTION_OPS,
    AUTO_FUNCTIONALIZED,
    INDEX_OPS,
    arg,
    call_like,
    calls,
    has_arg,
    insert,
    op_of,
    value,
)
from spec_ops.passes.analysis.lengths import Length, Values, as_dtype, materialize
from spec_ops.passes.analysis.stacking import Stacking
from spec_ops.passes.analysis.storage import is_returned, is_view
from spec_ops.passes.analysis.table_reads import Read, Table, read_of
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten = torch.ops.aten


class _Input(NamedTuple):
    call: fx.Node
    name: str
    node: fx.Node
    offsets: tuple[int, ...]


class FuseDraftSteps(GraphPass):
    name = "fuse_draft_steps"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        graph.eliminate_dead_code()  # a dead reader would keep a table, or a step, alive
        rewrite = _Rewrite(graph, Values(graph), result)
        rewrite.merge_identical()
        rewrite.fuse_tables()
        rewrite.fuse_kv_indices()
        rewrite.stack_steps()


@dataclass
class _Rewrite:
    """One run of the pass over one graph."""

    graph: fx.Graph
    values: Values
    result: PassResult

    def length(self, call: fx.Node) -> Length:
        return self.values.length(arg(call, "seq_lens"))

    def source(self, call: fx.Node) -> tuple[Hashable, ...]:
        """What an index call reads besides its lengths."""
        requests = arg(call, "req_pool_indices")
        return self.values.leader(arg(call, "req_to_token")), self.values.length(requests)

    def numbers(self, call: fx.Node, *names: str) -> tuple[Hashable, ...]:
        return tuple(self.values.key(arg(call, name)) for name in names)

    def merge_identical(self) -> None:
        seen: dict[Hashable, fx.Node] = {}
        for call in calls(self.graph, *INDEX_OPS):
            rest = [a.name for a in call.target._schema.arguments][3:]  # type: ignore[union-attr]
            key = (call.target, self.source(call), self.length(call), self.numbers(call, *rest))
            first = seen.setdefault(key, call)
            if first is call or not call.users:
                continue
            name = INDEX_OPS[call.target]
            moved = [user for user in call.users if not _is_returned(user)]
            for user in moved:
                user.replace_input_with(call, first)
            if moved:
                self.result.did(call, f"{name}: the same as an earlier call")
            self._drop(call, f"{name}: keeps its own call: it is returned")

    def _drop(self, call: fx.Node, otherwise: str) -> None:
        """Remove a call that lost its readers; if it still has some, say why."""
        if call.users:
            self.result.refuse(call, otherwise)
        else:
            self.graph.erase_node(call)

    def fuse_tables(self) -> None:
        groups: dict[Hashable, list[Table]] = defaultdict(list)
        for call in calls(self.graph, page_table_op):
            table = Table(call, self.length(call), arg(call, "page_size"))
            if table.length.base is not None and call.users:
                key = (self.source(call), table.length.base, table.page_size, self.numbers(call, "max_pages"))
                groups[key].append(table)
        for tables in groups.values():
            longest: dict[fx.Node | None, Length] = {}
            for table in tables:
                best = longest.setdefault(table.length.keep, table.length)
                longest[table.length.keep] = max(best, table.length, key=lambda v: v.offset)
            served: dict[Length, list[Table]] = defaultdict(list)
            for table in tables:
                own, unmasked = longest[table.length.keep], longest.get(None)
                # A table without a mask holds the entries of masked ones too.
                served[unmasked if unmasked is not None and own.within(unmasked) else own].append(table)
            for length, members in served.items():
                self._share_table(length, members)

    def _share_table(self, length: Length, tables: list[Table]) -> None:
        found = {table.node: self._reads(table, length) for table in tables if table.length != length}
        moved = {node: reads for node, reads in found.items() if reads is not None}
        if not moved:
            return
        shared = next(table.node for table in tables if table.length == length)
        anchor = next(table.node for table in tables if table.node is shared or table.node in moved)
        if shared is not anchor:
            shared = self._hoist_table(shared, length, anchor)
        for node, reads in moved.items():
            self.result.did(node, f"page_table: the table for {length} serves its readers")
            for reader, read in reads.items():
                if read.may_be_empty:
                    self._zero_empty_rows(reader, arg(node, "seq_lens"))
            node.replace_all_uses_with(shared)
            self.graph.erase_node(node)

    def _reads(self, table: Table, length: Length) -> dict[fx.Node, Read] | None:
        """How each reader of `table` reads it, if all of them see the same in one built for `length`; else None."""
        found: dict[fx.Node, Read] = {}
        for user in table.node.users:
            read = self._read(user, table, length)
            if isinstance(read, str):
                self.result.refuse(table.node, f"page_table: stays: {read}")
                return None
            found[user] = read
        return found

    def _read(self, user: fx.Node, table: Table, length: Length) -> Read | str:
        """How `user` reads `table`, or why it may not be given one built for `length`."""
        if user.target in (aten.gather.default, aten.index.Tensor):
            # Where the mask is false both tables are empty, if it is the same mask.
            read = read_of(user, table, length, self.values) if length.keep is table.length.keep else None
            return f"{user.name} gathers from it, not provably within {table.length}" if read is None else read
        inputs = [*user.args, *user.kwargs.values()]
        if user.target not in ATTENTION_OPS or arg(user, "block_tables") is not table.node or inputs.count(table.node) != 1:
            return "it is returned" if _is_returned(user) else f"{user.name} reads it, not as block_tables alone"
        op = ATTENTION_OPS[user.target]
        if not (seq_lens := self.length(user)).within(table.length):
            return f"{op} attends {seq_lens}, not provably within {table.length}"
        if (tokens := _cache_page_size(user)) is None or tokens < table.page_size:
            return f"{op} reads an entry for each {tokens} tokens, and the table has one for each {table.page_size}"
        return Read(may_be_empty=False)

    def _zero_empty_rows(self, read: fx.Node, seq_lens: fx.Node) -> None:
        """Multiply what `read` took of a table by 0 for requests whose length is 0."""
        dtype, rank = value(read).dtype, value(read).dim()
        live = insert(self.graph, read.next, aten.gt.Scalar, (seq_lens, 0), source=read)
        if rank > 1:
            live = insert(self.graph, live.next, aten.reshape.default, (live, [-1] + [1] * (rank - 1)), source=read)
        live = as_dtype(self.graph, live.next, live, dtype)
        product = insert(self.graph, live.next, aten.mul.Tensor, (read, live), source=read)
        read.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)

    def _hoist_table(self, table: fx.Node, length: Length, anchor: fx.Node) -> fx.Node:
        """The same call at `anchor`, an earlier one of the same table and requests."""
        lens = materialize(self.graph, anchor, length, arg(table, "seq_lens"))
        changes = {name: arg(anchor, name) for name in ("req_to_token", "req_pool_indices", "max_pages")}
        hoisted = call_like(self.graph, anchor, table, {**changes, "seq_lens": lens})
        table.replace_all_uses_with(hoisted)
        self.graph.erase_node(table)
        return hoisted

    def fuse_kv_indices(self) -> None:
        groups: dict[Hashable, list[fx.Node]] = defaultdict(list)
        for call in calls(self.graph, draft_kv_indices_op):
            topk = arg(call, "topk")
            layout = (topk,) if topk == 1 else (topk, *self.numbers(call, "num_steps", "page_size"))
            key = (self.source(call), self.length(call), layout, self.numbers(call, "capacity"))
            if is_returned(call):
                self.result.refuse(call, "draft_kv_indices: keeps its own call: it is returned")
            elif call.users and all(user.target is operator.getitem for user in call.users):
                groups[key].append(call)
        for group in groups.values():
            steps = {arg(call, "step") for call in group}
            if len(steps) < 2:
                continue
            first, rows = group[0], max(steps) + 1
            source = (arg(first, "req_to_token"), arg(first, "req_pool_indices"), arg(first, "seq_lens"))
            topk = arg(first, "topk")
            num_steps = rows if topk == 1 else arg(first, "num_steps")
            sizes = (num_steps, topk, arg(first, "page_size"), arg(first, "capacity"), rows)
            fused = insert(self.graph, first, draft_kv_indices_steps_op, (*source, *sizes))
            outputs = [insert(self.graph, first, operator.getitem, (fused, i), source=first) for i in range(2)]
            for call in group:
                for item in list(call.users):
                    row = (outputs[int(item.args[1])], 0, arg(call, "step"))  # type: ignore[arg-type]
                    item.replace_all_uses_with(insert(self.graph, first, aten.select.int, row, source=call))
                    self.graph.erase_node(item)
                self.result.did(call, f"draft_kv_indices: row {arg(call, 'step')} of one launch for {rows} steps")
            for call in group:  # after the loop above, which inserts rows before the first call
                self.graph.erase_node(call)

    def stack_steps(self) -> None:
        values = Values(self.graph)  # again, since gathers that read several tables may now read one
        stacking = Stacking(self.graph, values)
        groups: dict[int, list[_Input]] = defaultdict(list)
        for call in self.graph.nodes:
            for name, node in _tensor_inputs(call) if op_of(call) is not None else ():
                if stacking.computed(node):
                    kind, offsets = stacking.form(node)
                    groups[kind].append(_Input(call, name, node, offsets))
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        for group in groups.values():
            # The first value in the graph is one of the rows: what the rows share comes before it, or is that value.
            distinct: dict[tuple[int, ...], fx.Node] = {}
            for member in sorted(group, key=lambda member: order[member.node]):
                distinct.setdefault(member.offsets, member.node)
            anchor = next(iter(distinct.values()))
            order_of_rows = sorted(distinct)
            count = len(order_of_rows)
            rows = [anchor] if count == 1 else stacking.rows([distinct[offsets] for offsets in order_of_rows], anchor)
            for call, name, node, offsets in group:
                row = order_of_rows.index(offsets)
                if node is not rows[row]:
                    call.replace_input_with(node, rows[row])
                    text = f"row {row} of one launch for {count}" if count > 1 else "as computed before"
                    self.result.did(call, f"{name}: {text}")


def _tensor_inputs(call: fx.Node) -> list[tuple[str, fx.Node]]:
    """The distinct tensors that a call of ours takes, with the name of their first argument."""
    schema = op_of(call)._schema
    given = dict(zip((a.name for a in schema.arguments), call.args, strict=False)) if call.target is op_of(call) else {}
    found: dict[fx.Node, str] = {}
    for name, argument in (given | call.kwargs).items():
        if isinstance(argument, fx.Node):
            found.setdefault(argument, name)
    return [(name, node) for node, name in found.items()]


def _cache_page_size(call: fx.Node) -> int | None:
    """Tokens of a page of the cache that an attention call reads; None if that is not static."""
    size = value(arg(call, "k_cache" if has_arg(call, "k_cache") else "kv_cache")).shape[1]
    return size if isinstance(size, int) else None


def _is_returned(user: fx.Node) -> bool:
    """Whether the graph returns memory of `user`: a result taken out of a call, a view, or what it writes to a base."""
    if user.op == "output":
        return True
    shares = is_view(user) or user.target in (operator.getitem, AUTO_FUNCTIONALIZED)
    return shares and is_returned(user)
