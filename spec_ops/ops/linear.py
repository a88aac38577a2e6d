"""Linear layers over a few rows: what the passes `lower_skinny_mm` and `fuse_norm_linear` put in place of `aten.mm`,
`aten.addmm` and the norms between them.

They have no public wrappers. Write `torch.nn.functional.linear` and `rms_norm`; the passes know where these kernels are faster.
"""

from __future__ import annotations

import torch

from spec_ops.backends.float8_rows import float8_operands
from spec_ops.backends.squares import sums_of
from spec_ops.backends.weight_format import columns_of, for_columns, weight_format
from spec_ops.ops._library import define_op
from spec_ops.ops.reference import linear as reference

__all__ = [
    "add_skinny_mm_op",
    "dequantize_op",
    "float8_mm_op",
    "invariant_weight",
    "scaled_silu_mul_op",
    "scaled_skinny_mm_op",
    "skinny_mm_op",
]

_SCALES = "Tensor? scale=None, Tensor? zero=None, Tensor? tensor_scale=None"


def _sizes(op, x, weight, *scales):
    """m and n of a product whose weight is stored in a known format."""
    weight = for_columns(weight, x.shape[1])
    weight_format(op, weight, *scales)
    if x.shape[1] != (k := columns_of(weight)):
        raise ValueError(f"{op}: `x` must have the {k} columns of `weight`, got shape {tuple(x.shape)}")
    return x.shape[0], weight.shape[0]


def _skinny_mm_fake(x, weight, bias, scale=None, zero=None, tensor_scale=None, invariant=False):
    return x.new_empty(*_sizes("skinny_mm", x, weight, scale, zero, tensor_scale))


# `x [m, k] @ weight [n, k]^T + bias [n]`, summed in float32, as a contiguous `[m, n]` of the dtype of `x`. A weight of 8 or 4
# bits comes with `scale`, and perhaps `zero` or `tensor_scale` (`backends/weight_format.py`). On CUDA: x of bfloat16 or
# float16, m up to 64 (128 with a `scale`; with int4 only on sm_90, with what `hopper_tiles.takes` asks for), k a multiple of
# 64, rows of `weight` contiguous and aligned to 16 bytes; anything else is a ValueError. `invariant`: batch-invariant, for any
# m, with weights of 16 bits.
skinny_mm_op = define_op(
    f"skinny_mm(Tensor x, Tensor weight, Tensor? bias, {_SCALES}, bool invariant=False) -> Tensor",
    reference.skinny_mm,
    _skinny_mm_fake,
    cuda="spec_ops.backends.triton.linear.invariant:skinny_mm",
    invariant="invariant",
)


def _float8_mm_fake(x, x_scale, weight, scale, bias, dtype):
    float8_operands("float8_mm", x, x_scale, weight, scale, bias, dtype)
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


# `(x * x_scale) @ (weight * scale)^T + bias [n]`, summed in float32 and rounded once, as a contiguous `[m, n]` of `dtype`: rows
# of float8 beside a weight of float8, with the scales of `backends/float8_rows.py`, at any strides. On CUDA: sm_90, m up to
# 128, k a multiple of 128, a result of bfloat16 or float16, rows of `x` and `weight` contiguous and aligned to 16 bytes;
# anything else is an error (`hopper_tiles.float8_mm_refusal`).
float8_mm_op = define_op(
    "float8_mm(Tensor x, Tensor x_scale, Tensor weight, Tensor scale, Tensor? bias, ScalarType dtype) -> Tensor",
    reference.float8_mm,
    _float8_mm_fake,
    cuda="spec_ops.backends.triton.linear.hopper_float8:float8_mm",
)


def _dequantize_fake(weight, scale, zero, tensor_scale, dtype):
    weight_format("dequantize", weight, scale, zero, tensor_scale)
    return weight.new_empty(weight.shape[0], columns_of(weight), dtype=dtype)


