"""Batch-invariant attention: the bits of a query's result depend on that query and on the keys it sees, on nothing else.

Keys are cut at fixed positions, counted from a request's first key (`chunks.py`). A chunk's online softmax starts anew, and
chunks are merged in their order (`merge`). Who computes a chunk, and where partial results wait, may depend on the batch; the
arithmetic of a row does not, for these reasons:

* One number of keys a block, whatever the number of queries, requests and keys: a product of the tensor cores adds the same
  numbers in the same order, wherever in the tile a row stands (`attend`). So do products of tiles of 16 and of 64 rows on
  Hopper; elsewhere, where that was not shown, there is one tile shape.
* Rows share instructions, never numbers. Keys that a row does not see have weight 0, and adding 0 changes nothing: so it does
  not matter which further blocks other rows of its tile need. Merging a chunk that a row does not see multiplies by
  `exp2(0) == 1` and adds 0.
* A row's weights are summed in one order (`tile.row_sums`). `tl.sum` adds in the order of a layout, which Triton chooses for
  each loop. For 64 rows and four warps of Hopper and datacenter Blackwell it has one choice; elsewhere `ORDERED` gives one.
* Multiplications and additions are not fused (`enable_fp_fusion=False`). What is fused is the compiler's choice, and the same
  function is compiled into several kernels.
* Only a zero's sign can differ; `finish` takes it off.

In float32 no tensor cores take part: every product is added along its inner dimension by fused multiply-adds, one after the
other, whatever the tile.

A request of many chunks is either walked by one program, which merges them in registers, or split: one program a chunk, and a
second launch that merges their results. Both give the same bits, so that choice is free (`divide`). Trees: `paths.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.attention.deterministic.chunks import (
    chunk_of,
    chunk_start,
    chunks_before,
    divide,
    find,
    first_slot,
    in_order_of_length,
    item_of,
    seen_chunks,
    turns_of,
)
from spec_ops.backends.triton.attention.deterministic.paths import attend_paths, existing, levels_seen, turns
from spec_ops.backends.triton.attention.mask import popcount
from spec_ops.backends.triton.attention.schedule import pick
from spec_ops.backends.triton.attention.tile import attend, denominator, first_pages, times
from spec_ops.backends.triton.runtime.launch import await_predecessors


@triton.jit
def merge(m, l, acc, m_next, l_next, acc_next):
    """Maximum, sum and output of all chunks up to the next one, from those before it and its own."""
    m_new = tl.maximum(m, m_next)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
    keep = tl.exp2(m - shift)
    add = tl.exp2(m_next - shift)
    return m_new, l * keep + l_next * add, acc * keep[:, None] + acc_next * add[:, None]


@triton.jit
def finish(m, l, acc, sinks, head, in_use, v_scale, HAS_SINKS: tl.constexpr):
    """The result, from a row's merged chunks."""
    result = acc * (denominator(m, l, sinks, head, in_use, HAS_SINKS) * v_scale)[:, None]
    return tl.where(result == 0, 0.0, result)


