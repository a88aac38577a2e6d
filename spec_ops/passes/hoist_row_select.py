"""Compute only the rows that are used: `select_rows(f(x))` becomes `f(select_rows(x))`.

    hidden = attention(q) ...; logits = mm(hidden [bs * D], head); gather(logits, 1, row)
        ->   q' = gather(q, 1, row); hidden = attention(q', seq_lens - D + row + 1) ...; mm(hidden [bs], head)

A draft extend needs the logits of one row per request, so its LM head, final norm, MLP, output projection, attention output and
query projection run on that row alone; keys and values are still written for all rows. The selection moves up through every
op whose result rows need the same operand rows only (`analysis/rows.py`) and whose result nobody else reads. Where the full
value stays in use it is gathered from; no matrix product or attention call is ever computed twice. Selections by the same
index move together. The rewritten nodes take the place of the selection, which all they read precedes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from spec_ops.backends import BackendError, attention_meta, select_backend
from spec_ops.backends.registry import known_while_compiling
from spec_ops.passes.analysis.graph import ATTENTION_OPS, arg, call_like, insert, source_line, value
from spec_ops.passes.analysis.lengths import Values
from spec_ops.passes.analysis.replacement import escapes, in_place_of
from spec_ops.passes.analysis.rows import (
    SEVERAL_RESULTS,
    Axis,
    Demand,
    Layout,
    NotRowwiseError,
    Plan,
    RowSpace,
    is_product,
    plan,
    shape_of,
)
from spec_ops.passes.analysis.selections import Selection, selection_of
from spec_ops.passes.analysis.storage import base_of, is_view, storage_of
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten, prims = torch.ops.aten, torch.ops.prims
_LAST_MASK_BIT = 62  # of a positive int64: a row that sees all of 64 positions is -1


@dataclass
class Region:
    """What to rebuild: the plan of each node, and where rows are gathered instead, with the reason."""

    plans: dict[fx.Node, Plan] = field(default_factory=dict)
    stops: dict[fx.Node, str] = field(default_factory=dict)


class HoistRowSelect(GraphPass):
    name = "hoist_row_select"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        graph.eliminate_dead_code()  # a dead reader would count as another user of the full rows
        done: set[Hashable] = set()
        made: set[fx.Node] = set()
        while True:
            # Anew after every rewrite, which replaces nodes that other selections and indices are made of.
            groups = self._groups(graph, made, None if done else result)
            order = {node: place for place, node in enumerate(graph.nodes)}
            for key, selections in groups.items():
                if key not in done:
                    done.add(key)
                    hoist = _Hoist(graph, selections, order, context, result)
                    if hoist.run():
                        made |= hoist.made
                        break
            else:
                return

    def _groups(self, graph: fx.Graph, made: set[fx.Node], result: PassResult | None) -> dict[Hashable, list[Selection]]:
        """Selections by what they select, without those `made` here; `result` hears of those that are none of rows."""
        values = Values(graph)
        groups: dict[Hashable, list[Selection]] = defaultdict(list)
        for node in graph.nodes:
            try:
                if node not in made and (selection := selection_of(node, values)) is not None:
                    groups[selection.key].append(selection)
            except NotRowwiseError as error:
                if result is not None and has_product(node):
                    result.refuse(node, f"selection of rows: {error}")
        return groups


def has_product(node: fx.Node, limit: int = 64) -> bool:
    """Whether a matrix product or attention call is near above `node`: something to gain."""
    seen, queue = {node}, [node]
    for current in queue:
        if is_product(current):
            return True
        if len(seen) < limit:
            for source in current.all_input_nodes:
                if source not in seen and isinstance(value(source), torch.Tensor) and value(source).is_floating_point():
                    seen.add(source)
                    queue.append(source)
    return False


class _Hoist:
    """The rewrite for all selections by one index."""

    def __init__(
        self,
        graph: fx.Graph,
        selections: list[Selection],
        order: dict[fx.Node, int],
        context: PassContext,
        result: PassResult,
    ) -> None:
        self.graph, self.selections, self.order, self.context, self.result = graph, selections, order, context, result
        self.roots = {s.node: s for s in selections}
        self.first = selections[0]
        self.first.wraps = any(selection.wraps for selection in selections)
        self.space = self.first.space
        self.built: dict[tuple[fx.Node, Demand], fx.Node] = {}
        self.made: set[fx.Node] = set()
        # Plans are older than the first replacement: what they name may have been replaced since.
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.index: fx.Node | None = None

    def run(self) -> bool:
        """Whether anything was rewritten."""
        region = self._region()
        rewritten: list[Selection] = []
        for selections, plans in self._parts(region):
            products = [node for node in plans if region.plans[node].product]
            if not products:
                self._refuse(selections, region, plans)
                continue
            hoisted = [selection for selection in selections if selection.source in region.plans]
            if (why := share_memory(hoisted)) is not None:
                self.result.refuse(selections[0].node, f"rows {selections[0]}: {why}")
                continue
            rewritten += hoisted
            self.result.did(selections[0].node, self._describe(products, region))
        # What one selection builds, others read, also those of other parts.
        for selection in sorted(rewritten, key=lambda selection: self.order[selection.node]):
            self._replace(selection, region)
        if self.built:
            self.graph.eliminate_dead_code()
        return bool(self.built)

    def _replace(self, selection: Selection, region: Region) -> None:
        rows = self._build(selection.source, Demand(selection.layout), selection.node, region)
        shape = list(value(selection.node).shape)
        if list(value(rows).shape) != shape:
            rows = insert(self.graph, selection.node, aten.reshape.default, (rows, shape))
        rows = in_place_of(selection.node, rows)
        selection.node.replace_all_uses_with(rows)
        self.replaced[selection.node] = rows

    def _describe(self, products: list[fx.Node], region: Region) -> str:
        calls = sum(node.target in ATTENTION_OPS for node in products)
        counts = ((calls, "attention call"), (len(products) - calls, "matrix product"))
        parts = [f"{count} {name}{'s' * (count > 1)}" for count, name in counts if count]
        text = f"{self.space.wanted} of {self.space.length} rows per request in {' and '.join(parts)}"
        kept = next((why for node, why in region.stops.items() if node.target in ATTENTION_OPS), None)
        return f"{text}; attention keeps all rows: {kept}" if kept else text

    def _parts(self, region: Region) -> list[tuple[list[Selection], set[fx.Node]]]:
        """Selections that share rebuilt nodes, with these nodes: unrelated ones may take the same rows by chance."""
        parts: list[tuple[list[Selection], set[fx.Node]]] = []
        for selection in self.selections:
            nodes, queue = {selection.source}, [selection.source]
            for node in queue:
                new = [n for n in (region.plans[node].demands if node in region.plans else ()) if n not in nodes]
                nodes.update(new)
                queue.extend(new)
            rebuilt = nodes & region.plans.keys() or {selection.source}
            joined = [part for part in parts if part[1] & nodes]
            parts = [part for part in parts if not part[1] & nodes]
            together = [s for part in joined for s in part[0]]
            parts.append(([*together, selection], rebuilt.union(*(part[1] for part in joined))))
        in_order = [(sorted(part[0], key=lambda s: self.order[s.node]), part[1] & region.plans.keys()) for part in parts]
        return sorted(in_order, key=lambda part: self.order[part[0][0].node])

    def _region(self) -> Region:
        """The nodes whose selected rows are all that is read of them."""
        barred: dict[fx.Node, str] = {}
        while True:
            region = self._walk(barred)
            # A node of several results has no rows to gather from: its parts are gathered.
            lost = {n: why for n, why in region.stops.items() if n.target in SEVERAL_RESULTS}
            if not lost:
                return region
            for node, why in lost.items():
                barred.update(dict.fromkeys(node.users, why))

    def _walk(self, barred: dict[fx.Node, str]) -> Region:
        region, demands = Region(), defaultdict[fx.Node, set[Demand]](set)
        queue: list[tuple[int, fx.Node]] = []

        def demand(node: fx.Node, wanted: Demand) -> None:
            if not demands[node]:
                heapq.heappush(queue, (-self.order[node], node))
            demands[node].add(wanted)

        for selection in self.selections:
            demand(selection.source, Demand(selection.layout))
        while queue:  # from the last node to the first, so that all readers are decided before what they read
            node = heapq.heappop(queue)[1]
            try:
                if node in barred:
                    raise NotRowwiseError(barred[node])
                wanted, *others = demands[node]
                if others or wanted.expanded is not None:
                    raise NotRowwiseError("its rows are read in several ways")
                self._check_readers(node, region)
                found = plan(node, wanted.layout, self.space)
                if node.target in ATTENTION_OPS:
                    self._check_attention(node)
            except NotRowwiseError as error:
                region.stops[node] = str(error)
                continue
            region.plans[node] = found
            for source, source_demand in found.demands.items():
                demand(source, source_demand)
        return region

    def _check_readers(self, node: fx.Node, region: Region) -> None:
        if node in self.roots:
            raise NotRowwiseError("it is a selection itself")
        for user in node.users:
            if user in self.roots:
                selection = self.roots[user]
                if selection.source is node and selection.index is not node:
                    continue
            elif user in region.plans and node in region.plans[user].demands:
                continue
            if self.first.index is not None and reaches(node, self.first.index, self.order):
                raise NotRowwiseError(f"the index of the selection depends on the rows it selects (through {user.name})")
            other = "is returned" if user.op == "output" else f"is also read by {user.name} [{source_line(user)}]"
            raise NotRowwiseError(f"the full result {other}")

    def _check_attention(self, node: fx.Node) -> None:
        """The call must still be one that its backend can run, and may move down to the selection."""
        if self.first.start is None and shape_of(node)[0] != self.space.requests:
            raise NotRowwiseError("the index is not one of this attention call's requests")
        last = min(self.order[root] for root in self.roots if reaches(node, root, self.order))
        for cache in (arg(node, name) for name in ("k_cache", "v_cache", "kv_cache") if _has(node, name)):
            for reader in _readers(base_of(cache)):
                if self.order[node] < self.order[reader] < last and reader.op == "call_function":
                    raise NotRowwiseError(
                        f"{ATTENTION_OPS[node.target]}: {reader.name} takes the cache between this call and the selection; "
                        "moving the call would copy the cache"
                    )
        if arg(node, "tree_mask") is None and self._needs_mask() and self.space.length > _LAST_MASK_BIT + 2:
            raise NotRowwiseError(f"{ATTENTION_OPS[node.target]}: {self.space.length} causal queries do not fit a tree mask")
        self._check_backend(node)

    def _check_backend(self, node: fx.Node) -> None:
        """Fewer queries, or a mask, are another call, which the backend of this one may not support."""
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        given = {name: value(arg(node, name)) for name in names}
        arch, missing = self.context.machine(given["q"].device)
        fewer = replace(attention_meta(ATTENTION_OPS[node.target], tuple(given.values())), q_len=self.space.wanted)
        meta = known_while_compiling(fewer)
        if isinstance(meta, str):
            raise NotRowwiseError(f"{ATTENTION_OPS[node.target]}: {meta}")
        masked = meta.tree_mask or self._needs_mask()
        try:
            select_backend(replace(meta, tree_mask=masked), arch, given["backend"], missing)
        except BackendError as error:
            why = "several rows of a causal call need a tree mask: " if masked and not meta.tree_mask else ""
            raise NotRowwiseError(f"{why}{error}") from None

    def _needs_mask(self) -> bool:
        """Whether the selected queries are not a causal block: several rows at places known only at run time."""
        return self.first.start is None and self.space.wanted > 1

    def _build(self, node: fx.Node, wanted: Demand, before: fx.Node, region: Region) -> fx.Node:
        """The selected rows of `node`, made before `before` unless they were made earlier."""
        order: list[tuple[fx.Node, Demand]] = []
        pending, seen = [(node, wanted)], set()
        while pending:  # not recursive: a layer is deeper than Python's stack allows for long
            item = pending.pop()
            if item in seen or item in self.built:
                continue
            seen.add(item)
            order.append(item)
            if item[0] in region.plans:
                pending.extend(region.plans[item[0]].demands.items())
        for item in sorted(order, key=lambda item: self.order[item[0]]):
            current, current_demand = item
            if current not in region.plans:
                self.built[item] = self._gather(current, current_demand, before)
                continue
            step = region.plans[current]
            rows = {source: self.built[source, d] for source, d in step.demands.items()}
            if current.target in ATTENTION_OPS:
                self.built[item] = self._attention(current, rows, before)
                continue
            args, kwargs = _substitute(step, self.replaced | rows)
            self.built[item] = insert(self.graph, before, step.target, args, kwargs, source=current)
        return self.built[node, wanted]

    def _rows(self, before: fx.Node) -> fx.Node:
        """The index as `[bs, r]` int64, made once: the groups' first selection comes first."""
        if self.index is None:
            self.index = self.first.row_index(self.graph, before)
        return self.index

    def _gather(self, node: fx.Node, wanted: Demand, before: fx.Node) -> fx.Node:
        """Rows of a value that stays in use: a view for the same rows of all requests, or a gather."""
        node = self.replaced.get(node, node)
        layout, shape = wanted.layout, list(wanted.expanded or shape_of(node))

        def make(target, *args) -> fx.Node:
            return insert(self.graph, before, target, args, source=node)

        if wanted.expanded is not None:
            node = make(aten.expand.default, node, shape)
        split, places = _split(shape, layout, self.space)
        wide = node if split == shape else make(aten.reshape.default, node, split)
        rows_dim = places[-1]
        if self.first.start is not None:
            rows = make(aten.slice.Tensor, wide, rows_dim, self.first.start, self.first.start + self.space.wanted)
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
        self.made.add(rows)
        shrunk = self.space.shrink(shape, layout)
        return rows if list(value(rows).shape) == shrunk else make(aten.reshape.default, rows, shrunk)

    def _attention(self, node: fx.Node, rows: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
        """The call for the selected queries, each of which sees the keys it saw."""
        changed: dict[str, Any] = {"q": rows[arg(node, "q")]}
        if isinstance(mask := arg(node, "tree_mask"), fx.Node):
            changed["tree_mask"] = rows[mask]
        elif self._needs_mask():
            changed |= {"tree_mask": self._causal_mask(node, before), "mask_len": self.space.length}
        else:
            changed["seq_lens"] = self._causal_lengths(node, before)
        return call_like(self.graph, before, node, changed)

    def _causal_lengths(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Query j of q_len is the last of a sequence that ends with it: `seq_lens - q_len + j + 1`. Where that is negative
        (padded requests) the query saw nothing, and sees nothing at length 0."""
        lens, count = arg(node, "seq_lens"), self.space.wanted

        def make(target, *args) -> fx.Node:
            return insert(self.graph, before, target, args, source=node)

        if self.first.start is not None:
            lens = make(aten.add.Tensor, lens, self.first.start + count - self.space.length)
        else:
            row = make(aten.reshape.default, self._rows(before), [-1])
            behind = make(aten.sub.Tensor, make(prims.convert_element_type.default, row, torch.int32), self.space.length - 1)
            lens = make(aten.add.Tensor, lens, behind)
        return make(aten.clamp_min.default, lens, 0)

    def _causal_mask(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Word `2 ** (j + 1) - 1` for row j, without overflow at j = 63: ones shifted down, not one shifted up."""

        def make(target, *args, **kwargs) -> fx.Node:
            return insert(self.graph, before, target, args, kwargs, source=node)

        row = self._rows(before)
        factory = {"dtype": torch.int64, "device": value(row).device}
        ones = make(aten.full.default, list(value(row).shape), 2**63 - 1, **factory)
        back = make(aten.clamp_min.default, make(aten.rsub.Scalar, row, _LAST_MASK_BIT), 0)
        below = make(aten.bitwise_right_shift.Tensor, ones, back)
        full = make(aten.full.default, [], -1, **factory)
        return make(aten.where.self, make(aten.gt.Scalar, row, _LAST_MASK_BIT), full, below)

    def _refuse(self, selections: list[Selection], region: Region, plans: set[fx.Node]) -> None:
        """Report a chance that was missed, and only such."""
        edge = {n for node in plans for n in region.plans[node].demands} | {s.source for s in selections}
        for node in sorted(edge & region.stops.keys(), key=lambda n: -self.order[n]):
            if not has_product(node) or not value(node).is_floating_point():
                continue
            if value(node).dim() == 2 and selections[0].layout.rows == Axis(1, 1):
                continue  # columns of one row per request
            readers = [reader for user in node.users for reader in _through_views(user)]
            if not any(is_product(reader) and reader not in plans for reader in readers):  # it needs all rows anyway
                self.result.refuse(selections[0].node, f"rows {selections[0]}: {region.stops[node]}")


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


def reaches(start: fx.Node, end: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether `end` is computed from `start`."""
    seen, queue = {start}, [start]
    for node in queue:
        if node is end:
            return True
        for user in node.users:
            if user not in seen and order.get(user, math.inf) <= order[end]:
                seen.add(user)
                queue.append(user)
    return False


def _has(node: fx.Node, name: str) -> bool:
    return any(argument.name == name for argument in node.target._schema.arguments)  # type: ignore[union-attr]


def share_memory(selections: list[Selection]) -> str | None:
    """Why what replaces selections would have memory of its own where they share some; None if it would not."""
    memory = [storage_of(s.node, written=True) for s in selections if is_view(s.node) and escapes(s.node)]
    return "several views of the rows are returned, and share memory" if len(set(memory)) < len(memory) else None


def _through_views(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, or what reads it if it is a view."""
    return itertools.chain.from_iterable(map(_through_views, node.users)) if is_view(node) else iter([node])


def _readers(base: fx.Node) -> Iterator[fx.Node]:
    """Nodes that may write what `base` holds: those that take it, other than attention calls and element reads of a tuple."""
    for user in base.users:
        if is_view(user):
            yield from _readers(user)
        elif user.target not in ATTENTION_OPS and user.target is not operator.getitem:
            yield user
