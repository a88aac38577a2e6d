"""Products of up to 128 rows of float8 with a weight of float8 on Hopper (sm_90), in Gluon: nothing is converted, both are what
the tensor cores multiply.

Those keep some 14 bits of a sum of float8 products. So each block of 128 of k is a product of its own, and added to the sum in
float32 registers, times its scales where parts of k have their own; those of whole rows multiply the last sum.

A warp loads the weight, the rows and scales of their blocks some blocks ahead, and how programs share the blocks of k is in
`hopper_shares.py`. A warpgroup has 64 columns and all rows.

Rows of bfloat16 come in two parts (`row_parts.py`), whose products with a block of the weight are one sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from spec_ops.backends.float8_rows import Float8Operands, float8_operands, in_blocks
from spec_ops.backends.triton.attention.hopper.program import arrive, await_predecessors, next_stage, opaque_zero
from spec_ops.backends.triton.linear.hopper_shares import combined, divided, load_blocks, shares, store_sums, tiles_of
from spec_ops.backends.triton.linear.hopper_tiles import (
    BLOCK_K,
    WIDTH,
    Float8Tile,
    choose_float8,
    choose_parts,
    float8_mm_refusal,
)
from spec_ops.backends.triton.linear.operands import Weight, check_operands
from spec_ops.backends.triton.linear.row_parts import PARTS, row_parts
from spec_ops.backends.triton.runtime.ahead import Variant, variant_of
from spec_ops.backends.triton.runtime.launch import Target, arch_of, device_guard, launch, num_sms, recorded
from spec_ops.backends.weight_format import BLOCK, weight_format

SCALE_ROWS = gl.constexpr(BLOCK)


@gluon.jit
def _block_scale(scale, row_stride, column_stride, n0, block, N, K, BLOCK_K: gl.constexpr):
    """Of the 64 columns from `n0` on, which lie in one block of 128 x 128."""
    row = gl.minimum(n0, N - 1) // SCALE_ROWS
    column = gl.minimum(block, K // BLOCK_K - 1)
    return gl.load(scale + row.to(gl.int64) * row_stride + column.to(gl.int64) * column_stride).to(gl.float32)


@gluon.jit
def _multiply(
    x_smem, w_smem, f_smem, full, free, x_scale, x_row, scale, scale_row, scale_column, partial, counters, M, N, K, bias, out,
    start, stop, blocks, index, share, longer, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    W_BLOCKS: gl.constexpr, X_PARTS: gl.constexpr, PDL: gl.constexpr, WARPGROUP: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its columns of each of its program's tiles, all rows."""
    WIDTH: gl.constexpr = w_smem.shape[1]
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    BLOCK_K: gl.constexpr = x_smem.shape[2]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    of_rows: gl.constexpr = gl.SliceLayout(0, sums)
    await_predecessors(PDL)
    stage = 0
    phase = 0
    position = start
    while position < stop:
        tile = position // blocks
        first = position - tile * blocks
        last = gl.minimum(blocks, stop - tile * blocks)
        n0 = (tile * CONSUMERS + WARPGROUP) * WIDTH
        nothing = gl.zeros([WIDTH, BLOCK_M], gl.float32, sums)
        acc = nothing
        w_scale = 1.0
        if W_BLOCKS:
            w_scale = _block_scale(scale, scale_row, scale_column, n0, first, N, K, BLOCK_K)
        for block in range(first, last):
            factor = w_scale
            if W_BLOCKS:
                w_scale = _block_scale(scale, scale_row, scale_column, n0, block + 1, N, K, BLOCK_K)
            mbarrier.wait(full.index(stage), phase)
            columns = w_smem.index(stage * CONSUMERS + WARPGROUP)
            rows = x_smem.index(stage * X_PARTS).permute((1, 0))
            token = warpgroup_mma(columns, rows, nothing, use_acc=False, is_async=True)
            if X_PARTS == 2:
                rests = x_smem.index(stage * X_PARTS + 1).permute((1, 0))
                token = warpgroup_mma(columns, rests, token, use_acc=True, is_async=True)
            product = warpgroup_mma_wait(0, [token])
            if f_smem is not None:
                product = product * gl.expand_dims(f_smem.index(stage).load(of_rows) * factor, 0)
            elif W_BLOCKS:
                product = product * factor
            acc += product
            arrive(free.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)

        complete = True
        if partial is not None:
            acc, complete = combined(
                acc, partial, counters, tile, first, last, blocks, index, share, longer, CONSUMERS, WARPGROUP
            )  # fmt: skip
        if complete:
            if f_smem is None:
                # The zero: else addresses of all rows are kept through loops.
                m = gl.minimum(gl.arange(0, BLOCK_M, of_rows) + opaque_zero(), M - 1)
                acc = acc * gl.expand_dims(gl.load(x_scale + m * x_row).to(gl.float32), 0)
            n = n0 + gl.arange(0, WIDTH, gl.SliceLayout(1, sums))
            if not W_BLOCKS:
                acc = acc * gl.expand_dims(gl.load(scale + gl.minimum(n, N - 1) * scale_row).to(gl.float32), 1)
            if bias is not None:
                acc = acc + gl.expand_dims(gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32), 1)
            store_sums(out, acc, n0, M, N, True)
        position = tile * blocks + last


