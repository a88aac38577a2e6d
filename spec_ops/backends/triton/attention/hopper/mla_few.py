"""Absorbed-MLA paged attention for Hopper (sm_90) with few query rows per request, in Gluon: 16 heads of one query, and so on.

Same contract and division of work as `split_kv.py` (see `schedule.py`); what differs is the inside of a program. With few rows
the loads of the KV cache take longer than all else, so that it matters how much of it is under way. `wgmma` multiplies at least
64 rows, and queries padded to them (`mla.py`) take the shared memory and the time that loads need. So the operands
change places: the rows of a product are keys, or output columns, and the queries are its 16 columns.

- `S^T [64 keys, N] = K Q^T`: both from shared memory,
- softmax down the columns; the weights go to shared memory, where the second operand of `wgmma` has to be,
- `O^T [512, N] += V^T P^T`: eight products of 64 output columns each; `V^T` is the same keys, read across.

A block of 64 keys is three parts of 192 columns. Other warps load parts into a ring (`pages.py`), and one warpgroup does the
rest.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.hopper.host import (
    aligned_ranges,
    box_of,
    pool_of,
    query_rows,
    token_rows,
    tree_arguments,
)
from spec_ops.backends.triton.attention.hopper.mask import seen_by_any, seen_slots, visible
from spec_ops.backends.triton.attention.hopper.mla_few_combine import combine_unfinished, finish
from spec_ops.backends.triton.attention.hopper.pages import (
    announce,
    arrivals,
    await_copies,
    copy,
    expect,
    loading_warps,
    pages_of,
)
from spec_ops.backends.triton.attention.hopper.program import (
    LOG2E,
    arrive,
    await_predecessors,
    block_counts,
    exp_shift,
    next_stage,
    opaque_zero,
    padded,
    place,
    whole_ranges,
)
from spec_ops.backends.triton.attention.operands import packed, result_of, unit_rows
from spec_ops.backends.triton.runtime.launch import launch, num_sms
from spec_ops.backends.triton.runtime.repeat import counted, empty

MAX_ROWS = 16  # of a request: with more, `mla.py` serves it
PARTS = 6  # of the ring: two blocks. 5 take up to 7% longer, 8 up to 3% longer.
PART_BYTES = gl.constexpr(64 * 192 * 2)


@gluon.jit
def _zero_keys(kv_smem, stage, valid, slots, CHUNKS: gl.constexpr, MASK_LEN: gl.constexpr, HOLES: gl.constexpr):
    """Clear the keys of a part's first chunks that no query sees (`seen_by_any`): there may be NaN, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    seen = gl.expand_dims(seen_by_any(gl.arange(0, 64, gl.SliceLayout(1, layout)), valid, slots, MASK_LEN, HOLES), 1)
    for c in gl.static_range(CHUNKS):
        chunk = kv_smem.index(stage * 3 + c)
        x = chunk.load(layout)
        chunk.store(gl.where(seen, x, gl.zeros_like(x)))


@gluon.jit
def _load_queries(q_rows, q_smem, full, free, row0, segments):
    mbarrier.wait(free, (segments & 1) ^ 1)
    mbarrier.expect(full, 576 * q_smem.shape[1] * 2)
    for c in gl.static_range(9):
        tma.async_copy_global_to_shared(q_rows, [row0, c * 64], full, q_smem.index(c))