@triton.jit
def attend_chunks(
    q0, q1, k_cache, k_rest, v_cache, tree, table, kv_head, first_chunk, last_chunk, first_key, last_key, seq_len, all_seen,
    position, first_seen, qk_scale, softcap,
    k_stride_page, k_stride_token, k_stride_h, v_stride_page, v_stride_token, v_stride_h,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SHARED_KV: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    CLEAR: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, ORDERED: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Attention over the chunks `[first_chunk, last_chunk)`, merged. No row sees a key outside `[first_key, last_key)`.

    `TREE`: from the block of the tree's first key on, keys are those of paths (`tree`: of `attend_paths`).
    """
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for chunk in tl.range(first_chunk, last_chunk, num_stages=1):
        begin = tl.maximum(chunk_start(chunk) * CHUNK, first_key // BLOCK_N * BLOCK_N)
        end = tl.minimum(chunk_start(chunk + 1) * CHUNK, last_key)
        in_order = end
        if TREE:
            in_order = tl.maximum(tl.minimum(end, tree[2] // BLOCK_N * BLOCK_N), begin)
        page = first_pages(table, begin, in_order, seq_len, PAGE, BLOCK_N)
        m_next, l_next, acc_next = attend(
            q0, q1, k_cache, k_rest, v_cache, table, page, kv_head, begin, in_order, seq_len, all_seen, position, position,
            first_seen, 0, qk_scale, softcap,
            k_stride_page, k_stride_token, k_stride_h, v_stride_page, v_stride_token, v_stride_h,
            D, D0, D1, DV, BLOCK_DV, PAGE, 0, WINDOW, HAS_SOFTCAP, SHARED_KV, TMA, BLOCK_M, BLOCK_N, STAGES, CLEAR,
            False, WIDE, ORDERED,
        )  # fmt: skip
        if TREE:
            m_next, l_next, acc_next = attend_paths(
                q0, q1, tree, table, kv_head, in_order, end, first_seen, position, qk_scale, softcap, m_next, l_next, acc_next,
                k_stride_page, k_stride_token, k_stride_h, v_stride_page, v_stride_token, v_stride_h,
                D, D0, D1, DV, BLOCK_DV, PAGE, WINDOW, HAS_SOFTCAP, SHARED_KV, BLOCK_M, BLOCK_N, STAGES, ORDERED,
            )  # fmt: skip
        m, l, acc = merge(m, l, acc, m_next, l_next, acc_next)
    return m, l, acc


# No argument that changes from call to call is specialized: one compiled kernel serves every number of queries.
@triton.jit(do_not_specialize=["bs", "q_len", "row_blocks", "ranges", "capacity", "mask_stride"])
def deterministic_attention_kernel(
    q, k_cache, k_rest, v_cache, k_rows, v_rows, out, block_tables, seq_lens, tree_mask, sinks, partial_acc, partial_ml,
    qk_scale, v_scale, softcap,
    bs, q_len, row_blocks, ranges, capacity,
    q_stride_b, q_stride_q, q_stride_h,
    k_stride_page, k_stride_token, k_stride_h,
    v_stride_page, v_stride_token, v_stride_h,
    table_stride, mask_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SHARED_KV: tl.constexpr, TMA: tl.constexpr,
    BS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CLEAR: tl.constexpr,
    CHUNK: tl.constexpr, QUERIES: tl.constexpr, WIDE: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`q [bs, q_len, KV_HEADS * GROUP, D]`; a row of a tile is one (query, head of the group).

    The programs take (piece of a request, KV head, block of rows) in turns; neighbours read the same pages. A split request's
    partial results go to `partial_acc [slots, KV_HEADS, q_len * GROUP, BLOCK_DV]` and `partial_ml [slots, KV_HEADS, q_len *
    GROUP, 2]`. `k_rows`, `v_rows`: with a tree, the caches as pointers; `QUERIES`: the most that a tile holds rows of, as a
    power of two. Other arguments as `split_kv_attention_kernel`.
    """
    await_predecessors(PDL)
    tiles = KV_HEADS * row_blocks
    rows = q_len * GROUP
    d0 = tl.arange(0, D0)
    dv = tl.arange(0, BLOCK_DV)
    span = MASK_LEN if MASK_LEN > 0 else q_len
    pieces, first, chunks = divide(seq_lens, bs, span, ranges, capacity, WINDOW, CHUNK, BS)
    ends = in_order_of_length(pieces, first, chunks)
    for turn_taken in tl.range(0, turns_of(tl.sum(pieces, 0) * tiles), num_stages=1):
        item = item_of(turn_taken)
        piece = item // tiles
        tile = item % tiles
        kv_head = tile // row_blocks
        query_0 = (tile % row_blocks) * BLOCK_M // GROUP
        row = (tile % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        query = row // GROUP
        head = kv_head * GROUP + row % GROUP
        in_use = row < rows
        b, begin, number = find(ends, piece)
        seq_len = tl.maximum(tl.load(seq_lens + b), 0)
        first_chunk, seen = seen_chunks(seq_len, span, WINDOW, CHUNK)
        last_chunk = first_chunk + seen
        slot = -1
        if pick(pieces, b, BS) > 1:
            part = tl.maximum(begin - first_chunk, 0) + number
            slot = first_slot(pieces, b, BS) + part
            first_chunk += part
            last_chunk = first_chunk + 1

        q_row = q + b.to(tl.int64) * q_stride_b + times(query, q_stride_q, WIDE) + times(head, q_stride_h, WIDE)
        q0 = tl.load(q_row[:, None] + d0[None, :], mask=in_use[:, None], other=0.0)
        q1 = q0
        if D1 > 0:
            d1 = D0 + tl.arange(0, D1)
            q1 = tl.load(q_row[:, None] + d1[None, :], mask=in_use[:, None] & (d1 < D)[None, :], other=0.0)
        tree = None
        if MASK_LEN > 0:
            masks = tree_mask + b.to(tl.int64) * mask_stride
            words = existing(tl.load(masks + query, mask=in_use, other=0), seq_len, MASK_LEN)
            paths, turn, turns_taken, owner = turns(words, in_use, masks, query_0, q_len, seq_len, MASK_LEN, QUERIES)
            all_seen = tl.maximum(seq_len - MASK_LEN, 0)
            stop = all_seen + popcount(words)
            position = tl.maximum(stop - 1, all_seen)
            last_key = tl.minimum(tl.max(tl.where(in_use, stop, 0), 0), seq_len)
            first_seen = tl.min(tl.where(in_use, position, seq_len), 0) - WINDOW
            near = paths
            if WINDOW >= 0:
                near = levels_seen(turn, owner, all_seen, position, stop, WINDOW)
            tree = (k_rows, v_rows, all_seen, paths, turn, turns_taken, owner, stop, near)
        else:
            all_seen = seq_len - (q_len - 1)  # keys before this are seen by every query
            position = seq_len - q_len + query
            last_key = seq_len
            first_seen = seq_len - q_len - WINDOW
        first_key = tl.maximum(first_seen, 0) if WINDOW >= 0 else 0
        m, l, acc = attend_chunks(
            q0, q1, k_cache, k_rest, v_cache, tree, block_tables + b.to(tl.int64) * table_stride, kv_head, first_chunk,
            last_chunk, first_key, last_key, seq_len, all_seen, position, first_seen, qk_scale, softcap,
            k_stride_page, k_stride_token, k_stride_h, v_stride_page, v_stride_token, v_stride_h,
            D, D0, D1, DV, BLOCK_DV, PAGE, WINDOW, HAS_SOFTCAP, SHARED_KV, TMA, BLOCK_M, BLOCK_N, STAGES, CLEAR,
            WIDE, CHUNK, ORDERED, MASK_LEN > 0,
        )  # fmt: skip

        if slot >= 0:
            at = (slot.to(tl.int64) * KV_HEADS + kv_head) * rows + row  # type: ignore[attr-defined]
            tl.store(partial_acc + at[:, None] * BLOCK_DV + dv[None, :], acc, mask=in_use[:, None])
            tl.store(partial_ml + at * 2, m, mask=in_use)
            tl.store(partial_ml + at * 2 + 1, l, mask=in_use)
        else:
            result = finish(m, l, acc, sinks, head, in_use, v_scale, HAS_SINKS)
            o = out + ((b.to(tl.int64) * q_len + query) * (KV_HEADS * GROUP) + head) * DV
            mask = in_use[:, None] & (dv < DV)[None, :]
            tl.store(o[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _part(partial_acc, partial_ml, at, BLOCK_DV: tl.constexpr):
    """Maximum, sum and output of the rows whose partial results are at `at`."""
    acc = tl.load(partial_acc + at[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :])
    return tl.load(partial_ml + at * 2), tl.load(partial_ml + at * 2 + 1), acc


@triton.jit(do_not_specialize=["bs", "q_len", "ranges", "capacity"])
def deterministic_combine_kernel(
    out, seq_lens, sinks, partial_acc, partial_ml, v_scale, bs, q_len, ranges, capacity,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, MASK_LEN: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, BS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    READ: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merges the chunks of split requests, `ROWS` rows a program; `READ` of them are read before one is used, without masks:
    ptxas has a masked read wait for the use of the one before.

    Lengths are read before the kernel before this one, which does not write them, has ended: that waited for all earlier ones.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv_head = tl.program_id(1)
    b = tl.program_id(2)
    rows = q_len * GROUP
    in_use = row < rows
    dv = tl.arange(0, BLOCK_DV)
    span = MASK_LEN if MASK_LEN > 0 else q_len
    pieces, _, _ = divide(seq_lens, bs, span, ranges, capacity, WINDOW, CHUNK, BS)
    count = pick(pieces, b, BS)
    await_predecessors(PDL)
    if count > 1:
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        first = first_slot(pieces, b, BS)
        stride = (rows * KV_HEADS).to(tl.int64)
        place = (first.to(tl.int64) * KV_HEADS + kv_head) * rows + tl.minimum(row, rows - 1)
        for done in tl.range(0, count, READ, num_stages=1):
            parts = ()
            for i in tl.static_range(READ):  # past the last one it is read again, and counts for nothing
                part = place + tl.minimum(done + i, count - 1) * stride
                parts += (_part(partial_acc, partial_ml, part, BLOCK_DV),)  # type: ignore[assignment]
            for i in tl.static_range(READ):
                m_next, l_next, acc_next = parts[i]  # type: ignore[var-annotated]
                live = done + i < count
                m_next = tl.where(live, m_next, float("-inf"))
                m, l, acc = merge(m, l, acc, m_next, tl.where(live, l_next, 0.0), tl.where(live, acc_next, 0.0))
        head = kv_head * GROUP + row % GROUP
        result = finish(m, l, acc, sinks, head, in_use, v_scale, HAS_SINKS)
        o = out + ((b.to(tl.int64) * q_len + row // GROUP) * (KV_HEADS * GROUP) + head) * DV
        mask = in_use[:, None] & (dv < DV)[None, :]
        tl.store(o[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def deterministic_extend_kernel(
    q, k_cache, k_rest, v_cache, out, block_tables, seq_lens, q_indptr, sinks,
    qk_scale, v_scale, softcap,
    q_stride_q, q_stride_h,
    k_stride_page, k_stride_token, k_stride_h,
    v_stride_page, v_stride_token, v_stride_h,
    table_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SHARED_KV: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CLEAR: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`q [total_q, KV_HEADS * GROUP, D]`, ragged; `out` holds zeros. One program a tile, in which all chunks are merged."""
    await_predecessors(PDL)
    # The last rows of a request see the most keys: they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    kv_head = tl.program_id(1)
    b = tl.program_id(2)
    begin = tl.load(q_indptr + b)
    q_len = tl.load(q_indptr + b + 1) - begin
    if first_row < q_len * GROUP:
        seq_len = tl.maximum(tl.load(seq_lens + b), 0)
        row = first_row + tl.arange(0, BLOCK_M)
        query = row // GROUP
        head = kv_head * GROUP + row % GROUP
        in_use = query < q_len
        d0 = tl.arange(0, D0)
        dv = tl.arange(0, BLOCK_DV)
        q_row = q + (begin + query).to(tl.int64) * q_stride_q + times(head, q_stride_h, WIDE)
        q0 = tl.load(q_row[:, None] + d0[None, :], mask=in_use[:, None], other=0.0)
        q1 = q0
        if D1 > 0:
            d1 = D0 + tl.arange(0, D1)
            q1 = tl.load(q_row[:, None] + d1[None, :], mask=in_use[:, None] & (d1 < D)[None, :], other=0.0)
        low = seq_len - q_len + first_row // GROUP  # position of the tile's first query
        last_key = tl.maximum(seq_len - q_len + tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1) + 1, 0)
        first_key = tl.maximum(low - WINDOW, 0) if WINDOW >= 0 else 0
        m, l, acc = attend_chunks(
            q0, q1, k_cache, k_rest, v_cache, None, block_tables + b.to(tl.int64) * table_stride, kv_head,
            chunk_of(first_key // CHUNK), chunks_before(tl.cdiv(last_key, CHUNK)), first_key, last_key, seq_len, low + 1,
            seq_len - q_len + query, low - WINDOW, qk_scale, softcap,
            k_stride_page, k_stride_token, k_stride_h, v_stride_page, v_stride_token, v_stride_h,
            D, D0, D1, DV, BLOCK_DV, PAGE, WINDOW, HAS_SOFTCAP, SHARED_KV, TMA, BLOCK_M, BLOCK_N, STAGES, CLEAR,
            WIDE, CHUNK, ORDERED, False,
        )  # fmt: skip
        result = finish(m, l, acc, sinks, head, in_use, v_scale, HAS_SINKS)
        o = out + ((begin + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * DV
        mask = in_use[:, None] & (dv < DV)[None, :]
        tl.store(o[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=mask)
