"""Compute products of one value with neighbouring rows of one weight together.

    q = mm(x, permute(weight[:4096], [1, 0]))                 qkv = mm(x, permute(weight, [1, 0]))
    k = mm(x, permute(weight[4096:5120], [1, 0]))     ->      q, k = qkv[:, :4096], qkv[:, 4096:5120]
    v = mm(x, permute(weight[5120:], [1, 0]))                 v = qkv[:, 5120:]

A product of few rows takes as long as its weight takes to arrive, and a small weight does not occupy all multiprocessors. As
one product they are one launch, and large enough for `skinny_mm` and for a norm in it (`lower_skinny_mm`, `fuse_norm_linear`).

The graph itself says that the weights are neighbours: they are slices of one input. So nothing has to be known of addresses,
which Inductor's guards would not hold. `spec_ops.integrations.transformers` lays a model's weights out so. Weights that are
inputs of their own would have to be copied together in every call, and stay apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.passes.analysis.graph import arg, calls, insert, value
from spec_ops.passes.analysis.replacement import in_place_of
from spec_ops.passes.analysis.rows import RESHAPES
from spec_ops.passes.analysis.stored_weights import is_stored
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten = torch.ops.aten


class _Rows(NamedTuple):
    """Rows `[start, end)` of `whole`, an input of the graph."""

    whole: fx.Node
    start: int
    end: int


class _Product(NamedTuple):
    """`node = x @ weight.T`, plus a bias if that is not None."""

    node: fx.Node
    weight: _Rows
    bias: _Rows | None


class MergeLinears(GraphPass):
    name = "merge_linears"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        found: dict[tuple, list[_Product]] = {}
        apart: dict[fx.Node, list[fx.Node]] = {}
        order = {node: place for place, node in enumerate(graph.nodes)}
        for node in calls(graph, aten.mm.default, aten.addmm.default):
            if (x := _unshaped(node.args[-2])) is None:
                continue
            if (product := _product(node)) is None:
                if is_stored(node.args[-1]):
                    apart.setdefault(x, []).append(node)
                continue
            wholes = (product.weight.whole, product.bias and product.bias.whole)
            found.setdefault((x, *wholes), []).append(product)
        for products in found.values():
            for run in _runs(products):
                _merge(graph, run, order)
                sizes = " + ".join(str(product.weight.end - product.weight.start) for product in run)
                result.did(
                    run[0].node, f"{len(run)} products of one value: weight {sizes} x {value(run[0].weight.whole).shape[1]}"
                )
        for nodes in apart.values():
            if len(nodes) > 1:
                result.refuse(nodes[0], f"{len(nodes)} products of one value: their weights are not rows of one input")


def _unshaped(node: Any) -> fx.Node | None:
    """The value that `node [m, k]` has the rows of."""
    while isinstance(node, fx.Node) and node.target in RESHAPES:
        source: Any = node.args[0]
        if not value(source).shape or value(source).shape[-1] != value(node).shape[-1]:
            break
        node = source
    return node if isinstance(node, fx.Node) else None


def _product(node: fx.Node) -> _Product | None:
    bias, _, right = (None, *node.args) if node.target is aten.mm.default else node.args
    if node.kwargs or not isinstance(right, fx.Node) or right.target is not aten.permute.default or right.args[1] != [1, 0]:
        return None
    weight, added = _rows(right.args[0]), None
    if weight is None:
        return None
    if bias is not None:
        added = _rows(bias)
        if added is None or value(bias).dim() != 1 or (added.start, added.end) != (weight.start, weight.end):
            return None
    return _Product(node, weight, added)


def _rows(node: Any) -> _Rows | None:
    """The rows of an input that `node` is a slice of."""
    if not isinstance(node, fx.Node) or node.target is not aten.slice.Tensor or arg(node, "dim") != 0 or arg(node, "step") != 1:
        return None
    whole: Any = node.args[0]
    if whole.op not in ("placeholder", "get_attr") or not isinstance(size := value(whole).shape[0], int):
        return None
    start, end, _ = slice(arg(node, "start"), arg(node, "end")).indices(size)
    return _Rows(whole, start, end)


def _runs(products: list[_Product]) -> Iterator[list[_Product]]:
    """Products of one value and one input, those together whose rows follow one another."""
    ordered = sorted(products, key=lambda product: product.weight.start)
    run = ordered[:1]
    for before, product in pairwise(ordered):
        if product.weight.start != before.weight.end:
            yield from [run] * (len(run) > 1)
            run = []
        run.append(product)
    yield from [run] * (len(run) > 1)


def _merge(graph: fx.Graph, run: list[_Product], order: Mapping[fx.Node, int]) -> None:
    nodes = {product.node for product in run}
    first = min(nodes, key=order.__getitem__)
    start, end = run[0].weight.start, run[-1].weight.end

    def rows(of: _Rows) -> fx.Node:
        if (start, end) == (0, value(of.whole).shape[0]):
            return of.whole
        return insert(graph, first, aten.slice.Tensor, (of.whole, 0, start, end))

    right = insert(graph, first, aten.permute.default, (rows(run[0].weight), [1, 0]))
    bias = run[0].bias
    added = () if bias is None else (rows(bias),)
    whole = insert(graph, first, first.target, (*added, first.args[-2], right))
    for node, weight, _ in run:
        part = insert(graph, first, aten.slice.Tensor, (whole, 1, weight.start - start, weight.end - start), source=node)
        node.replace_all_uses_with(in_place_of(node, part))
    for node in nodes:
        graph.erase_node(node)
