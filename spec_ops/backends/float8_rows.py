"""Rows of float8 beside a weight of float8: what the op `float8_mm`, its reference, its kernel and the passes agree on.

Rows `[m, k]` of float8_e4m3fn come with a scale `[1, 1]`, `[m, 1]`, or `[m, k / 128]` for each 128 columns of a row. The weight
is as in `weight_format.py`, its scale of all of it, of each row, or of blocks of 128 x 128.

Sources: DeepSeek-V3 (arXiv:2412.19437, 3.3); `torch._scaled_mm`, which takes the same scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_ops.backends.weight_format import BLOCK, SCALE_DTYPES, WeightFormat, weight_format

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of results
FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
MAX_COLUMNS = 32768  # of a row that a kernel has in registers, with one step or normalized


class Float8Operands(NamedTuple):
    """Whether scales are of blocks of 128 of k, of the rows and of the weight; else they are of whole rows or of all."""

    x_blocks: bool
    w_blocks: bool


def float8_operands(
    op: str, x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> Float8Operands:  # fmt: skip
    """What shares the scales of a product of `op`.

    Raises:
        TypeError: `x` or `weight` not of float8_e4m3fn, scales of another dtype than `SCALE_DTYPES`, or a `dtype` that is none
            of `DTYPES`.
        ValueError: shapes that do not fit each other, or a scale of other parts.
    """
    for name, rows in (("x", x), ("weight", weight)):
        if rows.dtype != torch.float8_e4m3fn:
            raise TypeError(f"{op}: `{name}` must be of torch.float8_e4m3fn, got {rows.dtype}")
        if rows.dim() != 2:
            raise ValueError(f"{op}: `{name}` must have two dimensions, got shape {tuple(rows.shape)}")
    if dtype not in DTYPES:
        raise TypeError(f"{op}: `dtype` must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if x_scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{op}: `x_scale` must be of float32, bfloat16 or float16, got {x_scale.dtype}")
    (m, k), n = x.shape, weight.shape[0]
    if k != weight.shape[1]:
        raise ValueError(f"{op}: `x` must have the {weight.shape[1]} columns of `weight`, got shape {tuple(x.shape)}")
    stored = weight_format(op, weight, scale, None)
    w_blocks = in_blocks(stored, scale)
    if not (w_blocks or stored.columns == k):
        wanted = f"[1, 1], [{n}, 1], or [{-(-n // BLOCK)}, {-(-k // BLOCK)}] for blocks of {BLOCK} x {BLOCK}"
        raise ValueError(f"{op}: `scale` must be {wanted}, got shape {tuple(scale.shape)}")
    whole, groups = x_scale.shape in ((1, 1), (m, 1)), k % BLOCK == 0 and x_scale.shape == (m, k // BLOCK)
    if not (whole or groups):
        wanted = f"[1, 1], [{m}, 1]" + (f" or [{m}, {k // BLOCK}]" if k % BLOCK == 0 else "")
        raise ValueError(f"{op}: `x_scale` must be {wanted}, got shape {tuple(x_scale.shape)}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"{op}: `bias` must have shape ({n},), got {tuple(bias.shape)}")
    return Float8Operands(not whole, w_blocks)


def in_blocks(stored: WeightFormat, scale: torch.Tensor) -> bool:
    """Whether blocks of 128 x 128 of a weight have scales, more than one."""
    return stored.rows == stored.columns == BLOCK and scale.numel() != 1


def dequantized_rows(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
    """`[m, k]` in float32, as exact as that is."""
    scale = x_scale.float()
    return x.float() * (scale.repeat_interleave(BLOCK, 1) if scale.shape[1] > 1 else scale)


def rounding_shape(
    op: str,
    x: torch.Tensor,
    columns: int,
    step_dtype: torch.dtype,
    quotient_dtype: torch.dtype,
    step: torch.Tensor | None,
) -> tuple[int, int]:
    """Groups of columns, and rows, that have a step each where `op` rounds `x [m, k]`; `[1, 1]` if `step` is all rows'.

    Raises:
        TypeError: a dtype of steps or quotients that is neither float32 nor that of `x`.
        ValueError: `x` without two dimensions, `columns` that do not divide them, or a `step` of more than one number.
    """
    if x.dim() != 2:
        raise ValueError(f"{op}: rows must have two dimensions, got shape {tuple(x.shape)}")
    for name, dtype in (("step_dtype", step_dtype), ("quotient_dtype", quotient_dtype)):
        if dtype not in (torch.float32, x.dtype):
            raise TypeError(f"{op}: `{name}` must be torch.float32 or {x.dtype} of the rows, got {dtype}")
    m, k = x.shape
    if columns < 1 or k % columns:
        raise ValueError(f"{op}: `columns` must divide the {k} of a row, got {columns}")
    if step is None:
        return k // columns, m
    if step.numel() != 1:
        raise ValueError(f"{op}: `step` must be one number, got shape {tuple(step.shape)}")
    return 1, 1
