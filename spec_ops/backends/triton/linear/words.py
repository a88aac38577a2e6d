"""The order of k in which numbers of 4 bits are taken from whole words, eight at a time.

In a word, numbers i and i + 4 are in the two halves: one mask takes both, and what they become is a pair of 16 bits. The tensor
cores add up over k in any order, as long as both operands have the same. A thread has consecutive words of a row, and of each
16 of k that an instruction multiplies four neighbours. That is the order that Triton takes for weights of 8 bits (`kWidth` 4);
with any other one numbers would change threads through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_numbers(first, second, dtype: tl.constexpr):
    """The numbers `[chunks, n, k]` of `dtype`, k in the order of `word_rows`, of pairs of them in int32: `first [chunks, n, ..,
    2]` has pairs 0 and 2 of each word, `second` has 1 and 3."""
    C: tl.constexpr = first.shape[0]
    N: tl.constexpr = first.shape[1]
    W: tl.constexpr = first.numel // (C * N * 8)  # of a thread
    pairs = tl.join(first, second)
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    # Of thread t and its word w the half h of pair u + 2 * s. From [t, w, s, u, h] to [w, s, t, u, h].
    numbers = tl.reshape(tl.join(low, high), [C, N, 4, W, 2, 2, 2])
    return tl.reshape(tl.permute(numbers, (0, 1, 3, 4, 2, 5, 6)), [C, N, W * 32])


@triton.jit
def load_rows(x, x_stride, block, M, K, BLOCK_M: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """As `quantized.chunked_rows`, but `[CHUNKS, BLOCK_M, CHUNK]`."""
    if x_stride is None:
        return x.load([block * CHUNKS, 0, 0])
    else:
        chunk = block * CHUNKS + tl.arange(0, CHUNKS)[:, None, None]
        k = chunk * CHUNK + tl.arange(0, CHUNK)[None, None, :]
        row = tl.arange(0, BLOCK_M)[None, :, None]
        return tl.load(x + row.to(tl.int64) * x_stride + k, mask=(row < M) & (chunk < K // CHUNK), other=0.0)


@triton.jit
def word_rows(rows, ORDERED: tl.constexpr):
    """`rows [chunks, m, k]` as the other operand `[chunks, k, m]`. `ORDERED`: each eight are as in `word_place`."""
    C: tl.constexpr = rows.shape[0]
    M: tl.constexpr = rows.shape[1]
    W: tl.constexpr = rows.shape[2] // 32
    parts = tl.reshape(rows, [C, M, 4, W, 2, 2, 2])
    if ORDERED:
        parts = tl.permute(parts, (0, 1, 2, 3, 6, 5, 4))
    # From [t, w, h, s, u] to the order of `pair_numbers`.
    return tl.permute(tl.reshape(tl.permute(parts, (0, 1, 3, 5, 2, 6, 4)), [C, M, W * 32]), (0, 2, 1))


@triton.jit
def word_place(k):
    """Where number `k` of a row is put, so that a thread finds pairs, and those of one instruction side by side: bits 0 and 2
    change places."""
    return (k & -6) | ((k & 1) << 2) | ((k >> 2) & 1)
