"""An RMS norm without a kernel of its own: divided among the product before it and those after it.

    y = residual + x0 @ w0^T                             y, z, squares = add_skinny_mm(x0, w0, residual, g)
    rstd = rsqrt(mean(y^2, -1) + eps)            ->
    out = (y * rstd * g) @ w1^T                          out = (z @ w1^T) * rstd(squares)

The first product has each element of y in a register once: it adds the residual, multiplies by `g` and sums the squares of its
columns, in one order and without atomics. The second one multiplies its rows by `rstd` at its end. The main loops are those of
`skinny_mm`, and what is added to them is read while weights are on their way. Where cuBLAS computes the second product, the
the SiLU after it scales.

The result is as exact as a norm in float32 that is rounded once: `z` is rounded in place of the normalized value, with the same
relative error. It is not normalized though, and in float16 it could overflow where that would not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from spec_ops.backends.squares import SUM_COLUMNS, sums_of
from spec_ops.backends.triton.linear import skinny_mm as linear
from spec_ops.backends.triton.linear.operands import Weight
from spec_ops.backends.triton.linear.skinny_mm import ask_for_weight, products, store_transposed
from spec_ops.backends.triton.linear.tiles import Config
from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch

SILU_BLOCK = 1024


@triton.jit
def store_sum(
    y, z, squares, acc, r, g, tile, n, m, N, M, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUM_COLUMNS: tl.constexpr
):  # fmt: skip
    """`y`, `z` and `squares` of tile number `tile`, whose columns are `n` and rows `m`, by product `acc [BLOCK_N, BLOCK_M]`,
    residual `r` and norm's weight `g`, all 0 beyond `N`."""
    dtype: tl.constexpr = y.dtype.element_ty
    # Rounded as the product, then as the sum, as two kernels would.
    total = (acc.to(dtype).to(tl.float32) + r.to(tl.float32)).to(dtype)
    store_transposed(y, total, n, m, N, M)
    exact = total.to(tl.float32)  # 0 beyond N
    store_transposed(z, exact * g.to(tl.float32)[:, None], n, m, N, M)
    # `abs` changes no value: it keeps the product from fusing with the sum's first step between threads, after which copies
    # of a result would differ in the last bit (triton-lang/triton#7264).
    SUMS: tl.constexpr = BLOCK_N // SUM_COLUMNS
    sums = tl.sum(tl.reshape(tl.abs(exact * exact), [SUMS, SUM_COLUMNS, BLOCK_M]), 1)
    width = tl.cdiv(N, SUM_COLUMNS)
    place = tile * SUMS + tl.arange(0, SUMS)
    tl.store(squares + m[None, :] * width + place[:, None], sums, mask=(m < M)[None, :] & (place < width)[:, None])


