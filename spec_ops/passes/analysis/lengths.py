"""Canonical form of integer tensors of lengths and positions: which ones are `base + constant`, and of which base.

    position = committed + step;  seq_lens = where(active, position + 1, 0).to(int32)
    canonical(seq_lens)  ->  Length(base=committed, offset=step + 1, keep=active)

The walk goes through additions and subtractions of integer constants (Python numbers, `full`), conversions between int32 and
int64, copies, views that keep the elements and their order, and `where(mask, x, 0)`. It ends at anything else, which is a base.
So two lengths compare only if they are provably the same tensor plus constants.

Integers wrap around, so a form holds modulo the dtype of its node, and the base may be narrowed before the addition. Widening a
sum is different: `canonical` ends there. `length` goes on, since no length comes near 2 ** 31, where the ops check it.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from spec_ops.passes.analysis.graph import arg, insert, value
from spec_ops.passes.analysis.ranges import bounds, fits, static_shape

aten, prims = torch.ops.aten, torch.ops.prims
INTEGERS = (torch.int32, torch.int64)

_ADD = {aten.add.Tensor, aten.add.Scalar}
_SUB = {aten.sub.Tensor, aten.sub.Scalar}
_WHERE = {aten.where.self, aten.where.ScalarOther}
_CONVERT = {prims.convert_element_type.default, aten._to_copy.default}
_COPY = {aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default, aten.detach.default}
_VIEW = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
}
_FULL = {aten.full.default: "fill_value", aten.full_like.default: "fill_value", aten.scalar_tensor.default: "s"}


@dataclass(frozen=True)
class Length:
    """`base + offset` where `keep`, else 0.

    Attributes:
        base: the tensor; None for the constant `offset`.
        offset: what is added.
        keep: bool flags; None for everywhere.
        shape: of a constant; None for others, which have the elements of their base.
    """

    base: fx.Node | None
    offset: int
    keep: fx.Node | None = None
    shape: tuple[int, ...] | None = None

    def comparable(self, other: Length) -> bool:
        return (self.base, self.keep, self.shape) == (other.base, other.keep, other.shape)

    def within(self, other: Length) -> bool:
        """Provably `self <= other` in every element, if both are lengths that an op may be given."""
        if (self.base, self.shape) != (other.base, other.shape) or other.keep not in (None, self.keep):
            return False
        return 0 <= other.offset - self.offset < 2**31

    def __str__(self) -> str:
        text = f"{self.base.name}{self.offset:+d}" if self.base is not None else str(self.offset)
        return f"{text} where {self.keep.name}" if self.keep is not None else text


class Values:
    """Which nodes of a graph hold equal values, and which lengths they are.

    Inference graphs reach the passes without common-subexpression elimination: `~finished` in two draft steps is two nodes.
    `leader` maps a node to the first one that computes the same value. Nodes that are made later are their own leaders.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._leaders: dict[fx.Node, fx.Node] = {}
        first: dict[Hashable, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "get_attr":
                self._leaders[node] = first.setdefault(("get_attr", node.target), node)
            elif _is_repeatable(node):
                self._leaders[node] = first.setdefault((node.target, self.key(node.args), self.key(node.kwargs)), node)

    def leader(self, node: fx.Node) -> fx.Node:
        return self._leaders.get(node, node)

    def key(self, argument: Any) -> Hashable:
        """A key that is equal for arguments of equal value; 1, 1.0 and True differ."""
        if isinstance(argument, fx.Node):
            return self.leader(argument)
        if isinstance(argument, (list, tuple)):
            return tuple(self.key(item) for item in argument)
        if isinstance(argument, dict):
            return tuple((name, self.key(item)) for name, item in sorted(argument.items()))
        if isinstance(argument, slice):
            return ("slice", self.key((argument.start, argument.stop, argument.step)))
        return (type(argument), argument)

    def canonical(self, node: fx.Node) -> Length:
        """The exact value of `node` as `base + constant` in its own dtype; at worst itself plus 0."""
        return self._walk(node, widened=False)

    def length(self, node: fx.Node) -> Length:
        """The value of `node` if it is a number of tokens, a position or a row, which are small wherever they are used."""
        return self._walk(node, widened=True)

    def _walk(self, node: fx.Node, widened: bool) -> Length:
        """`widened`: go through a widening. There is one at most: after a narrowing, everything holds modulo 2 ** 32."""
        if not _is_integer_tensor(node):
            return Length(self.leader(node), 0)
        dtype, whole = value(node).dtype, static_shape(node)
        before: Length | None = None  # the form that ends where int32 elements are widened, and the offset of what is widened
        base: fx.Node | None
        offset, keep, shape, outside = 0, None, None, 0
        while True:
            base = node = self.leader(node)
            if whole is not None and (number := constant(node)) is not None:
                base, offset, shape = None, offset + number, whole
                break
            step = _strip(node)
            if step is None:
                break
            inner, added, mask = step
            if not isinstance(inner, fx.Node) or not _is_integer_tensor(inner) or not _same_elements(inner, node):
                break
            if mask is not None:
                mask = self._mask(mask, node)
                # where(m, x, 0) + 1 is not where(m, x + 1, 0), unless an outer where already selects by the same m.
                if mask is None or (mask is not keep and (keep is not None or offset != 0)):
                    break
            if dtype is torch.int64 and value(inner).dtype is torch.int32 and before is None:
                if not widened:
                    break
                before, outside = Length(node, offset, keep), offset + added
            node, offset, keep = inner, offset + added, mask or keep
        if before is not None and (base is None or value(base).dtype is not torch.int32):
            low, high = (0, 0) if base is None else bounds(base)
            if not fits((low + offset - outside, high + offset - outside), torch.int32):
                return before  # bits above the 31st are lost where it is narrowed
        return Length(base, _wrap(offset, dtype), keep, shape)

    def _mask(self, mask: fx.Node, node: fx.Node) -> fx.Node | None:
        """`mask` without views, if it holds one flag for each element of `node`, or a single one."""
        flags = value(mask)
        if not isinstance(flags, torch.Tensor) or flags.dtype is not torch.bool:
            return None
        if not _same_shape(flags.shape, value(node).shape):
            single = flags.dim() == 0 or (flags.dim() == 1 and statically_known_true(flags.shape[0] == 1))
            return self.leader(mask) if single else None
        mask = self.leader(mask)
        while mask.target in _VIEW and isinstance(inner := mask.args[0], fx.Node) and _same_elements(inner, mask):
            mask = self.leader(inner)
        return mask


def _wrap(number: int, dtype: torch.dtype) -> int:
    """`number` as an integer tensor of `dtype` holds it."""
    half = 2 ** (torch.iinfo(dtype).bits - 1)
    return (number + half) % (2 * half) - half


def constant(node: Any) -> int | None:
    """The integer that every element of `node` equals, if the graph shows it."""
    if isinstance(node, int) and not isinstance(node, bool):
        return node
    if not isinstance(node, fx.Node) or node.op != "call_function" or not _is_integer_tensor(node):
        return None
    if node.target in _FULL:
        fill = arg(node, _FULL[node.target])
        return fill if isinstance(fill, int) and not isinstance(fill, bool) else None
    if node.target in _CONVERT | _COPY | _VIEW:
        inner = constant(node.args[0]) if isinstance(node.args[0], fx.Node) else None
        return None if inner is None else _wrap(inner, value(node).dtype)
    return None


def _same_shape(a: Any, b: Any) -> bool:
    """Whether two shapes are equal, without guards on symbolic sizes."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def materialize(graph: fx.Graph, before: fx.Node, length: Length, like: fx.Node) -> fx.Node:
    """`length` as a new node before `before`, with dtype and shape of `like`."""
    assert length.base is not None
    dtype, shape = value(like).dtype, value(like).shape
    out = as_dtype(graph, before, _as_row(graph, before, length.base, shape), dtype)
    if length.offset:
        out = insert(graph, before, aten.add.Tensor, (out, length.offset), source=like)
    return masked(graph, before, out, length.keep, shape, like) if length.keep is not None else out


def masked(graph: fx.Graph, before: fx.Node, node: fx.Node, keep: fx.Node, shape: Any, source: fx.Node) -> fx.Node:
    """`where(keep, node, 0)`, with `keep` as one flag per request."""
    like = value(node)
    zero = insert(graph, before, aten.full.default, ([], 0), {"dtype": like.dtype, "device": like.device}, source)
    if value(keep).dim() > 1:
        keep = _as_row(graph, before, keep, shape)
    return insert(graph, before, aten.where.self, (keep, node, zero), source=source)


def _as_row(graph: fx.Graph, before: fx.Node, node: fx.Node, shape: Any) -> fx.Node:
    """`node` flattened, unless it already has the `shape` of a `[bs]` tensor."""
    return node if _same_shape(value(node).shape, shape) else insert(graph, before, aten.reshape.default, (node, [-1]))


def as_dtype(graph: fx.Graph, before: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if value(node).dtype == dtype else insert(graph, before, prims.convert_element_type.default, (node, dtype))


def _is_integer_tensor(node: fx.Node) -> bool:
    return isinstance(tensor := value(node), torch.Tensor) and tensor.dtype in INTEGERS


def _is_repeatable(node: fx.Node) -> bool:
    """Whether the same call with the same arguments gives the same value again."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem and node.op == "call_function"
    target = node.target
    name = target._schema.name
    if target.namespace not in ("aten", "prims") or target._schema.is_mutable:
        return False
    # Inductor's own random prims are not all tagged.
    return torch.Tag.nondeterministic_seeded not in target.tags and not any(word in name for word in ("rand", "seed", "empty"))


def _same_elements(inner: fx.Node, outer: fx.Node) -> bool:
    """Whether `outer` has the elements of `inner`, neither broadcast nor moved to another device."""
    a, b = value(inner), value(outer)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.device != b.device:
        return False
    if outer.target in _VIEW:
        return statically_known_true(a.numel() == b.numel())
    return _same_shape(a.shape, b.shape)


def _strip(node: fx.Node) -> tuple[Any, int, fx.Node | None] | None:
    """One step down: `(inner, added, mask)` if `node` is `inner + added`, or `where(mask, inner, 0)`; None if neither."""
    if node.op != "call_function":
        return None
    if node.target in _CONVERT | _COPY | _VIEW:
        return node.args[0], 0, None
    if node.target in _WHERE:
        other = arg(node, "other")
        mask = arg(node, "condition")
        return (arg(node, "self"), 0, mask) if constant(other) == 0 and isinstance(mask, fx.Node) else None
    if node.target in _ADD | _SUB | {aten.rsub.Tensor}:
        left, right, alpha = arg(node, "self"), arg(node, "other"), arg(node, "alpha")
        if node.target is aten.rsub.Tensor:
            left, right = right, left
        if type(alpha) is not int or alpha != 1:
            return None
        if (added := constant(right)) is not None:
            return left, added if node.target in _ADD else -added, None
        if node.target in _ADD and (added := constant(left)) is not None:
            return right, added, None
    return None
