"""Paged split-KV attention for draft decode, verify and draft extend: GQA and absorbed MLA, chains and trees.

One kernel, one launch: tiles of `tile.py`, divided as `schedule.py` says, and the combination of what several programs have of
a tile. Splitting the keys is FlashDecoding's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.attention.mask import query_rows, seen_of_request
from spec_ops.backends.triton.attention.schedule import kv_blocks, pick, range_of, range_start, whole_ranges
from spec_ops.backends.triton.attention.tile import attend, denominator, first_pages
from spec_ops.backends.triton.attention.tile_boxes import attend_boxes, box_pages
from spec_ops.backends.triton.runtime.arrival import arrive, await_all
from spec_ops.backends.triton.runtime.launch import await_predecessors


@triton.jit
def _merged(
    partial_acc, partial_ml, slots, start, splits, row, column, HM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and output `[rows, columns]` over the partial results of `SPLITS` splits from `start` on.

    Triton gives columns to the lanes of a warp and rows to warps, so that sums over splits stay in a thread; with splits as the
    first dimension, warps would share them. Loads have no masks: beyond the last split the last one is read again, with weight
    zero, and rows past the end of the tile hold what was there before, which is not stored.
    """
    i = tl.minimum(start + tl.arange(0, SPLITS), splits - 1)
    slot = slots + (2 * i + (i < splits - 1)) * HM
    # .cg: partials come from other SMs, so L1 must not answer
    ml = partial_ml + slot[None, :] * (2 * BLOCK_M) + row[:, None]
    m = tl.load(ml, cache_modifier=".cg")
    l = tl.load(ml + BLOCK_M, cache_modifier=".cg")
    a_row = partial_acc + (slot[None, :] * BLOCK_M + row[:, None]) * BLOCK_DV
    acc = tl.load(a_row[:, :, None] + column[None, None, :], cache_modifier=".cg")
    there = (start + tl.arange(0, SPLITS) < splits)[None, :]
    m = tl.where(there, m, float("-inf"))
    top = tl.max(m, 1)
    grow = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top)[:, None])
    # `where` and `abs` change no value: they keep products from fusing with the sum's first step between threads, after which
    # copies of a result differ in the last bit and race into shared memory (triton-lang/triton#7264).
    weighted = tl.where(there[:, :, None], acc * grow[:, :, None], 0.0)
    return top, tl.sum(tl.abs(l * grow), 1), tl.sum(weighted, 1)


