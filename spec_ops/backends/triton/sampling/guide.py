"""Where top-p is likely to cut a flat row: a few passes with sums of float32, before one that counts and weighs exactly.

A pass of `phases.tally` takes three instructions a token and pivot, and 20 to weigh a token in two integers. Here a pivot takes
two and a token's weight one exponential, so passes narrow the row to few tokens for less. What they find is a guess: nothing
but the pivots of the exact search depends on it, and if it is wrong that search goes on.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton grows a tuple by adding another)

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.sampling.phases import load_step, share_tally, stacked
from spec_ops.backends.triton.sampling.weights import key_logit, logit_key, relative

PASSES = tl.constexpr(3)
UNIT = tl.constexpr(17592186044416.0)  # of weights


@triton.jit
def guide_sums(
    logits, stride, start, steps, vocab, pivots, top, scale, back, SHIFT: tl.constexpr, PIVOTS: tl.constexpr,
    ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """About what the tokens of a chunk at or above each pivot weigh: int64 `[PIVOTS]`."""
    bounds, sums = (), ()
    for j in tl.static_range(PIVOTS):
        key = tl.sum(tl.where(tl.arange(0, PIVOTS) == j, pivots, 0), 0).to(tl.int32)
        bounds = bounds + (key_logit(key, SHIFT),)
        sums = sums + (tl.zeros([ROWS, LANE], tl.float32),)
    for i in range(0, steps):
        value, _, _ = load_step(logits, stride, start, tl.where(back, steps - 1 - i, i), steps, vocab, ROWS, LANE)
        weight = relative(value, top, scale)  # 0 of what is no token
        more = ()
        for j in tl.static_range(PIVOTS):
            more = more + (tl.where(value >= bounds[j], sums[j] + weight, sums[j]),)  # an addition with a predicate
        sums = more
    own = ()
    for j in tl.static_range(PIVOTS):
        own = own + (tl.sum(sums[j], 1),)
    return (tl.sum(stacked(own, PIVOTS, ROWS), 0) * UNIT).to(tl.int64)


@triton.jit
def _around(low, high, share, even, top, SHIFT: tl.constexpr, PIVOTS: tl.constexpr):
    """`[PIVOTS]` int64 keys between two: of values that are `even`, or that lie closer to where `share` of the weight is."""
    j = tl.arange(0, PIVOTS).to(tl.float32)
    off = j - (PIVOTS - 1) / 2
    near = tl.exp2((tl.abs(off) - (PIVOTS + 1) / 2) * 1.5849625)  # a third of the interval, a ninth, ...
    part = tl.where(even, (j + 1) / (PIVOTS + 1), 1.0 - share + tl.where(off < 0, -near, near))
    bottom = key_logit(low.to(tl.int32), SHIFT)
    roof = tl.minimum(key_logit((high - 1).to(tl.int32), SHIFT), top)
    key = logit_key(bottom + (roof - bottom) * part, SHIFT).to(tl.int64)
    return tl.maximum(tl.minimum(tl.maximum(key, low + 1), high - 1), low)


@triton.jit
def guided_pivots(
    logits, stride, start, steps, vocab, low, high, heavy, every, p, limit, floor, top, scale, temperature, tallies, counters,
    turn, chunk, SHIFT: tl.constexpr, CHUNKS: tl.constexpr, GUIDES: tl.constexpr, PIVOTS: tl.constexpr, ROWS: tl.constexpr,
    LANE: tl.constexpr,
):  # fmt: skip
    """int64 keys for the exact search to count at first, the first and the last of them around the boundary; and the turn.

    Args:
        low, high: keys between which the boundary lies. heavy: weight of the tokens that reach `high`. every: of all.
        limit: the weight that top-p, `p`, has to reach. floor: the key of min-p.
        tallies: what programs tell one another, at each turn from 2 on. GUIDES: how many keys a pass sums at.
    """
    # All tokens below this value together weigh too little to be needed.
    spare = tl.maximum((1.0 - p) * every.to(tl.float32) / (UNIT * vocab), 1e-30)
    least = logit_key(top + temperature * tl.log(spare), SHIFT).to(tl.int64)
    low = tl.minimum(tl.maximum(tl.maximum(low, least), floor), high - 1)
    share = tl.zeros([], tl.float32)
    passes = tl.zeros([], tl.int32)
    while (passes < PASSES) & (high - low > 1):
        pivots = _around(low, high, share, passes == 0, top, SHIFT, GUIDES)
        sums = guide_sums(
            logits, stride, start, steps, vocab, pivots, top, scale, turn % 2 == 0, SHIFT, GUIDES, ROWS, LANE
        )  # fmt: skip
        none = tl.zeros([GUIDES], tl.int32)
        _, sums, _ = share_tally(
            tallies + (turn - 2) * (2 * GUIDES * CHUNKS), none, sums, counters, turn, chunk, CHUNKS, GUIDES
        )  # fmt: skip
        turn += 1
        passes += 1
        reached = sums >= limit
        low = tl.maximum(low, tl.max(tl.where(reached, pivots, low), 0))
        high = tl.minimum(high, tl.min(tl.where(reached, high, pivots), 0))
        every = tl.minimum(every, tl.min(tl.where(reached, sums, every), 0))
        heavy = tl.maximum(heavy, tl.max(tl.where(reached, 0, sums), 0))
        share = (limit - heavy).to(tl.float32) / tl.maximum(every - heavy, 1).to(tl.float32)
    j = tl.arange(0, PIVOTS)
    pivots = _around(low, high, share, False, top, SHIFT, PIVOTS)
    return tl.where(j == 0, low, tl.where(j == PIVOTS - 1, high, pivots)), turn
