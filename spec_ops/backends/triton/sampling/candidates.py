"""The few most likely tokens of a row, in a list: where they decide what is kept, no further pass over the row is needed.

Which are few is known from the pass that finds the largest logit. The lanes of a program form groups, each of which has a token
at or above the least of the groups' largest logits. Tokens that reach this *bound* go to the list in the next pass, which also
weighs all tokens where top-p asks for that. So `GROUPS` tokens are in a program's list at least, and about
`GROUPS * ln(GROUPS)` where likely tokens have any ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.sizes import next_power_of_2
from spec_ops.backends.triton.sampling.phases import how_many, limit_of, load_step, scatter
from spec_ops.backends.triton.sampling.weights import (
    BEYOND,
    NOTHING_CUT,
    fixed_weight,
    key_logit,
    logit_key,
    place_id,
    token_place,
    weight_parts,
    whole_weight,
)

SLOTS = 8  # candidates that a thread may have


def sizes(chunks: int) -> dict[str, int]:
    """Candidates that a program's list has room for, and of how many groups each has one: two to four times as many fit as
    are expected, and a row has 64 at least, which is more than most ask for as top-k."""
    block = triton.next_power_of_2(chunks)
    few = block < 32
    return {"CANDIDATES": max((1024 if few else 2048) // block, 1), "GROUPS": max((128 if few else 256) // block, 1)}


@triton.jit
def group_bound(lanes, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """The least of the groups' largest logits; `lanes [ROWS, LANE]`: the largest of each lane."""
    FEW: tl.constexpr = min(GROUPS, ROWS)
    groups = tl.max(tl.reshape(tl.max(lanes, 1), [ROWS // FEW, FEW]), 0)  # of rows from all over the chunk
    return tl.min(groups, 0)


@triton.jit
def common_bound(bounds, CHUNKS: tl.constexpr):
    """The largest of the programs' bounds that more than half of them reach; `bounds [n]`, n at least `CHUNKS`."""
    reached = tl.sum((bounds[None, :] >= bounds[:, None]).to(tl.int32), 1)
    return tl.max(tl.where(reached > CHUNKS // 2, bounds, NOTHING_CUT), 0)


@triton.jit
def list_candidates(
    logits, stride, start, steps, vocab, bound, top, scale, weigh, slots, list_at, SHIFT: tl.constexpr, SLOTS: tl.constexpr,
    CANDIDATES: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Write places of the chunk's tokens at or above `bound` to its list; how many they are, more than `CANDIDATES` if they
    have no room; their weight; and if `weigh` that of all tokens of the chunk.

    `slots`: `[ROWS, SLOTS]`, where each thread notes ids.
    """
    high = tl.zeros([ROWS, LANE], tl.int32)
    low = tl.zeros([ROWS, LANE], tl.int32)
    noted = tl.zeros([ROWS], tl.int32)
    row = tl.arange(0, ROWS)[:, None]
    for i in range(0, steps):
        value, ids, live = load_step(logits, stride, start, steps - 1 - i, steps, vocab, ROWS, LANE)
        if weigh:
            more_high, more_low = weight_parts(value, top, scale)
            high += more_high
            low += more_low
        found = live & (value >= bound)
        one = found.to(tl.int32)
        slot = noted[:, None] + tl.cumsum(one, 1) - one
        scatter(slots + row * SLOTS + slot, ids.to(tl.int64), found & (slot < SLOTS))
        noted += tl.sum(one, 1)
    tl.debug_barrier()  # a thread may read what others have noted
    j = tl.arange(0, SLOTS)[None, :]
    there = j < noted[:, None]
    ids = tl.load(slots + row * SLOTS + j, mask=there, other=0)
    value = tl.load(logits + ids * stride, mask=there, other=float("-inf")).to(tl.float32)
    to = (tl.cumsum(noted, 0) - noted)[:, None] + j
    tl.store(list_at + to, token_place(logit_key(value, SHIFT), ids), mask=there & (to < CANDIDATES))
    heavy = tl.where(there, fixed_weight(value, top, scale), 0)
    count = tl.where(tl.max(noted, 0) > SLOTS, CANDIDATES + 1, tl.sum(noted, 0))
    every = whole_weight(high, low)
    return count, tl.sum(tl.reshape(heavy, [ROWS * SLOTS]), 0), tl.sum(tl.reshape(every, [ROWS * LANE]), 0)


@triton.jit
def load_candidates(list_at, counts, count, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr):
    """Places in the lists of all programs of a row, `NOTHING_CUT` where they have none; `counts`: how many each has, told by
    them, `count` if there is one."""
    i = tl.arange(0, next_power_of_2(CHUNKS) * CANDIDATES)
    if CHUNKS > 1:
        count = tl.load(counts + i // CANDIDATES, mask=i < CHUNKS * CANDIDATES, other=0, cache_modifier=".cg")
    return tl.load(list_at + i, mask=i % CANDIDATES < count, other=NOTHING_CUT, cache_modifier=".cg")


@triton.jit
def settle_candidates(
    place, bound, k, p, limit, floor, best, top, scale, vocab, SHIFT: tl.constexpr
):  # fmt: skip
    """Which of the listed tokens are kept, if `k` of them, or of weight `limit`, are listed: their ids, their weights (0 of
    those that are not), and the lowest place.

    Args:
        place: `[n]`, `NOTHING_CUT` where the list has none. bound: the key that all of them reach. floor: the key of min-p.
        limit: the weight that top-p has to reach, 0 if that is `p` times what top-k leaves.
    """
    key = (place >> 32).to(tl.int32)
    ids = place_id(place).to(tl.int32)
    weight = tl.where(place > NOTHING_CUT, fixed_weight(key_logit(key, SHIFT), top, scale), 0)
    low = bound
    ties = tl.zeros([], tl.int64)
    if limit == 0:
        high = (best >> 32) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            enough = tl.sum((key >= middle).to(tl.int32), 0) >= k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        ties = (k - tl.sum((key > low).to(tl.int32), 0)).to(tl.int64)
        if p < 1:
            each = fixed_weight(key_logit(low.to(tl.int32), SHIFT), top, scale)
            limit = limit_of(p, tl.sum(tl.where(key > low, weight, 0), 0) + ties * each)
    if limit > 0:
        high = (best >> 32) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            enough = tl.sum(tl.where(key >= middle, weight, 0), 0) >= limit
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        each = fixed_weight(key_logit(low.to(tl.int32), SHIFT), top, scale)
        ties = how_many(limit - tl.sum(tl.where(key > low, weight, 0), 0), each)
    # Of equal logits at the boundary the first ids are kept.
    tie = key == low
    last = tl.zeros([], tl.int32) + vocab
    if ties < tl.sum(tie.to(tl.int32), 0):
        last = id_at(ids, tie.to(tl.int32), ties - 1, vocab)
    kept = ((key > low) | (tie & (ids <= last))) & (key >= floor) | (place == best)
    return ids, tl.where(kept, weight, 0), tl.min(tl.where(kept, place, BEYOND), 0)


@triton.jit
def id_at(ids, weights, level, vocab):
    """The lowest id so that the tokens up to it weigh more than `level`, which all together do."""
    low = tl.full([], -1, tl.int32)
    high = low + vocab
    while high - low > 1:
        middle = (low + high) >> 1
        beyond = tl.sum(tl.where(ids <= middle, weights, 0), 0) > level
        low = tl.where(beyond, low, middle)
        high = tl.where(beyond, middle, high)
    return high