@gluon.jit
def _load(
    q_rows, kv_rows, kv_distance, q_smem, kv_smem, full, free, q_full, q_free,
    block_tables, seq_lens, table_stride, pool, position, stop, length, b, begin,
    ROWS: gl.constexpr, PAGE: gl.constexpr, PARTS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """The loading warps."""
    stage = 0
    phase = 0
    segments = 0
    while position < stop:
        seq_len = gl.maximum(gl.load(seq_lens + b), 0)
        count = gl.cdiv(seq_len, 64)
        end = gl.where(length > 0, stop, begin + count)  # with a length ranges end with requests; spares `padded`'s division
        if count > 0:
            until = gl.minimum(end, stop)
            last = gl.minimum(until - begin, count)
            first = position - begin
            table = block_tables + b.to(gl.int64) * table_stride
            seen = gl.minimum(seq_len, last * 64)
            next_pages = pages_of(table, first * 64, seen, pool, PAGE, 64, BOX)
            for k in range(first, last):
                pages = next_pages
                next_pages = pages_of(table, (k + 1) * 64, seen, pool, PAGE, 64, BOX)
                if (k == first) & (segments == 0):
                    _load_queries(q_rows, q_smem, q_full, q_free, b * ROWS, segments)
                for p in gl.static_range(3):
                    mbarrier.wait(free.index(stage), phase ^ 1)
                    bar = full.index(stage)
                    expect(bar, PART_BYTES, BOX)
                    copy(kv_rows, kv_distance, kv_smem, stage * 3, 3, bar, pages, k * 64, 192 * p, PAGE, BOX)
                    announce(bar, BOX)
                    stage, phase = next_stage(stage, phase, PARTS)
                # Later requests' queries come after their first block, since their place may still be in use. That block can
                # always be loaded: what stands in its way are blocks whose queries are there.
                if (k == first) & (segments > 0):
                    _load_queries(q_rows, q_smem, q_full, q_free, b * ROWS, segments)
            segments += 1
            position = until
        begin = end
        b += 1


@gluon.jit
def _logits(s, q_smem, kv_smem, stage, P: gl.constexpr):
    """Add the products over the columns of part `P` of a block."""
    z = opaque_zero()
    for c in gl.static_range(3):
        q = q_smem.index(z + 3 * P + c).permute((1, 0))
        s = warpgroup_mma(kv_smem.index(stage * 3 + c), q, s, use_acc=P + c > 0, is_async=True)
    return s


@gluon.jit
def _attend(
    q_smem, kv_smem, p_smem, full, free, q_full, q_free,
    out, seq_lens, tree_mask, mask_stride, sinks, partial_acc, partial_ml, counters, qk_scale, v_scale,
    index, share, longer, range_begin, stop, length, b, begin,
    Q_LEN: gl.constexpr, HEADS: gl.constexpr, MASK_LEN: gl.constexpr, HAS_SINKS: gl.constexpr, PARTS: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """The warpgroup that computes."""
    N: gl.constexpr = q_smem.shape[1]
    ROWS: gl.constexpr = Q_LEN * HEADS
    HOLES: gl.constexpr = MASK_LEN > Q_LEN
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])  # [64 keys or columns, N rows]
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    row = gl.arange(0, N, by_row)
    query = row // HEADS
    stage = 0
    phase = 0
    segments = 0
    first_b = b
    first_begin = begin
    while (begin < stop) & (range_begin < stop):
        seq_len = gl.load(seq_lens + b)
        count = gl.cdiv(gl.maximum(seq_len, 0), 64)
        end = begin + padded(count, length)
        if count > 0:
            until = gl.minimum(end, stop)
            last = gl.minimum(until - begin, count)
            first = gl.maximum(range_begin - begin, 0)
            words = query.to(gl.int64)
            if MASK_LEN > 0:
                words = gl.load(tree_mask + b * mask_stride + query, mask=row < ROWS, other=0)
            all_seen = seq_len - (MASK_LEN if MASK_LEN > 0 else Q_LEN - 1)  # keys before this are seen by every query
            some_seen = seq_len  # keys before this are seen by some query
            slots = 0
            if HOLES:
                some_seen = seq_len - MASK_LEN
                slots = seen_slots(tree_mask + b * mask_stride, Q_LEN)
            m = gl.full([N], float("-inf"), gl.float32, by_row)
            l = gl.zeros([64, N], gl.float32, layout)  # sums of every 64th key's weights
            zero = gl.zeros([64, N], gl.float32, layout)
            acc = (zero, zero, zero, zero, zero, zero, zero, zero)
            mbarrier.wait(q_full, segments & 1)

            for k in range(first, last):
                start = k * 64
                stage1, phase1 = next_stage(stage, phase, PARTS)
                stage2, phase2 = next_stage(stage1, phase1, PARTS)
                await_copies(full.index(stage), phase, BOX)
                s = _logits(zero, q_smem, kv_smem, stage, 0)
                await_copies(full.index(stage1), phase1, BOX)
                s = _logits(s, q_smem, kv_smem, stage1, 1)
                await_copies(full.index(stage2), phase2, BOX)
                s = _logits(s, q_smem, kv_smem, stage2, 2)
                s = warpgroup_mma_wait(0, [s])
                if start + 64 > all_seen:
                    s = visible(s, start, seq_len, query, words, Q_LEN, MASK_LEN, 0, False)
                m_new = gl.maximum(m, gl.max(s, 0) * qk_scale)
                if k + 1 == last:
                    arrive(q_free)
                shift = exp_shift(m_new)
                p = gl.exp2(s * qk_scale - gl.expand_dims(shift, 0))
                p_smem.store(p.to(p_smem.dtype))
                if start + 64 > some_seen:
                    _zero_keys(kv_smem, stage, seq_len - start, slots, 3, MASK_LEN, HOLES)
                    _zero_keys(kv_smem, stage1, seq_len - start, slots, 3, MASK_LEN, HOLES)
                    _zero_keys(kv_smem, stage2, seq_len - start, slots, 2, MASK_LEN, HOLES)
                fence_async_shared()
                shrink = gl.expand_dims(gl.exp2(m - shift), 0)
                l = l * shrink + p
                m = m_new
                tokens = ()
                for c in gl.static_range(8):
                    part = stage if c < 3 else (stage1 if c < 6 else stage2)
                    v = kv_smem.index(part * 3 + c % 3).permute((1, 0))
                    tokens += (warpgroup_mma(v, p_smem, acc[c] * shrink, is_async=True),)  # type: ignore[assignment]
                acc = warpgroup_mma_wait(0, tokens)
                arrive(free.index(stage))
                arrive(free.index(stage1))
                arrive(free.index(stage2))
                stage, phase = next_stage(stage2, phase2, PARTS)
            segments += 1

            is_whole = (first == 0) & (until == end)
            # A range has at most two unfinished tiles: one that ends in it (slot 0) and one that goes on after it (slot 1).
            slot = index * 2 + (end > stop).to(gl.int32)
            finish(
                acc,
                m,
                gl.sum(l, 0),
                out,
                sinks,
                partial_acc,
                partial_ml,
                counters,
                b,
                is_whole,
                slot,
                v_scale,
                ROWS,
                HEADS,
                HAS_SINKS,
            )
        begin = end
        b += 1
    combine_unfinished(
        partial_acc, partial_ml, counters, out, sinks, v_scale, index, share, longer, range_begin, stop,
        first_b, first_begin, b - 1, begin, N, ROWS, HEADS, HAS_SINKS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["bs", "ranges", "table_stride", "mask_stride", "kv_distance", "pool"])
