"""Rounding of rows to float8 for a product, alone or together with the activation or the norm before it. The pass
`fuse_rounding` puts these ops in place of graphs that write this out.

They have no public wrappers. Rows are rounded as `torch` rounds them in eager mode on a GPU:

    step = (abs(rows).amax(-1) * (1 / 448)).to(step_dtype)           for each group of `columns`, unless `step` is given
    step = where(max(step, least) == 0, zero, max(step, least))
    numbers = (rows / step).to(quotient_dtype).clamp(-448, 448).to(float8_e4m3fn)

A NaN makes the numbers of its group NaN.
"""

from __future__ import annotations

import torch

from spec_ops.backends.float8_rows import rounding_shape
from spec_ops.ops._library import define_op
from spec_ops.ops.reference import rounding as reference

__all__ = ["ACTIVATIONS", "add_norm_round_rows_op", "gated_round_rows_op", "norm_round_rows_op", "round_rows_op"]

ACTIVATIONS = reference.ACTIVATIONS
_HOW = "int columns, ScalarType step_dtype, ScalarType quotient_dtype, float least, float zero, Tensor? step=None"
_ROUNDED = "(Tensor numbers, Tensor steps)"
_KERNELS = "spec_ops.backends.triton.linear.rounding:"


def _rounded(op, x, columns, step_dtype, quotient_dtype, least, zero, step=None):
    """`numbers [m, k]`, contiguous, and `steps`, each column of which is contiguous."""
    groups, rows = rounding_shape(op, x, columns, step_dtype, quotient_dtype, step)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(groups, rows, dtype=torch.float32).t()


# Rows `x [m, k]` in float8: `numbers [m, k]`, contiguous, and the scales that multiply them, `steps [m, k / columns]` float32.
# With `step`, one number that all rows share, they are `[1, 1]`. Dtypes are float32 or that of `x`. On CUDA: sm_89 or newer, x
# of bfloat16 or float16 with contiguous columns, `columns` k or 128, k up to `MAX_COLUMNS` where a row has one step; anything
# else is a BackendError (the GPU), a TypeError (the dtype) or a ValueError.
round_rows_op = define_op(
    f"round_rows(Tensor x, {_HOW}) -> {_ROUNDED}",
    reference.round_rows,
    lambda x, *how: _rounded("round_rows", x, *how),
    cuda=f"{_KERNELS}round_rows",
)


def _gated_fake(gate, up, activation, *how):
    return _rounded("gated_round_rows", gate, *how)


# `round_rows` of `activation(gate) * up [m, k]`, each rounded to their dtype; `activation` is one of `ACTIVATIONS`. `gate` and
# `up` may be slices of one tensor.
gated_round_rows_op = define_op(
    f"gated_round_rows(Tensor gate, Tensor up, str activation, {_HOW}) -> {_ROUNDED}",
    reference.gated_round_rows,
    _gated_fake,
    cuda=f"{_KERNELS}gated_round_rows",
)


def _norm_fake(x, weight, eps, roundings, *how):
    return _rounded("norm_round_rows", x, *how)


# `round_rows` of `x * rsqrt(mean(x^2) + eps) * weight [k]`, which is rounded to the dtype of `x` before that `roundings` times:
# once, twice (also before it is multiplied by the weight), or not at all. k is at most `MAX_COLUMNS`.
norm_round_rows_op = define_op(
    f"norm_round_rows(Tensor x, Tensor weight, float eps, int roundings, {_HOW}) -> {_ROUNDED}",
    reference.norm_round_rows,
    _norm_fake,
    cuda=f"{_KERNELS}norm_round_rows",
)


def _add_norm_fake(x, residual, weight, eps, roundings, *how):
    return (x.new_empty(x.shape), *_rounded("add_norm_round_rows", x, *how))


# `total = x + residual [m, k]`, contiguous, in their dtype, and `norm_round_rows` of it.
add_norm_round_rows_op = define_op(
    f"add_norm_round_rows(Tensor x, Tensor residual, Tensor weight, float eps, int roundings, {_HOW}) "
    "-> (Tensor total, Tensor numbers, Tensor steps)",
    reference.add_norm_round_rows,
    _add_norm_fake,
    cuda=f"{_KERNELS}add_norm_round_rows",
)
