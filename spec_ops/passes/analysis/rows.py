"""Which operands of an op hold the rows of its result.

A *row* is a pair of request and query. `Layout` says where the two axes lie in a tensor's shape. Each may be a factor of a
dimension, so that `[bs, D, H]`, the flattened `[bs * D, H]` and the permuted `[heads, bs * D, H]` of a batched product can be
followed, through any reshape that keeps both axes whole. For an op that computes a row of its result from the same row of its
operands, `plan` names these operands and the call that computes fewer rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from spec_ops.ops.linear import float8_mm_op, scaled_skinny_mm_op, skinny_mm_op
from spec_ops.passes.analysis.graph import ATTENTION_OPS, arg, value

aten, prims, c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional

_UNIFORM_ATTENTION = frozenset(op for op, name in ATTENTION_OPS.items() if name not in ("mha_extend", "mla_extend"))


class NotRowwiseError(Exception):
    """Why a selection of rows cannot go through a node."""


class Axis(NamedTuple):
    """A factor of dimension `dim`, with `post` elements of that dimension to its right."""

    dim: int
    post: int


class Layout(NamedTuple):
    """Where requests and rows lie in a shape.

    Attributes:
        batch: the axis of requests; None if it does not matter, with one request or with the same rows of each.
        rows: the axis of rows.
    """

    batch: Axis | None
    rows: Axis

    def dims(self) -> set[int]:
        return {axis.dim for axis in self if axis is not None}

    def moved(self, place: Callable[[int], int]) -> Layout:
        """The same axes after every dimension went to `place(dim)`."""
        batch = None if self.batch is None else Axis(place(self.batch.dim), self.batch.post)
        return Layout(batch, Axis(place(self.rows.dim), self.rows.post))


class Demand(NamedTuple):
    """The rows of an operand that are needed.

    Attributes:
        layout: where they lie.
        expanded: the shape to expand the operand to first, if it is the same for all requests; else None.
    """

    layout: Layout
    expanded: tuple[int, ...] | None = None


class RowSpace(NamedTuple):
    """`requests` times `length` rows, of which `wanted` are used per request."""

    requests: int
    length: int
    wanted: int

    def shrink(self, shape: Sequence[int], layout: Layout) -> list[int]:
        new = list(shape)
        new[layout.rows.dim] = new[layout.rows.dim] // self.length * self.wanted
        return new


@dataclass
class Plan:
    """How an op computes the selected rows only.

    Attributes:
        demands: operands of which only some rows are needed.
        target, args, kwargs: the call, in which the nodes of `demands` are to be replaced by their selected rows.
        product: whether it is a matrix product or an attention call.
    """

    demands: dict[fx.Node, Demand]
    target: Any
    args: tuple
    kwargs: dict
    product: bool = False


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Static shape of a node, of the first result if it has several."""
    val = value(node)
    if isinstance(val, (tuple, list)) and val:
        val = val[0]
    if not isinstance(val, torch.Tensor):
        raise NotRowwiseError("its value is not a tensor")
    if not all(isinstance(size, int) for size in val.shape):
        raise NotRowwiseError("its shape is symbolic, and rows are followed through static shapes only")
    return tuple(val.shape)


