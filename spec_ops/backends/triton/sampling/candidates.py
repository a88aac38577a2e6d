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
from spec_ops.backends.triton.sampling.phases import limit_of, load_step
from spec_ops.backends.triton.sampling.reach import first_reaching, value_bins
from spec_ops.backends.triton.sampling.shared import append_tokens, read_words
from spec_ops.backends.triton.sampling.weights import (
    BEYOND,
    NOTHING_CUT,
    fixed_weight,
    logit_key,
    token_place,
    weight_parts,
    whole_weight,
)


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
    logits, stride, start, steps, vocab, bound, top, scale, weigh, counter, list_at, CANDIDATES: tl.constexpr,
    ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """List the chunk's tokens at or above `bound`, as many as there is room for. How many they are; if `weigh` their weight and
    that of all tokens of the chunk, otherwise 0. `counter`: a word of `shared.py`, 0."""
    high = tl.zeros([ROWS, LANE], tl.int32)
    low = tl.zeros([ROWS, LANE], tl.int32)
    heavy_high = tl.zeros([ROWS, LANE], tl.int32)
    heavy_low = tl.zeros([ROWS, LANE], tl.int32)
    for i in range(0, steps):
        value, ids, live = load_step(logits, stride, start, steps - 1 - i, steps, vocab, ROWS, LANE)
        found = live & (value >= bound)
        if weigh:
            more_high, more_low = weight_parts(value, top, scale)
            high += more_high
            low += more_low
            heavy_high += tl.where(found, more_high, 0)
            heavy_low += tl.where(found, more_low, 0)
        append_tokens(list_at, CANDIDATES, counter, ids, value, found)
    tl.debug_barrier()
    heavy = tl.sum(tl.reshape(whole_weight(heavy_high, heavy_low), [ROWS * LANE]), 0)
    every = tl.sum(tl.reshape(whole_weight(high, low), [ROWS * LANE]), 0)
    return read_words(counter, tl.zeros([], tl.int32)), heavy, every


@triton.jit
def load_candidates(list_at, counts, count, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr):
    """The lists of all programs of a row, and where they have tokens; `counts`: how many each has, told by them, `count` if
    there is one."""
    i = tl.arange(0, next_power_of_2(CHUNKS) * CANDIDATES)
    inside = i < CHUNKS * CANDIDATES
    noted = tl.load(list_at + i, mask=inside, other=0, cache_modifier=".cg")  # at the same time as the counts
    if CHUNKS > 1:
        count = tl.load(counts + i // CANDIDATES, mask=inside, other=0, cache_modifier=".cg")
    return noted, inside & (i % CANDIDATES < count)


@triton.jit
def listed_tokens(noted, there, top, scale, SHIFT: tl.constexpr):
    """Logits, ids, places and weights of noted tokens; places `NOTHING_CUT` and weights 0 where none is `there`."""
    value = (noted >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    ids = noted.to(tl.int32)
    place = tl.where(there, token_place(logit_key(value, SHIFT), ids), NOTHING_CUT)
    return value, ids, place, tl.where(there, fixed_weight(value, top, scale), 0)


@triton.jit
def settle_candidates(
    words, value, place, weight, there, least, roof, k, p, limit, base, floor, best, top, scale, SHIFT: tl.constexpr
):  # fmt: skip
    """Which of the listed tokens are kept, if `k` of them, or of weight `limit`, are listed.

    Args:
        words: of `shared.py`, free to use. value, place, weight, there: of `listed_tokens`.
        least, roof: logits; none of the listed is below the first, or above the second.
        limit: the weight that top-p has to reach among them, 0 if that is `p` times what top-k leaves.
        base: weight of the tokens above all of them. floor: the key of min-p.

    Returns:
        weights, 0 of those that are not kept; the lowest place that is kept; whether top-p's boundary is in the list.
    """
    bins = value_bins(value, tl.minimum(roof, top), tl.maximum(least, top - 45.0 / scale))  # those below weigh nothing
    lowest = tl.zeros([], tl.int64) + NOTHING_CUT
    decided = tl.full([], 1, tl.int1)
    if limit == 0:
        lowest = -1 - first_reaching(words, -1 - place, bins, there.to(tl.int64), there, k.to(tl.int64))
        if p < 1:
            limit = limit_of(p, base + tl.sum(tl.where(place >= lowest, weight, 0), 0)) - base
            decided = limit > 0
    if limit > 0:
        lowest = -1 - first_reaching(words, -1 - place, bins, weight, there, limit)
    kept = there & ((place >= lowest) & ((place >> 32) >= floor) | (place == best))
    return tl.where(kept, weight, 0), tl.min(tl.where(kept, place, BEYOND), 0), decided


@triton.jit
def drawn_candidate(words, ids, weights, level, vocab):
    """The lowest id so that the tokens up to it weigh more than `level`, which all together do."""
    bins = tl.minimum((ids.to(tl.float32) * (255.0 / vocab)).to(tl.int32), 255)
    order = ids.to(tl.int64)
    return first_reaching(words, order, tl.where(weights > 0, bins, 0), weights, weights > 0, level + 1)
