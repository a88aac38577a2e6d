"""RMS norms in a graph, as models and `F.rms_norm` write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.passes.analysis.graph import arg, calls, value

aten, prims = torch.ops.aten, torch.ops.prims


class RMSNorm(NamedTuple):
    """`out = x * rsqrt(mean(x ** 2, -1) + eps) * weight [columns of x]`, in float32, of the dtype of `x`, or of float32 where
    it was asked for."""

    x: fx.Node
    eps: float
    weight: fx.Node
    out: fx.Node


def find_norms(graph: fx.Graph, unrounded: bool = False) -> Iterator[RMSNorm]:
    """The RMS norms over rows of which nothing but the result is read elsewhere.

    Args:
        graph: is searched.
        unrounded: find those instead whose result in float32 is read, of rows of 16 bits. Inductor leaves a conversion to 16
            bits out where one to float32 comes next.
    """
    return (norm for rsqrt in calls(graph, aten.rsqrt.default) if (norm := _norm(rsqrt, unrounded)) is not None)


def _norm(rsqrt: fx.Node, unrounded: bool) -> RMSNorm | None:
    """The norm that `rsqrt` is part of.

    Two forms are known: `(x * rstd * weight).to(dtype)` and `(x * rstd).to(dtype) * weight`. In float32 nothing is converted.
    """
    plus = rsqrt.args[0]
    if not isinstance(plus, fx.Node) or plus.target not in (aten.add.Tensor, aten.add.Scalar) or plus.kwargs:
        return None
    mean, eps = plus.args
    if not isinstance(mean, fx.Node) or mean.target is not aten.mean.dim or not isinstance(eps, (int, float)):
        return None
    square: Any = mean.args[0]
    if arg(mean, "dim") not in ([-1], [value(square).dim() - 1]) or not arg(mean, "keepdim"):
        return None
    if square.target is not aten.pow.Tensor_Scalar or square.args[1] != 2 or value(square).dtype != torch.float32:
        return None
    exact = square.args[0]
    scaled = only_user(rsqrt, aten.mul.Tensor)
    if scaled is None or other_operand(scaled, rsqrt) is not exact or not all(len(n.users) == 1 for n in (square, mean, plus)):
        return None
    if is_convert(exact, torch.float32):
        if set(exact.users) != {square, scaled}:
            return None
        x, (weight, out) = exact.args[0], _scaled_by_weight(scaled, value(exact.args[0]).dtype, unrounded)
    else:
        x, out = exact, only_user(scaled, aten.mul.Tensor)
        weight = None if out is None else other_operand(out, scaled)
    if out is None or value(out).dtype != (torch.float32 if unrounded else value(x).dtype) or not isinstance(weight, fx.Node):
        return None
    if getattr(value(weight), "shape", None) != value(x).shape[-1:]:  # one for each head, a gate, a number
        return None
    return RMSNorm(x, float(eps), weight, out)


def _scaled_by_weight(scaled: fx.Node, dtype: torch.dtype, unrounded: bool) -> tuple[Any, fx.Node | None]:
    """The weight, and the result in `dtype`, of a norm whose float32 value before the weight is `scaled`."""
    if (product := only_user(scaled, aten.mul.Tensor)) is not None:
        weight = other_operand(product, scaled)
        out = product if unrounded else only_user(product, prims.convert_element_type.default)
        return (weight.args[0] if is_convert(weight, torch.float32) else weight), out
    rounded = only_user(scaled, prims.convert_element_type.default)
    out = None if rounded is None or not is_convert(rounded, dtype) else only_user(rounded, aten.mul.Tensor)
    return (None if out is None else other_operand(out, rounded)), out


def only_user(node: fx.Node, target: Any) -> fx.Node | None:
    """The one user of `node`, if it calls `target`."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def other_operand(node: fx.Node, known: Any) -> Any:
    """The operand of a binary `node` besides `known`; None if that is not one of two."""
    if len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    return second if first is known else first if second is known else None


def is_convert(node: Any, dtype: torch.dtype) -> bool:
    """Whether `node` converts to `dtype`."""
    return isinstance(node, fx.Node) and node.target is prims.convert_element_type.default and node.args[1] == dtype
