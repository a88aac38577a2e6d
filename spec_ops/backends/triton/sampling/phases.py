"""What a program does with its chunk of a row of logits, phase by phase; `support.py` says how phases follow one another."""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton grows a tuple by adding another)

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.arrival import rendezvous
from spec_ops.backends.triton.runtime.sizes import next_power_of_2
from spec_ops.backends.triton.sampling.shared import INTERPRETED
from spec_ops.backends.triton.sampling.weights import (
    BEYOND,
    KEY_OUTSIDE,
    LOWEST,
    MASKED_LAST,
    NOTHING_CUT,
    ONE,
    fixed_weight,
    key_logit,
    logit_key,
    token_place,
    weight_parts,
    whole_weight,
)

WARP = tl.constexpr(32)  # rows of a tile that have neighbouring ids in all steps
COUNT_BIT = tl.constexpr(26)  # above the high parts of 16 weights
COUNTED = tl.constexpr(1 << 26)


@triton.jit
def load_tile(logits, stride, tile, vocab, ROWS: tl.constexpr, LANE: tl.constexpr):
    """`[ROWS, LANE]` float32 logits of neighbouring ids, their ids, and which of them are tokens."""
    return load_span(logits, stride, tile * (ROWS * LANE), vocab, ROWS, LANE)


@triton.jit
def load_span(logits, stride, start, stop, ROWS: tl.constexpr, LANE: tl.constexpr):
    """As `load_tile`, from an id on and before another."""
    ids = start + tl.arange(0, ROWS)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    live = ids < stop
    return tl.load(logits + ids.to(tl.int64) * stride, mask=live, other=float("-inf")).to(tl.float32), ids, live


