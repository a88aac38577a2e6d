"""Proof that a gather from a page table reads the pages of live tokens only.

    table = page_table(r, req, base + 4, 16);  pages = gather(table, 1, (base[:, None] + arange(3)) // 16)

Token `p` of a request lies in the live prefix of a table built for length `n` if `0 <= p < n`; a table built for a longer
length holds the same page there. Positions are followed through what `lengths.py` sees through, and through adding an `arange`.

Assumed: the base of a length counts tokens, so it is not negative.
"""

from __future__ import annotations

import torch
from torch import fx

from spec_ops.passes.graph import arg, value
from spec_ops.passes.lengths import Length, Values
from spec_ops.passes.selections import iota

aten, prims = torch.ops.aten, torch.ops.prims
_CONVERT = {prims.convert_element_type.default, aten._to_copy.default}
_VIEWS = {aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
_CLAMPS = {aten.clamp.default: ("min", "max"), aten.clamp_min.default: ("min",), aten.clamp_max.default: ("max",)}


def reads_live_pages(node: fx.Node, table: fx.Node, length: Length, values: Values) -> bool:
    """Whether the gather or index `node` reads of `table`, a page table built for `length`, only entries of live tokens, each
    from the row of its own request."""
    if node.args[0] is not table or node.all_input_nodes.count(table) != 1:
        return False
    if node.target is aten.gather.default:
        column = arg(node, "index") if arg(node, "dim") % 2 == 1 else None  # row b of the index is gathered from row b
    else:
        indices = [index for index in arg(node, "indices") if index is not None]
        rows = (value(table).shape[0], 1)
        column = indices[1] if len(indices) == 2 and value(indices[0]).dim() and iota(indices[0]) == rows else None
        if column is not None and not _row_by_row(indices[0], column):
            return False
    if not isinstance(column, fx.Node) or (positions := _page_of(column, table)) is None:
        return False
    return _below(positions, length, values)


def _row_by_row(requests: fx.Node, columns: fx.Node) -> bool:
    """Whether row b of `columns` is looked up in row b: `[bs, 1]` requests with `[bs, n]` columns, or both `[bs]`."""
    shape = value(columns).shape
    return tuple(value(requests).shape) == ((shape[0], 1) if len(shape) == 2 else (shape[0],))


def _page_of(node: fx.Node, table: fx.Node) -> fx.Node | None:
    """The positions whose page numbers `node` holds, clamped at most to the width of the table."""
    page_size, pages = arg(table, "page_size"), value(table).shape[1]
    while node.op == "call_function":
        if node.target in _CONVERT or node.target in _VIEWS:
            if value(node).dim() != value(node.args[0]).dim() and value(node).shape[0] != value(node.args[0]).shape[0]:
                return None
        elif node.target in _CLAMPS:
            limits = {name: arg(node, name) for name in _CLAMPS[node.target]}
            low, high = limits.get("min"), limits.get("max")
            if (low is not None and low > 0) or (high is not None and high < pages - 1):
                return None
        elif node.target is aten.floor_divide.default or (
            node.target is aten.div.Tensor_mode and arg(node, "rounding_mode") == "floor"
        ):
            return node.args[0] if node.args[1] == page_size else None  # type: ignore[return-value]
        else:
            return None
        node = node.args[0]  # type: ignore[assignment]
    return None


def _below(positions: fx.Node, length: Length, values: Values) -> bool:
    """Whether every entry of row b is at least 0 and below `length` of request b."""
    low = high = 0
    assert length.base is not None
    requests = value(length.base).numel()
    of_requests = (requests, 1) if value(positions).dim() == 2 else (requests,)
    while True:
        found = values.canonical(positions)
        low, high = low + found.offset, high + found.offset
        if found.base is length.base:
            one_per_row = tuple(value(positions).shape) == of_requests
            return one_per_row and found.keep in (None, length.keep) and low >= 0 and high < length.offset
        parts = None if found.base is None or found.keep is not None else _plus_places(found.base)
        if parts is None or value(found.base).shape != value(positions).shape:
            return False
        positions, high = parts[0], high + parts[1]


def _plus_places(node: fx.Node) -> tuple[fx.Node, int] | None:
    """`(x, n)` if `node` is `x` plus a row of 0 to n."""
    if node.target is not aten.add.Tensor or arg(node, "alpha") != 1:
        return None
    for x, places in (node.args, node.args[::-1]):
        if isinstance(x, fx.Node) and isinstance(places, fx.Node) and _is_row(places) and (counted := iota(places)):
            return x, (counted[0] - 1) * counted[1]
    return None


def _is_row(node: fx.Node) -> bool:
    shape = value(node).shape
    return len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)
