"""Weights of 8 and 4 bits inside a kernel: numbers of 16 bits in registers, and the scales of what they are summed to.

A product with a weight `stored * scale` is a product with what is stored, times the scale: exact numbers meet the tensor cores,
and a scale costs one multiplication of a sum. Where all of k shares it (per row and per tensor), that is the last sum; where
blocks or groups of k do, that of each. What `zero` adds to a weight is `zero * sum(x)`, a product with ones. So no weight is
rounded after it was dequantized.

Formats: `backends/weight_format.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def numbers(block, dtype: tl.constexpr, BITS: tl.constexpr):
    """What a block `[..., stored]` of a weight holds, `[..., k]` of `dtype`: float8, int8, or two numbers of -8 to 7 a byte.

    No conversion is one of those that a multiprocessor does 16 of at a time: float8 becomes bfloat16 by float16 and float32,
    all exact. An integer of 8 bits plus 128 is put in the last bits of 1024 in float16, whose unit these are, and a number of 4
    bits plus 8 in those of 1024, or of 128 in bfloat16.
    """
    if BITS == 8 and block.dtype == tl.int8:
        bits = ((block.to(tl.int16) & 0xFF) ^ 0x80) | 0x6400
        wide = (bits.to(tl.float16, bitcast=True) - 1152).to(tl.float32).to(dtype)
    elif BITS == 8:
        wide = block.to(tl.float16).to(tl.float32).to(dtype)
    else:
        BASE: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        OFFSET: tl.constexpr = 136 if dtype == tl.bfloat16 else 1032
        bits = block.to(tl.int16)
        low = (((bits & 0xF) ^ 8) | BASE).to(dtype, bitcast=True)
        high = ((((bits >> 4) & 0xF) ^ 8) | BASE).to(dtype, bitcast=True)
        both = tl.join(low - OFFSET, high - OFFSET)
        if len(block.shape) == 3:
            wide = tl.reshape(both, [block.shape[0], block.shape[1], 2 * block.shape[2]])
        else:
            wide = tl.reshape(both, [block.shape[0], 2 * block.shape[1]])
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
