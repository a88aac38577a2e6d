"""int4 of up to 16 rows: whole words of eight numbers, taken apart where they lie."""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.linear.quantized import INTERPRETED, load_scales

OFFSET_BF16, OFFSET_FP16 = tl.constexpr(136.0), tl.constexpr(24.0)


def _pair(shift: int, mask: int, base: int) -> str:
    step = f"shr.u32 p, $1, {shift}" if shift > 0 else f"shl.b32 p, $1, {-shift}" if shift else "mov.b32 p, $1"
    return f"{{ .reg .b32 p; {step}; lop3.b32 $0, p, 0x{mask * 0x10001:08X}, 0x{base * 0x10001:08X}, 0x6A; }}"


_B0, _B1, _B2, _B3 = (tl.constexpr(_pair(4 * i, 0xF, 0x4308)) for i in range(4))
_H0, _H1, _H2, _H3 = (tl.constexpr(_pair(4 * i - 6, 0x3C0, 0x4E00)) for i in range(4))


@triton.jit
def _taken(word, I: tl.constexpr, dtype: tl.constexpr):
    """Numbers `I` and `I + 4` of `word`, plus the offset, in two halves."""
    if INTERPRETED:
        bits = ((word >> (4 * I)) & 0x000F000F) ^ 0x00080008
        low = ((bits & 0xF).to(tl.float32) + 16).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = ((bits >> 16).to(tl.float32) + 16).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return low | (high << 16)
    else:
        CODE: tl.constexpr = (
            (_B0 if I == 0 else _B1 if I == 1 else _B2 if I == 2 else _B3)
            if dtype == tl.bfloat16
            else (_H0 if I == 0 else _H1 if I == 1 else _H2 if I == 2 else _H3)
        )
        return tl.inline_asm_elementwise(CODE, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def int4_numbers(words, dtype: tl.constexpr):
    C: tl.constexpr = words.shape[0]
    N: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2] // 4
    parts = tl.reshape(words, [C, N, 4, W])
    first = tl.join(_taken(parts, 0, dtype), _taken(parts, 2, dtype))
    second = tl.join(_taken(parts, 1, dtype), _taken(parts, 3, dtype))
    pairs = tl.join(first, second)
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    # Of thread t and its word w the half h of pair u + 2 * s. From [t, w, s, u, h] to [w, s, t, u, h].
    numbers = tl.reshape(tl.join(low, high), [C, N, 4, W, 2, 2, 2])
    return tl.reshape(tl.permute(numbers, (0, 1, 3, 4, 2, 5, 6)), [C, N, W * 32])


@triton.jit
def int4_rows(rows):
    C: tl.constexpr = rows.shape[0]
    M: tl.constexpr = rows.shape[1]
    W: tl.constexpr = rows.shape[2] // 32
    parts = tl.reshape(rows, [C, M, 4, W, 2, 2, 2])
    # From [t, w, h, s, u] to [w, s, t, u, h].
    return tl.permute(tl.reshape(tl.permute(parts, (0, 1, 3, 5, 2, 6, 4)), [C, M, W * 32]), (0, 2, 1))


@triton.jit
def chunks_of_rows(x, x_stride, block, M, K, BLOCK_M: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    if x_stride is None:
        return x.load([block * CHUNKS, 0, 0])
    else:
        chunk = block * CHUNKS + tl.arange(0, CHUNKS)[:, None, None]
        k = chunk * CHUNK + tl.arange(0, CHUNK)[None, None, :]
        row = tl.arange(0, BLOCK_M)[None, :, None]
        return tl.load(x + row.to(tl.int64) * x_stride + k, mask=(row < M) & (chunk < K // CHUNK), other=0.0)


@triton.jit
def int4_products(
    x, x_stride, weight, scale, zero, scale_row, scale_column, tile, first, end, n, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype if x_stride is None else x.dtype.element_ty
    OFFSET: tl.constexpr = OFFSET_BF16 if dtype == tl.bfloat16 else OFFSET_FP16
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    sums = tl.zeros([CHUNKS, BLOCK_N, BLOCK_M], tl.float32)
    half = tl.full([CHUNKS, BLOCK_N, CHUNK // 2], 1, dtype)
    ones = tl.reshape(tl.join(half, half), [CHUNKS, BLOCK_N, CHUNK])
    row, chunk = n[None, :], tl.arange(0, CHUNKS)[:, None]
    chunks = K // CHUNK
    s = load_scales(scale, scale_row, scale_column, row, first * CHUNKS + chunk, N, chunks, CHUNK, 1, COLUMNS)
    if zero is not None:
        z = load_scales(zero, scale_row, scale_column, row, first * CHUNKS + chunk, N, chunks, CHUNK, 1, COLUMNS)
    for block in tl.range(first, end, num_stages=STAGES):
        rows = int4_rows(chunks_of_rows(x, x_stride, block, M, K, BLOCK_M, CHUNKS, CHUNK))
        columns = int4_numbers(weight.load([block * CHUNKS, tile * BLOCK_N, 0]), dtype)
        sums += tl.dot(columns, rows) * tl.expand_dims(s, -1)
        t = s * (-OFFSET)
        if zero is not None:
            t += z
        sums += tl.dot(ones, rows) * tl.expand_dims(t, -1)
        chunk_ahead = (block + 1) * CHUNKS + chunk
        s = load_scales(scale, scale_row, scale_column, row, chunk_ahead, N, chunks, CHUNK, 1, COLUMNS)
        if zero is not None:
            z = load_scales(zero, scale_row, scale_column, row, chunk_ahead, N, chunks, CHUNK, 1, COLUMNS)
    return tl.sum(sums, 0)
