"""Products of 17 to 128 rows with a weight of 4 bits on Hopper (sm_90), in Gluon: numbers become 16 bits wide while the tensor
cores multiply those before them.

The contract is that of `skinny_mm.py`, with rows of bfloat16. Triton's own loop converts a block, multiplies it, and waits;
from 32 rows on either takes about as long. Here

- a warp loads the weight and the rows, some blocks ahead,
- each warpgroup has columns of its own. It starts the products of a block, whose weights are in registers, converts the next
  block while they run, and only then waits for them. Rows are read by all warpgroups of a program, from shared memory.
- scales and zero points are loaded two blocks ahead, those of 4-bit floats as one word of a column's groups in a block.

Numbers are scaled, not sums, and rounded to bfloat16 with their scale. So sums stay where they are, and the result is a product
with the dequantized weight in bfloat16. What a whole weight shares multiplies the last sum.

How programs share the blocks of k: `hopper_shares.py`.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from spec_ops.backends.triton.attention.hopper.program import arrive, await_predecessors, next_stage
from spec_ops.backends.triton.linear.hopper_shares import combined, divided, load_blocks, shares, store_sums, tiles_of
from spec_ops.backends.triton.linear.hopper_tiles import ARCH, BLOCK_K, WIDTH, HopperTile, choose, most_rows, takes
from spec_ops.backends.triton.linear.operands import Weight, check_operands, readable, scale_arguments
from spec_ops.backends.triton.runtime.ahead import Variant, variant_of
from spec_ops.backends.triton.runtime.launch import Target, device_guard, launch, num_sms, recorded
from spec_ops.backends.weight_format import WeightFormat, for_columns, weight_format

# Of a byte of int4 in a word, `-8` to `7` as a pair of bfloat16: a multiplication copies the upper half to where the upper
# number is, and 136 + number is a bfloat16 whose last bits they are.
_INT4 = "mul.lo.u32 t, $1, 0x1001; lop3.b32 t, t, 0x000F000F, 0x43084308, 0x6A; mov.b32 o, 0x43084308; sub.bf16x2 t, t, o; "
INT4_SCALED = gl.constexpr("{ .reg .b32 t, o; " + _INT4 + "mul.bf16x2 $0, t, $2; }")
INT4_SHIFTED = gl.constexpr("{ .reg .b32 t, o; " + _INT4 + "fma.rn.bf16x2 $0, t, $2, $3; }")
# Of a byte of e2m1: exponents and mantissas to where those of bfloat16 meet, then signs, then times the scale: `float4.py`.
_E2M1 = "mul.lo.u32 t, $1, 0x40040; shl.b32 s, t, 6; and.b32 t, t, 0x01C001C0; lop3.b32 t, s, 0x80008000, t, 0xEA; "
NVFP4 = gl.constexpr("{ .reg .b32 t, s; " + _E2M1 + "mul.rn.bf16x2 $0, t, $2; }")
_MXFP4 = _E2M1 + "mov.b32 u, 0x7E807E80; mul.rn.bf16x2 t, t, u; mul.rn.bf16x2 $0, t, $2; "
MXFP4 = gl.constexpr("{ .reg .b32 t, s, u; " + _MXFP4 + "}")
NV_UNIT = gl.constexpr(2.0**118)
NV_REST = gl.constexpr(2.0**8)


@gluon.constexpr_function
def byte_layout(columns, width, group):
    """Of the bytes `[columns, width / group, group]` of a weight's numbers of 4 bits: those that a thread's operand of wgmma
    holds. Four threads share a row, and have every fourth of its bytes."""
    registers = []
    c = 4
    while c < width:
        registers.append([0, 0, c] if c < group else [0, c // group, 0])
        c *= 2
    registers.append([8, 0, 0])
    row = 64
    while row < columns:
        registers.append([row, 0, 0])
        row *= 2
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [columns, width // group, group])


@gluon.jit
def _pair(wide):
    """float32 that bfloat16 holds, twice in 32 bits."""
    bits = wide.to(gl.int32, bitcast=True)
    return (bits & -0x10000) | ((bits >> 16) & 0xFFFF)


@gluon.jit
def _load_scales(scale, row_stride, column_stride, n, block, N, K, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr,
                 WORDS: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """The scales `[columns of the weight, groups of a block]` in `layout`, as they are stored; 0 beyond the weight. With
    `WORDS` those of a column are bytes of one word, `[columns]`."""
    GROUPS: gl.constexpr = max(1, BLOCK_K // COLUMNS)
    if WORDS:
        WORD: gl.constexpr = gl.pointer_type(gl.int32 if GROUPS == 4 else gl.int64)
        at = (scale + n.to(gl.int64) * row_stride + block * GROUPS).to(WORD)
        return gl.load(at, mask=(n < N) & (block * BLOCK_K < K), other=0)
    else:
        group = block * BLOCK_K // COLUMNS + gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(0, layout)), 0)
        row = gl.expand_dims(n, 1)
        at = scale + row.to(gl.int64) * row_stride + group * column_stride
        none: gl.constexpr = 0 if scale.dtype.element_ty == gl.uint8 else 0.0
        return gl.load(at, mask=(row < N) & (group < K // COLUMNS), other=none)


@gluon.jit
def _load_both(scale, zero, row_stride, column_stride, n, block, N, K, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr,
               WORDS: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """`_load_scales` of a block, and its zero points; without any the scales again, which nothing reads."""
    s = _load_scales(scale, row_stride, column_stride, n, block, N, K, BLOCK_K, COLUMNS, WORDS, layout)
    z = s
    if zero is not None:
        z = _load_scales(zero, row_stride, column_stride, n, block, N, K, BLOCK_K, COLUMNS, WORDS, layout)
    return s, z


@gluon.jit
def _bytes(words, GROUPS: gl.constexpr, KIND: gl.constexpr, layout: gl.constexpr):
    """The scales of `_load_scales` in `layout`, of its words."""
    shift = 8 * gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(0, layout)), 0)
    found = (gl.expand_dims(words, 1) >> shift).to(gl.uint8)
    if KIND == "nvfp4":
        found = found.to(gl.float8e4nv, bitcast=True)
    return found


@gluon.constexpr_function
def byte_layout_2d(columns, width):
    """`byte_layout` of rows that are not divided into groups, as they lie in shared memory."""
    registers = []
    c = 4
    while c < width:
        registers.append([0, c])
        c *= 2
    registers.append([8, 0])
    row = 64
    while row < columns:
        registers.append([row, 0])
        row *= 2
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [columns, width])


@gluon.jit
def _numbers(stored, s, z, KIND: gl.constexpr, SHIFTED: gl.constexpr, WORDS: gl.constexpr, BLOCK_K: gl.constexpr,
             BYTES: gl.constexpr, operand: gl.constexpr):  # fmt: skip
    """A block of the weight in shared memory, times its scales `s` (`_load_scales`) and, if `SHIFTED`, plus `z` alike, as an
    operand `[columns, BLOCK_K]` of bfloat16."""
    COLUMNS: gl.constexpr = stored.shape[0]
    layout: gl.constexpr = byte_layout(COLUMNS, BLOCK_K // 2, BYTES)
    parts = gl.reshape(stored.load(byte_layout_2d(COLUMNS, BLOCK_K // 2)), [COLUMNS, BLOCK_K // 2 // BYTES, BYTES])
    parts = gl.convert_layout(parts, layout, assert_trivial=True).to(gl.int32)
    if WORDS:
        s = _bytes(s, BLOCK_K // 2 // BYTES, KIND, gl.SliceLayout(2, layout))
    if KIND == "int4":
        wide = s.to(gl.float32)
    elif KIND == "mxfp4":
        wide = gl.maximum(s.to(gl.int32) << 23, 0x400000).to(gl.float32, bitcast=True)
    else:
        wide = s.to(gl.float16).to(gl.float32) * NV_UNIT
    scale = gl.expand_dims(_pair(wide), 2)
    if SHIFTED:
        zero = gl.expand_dims(_pair(z.to(gl.float32)), 2)
        pairs = gl.inline_asm_elementwise(
            INT4_SHIFTED, "=r,r,r,r", [parts, scale, zero], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        SCALED: gl.constexpr = INT4_SCALED if KIND == "int4" else MXFP4 if KIND == "mxfp4" else NVFP4
        pairs = gl.inline_asm_elementwise(SCALED, "=r,r,r", [parts, scale], dtype=gl.int32, is_pure=True, pack=1)
    low = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [COLUMNS, BLOCK_K]), operand, assert_trivial=True)


@gluon.jit
def _multiply(
    x_smem, w_smem, full, free, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K, bias, out,
    start, stop, blocks, index, share, longer, KIND: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    COLUMNS: gl.constexpr, LINES: gl.constexpr, WORDS: gl.constexpr, PDL: gl.constexpr, WARPGROUP: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its columns of each of its program's tiles, all rows."""
    WIDTH: gl.constexpr = w_smem.shape[1]
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    BLOCK_K: gl.constexpr = x_smem.shape[2]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    BYTES: gl.constexpr = min(COLUMNS, BLOCK_K) // 2
    of_scales: gl.constexpr = gl.SliceLayout(2, byte_layout(WIDTH, BLOCK_K // 2, BYTES))
    SHIFTED: gl.constexpr = zero is not None
    await_predecessors(PDL)
    stage = 0
    phase = 0
    position = start
    while position < stop:
        tile = position // blocks
        first = position - tile * blocks
        last = gl.minimum(blocks, stop - tile * blocks)
        n0 = (tile * CONSUMERS + WARPGROUP) * WIDTH
        n_scales = n0 + gl.arange(0, WIDTH, gl.SliceLayout(1, of_scales))
        s, z = _load_both(scale, zero, scale_row, scale_column, n_scales, first, N, K, BLOCK_K, COLUMNS, WORDS, of_scales)
        # Two blocks ahead: one takes less time than they do to come.
        s1, z1 = _load_both(scale, zero, scale_row, scale_column, n_scales, first + 1, N, K, BLOCK_K, COLUMNS, WORDS, of_scales)
        s2, z2 = _load_both(scale, zero, scale_row, scale_column, n_scales, first + 2, N, K, BLOCK_K, COLUMNS, WORDS, of_scales)
        acc = gl.zeros([WIDTH, BLOCK_M], gl.float32, sums)
        mbarrier.wait(full.index(stage), phase)
        a = _numbers(w_smem.index(stage * CONSUMERS + WARPGROUP), s, z, KIND, SHIFTED, WORDS, BLOCK_K, BYTES, operand)
        for block in range(first + 1, last):
            token = warpgroup_mma(a, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
            ahead, phase = next_stage(stage, phase, STAGES)
            mbarrier.wait(full.index(ahead), phase)
            b = _numbers(w_smem.index(ahead * CONSUMERS + WARPGROUP), s1, z1, KIND, SHIFTED, WORDS, BLOCK_K, BYTES, operand)
            s1, z1 = s2, z2
            s2, z2 = _load_both(
                scale, zero, scale_row, scale_column, n_scales, block + 2, N, K, BLOCK_K, COLUMNS, WORDS, of_scales
            )  # fmt: skip
            # Met already, but a branch: without one the assembler moves the wait for products ahead of the conversion.
            mbarrier.wait(full.index(ahead), phase)
            acc, a, b = warpgroup_mma_wait(0, [token, a, b])  # `a` must stay where it is until then, and `b` be there
            arrive(free.index(stage))
            a = b
            stage = ahead
        token = warpgroup_mma(a, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
        acc, a = warpgroup_mma_wait(0, [token, a])
        arrive(free.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)

        complete = True
        if partial is not None:
            acc, complete = combined(
                acc, partial, counters, tile, first, last, blocks, index, share, longer, CONSUMERS, WARPGROUP
            )  # fmt: skip
        if complete:
            n = n0 + gl.arange(0, WIDTH, gl.SliceLayout(1, sums))
            if KIND == "nvfp4":
                acc = acc * (gl.load(tensor_scale) * NV_REST if tensor_scale is not None else NV_REST)
            if bias is not None:
                acc = acc + gl.expand_dims(gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32), 1)
            store_sums(out, acc, n0, M, N, LINES)
        position = tile * blocks + last


@gluon.jit(do_not_specialize=["M"])
def hopper_mm_kernel(
    x, weight, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
    weight_rows, row_stride, bias, out,
    KIND: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr, LINES: gl.constexpr,
    WORDS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`x`, `weight`: descriptors of all rows by a block of k, and of a warpgroup's columns by as much of k. `KIND`: of
    `WeightFormat`, `COLUMNS` of which share a scale. The rest: `skinny_mm_kernel`."""
    BLOCK_K: gl.constexpr = x.block_shape[1]
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    fence_async_shared()
    w_shape: gl.constexpr = weight.block_shape
    x_smem = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_shape[0], BLOCK_K], x.layout)
    w_smem = gl.allocate_shared_memory(weight.dtype, [STAGES * CONSUMERS, w_shape[0], w_shape[1]], weight.layout)
    index = gl.program_id(0)
    start, stop, share, longer, blocks = shares(partial, gl.cdiv(N, CONSUMERS * w_shape[0]), gl.cdiv(K, BLOCK_K))
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_smem, w_smem, full, free, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
                    bias, out, start, stop, blocks, index, share, longer, KIND, CONSUMERS, STAGES, COLUMNS, LINES, WORDS,
                    PDL, 0,
                )),
                (load_blocks, (
                    x, weight, weight_rows, row_stride, N, x_smem, w_smem, full, free, start, stop, blocks, CONSUMERS, STAGES,
                    PDL,
                )),
            ],
            [1], [40],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_smem, w_smem, full, free, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
                    bias, out, start, stop, blocks, index, share, longer, KIND, CONSUMERS, STAGES, COLUMNS, LINES, WORDS,
                    PDL, 0,
                )),
                (_multiply, (
                    x_smem, w_smem, full, free, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
                    bias, out, start, stop, blocks, index, share, longer, KIND, CONSUMERS, STAGES, COLUMNS, LINES, WORDS,
                    PDL, 1,
                )),
                (load_blocks, (
                    x, weight, weight_rows, row_stride, N, x_smem, w_smem, full, free, start, stop, blocks, CONSUMERS, STAGES,
                    PDL,
                )),
            ],
            [4, 1], [232, 40],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_multiply, (
                    x_smem, w_smem, full, free, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
                    bias, out, start, stop, blocks, index, share, longer, KIND, CONSUMERS, STAGES, COLUMNS, LINES, WORDS,
                    PDL, 0,
                )),
                (_multiply, (
                    x_smem, w_smem, full, free, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
                    bias, out, start, stop, blocks, index, share, longer, KIND, CONSUMERS, STAGES, COLUMNS, LINES, WORDS,
                    PDL, 1,
                )),
                (_multiply, (
                    x_smem, w_smem, full, free, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
                    bias, out, start, stop, blocks, index, share, longer, KIND, CONSUMERS, STAGES, COLUMNS, LINES, WORDS,
                    PDL, 2,
                )),
                (load_blocks, (
                    x, weight, weight_rows, row_stride, N, x_smem, w_smem, full, free, start, stop, blocks, CONSUMERS, STAGES,
                    PDL,
                )),
            ],
            [4, 4, 1], [152, 152, 40],
        )  # fmt: skip


def product(
    x: torch.Tensor, weights: Weight, bias: torch.Tensor | None, out: torch.Tensor, tile: HopperTile | None = None
) -> bool:
    """Computes `skinny_mm` on sm_90 into `out` and gives True, where `takes` says so (or there is a `tile`); raises as
    `skinny_mm.run` does."""
    (m, k), (data, scale, zero, tensor_scale) = x.shape, weights
    weight = for_columns(data, k)
    stored, n = weight_format("skinny_mm", weight, scale, zero, tensor_scale), weight.shape[0]
    if scale is None:
        return False
    if tile is None and m > (most := most_rows(n, k, stored, x.dtype, scale.dtype, ARCH)):
        raise ValueError(f"skinny_mm: `x` must have at most {most} rows, got {m}")
    if tile is None and not takes(m, n, k, stored, x.dtype, scale.dtype):
        return False
    check_operands("skinny_mm", x, weight)
    x = readable(x)
    words = _in_words(scale, stored, k)
    tile = tile or choose(m, n, k, stored, num_sms(x.device), words)
    block_m, consumers, stages, splits = tile
    programs, partial, counters = divided(
        x.device, "hopper_mm", tiles_of(n, consumers), triton.cdiv(k, BLOCK_K), consumers, block_m, splits
    )  # fmt: skip
    with device_guard(x):
        launch(
            hopper_mm_kernel, (programs,),
            TensorDescriptor(x, [m, k], [x.stride(0), 1], [block_m, BLOCK_K], gl.NVMMASharedLayout(128, 16, rank=2)),
            TensorDescriptor(
                weight, [n, k // 2], [weight.stride(0), 1], [WIDTH, BLOCK_K // 2], gl.NVMMASharedLayout(64, 8, rank=2)
            ),
            *scale_arguments(scale, zero, tensor_scale), partial, counters, m, n, k, weight, weight.stride(0), bias, out,
            KIND=stored.kind, CONSUMERS=consumers, STAGES=stages, COLUMNS=stored.columns, LINES=tile.lines,
            WORDS=words, num_warps=4, early=True,
        )  # fmt: skip
    return True


def _in_words(scale: torch.Tensor, stored: WeightFormat, k: int) -> bool:
    """Whether the scales of a column's groups in a block are bytes of one word, at a multiple of its size."""
    groups = BLOCK_K // stored.columns
    together = stored.float4 and k % BLOCK_K == 0 and scale.stride(1) == 1
    return together and scale.stride(0) % groups == 0 and scale.data_ptr() % groups == 0


def ahead() -> Iterator[Variant]:
    cases = [("int4", group, m, n, 4096) for group in (32, 64, 128) for m in (32, 64, 128) for n in (4096, 28672)]
    for kind, group in (("nvfp4", 16), ("mxfp4", 32)):
        cases += [(kind, group, m, 28672, 4096) for m in (32, 64, 128)] + [(kind, group, m, 1536, 7168) for m in (64, 128)]
        cases += [(kind, group, 64, 28672, 2880), (kind, group, 128, 5120, 2880)]
    for kind, group, m, n, k in cases:
        with recorded(Target(90, 132)) as launches:
            out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
            product(torch.empty(m, k, dtype=torch.bfloat16, device="meta"), _weights(kind, n, k, group), None, out)
        name = f"{kind} in groups of {group}" if kind == "int4" else kind
        yield variant_of(f"hopper_mm {name}, {m} x {n} x {k}", launches[0], archs=(90,), programs=1)


def _weights(kind: str, n: int, k: int, group: int) -> Weight:
    """As published, on the meta device."""
    data = torch.empty(n, k // 2, dtype=torch.uint8, device="meta")
    if kind == "int4":
        scale, zero = (torch.empty(k // group, n, dtype=torch.bfloat16, device="meta").t() for _ in range(2))
        return Weight(data, scale, zero)
    scale = torch.empty(n, k // group, dtype=torch.float8_e4m3fn if kind == "nvfp4" else torch.uint8, device="meta")
    return Weight(data, scale, None, torch.empty(1, device="meta") if kind == "nvfp4" else None)
