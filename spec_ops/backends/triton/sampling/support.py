"""The support of a row of logits, and the draw from it: many programs a row, one launch.

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

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.arrival import rendezvous
from spec_ops.backends.triton.runtime.cooperative import resident_or_none
from spec_ops.backends.triton.runtime.counters import arrival_counters
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, num_sms
from spec_ops.backends.triton.sampling.candidates import (
    SLOTS,
    common_bound,
    group_bound,
    id_at,
    list_candidates,
    load_candidates,
    settle_candidates,
    sizes,
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
from spec_ops.backends.triton.sampling.weights import (
    BEYOND,
    KEY_SHIFT,
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

LANE = 8  # neighbouring tokens of a thread: 16 bytes of bfloat16
PIVOTS = 8  # keys that a pass counts, or sums, at: more would narrow faster, with more instructions and registers
LISTED = 128  # tokens that are few enough to compare each with each
VALUE_PASSES = 3  # whose pivots divide values evenly; those of later ones divide keys, which ends in any case
ROWS_AT_ONCE = 8192  # of a launch, whose rows have up to 12 KB of workspace each; more than any GPU takes at once
MAX_PASSES = 32  # 11 with 8 pivots each narrow 2**32 keys to one; as many for top-k as for top-p, and those above
NO_LIMIT = tl.constexpr(1 << 30)  # more than there are tokens


# A batch of one has any stride. Triton 3.6 fails to compile a vocabulary that is the constant 1.
@triton.jit(do_not_specialize=["uniform_row_stride", "uniform_stride", "vocab"])
def sampling_support_kernel(
    logits, uniforms, temperatures, top_k, top_p, min_p, support, tokens, workspace, counters,
    row_stride, inner_stride, stride, uniform_row_stride, uniform_stride, temperature_stride, k_stride, p_stride, min_stride,
    inner, vocab, steps, workspace_stride, list_words,
    CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GUIDES: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr,
    LISTED: tl.constexpr, VALUE_PASSES: tl.constexpr, MAX_PASSES: tl.constexpr, CANDIDATES: tl.constexpr, GROUPS: tl.constexpr,
    SLOTS: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr, ANY_TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(row, chunk)`, with `steps` tiles of `ROWS * LANE` ids. With `CHUNKS > 1` all programs are resident at once.

    `workspace`, of a row: the list, what its programs tell one another, `MAX_PASSES` tallies of each, and their slots. `tokens`
    is None where nothing is drawn. `EVEN`: `vocab` is a multiple of 16. `ANY_TOP`: `top` also of rows that are no
    distribution, their first NaN if they have one.
    """
    await_predecessors(PDL)
    if EVEN:
        vocab = vocab // 16 * 16  # what its specialization would tell
    TOPS: tl.constexpr = (top_k is not None) or (top_p is not None)
    FILTERED: tl.constexpr = TOPS or (min_p is not None)
    CHUNK_BLOCK: tl.constexpr = triton.next_power_of_2(CHUNKS)
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    request = row // inner
    logits += request * row_stride + (row % inner) * inner_stride
    support += row * 3
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
    temperature = tl.load(temperatures + request * temperature_stride)

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
    if min_p is not None:
        least_p = tl.load(min_p + request * min_stride)
        only_top = only_top | (real & (least_p > 1))

    if real & (only_top == 0):
        top = key_logit(top_key.to(tl.int32), SHIFT)
        scale = weight_scale(temperature)
        if tokens is not None:
            uniform = tl.load(uniforms + request * uniform_row_stride + (row % inner) * uniform_stride)

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
            if top_k is not None:
                given_k = tl.load(top_k + request * k_stride).to(tl.int64)
                if (given_k >= 1) & (given_k < vocab):
                    k = given_k.to(tl.int32)
                    searching = searching * 0 + 1
            if top_p is not None:
                p = tl.load(top_p + request * p_stride)
                if (p < 1) & (searching == 0):
                    searching = searching * 0 + 2
            cut = searching
            if min_p is not None:  # noqa: SIM102  decided while compiling, unlike what follows
                if least_p > 0:
                    least_weight = tl.math.ceil(least_p.to(tl.float64) * 17592186044416.0).to(tl.int64)
                    floor = floor_key(least_weight, floor, top_key, top, scale, temperature, SHIFT)
                    cut = cut * 0 + 1
                    base = floor
        if TOPS:
            step = tl.zeros([], tl.int32)
            pivots = next_pivots(step, low, high, floor, top, temperature, SHIFT, PIVOTS, VALUE_PASSES)
            fresh = tl.zeros([], tl.int32) + 1
            if searching > 0:
                mine = list_at + chunk * CANDIDATES
                count, heavy, every = list_candidates(
                    logits, stride, start, steps, vocab, key_logit(bound.to(tl.int32), SHIFT), top, scale, searching == 2,
                    tallies + 2 * PIVOTS * MAX_PASSES * CHUNKS + chunk * (ROWS * SLOTS), mine, SHIFT, SLOTS, CANDIDATES, ROWS,
                    LANE,
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
                        candidates = load_candidates(list_at, told + 2 * CHUNKS, count, CHUNKS, CANDIDATES)
                        candidate_ids, kept_weights, last_kept = settle_candidates(
                            candidates, bound, k, p, limit, floor, best, top, scale, vocab, SHIFT
                        )  # fmt: skip
                        all_kept = tl.sum(kept_weights, 0)
                        tl.store(support, top_id)
                        tl.store(support + 1, place_id(last_kept))
                        tl.store(support + 2, all_kept)
                        if tokens is not None:
                            drawn = id_at(candidate_ids, kept_weights, draw_level(uniform, all_kept), vocab)
                            tl.store(tokens + row, drawn.to(tl.int64))
                elif searching == 2:
                    below = most <= CANDIDATES  # the list has all that reach the bound, and that is not enough
                    pivots, turn = guided_pivots(
                        logits, stride, start, steps, vocab, low, tl.where(below, bound, high), tl.where(below, heavy, 0),
                        every, p, limit, floor, top, scale, temperature, tallies, counters, turn, chunk, SHIFT, CHUNKS, GUIDES,
                        PIVOTS, ROWS, LANE,
                    )  # fmt: skip
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
                    if fresh == 0:
                        pivots = next_pivots(step, low, high, floor, top, temperature, SHIFT, PIVOTS, VALUE_PASSES)
                    counts, weights = tally(
                        logits, stride, start, steps, vocab, pivots, top, scale, turn % 2 == 0, SHIFT, PIVOTS, ROWS, LANE
                    )  # fmt: skip
                    counts, weights, before = share_tally(
                        tallies + (turn - 2) * (2 * PIVOTS * CHUNKS), counts, weights, counters, turn, chunk, CHUNKS, PIVOTS
                    )  # fmt: skip
                    turn += 1
                    step += 1
                    fresh = fresh * 0
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
                    top, scale, turn % 2 == 0, SHIFT, TOPS, min_p is not None, ROWS, LANE,
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
            if min_p is not None:  # noqa: SIM102  decided while compiling, unlike what follows
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


class Shares(NamedTuple):
    """How rows are divided among programs.

    Attributes:
        chunks: programs of a row. tiles: of each of them. rows, lane: of a tile, which has `rows * lane` ids.
    """

    chunks: int
    tiles: int
    rows: int
    lane: int
    num_warps: int

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "CHUNKS": self.chunks,
            "PIVOTS": PIVOTS if self.chunks > 1 else min(PIVOTS, 2),  # fewer registers, and a bound to begin with
            "GUIDES": PIVOTS,
            "ROWS": self.rows,
            "LANE": self.lane,
            "LISTED": LISTED,
            "VALUE_PASSES": VALUE_PASSES,
            "MAX_PASSES": MAX_PASSES,
            "SLOTS": SLOTS,
            **sizes(self.chunks),
            "num_warps": self.num_warps,
            "maxnreg": min(65536 // (32 * self.num_warps), 255),  # ptxas saves some at the price of spills
        }


def tile_size(vocab: int, threads: int, lane: int) -> int:
    """Ids of a tile: a power of two, at least what a warp reads, so that small vocabularies share a variant."""
    return min(max(triton.next_power_of_2(vocab), 32 * lane), threads * lane)


def shares(rows: int, vocab: int, programs: int, filtered: bool = True, lane: int = LANE) -> Shares:
    """For `rows` rows of `vocab` tokens, on `programs` that are resident at once; one a row where rows are more."""
    most = min(max(programs // max(rows, 1), 1), 128)
    # A row to itself fills a multiprocessor: with a second one its L1 cache would hold neither.
    num_warps = 8 if most > 1 else 16 if filtered else 32
    tile = tile_size(vocab, 32 * num_warps, lane)
    tiles = triton.cdiv(vocab, tile)
    each = triton.cdiv(tiles, most)
    chunks = triton.cdiv(tiles, each)
    num_warps = min(num_warps, max(tile // lane // 32, 1))
    return Shares(chunks, each, tile // lane, lane, num_warps)


def support_of_rows(logits, uniforms, temperature, top_k, top_p, min_p, any_top: bool = False):
    """`(support, tokens)`, without tokens if `uniforms` is None."""
    support = logits.new_empty((*logits.shape[:-1], 3), dtype=torch.int64)
    tokens = None if uniforms is None else logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    if not support.numel():
        return support, tokens
    given = logits if logits.dim() == 3 else logits[:, None]
    bs, inner, vocab = given.shape
    coins = (0, 0) if uniforms is None else (uniforms.stride(0), uniforms.stride(1) if uniforms.dim() == 2 else 0)
    settings = [0 if x is None else x.stride(0) for x in (temperature, top_k, top_p, min_p)]
    filtered = not (top_k is None and top_p is None and min_p is None)

    def start(share: Shares) -> bool:
        constants = share.constants
        list_words = max(LISTED, triton.next_power_of_2(share.chunks) * constants["CANDIDATES"]) * filtered
        tallies = 2 * constants["PIVOTS"] * MAX_PASSES + share.rows * SLOTS  # and slots
        words = list_words + (8 + tallies * filtered) * share.chunks
        step = min(bs, max(ROWS_AT_ONCE // inner, 1))
        workspace = None
        if filtered or share.chunks > 1:
            workspace = torch.empty(step * inner * words, dtype=torch.int64, device=logits.device)
        cooperative = share.chunks > 1
        counters = arrival_counters(logits.device, 2 * bs * inner, "sampling_support") if cooperative else None
        for first in range(0, bs, step):
            part = slice(first, first + step)
            launch(
                sampling_support_kernel, (min(step, bs - first) * inner * share.chunks,),
                given[part], *(x if x is None else x[part] for x in (uniforms, temperature, top_k, top_p, min_p)),
                support[part], tokens if tokens is None else tokens[part], workspace, counters,
                *given.stride(), *coins, *settings, inner, vocab, share.tiles, words, list_words,
                SHIFT=KEY_SHIFT[logits.dtype], EVEN=vocab % 16 == 0, ANY_TOP=any_top, **constants,
                launch_cooperative_grid=cooperative,
            )  # fmt: skip
        return True

    with device_guard(logits):
        # Triton's interpreter runs one program after another.
        lane = LANE * 2 // logits.element_size()  # of float32 half as many, of twice the registers
        share = shares(bs * inner, vocab, num_sms(logits.device) if logits.is_cuda else 1, filtered, lane)
        grid = ("sampling_support", bs * inner, share)
        if share.chunks == 1 or resident_or_none(grid, lambda: start(share)) is None:
            start(shares(bs * inner, vocab, 1, filtered, lane))  # which wait for nobody
    return support, tokens


def sampling_support(logits, temperature, top_k, top_p, min_p) -> torch.Tensor:
    return support_of_rows(logits, None, temperature, top_k, top_p, min_p)[0]


def sample_logits(logits, uniforms, temperature, top_k, top_p, min_p) -> tuple[torch.Tensor, torch.Tensor]:
    support, tokens = support_of_rows(logits, uniforms, temperature, top_k, top_p, min_p)
    return tokens, support


def ahead() -> Iterator[Variant]:
    outputs = {"support": "*i64:16", "tokens": "*i64:16"}
    settings = {"top_k": "*i32:16", "top_p": "*fp32:16", "min_p": "*fp32:16"}
    strides = {"top_k": "k_stride", "top_p": "p_stride", "min_p": "min_stride"}
    for rows, vocab, dtype, given in (
        (4, 128_256, "bf16", ("top_k", "top_p", "min_p")),
        (4, 128_256, "fp32", ("top_k", "top_p")),
        (4, 128_256, "bf16", ()),
        *((4, 128_256, "bf16", (name,)) for name in settings),
        (512, 128_256, "bf16", ("top_k", "top_p")),
        (512, 128_256, "bf16", ("top_p",)),
        (512, 128_256, "bf16", ("min_p",)),
        (512, 128_256, "bf16", ()),
    ):
        constants = shares(rows, vocab, 132, bool(given), LANE // 2 if dtype == "fp32" else LANE).constants
        num_warps, options = constants.pop("num_warps"), {"maxnreg": constants.pop("maxnreg")}
        absent = [name for name in settings if name not in given]
        several = constants["CHUNKS"] > 1
        kept = ({"workspace": "*i64:16"} if several or given else {}) | ({"counters": "*i32:16"} if several else {})
        yield Variant(
            f"sample_logits, {rows} rows, {dtype}, {' and '.join(given) or 'nothing cut'}",
            sampling_support_kernel,
            {"logits": f"*{dtype}:16", "uniforms": "*fp32:16", "temperatures": "*fp32:16", "row_stride": "i32:16"}
            | {"inner_stride": "i32:16", "uniform_row_stride": "i32", "uniform_stride": "i32", "vocab": "i32"}
            | {"steps": "i32", "workspace_stride": "i32", "list_words": "i32"}
            | outputs
            | kept
            | {name: settings[name] for name in given}
            | {strides[name]: "i32" for name in absent},
            {"stride": 1, "temperature_stride": 1, "inner": 1, "ANY_TOP": False, "EVEN": True}
            | {"SHIFT": 0 if dtype == "fp32" else 16}
            | {strides[name]: 1 for name in given}
            | dict.fromkeys([*absent, *({"workspace", "counters"} - set(kept))])
            | constants,
            num_warps=num_warps,
            options=options,
        )
