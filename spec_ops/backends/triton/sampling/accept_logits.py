"""Acceptance of drafts by logits and their supports: many programs a request, one launch, no distribution in memory.

Every program of a request walks by itself, which takes the logits of the drafted tokens alone. Then it sums what the last
token may be drawn from over each part of its chunk of the vocabulary: the residual of the draft that was rejected, the target
without its rejected children, or the target. The last program to arrive knows all sums, so in which part the token lies.

Block verification chooses how many drafts are accepted by the residuals of all of them, unless all are; the last program to
arrive walks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.arrival import arrive
from spec_ops.backends.triton.runtime.counters import arrival_counters
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, num_sms
from spec_ops.backends.triton.runtime.sizes import next_power_of_2
from spec_ops.backends.triton.sampling.phases import WARP, load_span, load_step, part_totals, step_ids
from spec_ops.backends.triton.sampling.support import LANE, tile_size
from spec_ops.backends.triton.sampling.weights import (
    KEY_SHIFT,
    NOTHING_CUT,
    draw_level,
    fixed_weight,
    kept_weight,
    logit_key,
    place_id,
    token_place,
    weight_scale,
)

MOST_CHUNKS = 128


@triton.jit
def _pick(vector, index, SIZE: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, vector, 0), 0)


@triton.jit
def _rows(logits, stride, support, live, SHIFT: tl.constexpr):
    """Of rows of logits: the largest one, the place of the least likely kept token, and the total, 0 where not `live`.

    `logits`, `support`: a vector of addresses of rows, and of their three integers.
    """
    top_id = tl.load(support, mask=live, other=0)
    last = tl.load(support + 1, mask=live, other=-1)
    total = tl.load(support + 2, mask=live, other=0)
    top = tl.load(logits + top_id * stride, mask=live, other=0.0).to(tl.float32)
    bound = tl.load(logits + tl.maximum(last, 0) * stride, mask=live, other=0.0).to(tl.float32)
    least = tl.where(last < 0, NOTHING_CUT, token_place(logit_key(bound, SHIFT), last))
    return top, least, total


@triton.jit
def _weight_of(logits, stride, ids, live, top, scale, least, total, SHIFT: tl.constexpr):
    """Weights of one token of each row; `logits`: addresses of the rows."""
    live = live & (total > 0)
    value = tl.load(logits + ids * stride, mask=live, other=float("-inf")).to(tl.float32)
    return tl.where(live, kept_weight(value, ids, top, scale, least, SHIFT), 0)


@triton.jit
def _first_from(dropped, low, none):
    return tl.min(tl.where(dropped >= low, dropped, none), 0)


@triton.jit
def _is_kept(logits, ids, least, SHIFT: tl.constexpr):
    """Whether the place of tokens is at least `least`, by comparisons of 32 bits."""
    key, least_key = logit_key(logits, SHIFT), (least >> 32).to(tl.int32)
    return (key > least_key) | ((key == least_key) & (ids <= place_id(least).to(tl.int32)))


@triton.jit
def _drafted_logits(ids, live, row, target_to_draft, map_stride):
    """The draft's logits of the target's `ids`, its own ids, and which of them it has; without a draft the target's, unused."""
    draft, draft_stride = row[6], row[7]
    if draft is None:
        return ids, ids, live
    else:
        draft_ids = ids
        if target_to_draft is not None:
            draft_ids = tl.load(target_to_draft + ids.to(tl.int64) * map_stride, mask=live, other=-1).to(tl.int32)
        there = live & (draft_ids >= 0)
        at = draft + draft_ids.to(tl.int64) * draft_stride
        return tl.load(at, mask=there, other=float("-inf")).to(tl.float32), draft_ids, there


