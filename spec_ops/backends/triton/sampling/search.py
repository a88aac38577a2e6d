"""The support of a row of logits, and the draw from it, by weighing its tokens: many programs a row.

A program has a chunk of a row's ids. A row's programs go through phases together, and then know one another's numbers:

1. The most likely token, and NaN.
2. Where top-k or top-p cuts: a list of the most likely tokens (`candidates.py`), and all weights where top-p needs them. If the
   list decides what is kept, the first program settles everything, and the row is done.
3. Otherwise where they cut. Every pass counts and weighs, exactly, what lies at or above each of `PIVOTS` keys (for top-p well
   guessed: `guide.py`), until the two that the boundary lies between are neighbours, or few tokens lie between them.
4. Weights of the chunks. If few tokens lie at the boundary, every program has all of them, and settles top-k, top-p and min-p
   among them; otherwise they are ties, and the first so many ids are kept.
5. The chunk that holds the drawn token finds it; or it is in the list.

min-p takes no pass: it is a key, since a token's weight depends on its logit alone. Between phases a chunk is read again, back
and forth: if a row has several programs it is in the L1 cache, otherwise most of it. A copy in registers would be spilled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.arrival import rendezvous
from spec_ops.backends.triton.runtime.sizes import next_power_of_2
from spec_ops.backends.triton.sampling.candidates import (
    common_bound,
    drawn_candidate,
    group_bound,
    list_candidates,
    listed_tokens,
    load_candidates,
    settle_candidates,
)
from spec_ops.backends.triton.sampling.guide import guided_pivots
from spec_ops.backends.triton.sampling.phases import (
    count_key,
    floor_key,
    how_many,
    limit_of,
    listed_token,
    most_likely,
    next_pivots,
    reached_in_part,
    settle_list,
    settle_undrawn,
    share_tally,
    tally,
    weigh_all,
    weigh_chunk,
    weigh_kept,
)
from spec_ops.backends.triton.sampling.reach import COUNTER
from spec_ops.backends.triton.sampling.shared import WIDTH, clear_words
from spec_ops.backends.triton.sampling.weights import (
    BEYOND,
    NOTHING_CUT,
    draw_level,
    fixed_weight,
    infinite_keys,
    key_logit,
    logit_key,
    place_id,
    token_place,
    weight_scale,
)

NO_LIMIT = tl.constexpr(1 << 30)  # more than there are tokens


@triton.jit
def search_support(
    logits, uniform, temperature, given_k, given_p, least_p, support, tokens, words, workspace, counters, row, chunk, stride,
    vocab, steps, workspace_stride, list_words, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GUIDES: tl.constexpr,
    ROWS: tl.constexpr, LANE: tl.constexpr, LISTED: tl.constexpr, VALUE_PASSES: tl.constexpr, MAX_PASSES: tl.constexpr,
    CANDIDATES: tl.constexpr, GROUPS: tl.constexpr, SHIFT: tl.constexpr, ANY_TOP: tl.constexpr,
):  # fmt: skip
    """Write the support of a row, `logits` from its first on, and its token if `tokens` is not None.

    Args:
        uniform, temperature, given_k, given_p, least_p: the row's; None for what no row has.
        support: the row's three integers. tokens: one a row.
        words: of `shared.py`. workspace, counters: of all rows, as in `sampling_support_kernel`.
    """
    TOPS: tl.constexpr = (given_k is not None) or (given_p is not None)
    FILTERED: tl.constexpr = TOPS or (least_p is not None)
    CHUNK_BLOCK: tl.constexpr = next_power_of_2(CHUNKS)
    list_at, told, tallies = workspace, workspace, workspace
    if workspace is not None:
        list_at = workspace + row * workspace_stride
        told = list_at + list_words
        tallies = told + 8 * CHUNKS
    if CHUNKS > 1:
        counters += row * 2
    other = tl.arange(0, CHUNK_BLOCK)
    start = chunk * steps * (ROWS * LANE)
    stop = start + steps * (ROWS * LANE)
    turn = tl.zeros([], tl.int32)

    best, lanes = most_likely(logits, stride, start, steps, vocab, SHIFT, ROWS, LANE)
    if TOPS:
        bound = logit_key(group_bound(lanes, GROUPS, ROWS), SHIFT).to(tl.int64)
    if CHUNKS > 1:
        tl.store(told + chunk, best)
        if TOPS:
            tl.store(told + CHUNKS + chunk, bound)
        rendezvous(counters, turn, CHUNKS)
        turn += 1
        best = tl.max(tl.load(told + other, mask=other < CHUNKS, other=NOTHING_CUT, cache_modifier=".cg"), 0)
        if TOPS:
            bounds = tl.load(told + CHUNKS + other, mask=other < CHUNKS, other=NOTHING_CUT, cache_modifier=".cg")
            bound = common_bound(bounds, CHUNKS)
    lowest_key, infinite_key = infinite_keys(SHIFT)
    top_key = best >> 32
    top_id = place_id(best)
    real = (top_key > lowest_key) & (top_key < infinite_key)
    only_top = real & ((temperature > 0) == 0)
    if least_p is not None:
        only_top = only_top | (real & (least_p > 1))

    if real & (only_top == 0):
        top = key_logit(top_key.to(tl.int32), SHIFT)
        scale = weight_scale(temperature)

        # The boundary of top-k and top-p is a key in [low, high): the largest one that enough tokens, or enough weight, reach.
        low = lowest_key.to(tl.int64)
        high = top_key + 1
        floor = low  # no token's key is below it
        base = low  # the key from which on all are kept
        searching = tl.zeros([], tl.int32)  # 1: top-k, 2: top-p
        cut = tl.zeros([], tl.int32)
        listed = tl.zeros([], tl.int32)
        ties = tl.zeros([], tl.int32)
        count_low = tl.zeros([], tl.int32) + vocab
        count_high = tl.zeros([], tl.int32)
        before_low = tl.minimum(start, vocab)
        before_high = tl.zeros([], tl.int32)
        k = tl.full([], NO_LIMIT, tl.int32)
        p = tl.full([], 1.0, tl.float32)
        limit = tl.zeros([], tl.int64)
        settled = tl.zeros([], tl.int32)
        if FILTERED:
            if given_k is not None:  # noqa: SIM102  decided while compiling, unlike what follows
                if (given_k >= 1) & (given_k < vocab):
                    k = given_k.to(tl.int32)
                    searching = searching * 0 + 1
            if given_p is not None:
                p = given_p
                if (p < 1) & (searching == 0):
                    searching = searching * 0 + 2
            cut = searching
            if least_p is not None:  # noqa: SIM102  decided while compiling, unlike what follows
                if least_p > 0:
                    least_weight = tl.math.ceil(least_p.to(tl.float64) * 17592186044416.0).to(tl.int64)
                    floor = floor_key(least_weight, floor, top_key, top, scale, temperature, SHIFT)
                    cut = cut * 0 + 1
                    base = floor
        if TOPS:
            step = tl.zeros([], tl.int32)
            pivots = tl.zeros([PIVOTS], tl.int64)
            guessed = tl.zeros([], tl.int32)
            if searching > 0:
                mine = list_at + chunk * CANDIDATES
                counter = words + COUNTER * WIDTH
                clear_words(counter, step)
                tl.debug_barrier()
                bound_value = key_logit(bound.to(tl.int32), SHIFT)
                count, heavy, every = list_candidates(
                    logits, stride, start, steps, vocab, bound_value, top, scale, searching == 2, counter, mine, CANDIDATES,
                    ROWS, LANE,
                )  # fmt: skip
                most = count
                listed_count = count
                if CHUNKS == 1:
                    tl.debug_barrier()  # the list is written
                else:
                    tl.store(told + 2 * CHUNKS + chunk, count.to(tl.int64))
                    tl.store(told + 3 * CHUNKS + chunk, heavy)
                    tl.store(told + 4 * CHUNKS + chunk, every)
                    rendezvous(counters, turn, CHUNKS)
                    turn += 1
                    at = told + 2 * CHUNKS + other
                    in_lists = tl.load(at, mask=other < CHUNKS, other=0, cache_modifier=".cg")
                    heavy = tl.sum(tl.load(at + CHUNKS, mask=other < CHUNKS, other=0, cache_modifier=".cg"), 0)
                    every = tl.sum(tl.load(at + 2 * CHUNKS, mask=other < CHUNKS, other=0, cache_modifier=".cg"), 0)
                    most = tl.max(in_lists, 0).to(tl.int32)
                    listed_count = tl.sum(in_lists, 0).to(tl.int32)
                enough = listed_count >= k
                if searching == 2:
                    limit = limit_of(p, every)
                    enough = heavy >= limit
                if enough & (most <= CANDIDATES):
                    settled = settled + 1
                    searching = searching * 0
                    if chunk == 0:
                        noted, there = load_candidates(list_at, told + 2 * CHUNKS, count, CHUNKS, CANDIDATES)
                        values, candidate_ids, places, weights = listed_tokens(noted, there, top, scale, SHIFT)
                        kept_weights, last_kept, _ = settle_candidates(
                            words, values, places, weights, there, bound_value, top, k, p, limit, limit * 0, floor, best, top,
                            scale, SHIFT,
                        )  # fmt: skip
                        all_kept = tl.sum(kept_weights, 0)
                        tl.store(support, top_id)
                        tl.store(support + 1, place_id(last_kept))
                        tl.store(support + 2, all_kept)
                        if tokens is not None:
                            level = draw_level(uniform, all_kept)
                            tl.store(tokens + row, drawn_candidate(words, candidate_ids, kept_weights, level, vocab))
                elif searching == 2:
                    below = most <= CANDIDATES  # the list has all that reach the bound, and that is not enough
                    pivots, turn = guided_pivots(
                        logits, stride, start, steps, vocab, low, tl.where(below, bound, high), tl.where(below, heavy, 0),
                        every, p, limit, floor, top, scale, temperature, tallies, counters, turn, chunk, SHIFT, CHUNKS, GUIDES,
                        PIVOTS, ROWS, LANE,
                    )  # fmt: skip
                    guessed = guessed + 1
            weight_high = tl.zeros([], tl.int64)
            while searching > 0:
                if (searching == 1) & (p < 1):
                    if count_low <= LISTED:  # all that top-k may keep, so top-p can be settled there too
                        high = top_key + 1
                        count_high = count_high * 0
                        before_high = before_high * 0
                        listed = listed + 1
                        searching = searching * 0
                    elif high - low == 1:
                        each = fixed_weight(key_logit(low.to(tl.int32), SHIFT), top, scale)
                        limit = limit_of(p, weight_high + (k - count_high) * each)
                        high = top_key + 1
                        count_high = count_high * 0
                        before_high = before_high * 0
                        weight_high = weight_high * 0
                        step = step * 0
                        searching = searching + 1
                elif floor >= high:  # min-p cuts more than that
                    searching = searching * 0
                elif count_low - count_high <= LISTED:
                    listed = listed + 1
                    searching = searching * 0
                elif high - low == 1:
                    ties = ties + 1
                    searching = searching * 0
                if searching > 0:
                    if guessed == 0:
                        pivots = next_pivots(step, low, high, floor, top, temperature, SHIFT, PIVOTS, VALUE_PASSES)
                    counts, weights = tally(
                        logits, stride, start, steps, vocab, pivots, top, scale, turn % 2 == 0, SHIFT, PIVOTS, ROWS, LANE
                    )  # fmt: skip
                    counts, weights, before = share_tally(
                        tallies + (turn - 2) * (2 * PIVOTS * CHUNKS), counts, weights, counters, turn, chunk, CHUNKS, PIVOTS
                    )  # fmt: skip
                    turn += 1
                    step += 1
                    guessed = guessed * 0
                    reached = tl.where(searching == 1, counts >= k, weights >= limit)
                    low = tl.maximum(low, tl.max(tl.where(reached, pivots, low), 0))
                    high = tl.minimum(high, tl.min(tl.where(reached, high, pivots), 0))
                    count_low = tl.minimum(count_low, tl.min(tl.where(reached, counts, count_low), 0))
                    count_high = tl.maximum(count_high, tl.max(tl.where(reached, 0, counts), 0))
                    if CHUNKS > 1:
                        before_low = tl.minimum(before_low, tl.min(tl.where(reached, before, before_low), 0))
                        before_high = tl.maximum(before_high, tl.max(tl.where(reached, 0, before), 0))
                    weight_high = tl.maximum(weight_high, tl.max(tl.where(reached, 0, weights), 0))
            if (listed + ties) > 0:
                base = high

        if settled == 0:
            if FILTERED:
                own, found, lowest = weigh_chunk(
                    logits, stride, start, steps, vocab, base, low, high, floor, listed > 0, list_at, before_low - before_high,
                    top, scale, turn % 2 == 0, SHIFT, TOPS, least_p is not None, ROWS, LANE,
                )  # fmt: skip
            else:
                parts = weigh_all(logits, stride, start, steps, vocab, top, scale, ROWS, LANE)
                own = tl.sum(parts, 0)
                found = tl.zeros([], tl.int32)
                lowest = tl.full([], BEYOND, tl.int64)
            if CHUNKS == 1:
                weights = tl.zeros([CHUNK_BLOCK], tl.int64) + own
                counts = tl.zeros([CHUNK_BLOCK], tl.int64) + found
                if FILTERED:
                    tl.debug_barrier()  # the list is written
            else:
                tl.store(told + 5 * CHUNKS + chunk, own)
                tl.store(told + 6 * CHUNKS + chunk, found.to(tl.int64))
                tl.store(told + 7 * CHUNKS + chunk, lowest)
                rendezvous(counters, turn, CHUNKS)
                weights = tl.load(told + 5 * CHUNKS + other, mask=other < CHUNKS, other=0, cache_modifier=".cg")
                counts = tl.load(told + 6 * CHUNKS + other, mask=other < CHUNKS, other=0, cache_modifier=".cg")
                lows = tl.load(told + 7 * CHUNKS + other, mask=other < CHUNKS, other=BEYOND, cache_modifier=".cg")
                lowest = tl.min(lows, 0)

            total = tl.sum(weights, 0)
            earlier = tl.sum(tl.where(other < chunk, weights, 0), 0)
            least = tl.full([], NOTHING_CUT, tl.int64)
            writes_last = chunk == 0
            if TOPS:
                if listed > 0:
                    place, weight, kept = settle_list(
                        list_at, count_low - count_high, total, count_high, k, p, limit, floor, best, top, scale,
                        SHIFT, LISTED,
                    )  # fmt: skip
                    ids = place_id(place)
                    weight = tl.where(kept, weight, 0)
                    everything = total == 0  # all that is kept is in the list
                    total += tl.sum(weight, 0)
                    earlier += tl.sum(tl.where(ids < start, weight, 0), 0)
                    own += tl.sum(tl.where((ids >= start) & (ids < stop), weight, 0), 0)
                    least = tl.min(tl.where(kept, place, BEYOND), 0)
                    if least == BEYOND:  # min-p cuts all of the list, and is what decides
                        least = lowest
                    if tokens is not None:  # noqa: SIM102  decided while compiling, unlike what follows
                        if everything:
                            own = own * 0  # so that nobody looks for the token
                            if chunk == 0:
                                tl.store(tokens + row, listed_token(ids, weight, draw_level(uniform, total)))
                elif ties > 0:
                    each = fixed_weight(key_logit(low.to(tl.int32), SHIFT), top, scale)
                    kept_ties = (k - count_high).to(tl.int64)
                    if limit > 0:
                        kept_ties = how_many(limit - total, each)
                    ties_before = tl.sum(tl.where(other < chunk, counts, 0), 0)
                    own_ties = tl.minimum(tl.maximum(kept_ties - ties_before, 0), found)
                    total += kept_ties * each
                    earlier += tl.minimum(ties_before, kept_ties) * each
                    own += own_ties * each
                    # In chunks before the last tie all of them are kept, in those after it none.
                    writes_last = (ties_before < kept_ties) & (kept_ties <= ties_before + found)
                    least = (low + (ties_before >= kept_ties).to(tl.int64)) << 32
                    if writes_last:
                        parts_found = count_key(logits, stride, start, steps, vocab, low, SHIFT, ROWS, LANE)
                        last_id = reached_in_part(
                            logits, stride, start, steps, vocab, parts_found, ties_before, kept_ties - 1, low, top, scale, True,
                            SHIFT, ROWS, LANE,
                        )  # fmt: skip
                        least = token_place(low, last_id)
            if least_p is not None:  # noqa: SIM102  decided while compiling, unlike what follows
                if (cut > 0) & (listed + ties == 0):
                    least = lowest
            if writes_last:
                tl.store(support + 1, tl.where(least == NOTHING_CUT, -1, place_id(least)))
            if chunk == 0:
                tl.store(support, top_id)
                tl.store(support + 2, total)
            if tokens is not None:
                level = draw_level(uniform, total)
                if (earlier <= level) & (level < earlier + own):
                    if FILTERED:
                        parts = weigh_kept(logits, stride, start, steps, vocab, least, top, scale, SHIFT, ROWS, LANE)
                    token = reached_in_part(
                        logits, stride, start, steps, vocab, parts, earlier, level, least, top, scale, False, SHIFT, ROWS, LANE
                    )  # fmt: skip
                    tl.store(tokens + row, token.to(tl.int64))
    elif chunk == 0:
        infinite = top_key == infinite_key
        settle_undrawn(
            logits, stride, vocab, support, tokens, row, top_id, only_top, infinite, top_key == lowest_key, ANY_TOP, ROWS, LANE
        )  # fmt: skip
