"""Reference products and sums whose bits of a row do not depend on other rows.

A product is computed one row at a time: the shape of each call, hence its order of addition, is that of one row. Each row is
copied first. Where a row begins decides how a library's loops start, and the order of addition with it; memory of its own
always begins at a multiple of 64 bytes. So must a matrix, which in a batch of products may be a row's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F


def each_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """`function` of each row of `x [m, ...]`, which it gets alone, `[1, ...]`."""
    return [function(row.clone(memory_format=torch.contiguous_format)) for row in (x.split(1) if len(x) else ())]


def _product(matrix: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return row.to(matrix.dtype) @ matrix


def _placed(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix`, or a copy, as if it were alone: its batch decides where it begins, and the stride of a dimension of 1."""
    if 1 in matrix.shape:
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix.clone() if matrix.data_ptr() % 64 else matrix


def batched_mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    exact = torch.promote_types(a.dtype, torch.float32)
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for place, rows, matrix in zip(out, a, b.to(exact), strict=True):
        for i, row in enumerate(each_row(functools.partial(_product, _placed(matrix)), rows)):
            place[i] = row[0] if bias is None else row[0] + bias.to(exact)
    return out


def fused_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a [m, k] @ b [k, n]` of float32 in the order of the GPU's batch-invariant products: `total = fma(a[k], b[k], total)` for
    each k in turn, from 0 on, rounded to float32 each time. A bias is added after the last.

    It states that order, and tests compare bits with it; on the CPU `batched_mm` has the order of torch.
    """
    total = a.new_zeros(a.shape[0], b.shape[1])
    for column, row in zip(a.double().unbind(1), b.double().unbind(0), strict=True):
        total = _rounded_sum(column[:, None] * row, total.double())  # the product of two float32 is exact in float64
    return total


def _rounded_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x + y` of float64, rounded once, to float32. Their sum in float64 is made odd where it is not exact: then rounding it
    again cannot differ from rounding the exact sum (Boldo and Melquiond 2008, https://doi.org/10.1109/TC.2007.70819)."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = total.view(torch.int64)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = error.abs() > 0  # not where it is NaN, as it is beside an infinite sum
    odd = torch.where(inexact & (bits % 2 == 0), bits + towards, bits)
    return odd.view(torch.float64).float()


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Of halves, then of their halves: additions of single values, whose order no library chooses."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    x = F.pad(x, (0, (1 << (x.shape[1] - 1).bit_length()) - x.shape[1]))
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0].contiguous()


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, rounded: bool) -> torch.Tensor:
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    normalized = exact * torch.rsqrt(row_sum(exact * exact) / x.shape[1] + eps)[:, None]
    if weight is not None:
        normalized = normalized.to(x.dtype) * weight if rounded else normalized * weight.to(exact.dtype)
    return normalized.to(x.dtype).contiguous()


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x + residual).contiguous()
    return total, rms_norm(total, weight, eps, rounded)