def _axis_at(shape: Sequence[int], stride: int, size: int) -> Axis:
    """The axis of `size` whose logical row-major stride is `stride`."""
    after = 1
    found = None
    for dim in reversed(range(len(shape))):
        if stride % after == 0 and (after * shape[dim]) % (stride * size) == 0:
            found = Axis(dim, stride // after)
        after *= shape[dim]
    if found is None:
        raise NotRowwiseError("a reshape splits the rows' axis")
    return found


def _reshaped(source: Sequence[int], layout: Layout, shape: Sequence[int], space: RowSpace) -> Layout:
    """Where the axes of `layout` in `source` lie after a reshape to `shape`."""
    if math.prod(source) == 0:
        raise NotRowwiseError("it is empty")

    def move(axis: Axis, size: int) -> Axis:
        return _axis_at(shape, axis.post * math.prod(source[axis.dim + 1 :]), size)

    batch = None if layout.batch is None else move(layout.batch, space.requests)
    return Layout(batch, move(layout.rows, space.length))


def _operand(node: fx.Node, shape: Sequence[int], layout: Layout) -> Demand | None:
    """The rows that are needed of an operand that is broadcast to `shape`; None if it is the same for all rows."""
    own = shape_of(node)
    shift = len(shape) - len(own)

    def varies(axis: Axis) -> bool:
        return axis.dim >= shift and own[axis.dim - shift] == shape[axis.dim]

    if not varies(layout.rows):
        return None
    if layout.batch is None or varies(layout.batch):
        return Demand(layout.moved(lambda dim: dim - shift))
    expanded = [1] * shift + list(own)
    expanded[layout.batch.dim] = shape[layout.batch.dim]
    return Demand(layout, tuple(expanded))


def _plan(node: fx.Node, operands: Sequence[tuple[Any, Demand | None]], *, product: bool = False, **call: Any) -> Plan:
    demands: dict[fx.Node, Demand | None] = {}
    for operand, demand in operands:
        if isinstance(operand, fx.Node) and demands.setdefault(operand, demand) != demand:
            raise NotRowwiseError("it reads one value both by rows and across rows")
    kept = {n: d for n, d in demands.items() if d is not None}
    return Plan(kept, call.get("target", node.target), call.get("args", node.args), dict(node.kwargs), product)


def _pointwise(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    shape = shape_of(node)
    shapes = [shape_of(n) for n in node.all_input_nodes]
    if not shapes or tuple(torch.broadcast_shapes(*shapes)) != shape:
        raise NotRowwiseError("it is not a broadcast of its operands")
    return _plan(node, [(n, _operand(n, shape, layout)) for n in node.all_input_nodes])


def _same(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    """Of one operand, element by element: what ranks add up."""
    return _plan(node, [(node.args[0], Demand(layout))])


def _reshape(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    source, shape = node.all_input_nodes[0], shape_of(node)
    moved = _reshaped(shape, layout, shape_of(source), space)
    plan = _plan(node, [(source, Demand(moved))], target=aten.reshape.default, args=(source, space.shrink(shape, layout)))
    plan.kwargs = {}
    return plan


def _permute(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    rank = len(shape_of(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [dim % rank for dim in arg(node, "dims")]
    elif node.target is aten.t.default:
        order.reverse()
    else:
        first, second = arg(node, "dim0") % rank, arg(node, "dim1") % rank
        order[first], order[second] = second, first
    return _plan(node, [(node.args[0], Demand(layout.moved(lambda dim: order[dim])))])


def _expand(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    shape = shape_of(node)
    source = node.all_input_nodes[0]
    plan = _plan(node, [(source, _operand(source, shape, layout))], args=(source, space.shrink(shape, layout)))
    plan.kwargs = {}
    return plan


def _full(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    return _plan(node, [], args=(space.shrink(shape_of(node), layout), *node.args[1:]))


def _off_axis(node: fx.Node, layout: Layout, dims: Any, rank: int) -> set[int]:
    """`dims` as a set. Raises if one of them holds rows, by the `layout` of the tensor that has these dimensions."""
    listed = list(dims) if isinstance(dims, (list, tuple)) else range(rank) if dims is None else [dims]
    found = {dim % rank for dim in (listed or range(rank))} if rank else set()
    if found & layout.dims():
        raise NotRowwiseError(f"{node.target} mixes rows")
    return found


def _along(name: str) -> Callable[[fx.Node, Layout, RowSpace], Plan]:
    """An op that works along dimension(s) `name` and keeps the rank."""

    def rule(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
        _off_axis(node, layout, arg(node, name), len(shape_of(node)))
        return _plan(node, [(n, Demand(layout)) for n in node.all_input_nodes])

    return rule


def _cat(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    rank = len(shape_of(node))
    _off_axis(node, layout, arg(node, "dim"), rank)
    if any(len(shape_of(n)) != rank for n in node.all_input_nodes):
        raise NotRowwiseError("it joins tensors of several ranks")
    return _plan(node, [(n, Demand(layout)) for n in node.all_input_nodes])


def _reduce(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    """Reductions and `select`: dimensions vanish, unless kept."""
    rank = len(shape_of(node.all_input_nodes[0]))
    dims = arg(node, "dim")
    gone = {d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims]) if d is not None} or set(range(rank))
    keep = node.target is not aten.select.int and arg(node, "keepdim")
    left = list(range(rank)) if keep else [dim for dim in range(rank) if dim not in gone]
    if len(left) != len(shape_of(node)):
        raise NotRowwiseError("its dimensions are unclear")
    moved = layout.moved(lambda dim: left[dim])
    _off_axis(node, moved, list(gone), rank)
    return _plan(node, [(n, Demand(moved)) for n in node.all_input_nodes])


def _mm(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    left, right = node.args[-2:]
    bias = [(node.args[0], _operand(node.args[0], shape_of(node), layout))] if len(node.args) == 3 else []  # type: ignore[arg-type]
    if layout.dims() == {0}:
        return _plan(node, [*bias, (left, Demand(layout)), (right, None)], product=True)
    raise NotRowwiseError("rows are columns of a matrix product")


def _bmm(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    left, right = node.args
    whole = Demand(layout)
    if layout.dims() == {0}:
        return _plan(node, [(left, whole), (right, whole)], product=True)
    if layout.rows.dim == 1 and layout.dims() <= {0, 1}:
        return _plan(node, [(left, whole), (right, None)], product=True)
    if layout.rows.dim == 2 and layout.dims() <= {0, 2}:
        return _plan(node, [(left, None), (right, whole)], product=True)
    raise NotRowwiseError("requests and rows lie on both sides of a matrix product")


def _embedding(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    table, index = node.args[:2]
    if max(layout.dims()) >= len(shape_of(index)):  # type: ignore[arg-type]
        raise NotRowwiseError("rows lie inside an embedding")
    return _plan(node, [(table, None), (index, Demand(layout))])


def _index(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    source, indices = node.args[:2]
    used = [(place, index) for place, index in enumerate(indices) if index is not None]  # type: ignore[arg-type, union-attr]
    if len(used) != 1:
        raise NotRowwiseError("it indexes several dimensions")
    place, index = used[0]
    if max(layout.dims()) < place:
        return _plan(node, [(source, Demand(layout)), (index, None)])
    if place == 0 and value(index).dtype not in (torch.bool, torch.uint8) and max(layout.dims()) < len(shape_of(index)):
        return _plan(node, [(source, None), (index, Demand(layout))])
    raise NotRowwiseError("it indexes rows")


def _index_select(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    source, dim, index = node.args
    _off_axis(node, layout, dim, len(shape_of(node)))
    return _plan(node, [(source, Demand(layout)), (index, None)])


def _gather(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    source, dim, index = node.args[:3]
    shape = shape_of(node)
    _off_axis(node, layout, dim, len(shape))
    if any(shape_of(source)[d] != shape[d] for d in layout.dims()):  # type: ignore[arg-type]
        raise NotRowwiseError("it gathers some rows only")
    return _plan(node, [(source, Demand(layout)), (index, Demand(layout))])


def _norm(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    source, normalized = node.args[:2]
    rank = len(shape_of(source))  # type: ignore[arg-type]
    _off_axis(node, layout, list(range(rank - len(normalized), rank)), rank)  # type: ignore[arg-type]
    return _plan(node, [(source, Demand(layout)), *((n, None) for n in node.all_input_nodes if n is not source)])


def _getitem(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    source = node.args[0]
    if source.target not in SEVERAL_RESULTS:  # type: ignore[union-attr]
        raise NotRowwiseError(f"no rule for {source.target}")  # type: ignore[union-attr]
    return _plan(node, [(source, Demand(layout))])


def _attention(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    """Output row (b, j) reads query (b, j) and its mask word. Keys and values stay, and the rewrite adapts the lengths."""
    if layout.rows != Axis(1, 1) or layout.batch not in (None, Axis(0, 1)) or shape_of(node)[1] != space.length:
        raise NotRowwiseError("rows are not the queries of this attention call")
    for name in ("kv_indptr", "kv_indices", "seq_lens_cpu"):
        if arg(node, name) is not None:
            raise NotRowwiseError(f"{ATTENTION_OPS[node.target]} has `{name}`, which describes the lengths of all queries")
    mask = arg(node, "tree_mask")
    whole = Demand(layout)
    rest = [(n, None) for n in node.all_input_nodes if n is not arg(node, "q") and n is not mask]
    return _plan(node, [(arg(node, "q"), whole), (mask, whole), *rest], product=True)


RESHAPES = frozenset((
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
))  # fmt: skip
_REDUCTIONS = (
    aten.mean.dim, aten.sum.dim_IntList, aten.prod.dim_int, aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim,
    aten.argmax.default, aten.argmin.default, aten.any.dim, aten.all.dim, aten.logsumexp.default, aten.var.correction,
    aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, aten.linalg_vector_norm.default, aten.select.int,
)  # fmt: skip
_ALONG = {
    aten._softmax.default: "dim", aten._log_softmax.default: "dim", aten.cumsum.default: "dim", aten.cumprod.default: "dim",
    aten.sort.default: "dim", aten.sort.stable: "dim", aten.topk.default: "dim", aten.flip.default: "dims",
    prims.rev.default: "dims",
    aten.slice.Tensor: "dim", aten.split.Tensor: "dim", aten.split_with_sizes.default: "dim",
}  # fmt: skip
_NORMS = tuple(
    packet.default for name in ("native_layer_norm", "_fused_rms_norm") if (packet := getattr(aten, name, None)) is not None
)
SEVERAL_RESULTS = frozenset((
    aten.max.dim, aten.min.dim, aten.var_mean.correction, aten.std_mean.correction, aten.sort.default, aten.sort.stable,
    aten.topk.default, aten.split.Tensor, aten.split_with_sizes.default, *_NORMS,
))  # fmt: skip

_WAITS = (c10d.wait_tensor.default,) if dist.is_available() else ()

_RULES: dict[Any, Callable[[fx.Node, Layout, RowSpace], Plan]] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **{target: _along(name) for target, name in _ALONG.items()},
    **dict.fromkeys(_NORMS, _norm),
    **dict.fromkeys((aten.mm.default, aten.addmm.default), _mm),
    **dict.fromkeys(_UNIFORM_ATTENTION, _attention),
    aten.bmm.default: _bmm,
    aten.cat.default: _cat,
    aten.expand.default: _expand,
    aten.full.default: _full,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten._to_copy.default: _pointwise,
    operator.getitem: _getitem,
    # Ranks make the same calls, so they leave out the same rows.
    **dict.fromkeys((c10d.all_reduce.default, *_WAITS) if dist.is_available() else (), _same),
}


def is_pointwise(target: Any) -> bool:
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not target._schema.is_mutable


def has_rows(node: fx.Node) -> bool:
    """Whether rows can be gathered from `node`: not from several results, nor from one that is there after a `wait_tensor`."""
    return node.target not in SEVERAL_RESULTS and not any(user.target in _WAITS for user in node.users)


def is_product(node: fx.Node) -> bool:
    ours = (skinny_mm_op, scaled_skinny_mm_op, float8_mm_op)
    products = (aten.mm.default, aten.addmm.default, aten.bmm.default, *ours)
    return node.target in products or node.target in ATTENTION_OPS


def plan(node: fx.Node, layout: Layout, space: RowSpace) -> Plan:
    """How `node` computes the wanted rows alone.

    Raises:
        NotRowwiseError: it cannot, or nobody knows.
    """
    rule = _RULES.get(node.target) or (_pointwise if is_pointwise(node.target) else None)
    if node.op != "call_function" or rule is None:
        raise NotRowwiseError(f"no rule for {node.target}" if node.op == "call_function" else f"it is a {node.op}")
    shape_of(node)
    found = rule(node, layout, space)
    for operand in found.demands:
        shape_of(operand)
    return found
