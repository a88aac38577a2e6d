"""Proof that a reader of a page table sees the same in a table that was built for a longer length.

    table = page_table(r, req, base + 4, 16);  pages = gather(table, 1, (base[:, None] + arange(3)) // 16)

Token `p` of a request lies in the live prefix of a table built for length `n` if `0 <= p < n`. A table built for a longer
length holds the same page there. Positions are followed through the ops that `lengths.py` goes through, and through additions
of values whose range is known. An attention call reads as many entries as the pages of its cache need.

Positions may be negative: the base may be -1 where a request is finished, so that its length of `base + 1` is 0. A `gather`
takes no negative index, and `index` wraps it around to an entry that no length reaches. A clamped index may read the first
entry of an empty row, which a longer table fills: `Read.may_be_empty`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.passes.analysis.graph import arg, value
from spec_ops.passes.analysis.lengths import INTEGERS, Length, Values
from spec_ops.passes.analysis.ranges import bounds, static_shape
from spec_ops.passes.analysis.selections import iota

aten, prims = torch.ops.aten, torch.ops.prims
_CONVERT = {prims.convert_element_type.default, aten._to_copy.default}
_VIEWS = {aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
_CLAMPS = {aten.clamp.default: ("min", "max"), aten.clamp_min.default: ("min",), aten.clamp_max.default: ("max",)}


class Table(NamedTuple):
    """A page table: one entry for each `page_size` tokens of `length`, then zeros up to the width of `node`."""

    node: fx.Node
    length: Length
    page_size: int


class Read(NamedTuple):
    """A read of live entries.

    Attributes:
        may_be_empty: whether it may read the first entry where the table's own length is 0.
    """

    may_be_empty: bool


class _Columns(NamedTuple):
    """`positions // page_size`, clamped to 0 from below if `clamped`."""

    positions: fx.Node
    clamped: bool


def read_of(node: fx.Node, table: Table, longer: Length, values: Values) -> Read | None:
    """How the gather or index `node` reads `table`, if it provably reads the same in a table built for `longer`: entries of
    live tokens, each from the row of its own request. None if there is no proof."""
    if node.args[0] is not table.node or node.all_input_nodes.count(table.node) != 1:
        return None
    if any(static_shape(operand) is None for operand in node.all_input_nodes):
        return None
    wraps = node.target is aten.index.Tensor
    if not wraps:
        column = arg(node, "index") if arg(node, "dim") % 2 == 1 else None  # row b of the index is gathered from row b
    else:
        indices = [index for index in arg(node, "indices") if index is not None]
        rows = (value(table.node).shape[0], 1)
        by_rows = len(indices) == 2 and value(indices[0]).dtype in INTEGERS and iota(indices[0]) == rows
        column = indices[1] if by_rows and _row_by_row(indices[0], indices[1]) else None
    if not isinstance(column, fx.Node) or (columns := _columns(column, table)) is None:
        return None
    least = _least_below(columns.positions, table.length, values)
    if least is None:
        return None
    if columns.clamped or not wraps:
        return Read(may_be_empty=columns.clamped)
    # Position `base + least` is negative where base < -least. Less than `longer.offset - least` tokens are live there.
    wrapped = value(table.node).shape[1] + (least - table.length.offset) // table.page_size
    return Read(may_be_empty=False) if wrapped * table.page_size >= longer.offset - least else None


def _row_by_row(requests: fx.Node, columns: fx.Node) -> bool:
    """Whether row b of `columns` is looked up in row b: `[bs, 1]` requests with `[bs, n]` columns, or both `[bs]`."""
    shape = static_shape(columns)
    return shape is not None and len(shape) in (1, 2) and static_shape(requests) == (shape[0], 1)[: len(shape)]


def _columns(node: fx.Node, table: Table) -> _Columns | None:
    """The positions whose page indices `node` holds, if these are at most clamped to the table's width."""
    clamped = False
    while node.op == "call_function":
        if node.target in _CONVERT or node.target in _VIEWS:
            inner = node.args[0]
            if value(inner).dtype not in INTEGERS or value(node).dtype not in INTEGERS:
                return None
            if static_shape(inner) is None or static_shape(inner)[:1] != static_shape(node)[:1]:  # type: ignore[index]
                return None  # its rows are not those of the positions
        elif node.target in _CLAMPS:
            limits = {name: arg(node, name) for name in _CLAMPS[node.target]}
            low, high = limits.get("min"), limits.get("max")
            if not all(limit is None or type(limit) is int for limit in (low, high)):
                return None
            if (low is not None and low > 0) or (high is not None and high < value(table.node).shape[1] - 1):
                return None
            clamped = clamped or low == 0
        elif node.target is aten.floor_divide.default or (
            node.target is aten.div.Tensor_mode and arg(node, "rounding_mode") == "floor"
        ):
            positions, divisor = node.args[:2]
            whole = isinstance(positions, fx.Node) and type(divisor) is int and divisor == table.page_size
            return _Columns(positions, clamped) if whole else None  # type: ignore[arg-type]
        else:
            return None
        node = node.args[0]  # type: ignore[assignment]
    return None


def _least_below(positions: fx.Node, length: Length, values: Values) -> int | None:
    """`n` if every entry of row b is at least `base + n` and less than `length` of request b."""
    low = high = 0.0
    shape = static_shape(positions)
    if shape is None or length.base is None or (base := static_shape(length.base)) is None:
        return None
    while True:
        found = values.length(positions)
        low, high = low + found.offset, high + found.offset
        if found.base is length.base:
            one_per_row = static_shape(positions) == (torch.Size(base).numel(), 1)[: len(shape)]
            return int(low) if one_per_row and found.keep in (None, length.keep) and high < length.offset else None
        parts = None if found.base is None or found.keep is not None else _plus_range(found.base)
        if parts is None or static_shape(found.base) != static_shape(positions):
            return None
        positions, least, most = parts
        low, high = low + least, high + most


def _plus_range(node: fx.Node) -> tuple[fx.Node, float, float] | None:
    """`(x, low, high)` if `node` is `x` plus a row of values from `low` to `high`, the same for all requests."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or arg(node, "alpha") != 1:
        return None
    for x, places in (node.args,) if node.target is aten.sub.Tensor else (node.args, node.args[::-1]):
        if isinstance(x, fx.Node) and isinstance(places, fx.Node) and _is_row(places) and value(places).dtype in INTEGERS:
            low, high = bounds(places)
            if max(-low, high) < 2**16:  # a few places, so that the sum does not wrap around
                return (x, low, high) if node.target is aten.add.Tensor else (x, -high, -low)
    return None


def _is_row(node: fx.Node) -> bool:
    shape: Any = static_shape(node)
    return shape is not None and (len(shape) == 1 or (len(shape) == 2 and shape[0] == 1))