@triton.jit
def _combine(
    partial_acc, partial_ml, out, sinks, unit, units, splits, slots, row0, rows, kv_head, v_scale,
    HM: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr, PIECE: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Merge a tile's partial results: of its pieces of `PIECE` numbers every `units`-th from `unit` on. There are at most
    `SPLITS` splits or, with `MORE`, any number.

    Split `i` lies in slot `slots + (2 * i + 1) * HM`, the last one in `slots + 2 * i * HM`.
    """
    ROWS: tl.constexpr = max(PIECE // BLOCK_DV, 1)
    COLUMNS: tl.constexpr = min(PIECE, BLOCK_DV)
    PARTS: tl.constexpr = BLOCK_DV // COLUMNS
    for piece in tl.range(unit, tl.cdiv(rows, ROWS) * PARTS, units):
        row = (piece // PARTS) * ROWS + tl.arange(0, ROWS)
        column = (piece % PARTS) * COLUMNS + tl.arange(0, COLUMNS)
        m, l, acc = _merged(
            partial_acc, partial_ml, slots, 0, splits, row, column, HM, BLOCK_M, BLOCK_DV, SPLITS
        )  # fmt: skip
        if MORE:
            for start in tl.range(SPLITS, splits, SPLITS):
                m_i, l_i, acc_i = _merged(
                    partial_acc, partial_ml, slots, start, splits, row, column, HM, BLOCK_M, BLOCK_DV, SPLITS
                )  # fmt: skip
                m_new = tl.maximum(m, m_i)
                shift = tl.where(m_new == float("-inf"), 0.0, m_new)
                shrink = tl.exp2(m - shift)
                grow = tl.exp2(m_i - shift)
                acc = acc * shrink[:, None] + acc_i * grow[:, None]
                l = l * shrink + l_i * grow
                m = m_new
        live = row < rows
        head = kv_head * GROUP + (row0 + row) % GROUP
        result = acc * (denominator(m, l, sinks, head, live, HAS_SINKS) * v_scale)[:, None]
        o = out + ((row0 + row) // GROUP * (KV_HEADS * GROUP) + (row0 + row) % GROUP) * DV
        mask = live[:, None] & (column < DV)[None, :]
        tl.store(o[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["bs", "ranges", "table_stride"])  # other batch sizes compile nothing new within a power of two
def split_kv_attention_kernel(
    q, k_cache, k_rest, v_cache, out, block_tables, seq_lens, tree_mask, sinks,
    partial_acc, partial_ml, counters,
    qk_scale, v_scale, softcap,
    bs, ranges,
    q_stride_b, q_stride_q, q_stride_h,
    k_stride_page, k_stride_token, k_stride_h,
    v_stride_page, v_stride_token, v_stride_h,
    table_stride, mask_stride,
    Q_LEN: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SHARED_KV: tl.constexpr, TMA: tl.constexpr,
    BS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CLEAR: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, BOXES: tl.constexpr,
    COOPERATIVE: tl.constexpr, WARPS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`q [bs, Q_LEN, KV_HEADS * GROUP, D]`; a row of a tile is one (query, head of the group).

    `TMA`: the caches are tensor descriptors of `[tokens, heads * dim]` (`k_rest` with a block of `D1` columns) and `PAGE %
    BLOCK_N == 0`; otherwise pointers. `BOXES`: descriptors of a page's rows, and `BLOCK_N % PAGE == 0` (`tile_boxes.py`).
    `COOPERATIVE`: all programs are resident at once, so that each can wait for the others of its tile and combine a share of
    it; otherwise the last to arrive combines alone.

    Keys are read in two parts, `D0` (a power of two) and `D1` (the rest, 0 if none). `SHARED_KV`: values are the first
    `DV == D0` entries of the keys (MLA), and are loaded once. `softcap` comes times log2(e), `qk_scale` too unless there is a
    soft cap. `CLEAR`: see `tuning.Config`. `TILE`: numbers of a tile's rows in use, as a power of two. `WIDE`: see `times`.
    """
    await_predecessors(PDL)
    HM: tl.constexpr = KV_HEADS * ROW_BLOCKS
    ROWS: tl.constexpr = Q_LEN * GROUP
    SPAN: tl.constexpr = MASK_LEN if MASK_LEN > 0 else Q_LEN
    HOLES: tl.constexpr = MASK_LEN > Q_LEN
    pid = tl.program_id(0)
    index = pid // HM
    hm = pid % HM
    kv_head = hm // ROW_BLOCKS
    row = (hm % ROW_BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    in_use = row < ROWS
    d0 = tl.arange(0, D0)
    dv = tl.arange(0, BLOCK_DV)

    request_ids = tl.arange(0, BS)
    lens = tl.load(seq_lens + request_ids, mask=request_ids < bs, other=0)
    _, counts = kv_blocks(lens, SPAN, WINDOW, BLOCK_N)
    total = tl.sum(counts, 0)

    # Requests without keys belong to no range.
    if tl.sum(((counts == 0) & (request_ids < bs)).to(tl.int32), 0) > 0:
        for b in range(index, bs, ranges):
            if tl.load(seq_lens + b) <= 0:
                o = out + ((b * Q_LEN + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * DV
                zero = tl.zeros([BLOCK_M, BLOCK_DV], out.dtype.element_ty)
                tl.store(o[:, None] + dv[None, :], zero, mask=in_use[:, None] & (dv < DV)[None, :])

    # Fewer ranges than programs where a range would be too short to pay for its partial result.
    ranges = tl.maximum(tl.minimum(ranges, tl.cdiv(total, MIN_BLOCKS)), 1)
    length, needed = whole_ranges(counts, total, ranges)
    if length > 0:  # round each request up to whole ranges: the blocks too many are empty
        counts = needed * length
        ranges = tl.sum(needed, 0)
        total = ranges * length
    ends = tl.cumsum(counts, 0)
    position = range_start(index, total, ranges, ends, length)
    stop = range_start(index + 1, total, ranges, ends, length)
    if index >= ranges:
        stop = position
    b = tl.sum(((ends <= position) & (request_ids < bs)).to(tl.int32), 0)
    # Of the tile this range begins in: what `arrive` returned, if it is unfinished, and the first range with a part of it; of
    # the one it ends in: what `arrive` returned and the last range.
    first_request, before_first, before_last, holder_first, until_last = b + 0, 0, 0, index, index

    while position < stop:
        seq_len = tl.load(seq_lens + b)
        skipped, blocks = kv_blocks(seq_len, SPAN, WINDOW, BLOCK_N)
        end = pick(ends, b, BS)
        begin = end - pick(counts, b, BS)
        last = tl.minimum(end, stop)
        first_key = (skipped + position - begin) * BLOCK_N
        last_key = (skipped + tl.minimum(last - begin, blocks)) * BLOCK_N

        table = block_tables + b.to(tl.int64) * table_stride
        if BOXES:
            pages = box_pages(table, first_key, last_key, seq_len, PAGE, BLOCK_N)
        else:
            pages = first_pages(table, first_key, last_key, seq_len, PAGE, BLOCK_N)
        # As `times`, but in place: with calls of it Triton 3.6 orders the products otherwise, and GQA 32/8 spills 8 bytes.
        wide_query, wide_head = (query.to(tl.int64), head.to(tl.int64)) if WIDE else (query, head)
        q_row = q + b.to(tl.int64) * q_stride_b + wide_query * q_stride_q + wide_head * q_stride_h
        q0 = tl.load(q_row[:, None] + d0[None, :], mask=in_use[:, None], other=0.0)
        q1 = q0
        if D1 > 0:
            d1 = D0 + tl.arange(0, D1)
            q1 = tl.load(q_row[:, None] + d1[None, :], mask=in_use[:, None] & (d1 < D)[None, :], other=0.0)
        words = query.to(tl.int64)
        masks = tree_mask
        if MASK_LEN > 0:
            masks = tree_mask + b * mask_stride
            words = tl.load(masks + query, mask=in_use, other=0)
        # Here, while the loads above are on their way.
        holder = index
        until = index
        if begin < position:
            holder = range_of(begin, total, ranges, ends, length)
        if end > stop:
            until = range_of(end - 1, total, ranges, ends, length)
        splits = until - holder + 1
        all_seen = seq_len - (MASK_LEN if MASK_LEN > 0 else Q_LEN - 1)  # keys before this are seen by every query

        first_seen, slots = seen_of_request(seq_len, masks, Q_LEN, MASK_LEN, WINDOW, HOLES)
        row_position, row_words = query_rows(seq_len, query, Q_LEN, words, MASK_LEN, WINDOW)

        if BOXES:
            m, l, acc = attend_boxes(
                q0, k_cache, v_cache, table, pages, kv_head, first_key, last_key, seq_len, all_seen, row_position,
                row_words, first_seen, slots, qk_scale, softcap,
                D, DV, PAGE, MASK_LEN, WINDOW, HAS_SOFTCAP, BLOCK_M, BLOCK_N, STAGES, HOLES,
            )  # fmt: skip
        else:
            m, l, acc = attend(
                q0, q1, k_cache, k_rest, v_cache, table, pages, kv_head, first_key, last_key, seq_len, all_seen, row_position,
                row_words, first_seen, slots, qk_scale, softcap,
                k_stride_page, k_stride_token, k_stride_h, v_stride_page, v_stride_token, v_stride_h,
                D, D0, D1, DV, BLOCK_DV, PAGE, MASK_LEN, WINDOW, HAS_SOFTCAP, SHARED_KV, TMA, BLOCK_M, BLOCK_N, STAGES,
                CLEAR, HOLES, WIDE, "",
            )  # fmt: skip

        o = out + ((b * Q_LEN + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * DV
        store_mask = in_use[:, None] & (dv < DV)[None, :]
        if (position == begin) & (last == end):
            result = acc * (denominator(m, l, sinks, head, in_use, HAS_SINKS) * v_scale)[:, None]
            tl.store(o[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=store_mask)
        else:
            # A range has at most two unfinished tiles: one that ends in it (slot 0) and one that goes on after it (slot 1).
            slot = ((index * 2 + (last < end).to(tl.int32)) * HM + hm).to(tl.int64)
            local = tl.arange(0, BLOCK_M)
            tl.store(partial_acc + (slot * BLOCK_M + local)[:, None] * BLOCK_DV + dv[None, :], acc, mask=in_use[:, None])
            tl.store(partial_ml + slot * (2 * BLOCK_M) + local, m)
            tl.store(partial_ml + slot * (2 * BLOCK_M) + BLOCK_M + local, l)
            # Of the tiles that begin in one range only the last goes on after it: a range has one counter.
            before = arrive(counters + holder * HM + hm, splits)
            if b == first_request:
                before_first, holder_first = before, holder
            else:
                before_last = before
        until_last = until
        position = last
        b += 1

    # Every program has announced all its partial results before any waits for others'.
    rows_left = tl.minimum(ROWS - (hm % ROW_BLOCKS) * BLOCK_M, BLOCK_M)
    alone = b - 1 == first_request
    for side in tl.range(0, tl.where(alone, 1, 2)):
        request = first_request if side == 0 else b - 1
        before = before_first if side == 0 else before_last
        first_range = holder_first if side == 0 else index
        splits = (until_last if alone | (side == 1) else index) - first_range + 1
        if splits > 1:
            if COOPERATIVE:
                await_all(counters + first_range * HM + hm, before, splits)
                unit, units = index - first_range, splits
            else:
                unit, units = tl.where((before & 0xFFFF) == splits - 1, 0, BLOCK_M * BLOCK_DV), 1
            slots = first_range * 2 * HM + hm
            o = out + ((request * Q_LEN).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP) * DV
            row0 = (hm % ROW_BLOCKS) * BLOCK_M
            # For up to 4, 16 and more splits: all at once and, as far as 32 registers a thread hold them, each share in
            # one iteration (64 for up to 16: with 64 in all, kernels with 64 rows spill in Triton 3.7).
            for few in tl.static_range(0, 6, 2):
                if ((few == 0) | (splits > 2**few)) & ((few == 4) | (splits <= 4 * 2**few)):
                    _combine(
                        partial_acc, partial_ml, o, sinks, unit, units, splits, slots, row0, rows_left, kv_head,
                        v_scale, HM, GROUP, KV_HEADS, DV, BLOCK_M, BLOCK_DV, HAS_SINKS, 4 * 2**few,
                        max(min((512 if few == 2 else 256) * WARPS // 2**few, TILE // max(2**few, 2)), 32 * WARPS), few == 4,
                    )  # fmt: skip
