"""The support of a row by how many tokens have about the same logit, and the draw from it: float32, which has too many values
to count each of them (`counted.py`), and float16.

Two passes over the row. The first counts tokens by the upper bits of their logits (`bins.py`) and finds the largest one. Counts
times the weights in the middle of their bins say about where the boundary lies. The second weighs everything exactly, and lists
the tokens around that place. Exact weights then say whether the boundary is among them, and where; if not, the row is left to
the search (`search.py`), which finds the same bits.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton grows a tuple by adding another)

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.sampling.bins import (
    BINS,
    GROUP,
    GROUPS,
    SIGN_BINS,
    all_places,
    counts_at,
    places_of,
)
from spec_ops.backends.triton.sampling.candidates import listed_tokens, settle_candidates
from spec_ops.backends.triton.sampling.phases import (
    WARP,
    floor_key,
    limit_of,
    load_step,
    part_sums,
    reached_in_part,
    step_ids,
)
from spec_ops.backends.triton.sampling.reach import COUNTER, reached_at
from spec_ops.backends.triton.sampling.shared import WIDTH, add_one, append_tokens, clear_words
from spec_ops.backends.triton.sampling.weights import (
    BEYOND,
    LOWEST,
    draw_level,
    fixed_weight,
    infinite_keys,
    key_logit,
    logit_key,
    place_id,
    relative,
    token_place,
    weight_parts,
    weight_scale,
    whole_weight,
)

LOW_BITS = tl.constexpr(15)  # of a float32, all of which share a bin: a power of two has 256
SMALLEST = tl.constexpr(119 << 8)  # 2**-8: smaller logits of either sign share a bin, as those from 2**8 on do
NEAR = tl.constexpr(1024)  # tokens that a list has room for


@triton.jit
def least_of(place):
    """The least logit of a bin; places of bins go from the largest logits to the least."""
    unit = tl.where(place < SIGN_BINS, SMALLEST + SIGN_BINS - 1 - place, -1 - SMALLEST + SIGN_BINS - place)
    key = tl.where(place == SIGN_BINS - 1, 0, unit << LOW_BITS)
    return tl.where(place == BINS - 1, float("-inf"), key_logit(key, 0))


@triton.jit
def count_ranges(bins, logits, stride, steps, vocab, TILE: tl.constexpr):
    """Count in the bins how many of `steps` tiles of ids have such a logit, NaN as infinity; the padding, for `counts_at`, and
    the largest logit."""
    clear_words(bins, tl.arange(0, BINS))
    tl.debug_barrier()
    best = tl.full([TILE], float("-inf"), tl.float32)
    for i in range(0, steps):
        ids = i * TILE + tl.arange(0, TILE)
        value = tl.load(logits + ids.to(tl.int64) * stride, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        size = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> LOW_BITS
        at = tl.minimum(tl.maximum(size, SMALLEST), SMALLEST + (SIGN_BINS - 1))
        add_one(bins - SMALLEST * WIDTH, tl.where(value < 0, at + SIGN_BINS, at))
        best = tl.maximum(best, value)
    tl.debug_barrier()
    return steps * TILE - vocab, tl.max(best, 0)


@triton.jit
def _about(place, top, scale):
    """About what a token of a bin weighs, as a share of the most likely one; 0 in the last bin."""
    least = least_of(place)
    roof = least_of(place - 1)
    half = tl.minimum((roof - least) * scale * 0.34657359, 1.0)  # of the bin's width, in powers of e
    weight = relative(tl.minimum((roof + least) * 0.5, top), top, scale) * (1.0 + half * half * 0.16666667)
    return tl.where(place == BINS - 1, 0.0, weight)


@triton.jit
def _count_before(bins, padding, sums, place):
    """How many tokens are in the bins before a place; `sums`: those of groups."""
    group = place // GROUP
    own = places_of(group)
    inside = tl.sum(tl.where(own < place, counts_at(bins, own, padding), 0), 0)
    return tl.sum(tl.where(tl.arange(0, GROUPS) < group, sums, 0), 0) + inside


@triton.jit
def _place_of_count(bins, padding, sums, wanted):
    """The first place up to which at least `wanted` tokens are, and how many are before it."""
    group, before = reached_at(sums, wanted)
    places, within = reached_at(counts_at(bins, places_of(group), padding), wanted - before)
    return group * GROUP + places, before + within


@triton.jit
def narrow(bins, padding, top, scale, k, p, floor_value, vocab):
    """Where the boundary probably lies, by the counts in `bins`.

    Args:
        k: how many tokens top-k keeps, `vocab` if it cuts nothing. p: of top-p, 1 or more likewise. floor_value: the least
            logit that min-p keeps, -inf if it cuts nothing.

    Returns:
        first, last: places of the bins that hold it. above, inside: how many tokens lie in bins before those, and in them, more
        than `NEAR` if too many. by_floor: whether it is probably min-p's.
    """
    place = all_places()
    count = counts_at(bins, place, padding)
    sums = tl.sum(count, 1)
    mass = tl.where(count == 0, 0.0, _about(place, top, scale) * count.to(tl.float32))
    masses = tl.sum(mass, 1)
    group = tl.arange(0, GROUPS)
    every = tl.sum(masses, 0)
    near = tl.full([], BINS - 1, tl.int32)
    if k < vocab:
        near, before = _place_of_count(bins, padding, sums, k)
        own = places_of(near // GROUP)
        among = tl.where(own < near, counts_at(bins, own, padding), tl.where(own == near, k - before, 0)).to(tl.float32)
        every = tl.sum(tl.where(group < near // GROUP, masses, 0.0), 0)
        every += tl.sum(tl.where(among == 0, 0.0, _about(own, top, scale) * among), 0)
    far = near
    if p < 1:
        limit = p * every
        chosen, heavy = reached_at(masses, limit)
        chosen = tl.minimum(chosen, GROUPS - 1)  # sums may be rounded down
        own = places_of(chosen)
        among = counts_at(bins, own, padding).to(tl.float32)
        places, _ = reached_at(tl.where(among == 0, 0.0, _about(own, top, scale) * among), limit - heavy)
        near = tl.minimum(chosen * GROUP + tl.minimum(places, GROUP - 1), far)
        if k >= vocab:
            far = near
    floor_place = tl.minimum(tl.sum((least_of(place) > floor_value).to(tl.int32)), BINS - 1)
    by_floor = floor_place < near
    if by_floor:
        near = floor_place
        if (k >= vocab) | ((p < 1) == 0):  # otherwise what top-p leaves has to be known first
            far = near
    before_near = _count_before(bins, padding, sums, near)
    until = _count_before(bins, padding, sums, far) + counts_at(bins, far, padding)
    spare = NEAR - (until - before_near)
    inside = tl.full([], NEAR + 1, tl.int32)
    first = near
    last = far
    above = before_near
    if spare >= 0:
        if (p < 1) | (floor_value > float("-inf")):  # a guess, or all tokens of the bin may be below min-p's
            skipped = before_near - spare // 2
            first = first * 0
            above = above * 0
            if skipped > 0:
                first, above = _place_of_count(bins, padding, sums, skipped)
                above += counts_at(bins, first, padding)
                first += 1
        if k >= vocab:  # nothing beyond top-k's boundary matters
            last = last * 0 + (BINS - 1)
            until = until * 0 + vocab
            if above + NEAR < vocab:
                last, until = _place_of_count(bins, padding, sums, above + NEAR + 1)
                last -= 1
        inside = until - above
    return first, last, above, inside, by_floor & (far == near)


@triton.jit
def weigh_and_list(
    logits, stride, steps, vocab, top, scale, roof, least, list_at, counter, ROWS: tl.constexpr, LANE: tl.constexpr
):  # fmt: skip
    """List the tokens of a row from `least` on and below `roof`: values and ids.

    Returns:
        top_id: the first id of `top`. every, parts: weight of all tokens; of those from `roof` on, of each part of the row.
    """
    first = tl.full([ROWS, LANE], LOWEST, tl.int32)
    high = tl.zeros([ROWS, LANE], tl.int32)
    low = tl.zeros([ROWS, LANE], tl.int32)
    above_high = tl.zeros([ROWS, LANE], tl.int32)
    above_low = tl.zeros([ROWS, LANE], tl.int32)
    TOGETHER: tl.constexpr = max(16 // LANE, 1)  # steps whose loads are under way at once: 16 tokens of a thread
    for i in range(0, steps, TOGETHER):
        values = ()
        for j in tl.static_range(TOGETHER):
            value, _, _ = load_step(
                logits, stride, 0, i + j, steps, tl.where(i + j < steps, vocab, 0), ROWS, LANE
            )  # fmt: skip
            values = values + (value,)
        for j in tl.static_range(TOGETHER):
            value = values[j]
            ids = step_ids(0, i + j, steps, ROWS, LANE)
            live = (ids < vocab) & (i + j < steps)
            first = tl.minimum(first, tl.where(live & (value == top), ids, LOWEST))
            more_high, more_low = weight_parts(value, top, scale)  # 0 of what is no token
            high += more_high
            low += more_low
            beyond = value >= roof
            above_high += tl.where(beyond, more_high, 0)
            above_low += tl.where(beyond, more_low, 0)
            append_tokens(list_at, NEAR, counter, ids, value, live & (value >= least) & (beyond == 0))
    every = tl.sum(tl.reshape(whole_weight(high, low), [ROWS * LANE]), 0)
    return tl.min(tl.reshape(first, [ROWS * LANE]), 0), every, part_sums(whole_weight(above_high, above_low), ROWS, LANE)


@triton.jit
def settle_by_ranges(
    logits, uniform, temperature, given_k, given_p, least_p, support, tokens, workspace, bins, row, stride, vocab, steps,
    workspace_stride, SHIFT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Write a row's support and token if its counts lead to them, and say whether they do. Of rows of one program.

    Args: as those of `search_support`. TILE: how many tokens are counted at once.
    """
    PART: tl.constexpr = min(WARP, ROWS)
    k = vocab
    if given_k is not None:
        k = tl.where((given_k >= 1) & (given_k < vocab), given_k, vocab).to(tl.int32)
    p = tl.full([], 1.0, tl.float32)
    if given_p is not None:
        p = given_p
    cuts = (temperature > 0) & ((k < vocab) | (p < 1))
    if least_p is not None:
        cuts = cuts & ((least_p > 1) == 0)
    decided = tl.full([], 0, tl.int1)
    if cuts:
        padding, top = count_ranges(bins, logits, stride, tl.cdiv(vocab, TILE), vocab, TILE)
        infinite = counts_at(bins, tl.zeros([], tl.int32), padding) > 0  # NaN, or a logit too large for a bin of its own
        scale = weight_scale(temperature)
        lowest_key, _ = infinite_keys(SHIFT)
        top_key = logit_key(top, SHIFT).to(tl.int64)
        floor = lowest_key.to(tl.int64)
        floor_value = tl.full([], float("-inf"), tl.float32)
        if (infinite == 0) & (top > float("-inf")):
            if least_p is not None:  # noqa: SIM102  decided while compiling, unlike what follows
                if least_p > 0:
                    least_weight = tl.math.ceil(least_p.to(tl.float64) * 17592186044416.0).to(tl.int64)
                    floor = floor_key(least_weight, floor, top_key + 1, top, scale, temperature, SHIFT)
                    floor_value = key_logit(floor.to(tl.int32), SHIFT)
            # Where masks leave fewer tokens than top-k would keep, it cuts nothing that weighs.
            last_bin = tl.full([], BINS - 1, tl.int32)
            left = vocab - counts_at(bins, last_bin, padding)
            if (p < 1) & (k >= left) & (fixed_weight(least_of(last_bin - 1), top, scale) == 0):
                k = left * 0 + vocab
            first, last, above, inside, by_floor = narrow(
                bins, padding, top, scale, k, p, floor_value, vocab
            )  # fmt: skip
            if inside <= NEAR:
                tl.debug_barrier()  # all have read the bins
                counter = bins + COUNTER * WIDTH
                clear_words(counter, inside * 0)
                tl.debug_barrier()
                list_at = workspace + row * workspace_stride
                least = least_of(last)
                roof = least_of(first - 1)
                top_id, every, parts = weigh_and_list(
                    logits, stride, steps, vocab, top, scale, roof, least, list_at, counter, ROWS, LANE
                )  # fmt: skip
                tl.debug_barrier()  # the list is written
                i = tl.arange(0, NEAR)
                noted = tl.load(list_at + i, mask=i < inside, other=0, cache_modifier=".cg")
                value, ids, near_place, weight = listed_tokens(noted, i < inside, top, scale, SHIFT)
                best = token_place(top_key, top_id)
                base = tl.sum(parts, 0)
                listed = tl.sum(weight, 0)
                limit = tl.zeros([], tl.int64)
                if k >= vocab:
                    limit = limit_of(p, every) - base
                kept_weights = weight
                last_kept = tl.full([], BEYOND, tl.int64)
                if by_floor:
                    kept = (near_place >> 32) >= floor
                    kept_weights = tl.where(kept, weight, 0)
                    last_kept = tl.min(tl.where(kept, near_place, BEYOND), 0)
                    few_enough = above + tl.sum(kept.to(tl.int32), 0) <= k
                    decided = few_enough & ((k < vocab) | (tl.sum(kept_weights, 0) <= limit))
                elif (k < vocab) | ((limit >= 1) & (limit <= listed)):
                    kept_weights, last_kept, decided = settle_candidates(
                        bins, value, near_place, weight, i < inside, least, roof, k - above, p, limit, base, floor, best, top,
                        scale, SHIFT,
                    )  # fmt: skip
                decided = decided & (last_kept < BEYOND)
                if decided:
                    total = base + tl.sum(kept_weights, 0)
                    tl.store(support, top_id.to(tl.int64))
                    tl.store(support + 1, place_id(last_kept))
                    tl.store(support + 2, total)
                    if tokens is not None:
                        part = tl.arange(0, ROWS // PART)
                        of = ids // (steps * (PART * LANE))
                        parts += tl.sum(tl.where(of[:, None] == part[None, :], kept_weights[:, None], 0), 0)
                        drawn = reached_in_part(
                            logits, stride, 0, steps, vocab, parts, base * 0, draw_level(uniform, total), last_kept, top, scale,
                            False, SHIFT, ROWS, LANE,
                        )  # fmt: skip
                        tl.store(tokens + row, drawn.to(tl.int64))
    return decided
