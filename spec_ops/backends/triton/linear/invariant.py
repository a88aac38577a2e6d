"""Products, sums and norms of rows whose bits do not depend on the number of rows.

A product with the weight as the left operand gives a token the same bits in a tile of 8 tokens and in one of 128, alone and
beside others, since a tensor core adds along k alike for each of its columns. So the order along k is all that must be fixed:
in steps of 16 numbers, one after the other, within each of the weight's `splits` of k, whose sums are added in their order. How
many there are is a fact of the weight and of the GPU (`config_of`). Tiles may follow the rows:

* up to `READ_ONCE` rows: `skinny_mm`, whose programs share k, with tiles of 64 columns, on Hopper of 128 or 256 for many rows;
* up to `SLICED` rows: the same, for `READ_ONCE` of them at a time;
* more: `many_rows_kernel`, in which a program computes all splits of its tile, one after the other.

Multiplications and additions are not fused (`enable_fp_fusion=False`): what is fused is the compiler's choice, and the same
function is compiled into several kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_ops.backends.triton.attention.tile import opaque_zeros
from spec_ops.backends.triton.linear import skinny_mm as linear
from spec_ops.backends.triton.linear.operands import Weight, check_operands, readable
from spec_ops.backends.triton.linear.skinny_mm import skinny_mm_kernel
from spec_ops.backends.triton.linear.tiles import MAX_ROWS, Config, Tile, fitted
from spec_ops.backends.triton.runtime.ahead import Variant, variant_of
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, num_sms, recorded

BLOCK_K = 128  # of k: what the bounds of splits are multiples of
READ_ONCE = 128  # most rows for which a weight is read once
SLICED = 256  # most rows for which it is read once for every `READ_ONCE` of them
GROUP = 8  # tiles of columns that neighbouring programs share
UNFUSED = {"enable_fp_fusion": False}
LINE = 8192  # numbers of a row that a program of a sum or a norm has at once: all of them, in most models


def config_of(m: int, n: int, k: int, sms: int, arch: int) -> Config:
    """For `m` rows, at most `READ_ONCE`. The splits, and the bounds of their blocks, do not depend on them."""
    splits = fitted(Tile(MAX_ROWS, 64, BLOCK_K, 4, 2), n, k, sms, arch).splits
    if m > MAX_ROWS and 90 <= arch < 100 and k % (BLOCK_K * splits) == 0:  # so that the bounds are those of whole blocks
        return fitted(_many_rows_on_hopper(n, splits, sms), n, k, sms, arch, splits=splits)
    # On sm_100 a tile of 8 would be of another instruction (mma.sync) than the others; on sm_90 the two agree in their bits.
    sizes = (16, 32, MAX_ROWS, READ_ONCE) if 100 <= arch < 120 else (8, 16, 32, MAX_ROWS, READ_ONCE)
    block_m = next(size for size in sizes if m <= size)
    return fitted(Tile(block_m, 64, BLOCK_K, 4, 2), n, k, sms, arch, splits=splits)


def _many_rows_on_hopper(n: int, splits: int, sms: int) -> Tile:
    """For more than `MAX_ROWS` rows. More columns mean fewer bytes of rows for each of the weight's, and one program a
    multiprocessor: of two, in a launch that begins early, some multiprocessors get both and others none. (sm_100 has another
    instruction for more than 64 columns. Figures: `docs/notebook/products.md`.)"""
    block_k = BLOCK_K // 2
    if splits == 1:
        tiles = triton.cdiv(n, 256)
        busy = tiles / (triton.cdiv(tiles, sms) * sms)
        return Tile(READ_ONCE, 256, block_k, 8, 1) if busy > 0.7 else Tile(READ_ONCE, 128, block_k, 4, 2)
    full = triton.cdiv(n, 64) * splits > 0.9 * 2 * sms
    return Tile(READ_ONCE, 64, block_k, 4, 2) if full else Tile(READ_ONCE, 128, block_k, 8, 1)


def tile_of(splits: int, arch: int) -> tuple[tuple[int, int, int], int]:
    """Rows, columns and k of a program of `many_rows_kernel`, and stages. Sums of all splits take registers of their own."""
    if arch >= 120:
        return (128, 128, 64), 3
    return ((256, 128, 64), 3) if splits == 1 else ((128, 128, 64), 4)


@triton.jit(do_not_specialize=["M"])
def many_rows_kernel(
    x, weight, bias, out, M, N, K, row_tiles, tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BOUND: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`x`, `weight`: tensor descriptors of blocks `[BLOCK_M, BLOCK_K]` and `[BLOCK_N, BLOCK_K]`. `bias [N]` or None; `out` is
    `[M, N]`, contiguous. Programs take `GROUP` tiles of columns for all rows, then the next ones."""
    await_predecessors(PDL)
    pid = tl.program_id(0)
    group = pid // (GROUP * row_tiles)
    size = tl.minimum(tiles - group * GROUP, GROUP)
    place = pid % (GROUP * row_tiles)
    tile = group * GROUP + place % size
    first_row = place // size * BLOCK_M
    blocks = tl.cdiv(K, BOUND)
    STEPS: tl.constexpr = BOUND // BLOCK_K
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in tl.range(SPLITS, num_stages=1):  # not unrolled: four sums of a tile would not fit registers
        first = split * blocks // SPLITS * STEPS
        end = tl.minimum((split + 1) * blocks // SPLITS * STEPS, tl.cdiv(K, BLOCK_K))
        acc = opaque_zeros(BLOCK_N, BLOCK_M)
        for block in tl.range(first, end, num_stages=STAGES):
            columns = weight.load([tile * BLOCK_N, block * BLOCK_K])
            rows = x.load([first_row, block * BLOCK_K])
            acc = tl.dot(columns, tl.permute(rows, (1, 0)), acc)
        if SPLITS > 1:
            total += acc
        else:
            total = acc
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = first_row + tl.arange(0, BLOCK_M)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    to = out + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


def skinny_mm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None, tensor_scale: torch.Tensor | None = None, invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See `spec_ops.ops.linear`; raises as `skinny_mm.run` does, but takes any number of rows if `invariant`.

    Raises:
        ValueError: `invariant` with a weight of 8 or 4 bits.
    """
    if not invariant:
        return linear.skinny_mm(x, weight, bias, scale, zero, tensor_scale)
    if scale is not None:
        raise ValueError("skinny_mm: `invariant` must be False with a weight of 8 or 4 bits, got True")
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_empty(m, n)
    if not out.numel():
        return out
    bias = None if bias is None else bias.contiguous()
    if m <= SLICED:
        config = config_of(min(m, READ_ONCE), n, k, num_sms(x.device), linear.arch_of(x.device))
        for rows, place in zip(x.split(READ_ONCE), out.split(READ_ONCE), strict=True):
            linear.run(skinny_mm_kernel, "skinny_mm", rows, Weight(weight), config, bias, place, **UNFUSED)
        return out
    check_operands("skinny_mm", x, weight)
    x = readable(x)
    arch = linear.arch_of(x.device)
    splits = config_of(MAX_ROWS, n, k, num_sms(x.device), arch).splits
    (block_m, block_n, block_k), stages = tile_of(splits, arch)
    row_tiles, tiles = triton.cdiv(m, block_m), triton.cdiv(n, block_n)
    with device_guard(x):
        launch(
            many_rows_kernel, (row_tiles * tiles,),
            TensorDescriptor(x, [m, k], [x.stride(0), 1], [block_m, block_k]),
            TensorDescriptor(weight, [n, k], [weight.stride(0), 1], [block_n, block_k]), bias, out, m, n, k, row_tiles, tiles,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, BOUND=BLOCK_K, SPLITS=splits, GROUP=GROUP, STAGES=stages,
            num_warps=8, **UNFUSED,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def batched_mm_kernel(
    a, b, bias, out, M, N, K, a_batch, a_row, a_column, b_batch, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`a [batch, M, K]` and `b [batch, K, N]` of any strides, `bias [N]` or None, `out [batch, M, N]` contiguous. A program has
    all of k."""
    await_predecessors(PDL)
    batch = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    columns_at = b + batch * b_batch + n[:, None].to(tl.int64) * b_column
    rows_at = a + batch * a_batch + m[None, :].to(tl.int64) * a_row
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        at = (start + k).to(tl.int64)
        columns = tl.load(columns_at + at[None, :] * b_row, mask=(n < N)[:, None] & (at < K)[None, :], other=0.0)
        rows = tl.load(rows_at + at[:, None] * a_column, mask=(m < M)[None, :] & (at < K)[:, None], other=0.0)
        acc = tl.dot(columns, rows, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    to = out + (batch * M + m)[None, :].to(tl.int64) * N + n[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


def batched_mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `spec_ops.ops.invariant`.

    Raises:
        TypeError: float64.
        ValueError: more than 65535 products.
    """
    _refuse_float64("batched_mm", "a", a)
    (batch, m, k), n = a.shape, b.shape[2]
    if batch > 65_535:  # the third dimension of a grid
        raise ValueError(f"batched_mm: `a` must be of at most 65535 matrices, got {batch}")
    out = a.new_empty(batch, m, n)
    if out.numel():
        block_m = next((size for size in (16, 32) if m <= size), 64)
        with device_guard(a):
            launch(
                batched_mm_kernel, (triton.cdiv(n, 64), triton.cdiv(m, block_m), batch), a, b,
                None if bias is None else bias.contiguous(), out, m, n, k, *a.stride(), *b.stride(),
                BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=32 if a.dtype == torch.float32 else 64, num_warps=4, **UNFUSED,
            )  # fmt: skip
    return out


def _refuse_float64(op: str, name: str, x: torch.Tensor) -> None:
    if x.dtype == torch.float64:
        raise TypeError(f"{op}: `{name}` must be float32, bfloat16 or float16 on CUDA, got torch.float64")


@triton.jit
def row_sum_kernel(x, out, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program `row`; `x [M, N]` contiguous."""
    await_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        total += tl.load(x + row * N + start + at, mask=start + at < N, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))


@triton.jit
def _added(x, residual, place, live):
    """What is normalized: `x`, or the sum of `x` and `residual`, rounded as a sum of tensors is."""
    value = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _normalized_part(value, rstd, weight, out, ROUNDED: tl.constexpr):
    """In the dtype of `out`; `weight`: of these columns, or None."""
    value *= rstd
    if weight is not None:
        if ROUNDED:
            value = value.to(out.dtype.element_ty).to(tl.float32)
        value *= weight.to(tl.float32)
    return value.to(out.dtype.element_ty)


@triton.jit
def rms_norm_kernel(
    x, residual, weight, total, out, N, eps,
    ROUNDED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `row`; `x`, `out [M, N]` contiguous, `weight [N]` or None. `residual` and `total`, its sum with `x`: as `x`, or
    None. `WHOLE`: `BLOCK` numbers are a row, which stays in registers."""
    await_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64) * N
    at = tl.arange(0, BLOCK)
    if WHOLE:
        live = at < N
        g = None if weight is None else tl.load(weight + at, mask=live, other=0.0)
        value = _added(x, residual, row + at, live)
        if total is not None:
            tl.store(total + row + at, value.to(total.dtype.element_ty), mask=live)
        rstd = tl.rsqrt(tl.sum(value * value, 0) / N + eps)
        tl.store(out + row + at, _normalized_part(value, rstd, g, out, ROUNDED), mask=live)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, N, BLOCK):
            live = start + at < N
            value = _added(x, residual, row + start + at, live)
            if total is not None:
                tl.store(total + row + start + at, value.to(total.dtype.element_ty), mask=live)
            squares += value * value
        rstd = tl.rsqrt(tl.sum(squares, 0) / N + eps)
        for start in tl.range(0, N, BLOCK):
            live = start + at < N
            g = None if weight is None else tl.load(weight + start + at, mask=live, other=0.0)
            value = _added(x, residual, row + start + at, live)
            tl.store(out + row + start + at, _normalized_part(value, rstd, g, out, ROUNDED), mask=live)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous and at a multiple of 16 bytes: for other addresses Triton compiles another layout, hence order."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _shape(columns: int) -> dict[str, Any]:
    block = min(LINE, triton.next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": min(8, max(1, block // 256))}


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """See `spec_ops.ops.invariant`; raises a TypeError for float64."""
    _refuse_float64("row_sum", "x", x)
    m, n = x.shape
    out = x.new_zeros(m, dtype=torch.float32)
    if m and n:
        x = _aligned(x)
        with device_guard(x):
            launch(row_sum_kernel, (m,), x, out, n, **_shape(n), **UNFUSED)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, rounded: bool) -> torch.Tensor:
    """See `spec_ops.ops.invariant`; raises a TypeError for float64."""
    _refuse_float64("rms_norm", "x", x)
    return _normalized(x, None, weight, None, eps, rounded)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `spec_ops.ops.invariant`; raises a TypeError for float64."""
    _refuse_float64("add_rms_norm", "x", x)
    total = x.new_empty(x.shape)
    return total, _normalized(x, residual, weight, total, eps, rounded)


def _normalized(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, total: torch.Tensor | None, eps: float,
    rounded: bool,
) -> torch.Tensor:  # fmt: skip
    m, n = x.shape
    out = x.new_empty(m, n)
    if out.numel():
        x, residual = _aligned(x), None if residual is None else _aligned(residual)
        weight = None if weight is None else weight.contiguous()
        with device_guard(x):
            launch(
                rms_norm_kernel, (m,), x, residual, weight, total, out, n, eps, ROUNDED=rounded, WHOLE=n <= LINE, **_shape(n),
                **UNFUSED, early=m <= num_sms(x.device),  # few rows: a launch is most of the time
            )  # fmt: skip
    return out


def ahead() -> Iterator[Variant]:
    for m in (4, 16, 64, 128):
        for n, k in ((6144, 4096), (4096, 14336), *([(28_672, 4096), (36_864, 7168)] if m > MAX_ROWS else [])):
            yield from linear.variants(
                skinny_mm_kernel, "skinny_mm, invariant", (m, n, k), {"out": "*bf16:16"}, {"bias": None}, chooses=config_of
            )
    x, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (8192, 6144))
    with recorded() as launches:
        row_sum(x.new_empty(4, 4096, dtype=torch.float32))
        rms_norm(x[:4], weight[0], 1e-5, False)
        add_rms_norm(x[:4], x[4:8], weight[0], 1e-5, False)
        batched_mm(x.new_empty(128, 4, 128), x.new_empty(128, 128, 512), None)
        for m in (4, 64):
            rows, columns = (x.new_empty(1, size, 4096, dtype=torch.float32) for size in (m, 6144))
            batched_mm(rows, columns.transpose(1, 2), None)
    names = ("row_sum", "rms_norm", "add_rms_norm", "batched_mm", "batched_mm of float32", "batched_mm of 64 rows of float32")
    for name, found in zip(names, launches, strict=True):
        # Early or not, a norm of few rows has too few programs to spread unevenly.
        yield variant_of(f"{name}, invariant", found._replace(early=False), options=UNFUSED)
    for splits, archs in itertools.product((1, 2, 4), ((90, 100, 103), (120,))):
        (block_m, block_n, block_k), stages = tile_of(splits, archs[0])
        yield Variant(
            f"skinny_mm of many rows, invariant, {splits} splits on sm_{archs[0]}",
            many_rows_kernel,
            {
                "x": f"tensordesc<bf16[{block_m}, {block_k}]>", "weight": f"tensordesc<bf16[{block_n}, {block_k}]>",
                "out": "*bf16:16", "M": "i32", "N": "i32:16", "K": "i32:16", "row_tiles": "i32", "tiles": "i32",
            },
            {
                "bias": None, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "BOUND": BLOCK_K, "SPLITS": splits,
                "GROUP": GROUP, "STAGES": stages,
            },
            num_warps=8,
            num_stages=stages,
            options=UNFUSED,
            archs=archs,
        )  # fmt: skip
