"""The support of a row of bfloat16 logits by how many tokens have each value, and the draw from it.

Two passes over the row: one counts (`bins.py`), one finds the ids. Counts times weights are the sums of the weights, in exact
integers, so thresholds are those of a search that weighs every token. Rows are left to that search (`search.py`) where a bin
that several values share would decide.
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
    count_values,
    counts_at,
    is_shared_by_values,
    place_key,
    place_value,
    places_of,
)
from spec_ops.backends.triton.sampling.phases import (
    WARP,
    how_many,
    limit_of,
    load_step,
    part_sums,
    part_totals,
    reached_in_part,
)
from spec_ops.backends.triton.sampling.reach import reached_at
from spec_ops.backends.triton.sampling.weights import (
    LOWEST,
    NOTHING_CUT,
    ONE,
    draw_level,
    fixed_weight,
    key_logit,
    token_place,
    weight_parts,
    weight_scale,
    whole_weight,
)

AHEAD = tl.constexpr(4)  # steps of a pass whose loads are under way at once


@triton.jit
def settle_counts(bins, padding, temperature, k, p, least_p, vocab):
    """What is kept of a row, by the counts in `bins`: `decided, top, boundary, ties, each, total`.

    Args:
        k: how many tokens top-k keeps, `vocab` if it cuts nothing. p, least_p: of top-p and min-p, 1 and 0 likewise.

    Returns:
        decided: whether the rest holds. top: place of the largest logit. boundary: that of the least one that is kept, `BINS`
        if nothing is cut. ties: how many of its tokens are kept, each of which weighs `each`. total: weight of all kept.
    """
    place = all_places()
    count = counts_at(bins, place, padding)
    top = tl.min(tl.where(count > 0, place, BINS - 1))
    best = place_value(top)
    scale = weight_scale(temperature)
    decided = is_shared_by_values(top) == 0
    boundary = top
    ties = tl.full([], 1, tl.int64)
    each = tl.full([], ONE, tl.int64)
    total = each
    if (temperature > 0) & ((least_p > 1) == 0):
        weight = fixed_weight(tl.minimum(place_value(place), best), best, scale)
        mass = weight * count
        masses = tl.sum(mass, 1)
        group = tl.arange(0, GROUPS)
        # Both of zero's bins must weigh the same, and the last one nothing.
        zero = tl.full([], SIGN_BINS - 1, tl.int32)
        end = tl.full([], BINS - 1, tl.int32)
        small = counts_at(bins, zero, padding) + counts_at(bins, zero + 1, padding)
        unlike = fixed_weight(place_value(zero), best, scale) != fixed_weight(place_value(zero + 1), best, scale)
        last = counts_at(bins, end, padding) * fixed_weight(place_value(end), best, scale)
        decided = decided & ((small == 0) | (unlike == 0)) & (last == 0)
        boundary = boundary * 0 + BINS
        total = tl.sum(masses, 0)
        if k < vocab:
            chosen, before = reached_at(tl.sum(count, 1), k)
            own = places_of(chosen)
            counts = counts_at(bins, own, padding)
            places, within = reached_at(counts, k - before)
            boundary = chosen * GROUP + places
            ties = (k - before - within).to(tl.int64)
            each = fixed_weight(place_value(boundary), best, scale)
            weights = fixed_weight(tl.minimum(place_value(own), best), best, scale) * counts
            total = tl.sum(tl.where(group < chosen, masses, 0), 0) + tl.sum(tl.where(own < boundary, weights, 0), 0)
            total += ties * each
        if p < 1:
            limit = limit_of(p, total)
            chosen, above = reached_at(masses, limit)
            own = places_of(chosen)
            weights = fixed_weight(tl.minimum(place_value(own), best), best, scale) * counts_at(bins, own, padding)
            places, within = reached_at(weights, limit - above)
            boundary = chosen * GROUP + places
            above += within
            each = fixed_weight(place_value(boundary), best, scale)
            ties = how_many(limit - above, each)
            total = above + ties * each
        if least_p > 0:
            least = tl.math.ceil(least_p.to(tl.float64) * 17592186044416.0).to(tl.int64)
            likely = (count > 0) & (weight >= least)
            lowest = tl.max(tl.where(likely, place, 0))
            if lowest < boundary:
                boundary = lowest
                ties = counts_at(bins, lowest, padding).to(tl.int64)
                each = fixed_weight(place_value(lowest), best, scale)
                total = tl.sum(tl.where(likely, mass, 0))
        decided = decided & ((boundary == BINS) | (is_shared_by_values(boundary) == 0))
    return decided, top, boundary, ties, each, total


@triton.jit
def find_kept(
    logits, stride, start, steps, vocab, top_value, least_value, scale, SHIFT: tl.constexpr, WEIGH: tl.constexpr,
    ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Of a chunk: the first id of `top_value`; for each of its parts, how many tokens have `least_value`, and if `WEIGH` what
    all above it weigh (otherwise 0)."""
    PART: tl.constexpr = min(WARP, ROWS)
    lane = tl.arange(0, LANE)[None, :]
    first = tl.full([ROWS], LOWEST, tl.int32)  # of a thread's tokens, by their order
    ties = tl.zeros([ROWS], tl.int32)
    high = tl.zeros([ROWS, LANE], tl.int32)
    low = tl.zeros([ROWS, LANE], tl.int32)
    for i in range(0, steps, AHEAD):
        values = ()
        for j in tl.static_range(AHEAD):
            value, _, _ = load_step(
                logits, stride, start, i + j, steps, tl.where(i + j < steps, vocab, 0), ROWS, LANE
            )  # fmt: skip
            values = values + (value,)
        for j in tl.static_range(AHEAD):
            value = values[j]
            first = tl.minimum(first, tl.min(tl.where(value == top_value, (i + j) * LANE + lane, LOWEST), 1))
            ties += tl.sum((value == least_value).to(tl.int32), 1)
            if WEIGH:
                more_high, more_low = weight_parts(value, top_value, scale)
                high += tl.where(value > least_value, more_high, 0)
                low += tl.where(value > least_value, more_low, 0)
    row = tl.arange(0, ROWS)
    at = start + ((row // PART) * steps + first // LANE) * (PART * LANE) + (row % PART) * LANE + first % LANE
    at = tl.where(first < LOWEST, at, LOWEST)
    counts = part_totals(ties, ROWS).to(tl.int64)
    weights = counts * 0
    if WEIGH:
        weights = part_sums(whole_weight(high, low), ROWS, LANE)
    return tl.min(at, 0), counts, weights


@triton.jit
def settle_by_counts(
    logits, uniform, temperature, given_k, given_p, least_p, support, tokens, bins, row, stride, vocab, steps,
    SHIFT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Write a row's support and token if counts decide them, and say whether they do. Of rows of one program.

    Args: as those of `search_support`. TILE: how many tokens are counted at once.
    """
    k = vocab
    if given_k is not None:
        k = tl.where((given_k >= 1) & (given_k < vocab), given_k, vocab).to(tl.int32)
    p = tl.full([], 1.0, tl.float32)
    if given_p is not None:
        p = given_p
    floor_p = tl.full([], 0.0, tl.float32)
    if least_p is not None:
        floor_p = least_p
    padding = count_values(bins, logits, stride, tl.cdiv(vocab, TILE), vocab, TILE)
    decided, top, boundary, ties, each, total = settle_counts(bins, padding, temperature, k, p, floor_p, vocab)
    if decided:
        scale = weight_scale(temperature)
        top_value = place_value(top)
        cuts = boundary < BINS
        least_key = place_key(tl.minimum(boundary, BINS - 1))
        least_value = tl.where(cuts, key_logit(least_key, SHIFT), float("-inf"))
        top_id, counts, weights = find_kept(
            logits, stride, 0, steps, vocab, top_value, least_value, scale, SHIFT, tokens is not None, ROWS, LANE
        )  # fmt: skip
        last = tl.full([], -1, tl.int32)
        least = tl.full([], NOTHING_CUT, tl.int64)
        if cuts:
            last = reached_in_part(
                logits, stride, 0, steps, vocab, counts, ties * 0, ties - 1, least_key, top_value, scale, True, SHIFT, ROWS,
                LANE,
            )  # fmt: skip
            least = token_place(least_key, last)
            before = tl.cumsum(counts, 0) - counts
            weights += tl.minimum(tl.maximum(ties - before, 0), counts) * each
        tl.store(support, top_id.to(tl.int64))
        tl.store(support + 1, last.to(tl.int64))
        tl.store(support + 2, total)
        if tokens is not None:
            drawn = reached_in_part(
                logits, stride, 0, steps, vocab, weights, ties * 0, draw_level(uniform, total), least, top_value, scale, False,
                SHIFT, ROWS, LANE,
            )  # fmt: skip
            tl.store(tokens + row, drawn.to(tl.int64))
    return decided
