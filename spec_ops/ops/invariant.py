"""Batch-invariant products, sums and norms of rows: what stands in for those of torch where invariance is asked for.

They have no public wrappers. Write `torch.nn.functional.linear`, `rms_norm` and `sum`; `invariance.py` says what replaces what.
"""

from __future__ import annotations

import torch

from spec_ops.ops._library import define_op
from spec_ops.ops.reference import invariant as reference

__all__ = ["add_rms_norm_op", "batched_mm_op", "rms_norm_op", "row_sum_op"]


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _batched_mm_fake(a, b, bias):
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


# `a [batch, m, k] @ b [batch, k, n] + bias [n]`, summed in float32 (float64 of float64) and rounded once, as a contiguous
# `[batch, m, n]` of the dtype of `a`. A row of the result depends on that row of `a` and on `b`; the order along k on k alone.
# Any strides.
batched_mm_op = define_op(
    "batched_mm(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    reference.batched_mm,
    _batched_mm_fake,
    cuda="spec_ops.backends.triton.linear.invariant:batched_mm",
    invariant=True,
)
# The sums of the rows of `x [m, n]`, `[m]` float32 (float64 of float64).
row_sum_op = define_op(
    "row_sum(Tensor x) -> Tensor",
    reference.row_sum,
    lambda x: x.new_empty(x.shape[0], dtype=_sum_dtype(x)),
    cuda="spec_ops.backends.triton.linear.invariant:row_sum",
    invariant=True,
)
# `x [m, n] * rsqrt(mean(x^2) + eps) * weight [n]`, in float32, as a contiguous `[m, n]` of the dtype of `x`. `rounded`: to that
# dtype before the weight too, as models of transformers do.
rms_norm_op = define_op(
    "rms_norm(Tensor x, Tensor? weight, float eps, bool rounded) -> Tensor",
    reference.rms_norm,
    lambda x, weight, eps, rounded: x.new_empty(x.shape),
    cuda="spec_ops.backends.triton.linear.invariant:rms_norm",
    invariant=True,
)


def _add_rms_norm_fake(x, residual, weight, eps, rounded):
    return x.new_empty(x.shape), x.new_empty(x.shape)


# `total = x + residual [m, n]` in their dtype, and `rms_norm` of it: the bits of two operations, in one launch.
add_rms_norm_op = define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, bool rounded) -> (Tensor total, Tensor out)",
    reference.add_rms_norm,
    _add_rms_norm_fake,
    cuda="spec_ops.backends.triton.linear.invariant:add_rms_norm",
    invariant=True,
)