@gluon.jit(do_not_specialize=["M", "x_row", "x_column"])
def hopper_float8_kernel(
    x, x_scale, x_row, x_column, weight, scale, scale_row, scale_column, partial, counters, M, N, K, weight_rows, row_stride,
    bias, out,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, X_BLOCKS: gl.constexpr, W_BLOCKS: gl.constexpr,
    X_PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`x`, `weight`: descriptors of all rows by a block of k, and of a warpgroup's columns by as much of k. With `X_PARTS` of 2
    rows are sums of those of the first tile of `x` and of the second. `x_scale` and `scale`, with their strides: of blocks of k
    (`X_BLOCKS`, `W_BLOCKS`) or of whole rows, 0 where all share one. The rest: `skinny_mm_kernel`."""
    BLOCK_M: gl.constexpr = x.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    fence_async_shared()
    WIDTH: gl.constexpr = weight.block_shape[0]
    x_smem = gl.allocate_shared_memory(x.dtype, [STAGES * X_PARTS, BLOCK_M, BLOCK_K], x.layout)
    w_smem = gl.allocate_shared_memory(weight.dtype, [STAGES * CONSUMERS, WIDTH, BLOCK_K], weight.layout)
    if X_BLOCKS:
        f_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        factors = x_scale
    else:
        f_smem: gl.constexpr = None  # type: ignore[no-redef]
        factors: gl.constexpr = None  # type: ignore[no-redef]
    index = gl.program_id(0)
    start, stop, share, longer, blocks = shares(partial, gl.cdiv(N, CONSUMERS * WIDTH), gl.cdiv(K, BLOCK_K))
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_smem, w_smem, f_smem, full, free, x_scale, x_row, scale, scale_row, scale_column, partial, counters, M, N,
                    K, bias, out, start, stop, blocks, index, share, longer, CONSUMERS, STAGES, W_BLOCKS, X_PARTS, PDL, 0,
                )),
                (load_blocks, (
                    x, weight, weight_rows, row_stride, N, x_smem, w_smem, full, free, start, stop, blocks, CONSUMERS, STAGES,
                    PDL, factors, x_row, x_column, f_smem, M, X_PARTS,
                )),
            ],
            [1], [40],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 2)
        gl.warp_specialize(
            [
                (_multiply, (
                    x_smem, w_smem, f_smem, full, free, x_scale, x_row, scale, scale_row, scale_column, partial, counters, M, N,
                    K, bias, out, start, stop, blocks, index, share, longer, CONSUMERS, STAGES, W_BLOCKS, X_PARTS, PDL, 0,
                )),
                (_multiply, (
                    x_smem, w_smem, f_smem, full, free, x_scale, x_row, scale, scale_row, scale_column, partial, counters, M, N,
                    K, bias, out, start, stop, blocks, index, share, longer, CONSUMERS, STAGES, W_BLOCKS, X_PARTS, PDL, 1,
                )),
                (load_blocks, (
                    x, weight, weight_rows, row_stride, N, x_smem, w_smem, full, free, start, stop, blocks, CONSUMERS, STAGES,
                    PDL, factors, x_row, x_column, f_smem, M, X_PARTS,
                )),
            ],
            [4, 1], [232, 40],
        )  # fmt: skip


def float8_mm(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    dtype: torch.dtype, tile: Float8Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """`spec_ops.ops.linear.float8_mm_op`; `tile`: in place of what `choose_float8` takes.

    Raises:
        TypeError, ValueError: what `float8_operands` refuses, and operands that TMA cannot read.
        BackendError: a GPU that is not of sm_90.
    """
    operands = float8_operands("float8_mm", x, x_scale, weight, scale, bias, dtype)
    (m, k), n = x.shape, weight.shape[0]
    if (refusal := float8_mm_refusal(m, n, k, dtype, arch_of(x.device))) is not None:
        raise refusal
    for name, rows in (("x", x), ("weight", weight)):
        stride = rows.stride(0) if rows.shape[0] > 1 else k
        if rows.stride(1) != 1 or stride < k or stride % 16 or rows.data_ptr() % 16:
            raise ValueError(
                f"float8_mm: `{name}` must have contiguous rows that start at multiples of 16 bytes, got strides "
                f"{tuple(rows.stride())} at address {rows.data_ptr():#x}"
            )
    out = x.new_empty(m, n, dtype=dtype)
    if out.numel():
        x_scale = _near(x_scale.float() if operands.x_blocks else x_scale)  # float32: it is copied as it lies
        tile = tile or choose_float8(m, n, k, operands.x_blocks, num_sms(x.device))
        _launch(x, x_scale, weight, scale, bias, out, tile, operands)
    return out


def product(
    x: torch.Tensor, weights: Weight, bias: torch.Tensor | None, out: torch.Tensor, tile: Float8Tile | None = None
) -> bool:
    """Computes `skinny_mm` of rows of bfloat16 on sm_90 into `out` and gives True, where `choose_parts` has a tile (or there is
    a `tile`); raises as `skinny_mm.run` does."""
    (m, k), (weight, scale, *_) = x.shape, weights
    if scale is None or weight.dtype != torch.float8_e4m3fn:
        return False
    stored, n = weight_format("skinny_mm", weight, scale, None), weight.shape[0]
    tile = tile or choose_parts(m, n, k, stored, x.dtype, num_sms(x.device))
    if tile is None:
        return False
    check_operands("skinny_mm", x, weight)
    parts, x_scale = row_parts(x if x.stride(1) == 1 else x.contiguous(), tile.block_m)
    _launch(parts, x_scale, weight, scale, bias, out, tile, Float8Operands(False, in_blocks(stored, scale)), PARTS)
    return True


def _launch(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor, tile: Float8Tile, operands: Float8Operands, parts: int = 1,
) -> None:  # fmt: skip
    (m, n), k = out.shape, x.shape[1]
    scale = _near(scale)
    block_m, consumers, stages, splits = tile
    programs, partial, counters = divided(
        x.device, "hopper_float8", tiles_of(n, consumers), k // BLOCK_K, consumers, block_m, splits
    )  # fmt: skip
    layout = gl.NVMMASharedLayout(128, 8, rank=2)
    with device_guard(x):
        launch(
            hopper_float8_kernel, (programs,),
            TensorDescriptor(x, [x.shape[0], k], [x.stride(0) if m > 1 else k, 1], [block_m, BLOCK_K], layout),
            x_scale, *_strides(x_scale),
            TensorDescriptor(weight, [n, k], [weight.stride(0) if n > 1 else k, 1], [WIDTH, BLOCK_K], layout),
            scale, *_strides(scale), partial, counters, m, n, k, weight, weight.stride(0),
            None if bias is None else bias.contiguous(), out, CONSUMERS=consumers, STAGES=stages,
            X_BLOCKS=operands.x_blocks, W_BLOCKS=operands.w_blocks, X_PARTS=parts, num_warps=4, early=True,
        )  # fmt: skip


def _near(scale: torch.Tensor) -> torch.Tensor:
    """`scale`, or a copy if its rows are not within 2^31 numbers, as the kernel addresses them."""
    return scale if scale.shape[0] * scale.stride(0) < 2**31 else scale.contiguous()


def _strides(scale: torch.Tensor) -> tuple[int, int]:
    """0 for a dimension of one."""
    return 0 if scale.shape[0] == 1 else scale.stride(0), 0 if scale.shape[1] == 1 else scale.stride(1)


def ahead() -> Iterator[Variant]:
    for (m, n, k), blocks in itertools.product(((64, 6144, 4096), (128, 4096, 14336), (128, 28672, 4096)), (False, True)):
        x, weight = torch.empty(m, k, dtype=torch.bfloat16, device="meta"), Weight(*_weight(n, k, blocks))
        with recorded(Target(90, 132)) as launches:
            product(x, weight, None, torch.empty(m, n, dtype=torch.bfloat16, device="meta"))
        name = f"hopper_float8, scales of {'blocks' if blocks else 'rows'}, {m} x {n} x {k} in two parts"
        yield variant_of(name, launches[1], archs=(90,), programs=1)
    for blocks in (False, True):
        for m, n in ((8, 4096), (16, 28672), (32, 4096), (32, 28672), (64, 4096), (64, 28672), (128, 4096), (128, 28672)):
            yield _variant(m, n, 4096, blocks)


def _variant(m: int, n: int, k: int, blocks: bool, tile: Float8Tile | None = None) -> Variant:
    x, x_scale = (
        torch.empty(m, k, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(k // BLOCK_K if blocks else 1, m, device="meta").t(),
    )
    weight, scale = _weight(n, k, blocks)
    with recorded(Target(90, 132)) as launches:
        float8_mm(x, x_scale, weight, scale, None, torch.bfloat16, tile)
    name = f"hopper_float8, scales of {'blocks' if blocks else 'rows'}, {m} x {n} x {k}"
    return variant_of(name, launches[0], archs=(90,), programs=1)


def _weight(n: int, k: int, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """On the meta device, with its scale."""
    scale = torch.empty(-(-n // BLOCK), k // BLOCK, device="meta") if blocks else torch.empty(n, 1, device="meta")
    return torch.empty(n, k, dtype=torch.float8_e4m3fn, device="meta"), scale
