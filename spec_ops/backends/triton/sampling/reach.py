"""Where running sums of listed tokens reach an amount: top-k's and top-p's boundary, and the drawn token.

Tokens are summed by 256 bins that follow their order, in shared memory; the few in the bin that reaches the amount are compared
each with each. If they are more than that, their bin is divided again.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.sampling.shared import (
    WIDTH,
    add_where,
    append_pairs,
    clear_words,
    read_long,
    read_words,
)
from spec_ops.backends.triton.sampling.weights import BEYOND

STEPS = tl.constexpr(256)  # bins
FEW = tl.constexpr(128)  # tokens that are compared each with each
AT_ONCE = tl.constexpr(32)
PART_BITS = tl.constexpr(15)  # an amount is three parts, whose sums are int32
PART_MASK = tl.constexpr((1 << 15) - 1)
COUNTER = tl.constexpr(1020)  # words: three parts of each bin before it, the few behind it
PAIRS = tl.constexpr(1024)


@triton.jit
def reached_at(sums, limit):
    """Of `sums [n]`, none of them negative: how many running sums are below `limit`, and the last of those."""
    running = tl.cumsum(sums, 0)
    below = running < limit
    return tl.sum(below.to(tl.int32), 0), tl.max(tl.where(below, running, 0), 0)


@triton.jit
def value_bins(value, highest, lowest):
    """Bins of values, from `highest` down, that divide what lies above `lowest` evenly; the last one has the rest."""
    width = tl.minimum(tl.maximum(highest - lowest, 1.0e-30), 1.0e30)
    down = tl.minimum(tl.maximum(highest - value, 0.0), width)
    return tl.minimum((down * (255.0 / width)).to(tl.int32), STEPS - 1)


@triton.jit
def first_reaching(words, order, bins, amounts, there, limit):
    """The order of the first listed token at which running sums of `amounts`, in their order, reach `limit`, in 1 .. the sum of
    all.

    Args:
        words: of `shared.py`, free to use. order: int64 `[n]`, no two alike. bins: int32, in 0 .. 255, which follow the order.
        amounts: int64 `[n]`, below 2**45. there: which are listed.
    """
    step = tl.arange(0, STEPS)
    before = tl.zeros([], tl.int64)
    few = tl.zeros([], tl.int32)
    again = few + 1
    counter = words + COUNTER * WIDTH
    while again > 0:  # not `few == 0`: where nothing reaches `limit`, none are left
        for part in tl.static_range(3):
            clear_words(words, part * STEPS + step)
        clear_words(counter, few)
        tl.debug_barrier()
        for part in tl.static_range(3):
            some = ((amounts >> (part * PART_BITS)) & PART_MASK).to(tl.int32)
            add_where(words, part * STEPS + bins, some, there & (some != 0))
        tl.debug_barrier()
        sums = read_words(words, step).to(tl.int64)
        for part in tl.static_range(1, 3):
            sums += read_words(words, part * STEPS + step).to(tl.int64) << (part * PART_BITS)
        chosen, within = reached_at(sums, limit - before)
        before += within
        there = there & (bins == chosen)
        append_pairs(words + PAIRS * WIDTH, FEW, counter, order, amounts, there)
        tl.debug_barrier()
        size = read_words(counter, few)
        tl.debug_barrier()  # before it is cleared
        if size <= FEW:
            few = few + size
            again = again * 0
        else:
            least = tl.min(tl.where(there, order, BEYOND), 0)
            width = tl.max(tl.where(there, order, -BEYOND), 0) - least
            shift = least * 0
            while (width >> shift) >= STEPS:
                shift += 1
            bins = tl.where(there, (order - least) >> shift, 0).to(tl.int32)
    i = tl.arange(0, FEW)[:, None]
    own = read_long(words, PAIRS + i * 4)
    reach = tl.zeros([FEW], tl.int64) + before
    for start in range(0, few, AT_ONCE):
        j = start + tl.arange(0, AT_ONCE)[None, :]
        other = read_long(words, PAIRS + j * 4)
        amount = tl.where(j < few, read_long(words, PAIRS + 2 + j * 4), 0)
        reach += tl.sum(tl.where(other <= own, amount, 0), 1)
    reached = (i < few) & (reach[:, None] >= limit)
    return tl.min(tl.where(reached, own, BEYOND))