def mla_hopper_few_attention(
    q_rows, kv_rows, kv_distance, pool, out, block_tables, seq_lens, tree_mask, sinks, partial_acc, partial_ml, counters,
    qk_scale, v_scale, bs, ranges, table_stride, mask_stride,
    Q_LEN: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, MASK_LEN: gl.constexpr, HAS_SINKS: gl.constexpr,
    BS: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr, BOX: gl.constexpr, MIN_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Descriptors: queries `[bs * Q_LEN * HEADS, 576]` in `N` x 64; cache `[tokens, 576]` in `BOX` x 64 (`pages.py`)."""
    full = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    queries = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PARTS):
        mbarrier.init(full.index(i), count=arrivals(BOX))
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(queries.index(i), count=1)
    fence_async_shared()
    await_predecessors(PDL)

    ROWS: gl.constexpr = Q_LEN * HEADS
    index = gl.program_id(0)

    ids, in_use, counts = block_counts(seq_lens, bs, BS, 64)
    total = gl.sum(counts, 0)

    # Requests without keys belong to no range.
    if gl.sum(((counts == 0) & in_use).to(gl.int32), 0) > 0:
        rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        zero_row = gl.arange(0, N, gl.SliceLayout(1, rows_layout))
        zero_column = gl.arange(0, 512, gl.SliceLayout(0, rows_layout))
        for empty in range(index, bs, ranges):
            if gl.load(seq_lens + empty) <= 0:
                o = out + ((empty * ROWS).to(gl.int64) + gl.expand_dims(zero_row, 1)) * 512
                zero = gl.full([N, 512], 0.0, out.dtype.element_ty, rows_layout)
                gl.store(o + gl.expand_dims(zero_column, 0), zero, mask=gl.expand_dims(zero_row < ROWS, 1))

    # Fewer ranges than programs where a range would be too short to pay for its partial result.
    ranges = gl.maximum(gl.minimum(ranges, gl.cdiv(total, MIN_BLOCKS)), 1)
    length, needed = whole_ranges(counts, total, ranges)
    if length > 0:  # round each request up to whole ranges: the blocks too many are empty
        counts = needed * length
        ranges = gl.sum(needed, 0)
        total = ranges * length
    share = total // ranges
    longer = total - share * ranges
    position, stop, b, begin = place(index, ranges, share, longer, counts, ids, in_use)

    dtype: gl.constexpr = q_rows.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [9, N, 64], shared)
    kv_smem = gl.allocate_shared_memory(dtype, [PARTS * 3, 64, 64], shared)
    p_smem = gl.allocate_shared_memory(dtype, [64, N], gl.NVMMASharedLayout(N * 2, 16, rank=2))

    gl.warp_specialize(
        [
            (_attend, (
                q_smem, kv_smem, p_smem, full, free, queries.index(0), queries.index(1),
                out, seq_lens, tree_mask, mask_stride, sinks, partial_acc, partial_ml, counters, qk_scale, v_scale,
                index, share, longer, position, stop, length, b, begin,
                Q_LEN, HEADS, MASK_LEN, HAS_SINKS, PARTS, BOX,
            )),
            (_load, (
                q_rows, kv_rows, kv_distance, q_smem, kv_smem, full, free, queries.index(0), queries.index(1),
                block_tables, seq_lens, table_stride, pool, position, stop, length, b, begin, ROWS, PAGE, PARTS, BOX,
            )),
        ],
        [loading_warps(BOX)],
        [64],
    )  # fmt: skip


def preferred(q: torch.Tensor) -> bool:
    """Whether `mla` here is the faster one of two kernels that serve the queries `q [bs, q_len, heads, 576]`."""
    return q.shape[1] * q.shape[2] <= MAX_ROWS


def mla(call: AttentionCall, parts: int = PARTS, min_blocks: int = 1) -> torch.Tensor:
    """mla_draft_decode, mla_target_verify, mla_draft_extend of up to `MAX_ROWS` rows, where `mla.supports` says so."""
    kv_cache, kv_scale, seq_lens = call.k_cache, call.k_scale, call.seq_lens.contiguous()
    bs, q_len, heads, dim = call.q.shape
    out = result_of(call)
    if out.numel() == 0:
        return out
    q, block_tables = query_rows(call.q), unit_rows(call.block_tables)
    sinks = packed(call.sinks)
    tree_mask, mask_stride, mask_len = tree_arguments(call)
    rows = q_len * heads
    ranges = aligned_ranges(num_sms(q.device), bs)
    slots = ranges * 2
    partial = empty((slots * MAX_ROWS * (512 + 2),), torch.float32, q.device)
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    box = box_of(kv_cache, 64)
    launch(
        mla_hopper_few_attention, (ranges,),
        TensorDescriptor(q, [bs * rows, dim], [dim, 1], [MAX_ROWS, 64], layout),
        token_rows(kv_cache, box), kv_cache.stride(1) // 8, pool_of(kv_cache, box, q_len, mask_len),
        out, block_tables, seq_lens, tree_mask, sinks,
        partial, partial[slots * MAX_ROWS * 512 :], counted(q.device, bs, "mla_hopper_few"),
        call.scale * kv_scale * LOG2E.value, kv_scale, bs, ranges,
        block_tables.stride(0), mask_stride,
        Q_LEN=q_len, HEADS=heads, PAGE=kv_cache.shape[1], MASK_LEN=mask_len,
        HAS_SINKS=sinks is not None, BS=max(32, triton.next_power_of_2(bs)), N=MAX_ROWS, PARTS=parts,
        BOX=box, MIN_BLOCKS=min_blocks, num_warps=4,
        # With one range no tile is split, and no program waits for another.
        launch_cooperative_grid=ranges > 1, early=True,
    )  # fmt: skip
    return out