# A weight of 8 or 4 bits (`backends/weight_format.py`) as a contiguous `[n, k]` of `dtype`, rounded once from float32: for
# products in eager mode, since passes would not see what such a product reads. On CUDA: rows of contiguous columns; float8 from
# sm_89 on.
dequantize_op = define_op(
    "dequantize(Tensor weight, Tensor scale, Tensor? zero, Tensor? tensor_scale, ScalarType dtype) -> Tensor",
    reference.dequantize,
    _dequantize_fake,
    cuda="spec_ops.backends.triton.linear.dequantize:dequantize",
    invariant=True,
)

# An RMS norm between two products is divided among them, since its factor of a row, `rstd = rsqrt(mean(y^2) + eps)`, can be
# applied after the second one: `(y * rstd * g) weight^T = ((y * g) weight^T) * rstd`. The first product adds up the squares.


def _add_skinny_mm_fake(x, weight, residual, norm_weight, scale=None, zero=None, tensor_scale=None):
    m, n = _sizes("add_skinny_mm", x, weight, scale, zero, tensor_scale)
    return x.new_empty(m, n), x.new_empty(m, n), x.new_empty(m, sums_of(n), dtype=torch.float32)


# `y = x [m, k] @ weight [n, k]^T + residual [m, n]`, rounded as the product and as the sum; `z = y * norm_weight [n]`; and
# `squares [m, sums_of(n)]`, float32: sums of the squares of y over `SUM_COLUMNS` columns each. y and z are contiguous; they and
# the inputs but the weight are of the dtype of x. What `skinny_mm` asks for holds here too.
add_skinny_mm_op = define_op(
    f"add_skinny_mm(Tensor x, Tensor weight, Tensor residual, Tensor norm_weight, {_SCALES}) "
    "-> (Tensor y, Tensor z, Tensor squares)",
    reference.add_skinny_mm,
    _add_skinny_mm_fake,
    cuda="spec_ops.backends.triton.linear.norm:add_skinny_mm",
)


def _scaled_skinny_mm_fake(x, weight, bias, squares, eps, scale=None, zero=None, tensor_scale=None):
    return x.new_empty(*_sizes("scaled_skinny_mm", x, weight, scale, zero, tensor_scale))


# `(x @ weight^T) * rsqrt(sum(squares) / k + eps) + bias`, rounded once: `skinny_mm` of the z above.
scaled_skinny_mm_op = define_op(
    f"scaled_skinny_mm(Tensor x, Tensor weight, Tensor? bias, Tensor squares, float eps, {_SCALES}) -> Tensor",
    reference.scaled_skinny_mm,
    _scaled_skinny_mm_fake,
    cuda="spec_ops.backends.triton.linear.norm:scaled_skinny_mm",
)


def _scaled_silu_mul_fake(gate, up, squares, columns, eps):
    return gate.new_empty(gate.shape)


# `silu(gate * rstd) * (up * rstd)` with `rstd = rsqrt(sum(squares) / columns + eps)`, for products of z that cuBLAS computed.
# `gate` and `up [m, n]` may be slices of one tensor: rows at any distance, their columns contiguous on CUDA.
scaled_silu_mul_op = define_op(
    "scaled_silu_mul(Tensor gate, Tensor up, Tensor squares, int columns, float eps) -> Tensor",
    reference.scaled_silu_mul,
    _scaled_silu_mul_fake,
    cuda="spec_ops.backends.triton.linear.norm:scaled_silu_mul",
    invariant=True,
)


def invariant_weight(right: torch.Tensor, arch: int | None) -> bool:
    """Whether `skinny_mm(invariant=True)` computes products with `right [k, n]`, a transposed weight, on `arch` (None: CPU). A
    fact of the weight alone: were it one of the rows too, products of few and of many rows would differ."""
    if arch is None or arch < 90:  # tensor memory access
        return False
    aligned = right.stride(0) == 1 and right.stride(1) >= right.shape[0] and right.stride(1) % 8 == 0
    return right.dtype.itemsize == 2 and aligned and right.storage_offset() % 8 == 0 and right.shape[0] % 64 == 0