@triton.jit(do_not_specialize=["M"])
def add_skinny_mm_kernel(
    x, x_stride, weight, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K, weight_rows,
    row_stride, residual, norm_weight, y, z, squares,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, ASKED: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUM_COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`residual`, `y`, `z [M, N]` contiguous; `norm_weight [N]`; `squares [M, cdiv(N, SUM_COLUMNS)]`. The rest: see
    `skinny_mm_kernel`."""
    ask_for_weight(weight_rows, row_stride, N, K, BLOCK_N, BLOCK_K, SPLITS, ASKED, PDL, BITS)
    await_predecessors(PDL)
    tile = tl.program_id(0) // SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    mask = (m < M)[None, :] & (n < N)[:, None]
    # In flight while the weights stream.
    r = tl.load(residual + m[None, :] * N + n[:, None], mask=mask, other=0.0)
    g = tl.load(norm_weight + n, mask=n < N, other=0.0)
    acc, complete = products(
        x, x_stride, weight, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, SPLITS, STAGES, BITS, ROWS, COLUMNS,
    )  # fmt: skip
    if complete:
        store_sum(y, z, squares, acc, r, g, tile, n, m, N, M, BLOCK_M, BLOCK_N, SUM_COLUMNS)


@triton.jit(do_not_specialize=["M"])
def scaled_skinny_mm_kernel(
    x, x_stride, weight, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K, weight_rows,
    row_stride, bias, squares, eps, out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, ASKED: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr, SUMS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`squares [M, SUMS]`, of which `SUMS_PAD` is a power of 2. The rest: see `skinny_mm_kernel`."""
    ask_for_weight(weight_rows, row_stride, N, K, BLOCK_N, BLOCK_K, SPLITS, ASKED, PDL, BITS)
    await_predecessors(PDL)
    n = tl.program_id(0) // SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    place = tl.arange(0, SUMS_PAD)
    # In flight while the weights stream.
    sums = tl.load(squares + m[:, None] * SUMS + place[None, :], mask=(m < M)[:, None] & (place < SUMS)[None, :], other=0.0)
    acc, complete = products(
        x, x_stride, weight, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, SPLITS, STAGES, BITS, ROWS, COLUMNS,
    )  # fmt: skip
    if complete:
        acc *= tl.rsqrt(tl.sum(sums, 1) / K + eps)[None, :]
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        store_transposed(out, acc, n, m, N, M)


@triton.jit
def scaled_silu_mul_kernel(
    gate, up, gate_row, up_row, squares, out, N, columns, eps,
    BLOCK: tl.constexpr, SUMS: tl.constexpr, SUMS_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row and `BLOCK` columns of it: `gate`, `up [M, N]` with rows `gate_row` and `up_row` apart, `out [M, N]` contiguous."""
    await_predecessors(PDL)
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, SUMS_PAD)
    sums = tl.load(squares + row * SUMS + place, mask=place < SUMS, other=0.0)
    a = tl.load(gate + row * gate_row + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_row + n, mask=n < N, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(sums, 0) / columns + eps)
    a, b = a * rstd, b * rstd
    tl.store(out + row * N + n, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=n < N)


def add_skinny_mm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor,
    scale: torch.Tensor | None = None, zero: torch.Tensor | None = None, tensor_scale: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `spec_ops.ops.linear`; raises as `linear.run` does."""
    m, n = x.shape[0], weight.shape[0]
    y, z = x.new_empty(m, n), x.new_empty(m, n)
    squares = x.new_empty(m, sums_of(n), dtype=torch.float32)
    if y.numel():
        linear.run(
            add_skinny_mm_kernel, "add_skinny_mm", x, Weight(weight, scale, zero, tensor_scale), config, residual.contiguous(),
            norm_weight.contiguous(), y, z, squares, SUM_COLUMNS=SUM_COLUMNS,
        )  # fmt: skip
    return y, z, squares


def _sums(columns: int) -> dict[str, Any]:
    return {"SUMS": sums_of(columns), "SUMS_PAD": triton.next_power_of_2(sums_of(columns))}


def scaled_skinny_mm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, squares: torch.Tensor, eps: float,
    scale: torch.Tensor | None = None, zero: torch.Tensor | None = None, tensor_scale: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `spec_ops.ops.linear`; raises as `linear.run` does."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    if out.numel():
        linear.run(
            scaled_skinny_mm_kernel, "scaled_skinny_mm", x, Weight(weight, scale, zero, tensor_scale), config,
            None if bias is None else bias.contiguous(), squares.contiguous(), eps, out, **_sums(x.shape[1]),
        )  # fmt: skip
    return out


def scaled_silu_mul(gate: torch.Tensor, up: torch.Tensor, squares: torch.Tensor, columns: int, eps: float) -> torch.Tensor:
    """See `spec_ops.ops.linear`.

    Raises:
        ValueError: columns of `gate` or `up` are not contiguous.
    """
    m, n = gate.shape
    for name, rows in (("gate", gate), ("up", up)):
        if n > 1 and rows.stride(1) != 1:
            raise ValueError(f"scaled_silu_mul: `{name}` must have contiguous columns, got strides {tuple(rows.stride())}")
    out = gate.new_empty(m, n)
    if out.numel():
        with device_guard(gate):
            launch(
                scaled_silu_mul_kernel, (triton.cdiv(n, SILU_BLOCK), m), gate, up, gate.stride(0), up.stride(0),
                squares.contiguous(), out, n, columns, eps, BLOCK=SILU_BLOCK, **_sums(columns), num_warps=4,
                early=True,
            )  # fmt: skip
    return out


def ahead() -> Iterator[Variant]:
    rows = {name: "*bf16:16" for name in ("residual", "norm_weight", "y", "z")}
    for shape in ((4, 4096, 4096), (16, 4096, 14336), (32, 4096, 4096), (64, 4096, 14336)):
        yield from linear.variants(
            add_skinny_mm_kernel, "add_skinny_mm", shape, {**rows, "squares": "*fp32:16"}, {"SUM_COLUMNS": SUM_COLUMNS}
        )
    signature = {"squares": "*fp32:16", "eps": "fp32", "out": "*bf16:16"}
    for shape in ((4, 6144, 4096), (16, 6144, 4096), (32, 4096, 4096), (64, 4096, 4096)):
        yield from linear.variants(
            scaled_skinny_mm_kernel, "scaled_skinny_mm", shape, signature, {"bias": None, **_sums(shape[2])}
        )
    for name, stored in linear.stored_ahead():
        # On sm_90 one row of float8 is loaded, and one of int4 has tiles of 64 columns.
        shape = (1 if name in ("float8", "int4") else 4, 4096, 4096)
        yield from linear.variants(
            add_skinny_mm_kernel, "add_skinny_mm", shape, {**rows, "squares": "*fp32:16"}, {"SUM_COLUMNS": SUM_COLUMNS}, name,
            stored,
        )  # fmt: skip
        yield from linear.variants(
            scaled_skinny_mm_kernel, "scaled_skinny_mm", shape, signature, {"bias": None, **_sums(4096)}, name, stored
        )
    sizes = dict.fromkeys(("gate_row", "up_row", "N", "columns"), "i32:16")
    signature |= {"gate": "*bf16:16", "up": "*bf16:16", **sizes}
    yield Variant("scaled_silu_mul", scaled_silu_mul_kernel, signature, {"BLOCK": SILU_BLOCK, **_sums(4096)})
