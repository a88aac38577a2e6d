"""What may be computed for selected rows only: found without touching the graph."""

from __future__ import annotations

import torch

from spec_ops.passes.analysis.row_regions import find_region, find_selections
from spec_ops.passes.base import PassContext
from tests.helpers.hoist_harness import trace

aten = torch.ops.aten
BS, LENGTH, HIDDEN = 3, 4, 8


def head(x: torch.Tensor, row: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A head of which one row per request is used, and a product that stays whole."""
    whole = x @ w
    logits = torch.relu(whole) @ w
    return logits[torch.arange(BS), row], whole.sum()


def regions(fn, *args):
    graph = trace(fn, *args).graph
    before = [(node.name, node.target, node.args) for node in graph.nodes]
    order = {node: place for place, node in enumerate(graph.nodes)}
    found = find_selections(graph, set())
    result = [(find_region(group, order, PassContext(90)), order) for group in found.groups.values()]
    result = [(region, region.parts(order), list(region.missed(region.parts(order)[0], order))) for region, order in result]
    assert [(node.name, node.target, node.args) for node in graph.nodes] == before
    return result, found


ARGS = (torch.randn(BS, LENGTH, HIDDEN), torch.tensor([1, 0, 3]), torch.randn(HIDDEN, HIDDEN))


def test_a_region_ends_where_the_whole_value_is_read():
    ((region, (part,), _missed),), _found = regions(head, *ARGS)
    assert [node.target for node in part.products] == [aten.mm.default]
    assert aten.relu.default in {node.target for node in region.plans}
    (why,) = {why for node, why in region.stops.items() if node.target in (aten.mm.default, aten.view.default)}
    assert "is also read by sum" in why
    assert (region.space.requests, region.space.length, region.space.wanted) == (BS, LENGTH, 1)
    assert not region.needs_mask


def test_a_missed_chance_has_a_reason():
    def returned(x, row, w):
        logits = x @ w
        return logits[torch.arange(BS), row], logits

    ((_region, (part,), missed),), _found = regions(returned, *ARGS)
    assert not part.products
    assert missed == ["the full result is returned"]


def test_a_selection_that_is_not_of_rows_is_unclear():
    def other_requests(x, row, w):
        return (x @ w)[row, row]

    _regions, found = regions(other_requests, *ARGS)
    assert not found.groups
    assert [why for _, why in found.unclear] == ["its first index is not provably 0, 1, ... over the requests"]
