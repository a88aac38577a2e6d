"""Which values are others rotated by RoPE, however the rotation is written.

    y[..., :r]        = x[..., :r] * cos - x[..., r : 2 * r] * sin
    y[..., r : 2 * r] = x[..., r : 2 * r] * cos + x[..., :r] * sin
    y[..., 2 * r :]   = x[..., 2 * r :]

Models write this with `rotate_half`, `chunk`, tables of half or of whole heads, before or after heads and tokens are
transposed. So a value is evaluated, not matched: by columns of its last dimension it is a sum of products of elements of other
nodes. A tensor on the device `meta` says which elements: the views of the graph are taken of it too, and its strides and offset
are theirs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, permutations, product
from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.passes.analysis.graph import arg, value
from spec_ops.passes.analysis.rows import RESHAPES, is_pointwise

aten, prims = torch.ops.aten, torch.ops.prims

_MOST_COPIES = 4  # rows that a reshape joins and that are then followed one by one
# What may be looked into: moves of elements alone, products of them too, sums of such products too.
_MOVES, _PRODUCTS, _SUMS = range(3)


# Of a view that no strides express: the second one where fake tensors are made.
NO_STRIDES = (RuntimeError, ValueError)


class NotRotatedError(Exception):
    """Why a value is not known to be another one rotated."""


class Read(NamedTuple):
    """Elements of `source`: those of `at`, a view of a tensor on `meta` that holds `source` in row-major order."""

    source: fx.Node
    at: torch.Tensor

    @property
    def place(self) -> tuple:
        """What is equal for reads of the same elements."""
        strides = tuple(stride for size, stride in zip(self.at.shape, self.at.stride(), strict=True) if size > 1)
        return self.source, tuple(self.at.shape), strides, self.at.storage_offset()


class Rotation(NamedTuple):
    """`x [n, heads, dim]` by angles `cos, sin [n, heads, r]`, whose heads are all the same."""

    x: Read
    cos: Read
    sin: Read


class _Term(NamedTuple):
    """A product of one or two factors, with a sign."""

    sign: int
    factors: tuple[Read, ...]


class _Columns(NamedTuple):
    """Some columns of a value: a sum. `whole` says where they are if they are columns of one node."""

    terms: tuple[_Term, ...]
    whole: Read | None

    @property
    def width(self) -> int:
        return self.terms[0].factors[0].at.shape[-1]

    def each(self, view: Callable[[torch.Tensor], torch.Tensor]) -> _Columns:
        def of(read: Read) -> Read:
            return Read(read.source, view(read.at))

        terms = tuple(_Term(term.sign, tuple(map(of, term.factors))) for term in self.terms)
        try:
            return _Columns(terms, None if self.whole is None else of(self.whole))
        except NO_STRIDES:  # heads lie before tokens in the sum, but not in what it is computed from
            return _Columns(terms, None)


def find_rotation(node: fx.Node, shape: tuple[int, int, int]) -> Rotation:
    """The rotation that `node` is the result of, if its elements are seen as `shape`: tokens, heads, and a head's dimensions.

    Raises:
        NotRotatedError: there is none, or none that can be told.
    """
    try:
        columns = [part.each(lambda at: at.view(*shape[:2], at.shape[-1])) for part in _evaluate(node, _SUMS)]
    except NO_STRIDES:
        raise NotRotatedError("its tokens are not rows of what it is computed from") from None
    halves, rest = columns[:2], columns[2:]
    if [len(part.terms) for part in halves] != [2, 2] or halves[0].width != halves[1].width:
        raise NotRotatedError("it is not two halves that rotate into each other")
    rotation = _rotation(*halves)
    if rotation is None:
        raise NotRotatedError("its halves are not rotated by the same angles, one for all heads")
    x, width = rotation.x, 2 * halves[0].width
    for part in rest:
        if part.whole is None or part.whole.place != _columns_of(x, width, part.width).place:
            raise NotRotatedError("the columns after those that rotate are computed")
        width += part.width
    return rotation._replace(x=_columns_of(x, 0, width))


def _columns_of(x: Read, start: int, width: int) -> Read:
    """`width` columns of what `x` has the first columns of."""
    strides = x.at.stride()
    at = x.at.new_empty(0).as_strided((*x.at.shape[:-1], width), strides, x.at.storage_offset() + start * strides[-1])
    return Read(x.source, at)


def _rotation(first: _Columns, second: _Columns) -> Rotation | None:
    """The rotation that has these halves; its `x` has the columns of the first."""
    signs = [term.sign for part in (first, second) for term in part.terms]
    pairs = [term.factors for part in (first, second) for term in part.terms]
    if sorted(signs[:2]) != [-1, 1] or signs[2:] != [1, 1] or any(len(pair) != 2 for pair in pairs):
        return None
    plus, minus = pairs[:2] if signs[0] == 1 else pairs[1::-1]
    for (x, cos), (y, sin) in product(permutations(plus), permutations(minus)):
        if y.place != _columns_of(x, first.width, first.width).place or not (_for_all_heads(cos) and _for_all_heads(sin)):
            continue
        for one, other in permutations(pairs[2:]):
            for (y2, cos2), (x2, sin2) in product(permutations(one), permutations(other)):
                if (y2.place, x2.place) == (y.place, x.place) and same_values(cos2, cos) and same_values(sin2, sin):
                    return Rotation(x, cos, sin)
    return None


def _for_all_heads(table: Read) -> bool:
    return table.at.shape[1] == 1 or table.at.stride(1) == 0


def same_values(a: Read, b: Read) -> bool:
    """Whether two reads are certain to see equal values: the same elements, or those of columns that are equal, such as the
    halves of `cat([angle, angle], -1).cos()`."""
    if a.place == b.place:
        return True
    node, shape = a.source, tuple(value(a.source).shape)
    if b.source is not node or not shape or a.at.shape != b.at.shape or a.at.stride() != b.at.stride():
        return False
    width, starts = shape[-1], [read.at.storage_offset() % shape[-1] for read in (a, b)]
    alike = a.at.storage_offset() - starts[0] == b.at.storage_offset() - starts[1] and a.at.stride(-1) == 1
    if not alike or any(stride % width for stride in a.at.stride()[:-1]):
        return False
    while node.op == "call_function" and is_pointwise(node.target) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
        if tuple(value(node).shape) != shape:
            return False
    if node is a.source:
        return False
    columns = _evaluate(node, _MOVES)
    pieces = [_cut(columns, start, start + a.at.shape[-1]) for start in starts]
    if [part.width for part in pieces[0]] != [part.width for part in pieces[1]]:
        return False
    pairs = ((one.terms[0], other.terms[0]) for one, other in zip(*pieces, strict=True))
    return all(one.sign == other.sign and same_values(one.factors[0], other.factors[0]) for one, other in pairs)


def _evaluate(node: fx.Node, depth: int) -> list[_Columns]:
    """`node` as columns of its last dimension. What `depth` does not look into is itself."""
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    found = None
    if rule is not None:
        try:
            found = rule(node, depth)
        except NO_STRIDES:  # a reshape that no strides can express
            found = None
    return [_leaf(node)] if found is None else found


def _leaf(node: fx.Node) -> _Columns:
    fake = value(node)
    if not isinstance(fake, torch.Tensor) or not all(isinstance(size, int) for size in fake.shape):
        raise NotRotatedError("the sizes of what it is computed from are not known while compiling")
    read = Read(node, torch.empty(tuple(fake.shape), device="meta"))
    return _Columns((_Term(1, (read,)),), read)


def _each(columns: list[_Columns], view: Callable[[torch.Tensor], torch.Tensor]) -> list[_Columns]:
    return [part.each(view) for part in columns]


def _cut(columns: list[_Columns], start: int, end: int) -> list[_Columns]:
    """The columns from `start` to `end`."""
    found, place = [], 0
    for part in columns:
        low, high = max(start - place, 0), min(end - place, part.width)
        if low < high:
            found.append(part if (low, high) == (0, part.width) else part.each(lambda at, a=low, b=high: at[..., a:b]))  # type: ignore[misc]
        place += part.width
    return found


def _together(node: fx.Node, columns: Sequence[list[_Columns]]) -> list[tuple[_Columns, ...]]:
    """Operands of a pointwise `node`, broadcast to its shape and cut at the same columns."""
    *rows, width = value(node).shape
    wide = [_each(c, lambda at: at.expand(*rows, width if len(c) == 1 else at.shape[-1])) for c in columns]  # noqa: B023
    ends = sorted({end for c in wide for end in accumulate(part.width for part in c)})
    return [tuple(_cut(c, start, end)[0] for c in wide) for start, end in pairwise([0, *ends])]


def _last(node: fx.Node, dim: int) -> bool:
    """Whether `dim` is the last dimension of `node`."""
    return dim % value(node).dim() == value(node).dim() - 1


def _convert(node: fx.Node, depth: int) -> list[_Columns] | None:
    source: Any = node.args[0]
    before, after = value(source).dtype, value(node).dtype
    if not (before.is_floating_point and after.is_floating_point):
        return None
    widens = torch.promote_types(before, after) == after
    if widens:
        return _evaluate(source, depth)
    if depth == _MOVES:
        return None
    # Rounding in the middle of a rotation is left out, as Inductor leaves it out of its kernels.
    whole = _leaf(node)
    columns, place = [], 0
    for part in _evaluate(source, depth):
        columns.append(part._replace(whole=_cut([whole], place, place + part.width)[0].whole))
        place += part.width
    return columns


def _same(node: fx.Node, depth: int) -> list[_Columns]:
    return _evaluate(node.all_input_nodes[0], depth)


def _neg(node: fx.Node, depth: int) -> list[_Columns]:
    columns = _evaluate(node.all_input_nodes[0], depth)
    return [_Columns(tuple(_Term(-t.sign, t.factors) for t in part.terms), None) for part in columns]


def _cat(node: fx.Node, depth: int) -> list[_Columns] | None:
    if not _last(node, arg(node, "dim")):
        return None
    parts: Any = node.args[0]
    if any(value(part).dim() != value(node).dim() for part in parts):
        return None
    return [column for part in parts for column in _evaluate(part, depth)]


def _slice(node: fx.Node, depth: int) -> list[_Columns] | None:
    source: Any = node.args[0]
    dim = arg(node, "dim") % value(source).dim()
    span = slice(arg(node, "start"), arg(node, "end"), arg(node, "step"))
    start, end, step = span.indices(value(source).shape[dim])
    return None if step != 1 else _narrowed(node, source, dim, start, end, depth)


def _narrowed(node: fx.Node, source: fx.Node, dim: int, start: int, end: int, depth: int) -> list[_Columns]:
    columns = _evaluate(source, depth)
    if _last(source, dim):
        return _cut(columns, start, end)
    return _each(columns, lambda at: at.narrow(dim, start, end - start))


def _getitem(node: fx.Node, depth: int) -> list[_Columns] | None:
    split, place = node.args
    if not isinstance(split, fx.Node) or not isinstance(place, int):
        return None
    source: Any = split.args[0]
    dim = arg(split, "dim") % value(source).dim() if split.target in (*_SPLITS, aten.unbind.int) else 0
    if split.target in _SPLITS:
        start = sum(value(split)[i].shape[dim] for i in range(place))
        return _narrowed(node, source, dim, start, start + value(node).shape[dim], depth)
    if split.target is aten.unbind.int:
        return _selected(source, dim, place, depth)
    return None


def _select(node: fx.Node, depth: int) -> list[_Columns] | None:
    source: Any = node.args[0]
    dim = arg(node, "dim") % value(source).dim()
    return _selected(source, dim, arg(node, "index") % value(source).shape[dim], depth)


def _selected(source: fx.Node, dim: int, index: int, depth: int) -> list[_Columns] | None:
    columns = _evaluate(source, depth)
    if _last(source, dim) and len(columns) > 1:
        return None
    return _each(columns, lambda at: at.select(dim, index))


def _reshape(node: fx.Node, depth: int) -> list[_Columns] | None:
    source, shape = node.all_input_nodes[0], tuple(value(node).shape)
    columns, before = _evaluate(source, depth), tuple(value(source).shape)
    if not shape or not before:
        return None
    if before[-1] == shape[-1]:
        return _each(columns, lambda at: at.view(*shape[:-1], at.shape[-1]))
    if len(before) > 1 and before[-2] <= _MOST_COPIES and before[-2] * before[-1] == shape[-1]:
        # `cat([x, x], -1)` arrives as `x.unsqueeze(-2).expand(..., 2, -1)`, reshaped, which no strides can express.
        rows = [_each(columns, lambda at, i=i: at.select(-2, i)) for i in range(before[-2])]  # type: ignore[misc]
        return [part.each(lambda at: at.view(*shape[:-1], at.shape[-1])) for row in rows for part in row]
    return None if len(columns) > 1 else _each(columns, lambda at: at.view(shape))


def _permute(node: fx.Node, depth: int) -> list[_Columns] | None:
    source = node.all_input_nodes[0]
    order = list(range(value(source).dim()))
    if node.target is aten.permute.default:
        order = [dim % len(order) for dim in arg(node, "dims")]
    elif node.target is aten.t.default:
        order.reverse()
    else:
        first, second = (arg(node, name) % len(order) for name in ("dim0", "dim1"))
        order[first], order[second] = second, first
    columns = _evaluate(source, depth)
    if len(columns) > 1 and order[-1] != len(order) - 1:
        return None
    return _each(columns, lambda at: at.permute(order))


def _expand(node: fx.Node, depth: int) -> list[_Columns] | None:
    source, shape = node.all_input_nodes[0], tuple(value(node).shape)
    columns = _evaluate(source, depth)
    if len(columns) > 1 and value(source).shape[-1] != shape[-1]:
        return None
    return _each(columns, lambda at: at.expand(*shape[:-1], shape[-1] if len(columns) == 1 else at.shape[-1]))


def _sum(node: fx.Node, depth: int) -> list[_Columns] | None:
    operands: Any = node.args
    if depth < _SUMS or node.kwargs or not all(isinstance(n, fx.Node) for n in operands):
        return None
    sign = 1 if node.target is aten.add.Tensor else -1
    leaf, columns, place = _leaf(node), [], 0
    for one, other in _together(node, [_evaluate(n, _PRODUCTS) for n in operands]):
        terms = (*one.terms, *(_Term(sign * term.sign, term.factors) for term in other.terms))
        columns.append(_Columns(terms, _cut([leaf], place, place + one.width)[0].whole))
        place += one.width
    return columns


def _product(node: fx.Node, depth: int) -> list[_Columns] | None:
    operands: Any = node.args
    if depth < _PRODUCTS or not all(isinstance(n, fx.Node) for n in operands):
        return None
    leaf, columns, place = _leaf(node), [], 0
    for one, other in _together(node, [_evaluate(n, _MOVES) for n in operands]):
        (a,), (b,) = one.terms, other.terms
        term = _Term(a.sign * b.sign, (*a.factors, *b.factors))
        columns.append(_Columns((term,), _cut([leaf], place, place + one.width)[0].whole))
        place += one.width
    return columns


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_RULES: dict[Any, Callable[[fx.Node, int], list[_Columns] | None]] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    **dict.fromkeys((aten.clone.default, aten.alias.default), _same),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), _sum),
    prims.convert_element_type.default: _convert,
    aten.neg.default: _neg,
    aten.cat.default: _cat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.expand.default: _expand,
    aten.mul.Tensor: _product,
    operator.getitem: _getitem,
}
