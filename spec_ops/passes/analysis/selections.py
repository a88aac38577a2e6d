"""Recognizes selections of some of the rows of each request."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from spec_ops.passes.analysis.graph import arg, value
from spec_ops.passes.analysis.lengths import INTEGERS, Values
from spec_ops.passes.analysis.rows import RESHAPES, Axis, Layout, NotRowwiseError, RowSpace, is_pointwise, shape_of

aten, prims = torch.ops.aten, torch.ops.prims
_COPIES = {prims.convert_element_type.default, aten._to_copy.default, aten.clone.default, aten.alias.default}
_FULL_STOP = 2**63 - 1


@dataclass
class Selection:
    """Some rows of each request.

    Attributes:
        node: the selected rows.
        source: the value that they are selected from.
        space: how many rows there are, and how many are selected.
        layout: where requests and rows lie in `source`.
        key: equal for selections of the same rows.
        start: the first row, if the same block of rows is selected of every request; else None.
        index: the node that holds the rows' numbers, if they are not a block; else None.
        wraps: whether negative indices count from the end.
    """

    node: fx.Node
    source: fx.Node
    space: RowSpace
    layout: Layout
    key: Hashable
    start: int | None = None
    index: fx.Node | None = None
    wraps: bool = False

    def __str__(self) -> str:
        if self.start is not None:
            return f"{self.start} to {self.start + self.space.wanted - 1} of {self.space.length}"
        return f"by {self.index.name} of {self.space.length}" if self.index is not None else ""


def selection_of(node: fx.Node, values: Values) -> Selection | None:
    """`node` as a selection of rows; None if it is not a selection.

    Raises:
        NotRowwiseError: it selects, but not rows of each request.
    """
    if node.op != "call_function" or node.target not in _FORMS:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if not isinstance(value(source), torch.Tensor) or not value(source).dim():
        return None
    found = _FORMS[node.target](node, source, values)
    if found is None or not 0 < found.space.wanted < found.space.length or found.space.requests == 0:
        return None
    if found.space.requests == 1 or found.start is not None:
        found.layout = Layout(None, found.layout.rows)
    return found


def _requests_by_rows(source: fx.Node) -> tuple[int, int]:
    shape = shape_of(source)
    return shape[0], shape[1]


def _block(node: fx.Node, source: fx.Node, start: int, count: int) -> Selection:
    requests, length = _requests_by_rows(source)
    space = RowSpace(requests, length, count)
    return Selection(node, source, space, Layout(Axis(0, 1), Axis(1, 1)), (space, start), start=start)


def _indexed(node: fx.Node, source: fx.Node, count: int, index: fx.Node, values: Values, wraps: bool) -> Selection:
    requests, length = _requests_by_rows(source)
    if wraps and value(index).dtype in (torch.bool, torch.uint8):
        raise NotRowwiseError("the index is a mask")
    space = RowSpace(requests, length, count)
    key = (space, values.leader(index))
    return Selection(node, source, space, Layout(Axis(0, 1), Axis(1, 1)), key, index=index, wraps=wraps)


def _select(node: fx.Node, source: fx.Node, values: Values) -> Selection | None:
    rank, place = value(source).dim(), arg(node, "index")
    if rank < 2 or arg(node, "dim") % rank != 1:
        return None
    if not isinstance(place, int):
        raise NotRowwiseError("the row is a symbolic number")
    return _block(node, source, place % shape_of(source)[1], 1)


def _slice(node: fx.Node, source: fx.Node, values: Values) -> Selection | None:
    rank = value(source).dim()
    if rank < 2 or arg(node, "dim") % rank != 1:
        return None
    start, stop, step = (arg(node, name) for name in ("start", "end", "step"))
    if not all(part is None or isinstance(part, int) for part in (start, stop, step)):
        raise NotRowwiseError("the bounds of the rows are symbolic numbers")
    if step != 1:
        return None
    start, stop, _ = slice(start, None if stop == _FULL_STOP else stop).indices(shape_of(source)[1])
    return _block(node, source, start, stop - start)


def _gather(node: fx.Node, source: fx.Node, values: Values) -> Selection | None:
    rank, index = value(source).dim(), arg(node, "index")
    if rank < 2 or arg(node, "dim") % rank != 1:
        return None
    whole, picked = shape_of(source), shape_of(index)
    if picked[:1] + picked[2:] != whole[:1] + whole[2:]:
        raise NotRowwiseError("it takes a part of each row")
    if not all(_constant_along(index, dim) for dim in range(2, rank)):
        raise NotRowwiseError("the index varies inside a row")
    return _indexed(node, source, picked[1], _root(index, picked[0] * picked[1]), values, wraps=False)


def _index(node: fx.Node, source: fx.Node, values: Values) -> Selection | None:
    indices = list(node.args[1])  # type: ignore[arg-type]
    used = [place for place, index in enumerate(indices) if index is not None]
    if used == [0] and value(indices[0]).dtype not in (torch.bool, torch.uint8):
        return _flat(node, source, indices[0], values)
    if used == [1] and value(source).dim() >= 2 and len(shape_of(indices[1])) == 1:
        return _indexed(node, source, shape_of(indices[1])[0], indices[1], values, wraps=True)
    if used != [0, 1]:
        return None
    requests, _ = _requests_by_rows(source)
    request, row = indices
    lead, shape = shape_of(request), shape_of(row)
    several = len(shape) == 2
    if lead != ((requests, 1) if several else (requests,)) or shape[:1] != (requests,) or len(shape) > 2:
        raise NotRowwiseError("it does not take the same number of rows of each request")
    if iota(request) != (requests, 1):
        raise NotRowwiseError("its first index is not provably 0, 1, ... over the requests")
    return _indexed(node, source, shape[1] if several else 1, _root(row, math.prod(shape)), values, wraps=True)


def _index_select(node: fx.Node, source: fx.Node, values: Values) -> Selection | None:
    dim, index = arg(node, "dim") % value(source).dim(), arg(node, "index")
    if dim == 0:
        return _flat(node, source, index, values)
    if dim != 1:
        return None
    return _indexed(node, source, math.prod(shape_of(index)), index, values, wraps=False)


def _flat(node: fx.Node, source: fx.Node, index: fx.Node, values: Values) -> Selection | None:
    """Rows `b * D + j` of a flattened `[bs * D, ...]`, where `j` is provably in `[0, D)`: other values would be rows of another
    request."""
    parts = index.args if index.target is aten.add.Tensor and arg(index, "alpha") == 1 else ()
    for first, row in (parts, tuple(reversed(parts))) if len(parts) == 2 else ():
        if not isinstance(first, fx.Node) or not isinstance(row, fx.Node) or (found := iota(first)) is None:
            continue
        requests, length = found
        if requests * length != shape_of(source)[0] or shape_of(index) != (requests,) or shape_of(row) != (requests,):
            continue
        low, high = _bounds(row, length)
        if low < 0 or high >= length:
            break
        space = RowSpace(requests, length, 1)
        root = _root(row, requests)
        key = (space, values.leader(root))
        return Selection(node, source, space, Layout(Axis(0, length), Axis(0, 1)), key, index=root)
    if len(shape_of(source)) == 2 and source.op == "call_function":
        raise NotRowwiseError("the rows are not provably request * rows + row")
    return None


_FORMS = {
    aten.gather.default: _gather,
    aten.index.Tensor: _index,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.index_select.default: _index_select,
}


def _constant_along(node: fx.Node, dim: int) -> bool:
    """Whether all entries of `node` along `dim` are provably equal."""
    shape = shape_of(node)
    if dim < 0 or shape[dim] == 1:
        return True
    if node.op != "call_function":
        return False
    if node.target is aten.full.default:
        return True
    if node.target is not aten.expand.default and not is_pointwise(node.target) and node.target not in _COPIES:
        return False
    return all(_constant_along(n, dim - len(shape) + len(shape_of(n))) for n in node.all_input_nodes)


def _root(index: fx.Node, count: int) -> fx.Node:
    """The node that holds the `count` entries of `index` in order, before they are expanded along trailing dimensions. Widening
    conversions are seen through, others are not, since they may change values."""
    lead = shape_of(index)[: 2 if len(shape_of(index)) > 1 else 1]
    node, found = index, index
    while node.op == "call_function":
        if node.target is aten.expand.default and math.prod(shape_of(node)) != count:
            inner = node.args[0]
            if len(shape_of(inner)) != len(shape_of(node)) or shape_of(inner)[: len(lead)] != lead:  # type: ignore[arg-type]
                break
        elif node.target in _COPIES:
            types = {value(n).dtype for n in (node, *node.all_input_nodes)}
            if types - {value(node).dtype} and (value(node).dtype is not torch.int64 or types != {torch.int32, torch.int64}):
                break
        elif node.target not in RESHAPES and node.target is not aten.expand.default:
            break
        node = node.args[0]  # type: ignore[assignment]
        if math.prod(shape_of(node)) == count:
            found = node
        elif node.target is not aten.expand.default:
            break
    return found


def iota(node: fx.Node) -> tuple[int, int] | None:
    """`(n, step)` if `node` holds 0, step, ..., (n - 1) * step."""
    count, scale = math.prod(shape_of(node)), 1
    current: Any = node
    while isinstance(current, fx.Node) and current.op == "call_function" and math.prod(shape_of(current)) == count:
        if value(current).dtype not in INTEGERS:  # a narrower one wraps around
            break
        args: tuple[Any, ...] = current.args
        if current.target in _COPIES or current.target in RESHAPES:
            current = args[0]
        elif current.target is aten.mul.Tensor and isinstance(args[1], int):
            current, scale = args[0], scale * args[1]
        elif current.target is aten.add.Tensor and args[1] == 0:
            current = args[0]
        elif current.target is aten.arange.default:
            return count, scale
        elif current.target is prims.iota.default or current.target is aten.arange.start_step:
            start, step = (arg(current, name) for name in ("start", "step"))
            return (count, scale * step) if type(start) is int and start == 0 and type(step) is int else None
        else:
            break
    return None


def _bounds(node: Any, length: int) -> tuple[float, float]:
    """Provable bounds of an integer tensor."""
    low, high = -math.inf, math.inf
    while isinstance(node, fx.Node) and node.op == "call_function" and value(node).dtype in (torch.int32, torch.int64):
        if node.target in (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default):
            minimum = arg(node, "min") if node.target is not aten.clamp_max.default else None
            maximum = arg(node, "max") if node.target is not aten.clamp_min.default else None
            if isinstance(maximum, fx.Node):  # it may lie below all that is known further in
                break
            # From the outside in, and the maximum first as `clamp` does: a limit holds unless one further out overrides it.
            if maximum is not None and high == math.inf:
                high = max(maximum, low)
            if isinstance(minimum, fx.Node):
                break
            if minimum is not None and low == -math.inf:
                low = min(minimum, high, math.inf if maximum is None else maximum)
        elif node.target is aten.remainder.Scalar and isinstance(node.args[1], int) and node.args[1] > 0:
            return min(max(low, 0), high), max(min(high, node.args[1] - 1), low)
        elif node.target not in RESHAPES and node.target not in _COPIES:
            break
        node = node.args[0]
    return low, high
