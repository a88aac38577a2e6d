"""Softmaxes over rows, as torch decomposes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.ops.topk import FLOATS
from spec_ops.passes.analysis.graph import arg, value
from spec_ops.passes.analysis.norms import is_convert

aten = torch.ops.aten


class Softmax(NamedTuple):
    """`log_softmax(logits, -1)` if `log`, otherwise `softmax(logits, -1)`, computed in float32 by `exact`."""

    logits: fx.Node
    exact: fx.Node
    log: bool


def find_softmax(node: Any) -> Softmax | None:
    """The softmax that `node` is, rounded to another dtype or not; None if it is none."""
    fake = value(node)
    if not isinstance(node, fx.Node) or not isinstance(fake, torch.Tensor) or fake.dtype not in FLOATS:
        return None
    if is_convert(node, fake.dtype) and getattr(value(node.args[0]), "dtype", None) == torch.float32:
        node = node.args[0]
    shifted: Any = None
    if _is(node, aten.sub.Tensor) and _is(node.args[1], aten.log.default):
        shifted, powers = node.args[0], _summed(node.args[1].args[0])
    elif _is(node, aten.div.Tensor) and _is(node.args[0], aten.exp.default):
        shifted, powers = node.args[0].args[0], _summed(node.args[1])
    if shifted is None or not _is(powers, aten.exp.default) or powers.args[0] is not shifted:
        return None
    if not _is(shifted, aten.sub.Tensor) or value(shifted).dtype != torch.float32:
        return None
    logits, largest = shifted.args
    if not _is(largest, aten.amax.default) or largest.args[0] is not logits or not _keeps_rows(largest):
        return None
    if is_convert(logits, torch.float32) and value(logits.args[0]).dtype in FLOATS:
        logits = logits.args[0]
    return Softmax(logits, node, node.target is aten.sub.Tensor)


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target and not node.kwargs


def _summed(node: Any) -> Any:
    """What `node` is the sum of over the last dimension; None if it is none."""
    return node.args[0] if _is(node, aten.sum.dim_IntList) and _keeps_rows(node) else None


def _keeps_rows(reduction: fx.Node) -> bool:
    """Whether it reduces the last dimension alone, to size 1."""
    dims = arg(reduction, "dim")
    return dims in ([-1], [value(reduction.args[0]).dim() - 1]) and bool(arg(reduction, "keepdim"))
