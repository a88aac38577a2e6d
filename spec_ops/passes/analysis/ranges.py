"""Ranges of the values of integer tensors, from dtypes, constants, `arange`, clamps and remainders in the graph.

    (arange(4) * -2).clamp(min=-3)   ->   (-3, 0)

Unknown values have the range of their dtype. So has a result that may exceed its dtype, because it wraps around.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from spec_ops.passes.analysis.graph import arg, value

aten, prims = torch.ops.aten, torch.ops.prims

_Range = tuple[float, float]
ANYTHING: _Range = (-math.inf, math.inf)

# The elements of the result are elements of the first argument.
_PARTS = frozenset((
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.select.int, aten.slice.Tensor, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.flip.default, aten.gather.default, aten.index.Tensor, aten.index_select.default,
    aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default,
    prims.convert_element_type.default, aten._to_copy.default,
))  # fmt: skip

# Bounds are found nearby. The limit keeps shared subexpressions from being visited exponentially often.
MAX_DEPTH = 8


def static_shape(node: Any) -> tuple[int, ...] | None:
    """The shape of a tensor, None if it has symbols."""
    tensor = value(node)
    if not isinstance(tensor, torch.Tensor) or not all(isinstance(size, int) for size in tensor.shape):
        return None
    return tuple(tensor.shape)


def _bounds_of_dtype(dtype: torch.dtype) -> _Range:
    """The least and the greatest value of an integer dtype; `ANYTHING` for others."""
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        return ANYTHING
    info = torch.iinfo(dtype)
    return info.min, info.max


def fits(bounds: _Range, dtype: torch.dtype) -> bool:
    """Whether `dtype` can hold every value within `bounds`."""
    low, high = _bounds_of_dtype(dtype)
    return low <= bounds[0] and bounds[1] <= high


def bounds(node: Any, depth: int = 0) -> _Range:
    """The least and the greatest value that `node` may hold: a number, or a node whose value is an integer tensor."""
    if isinstance(node, int):
        return int(node), int(node)
    tensor = value(node) if isinstance(node, fx.Node) else None
    if not isinstance(tensor, torch.Tensor):
        return ANYTHING
    whole = _bounds_of_dtype(tensor.dtype)
    if whole == ANYTHING or depth > MAX_DEPTH or node.op != "call_function" or (rule := _RULES.get(node.target)) is None:
        return whole
    found = rule(node, lambda operand: bounds(operand, depth + 1))
    return found if fits(found, tensor.dtype) else whole


_Ask = Callable[[Any], _Range]


def _part(node: fx.Node, ask: _Ask) -> _Range:
    return ask(node.args[0])


def _full(node: fx.Node, ask: _Ask) -> _Range:
    fill = arg(node, "s" if node.target is aten.scalar_tensor.default else "fill_value")
    return ask(fill) if isinstance(fill, int) else ANYTHING


def _counted(node: fx.Node, ask: _Ask) -> _Range:
    """`prims.iota` and `arange`, whose entries go evenly from the first to the last."""
    shape = static_shape(node)
    if node.target is prims.iota.default:
        start, step = node.kwargs["start"], node.kwargs["step"]
    elif node.target is aten.arange.default:
        start, step = 0, 1
    else:
        start, step = arg(node, "start"), arg(node, "step") if node.target is aten.arange.start_step else 1
    if shape is None or not isinstance(start, int) or not isinstance(step, int):
        return ANYTHING
    last = start + max(shape[0] - 1, 0) * step
    return min(start, last), max(start, last)


def _clamp(node: fx.Node, ask: _Ask) -> _Range:
    low, high = ask(node.args[0])
    minimum = arg(node, "min") if node.target is not aten.clamp_max.default else None
    maximum = arg(node, "max") if node.target is not aten.clamp_min.default else None
    if minimum is not None:
        least, most = ask(minimum)
        low, high = max(low, least), max(high, most)
    if maximum is not None:  # after the minimum, as `clamp` does
        least, most = ask(maximum)
        low, high = min(low, least), min(high, most)
    return low, high


def _either(node: fx.Node, ask: _Ask) -> _Range:
    ranges = [ask(arg(node, name)) for name in ("self", "other")]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _add(node: fx.Node, ask: _Ask) -> _Range:
    left, right = ask(arg(node, "self")), ask(arg(node, "other"))
    if type(arg(node, "alpha")) is not int or arg(node, "alpha") != 1:
        return ANYTHING
    if node.target in (aten.sub.Tensor, aten.sub.Scalar):
        right = -right[1], -right[0]
    return left[0] + right[0], left[1] + right[1]


def _mul(node: fx.Node, ask: _Ask) -> _Range:
    left, right = ask(arg(node, "self")), ask(arg(node, "other"))
    if ANYTHING in (left, right):
        return ANYTHING
    products = [a * b for a in left for b in right]
    return min(products), max(products)


def _remainder(node: fx.Node, ask: _Ask) -> _Range:
    divisor = arg(node, "other")
    return (0, divisor - 1) if type(divisor) is int and divisor > 0 else ANYTHING


_RULES: dict[Any, Callable[[fx.Node, _Ask], _Range]] = {
    **dict.fromkeys(_PARTS, _part),
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.scalar_tensor.default), _full),
    **dict.fromkeys((prims.iota.default, aten.arange.default, aten.arange.start, aten.arange.start_step), _counted),
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default), _clamp),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther), _either),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar), _add),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _mul),
    aten.remainder.Scalar: _remainder,
}
