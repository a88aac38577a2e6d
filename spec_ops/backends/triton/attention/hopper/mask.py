"""Which keys a query row sees, for the Gluon kernels; `attention/mask.py` has the rules.

These kernels serve no windows. Layouts are explicit in Gluon, so they cannot call Triton's functions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from spec_ops.backends.triton.attention.hopper.program import arrive


@gluon.jit
def visible(
    s, start, seq_len, query, words, Q_LEN: gl.constexpr, MASK_LEN: gl.constexpr, KEYS: gl.constexpr, NARROW: gl.constexpr
):  # fmt: skip
    """`s` with -inf at keys that a row does not see. Dimension `KEYS` of `s` is that of the keys, from `start` on; the other
    one is that of the rows.

    `NARROW`: words of up to 32 bits are shifted as int32.
    """
    n = start + gl.arange(0, s.shape[KEYS], gl.SliceLayout(1 - KEYS, s.type.layout))
    if MASK_LEN == 0:
        seen = gl.expand_dims(n, 1 - KEYS) <= gl.expand_dims(seq_len - Q_LEN + query, KEYS)
    else:
        bit = n - (seq_len - MASK_LEN)
        in_tree = (bit >= 0) & (bit < MASK_LEN)
        dtype: gl.constexpr = gl.int32 if NARROW and MASK_LEN <= 32 else gl.int64
        shift = gl.where(in_tree, bit, 0).to(dtype)
        chosen = ((gl.expand_dims(words.to(dtype), KEYS) >> gl.expand_dims(shift, 1 - KEYS)) & 1) != 0
        seen = gl.expand_dims(bit < 0, 1 - KEYS) | (gl.expand_dims(in_tree, 1 - KEYS) & chosen)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def seen_slots(masks, Q_LEN: gl.constexpr):
    """Which of a tree's slots any of a request's queries sees, as bits; `masks`: its tree masks. For 4 warps."""
    i = gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    return gl.reduce(gl.load(masks + i, mask=i < Q_LEN, other=0), 0, _or)


@gluon.jit
def seen_by_any(row, valid, slots, MASK_LEN: gl.constexpr, HOLES: gl.constexpr):
    """`mask.seen_by_any` of the keys `row` of a block of which the first `valid` are the request's."""
    seen = row < valid
    if HOLES:
        bit = row - (valid - MASK_LEN)
        shift = gl.minimum(gl.maximum(bit, 0), MASK_LEN - 1).to(gl.int64)
        seen = seen & ((bit < 0) | (((slots >> shift) & 1) != 0))
    return seen


@gluon.jit
def zero_rows(v, valid, slots, MASK_LEN: gl.constexpr, HOLES: gl.constexpr):
    """Clear the rows of `v [64, 256]` that no query sees (`seen_by_any`): there may be NaN, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    chunks = v._reinterpret(v.dtype, [4, 64, 64], v.layout)
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    seen = gl.expand_dims(seen_by_any(row, valid, slots, MASK_LEN, HOLES), 1)
    for c in range(4):
        chunk = chunks.index(c)
        x = chunk.load(layout)
        chunk.store(gl.where(seen, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def clear_rows(
    v, valid, slots, cleared, clears, MASK_LEN: gl.constexpr, HOLES: gl.constexpr, WARPGROUP: gl.constexpr
):  # fmt: skip
    """Clear the rows of `v [BLOCK_N, D]` that no query sees (`seen_by_any`), where there may be NaN, and 0 * NaN is NaN: two
    warpgroups half of the block each, for all. How often that was done, `clears` times before."""
    BLOCK_N: gl.constexpr = v.shape[0]
    D: gl.constexpr = v.shape[1]
    HALF: gl.constexpr = BLOCK_N // 2
    if WARPGROUP < 2:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        chunks = v._reinterpret(v.dtype, [D // 64, BLOCK_N, 64], v.layout)
        row = WARPGROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
        seen = gl.expand_dims(seen_by_any(row, valid, slots, MASK_LEN, HOLES), 1)
        for c in gl.static_range(D // 64):
            chunk = chunks.index(c).slice(WARPGROUP * HALF, HALF)
            x = chunk.load(layout)
            chunk.store(gl.where(seen, x, gl.zeros_like(x)))
        fence_async_shared()
    arrive(cleared.index(0))
    mbarrier.wait(cleared.index(0), clears & 1)
    return clears + 1
