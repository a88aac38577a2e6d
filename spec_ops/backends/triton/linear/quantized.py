"""Weights of 8 and 4 bits inside a kernel: numbers of 16 bits in registers, and the scales of what they are summed to.

A product with a weight `stored * scale` is a product with what is stored, times the scale: exact numbers meet the tensor cores,
and a scale costs one multiplication of a sum. Where all of k shares it (per row and per tensor), that is the last sum; where
blocks or groups of k do, that of each. What `zero` adds to a weight is `zero * sum(x)`, a product with ones. So no weight is
rounded after it was dequantized. (int4 beside few rows: `int4.py`.)

Formats: `backends/weight_format.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

WARPGROUP = tl.constexpr(64)  # columns from which a tile is one product of 128 threads; below, warps have a chunk of k each
ROWS_IN_PLACE = tl.constexpr(64)  # up to so many, products add in place, and scales of whole rows come at the end
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # by Triton's interpreter, which knows no assembly


def _pairs(kind: str, offset: str) -> str:
    """PTX: the two numbers of each of four bytes `$4`, as pairs of 16 bits `$0` to `$3`.

    A byte of the word, and one of the word shifted by half a byte, have a number each in their lower half. These become the
    last bits of `offset`, exclusive or 8, and lose it again.
    """
    take = "".join(
        f"prmt.b32 p{i}, $4, high, 0x0{4 + i}0{i}; lop3.b32 p{i}, p{i}, 0x000F000F, 0x{2 * offset}, 0x6A; "  # (a & b) ^ c
        for i in range(4)
    )
    give = "".join(f"sub.{kind}x2 ${i}, p{i}, offset; " for i in range(4))
    return f"{{ .reg .b32 high, offset, p<4>; mov.b32 offset, 0x{2 * offset}; shr.u32 high, $4, 4; {take}{give}}}"


_PAIRS_BF16 = tl.constexpr(_pairs("bf16", "4308"))  # 136
_PAIRS_FP16 = tl.constexpr(_pairs("f16", "6408"))  # 1032


@triton.jit
def numbers(block, dtype: tl.constexpr, BITS: tl.constexpr):
    """What a block `[..., stored]` of a weight holds, `[..., k]` of `dtype`: float8, int8, or two numbers of -8 to 7 a byte.

    No conversion is one of those that a multiprocessor does 16 of at a time: float8 becomes bfloat16 by float16 and float32,
    all exact. An integer of 8 bits plus 128 is put in the last bits of 1024 in float16, whose unit these are, and a number of 4
    bits plus 8 in those of 1024, or of 128 in bfloat16: two numbers at a time, in 13 instructions for the 8 of a word.
    """
    if BITS == 8 and block.dtype == tl.int8:
        bits = ((block.to(tl.int16) & 0xFF) ^ 0x80) | 0x6400
        wide = (bits.to(tl.float16, bitcast=True) - 1152).to(tl.float32).to(dtype)
    elif BITS == 8:
        wide = block.to(tl.float16).to(tl.float32).to(dtype)
    else:
        if INTERPRETED:
            BASE: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
            OFFSET: tl.constexpr = 136 if dtype == tl.bfloat16 else 1032
            bits = block.to(tl.int16)
            low = (((bits & 0xF) ^ 8) | BASE).to(dtype, bitcast=True) - OFFSET
            high = ((((bits >> 4) & 0xF) ^ 8) | BASE).to(dtype, bitcast=True) - OFFSET
        else:
            pairs = tl.inline_asm_elementwise(
                _PAIRS_BF16 if dtype == tl.bfloat16 else _PAIRS_FP16, "=r,=r,=r,=r,r", [block], dtype=tl.int32, is_pure=True,
                pack=4,
            )  # fmt: skip
            low = pairs.to(tl.int16).to(dtype, bitcast=True)
            high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
        wide = joined(low, high)
    return wide


@triton.jit
def joined(low, high):
    """`[..., 2 * k]` of the even and the odd columns."""
    both = tl.join(low, high)
    if len(low.shape) == 3:
        wide = tl.reshape(both, [low.shape[0], low.shape[1], 2 * low.shape[2]])
    else:
        wide = tl.reshape(both, [low.shape[0], 2 * low.shape[1]])
    return wide


@triton.jit
def load_scales(
    scale, row_stride, column_stride, n, chunk, N, chunks, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The scales of rows `n` for the chunks of k numbered `chunk`, in float32; 0 beyond the weight. Their shapes broadcast."""
    column = chunk * CHUNK // COLUMNS
    at = scale + (n // ROWS) * row_stride + column * column_stride
    return tl.load(at, mask=(n < N) & (chunk < chunks), other=0.0).to(tl.float32)


@triton.jit
def scaled(acc, scale, row_stride, n, N):
    """`acc [BLOCK_N, BLOCK_M]`, summed over all of k, times the scales of rows `n`."""
    return acc * tl.load(scale + n * row_stride, mask=n < N, other=0.0).to(tl.float32)[:, None]


@triton.jit
def chunked_rows(x, x_stride, block, M, K, BLOCK_M: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """The rows in block number `block` of k, `[CHUNKS, CHUNK, BLOCK_M]`; 0 beyond row `M` and beyond k.

    `x` is a descriptor, or a pointer to rows `x_stride` apart. Rows beyond `M` take TMA longer than others, and loads no time.
    """
    if x_stride is None:
        return tl.permute(x.load([block * CHUNKS, 0, 0]), (0, 2, 1))
    else:
        chunk = block * CHUNKS + tl.arange(0, CHUNKS)[:, None, None]
        k = chunk * CHUNK + tl.arange(0, CHUNK)[None, :, None]
        row = tl.arange(0, BLOCK_M)[None, None, :]
        return tl.load(x + row.to(tl.int64) * x_stride + k, mask=(row < M) & (chunk < K // CHUNK), other=0.0)


@triton.jit
def quantized_products(
    x, x_stride, weight, scale, zero, scale_row, scale_column, tile, first, end, n, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_N, BLOCK_M]` sums over blocks `first` to `end` of k; without the scales of rows (`COLUMNS` is 0), unless rows are
    many. Then each block's sum is scaled, since a product in place has ptxas begin no instruction before the last one ended."""
    dtype: tl.constexpr = x.dtype if x_stride is None else x.dtype.element_ty
    STORED: tl.constexpr = BLOCK_K * BITS // 8
    CHUNKED: tl.constexpr = len(weight.block_shape) == 3
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK if CHUNKED else 1
    if CHUNKED:
        sums = tl.zeros([CHUNKS, BLOCK_N, BLOCK_M], tl.float32)
        ones = tl.full([CHUNKS, BLOCK_N, CHUNK], 1, dtype)
        row, chunk = n[None, :], tl.arange(0, CHUNKS)[:, None]
        chunks = K // CHUNK
    else:
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        ones = tl.full([BLOCK_N, BLOCK_K], 1, dtype)
        row, chunk = n, 0
        chunks = tl.cdiv(K, BLOCK_K)
    if COLUMNS == 0 and BLOCK_M > ROWS_IN_PLACE:
        s = tl.load(scale + n * scale_row, mask=n < N, other=0.0).to(tl.float32)
    if COLUMNS > 0:
        # Scales are asked for a block ahead: Triton's pipeline has the operands of products alone.
        SPAN: tl.constexpr = CHUNK if CHUNKED else BLOCK_K
        s = load_scales(scale, scale_row, scale_column, row, first * CHUNKS + chunk, N, chunks, SPAN, ROWS, COLUMNS)
        if zero is not None:
            z = load_scales(zero, scale_row, scale_column, row, first * CHUNKS + chunk, N, chunks, SPAN, ROWS, COLUMNS)
    for block in tl.range(first, end, num_stages=STAGES):
        if CHUNKED:
            columns = weight.load([block * CHUNKS, tile * BLOCK_N, 0])
            rows = chunked_rows(x, x_stride, block, M, K, BLOCK_M, CHUNKS, CHUNK)
        else:
            columns = weight.load([tile * BLOCK_N, block * STORED])
            rows = tl.permute(x.load([0, block * BLOCK_K]), (1, 0))
        if COLUMNS > 0:
            columns = numbers(columns, dtype, BITS)
            sums += tl.dot(columns, rows) * tl.expand_dims(s, -1)
            if zero is not None:
                sums += tl.dot(ones, rows) * tl.expand_dims(z, -1)
        elif BLOCK_M > ROWS_IN_PLACE:
            sums += tl.dot(numbers(columns, dtype, BITS), rows) * tl.expand_dims(s, -1)
        else:
            sums = tl.dot(numbers(columns, dtype, BITS), rows, sums)
        if COLUMNS > 0:
            chunk_ahead = (block + 1) * CHUNKS + chunk
            s = load_scales(scale, scale_row, scale_column, row, chunk_ahead, N, chunks, SPAN, ROWS, COLUMNS)
            if zero is not None:
                z = load_scales(zero, scale_row, scale_column, row, chunk_ahead, N, chunks, SPAN, ROWS, COLUMNS)
    if CHUNKED:
        sums = tl.sum(sums, 0)
    return sums