@triton.jit
def _weights(
    value, ids, live, other, scale, row, subtract, SHIFT: tl.constexpr, DRAFT_SHIFT: tl.constexpr, ROWS: tl.constexpr,
    LANE: tl.constexpr,
):  # fmt: skip
    """What tokens weigh in the draw of the last one: int64 `[ROWS, LANE]`.

    Weights of the target's row; where `subtract`, 2**60 times what is positive of `given` times them less `taken` times the
    draft's. `row`: as `_chain_row` gives it; `other`: `_drafted_logits`.
    """
    _, _, _, top, least, given, draft, _, draft_top, draft_least, taken = row
    kept = live & _is_kept(value, ids, least, SHIFT)
    weights = tl.where(kept, fixed_weight(value, top, scale), 0)
    if draft is not None:  # noqa: SIM102  decided while compiling, unlike what follows
        # Where the target keeps nothing nothing is left: in most tiles, if top-p or top-k cut.
        if subtract & (tl.max(tl.reshape(kept.to(tl.int32), [ROWS * LANE]), 0) > 0):
            other_value, other_ids, there = other
            there = there & _is_kept(other_value, other_ids, draft_least, DRAFT_SHIFT)
            drafted = tl.where(there, fixed_weight(other_value, draft_top, scale), 0)
            # `abs` changes nothing, but keeps products from fusing with the difference: equal ones leave nothing.
            gap = tl.abs(weights.to(tl.float64) * given) - tl.abs(drafted.to(tl.float64) * taken)
            weights = (tl.maximum(gap, 0.0) * 1152921504606846976.0).to(tl.int64)
    return weights


