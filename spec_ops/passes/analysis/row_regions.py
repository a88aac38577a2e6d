"""Which values need their selected rows only: the analysis of `hoist_row_select`. Nothing is rewritten here.

The selections by one index are taken together. From their sources a walk goes up, from the last node to the first, so that all
readers of a node are decided before the node itself. A node belongs to the region if its result rows need the same rows of its
operands only (`analysis/rows.py`) and nothing outside the region reads its result. At the region's edge rows are gathered.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from spec_ops.backends import BackendError, select_backend
from spec_ops.backends.registry import known_while_compiling
from spec_ops.passes.analysis.graph import ATTENTION_OPS, arg, attention_call, has_arg, source_line, value
from spec_ops.passes.analysis.lengths import Values
from spec_ops.passes.analysis.replacement import escapes
from spec_ops.passes.analysis.rows import (
    Axis,
    Demand,
    NotRowwiseError,
    Plan,
    RowSpace,
    has_rows,
    is_product,
    plan,
    shape_of,
)
from spec_ops.passes.analysis.selections import Selection, selection_of
from spec_ops.passes.analysis.storage import base_of, is_view, storage_of
from spec_ops.passes.base import PassContext

LAST_MASK_BIT = 62  # of a positive int64: a row that sees all of 64 positions is -1

Order = dict[fx.Node, int]


@dataclass
class Selections:
    """The selections of a graph.

    Attributes:
        groups: by what they select.
        unclear: nodes that select something else than rows of each request, although a product is near, with the reason.
    """

    groups: dict[Hashable, list[Selection]]
    unclear: list[tuple[fx.Node, str]]


def find_selections(graph: fx.Graph, without: set[fx.Node]) -> Selections:
    """All selections of rows in `graph` other than the nodes `without`."""
    values = Values(graph)
    found = Selections(defaultdict(list), [])
    for node in graph.nodes:
        try:
            if node not in without and (selection := selection_of(node, values)) is not None:
                found.groups[selection.key].append(selection)
        except NotRowwiseError as error:
            if _has_product(node):
                found.unclear.append((node, str(error)))
    return found


@dataclass
class Part:
    """Selections that share rebuilt nodes. Unrelated selections may take the same rows by chance.

    Attributes:
        selections: in the graph's order.
        nodes: the nodes that are rebuilt for them.
        products: the matrix products and attention calls among these, which is where something is gained.
    """

    selections: list[Selection]
    nodes: set[fx.Node]
    products: list[fx.Node]


@dataclass
class Region:
    """What can be computed for the rows of `selections` only, all of which are by one index.

    Attributes:
        plans: how each node of the region computes the selected rows.
        stops: values at its edge, whose rows are gathered, with the reason why they are not in the region.
    """

    selections: list[Selection]
    plans: dict[fx.Node, Plan] = field(default_factory=dict)
    stops: dict[fx.Node, str] = field(default_factory=dict)

    @property
    def first(self) -> Selection:
        return self.selections[0]

    @property
    def space(self) -> RowSpace:
        return self.first.space

    @property
    def wraps(self) -> bool:
        """Whether negative indices count from the end, for any of the selections."""
        return any(selection.wraps for selection in self.selections)

    @property
    def needs_mask(self) -> bool:
        """Whether the selected queries are not a causal block: several rows at places that are known only at run time."""
        return self.first.start is None and self.space.wanted > 1

    def parts(self, order: Order) -> list[Part]:
        """The selections that belong together, by their first selection."""
        parts: list[tuple[list[Selection], set[fx.Node]]] = []
        for selection in self.selections:
            nodes, queue = {selection.source}, [selection.source]
            for node in queue:
                new = [n for n in (self.plans[node].demands if node in self.plans else ()) if n not in nodes]
                nodes.update(new)
                queue.extend(new)
            rebuilt = nodes & self.plans.keys() or {selection.source}
            joined = [part for part in parts if part[1] & nodes]
            parts = [part for part in parts if not part[1] & nodes]
            together = [s for part in joined for s in part[0]]
            parts.append(([*together, selection], rebuilt.union(*(part[1] for part in joined))))
        found = []
        for selections, rebuilt in parts:
            nodes = rebuilt & self.plans.keys()
            products = [node for node in nodes if self.plans[node].product]
            found.append(Part(sorted(selections, key=lambda s: order[s.node]), nodes, products))
        return sorted(found, key=lambda part: order[part.selections[0].node])

    def missed(self, part: Part, order: Order) -> Iterator[str]:
        """Why a part without products has none: the reason for each near miss. Where nothing could be gained there is none."""
        edge = {n for node in part.nodes for n in self.plans[node].demands} | {s.source for s in part.selections}
        for node in sorted(edge & self.stops.keys(), key=lambda n: -order[n]):
            if not _has_product(node) or not value(node).is_floating_point():
                continue
            if value(node).dim() == 2 and part.selections[0].layout.rows == Axis(1, 1):
                continue  # columns of one row per request
            readers = [reader for user in node.users for reader in _through_views(user)]
            if not any(is_product(reader) and reader not in part.nodes for reader in readers):  # it needs all rows anyway
                yield self.stops[node]


def find_region(selections: list[Selection], order: Order, context: PassContext) -> Region:
    """The region above `selections`, all by one index."""
    search = _Search(selections, order, context)
    barred: dict[fx.Node, str] = {}
    while True:
        region = search.walk(barred)
        # What reads it is gathered in its place: the parts of several results, a sum of ranks that was waited for.
        lost = {n: why for n, why in region.stops.items() if not has_rows(n)}
        if not lost:
            return region
        for node, why in lost.items():
            barred.update(dict.fromkeys(node.users, why))


class _Search:
    """One walk after the other, with more nodes barred each time."""

    def __init__(self, selections: list[Selection], order: Order, context: PassContext) -> None:
        self.selections, self.order, self.context = selections, order, context
        self.roots = {s.node: s for s in selections}

    def walk(self, barred: dict[fx.Node, str]) -> Region:
        """The region without the nodes `barred`, each for its reason."""
        region, demands = Region(self.selections), defaultdict[fx.Node, set[Demand]](set)
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
                found = plan(node, wanted.layout, region.space)
                if node.target in ATTENTION_OPS:
                    self._check_attention(node, region)
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
            if region.first.index is not None and reaches(node, region.first.index, self.order):
                raise NotRowwiseError(f"the index of the selection depends on the rows it selects (through {user.name})")
            other = "is returned" if user.op == "output" else f"is also read by {user.name} [{source_line(user)}]"
            raise NotRowwiseError(f"the full result {other}")

    def _check_attention(self, node: fx.Node, region: Region) -> None:
        """The call must still be one that its backend can run, and may move down to the selection."""
        if region.first.start is None and shape_of(node)[0] != region.space.requests:
            raise NotRowwiseError("the index is not one of this attention call's requests")
        last = min(self.order[root] for root in self.roots if reaches(node, root, self.order))
        for cache in (arg(node, name) for name in ("k_cache", "v_cache", "kv_cache") if has_arg(node, name)):
            for reader in _readers(base_of(cache)):
                if self.order[node] < self.order[reader] < last and reader.op == "call_function":
                    raise NotRowwiseError(
                        f"{ATTENTION_OPS[node.target]}: {reader.name} takes the cache between this call and the selection; "
                        "moving the call would copy the cache"
                    )
        if arg(node, "tree_mask") is None and region.needs_mask and region.space.length > LAST_MASK_BIT + 2:
            raise NotRowwiseError(f"{ATTENTION_OPS[node.target]}: {region.space.length} causal queries do not fit a tree mask")
        self._check_backend(node, region)

    def _check_backend(self, node: fx.Node, region: Region) -> None:
        """Fewer queries, or a mask, are another call, which the backend of this one may not support."""
        call = attention_call(node)
        if call is None:
            raise NotRowwiseError(f"{ATTENTION_OPS[node.target]}: an input has no fake value")
        arch, missing = self.context.machine(call.q.device)
        meta = known_while_compiling(replace(call.meta(), q_len=region.space.wanted))
        if isinstance(meta, str):
            raise NotRowwiseError(f"{ATTENTION_OPS[node.target]}: {meta}")
        masked = meta.tree_mask or region.needs_mask
        try:
            select_backend(replace(meta, tree_mask=masked), arch, call.backend, missing)
        except BackendError as error:
            why = "several rows of a causal call need a tree mask: " if masked and not meta.tree_mask else ""
            raise NotRowwiseError(f"{why}{error}") from None


def _has_product(node: fx.Node, limit: int = 64) -> bool:
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
