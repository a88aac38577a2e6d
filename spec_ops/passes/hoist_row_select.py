"""Compute only the rows that are used: `select_rows(f(x))` becomes `f(select_rows(x))`.

    hidden = attention(q) ...; logits = mm(hidden [bs * D], head); gather(logits, 1, row)
        ->   q' = gather(q, 1, row); hidden = attention(q', seq_lens - D + row + 1) ...; mm(hidden [bs], head)

A draft extend needs the logits of one row per request, so its LM head, final norm, MLP, output projection, attention output and
query projection run on that row alone. Keys and values are still written for all rows. The selection moves up through every op
whose result rows need the same operand rows only, and whose result nobody else reads (`analysis/row_regions.py`). A value that
stays in use as a whole is gathered from; no matrix product or attention call is ever computed twice. Selections by the same
index move together. The rewritten nodes take the place of the selection, after everything that they read.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from spec_ops.passes.analysis.graph import ATTENTION_OPS, arg, call_like, drop_unread, insert, value
from spec_ops.passes.analysis.replacement import in_place_of
from spec_ops.passes.analysis.row_regions import LAST_MASK_BIT, Order, Part, Region, find_region, find_selections, share_memory
from spec_ops.passes.analysis.rows import Axis, Demand, Layout, Plan, RowSpace, shape_of
from spec_ops.passes.analysis.selections import Selection
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten, prims = torch.ops.aten, torch.ops.prims


class HoistRowSelect(GraphPass):
    name = "hoist_row_select"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        drop_unread(graph)  # a dead reader would count as another user of the full rows
        done: set[Hashable] = set()
        gathers: set[fx.Node] = set()  # made here: no selections to hoist
        while True:
            # After every rewrite again: it replaces nodes that other selections and their indices are made of.
            selections = find_selections(graph, gathers)
            if not done:
                for node, why in selections.unclear:
                    result.refuse(node, f"selection of rows: {why}")
            order = {node: place for place, node in enumerate(graph.nodes)}
            for key, group in selections.groups.items():
                if key not in done:
                    done.add(key)
                    rewrite = _hoist(graph, find_region(group, order, context), order, result)
                    if rewrite.built:
                        gathers |= rewrite.gathers
                        break
            else:
                return


def _hoist(graph: fx.Graph, region: Region, order: Order, result: PassResult) -> _Rewrite:
    """Rewrite the parts of `region` that gain something."""
    hoisted: list[Selection] = []
    for part in region.parts(order):
        first = part.selections[0]
        if not part.products:
            for why in region.missed(part, order):
                result.refuse(first.node, f"rows {first}: {why}")
            continue
        moving = [selection for selection in part.selections if selection.source in region.plans]
        if (shared := share_memory(moving)) is not None:
            result.refuse(first.node, f"rows {first}: {shared}")
            continue
        hoisted += moving
        result.did(first.node, _describe(part, region))
    rewrite = _Rewrite(graph, region, order)
    # In the graph's order, because what one selection builds is read by later ones, also of other parts.
    for selection in sorted(hoisted, key=lambda selection: order[selection.node]):
        rewrite.replace(selection)
    if rewrite.built:
        drop_unread(graph)
    return rewrite


def _describe(part: Part, region: Region) -> str:
    calls = sum(node.target in ATTENTION_OPS for node in part.products)
    counts = ((calls, "attention call"), (len(part.products) - calls, "matrix product"))
    names = [f"{count} {name}{'s' * (count > 1)}" for count, name in counts if count]
    text = f"{region.space.wanted} of {region.space.length} rows per request in {' and '.join(names)}"
    kept = next((why for node, why in region.stops.items() if node.target in ATTENTION_OPS), None)
    return f"{text}; attention keeps all rows: {kept}" if kept else text


class _Rewrite:
    """Builds the nodes of a region for the selected rows.

    Attributes:
        built: the new node for each node and demand.
        gathers: new nodes that select rows at the region's edge.
    """

    def __init__(self, graph: fx.Graph, region: Region, order: Order) -> None:
        self.graph, self.region, self.order = graph, region, order
        self.space, self.start = region.space, region.first.start
        self.built: dict[tuple[fx.Node, Demand], fx.Node] = {}
        self.gathers: set[fx.Node] = set()
        # Plans are older than the first replacement: what they name may have been replaced since.
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._index: fx.Node | None = None

    def replace(self, selection: Selection) -> None:
        """Put what computes the rows of `selection` in its place."""
        rows = self._build(selection.source, Demand(selection.layout), selection.node)
        shape = list(value(selection.node).shape)
        if list(value(rows).shape) != shape:
            rows = insert(self.graph, selection.node, aten.reshape.default, (rows, shape))
        rows = in_place_of(selection.node, rows)
        selection.node.replace_all_uses_with(rows)
        self._replaced[selection.node] = rows

    def _build(self, node: fx.Node, wanted: Demand, before: fx.Node) -> fx.Node:
        """The selected rows of `node`, inserted before `before` unless they were built for an earlier selection."""
        order: list[tuple[fx.Node, Demand]] = []
        pending, seen = [(node, wanted)], set()
        while pending:  # not recursive: a model's depth would exceed Python's stack
            item = pending.pop()
            if item in seen or item in self.built:
                continue
            seen.add(item)
            order.append(item)
            if item[0] in self.region.plans:
                pending.extend(self.region.plans[item[0]].demands.items())
        for item in sorted(order, key=lambda item: self.order[item[0]]):
            current, current_demand = item
            if current not in self.region.plans:
                self.built[item] = self._gather(current, current_demand, before)
                continue
            step = self.region.plans[current]
            rows = {source: self.built[source, d] for source, d in step.demands.items()}
            if current.target in ATTENTION_OPS:
                self.built[item] = self._attention(current, rows, before)
                continue
            args, kwargs = _substitute(step, self._replaced | rows)
            self.built[item] = insert(self.graph, before, step.target, args, kwargs, source=current)
        return self.built[node, wanted]

    def _rows(self, before: fx.Node) -> fx.Node:
        """The index as `[bs, r]` int64, made once. The first selection comes before all others, so that all can read it."""
        if self._index is None:
            self._index = _row_index(self.region, self.graph, before)
        return self._index

    def _gather(self, node: fx.Node, wanted: Demand, before: fx.Node) -> fx.Node:
        """The selected rows of a value at the region's edge: a view if they are the same for all requests, else a gather."""
        node = self._replaced.get(node, node)
        layout, shape = wanted.layout, list(wanted.expanded or shape_of(node))

        def make(target, *args) -> fx.Node:
            return insert(self.graph, before, target, args, source=node)

        if wanted.expanded is not None:
            node = make(aten.expand.default, node, shape)
        split, places = _split(shape, layout, self.space)
        wide = node if split == shape else make(aten.reshape.default, node, split)
        rows_dim = places[-1]
        if self.start is not None:
            rows = make(aten.slice.Tensor, wide, rows_dim, self.start, self.start + self.space.wanted)
        else:
            index = self._rows(before)
            if len(places) > 1 and places[0] > rows_dim:
                index = make(aten.permute.default, index, [1, 0])
            lead = [1] * len(split)
            for place in places:
                lead[place] = split[place] if place != rows_dim else self.space.wanted
            index = make(aten.reshape.default, index, lead)
            target = list(split)
            target[rows_dim] = self.space.wanted
            rows = make(aten.gather.default, wide, rows_dim, make(aten.expand.default, index, target))
        self.gathers.add(rows)
        shrunk = self.space.shrink(shape, layout)
        return rows if list(value(rows).shape) == shrunk else make(aten.reshape.default, rows, shrunk)

    def _attention(self, node: fx.Node, rows: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
        """The call for the selected queries only, each of which sees the same keys as before."""
        changed: dict[str, Any] = {"q": rows[arg(node, "q")]}
        if isinstance(mask := arg(node, "tree_mask"), fx.Node):
            changed["tree_mask"] = rows[mask]
        elif self.region.needs_mask:
            changed |= {"tree_mask": self._causal_mask(node, before), "mask_len": self.space.length}
        else:
            changed["seq_lens"] = self._causal_lengths(node, before)
        return call_like(self.graph, before, node, changed)

    def _causal_lengths(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Query `j` of `q_len` becomes the last one of a sequence that ends with it: `seq_lens - q_len + j + 1`. Where this is
        negative (padded requests) the query saw nothing before, and sees nothing at length 0."""
        lens, count = arg(node, "seq_lens"), self.space.wanted

        def make(target, *args) -> fx.Node:
            return insert(self.graph, before, target, args, source=node)

        if self.start is not None:
            lens = make(aten.add.Tensor, lens, self.start + count - self.space.length)
        else:
            row = make(aten.reshape.default, self._rows(before), [-1])
            from_last = make(aten.sub.Tensor, make(prims.convert_element_type.default, row, torch.int32), self.space.length - 1)
            lens = make(aten.add.Tensor, lens, from_last)
        return make(aten.clamp_min.default, lens, 0)

    def _causal_mask(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Word `2 ** (j + 1) - 1` for row `j`. Ones are shifted down instead of one up, which would overflow at `j = 63`."""

        def make(target, *args, **kwargs) -> fx.Node:
            return insert(self.graph, before, target, args, kwargs, source=node)

        row = self._rows(before)
        factory = {"dtype": torch.int64, "device": value(row).device}
        ones = make(aten.full.default, list(value(row).shape), 2**63 - 1, **factory)
        back = make(aten.clamp_min.default, make(aten.rsub.Scalar, row, LAST_MASK_BIT), 0)
        below = make(aten.bitwise_right_shift.Tensor, ones, back)
        full = make(aten.full.default, [], -1, **factory)
        return make(aten.where.self, make(aten.gt.Scalar, row, LAST_MASK_BIT), full, below)


def _split(shape: list[int], layout: Layout, space: RowSpace) -> tuple[list[int], list[int]]:
    """`shape` with requests and rows as dimensions of their own, and the places of both (of rows alone without `batch`)."""
    sizes: list[int] = []
    places: dict[int, int] = {}
    axes: list[tuple[Axis, int, int]] = [(layout.rows, space.length, 1)]
    if layout.batch is not None:
        axes.append((layout.batch, space.requests, 0))
    for dim, size in enumerate(shape):
        left = size
        for axis, length, which in sorted((a for a in axes if a[0].dim == dim), key=lambda a: -a[0].post):
            outer = left // (length * axis.post)
            if outer != 1:
                sizes.append(outer)
            places[which] = len(sizes)
            sizes.append(length)
            left = axis.post
        if left != 1 or not any(axis.dim == dim for axis, _, _ in axes):
            sizes.append(left)
    return sizes, [places[which] for which in sorted(places)]


def _substitute(step: Plan, rows: dict[fx.Node, fx.Node]) -> Any:
    return fx.node.map_arg((step.args, step.kwargs), lambda node: rows.get(node, node))


def _row_index(region: Region, graph: fx.Graph, before: fx.Node) -> fx.Node:
    """The index of a region's selections as `[requests, count]` int64, negative places counted from the end."""
    first, space = region.first, region.space
    assert first.index is not None
    index, requests, count = first.index, space.requests, space.wanted

    def make(target: Any, *args: Any) -> fx.Node:
        return insert(graph, before, target, args, source=first.node)

    if math.prod(shape_of(index)) > requests * count:  # equal along the trailing dimensions
        for _ in shape_of(index)[2:]:
            index = make(aten.select.int, index, 2, 0)
    if value(index).dtype is not torch.int64:
        index = make(prims.convert_element_type.default, index, torch.int64)
    if region.wraps:
        wrapped = make(aten.add.Tensor, index, space.length)
        index = make(aten.where.self, make(aten.lt.Scalar, index, 0), wrapped, index)
    if math.prod(shape_of(index)) < requests * count:  # the same rows of every request
        return make(aten.expand.default, make(aten.reshape.default, index, [1, count]), [requests, count])
    return index if shape_of(index) == (requests, count) else make(aten.reshape.default, index, [requests, count])