@triton.jit
def step_ids(start, step, steps, ROWS: tl.constexpr, LANE: tl.constexpr):
    """`[ROWS, LANE]` ids of one of the `steps` that a chunk takes: each `WARP` rows have a part of the chunk to themselves."""
    PART: tl.constexpr = min(WARP, ROWS)
    row = tl.arange(0, ROWS)[:, None]
    at = (row // PART) * (PART * LANE)
    return start + at * steps + step * (PART * LANE) + (row % PART) * LANE + tl.arange(0, LANE)[None, :]


@triton.jit
def load_step(logits, stride, start, step, steps, vocab, ROWS: tl.constexpr, LANE: tl.constexpr):
    """As `load_tile`, of a step of a chunk."""
    ids = step_ids(start, step, steps, ROWS, LANE)
    live = ids < vocab
    return tl.load(logits + ids.to(tl.int64) * stride, mask=live, other=float("-inf")).to(tl.float32), ids, live


@triton.jit
def scatter(places, values, mask):
    """`tl.store` of int64 from the threads that hold them.

    Triton's own store would first move pointers and values between threads, through up to 32 KB of shared memory. With the
    bins (`bins.py`) that is more than a launch may have.
    """
    if INTERPRETED:
        tl.store(places, values, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b64 [$1], $2; mov.u32 $0, 0; }", "=r,l,l,r",
            [places, values, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def part_sums(values, ROWS: tl.constexpr, LANE: tl.constexpr):
    """Sums of `[ROWS, LANE]` for each part of the chunk, in the order of ids."""
    return part_totals(tl.sum(values, 1), ROWS)


@triton.jit
def part_totals(values, ROWS: tl.constexpr):
    """As `part_sums`, of `[ROWS]`."""
    PART: tl.constexpr = min(WARP, ROWS)
    return tl.sum(tl.reshape(values, [ROWS // PART, PART]), 1)


@triton.jit
def most_likely(logits, stride, start, steps, vocab, SHIFT: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr):
    """Place of the most likely token of a chunk, NaN as infinity; and the largest value of every lane, `[ROWS, LANE]`."""
    value, _, _ = load_step(logits, stride, start, 0, steps, vocab, ROWS, LANE)
    best = tl.full([ROWS, LANE], float("-inf"), tl.float32)
    at = tl.zeros([ROWS, LANE], tl.int32)
    for step in range(0, steps):
        # The next step's are on their way while these are looked at.
        coming, _, _ = load_step(
            logits, stride, start, step + 1, steps, tl.where(step + 1 < steps, vocab, 0), ROWS, LANE
        )  # fmt: skip
        value = tl.where(value != value, float("inf"), value)
        better = value > best
        best = tl.where(better, value, best)
        at = tl.where(better, step, at)
        value = coming
    ids = step_ids(start, at, steps, ROWS, LANE)
    place = tl.where(ids < vocab, token_place(logit_key(best, SHIFT), ids), NOTHING_CUT)
    return tl.max(tl.reshape(place, [ROWS * LANE]), 0), best


@triton.jit
def first_nan(logits, stride, vocab, none, ROWS: tl.constexpr, LANE: tl.constexpr):
    """Id of a row's first NaN, `none` if there is none."""
    found = tl.zeros([], tl.int64) + vocab
    for tile in range(0, tl.cdiv(vocab, ROWS * LANE)):
        value, ids, _ = load_tile(logits, stride, tile, vocab, ROWS, LANE)
        found = tl.minimum(found, tl.min(tl.reshape(tl.where(value != value, ids, vocab), [ROWS * LANE]), 0))
    return tl.where(found < vocab, found, none)


@triton.jit
def settle_undrawn(
    logits, stride, vocab, support, tokens, row, top_id, only_top, infinite, masked, ANY_TOP: tl.constexpr,
    ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Of a row without a draw: it keeps `only_top` or nothing. `infinite`, `masked`: its top is inf or NaN, -inf."""
    kept = tl.where(only_top, top_id, tl.where(masked, MASKED_LAST, tl.full([], -1, tl.int64)))
    if ANY_TOP:
        if infinite:
            top_id = first_nan(logits, stride, vocab, top_id, ROWS, LANE)
        tl.store(support, top_id)
    else:
        tl.store(support, tl.where(only_top, top_id, 0))
    tl.store(support + 1, kept)
    tl.store(support + 2, tl.where(only_top, ONE, 0).to(tl.int64))
    if tokens is not None:
        tl.store(tokens + row, tl.maximum(kept, -1))


@triton.jit
def stacked(parts, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """`[ROWS, COUNT]` of a tuple of `COUNT` vectors, a power of two."""
    for i in tl.static_range(4):  # of 16 at most
        if COUNT >> i > 1:
            joined = ()
            for j in tl.static_range(COUNT >> (i + 1)):
                joined = joined + (tl.join(parts[j], parts[j + (COUNT >> (i + 1))]),)
            parts = joined
    return tl.reshape(parts[0], [ROWS, COUNT])


@triton.jit
def tally(
    logits, stride, start, steps, vocab, pivots, top, scale, back, SHIFT: tl.constexpr, PIVOTS: tl.constexpr,
    ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Of the tokens at or above each pivot: how many, and their weight; from the last step to the first if `back`."""
    bounds, counts, weights = (), (), ()
    for j in tl.static_range(PIVOTS):
        bounds = bounds + (tl.sum(tl.where(tl.arange(0, PIVOTS) == j, pivots, 0), 0).to(tl.int32),)
        counts = counts + (tl.zeros([ROWS], tl.int32),)
        weights = weights + (tl.zeros([ROWS], tl.int64),)
    for i in range(0, steps):
        value, _, live = load_step(logits, stride, start, tl.where(back, steps - 1 - i, i), steps, vocab, ROWS, LANE)
        key = tl.where(live, logit_key(value, SHIFT), KEY_OUTSIDE)
        high, low = weight_parts(value, top, scale)
        high += COUNTED
        # Sums over a thread's own tokens; those between threads come once, at the end.
        more, heavier = (), ()
        for j in tl.static_range(PIVOTS):
            reached = key >= bounds[j]
            both = tl.sum(tl.where(reached, high, 0), 1)
            heavy = whole_weight(both & (COUNTED - 1), tl.sum(tl.where(reached, low, 0), 1))
            more = more + (counts[j] + (both >> COUNT_BIT),)
            heavier = heavier + (weights[j] + heavy,)
        counts, weights = more, heavier
    return tl.sum(stacked(counts, PIVOTS, ROWS), 0), tl.sum(stacked(weights, PIVOTS, ROWS), 0)


@triton.jit
def share_tally(
    records, counts, weights, counters, turn, chunk, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr
):  # fmt: skip
    """The row's counts and weights, and the counts of the chunks before this one."""
    if CHUNKS == 1:
        before = tl.zeros([PIVOTS], tl.int32)
    else:
        CHUNK_BLOCK: tl.constexpr = next_power_of_2(CHUNKS)
        pivot = tl.arange(0, PIVOTS)
        other = tl.arange(0, CHUNK_BLOCK)
        mine = records + chunk * (2 * PIVOTS) + pivot
        tl.store(mine, counts.to(tl.int64))
        tl.store(mine + PIVOTS, weights)
        rendezvous(counters, turn, CHUNKS)
        at = records + other[:, None] * (2 * PIVOTS) + pivot[None, :]
        all_counts = tl.load(at, mask=(other < CHUNKS)[:, None], other=0, cache_modifier=".cg")
        all_weights = tl.load(at + PIVOTS, mask=(other < CHUNKS)[:, None], other=0, cache_modifier=".cg")
        counts = tl.sum(all_counts, 0).to(tl.int32)
        weights = tl.sum(all_weights, 0)
        before = tl.sum(tl.where((other < chunk)[:, None], all_counts, 0), 0).to(tl.int32)
    return counts, weights, before


@triton.jit
def next_pivots(step, low, high, floor, top, temperature, SHIFT: tl.constexpr, PIVOTS: tl.constexpr, VALUES: tl.constexpr):
    """int64 keys to count at, all but the first pass's between `low` and `high`.

    The first ones lie where weights are, closer towards the top, and at the end that min-p has.
    """
    j = tl.arange(0, PIVOTS)
    if step == 0:
        part = (j + 1).to(tl.float32) / PIVOTS
        below = top - tl.minimum(32.0 * tl.maximum(temperature, 1.0) * part * part, 3.0e38)
        key = tl.where((j == 0) & (floor > low), floor, logit_key(below, SHIFT).to(tl.int64))
    else:
        key = low + (high - low) * (j + 1) // (PIVOTS + 1)
        bottom = key_logit(low.to(tl.int32), SHIFT)
        if (step < VALUES) & (bottom > float("-inf")):
            roof = tl.minimum(key_logit((high - 1).to(tl.int32), SHIFT), top)
            value = bottom + (roof - bottom) * ((j + 1).to(tl.float32) / (PIVOTS + 1))
            key = logit_key(value, SHIFT).to(tl.int64)
        key = tl.minimum(tl.maximum(key, low + 1), high - 1)
    return key


@triton.jit
def floor_key(least, low, high, top, scale, temperature, SHIFT: tl.constexpr):
    """The lowest key whose weight is at least `least`, in `1 .. ONE`, if that of `high` is and that of `low` is not."""
    # A short interval around the logit that should have it, checked; the rest is bisection.
    guess = top + temperature * tl.log(least.to(tl.float32) / 17592186044416.0)
    margin = (tl.abs(guess - top) + tl.abs(top) + temperature) * 4.0e-6
    under = tl.minimum(tl.maximum(logit_key(guess - margin, SHIFT).to(tl.int64), low), high)
    over = tl.minimum(tl.maximum(logit_key(guess + margin, SHIFT).to(tl.int64) + 1, low), high)
    if fixed_weight(key_logit(under.to(tl.int32), SHIFT), top, scale) < least:
        low = under
    if fixed_weight(key_logit(over.to(tl.int32), SHIFT), top, scale) >= least:
        high = over
    while high - low > 1:
        middle = low + (high - low) // 2
        if fixed_weight(key_logit(middle.to(tl.int32), SHIFT), top, scale) >= least:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def limit_of(p, total):
    """The weight that top-p has to reach."""
    return tl.maximum(tl.math.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def how_many(weight, each):
    """How many tokens of weight `each` reach `weight`: `ceil(weight / each)` of int64, for which a GPU has no instruction."""
    count = tl.maximum((weight.to(tl.float32) / tl.maximum(each, 1).to(tl.float32)).to(tl.int64) - 1, 0)
    for _ in tl.static_range(3):  # counts are below 2**19, and the quotient is right to 2**-21 of them
        count += (count * each < weight).to(tl.int64)
    return count


@triton.jit
def weigh_all(logits, stride, start, steps, vocab, top, scale, ROWS: tl.constexpr, LANE: tl.constexpr):
    """Weights of the parts of a chunk."""
    high = tl.zeros([ROWS, LANE], tl.int32)
    low = tl.zeros([ROWS, LANE], tl.int32)
    for i in range(0, steps):
        value, _, _ = load_step(logits, stride, start, steps - 1 - i, steps, vocab, ROWS, LANE)
        more_high, more_low = weight_parts(value, top, scale)  # 0 of what is no token
        high += more_high
        low += more_low
    return part_sums(whole_weight(high, low), ROWS, LANE)


@triton.jit
def weigh_kept(
    logits, stride, start, steps, vocab, least, top, scale, SHIFT: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr
):  # fmt: skip
    """As `weigh_all`, of the tokens whose place is at least `least`."""
    weights = tl.zeros([ROWS, LANE], tl.int64)
    for i in range(0, steps):
        value, ids, live = load_step(logits, stride, start, i, steps, vocab, ROWS, LANE)
        kept = live & (token_place(logit_key(value, SHIFT), ids) >= least)
        weights += tl.where(kept, fixed_weight(value, top, scale), 0)
    return part_sums(weights, ROWS, LANE)


@triton.jit
def weigh_chunk(
    logits, stride, start, steps, vocab, base, low, high, floor, listed, list_at, before, top, scale, back,
    SHIFT: tl.constexpr, TOPS: tl.constexpr, FLOOR: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Weight of the tokens whose key is at least `base`; how many lie in `[low, high)`; the lowest place at or above `floor`.

    `listed`: those in `[low, high)` are written to the row's list, from `before` on.
    """
    weights = tl.zeros([ROWS, LANE], tl.int64)
    lowest = tl.full([ROWS, LANE], BEYOND, tl.int64)
    found = tl.zeros([], tl.int32)
    for i in range(0, steps):
        value, ids, live = load_step(logits, stride, start, tl.where(back, steps - 1 - i, i), steps, vocab, ROWS, LANE)
        weight = fixed_weight(value, top, scale)
        key = tl.where(live, logit_key(value, SHIFT), KEY_OUTSIDE)
        weights += tl.where(key >= base, weight, 0)
        place = token_place(key, ids)
        if FLOOR:
            lowest = tl.minimum(lowest, tl.where(live & (key >= floor), place, BEYOND))
        if TOPS:
            inside = tl.reshape((key >= low) & (key < high), [ROWS * LANE]).to(tl.int32)
            count = tl.sum(inside, 0)
            if listed & (count > 0):
                to = list_at + before + found + tl.cumsum(inside, 0) - 1
                scatter(to, tl.reshape(place, [ROWS * LANE]), inside > 0)
            found += count
    return tl.sum(tl.reshape(weights, [ROWS * LANE]), 0), found, tl.min(tl.reshape(lowest, [ROWS * LANE]), 0)


@triton.jit
def settle_list(
    list_at, size, base, count_base, k, p, limit, floor, best, top, scale, SHIFT: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """Of the row's list: places, weights, and which are kept. `base`, `count_base`: of the tokens above all of them.

    `limit`: the weight that top-p has to reach, 0 if that is `p` times what top-k leaves.
    """
    i = tl.arange(0, LISTED)
    place = tl.load(list_at + i, mask=i < size, other=best, cache_modifier=".cg")
    key = (place >> 32).to(tl.int32)
    weight = tl.where(i < size, fixed_weight(key_logit(key, SHIFT), top, scale), 0)
    rank = tl.zeros([LISTED], tl.int64) + count_base  # of a token among the row's, from 1 on
    reach = tl.zeros([LISTED], tl.int64) + base  # its weight and that of all above it
    PART: tl.constexpr = min(LISTED, 32)
    for start in range(0, size, PART):
        j = start + tl.arange(0, PART)
        other = tl.load(list_at + j, mask=j < size, other=best, cache_modifier=".cg")
        value = key_logit((other >> 32).to(tl.int32), SHIFT)
        other_weight = tl.where(j < size, fixed_weight(value, top, scale), 0)
        above = (other[None, :] >= place[:, None]) & (j < size)[None, :]
        rank += tl.sum(above.to(tl.int32), 1)
        reach += tl.sum(tl.where(above, other_weight[None, :], 0), 1)
    kept = (i < size) & (rank <= k)
    if p < 1:
        if limit == 0:
            limit = limit_of(p, base + tl.sum(tl.where(kept, weight, 0), 0))
        kept = kept & (reach - weight < limit)
    kept = ((kept & (key >= floor)) | (place == best)) & (i < size)
    return place, weight, kept


@triton.jit
def listed_token(ids, weights, level):
    """Id of the first token of the list, by its id, whose running weight exceeds `level`."""
    running = tl.sum(tl.where(ids[None, :] <= ids[:, None], weights[None, :], 0), 1)
    return tl.min(tl.where(running > level, ids, LOWEST), 0)


@triton.jit
def count_key(logits, stride, start, steps, vocab, key, SHIFT: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr):
    """How many tokens have a key, in each part of a chunk."""
    counts = tl.zeros([ROWS, LANE], tl.int32)
    for i in range(0, steps):
        value, _, live = load_step(logits, stride, start, i, steps, vocab, ROWS, LANE)
        counts += (live & (logit_key(value, SHIFT) == key)).to(tl.int32)
    return part_sums(counts, ROWS, LANE).to(tl.int64)


@triton.jit
def reached_in_part(
    logits, stride, start, steps, vocab, parts, running, level, least, top, scale, TIES: tl.constexpr, SHIFT: tl.constexpr,
    ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Id of the first token of a chunk whose running weight exceeds `level`, of those whose place is at least `least`.

    With `TIES`: of those whose key is `least`, which weigh 1. `parts`: what the parts of the chunk weigh; `running`: what lies
    before it.
    """
    PART: tl.constexpr = min(WARP, ROWS) * LANE
    part = tl.arange(0, ROWS * LANE // PART)
    chosen = tl.sum((running + tl.cumsum(parts, 0) <= level).to(tl.int32), 0)
    running += tl.sum(tl.where(part < chosen, parts, 0), 0)
    at = start + chosen * (steps * PART)
    stop = tl.minimum(at + steps * PART, vocab)
    found = tl.full([], -1, tl.int32)
    while (running <= level) & (at < stop):
        value, ids, live = load_span(logits, stride, at, stop, ROWS, LANE)
        key = logit_key(value, SHIFT)
        if TIES:
            weights = (live & (key == least)).to(tl.int64)
        else:
            weights = tl.where(live & (token_place(key, ids) >= least), fixed_weight(value, top, scale), 0)
        weights = tl.reshape(weights, [ROWS * LANE])
        weight = tl.sum(weights, 0)
        if level < running + weight:
            found = at + tl.sum((running + tl.cumsum(weights, 0) <= level).to(tl.int32), 0)
        running += weight
        at += ROWS * LANE
    return found
