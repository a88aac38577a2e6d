"""Gated activations in a graph: `silu(gate) * up`, as models write them, in the dtype of both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.passes.analysis.graph import value
from spec_ops.passes.analysis.norms import is_convert

aten = torch.ops.aten
_ADD, _MUL, _DIV = {aten.add.Tensor, aten.add.Scalar}, {aten.mul.Tensor, aten.mul.Scalar}, {aten.div.Tensor}
_X = "x"
_TANH = (_MUL, (_ADD, _X, (_MUL, (_MUL, (_MUL, _X, _X), _X), 0.044715)), 0.7978845608028654)
# What Inductor's decompositions make of each, in float32: an operation and its operands, in any order but for a quotient's.
_FORMS: tuple[tuple[str, Any], ...] = (
    ("silu", (_DIV, _X, (_ADD, ({aten.exp.default}, ({aten.neg.default}, _X)), 1))),
    ("silu", (_MUL, _X, ({aten.sigmoid.default}, _X))),
    ("gelu", (_MUL, (_MUL, _X, 0.5), (_ADD, ({aten.erf.default}, (_MUL, _X, 0.5**0.5)), 1))),
    ("gelu_tanh", (_MUL, (_MUL, _X, 0.5), (_ADD, ({aten.tanh.default}, _TANH), 1))),
)


class Gated(NamedTuple):
    """`activation(gate) * up`.

    Attributes:
        activation: one of `spec_ops.ops.rounding.ACTIVATIONS`.
    """

    activation: str
    gate: fx.Node
    up: fx.Node


def gated(out: fx.Node) -> Gated | None:
    """What `out` is the product of; None if it is something else."""
    if out.target is not aten.mul.Tensor or len(out.args) != 2 or out.kwargs:
        return None
    dtype = value(out).dtype
    operands: Any = out.args
    for rounded, up in (operands, operands[::-1]):
        if not isinstance(up, fx.Node) or not is_convert(rounded, dtype) or dtype == torch.float32:
            continue
        for activation, form in _FORMS:
            found: dict[str, fx.Node] = {}
            if not _matches(rounded.args[0], form, found):
                continue
            gate = found[_X]
            if all(value(part).shape == value(out).shape and value(part).dtype == dtype for part in (gate, up)):
                return Gated(activation, gate, up)
    return None


def _matches(node: Any, form: Any, found: dict[str, fx.Node]) -> bool:
    """Whether `node` is computed as `form` says, of one value in float32 that `found` has then as it was before."""
    if form == _X:
        return is_convert(node, torch.float32) and found.setdefault(_X, node.args[0]) is node.args[0]
    if isinstance(form, (int, float)):
        return isinstance(node, (int, float)) and abs(node - form) < 1e-6
    targets, *operands = form
    if not isinstance(node, fx.Node) or node.target not in targets or node.kwargs or len(node.args) != len(operands):
        return False
    orders = [operands] if len(operands) == 1 or targets is _DIV else [operands, operands[::-1]]
    for order in orders:
        trial = dict(found)
        if all(_matches(part, wanted, trial) for part, wanted in zip(node.args, order, strict=True)):
            found.update(trial)
            return True
    return False
