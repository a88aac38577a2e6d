"""Experts' products with weights of MXFP4 on Hopper (sm_90), in Gluon: numbers of 4 bits become float8, which the tensor cores
multiply.

A number of e2m1 is one of e4m3 times 2^6, with the same sign, exponent and mantissa: seven instructions make eight of a word,
where bfloat16 takes three times as many, which is what bounds these products. Rows of bfloat16 are sums of two rows of float8
(`linear/row_parts.py`). The 32 numbers that share a scale are multiplied with both parts of the rows, and the sum is scaled in
float32: so no scale is rounded, and the tensor cores, which keep some 14 bits of a sum of float8 products, add up 64 of them.

An expert's rows are cut into tiles (`expert_rows.py`). A program has a warp that loads and a warpgroup with `WIDTH` columns of
a tile, over all of k; several share a multiprocessor, and one converts while others wait. Products leave float32, and what
comes before, between and after them are launches of their own, small ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from spec_ops.backends.expert_format import inner_of
from spec_ops.backends.triton.attention.hopper.program import add, arrive, await_predecessors, next_stage
from spec_ops.backends.triton.linear.hopper_tiles import PARTS_MOST_COLUMNS
from spec_ops.backends.triton.moe.expert_rows import MAX_PAIRS, activated_rows, sorted_rows, summed_rows
from spec_ops.backends.triton.moe.few import Norms
from spec_ops.backends.triton.moe.shapes import MXFP4, meta_call
from spec_ops.backends.triton.moe.stored import formats, scales_numbers
from spec_ops.backends.triton.moe.tiles import tma_reads
from spec_ops.backends.triton.runtime.ahead import Variant, variant_of
from spec_ops.backends.triton.runtime.launch import Target, arch_of, device_guard, launch, on_gpu, recorded

# Fewer tokens are left to `few.py`, more rows of an expert, on average, to `grouped.py`: docs/notebook/mixtures.md.
FEWEST_TOKENS, MOST_ROWS = 6, 32
WIDTH = 64  # columns of the result, of a program
BLOCK_K = 256  # numbers of a row of the weight in a stage
LINE = 128  # bytes of a row of `x` in one box of TMA: what a line of shared memory holds
STAGES = {8: 3, 16: 2}  # by rows of a tile
REGISTERS = 64  # of a thread, so that four programs fit on a multiprocessor

# Unpacks a word of eight numbers into two words of e4m3, times 2^-6: the even ones, and the odd ones.
FLOAT8 = gl.constexpr(
    "{ .reg .b32 a, s; shl.b32 a, $2, 2; and.b32 a, a, 0x1C1C1C1C; shl.b32 s, $2, 4; lop3.b32 $0, s, 0x80808080, a, 0xEA; "
    "shr.u32 a, $2, 2; and.b32 a, a, 0x1C1C1C1C; lop3.b32 $1, $2, 0x80808080, a, 0xEA; }"
)


@gluon.jit
def _tile(offsets, tile, experts, EXPERTS_PAD: gl.constexpr, BLOCK_M: gl.constexpr):
    """The expert of a tile (`experts`: there is no such tile), where its rows begin, and where the expert's end. In Triton:
    `grouped._tile_rows`."""
    place = gl.arange(0, EXPERTS_PAD, gl.BlockedLayout([1], [32], [4], [0]))
    live = place < experts
    first = gl.load(offsets + place, mask=live, other=0)
    last = gl.load(offsets + place + 1, mask=live, other=0)
    tiles = (last - first + BLOCK_M - 1) // BLOCK_M
    ends = gl.associative_scan(tiles, 0, add)
    expert = gl.sum(((ends <= tile) & live).to(gl.int32), 0)
    mine = place == expert
    begin = gl.sum(gl.where(mine, first - (ends - tiles) * BLOCK_M, 0), 0) + tile * BLOCK_M
    return expert, begin, gl.sum(gl.where(mine, last, 0), 0)


@gluon.constexpr_function
def byte_layout():
    """Of the bytes `[WIDTH, GROUP / 2]` of a group: a thread has a word of two rows, which become what its operand holds."""
    registers = [[0, 1], [0, 2], [8, 0]]
    return gl.DistributedLinearLayout(registers, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16])


@gluon.jit
def _numbers(stored, group: gl.constexpr, operand: gl.constexpr):
    """Group number `group` of a block in shared memory, as `[WIDTH, GROUP]`: first the even numbers of all words, then the odd
    ones, as rows have them."""
    HALF: gl.constexpr = 16
    words = stored.slice(group * HALF, HALF, dim=1).load(byte_layout())
    even, odd = gl.inline_asm_elementwise(
        FLOAT8, "=r,=r,r", [words], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )  # fmt: skip
    both = gl.reshape(gl.permute(gl.join(even, odd), (0, 2, 1)), [stored.shape[0], 2 * HALF])
    return gl.convert_layout(both, operand, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _scales(at, pair: gl.constexpr, pairs, live):
    """Two of the scales of a row each, from `at` on, of which `pairs` pairs are left. 2^-127 counts as 0."""
    both = gl.load(at + pair, mask=live & (pair < pairs), other=0).to(gl.uint32)
    return ((both & 0xFF) << 23).to(gl.float32, bitcast=True), ((both & 0xFF00) << 15).to(gl.float32, bitcast=True)


@gluon.jit
def _load(x, weight, x_smem, w_smem, full, free, blocks, row, place, rests, STAGES: gl.constexpr):
    """The loading warp."""
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    HALF: gl.constexpr = x_smem.shape[2]
    WIDTH: gl.constexpr = w_smem.shape[1]
    STORED: gl.constexpr = w_smem.shape[2]
    HALVES: gl.constexpr = 2 * STORED // HALF
    stage = 0
    phase = 1  # all stages are free: waiting for the phase before the first does not wait
    for block in range(blocks):
        mbarrier.wait(free.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, HALVES * 2 * BLOCK_M * HALF + WIDTH * STORED)
        tma.async_copy_global_to_shared(weight, [row, block * STORED], bar, w_smem.index(stage))
        for half in gl.static_range(HALVES):
            at = (stage * HALVES + half) * 2
            k = (block * HALVES + half) * HALF
            tma.async_copy_global_to_shared(x, [place, k], bar, x_smem.index(at))
            tma.async_copy_global_to_shared(x, [rests + place, k], bar, x_smem.index(at + 1))
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply(
    x_smem, w_smem, full, free, x_scale, scale, scale_row, out, blocks, n0, begin, end, N, K, STAGES: gl.constexpr
):  # fmt: skip
    """The warpgroup that multiplies."""
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    WIDTH: gl.constexpr = w_smem.shape[1]
    HALVES: gl.constexpr = 2 * w_smem.shape[2] // x_smem.shape[2]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 4)
    n = n0 + gl.arange(0, WIDTH, gl.SliceLayout(1, sums))
    live = n < N
    at = scale + n * scale_row
    pairs = gl.where(blocks > 0, K // 64, 0)
    nothing = gl.zeros([WIDTH, BLOCK_M], gl.float32, sums)
    acc = nothing
    s0, s1 = _scales(at, 0, pairs, live)
    s2, s3 = _scales(at, 1, pairs, live)
    stage = 0
    phase = 0
    for _ in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        stored = w_smem.index(stage)
        for half in gl.static_range(HALVES):
            rows = x_smem.index((stage * HALVES + half) * 2).permute((1, 0))
            rest = x_smem.index((stage * HALVES + half) * 2 + 1).permute((1, 0))
            a0 = _numbers(stored, 4 * half, operand)
            a1 = _numbers(stored, 4 * half + 1, operand)
            a2 = _numbers(stored, 4 * half + 2, operand)
            a3 = _numbers(stored, 4 * half + 3, operand)
            p0 = warpgroup_mma(a0, rows.slice(0, 32, dim=0), nothing, use_acc=False, is_async=True)
            p1 = warpgroup_mma(a1, rows.slice(32, 32, dim=0), nothing, use_acc=False, is_async=True)
            p2 = warpgroup_mma(a2, rows.slice(64, 32, dim=0), nothing, use_acc=False, is_async=True)
            p3 = warpgroup_mma(a3, rows.slice(96, 32, dim=0), nothing, use_acc=False, is_async=True)
            p0 = warpgroup_mma(a0, rest.slice(0, 32, dim=0), p0, is_async=True)
            p1 = warpgroup_mma(a1, rest.slice(32, 32, dim=0), p1, is_async=True)
            p2 = warpgroup_mma(a2, rest.slice(64, 32, dim=0), p2, is_async=True)
            p3 = warpgroup_mma(a3, rest.slice(96, 32, dim=0), p3, is_async=True)
            at += 2
            pairs -= 2
            t0, t1 = _scales(at, 0, pairs, live)
            t2, t3 = _scales(at, 1, pairs, live)
            p0, p1, p2, p3 = warpgroup_mma_wait(0, [p0, p1, p2, p3])
            if half == HALVES - 1:
                arrive(free.index(stage))
            acc += p0 * gl.expand_dims(s0, 1)
            acc += p1 * gl.expand_dims(s1, 1)
            acc += p2 * gl.expand_dims(s2, 1)
            acc += p3 * gl.expand_dims(s3, 1)
            s0, s1, s2, s3 = t0, t1, t2, t3
        stage, phase = next_stage(stage, phase, STAGES)
    m = begin + gl.arange(0, BLOCK_M, gl.SliceLayout(0, sums))
    there = m < end
    factor = gl.load(x_scale + m, mask=there, other=0.0) * 64.0  # numbers are divided by as much
    to = out + gl.expand_dims(m.to(gl.int64) * N, 0) + gl.expand_dims(n, 1)
    gl.store(to, acc * gl.expand_dims(factor, 0), mask=gl.expand_dims(there, 0) & gl.expand_dims(live, 1))


@gluon.jit(do_not_specialize=["rests"])
def hopper_mxfp4_kernel(
    x, x_scale, weight, scale, scale_expert, scale_row, offsets, out, rests, experts, N, K, expert_rows,
    EXPERTS_PAD: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program `(columns, tile of rows)`. `x`, `weight`: descriptors of rows' parts, the rests from `rests` on, and of all
    experts' rows, `expert_rows` each; `x_scale [rows]`; `scale`: pairs of bytes, and strides in them; `offsets [experts + 1]`;
    `out [rows, N]` float32."""
    await_predecessors(PDL)
    BLOCK_M: gl.constexpr = x.block_shape[0]
    HALF: gl.constexpr = x.block_shape[1]
    WIDTH: gl.constexpr = weight.block_shape[0]
    STORED: gl.constexpr = weight.block_shape[1]
    expert, begin, end = _tile(offsets, gl.program_id(1), experts, EXPERTS_PAD, BLOCK_M)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    x_smem = gl.allocate_shared_memory(x.dtype, [4 * STORED // HALF * STAGES, BLOCK_M, HALF], x.layout)
    w_smem = gl.allocate_shared_memory(weight.dtype, [STAGES, WIDTH, STORED], weight.layout)
    n0 = gl.program_id(0) * WIDTH
    row = expert * expert_rows + n0
    blocks = gl.where(expert < experts, gl.cdiv(K, 2 * STORED), 0)
    scale += expert.to(gl.int64) * scale_expert
    gl.warp_specialize(
        [
            (_multiply, (
                x_smem, w_smem, full, free, x_scale, scale, scale_row, out, blocks, n0, begin, end, N, K, STAGES,
            )),
            (_load, (x, weight, x_smem, w_smem, full, free, blocks, row, begin, rests, STAGES)),
        ],
        [1], [24],
    )  # fmt: skip


def supports(
    x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None, gated: bool, interleaved: bool,
) -> bool:  # fmt: skip
    """Whether these kernels take a call."""
    (tokens, k), (hidden, inner) = ids.shape, (x.shape[1], inner_of(down))
    return (
        on_gpu(x)
        and arch_of(x.device) == 90
        and x.dtype == torch.bfloat16
        and tokens >= FEWEST_TOKENS
        and max(hidden, inner) <= PARTS_MOST_COLUMNS
        and 0 < tokens * k <= min(MAX_PAIRS, MOST_ROWS * gate_up.shape[0])
        and scales_numbers(
            formats(gate_up, gate_up_scale, down, down_scale, gated, interleaved), (hidden, inner), (gate_up_scale, down_scale)
        )
        and all(tma_reads(stack) and stack.stride(0) % stack.stride(1) == 0 for stack in (gate_up, down))
    )


def hopper_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, activation: str, gated: bool, interleaved: bool,
    transposed: bool, limit: float | None, alpha: float, beta: float, gate_up_scale: torch.Tensor, down_scale: torch.Tensor, *,
    norms: Norms | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As `few_between_norms`, for calls that `supports` takes."""
    norms = norms or Norms()
    experts, inner = gate_up.shape[0], inner_of(down)
    x = x if x.stride(1) == 1 else x.contiguous()
    ids, weights = ids.contiguous(), weights.contiguous()
    block_m = tile_rows(ids.numel(), experts)
    rows = sorted_rows(x, ids, experts, norms.squares, norms.eps)
    made = _products(rows.parts, rows.scale, gate_up, gate_up_scale, rows.offsets, block_m)
    form = {"GATED": gated, "INTERLEAVED": interleaved, "ACTIVATION": activation}
    parts, scale = activated_rows(made, gate_up_bias, rows.offsets, inner, (limit, alpha, beta), form)
    made = _products(parts, scale, down, down_scale, rows.offsets, block_m)
    return summed_rows(made, rows.place, ids, weights, down_bias, norms.residual, norms.norm_weight, x.dtype)


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile. A tile converts its columns of the weight, so an expert's rows are best one tile."""
    return 8 if pairs <= 5 * experts else 16


def _products(
    parts: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor, block_m: int
) -> torch.Tensor:  # fmt: skip
    """`[rows, n]` float32: rows sorted by expert (`ExpertRows`) times their experts' `weight [E, n, k / 2]`. Rows of no expert
    are not written."""
    (rows, k), (experts, n, _) = (parts.shape[0] // 2, parts.shape[1]), weight.shape
    expert, row, _ = weight.stride()
    pairs = scale.view(torch.int16)
    out = torch.empty(rows, n, dtype=torch.float32, device=parts.device)
    tiles = triton.cdiv(rows, block_m) + min(experts, rows)  # each expert may end with a tile that is not full
    with device_guard(parts):
        launch(
            hopper_mxfp4_kernel, (triton.cdiv(n, WIDTH), tiles),
            TensorDescriptor(parts, [2 * rows, k], [k, 1], [block_m, LINE], gl.NVMMASharedLayout(LINE, 8, rank=2)), x_scale,
            TensorDescriptor(
                weight, [(experts - 1) * (expert // row) + n, k // 2], [row, 1], [WIDTH, BLOCK_K // 2],
                gl.NVMMASharedLayout(BLOCK_K // 2, 8, rank=2),
            ),
            pairs, *pairs.stride()[:2], offsets, out, rows, experts, n, k, expert // row,
            EXPERTS_PAD=triton.next_power_of_2(experts), STAGES=STAGES[block_m], num_warps=4, maxnreg=REGISTERS, early=True,
        )  # fmt: skip
    return out


def ahead() -> Iterator[Variant]:
    for name, tokens, sizes, form in (
        ("gpt-oss", (16, 32, 128), (32, 4, 2880, 2880), MXFP4),
        ("Qwen3-MoE", (16, 128), (128, 8, 2048, 768), {"bits": 4}),
    ):
        for count in tokens:
            with recorded(Target(90, 132)) as launches:
                hopper_experts(*meta_call(count, *sizes, **form))
            for part, made in zip(("gate and up", "down"), launches[1::2], strict=False):
                yield variant_of(
                    f"hopper_mxfp4, {name}, {count} tokens, {part}", made, archs=(90,), options={"maxnreg": REGISTERS}
                )
