"""Computing integer values that differ by constants, such as one per draft step, as rows of one value.

    s1 = gather(table, (base + 1) // 16) * 16 + (base + 1) % 16
    s2 = gather(table, (base + 2) // 16) * 16 + (base + 2) % 16
->
    place = base.unsqueeze(0) + [[1], [2]]
    s = gather(table.expand(2, ...), place // 16) * 16 + place % 16;  s1, s2 = s[0], s[1]

No pattern is matched. Values belong together if the same integer ops compute them from the same values, and only the constants
of lengths (`lengths.py`) differ: their forms have equal `kind` and different `offsets`. What does not differ is computed once
and broadcast.

Inductor fuses pointwise work horizontally, but that is not enough here. It makes a buffer where an op of ours reads it, and
does not fuse buffers that are more than 64 scheduler nodes apart (`are_long_distant_nodes`) or share less than 10 bytes of
input. A target model lies between the draft steps and the draft extend.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.passes.analysis.graph import arg, insert, value
from spec_ops.passes.analysis.lengths import INTEGERS, Values, as_dtype
from spec_ops.passes.analysis.rows import RESHAPES, is_pointwise

aten, prims = torch.ops.aten, torch.ops.prims
_SAME_SHAPE = {prims.convert_element_type.default, aten._to_copy.default, aten.clone.default, aten.alias.default}
_UNTAGGED_POINTWISE = {aten.floor_divide.default}
_GATHERS = {aten.gather.default, aten.index.Tensor}
_PARTS = {aten.select.int, aten.slice.Tensor}
_FOLLOWED = RESHAPES | _SAME_SHAPE | _UNTAGGED_POINTWISE | _GATHERS | _PARTS | {aten.expand.default}

# Slot and position arithmetic is a dozen ops deep. The walk meets a shared subexpression again at every reader; the limits keep
# that from growing exponentially.
MAX_DEPTH, MAX_OFFSETS = 24, 64


class _Form(NamedTuple):
    """How a value is computed.

    Attributes:
        kind: equal for equal ops on equal values, whatever the constants are.
        offsets: the constants.
    """

    kind: int
    offsets: tuple[int, ...]


class Stacking:
    """Forms of the integer values of one graph, and their stacked computation."""

    def __init__(self, graph: fx.Graph, values: Values) -> None:
        self.graph, self.values = graph, values
        self._numbers: dict[Hashable, int] = {}
        self._forms: dict[fx.Node, _Form] = {}

    def form(self, node: fx.Node, depth: int = 0) -> _Form:
        node = self.values.leader(node)
        if node not in self._forms:
            self._forms[node] = self._form(node, depth)
        return self._forms[node]

    def computed(self, node: fx.Node) -> bool:
        """Whether `node` is integer arithmetic of this graph rather than an input or another op's result."""
        length = self.values.canonical(node)
        if not _is_static(node, INTEGERS) or not value(node).is_contiguous() or length.base is None:
            return False
        changed = length.offset != 0 or length.keep is not None or value(length.base).dtype != value(node).dtype
        return changed or self._is_followed(length.base)

    def rows(self, nodes: Sequence[fx.Node], first: fx.Node) -> list[fx.Node]:
        """`nodes`, which are of one kind with different offsets, as rows of one value. It is computed right after `first`, the
        first of them in the graph."""
        emitter = _Emitter(self, first, len(nodes))
        stacked, _ = emitter.stack(tuple(nodes))
        # The value becomes a buffer. Without one, Inductor would compute each row that an op of ours takes by itself. The fake
        # value is passed, since the op's eager form would copy.
        strides = list(value(stacked).stride())
        stacked = emitter.make(prims.inductor_force_stride_order.default, stacked, strides, result=value(stacked))
        return [emitter.make(aten.select.int, stacked, 0, i) for i in range(len(nodes))]

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _form(self, node: fx.Node, depth: int) -> _Form:
        leaf = _Form(self._number(("leaf", node)), ())
        if not _is_static(node, (*INTEGERS, torch.bool)) or depth > MAX_DEPTH:
            return leaf
        facts = (tuple(value(node).shape), value(node).dtype)
        if value(node).dtype is torch.bool:
            return self._structure(node, depth) if self._is_followed(node) else leaf
        length = self.values.canonical(node)
        inner = _Form(-1, ()) if length.base is None else self._structure(length.base, depth)
        kind = self._number(("length", inner.kind, length.keep, facts))
        offsets = (*inner.offsets, length.offset)
        return _Form(kind, offsets) if len(offsets) <= MAX_OFFSETS else leaf

    def _structure(self, node: fx.Node, depth: int) -> _Form:
        if not self._is_followed(node):
            return _Form(self._number(("leaf", node)), ())
        offsets: list[int] = []

        def key(argument: Any) -> Hashable:
            if isinstance(argument, fx.Node):
                form = self.form(argument, depth + 1)
                offsets.extend(form.offsets)
                return ("node", form.kind)
            if isinstance(argument, (list, tuple)):
                return tuple(map(key, argument))
            return self.values.key(argument)

        parts = (key(node.args), tuple((name, key(item)) for name, item in _sorted(node.kwargs).items()))
        if len(offsets) > MAX_OFFSETS:
            return _Form(self._number(("leaf", node)), ())
        return _Form(self._number((node.target, parts, tuple(value(node).shape), value(node).dtype)), tuple(offsets))

    def _is_followed(self, node: fx.Node) -> bool:
        """Whether `stack` knows how to compute several of `node` at once."""
        if node.op != "call_function" or not _is_static(node, (*INTEGERS, torch.bool)):
            return False
        if not all(_is_static(n, None) for n in node.all_input_nodes) or not node.all_input_nodes:
            return False
        if node.target is aten.index.Tensor:
            indices = list(arg(node, "indices"))
            # Otherwise the result's dimensions come in another order.
            leading = list(itertools.takewhile(lambda index: index is not None, indices))
            return bool(leading) and all(_is_static(index, INTEGERS) for index in leading) and not any(indices[len(leading) :])
        if node.target in _FOLLOWED:
            return True
        return isinstance(node.target, torch._ops.OpOverload) and is_pointwise(node.target)


