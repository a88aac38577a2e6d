"""One launch for what an unrolled draft loop computes once per step: page tables, kv-indices and lengths.

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
  attention call whose `seq_lens` provably lies within the length its own table was built for. Past that length the old table
  held zeros and the new one does not, so a table with any other reader stays.
* kv-indices. One launch computes the steps up to the last live one. With top-k 1 the layout does not depend on `num_steps`, so
  calls that differ in it fuse too.
* Lengths. Everything moves up only as far as its inputs allow.

Limits: slots and positions are left to Inductor, which fuses this pointwise work horizontally. Tables that are gathered from
stay. Constant lengths are not fused.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from spec_ops.ops.kv_indices import draft_kv_indices_op, draft_kv_indices_steps_op, page_table_op
from spec_ops.passes.base import GraphPass, PassContext, PassResult
from spec_ops.passes.graph import ATTENTION_OPS, INDEX_OPS, arg, attention_calls, calls, insert, set_arg, value
from spec_ops.passes.lengths import Length, Values, as_dtype, masked, materialize, same_shape

aten, prims = torch.ops.aten, torch.ops.prims


class _Call(NamedTuple):
    node: fx.Node
    length: Length


class FuseDraftSteps(GraphPass):
    name = "fuse_draft_steps"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        graph.eliminate_dead_code()  # a dead reader would keep a table, or a step, alive
        rewrite = _Rewrite(graph, Values(graph), result)
        rewrite.merge_identical()
        rewrite.fuse_tables()
        rewrite.fuse_kv_indices()
        rewrite.fuse_lengths()


@dataclass
class _Rewrite:
    """One run over one graph."""

    graph: fx.Graph
    values: Values
    result: PassResult

    def length(self, call: fx.Node) -> Length:
        return self.values.canonical(arg(call, "seq_lens"))

    def source(self, call: fx.Node) -> tuple[Hashable, ...]:
        """What an index call reads besides its lengths."""
        requests = arg(call, "req_pool_indices")
        return self.values.leader(arg(call, "req_to_token")), self.values.canonical(requests)

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
        groups: dict[Hashable, list[_Call]] = defaultdict(list)
        for call in calls(self.graph, page_table_op):
            length = self.length(call)
            if length.base is not None and call.users:
                key = (self.source(call), length.base, self.numbers(call, "page_size", "max_pages"))
                groups[key].append(_Call(call, length))
        for tables in groups.values():
            longest: dict[fx.Node | None, Length] = {}
            for _, length in tables:
                best = longest.setdefault(length.keep, length)
                longest[length.keep] = max(best, length, key=lambda v: v.offset)
            served: dict[Length, list[_Call]] = defaultdict(list)
            for table in tables:
                own, unmasked = longest[table.length.keep], longest.get(None)
                # A table without a mask holds the entries of masked ones too.
                served[unmasked if unmasked is not None and own.within(unmasked) else own].append(table)
            for length, members in served.items():
                self._share_table(length, members)

    def _share_table(self, length: Length, tables: list[_Call]) -> None:
        moved = [node for node, own in tables if own != length and self._may_be_longer(node, own)]
        if not moved:
            return
        shared = next(node for node, own in tables if own == length)
        anchor = next(node for node, _ in tables if node is shared or node in moved)
        if shared is not anchor:
            shared = self._hoist_table(shared, length, anchor)
        for node in moved:
            self.result.did(node, f"page_table: the table for {length} serves its readers")
            node.replace_all_uses_with(shared)
            self.graph.erase_node(node)

    def _may_be_longer(self, table: fx.Node, length: Length) -> bool:
        """Whether all readers of `table`, built for `length`, are attention calls that stay within that length."""
        for user in table.users:
            inputs = [*user.args, *user.kwargs.values()]
            if user.target not in ATTENTION_OPS or arg(user, "block_tables") is not table or inputs.count(table) != 1:
                reader = "it is returned" if _is_returned(user) else f"{user.name} reads it, not as block_tables alone"
                self.result.refuse(table, f"page_table: stays: {reader}")
                return False
            seq_lens = self.length(user)
            if not seq_lens.within(length):
                op = ATTENTION_OPS[user.target]
                self.result.refuse(table, f"page_table: stays: {op} attends {seq_lens}, not provably within {length}")
                return False
        return True

    def _hoist_table(self, table: fx.Node, length: Length, anchor: fx.Node) -> fx.Node:
        """The same call at `anchor`, an earlier one of the same table and requests."""
        lens = materialize(self.graph, anchor, length, arg(table, "seq_lens"))
        sizes = (arg(table, "page_size"), arg(anchor, "max_pages"))
        inputs = (arg(anchor, "req_to_token"), arg(anchor, "req_pool_indices"), lens, *sizes)
        hoisted = insert(self.graph, anchor, page_table_op, inputs, source=table)
        table.replace_all_uses_with(hoisted)
        self.graph.erase_node(table)
        return hoisted

    def fuse_kv_indices(self) -> None:
        groups: dict[Hashable, list[fx.Node]] = defaultdict(list)
        for call in calls(self.graph, draft_kv_indices_op):
            topk = arg(call, "topk")
            layout = (topk,) if topk == 1 else (topk, *self.numbers(call, "num_steps", "page_size"))
            key = (self.source(call), self.length(call), layout, self.numbers(call, "capacity"))
            if any(_is_returned(user) for user in call.users):
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
            for call in group:  # only now: rows are inserted before the first
                self.graph.erase_node(call)

    def fuse_lengths(self) -> None:
        groups: dict[Hashable, list[_Call]] = defaultdict(list)
        for call in [*attention_calls(self.graph), *calls(self.graph, *INDEX_OPS)]:
            node = arg(call, "seq_lens")
            length = self.values.canonical(node)
            base, lens = length.base, value(node)
            if base is None or not same_shape(value(base).shape, lens.shape):
                continue
            if length.offset != 0 or length.keep is not None or value(base).dtype != lens.dtype:
                groups[base, length.keep, lens.dtype].append(_Call(call, length))
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        for group in groups.values():
            offsets = sorted({length.offset for _, length in group})
            # All computed from the base and the mask, so both stand before the first of them.
            anchor = min((arg(call, "seq_lens") for call, _ in group), key=order.__getitem__)
            if len(offsets) < 2:
                for call, length in group:
                    if arg(call, "seq_lens") is not anchor:
                        set_arg(call, "seq_lens", anchor)
                        self.result.did(call, f"seq_lens: {length}, as computed before")
                continue
            stacked = self._stack(anchor, group[0].length, offsets)
            rows = [insert(self.graph, anchor, aten.select.int, (stacked, 0, i)) for i in range(len(offsets))]
            for call, length in group:
                set_arg(call, "seq_lens", rows[offsets.index(length.offset)])
                self.result.did(call, f"seq_lens: row {length.offset:+d} of one launch for {len(offsets)} lengths")

    def _stack(self, anchor: fx.Node, length: Length, offsets: list[int]) -> fx.Node:
        """`[len(offsets), bs]`: `length` with each of the offsets, before `anchor` and of its dtype."""
        like = value(anchor)
        assert length.base is not None
        base = as_dtype(self.graph, anchor, length.base, like.dtype)
        row = insert(self.graph, anchor, aten.unsqueeze.default, (base, 0))
        column = insert(self.graph, anchor, aten.unsqueeze.default, (self._column(anchor, offsets), 1))
        stacked = insert(self.graph, anchor, aten.add.Tensor, (row, column))
        if length.keep is not None:
            stacked = masked(self.graph, anchor, stacked, length.keep, like.shape, anchor)
        return stacked

    def _column(self, anchor: fx.Node, offsets: Iterable[int]) -> fx.Node:
        """`[n]` of ascending offsets from pointwise ops: a tensor made on the host would be a copy in every round."""
        like, offsets = value(anchor), list(offsets)
        step = offsets[1] - offsets[0]
        even = all(b - a == step for a, b in itertools.pairwise(offsets))
        start, step = (offsets[0], step) if even else (0, 1)
        options = {"start": start, "step": step, "dtype": like.dtype, "device": like.device, "requires_grad": False}
        index = insert(self.graph, anchor, prims.iota.default, (len(offsets),), options)
        if even:
            return index
        column = insert(self.graph, anchor, aten.add.Tensor, (index, offsets[0]))
        for i in range(1, len(offsets)):
            if offsets[i] == offsets[i - 1] + 1:
                continue
            jumped = insert(self.graph, anchor, aten.ge.Scalar, (index, i))
            shifted = insert(self.graph, anchor, aten.add.Tensor, (index, offsets[i] - i))
            column = insert(self.graph, anchor, aten.where.self, (jumped, shifted, column))
        return column


def _is_returned(node: fx.Node) -> bool:
    """Whether `node` is the graph's output, or an output of a call that is."""
    if node.op == "output":
        return True
    return node.target is operator.getitem and any(user.op == "output" for user in node.users)
