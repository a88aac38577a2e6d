"""int4 where each warp has a chunk of k: products with numbers as they come out of their words.

Such a product is bound by instructions, so the eight numbers of a word cost seven: `lop3` takes a pair of them, in the order
of `words.py`, and makes it two numbers of 16 bits, `OFFSET` + number each, whose last bits are the number's (plus 8). `OFFSET`
is not taken off again. A group's sum is

    sum((q * s + z) * x) = s * sum((OFFSET + q) * x) + (z - OFFSET * s) * sum(x)

where all three sums are in float32, and `sum(x)` is a product with ones, one for all columns. No weight is rounded. What is
taken off is at most some thousand times the result (where all of `x` is of one sign), of 2^24 that float32 tells apart. In
float16, whose result has more digits, `OFFSET` is smaller, for an instruction more.

A row with an infinite number becomes NaN as a whole, where a product with the dequantized weight may be infinite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.linear.quantized import INTERPRETED, load_scales
from spec_ops.backends.triton.linear.words import load_rows, pair_numbers, word_rows

OFFSET_BF16, OFFSET_FP16 = tl.constexpr(136.0), tl.constexpr(24.0)


def _pair(shift: int, mask: int, offset: int) -> str:
    """PTX: `$0`, what `mask` leaves of both halves of the word `$1` shifted right (left, if negative), xor `offset`."""
    move = f"sh{'r.u32' if shift > 0 else 'l.b32'} p, $1, {abs(shift)}" if shift else "mov.b32 p, $1"
    constants = f"0x{mask:04X}{mask:04X}, 0x{offset:04X}{offset:04X}"
    return f"{{ .reg .b32 p; {move}; lop3.b32 $0, p, {constants}, 0x6A; }}"  # (a & b) ^ c


# Numbers i and i + 4. To the last bits of 136 in bfloat16; in float16 to the first four behind the point of 24.
_BF16_0, _BF16_1, _BF16_2, _BF16_3 = (tl.constexpr(_pair(4 * i, 0x000F, 0x4308)) for i in range(4))
_FP16_0, _FP16_1, _FP16_2, _FP16_3 = (tl.constexpr(_pair(4 * i - 6, 0x03C0, 0x4E00)) for i in range(4))


@triton.jit
def _pairs(words, I: tl.constexpr, BF16: tl.constexpr, FP16: tl.constexpr, dtype: tl.constexpr):
    """Numbers `I` and `I + 4` of each word, plus the offset of `dtype`, side by side in 32 bits. `BF16`, `FP16`: assembly."""
    if INTERPRETED:
        bits = (words >> (4 * I)) & 0x000F000F ^ 0x00080008
        base = OFFSET_BF16 - 8 if dtype == tl.bfloat16 else OFFSET_FP16 - 8
        low = ((bits & 0xF).to(tl.float32) + base).to(dtype).to(tl.int16, bitcast=True)
        high = ((bits >> 16).to(tl.float32) + base).to(dtype).to(tl.int16, bitcast=True)
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        return tl.inline_asm_elementwise(
            BF16 if dtype == tl.bfloat16 else FP16, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def int4_numbers(words, dtype: tl.constexpr):
    """The numbers `[chunks, n, k]` of `words [chunks, n, k / 8]` plus the offset of `dtype`, k in the order of `words.py`."""
    parts = tl.reshape(words, [words.shape[0], words.shape[1], 4, words.shape[2] // 4])
    first = tl.join(_pairs(parts, 0, _BF16_0, _FP16_0, dtype), _pairs(parts, 2, _BF16_2, _FP16_2, dtype))
    second = tl.join(_pairs(parts, 1, _BF16_1, _FP16_1, dtype), _pairs(parts, 3, _BF16_3, _FP16_3, dtype))
    return pair_numbers(first, second, dtype)


@triton.jit
def int4_word_products(
    x, x_stride, weight, scale, zero, scale_row, scale_column, tile, first, end, n, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_N, BLOCK_M]` sums over blocks `first` to `end` of k; `weight` is a descriptor of words."""
    dtype: tl.constexpr = x.dtype if x_stride is None else x.dtype.element_ty
    OFFSET: tl.constexpr = OFFSET_BF16 if dtype == tl.bfloat16 else OFFSET_FP16
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    sums = tl.zeros([CHUNKS, BLOCK_N, BLOCK_M], tl.float32)
    # Joined, as the numbers are: that tells Triton which order of k they have, and that rows are the same for both products.
    half = tl.full([CHUNKS, BLOCK_N, CHUNK // 2], 1, dtype)
    ones = tl.reshape(tl.join(half, half), [CHUNKS, BLOCK_N, CHUNK])
    row, chunk, chunks = n[None, :], tl.arange(0, CHUNKS)[:, None], K // CHUNK
    # Scales are asked for a block ahead: Triton's pipeline has the operands of products alone.
    s = load_scales(scale, scale_row, scale_column, row, first * CHUNKS + chunk, N, chunks, CHUNK, 1, COLUMNS)
    if zero is not None:
        z = load_scales(zero, scale_row, scale_column, row, first * CHUNKS + chunk, N, chunks, CHUNK, 1, COLUMNS)
    for block in tl.range(first, end, num_stages=STAGES):
        # Rows first: numbers would be made, and wait in registers, ahead of the wait for rows.
        rows = word_rows(load_rows(x, x_stride, block, M, K, BLOCK_M, CHUNKS, CHUNK), False)
        columns = int4_numbers(weight.load([block * CHUNKS, tile * BLOCK_N, 0]), dtype)
        rest = -OFFSET * s
        if zero is not None:
            rest += z
        sums += tl.dot(columns, rows) * tl.expand_dims(s, -1)
        sums += tl.dot(ones, rows) * tl.expand_dims(rest, -1)
        chunk_ahead = (block + 1) * CHUNKS + chunk
        s = load_scales(scale, scale_row, scale_column, row, chunk_ahead, N, chunks, CHUNK, 1, COLUMNS)
        if zero is not None:
            z = load_scales(zero, scale_row, scale_column, row, chunk_ahead, N, chunks, CHUNK, 1, COLUMNS)
    return tl.sum(sums, 0)