class _Emitter:
    """Computes `count` values of one kind at once, after `first`. A result is a pair: the node, and whether it is stacked,
    `[count, ...]`, or one value for all."""

    def __init__(self, stacking: Stacking, first: fx.Node, count: int) -> None:
        self.values, self.graph, self.first, self.before, self.count = stacking.values, stacking.graph, first, first.next, count
        self._made: dict[tuple[fx.Node, ...], tuple[fx.Node, bool]] = {}

    def make(self, target: Any, *args: Any, result: Any = None, **kwargs: Any) -> fx.Node:
        return insert(self.graph, self.before, target, args, kwargs, self.first, result)

    def stack(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, bool]:
        nodes = tuple(map(self.values.leader, nodes))
        if len(set(nodes)) == 1:
            return nodes[0], False
        if nodes not in self._made:
            self._made[nodes] = self._structure(nodes) if value(nodes[0]).dtype is torch.bool else self._lengths(nodes)
        return self._made[nodes]

    def _lengths(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, bool]:
        like = value(nodes[0])
        lengths = [self.values.canonical(node) for node in nodes]
        offsets = [length.offset for length in lengths]
        if lengths[0].base is None:
            constants = self.make(aten.reshape.default, self._column(offsets, like), [self.count] + [1] * like.dim())
            out, stacked = self.make(aten.expand.default, constants, [self.count, *like.shape]), True
        else:
            out, stacked = self._structure(tuple(length.base for length in lengths))  # type: ignore[misc]
            out = as_dtype(self.graph, self.before, out, like.dtype)
            shape = [self.count, *like.shape] if stacked else list(like.shape)
            out = out if list(value(out).shape) == shape else self.make(aten.reshape.default, out, shape)
            if len(set(offsets)) > 1:
                column = self.make(aten.reshape.default, self._column(offsets, like), [self.count] + [1] * like.dim())
                out, stacked = self.make(aten.add.Tensor, out, column), True
            elif offsets[0]:
                out = self.make(aten.add.Tensor, out, offsets[0])
        if (keep := lengths[0].keep) is not None:
            if value(keep).shape != like.shape and value(keep).numel() == like.numel():
                keep = self.make(aten.reshape.default, keep, list(like.shape))
            zero = self.make(aten.full.default, [], 0, dtype=like.dtype, device=like.device)
            out = self.make(aten.where.self, keep, out, zero)
        return out, stacked

    def _structure(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, bool]:
        nodes = tuple(map(self.values.leader, nodes))
        first, shape = nodes[0], list(value(nodes[0]).shape)
        if len(set(nodes)) == 1:
            return first, False
        # By position, not by node: where one of them reads a value twice, another may read two values.
        operands = [self.stack(same) for same in zip(*map(_inputs, nodes), strict=True)]
        stacked = any(flag for _, flag in operands)
        if stacked and first.target in RESHAPES:
            return self.make(aten.reshape.default, operands[0][0], [self.count, *shape]), True
        if stacked and first.target in _PARTS:
            rank = value(operands[0][0]).dim() - 1
            rest = [arg(first, a.name) for a in first.target._schema.arguments[2:]]  # type: ignore[union-attr]
            return self.make(first.target, operands[0][0], arg(first, "dim") % rank + 1, *rest), True
        if stacked and first.target is aten.gather.default:
            source, index = (self._whole(*made, value(old)) for made, old in zip(operands, _inputs(first), strict=True))
            return self.make(aten.gather.default, source, arg(first, "dim") % len(shape) + 1, index), True
        if first.target is aten.index.Tensor:
            (source, several), *indices = operands
            rank = max(value(index).dim() - flag for index, flag in indices)
            aligned = [self._aligned(index, rank) if flag else index for index, flag in indices]
            if several:
                row = self._column(range(self.count), value(aligned[0]))
                aligned.insert(0, self.make(aten.reshape.default, row, [self.count] + [1] * rank))
            return self.make(aten.index.Tensor, source, aligned), stacked
        broadcast = iter([self._aligned(made, len(shape)) if flag else made for made, flag in operands])
        if stacked and first.target is aten.expand.default:
            return self.make(aten.expand.default, next(broadcast), [self.count, *shape]), True
        args, kwargs = fx.node.map_arg((first.args, _sorted(first.kwargs)), lambda _: next(broadcast))
        return self.make(first.target, *args, **kwargs), stacked

    def _aligned(self, stacked: fx.Node, rank: int) -> fx.Node:
        """`stacked` with `rank` dimensions after the first, to be broadcast."""
        count, *rest = value(stacked).shape
        missing = rank - len(rest)
        return self.make(aten.reshape.default, stacked, [count] + [1] * missing + rest) if missing > 0 else stacked

    def _whole(self, node: fx.Node, stacked: bool, like: torch.Tensor) -> fx.Node:
        """`[count, *like.shape]`, as a view if it is one value for all."""
        return node if stacked else self.make(aten.expand.default, node, [self.count, *like.shape])

    def _column(self, offsets: Sequence[int], like: torch.Tensor) -> fx.Node:
        """`[count]` offsets, computed by pointwise ops: a tensor made on the host would be copied in every round."""
        offsets = list(offsets)
        steps = {b - a for a, b in itertools.pairwise(offsets)}
        step = steps.pop() if len(steps) == 1 else 0
        options = {"dtype": like.dtype, "device": like.device, "requires_grad": False}
        if step > 0:
            return self.make(prims.iota.default, len(offsets), start=offsets[0], step=step, **options)
        index = self.make(prims.iota.default, len(offsets), start=0, step=1, **options)
        column = self.make(aten.add.Tensor, index, offsets[0])
        for i in range(1, len(offsets)):
            if offsets[i] != offsets[i - 1] + 1:
                jumped = self.make(aten.ge.Scalar, index, i)
                column = self.make(aten.where.self, jumped, self.make(aten.add.Tensor, index, offsets[i] - i), column)
        return column


def _is_static(node: Any, dtypes: Sequence[torch.dtype] | None) -> bool:
    """Whether `node` is a tensor of a static, non-empty shape (and of one of `dtypes`)."""
    tensor = value(node)
    if not isinstance(tensor, torch.Tensor) or (dtypes is not None and tensor.dtype not in dtypes):
        return False
    return all(isinstance(size, int) for size in tensor.shape) and math.prod(tensor.shape) > 0


def _sorted(kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(kwargs.items()))


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in the order of `map_arg`; one that is passed twice is there twice."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, _sorted(node.kwargs)), found.append)
    return found