@triton.jit
def _part_weights(
    chunk, steps, scale, row, target_to_draft, map_stride, subtract, dropped,
    SHIFT: tl.constexpr, DRAFT_SHIFT: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """What each part of a chunk weighs (`phases.step_ids`), in the order of ids, without tokens in `dropped` (or None)."""
    size, target, stride, top, least = row[0], row[1], row[2], row[3], row[4]
    start = chunk * steps * (ROWS * LANE)
    weights = tl.zeros([ROWS], tl.int64)  # a thread's lane is summed at once: fewer registers
    value, _, _ = load_step(target, stride, start, 0, steps, size, ROWS, LANE)
    for step in range(0, steps):
        ids = step_ids(start, step, steps, ROWS, LANE)
        live = ids < size
        other = _drafted_logits(ids, live & subtract, row, target_to_draft, map_stride)
        # The next step's are on their way while these are weighed.
        coming, _, _ = load_step(target, stride, start, step + 1, steps, tl.where(step + 1 < steps, size, 0), ROWS, LANE)
        weights += tl.sum(_weights(value, ids, live, other, scale, row, subtract, SHIFT, DRAFT_SHIFT, ROWS, LANE), 1)
        value = coming
    parts = part_totals(weights, ROWS)
    if dropped is not None:
        COUNT: tl.constexpr = dropped.shape[0]
        node = tl.arange(0, COUNT)
        again = (dropped[None, :] == dropped[:, None]) & (node[None, :] < node[:, None])
        once = (dropped >= 0) & (dropped < size) & (tl.sum(again.to(tl.int32), 1) == 0)
        value = tl.load(target + dropped.to(tl.int64) * stride, mask=once, other=float("-inf")).to(tl.float32)
        lost = tl.where(once & _is_kept(value, dropped, least, SHIFT), fixed_weight(value, top, scale), 0)
        PART: tl.constexpr = min(WARP, ROWS) * LANE
        part = tl.arange(0, ROWS * LANE // PART)
        first = start + part * (steps * PART)
        inside = (dropped[None, :] >= first[:, None]) & (dropped[None, :] < (first + steps * PART)[:, None])
        parts -= tl.sum(tl.where(inside, lost[None, :], 0), 1)
    return parts


@triton.jit
def _last_token(
    uniform, sums_at, steps, scale, row, target_to_draft, map_stride, subtract, dropped, CHUNKS: tl.constexpr,
    SHIFT: tl.constexpr, DRAFT_SHIFT: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """The first token whose running weight exceeds `floor(uniform * total)`, -1 if all weigh nothing.

    `sums_at`: what the parts of all chunks weigh.
    """
    PART: tl.constexpr = min(WARP, ROWS) * LANE
    PARTS: tl.constexpr = ROWS * LANE // PART
    index = tl.arange(0, next_power_of_2(CHUNKS) * PARTS)
    sums = tl.load(sums_at + index, mask=index < CHUNKS * PARTS, other=0, cache_modifier=".cg")
    # Nothing may be left although a draft was rejected; the target itself is then the distribution.
    if (tl.sum(sums, 0) == 0) & subtract:
        subtract = subtract & False
        for chunk in range(0, CHUNKS):
            parts = _part_weights(
                chunk, steps, scale, row, target_to_draft, map_stride, subtract, None, SHIFT, DRAFT_SHIFT, ROWS, LANE
            )  # fmt: skip
            tl.store(sums_at + chunk * PARTS + tl.arange(0, PARTS), parts)
        tl.debug_barrier()
        sums = tl.load(sums_at + index, mask=index < CHUNKS * PARTS, other=0, cache_modifier=".cg")
        if dropped is not None:
            dropped = tl.full(dropped.shape, -1, dropped.dtype)
    level = draw_level(uniform, tl.sum(sums, 0))
    chosen = tl.minimum(tl.sum((tl.cumsum(sums, 0) <= level).to(tl.int32), 0), CHUNKS * PARTS - 1)
    running = tl.sum(tl.where(index < chosen, sums, 0), 0)
    token = tl.full([], -1, tl.int32)
    at = chosen * (steps * PART)
    end = tl.minimum(at + steps * PART, row[0])
    while (running <= level) & (at < end):
        value, ids, live = load_span(row[1], row[2], at, end, ROWS, LANE)
        other = _drafted_logits(ids, live & subtract, row, target_to_draft, map_stride)
        weights = _weights(value, ids, live, other, scale, row, subtract, SHIFT, DRAFT_SHIFT, ROWS, LANE)
        stop = at + ROWS * LANE
        if dropped is not None:
            following = _first_from(dropped, at, stop)
            while following < stop:
                weights = tl.where(ids == following, 0, weights)
                following = _first_from(dropped, following + 1, stop)
        weights = tl.reshape(weights, [ROWS * LANE])
        weight = tl.sum(weights, 0)
        if level < running + weight:
            token = at + tl.sum((running + tl.cumsum(weights, 0) <= level).to(tl.int32), 0)
        running += weight
        at = stop
    return token.to(tl.int64)


@triton.jit
def _chain_row(rows, row, NODE_BLOCK: tl.constexpr):
    """Of the vectors of all nodes what belongs to one: how many tokens the target's row has, its address, stride, largest
    logit, least likely place and the factor of its weights; then of the draft's row all but the first."""
    (
        target, node_stride, stride, sizes, top, least, given,
        draft, draft_node_stride, draft_stride, draft_top, draft_least, taken,
    ) = rows  # fmt: skip
    wide = tl.zeros([], tl.int64) + row
    return (
        _pick(sizes, row, NODE_BLOCK), target + wide * node_stride, stride, _pick(top, row, NODE_BLOCK),
        _pick(least, row, NODE_BLOCK), _pick(given, row, NODE_BLOCK),
        draft + wide * draft_node_stride, draft_stride, _pick(draft_top, row, NODE_BLOCK),
        _pick(draft_least, row, NODE_BLOCK), _pick(taken, row, NODE_BLOCK),
    )  # fmt: skip


@triton.jit
def _is_last(counter, CHUNKS: tl.constexpr):
    """Whether all other programs of the request have told their sums."""
    if CHUNKS == 1:
        tl.debug_barrier()
        return tl.full([], 1, tl.int1)
    else:
        return (arrive(counter, CHUNKS) & 0xFFFF) == CHUNKS - 1


@triton.jit
def accept_logits_chain_kernel(
    candidates, target_logits, target_support, uniforms, final_uniforms, temperatures, draft_logits, draft_support,
    target_to_draft, tokens, path, lens, partial, counters,
    candidate_row_stride, candidate_stride, target_row_stride, target_node_stride, target_stride, support_row_stride,
    uniform_row_stride, uniform_stride, final_stride, temperature_stride, draft_row_stride, draft_node_stride, draft_stride,
    draft_support_row_stride, map_stride, vocab, tiles,
    NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
    LANE: tl.constexpr, SHIFT: tl.constexpr, DRAFT_SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(request, chunk)`: rejection sampling, or with `BLOCKS` block verification. Rows of the supports are dense.

    `partial`: a request's sums, of each part of each chunk; with `BLOCKS` at each node.
    """
    await_predecessors(PDL)
    request = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    node = tl.arange(0, NODE_BLOCK)
    inner = node < NODES - 1
    wide = node.to(tl.int64)
    target_logits += request * target_row_stride
    draft_logits += request * draft_row_stride
    drafted_at = candidates + request * candidate_row_stride + (wide + 1) * candidate_stride
    drafted = tl.load(drafted_at, mask=inner, other=-1).to(tl.int64)
    given_draft = inner & (drafted >= 0)  # -1: no draft was given there
    uniform = tl.load(uniforms + request * uniform_row_stride + wide * uniform_stride, mask=inner, other=0.0).to(tl.float64)
    final_uniform = tl.load(final_uniforms + request * final_stride)
    scale = weight_scale(tl.load(temperatures + request * temperature_stride))
    draft_ids = drafted
    if target_to_draft is not None:
        draft_ids = tl.load(target_to_draft + drafted * map_stride, mask=given_draft, other=-1)

    target_at = target_logits + wide * target_node_stride
    support_at = target_support + request * support_row_stride + wide * 3
    top, least, total = _rows(target_at, target_stride, support_at, node < NODES, SHIFT)
    draft_at = draft_logits + wide * draft_node_stride
    support_at = draft_support + request * draft_support_row_stride + wide * 3
    draft_top, draft_least, draft_total = _rows(draft_at, draft_stride, support_at, inner, DRAFT_SHIFT)
    target_mass = tl.maximum(total, 1).to(tl.float64)
    draft_mass = tl.maximum(draft_total, 1).to(tl.float64)
    p = _weight_of(target_at, target_stride, drafted, given_draft, top, scale, least, total, SHIFT).to(tl.float64) / target_mass
    q = _weight_of(
        draft_at, draft_stride, draft_ids, given_draft & (draft_ids >= 0), draft_top, scale, draft_least, draft_total,
        DRAFT_SHIFT,
    ).to(tl.float64) / draft_mass  # fmt: skip
    offered = given_draft & (draft_total > 0)
    sizes = tl.where(total > 0, vocab, 0)  # what is no distribution has no tokens

    PARTS: tl.constexpr = triton.cdiv(ROWS, WARP)
    SUMS: tl.constexpr = CHUNKS * PARTS
    sums_at = partial + request * (SUMS * (NODES if BLOCKS else 1))
    own_at = sums_at + chunk * PARTS + tl.arange(0, PARTS)
    factors = tl.full([NODE_BLOCK], 1.0, tl.float64)  # of the target's probabilities, after so many accepted drafts
    if BLOCKS:
        # Until the first that was not offered, or that comes after no distribution.
        length = tl.min(tl.where(offered & (total > 0), NODES - 1, node), 0)
        factor = tl.full([], 1.0, tl.float64)
        for step in range(0, NODES - 1):
            p_step = _pick(p, step, NODE_BLOCK)
            q_step = _pick(q, step, NODE_BLOCK)
            factor = tl.where(factor * p_step > 0, tl.minimum(factor * p_step / q_step, 1.0), 0.0)
            factors = tl.where(node == step + 1, factor, factors)
    rows = (
        target_logits, target_node_stride, target_stride, sizes, top, least, factors / target_mass,
        draft_logits, draft_node_stride, draft_stride, draft_top, draft_least, 1.0 / draft_mass,
    )  # fmt: skip
    if BLOCKS:
        # Whether all drafts are accepted depends on no sum: then only the row after them is read, otherwise not that one. A
        # residual with a factor of 0 is nothing.
        whole = _pick(uniform, length - 1, NODE_BLOCK) < _pick(factors, length, NODE_BLOCK)
        whole = whole | (length == 0)
        for row in range(0, length + 1):
            weight = tl.zeros([PARTS], tl.int64)
            if tl.where(row == length, whole, (whole == 0) & (_pick(factors, row, NODE_BLOCK) > 0)):
                weight = _part_weights(
                    chunk, tiles, scale, _chain_row(rows, row, NODE_BLOCK), target_to_draft, map_stride, row < length, None,
                    SHIFT, DRAFT_SHIFT, ROWS, LANE,
                )  # fmt: skip
            tl.store(own_at + row * SUMS, weight)
        last = length
        subtract = length < 0
    else:
        accepted = offered & (p > 0) & (uniform * q < p)
        last = tl.min(tl.where(accepted, NODES, node), 0)  # the first whose child is not accepted; the last node has none
        subtract = _pick(offered.to(tl.int32), last, NODE_BLOCK) > 0
        weight = _part_weights(
            chunk, tiles, scale, _chain_row(rows, last, NODE_BLOCK), target_to_draft, map_stride, subtract, None,
            SHIFT, DRAFT_SHIFT, ROWS, LANE,
        )  # fmt: skip
        tl.store(own_at, weight)

    if _is_last(counters + request, CHUNKS):
        if BLOCKS:
            other = tl.arange(0, next_power_of_2(CHUNKS) * PARTS)
            last = length * 0
            for count in range(1, length + 1):
                chance = _pick(factors, count, NODE_BLOCK)
                if count < length:
                    sums = tl.load(sums_at + count * SUMS + other, mask=other < SUMS, other=0, cache_modifier=".cg")
                    left = tl.sum(sums, 0).to(tl.float64)
                    short = left + (1.0 - chance) * 1152921504606846976.0
                    # Neither a residual nor a deficit: not accepted here, but a later draft is for sure.
                    chance = tl.where(short > 0, left / tl.where(short > 0, short, 1.0), 0.0)
                last = tl.where(_pick(uniform, count - 1, NODE_BLOCK) < chance, count, last)
            sums_at += last * SUMS
            subtract = last < length
        final = _last_token(
            final_uniform, sums_at, tiles, scale, _chain_row(rows, last, NODE_BLOCK), target_to_draft, map_stride, subtract,
            None, CHUNKS, SHIFT, DRAFT_SHIFT, ROWS, LANE,
        )  # fmt: skip
        at = request * NODES + node
        token = tl.where(node < last, drafted, tl.where(node == last, final, -1))
        tl.store(tokens + at, token, mask=node < NODES)
        tl.store(path + at, tl.where(node <= last, wide, -1), mask=node < NODES)
        tl.store(lens + request, last + 1)


@triton.jit(do_not_specialize=["path_len", "final_stride"])  # a batch of one has any stride
def accept_logits_tree_kernel(
    candidates, target_logits, target_support, uniforms, final_uniforms, temperatures, parents, tokens, path, lens, partial,
    counters,
    candidate_row_stride, candidate_stride, target_row_stride, target_node_stride, target_stride, support_row_stride,
    uniform_row_stride, uniform_stride, final_stride, temperature_stride, parent_row_stride, parent_stride, vocab, tiles,
    path_len, threshold_single, threshold_acc,
    NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr,
    SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(request, chunk)`: target-only sampling on a tree, or on a chain where `parents` is None."""
    await_predecessors(PDL)
    request = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    node = tl.arange(0, NODE_BLOCK)
    drafted = (node > 0) & (node < NODES)
    target_logits += request * target_row_stride
    target_support += request * support_row_stride
    uniforms += request * uniform_row_stride
    tokens += request * path_len
    path += request * path_len
    candidate_at = candidates + request * candidate_row_stride + node.to(tl.int64) * candidate_stride
    candidate = tl.load(candidate_at, mask=drafted, other=-1).to(tl.int64)
    final_uniform = tl.load(final_uniforms + request * final_stride)
    scale = weight_scale(tl.load(temperatures + request * temperature_stride))
    drafted = drafted & (candidate >= 0)  # -1: no draft was given there
    parent = node - 1
    if parents is not None:
        parent_at = parents + request * parent_row_stride + node.to(tl.int64) * parent_stride
        parent = tl.load(parent_at, mask=drafted, other=-1).to(tl.int32)
    drafted = drafted & (parent >= 0)

    row_at = target_logits + parent.to(tl.int64) * target_node_stride
    top, least, total = _rows(row_at, target_stride, target_support + parent.to(tl.int64) * 3, drafted, SHIFT)
    weight = _weight_of(row_at, target_stride, candidate, drafted, top, scale, least, total, SHIFT).to(tl.float64)
    mass = tl.maximum(total, 1).to(tl.float64)

    most_single = tl.zeros([], tl.float64) + threshold_single
    most_acc = tl.zeros([], tl.float64) + threshold_acc
    current = tl.zeros([], tl.int32)
    accepted = tl.full([], 1, tl.int32)
    going = current == 0
    writes = chunk == 0
    if writes:
        tl.store(path, tl.zeros([], tl.int64))
        tl.store(tokens + path_len - 1, tl.full([], -1, tl.int64))
    for step in range(1, path_len):
        child = drafted & (parent == current)
        own = tl.where(child, weight, 0.0)
        coin = tl.load(uniforms + current.to(tl.int64) * uniform_stride).to(tl.float64)
        # Sums of 64 weights are exact in float64.
        running = tl.cumsum(own, 0) / mass / most_acc
        take = child & (own > 0) & ((coin < running) | (own / mass >= most_single))
        taken = tl.min(tl.where(take, node, NODE_BLOCK), 0)
        going = going & (taken < NODE_BLOCK)
        current = tl.where(going, taken, current)
        accepted += going.to(tl.int32)
        if writes:
            token = _pick(candidate, current, NODE_BLOCK)
            tl.store(tokens + step - 1, tl.where(going, token, -1))
            tl.store(path + step, tl.where(going, current, -1).to(tl.int64))

    # A walk that stopped because the path is full has rejected nothing: its node's children are no candidates.
    dropped = tl.where(drafted & (parent == current) & (going == 0), candidate, -1).to(tl.int32)
    some = tl.max(dropped, 0) >= 0
    row = target_logits + current.to(tl.int64) * target_node_stride
    only = tl.zeros([1], tl.int32)
    at = target_support + current.to(tl.int64) * 3 + only
    top, least, total = _rows(row + only, target_stride, at, only == 0, SHIFT)
    top, least, total = tl.sum(top, 0), tl.sum(least, 0), tl.sum(total, 0)
    size = tl.where(total > 0, vocab, 0)  # what is no distribution has no tokens
    rows = (size, row, target_stride, top, least, 1.0, None, 0, 0.0, 0, 1.0)
    PARTS: tl.constexpr = triton.cdiv(ROWS, WARP)
    sums_at = partial + request * (CHUNKS * PARTS)
    weight = _part_weights(chunk, tiles, scale, rows, None, 0, some, dropped, SHIFT, 0, ROWS, LANE)
    tl.store(sums_at + chunk * PARTS + tl.arange(0, PARTS), weight)
    if _is_last(counters + request, CHUNKS):
        final = _last_token(
            final_uniform, sums_at, tiles, scale, rows, None, 0, some, dropped, CHUNKS, SHIFT, 0, ROWS, LANE
        )  # fmt: skip
        tl.store(tokens + accepted - 1, final)
        tl.store(lens + request, accepted)


def lane_of(block: bool, mapped: bool) -> int:
    """Neighbouring tokens of a thread: half as many where registers would not do for two programs on a multiprocessor."""
    return LANE // 2 if block and mapped else LANE


def shares(bs: int, vocab: int, programs: int, lane: int = LANE) -> dict[str, Any]:
    """How the requests' rows are divided among about `programs` programs: chunks of whole tiles."""
    tile = tile_size(vocab, 256, lane)
    tiles = triton.cdiv(vocab, tile)
    each = triton.cdiv(tiles, min(max(programs // bs, 1), MOST_CHUNKS))
    constants = {"tiles": each, "CHUNKS": triton.cdiv(tiles, each), "ROWS": tile // lane, "LANE": lane}
    return constants | {"num_warps": max(tile // lane // 32, 1), "maxnreg": 128}  # two programs on a multiprocessor


def accept_sampled_logits(
    candidates, target_logits, target_support, uniforms, final_uniforms, temperature, parents, draft_logits, draft_support,
    target_to_draft, path_len: int, threshold_single: float, threshold_acc: float, block: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    bs, nodes = candidates.shape
    vocab = target_logits.shape[2]
    tokens = candidates.new_empty(bs, path_len, dtype=torch.int64)
    outputs = tokens, torch.empty_like(tokens), candidates.new_empty(bs, dtype=torch.int32)
    if not bs:
        return outputs
    lane = lane_of(block, target_to_draft is not None)
    share = shares(bs, vocab, 2 * num_sms(candidates.device), lane)
    target_support = target_support.contiguous()
    strides = (
        *candidates.stride(), *target_logits.stride(), target_support.stride(0), *uniforms.stride(), final_uniforms.stride(0),
        temperature.stride(0),
    )  # fmt: skip
    sizes = {"NODES": nodes, "NODE_BLOCK": triton.next_power_of_2(nodes), "SHIFT": KEY_SHIFT[target_logits.dtype], **share}
    inputs = (candidates, target_logits, target_support, uniforms, final_uniforms, temperature)
    with device_guard(candidates):
        sums = share["CHUNKS"] * triton.cdiv(share["ROWS"], WARP.value)
        partial = torch.empty(bs * sums * (nodes if block else 1), dtype=torch.int64, device=candidates.device)
        counters = arrival_counters(candidates.device, bs, "accept_logits")
        if draft_logits is None or nodes == 1:
            parent_strides = (0, 0) if parents is None else parents.stride()
            launch(
                accept_logits_tree_kernel, (bs * share["CHUNKS"],),
                *inputs, parents, *outputs, partial, counters, *strides, *parent_strides, vocab, sizes.pop("tiles"), path_len,
                threshold_single, threshold_acc, **sizes,
            )  # fmt: skip
        else:
            draft_support = draft_support.contiguous()
            map_stride = 0 if target_to_draft is None else target_to_draft.stride(0)
            launch(
                accept_logits_chain_kernel, (bs * share["CHUNKS"],),
                *inputs, draft_logits, draft_support, target_to_draft, *outputs, partial, counters, *strides,
                *draft_logits.stride(), draft_support.stride(0), map_stride, vocab, sizes.pop("tiles"),
                BLOCKS=block, DRAFT_SHIFT=KEY_SHIFT[draft_logits.dtype], **sizes,
            )  # fmt: skip
    return outputs


def ahead() -> Iterator[Variant]:
    vocab = 131_072

    def with_constants(lane: int, given: dict[str, Any]) -> dict[str, Any]:
        constants = shares(8, vocab, 264, lane) | {"SHIFT": 16}
        del constants["tiles"]
        options = {"maxnreg": constants.pop("maxnreg")}
        return {"num_warps": constants.pop("num_warps"), "options": options, "constexprs": given | constants}

    inputs = {"candidates": "*i64:16", "target_logits": "*bf16:16", "target_support": "*i64:16", "uniforms": "*fp32:16"}
    inputs |= {"final_uniforms": "*fp32:16", "temperatures": "*fp32:16", "tokens": "*i64:16", "path": "*i64:16"}
    inputs |= {"lens": "*i32:16", "partial": "*i64:16", "counters": "*i32:16", "candidate_row_stride": "i32"}
    inputs |= {"target_row_stride": "i32:16", "target_node_stride": "i32:16", "support_row_stride": "i32"}
    inputs |= {"uniform_row_stride": "i32", "vocab": "i32:16", "tiles": "i32"}
    ones = dict.fromkeys(["candidate_stride", "target_stride", "uniform_stride", "final_stride", "temperature_stride"], 1)
    for nodes, tree in ((64, True), (4, False)):
        yield Variant(
            f"accept_sampled_logits, {'tree' if tree else 'chain'} of {nodes}",
            accept_logits_tree_kernel,
            inputs
            | {"path_len": "i32", "threshold_single": "fp32", "threshold_acc": "fp32", "parent_row_stride": "i32"}
            | ({"parents": "*i64:16"} if tree else {"parent_stride": "i32"}),
            **with_constants(
                LANE, ones | ({"parent_stride": 1} if tree else {"parents": None}) | {"NODES": nodes, "NODE_BLOCK": nodes}
            ),
        )
    for mapped in (True, False):
        for blocks in (True, False):
            yield Variant(
                f"accept_sampled_logits, {'blocks' if blocks else 'drafts'} of 3{', reduced vocabulary' if mapped else ''}",
                accept_logits_chain_kernel,
                inputs
                | {"draft_logits": "*bf16:16", "draft_support": "*i64:16", "draft_row_stride": "i32:16"}
                | {"draft_node_stride": "i32:16", "draft_support_row_stride": "i32"}
                | ({"target_to_draft": "*i64:16"} if mapped else {"map_stride": "i32"}),
                **with_constants(
                    lane_of(blocks, mapped),
                    ones
                    | {"draft_stride": 1, "NODES": 4, "NODE_BLOCK": 4, "BLOCKS": blocks, "DRAFT_SHIFT": 16}
                    | ({"map_stride": 1} if mapped else {"target_to_draft": None}),
                ),
            )
