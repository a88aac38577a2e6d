"""Reference products with a weight `[n, k]` of 16, 8 or 4 bits, with rows of float8, and an RMS norm divided among two."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spec_ops.backends.float8_rows import dequantized_rows, float8_operands
from spec_ops.backends.squares import SUM_COLUMNS, sums_of
from spec_ops.backends.weight_format import dequantized, for_columns
from spec_ops.ops._pieces import in_pieces
from spec_ops.ops.reference.invariant import each_row, row_sum


def _dequantized(x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor | None) -> torch.Tensor:
    return dequantized(for_columns(weight, x.shape[1]), *scales)


def _product(x: torch.Tensor, weight: torch.Tensor, invariant: bool) -> torch.Tensor:
    """`x @ weight^T` in float32."""
    if not invariant:
        return x.float() @ weight.t()
    rows = each_row(lambda row: row.float() @ weight.t(), x)
    return torch.cat(rows) if rows else x.new_empty(0, weight.shape[0], dtype=torch.float32)


def skinny_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    out = _product(x, _dequantized(x, weight, scale, zero, tensor_scale), invariant)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def float8_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    float8_operands("float8_mm", x, x_scale, weight, scale, bias, dtype)
    out = dequantized_rows(x, x_scale) @ dequantized(weight, scale).t()
    if bias is not None:
        out = out + bias.float()
    return out.to(dtype)


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    return dequantized(weight, scale, zero, tensor_scale).to(dtype).contiguous()


def add_skinny_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = (skinny_mm(x, weight, None, scale, zero, tensor_scale).float() + residual.float()).to(x.dtype)
    z = (y.float() * norm_weight.float()).to(x.dtype)
    (m, n), sums = y.shape, sums_of(y.shape[1])
    padded = F.pad(y.float(), (0, sums * SUM_COLUMNS - n))
    return y, z, padded.view(m, sums, SUM_COLUMNS).square().sum(-1)


def rstd(squares: torch.Tensor, columns: int, eps: float) -> torch.Tensor:
    """`[m, 1]`, float32."""
    return torch.rsqrt(row_sum(squares)[:, None] / columns + eps)


def scaled_skinny_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    squares: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    out = (x.float() @ _dequantized(x, weight, scale, zero, tensor_scale).t()) * rstd(squares, x.shape[1], eps)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def scaled_silu_mul(gate: torch.Tensor, up: torch.Tensor, squares: torch.Tensor, columns: int, eps: float) -> torch.Tensor:
    scale = rstd(squares, columns, eps)
    return (in_pieces(F.silu, gate.float() * scale) * (up.float() * scale)).to(gate.dtype).contiguous()
