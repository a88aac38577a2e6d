"""Rows that a graph rounds to float8 before they meet a weight: the numbers, and the scales that multiply them.

    steps = div(amax(abs(rows), [-1], True), 448)
    numbers = convert(div(rows, steps), float8_e4m3fn)
    mm(view(convert(mul(convert(numbers), steps))), permute(weight))

is what `StoredTensor` traces to whose `inputs` are float8. How numbers and steps come about does not matter: any float8 times
scales will do, as long as a scale is of a row, of 128 columns of it, or of all rows.

    _scaled_mm(numbers, permute(weight), steps, permute(scale), bias)

is what torchao's `Float8Tensor` traces to that rounds its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.backends.weight_format import BLOCK, SCALE_DTYPES
from spec_ops.passes.analysis.graph import arg, insert, value
from spec_ops.passes.analysis.rows import RESHAPES, is_pointwise
from spec_ops.passes.analysis.stored_weights import (
    SAME,
    NoFormatError,
    StoredWeight,
    factors_of,
    is_float,
    is_stored,
    peeled,
    spread_of,
)

aten, prims = torch.ops.aten, torch.ops.prims
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CONSTANTS = {aten.scalar_tensor.default, aten.full.default}
FirstNodes = dict[Any, fx.Node]  # of each value that was looked at, by what computes it and by all nodes that do


class RoundedRows(NamedTuple):
    """Rows `[m, k]` as the graph has them.

    Attributes:
        numbers: float8_e4m3fn, of any shape that holds them row after row.
        scales: as many as there are groups of columns, row after row; or one.
        columns: of a row that share a scale; k if all do.
    """

    numbers: fx.Node
    scales: fx.Node
    columns: int

    def insert(self, graph: fx.Graph, before: fx.Node, m: int, k: int, first: FirstNodes) -> tuple[fx.Node, fx.Node]:
        """Nodes of the numbers and their scales, as `float8_mm` takes them; of products that round the same rows alike, those
        of the first.

        Args:
            graph: that they are in.
            before: the product, which comes after those that were asked about earlier.
            m, k: its rows and columns.
            first: of the graph; it grows.
        """
        x, scales = first_of(self.numbers, first), first_of(self.scales, first)
        if tuple(value(x).shape) != (m, k):
            x = insert(graph, before, aten.reshape.default, (x, [m, k]))
        fake = value(x)
        if fake.stride(1) != 1 or fake.stride(0) % 16 or fake.stride(0) < k or fake.storage_offset() % 16:
            x = insert(graph, before, aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
        if value(scales).dtype != torch.float32 and not is_stored(scales):
            # Inductor keeps in float32 what it computes in between: this is what it divides rows by.
            scales = first_of(insert(graph, before, prims.convert_element_type.default, (scales, torch.float32)), first)
        shape = (1, 1) if value(scales).numel() == 1 else (m, k // self.columns)
        if tuple(value(scales).shape) != shape:
            scales = insert(graph, before, aten.reshape.default, (scales, list(shape)))
        return x, scales


def rounded_rows(x: fx.Node) -> RoundedRows | None:
    """What `x [m, k]`, of known sizes, is float8 times scales of; None if it is something else.

    Raises:
        NoFormatError: it is, but of float8 or scales that no kernel takes.
    """
    product, k = _content(x), value(x).shape[1]
    if product.target is not aten.mul.Tensor:
        return None
    for factor, scales in factors_of(product):
        numbers = _content(factor)
        if value(numbers).dtype not in _FLOAT8 or value(scales).dtype not in SCALE_DTYPES:
            continue
        if value(factor).shape != (shape := value(product).shape):
            raise NoFormatError("its rows of float8 are fewer than their scales")
        return _checked(numbers, *_columns(scales, shape, k), k)
    return None


def scaled_mm(node: fx.Node) -> tuple[fx.Node | None, RoundedRows, StoredWeight] | None:
    """The bias, the rows and the weight of a product `node` by `_scaled_mm`, of known sizes; None for any other node.

    Raises:
        NoFormatError: rows, weight or scales that no kernel takes.
    """
    if node.target is not aten._scaled_mm.default:
        return None
    x, right, scales, scale, bias = (arg(node, name) for name in ("self", "mat2", "scale_a", "scale_b", "bias"))
    m, k = value(x).shape
    if arg(node, "scale_result") is not None:
        raise NoFormatError("its result has a scale")
    if value(scales).dtype != torch.float32 or value(scale).dtype != torch.float32:
        raise NoFormatError("its scales are not float32")
    data, flipped = peeled(right, True)
    if not is_stored(data):
        raise NoFormatError("the weight is computed here")
    whole = value(scale).numel() == 1
    if value(scale).dim() != 2 and not whole:
        raise NoFormatError(f"its weight's scales are of shape {list(value(scale).shape)}")
    shape = (1, 1) if whole else tuple(value(scale).shape)[::-1]
    if value(scales).numel() > 1 and (value(scales).dim() != 2 or value(scales).shape[0] != m or k % value(scales).shape[1]):
        raise NoFormatError(f"its rows' scales are of shape {list(value(scales).shape)}")
    columns = k if value(scales).numel() == 1 else k // value(scales).shape[1]
    weight = StoredWeight(data, flipped, scale, not whole, shape)
    return bias, _checked(x, scales, columns, k), weight


def _content(node: Any) -> Any:
    """`node` without reshapes, conversions to floats of 16 bits or more, and copies."""
    while node.op == "call_function" and (node.target in RESHAPES or node.target in SAME or is_float(node)):
        node = node.args[0]
    return node


def _columns(scales: fx.Node, shape: Sequence[int], k: int) -> tuple[fx.Node, int]:
    """The scales that a product of `shape` has once each, and how many of its columns share one; k if all of a row do."""
    own = value(scales).shape
    if own.numel() == 1:
        return scales, k
    if (*(1,) * (len(shape) - len(own)), *own) == (*shape[:-1], 1):
        return scales, shape[-1]
    if len(own) == len(shape) == 2:
        base, swapped, (rows, columns) = spread_of(scales)
        columns = shape[1] if value(base).shape[-1] == 1 else columns
        if not swapped and rows == 1 and columns > 1 and tuple(value(base).shape) == (shape[0], shape[1] // columns):
            return base, columns
    raise NoFormatError(f"its rows of float8, {list(shape)}, have scales of shape {list(own)}")


def _checked(numbers: fx.Node, scales: fx.Node, columns: int, k: int) -> RoundedRows:
    if (dtype := value(numbers).dtype) != torch.float8_e4m3fn:
        raise NoFormatError(f"its rows are {dtype}, not float8_e4m3fn")
    if columns not in (BLOCK, k) or k % columns:
        raise NoFormatError(f"its rows have a scale for {columns} columns, not for {BLOCK} or all")
    return RoundedRows(numbers, scales, columns)


def first_of(node: Any, first: FirstNodes) -> Any:
    """The first node that computes what `node` does, from the same values by the same operations."""
    if node in first:
        return first[node]
    known = node.target in RESHAPES or node.target in _CONSTANTS or node.target is aten.amax.default
    if node.op != "call_function" or not (known or is_pointwise(node.target)):
        return node
    given = fx.node.map_arg((node.args, node.kwargs), lambda operand: first_of(operand, first))
    # Nodes are written by their names, of which a graph has one each.
    first[node] = first.setdefault((node.target, repr(given)), node)
    return first[node]
