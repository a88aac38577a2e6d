"""Paged GQA attention for Hopper (sm_90) with many query rows per KV head, in Gluon: draft decode, verify and draft extend.

Same contract and division of work as `split_kv.py` (see `schedule.py`); what differs is the inside of a program. With 128 rows
per KV head the exponentials take about as long as the products, and both together longer than the loads, so they have to
overlap, as in FlashAttention-3 (arXiv:2407.08608):

- two warpgroups have 64 rows each, or three where two tiles of 128 would be half empty, and one's softmax overlaps the others'
  products: they take turns,
- a warpgroup starts the products of queries and keys of block `n + 1` before it multiplies the weights of block `n` with their
  values, and the latter runs during the softmax of the former,
- one more partition loads queries, keys and values, some blocks ahead (`pages.py`).

Weights stay in registers. Masks are applied in a loop of its own, over the last blocks.
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
from spec_ops.backends.triton.attention.hopper.combine import combine_unfinished, finish_part, striped
from spec_ops.backends.triton.attention.hopper.gqa_softmax import scale_rows, softmax_step, thread_sums
from spec_ops.backends.triton.attention.hopper.gqa_tiling import Tiling, tiling_of
from spec_ops.backends.triton.attention.hopper.host import (
    aligned_ranges,
    box_of,
    is_token_rows,
    pool_of,
    token_rows,
    tree_arguments,
)
from spec_ops.backends.triton.attention.hopper.mask import clear_rows, seen_slots, visible
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
    next_stage,
    padded,
    place,
    whole_ranges,
)
from spec_ops.backends.triton.attention.operands import packed, result_of, unit_rows, window_within
from spec_ops.backends.triton.runtime.launch import launch, num_sms
from spec_ops.backends.triton.runtime.repeat import counted, empty

HEAD_DIMS = (64, 128)
MIN_ROWS = 65  # one tile of 64 rows leaves a warpgroup idle
MIN_ROWS_OF_SMALL_PAGES = 17  # with heads of 128: the other kernel reads them by pointers

# Barriers `full` (TMA has written) and `free` (both warpgroups have read): of the queries' two buffers, then of the keys' and
# values' `STAGES` buffers in turn.
KEYS, VALUES = gl.constexpr(2), gl.constexpr(3)


@gluon.jit
def _side(segments, Q_BUFFERS: gl.constexpr):
    """In which of the queries' buffers those of the next segment are, after `segments` others."""
    return segments & 1 if Q_BUFFERS == 2 else segments * 0


@gluon.jit
def _turn(segments, Q_BUFFERS: gl.constexpr):
    """The parity of that buffer's phase."""
    return ((segments >> 1) if Q_BUFFERS == 2 else segments) & 1


@gluon.jit
def _copy_block(rows, distance, smem, bar, pages, key, column, PAGE: gl.constexpr, BOX: gl.constexpr):
    """Start to load the keys or values of a block."""
    BLOCK_N: gl.constexpr = smem.shape[0]
    D: gl.constexpr = smem.shape[1]
    chunks = smem._reinterpret(smem.dtype, [D // 64, BLOCK_N, 64], smem.layout)
    expect(bar, BLOCK_N * D * 2, BOX)
    copy(rows, distance, chunks, 0, D // 64, bar, pages, key, column, PAGE, BOX)
    announce(bar, BOX)


@gluon.jit
def _load(
    memory, tensors, blocks, Q_LEN: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """The loading warps."""
    q_smem, k_smem, v_smem, full, free = memory
    q_rows, k_rows, v_rows, k_distance, v_distance, block_tables, seq_lens, table_stride, pool = tensors
    position, stop, length, b, begin, kv_head, query0 = blocks
    Q_BUFFERS: gl.constexpr = q_smem.shape[0] // WARPGROUPS
    stage = 0
    phase = 0
    segments = 0
    while position < stop:
        seq_len = gl.maximum(gl.load(seq_lens + b), 0)
        count = gl.cdiv(seq_len, BLOCK_N)
        end = gl.where(length > 0, stop, begin + count)  # with a length ranges end with requests; spares `padded`'s division
        if count > 0:
            until = gl.minimum(end, stop)
            last = gl.minimum(until - begin, count)
            first = position - begin
            table = block_tables + b.to(gl.int64) * table_stride
            seen = gl.minimum(seq_len, last * BLOCK_N)
            next_pages = pages_of(table, first * BLOCK_N, seen, pool, PAGE, BLOCK_N, BOX)
            side = _side(segments, Q_BUFFERS)
            mbarrier.wait(free.index(side), _turn(segments, Q_BUFFERS) ^ 1)
            mbarrier.expect(full.index(side), WARPGROUPS * 64 * D * 2)
            # A box is 64 rows: queries by heads of the group. Those after a request's last query are the next request's.
            for part in gl.static_range(WARPGROUPS):
                query = b * Q_LEN + query0 + part * (64 // GROUP)
                part_smem = q_smem.index(side * WARPGROUPS + part)
                chunks = part_smem._reinterpret(q_smem.dtype, [D // 64, 64 // GROUP, GROUP, 64], q_rows.layout)
                for c in gl.static_range(D // 64):
                    tma.async_copy_global_to_shared(q_rows, [query, kv_head * GROUP, c * 64], full.index(side), chunks.index(c))
            segments += 1
            for k in range(first, last):
                key = k * BLOCK_N
                pages = next_pages
                next_pages = pages_of(table, key + BLOCK_N, seen, pool, PAGE, BLOCK_N, BOX)
                keys = KEYS + 2 * stage
                mbarrier.wait(free.index(keys), phase ^ 1)
                _copy_block(k_rows, k_distance, k_smem.index(stage), full.index(keys), pages, key, kv_head * D, PAGE, BOX)
                values = VALUES + 2 * stage
                mbarrier.wait(free.index(values), phase ^ 1)
                _copy_block(v_rows, v_distance, v_smem.index(stage), full.index(values), pages, key, kv_head * D, PAGE, BOX)
                stage, phase = next_stage(stage, phase, STAGES)
            position = until
        begin = end
        b += 1


@gluon.jit
def _logits(q, k, BLOCK_N: gl.constexpr):
    """Start the products `[64, BLOCK_N]` of queries and keys."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zero = gl.zeros([64, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _iterate(
    iterations, start, q, k_smem, v_smem, full, free, order, cleared, acc, p, m, l, stage, phase, v_stage, issued, clears,
    seq_len, query, words, slots, qk_scale, Q_LEN: gl.constexpr, MASK_LEN: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Weights of `iterations` blocks from key `start` on, and the outputs of the blocks one before, whose values are loaded."""
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HOLES: gl.constexpr = MASK_LEN > Q_LEN
    # Three warpgroups have too few registers for weights beside new logits. Nor need one overlap its products: two others do.
    TOGETHER: gl.constexpr = WARPGROUPS == 3 and v_smem.shape[2] == 128
    for i in range(iterations):
        if MASKED and HOLES:  # else only a request's last block has values that no query sees
            before = start + (i - 1) * BLOCK_N
            if before + BLOCK_N > seq_len - MASK_LEN:
                clears = clear_rows(
                    v_smem.index(v_stage), seq_len - before, slots, cleared, clears, MASK_LEN, HOLES, WARPGROUP
                )  # fmt: skip
        await_copies(full.index(KEYS + 2 * stage), phase, BOX)
        mbarrier.wait(order.index(WARPGROUP), (issued & 1) ^ (1 if WARPGROUP == 0 else 0))
        if TOGETHER:
            o_token = warpgroup_mma(p, v_smem.index(v_stage), acc, is_async=True)
            s_token = _logits(q, k_smem.index(stage), BLOCK_N)
            mbarrier.arrive(order.index((WARPGROUP + 1) % WARPGROUPS))
            issued += 1
            acc, p, s = warpgroup_mma_wait(0, [o_token, p, s_token])
            arrive(free.index(KEYS + 2 * stage))
            mbarrier.arrive(free.index(VALUES + 2 * v_stage))
        else:
            s_token = _logits(q, k_smem.index(stage), BLOCK_N)
            o_token = warpgroup_mma(p, v_smem.index(v_stage), acc, is_async=True)
            mbarrier.arrive(order.index((WARPGROUP + 1) % WARPGROUPS))
            issued += 1
            s = warpgroup_mma_wait(1, [s_token])
            arrive(free.index(KEYS + 2 * stage))
        if MASKED:
            s = visible(s, start + i * BLOCK_N, seq_len, query, words, Q_LEN, MASK_LEN, 1, True)
        weights, m, shrink = softmax_step(s, m, qk_scale)
        l = scale_rows(l, shrink) + thread_sums(weights)
        # The next iteration's values. Here, because without a branch in between the assembler moves the wait for products
        # ahead of the softmax that they are to overlap with.
        await_copies(full.index(VALUES + 2 * stage), phase, BOX)
        if not TOGETHER:
            acc, p = warpgroup_mma_wait(0, [o_token, p])  # the operand must stay where it is until then
            arrive(free.index(VALUES + 2 * v_stage))
        acc = scale_rows(acc, shrink)
        p = gl.convert_layout(weights.to(q.dtype), p.type.layout)
        v_stage = stage
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, p, m, l, stage, phase, v_stage, issued, clears


@gluon.jit
def _attend(
    memory, tensors, blocks, Q_LEN: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, ROW_BLOCKS: gl.constexpr,
    MASK_LEN: gl.constexpr, HAS_SINKS: gl.constexpr, STAGES: gl.constexpr, STRIPED: gl.constexpr, BOX: gl.constexpr,
    WARPGROUPS: gl.constexpr, WARPGROUP: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows and all blocks of each of its program's tiles."""
    q_smem, k_smem, v_smem, full, free, cleared, order = memory
    out, seq_lens, tree_mask, mask_stride, sinks, partial_acc, partial_ml, counters, qk_scale, v_scale = tensors
    index, share, longer, range_begin, stop, length, b, begin, hm = blocks
    Q_BUFFERS: gl.constexpr = q_smem.shape[0] // WARPGROUPS
    D: gl.constexpr = v_smem.shape[2]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    ROWS: gl.constexpr = Q_LEN * GROUP
    TILES: gl.constexpr = KV_HEADS * ROW_BLOCKS * WARPGROUPS
    HOLES: gl.constexpr = MASK_LEN > Q_LEN
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    kv_head = hm // ROW_BLOCKS
    tile = hm * WARPGROUPS + WARPGROUP
    row0 = hm % ROW_BLOCKS * (64 * WARPGROUPS) + WARPGROUP * 64
    row = row0 + gl.arange(0, 64, s_row)
    query = row // GROUP
    stage = 0
    phase = 0
    segments = 0
    clears = 0
    issued = 0
    first_b = b
    first_begin = begin
    while (begin < stop) & (range_begin < stop):
        seq_len = gl.load(seq_lens + b)
        count = gl.cdiv(gl.maximum(seq_len, 0), BLOCK_N)
        end = begin + padded(count, length)
        if count > 0:
            until = gl.minimum(end, stop)
            last = gl.minimum(until - begin, count)
            first = gl.maximum(range_begin - begin, 0)
            words = query.to(gl.int64)
            if MASK_LEN > 0:
                words = gl.load(tree_mask + b * mask_stride + query, mask=row < ROWS, other=0)
            some_seen = seq_len  # keys before this are seen by some query
            slots = 0
            if HOLES:
                some_seen = seq_len - MASK_LEN
                slots = seen_slots(tree_mask + b * mask_stride, Q_LEN)
            # Keys before this are seen by every query; `seen` counts the blocks of such keys only.
            all_seen = seq_len - (MASK_LEN if MASK_LEN > 0 else Q_LEN - 1)
            seen = gl.maximum(gl.minimum(gl.maximum(all_seen, 0) // BLOCK_N, last), first + 1)
            side = _side(segments, Q_BUFFERS)
            q = q_smem.index(side * WARPGROUPS + WARPGROUP)

            mbarrier.wait(full.index(side), _turn(segments, Q_BUFFERS))
            await_copies(full.index(KEYS + 2 * stage), phase, BOX)
            s = warpgroup_mma_wait(0, [_logits(q, k_smem.index(stage), BLOCK_N)])
            arrive(free.index(KEYS + 2 * stage))
            if (first + 1) * BLOCK_N > all_seen:
                s = visible(s, first * BLOCK_N, seq_len, query, words, Q_LEN, MASK_LEN, 1, True)
            m = gl.full([64], float("-inf"), gl.float32, s_row)
            acc = gl.zeros([64, D], gl.float32, o_layout)
            weights, m, _ = softmax_step(s, m, qk_scale)
            l = thread_sums(weights)
            p = gl.convert_layout(weights.to(q.dtype), p_layout)
            await_copies(full.index(VALUES + 2 * stage), phase, BOX)
            v_stage = stage
            stage, phase = next_stage(stage, phase, STAGES)

            acc, p, m, l, stage, phase, v_stage, issued, clears = _iterate(
                seen - first - 1, (first + 1) * BLOCK_N, q, k_smem, v_smem, full, free, order, cleared, acc, p, m, l,
                stage, phase, v_stage, issued, clears, seq_len, query, words, slots, qk_scale,
                Q_LEN, MASK_LEN, STAGES, False, WARPGROUP, WARPGROUPS, BOX,
            )  # fmt: skip
            acc, p, m, l, stage, phase, v_stage, issued, clears = _iterate(
                last - seen, seen * BLOCK_N, q, k_smem, v_smem, full, free, order, cleared, acc, p, m, l,
                stage, phase, v_stage, issued, clears, seq_len, query, words, slots, qk_scale,
                Q_LEN, MASK_LEN, STAGES, True, WARPGROUP, WARPGROUPS, BOX,
            )  # fmt: skip
            arrive(free.index(side))
            segments += 1

            if last * BLOCK_N > some_seen:
                clears = clear_rows(
                    v_smem.index(v_stage), seq_len - (last - 1) * BLOCK_N, slots, cleared, clears, MASK_LEN, HOLES, WARPGROUP
                )  # fmt: skip
            o_token = warpgroup_mma(p, v_smem.index(v_stage), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, [o_token, p])
            arrive(free.index(VALUES + 2 * v_stage))

            finish_part(
                acc, m, gl.sum(l, 1), out, sinks, partial_acc, partial_ml, counters + b * TILES + tile, index, share, longer,
                stop, first, end, b, tile, row0, kv_head, v_scale, TILES, ROWS, GROUP, KV_HEADS, D, HAS_SINKS, 0, STRIPED,
            )  # fmt: skip
        begin = end
        b += 1
    combine_unfinished(
        partial_acc, partial_ml, counters, out, sinks, v_scale, index, share, longer, range_begin, stop, tile, row0, kv_head,
        first_b, first_begin, b - 1, begin, TILES, ROWS, GROUP, KV_HEADS, D, HAS_SINKS, 0, D,
        STRIPED,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["bs", "ranges", "table_stride", "mask_stride", "k_distance", "v_distance", "pool"])
def gqa_hopper_attention(
    q_rows, k_rows, v_rows, k_distance, v_distance, pool, out, block_tables, seq_lens, tree_mask, sinks,
    partial_acc, partial_ml, counters,
    qk_scale, v_scale, bs, ranges, table_stride, mask_stride,
    Q_LEN: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, ROW_BLOCKS: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, MASK_LEN: gl.constexpr, HAS_SINKS: gl.constexpr, BS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, BOX: gl.constexpr, STRIPED: gl.constexpr, MIN_BLOCKS: gl.constexpr, WARPGROUPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Descriptors: queries `[bs * Q_LEN, KV_HEADS * GROUP, D]`, 64 rows by 64; caches `[tokens, KV_HEADS * D]`, `BOX` by 64
    (`pages.py`)."""
    full = gl.allocate_shared_memory(gl.int64, [2 + 2 * STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2 + 2 * STAGES, 1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 + 2 * STAGES):
        mbarrier.init(full.index(i), count=1 if i < 2 else arrivals(BOX))
        mbarrier.init(free.index(i), count=WARPGROUPS)
    mbarrier.init(cleared.index(0), count=WARPGROUPS)
    order = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(order.index(i), count=1)
    fence_async_shared()
    await_predecessors(PDL)

    HM: gl.constexpr = KV_HEADS * ROW_BLOCKS
    ROWS: gl.constexpr = Q_LEN * GROUP
    pid = gl.program_id(0)
    index = pid // HM
    hm = pid % HM

    ids, in_use, counts = block_counts(seq_lens, bs, BS, BLOCK_N)
    total = gl.sum(counts, 0)

    # Requests without keys belong to no range.
    if gl.sum(((counts == 0) & in_use).to(gl.int32), 0) > 0:
        by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        # A power of two: those after three warpgroups' rows are the next tile's, and zeros too.
        TILE: gl.constexpr = 128 if WARPGROUPS == 2 else 256
        zero_row = hm % ROW_BLOCKS * (64 * WARPGROUPS) + gl.arange(0, TILE, gl.SliceLayout(1, by_row))
        zero_column = gl.arange(0, D, gl.SliceLayout(0, by_row))
        head = hm // ROW_BLOCKS * GROUP + zero_row % GROUP
        for empty in range(index, bs, ranges):
            if gl.load(seq_lens + empty) <= 0:
                o = out + ((empty * Q_LEN + zero_row // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + head) * D
                zero = gl.full([TILE, D], 0.0, out.dtype.element_ty, by_row)
                mask = gl.expand_dims(zero_row < ROWS, 1)
                gl.store(gl.expand_dims(o, 1) + gl.expand_dims(zero_column, 0), zero, mask=mask)

    # Fewer ranges than programs where a range would be too short to pay for its partial result.
    ranges = gl.maximum(gl.minimum(ranges, gl.cdiv(total, MIN_BLOCKS)), 1)
    length, needed = whole_ranges(counts, total, ranges)
    share = length
    longer = total * 0
    if length > 0:  # round each request up to whole ranges: the blocks too many are empty
        counts = needed * length
        ranges = gl.sum(needed, 0)
    else:
        share = total // ranges
        longer = total - share * ranges
    position, stop, b, begin = place(index, ranges, share, longer, counts, ids, in_use)

    dtype: gl.constexpr = q_rows.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    Q_BUFFERS: gl.constexpr = 1 if WARPGROUPS * D > 256 else 2  # the keys and values of a stage take the place of one
    q_smem = gl.allocate_shared_memory(dtype, [Q_BUFFERS * WARPGROUPS, 64, D], shared)  # of each buffer, each warpgroup's
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], shared)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], shared)
    # Arguments are written once. Tuples in variables hold values alone: constants among them would no longer be any.
    memory = (q_smem, k_smem, v_smem, full, free, cleared, order)
    tensors = (out, seq_lens, tree_mask, mask_stride, sinks, partial_acc, partial_ml, counters, qk_scale, v_scale)
    blocks = (index, share, longer, position, stop, length, b, begin, hm)
    loaded_to = (q_smem, k_smem, v_smem, full, free)
    loaded = (q_rows, k_rows, v_rows, k_distance, v_distance, block_tables, seq_lens, table_stride, pool)
    blocks_of_head = (
        position, stop, length, b, begin, hm // ROW_BLOCKS, hm % ROW_BLOCKS * (64 * WARPGROUPS // GROUP),
    )  # fmt: skip
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (
                    memory, tensors, blocks,
                    Q_LEN, GROUP, KV_HEADS, ROW_BLOCKS, MASK_LEN, HAS_SINKS, STAGES, STRIPED, BOX, 2, 0,
                )),
                (_attend, (
                    memory, tensors, blocks,
                    Q_LEN, GROUP, KV_HEADS, ROW_BLOCKS, MASK_LEN, HAS_SINKS, STAGES, STRIPED, BOX, 2, 1,
                )),
                (_load, (loaded_to, loaded, blocks_of_head, Q_LEN, GROUP, D, PAGE, BLOCK_N, STAGES, BOX, WARPGROUPS)),
            ],
            [4, loading_warps(BOX)],
            [240, 24] if BOX >= 64 else [232, 40],  # more pages to hold
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    memory, tensors, blocks,
                    Q_LEN, GROUP, KV_HEADS, ROW_BLOCKS, MASK_LEN, HAS_SINKS, STAGES, STRIPED, BOX, 3, 0,
                )),
                (_attend, (
                    memory, tensors, blocks,
                    Q_LEN, GROUP, KV_HEADS, ROW_BLOCKS, MASK_LEN, HAS_SINKS, STAGES, STRIPED, BOX, 3, 1,
                )),
                (_attend, (
                    memory, tensors, blocks,
                    Q_LEN, GROUP, KV_HEADS, ROW_BLOCKS, MASK_LEN, HAS_SINKS, STAGES, STRIPED, BOX, 3, 2,
                )),
                (_load, (loaded_to, loaded, blocks_of_head, Q_LEN, GROUP, D, PAGE, BLOCK_N, STAGES, BOX, WARPGROUPS)),
            ],
            [4, 4, loading_warps(BOX)],
            [160, 160, 24],
        )  # fmt: skip


def supports(arch: int, call: AttentionCall) -> bool:
    """Whether `mha` here serves a call on `arch` (90 for sm_90), by dtypes, shapes, strides and alignment."""
    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    pages, page_size, kv_heads, head_dim = k_cache.shape
    group = q.shape[2] // max(kv_heads, 1)
    small = head_dim == 128 and page_size % 64 > 0
    return (
        arch == 90
        and q.dtype in (torch.bfloat16, torch.float16)
        and k_cache.dtype == v_cache.dtype == q.dtype
        and head_dim == v_cache.shape[3]
        and head_dim in HEAD_DIMS
        and group in (1, 2, 4, 8, 16, 32, 64)
        and group * q.shape[1] >= (MIN_ROWS_OF_SMALL_PAGES if small else MIN_ROWS)
        and pages > 0
        and is_token_rows(k_cache)
        and is_token_rows(v_cache)
        and window_within(call.window_left, call.block_tables, page_size) < 0
        and call.softcap == 0
    )


def mha(call: AttentionCall, tiling: Tiling | None = None, min_blocks: int = 1) -> torch.Tensor:
    """mha_draft_decode, mha_target_verify, mha_draft_extend, where `supports` says so; `tiling` in place of `tiling_of`."""
    q, k_cache, v_cache, seq_lens = call.q, call.k_cache, call.v_cache, call.seq_lens.contiguous()
    block_tables, sinks = unit_rows(call.block_tables), packed(call.sinks)
    tree_mask, mask_stride, mask_len = tree_arguments(call)
    bs, q_len, heads, dim = q.shape
    out = result_of(call)
    if out.numel() == 0:
        return out
    if not is_token_rows(q):
        q = q.clone(memory_format=torch.contiguous_format)
    page_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    warpgroups, block_n, stages = tiling or tiling_of(dim, q_len * group, bs, page_size)
    row_blocks = triton.cdiv(q_len * group, 64 * warpgroups)
    tiles = kv_heads * row_blocks
    ranges = aligned_ranges(max(1, num_sms(q.device) // tiles), bs)
    slots = ranges * 2 * tiles * warpgroups
    partial = empty((slots * 64 * (dim + 2),), torch.float32, q.device)
    box = box_of(k_cache, block_n)
    q_layout = gl.NVMMASharedLayout(128, 16, rank=3)
    launch(
        gqa_hopper_attention, (ranges * tiles,),
        TensorDescriptor(q, [bs * q_len, heads, dim], [q.stride(1), dim, 1], [64 // group, group, 64], q_layout),
        token_rows(k_cache, box), token_rows(v_cache, box), k_cache.stride(1) // 8, v_cache.stride(1) // 8,
        pool_of(k_cache, box, q_len, mask_len), out, block_tables, seq_lens, tree_mask, sinks,
        partial, partial[slots * 64 * dim :], counted(q.device, bs * tiles * warpgroups, "gqa_hopper"),
        call.scale * call.k_scale * LOG2E.value, call.v_scale, bs, ranges,
        block_tables.stride(0), mask_stride,
        Q_LEN=q_len, GROUP=group, KV_HEADS=kv_heads, ROW_BLOCKS=row_blocks, D=dim, PAGE=page_size,
        MASK_LEN=mask_len, HAS_SINKS=sinks is not None,
        BS=max(32, triton.next_power_of_2(bs)), BLOCK_N=block_n, STAGES=stages, BOX=box, STRIPED=striped(ranges, bs),
        MIN_BLOCKS=min_blocks, WARPGROUPS=warpgroups, num_warps=4,
        # With one range no tile is split, and no program waits for another.
        launch_cooperative_grid=ranges > 1, early=True,
    )  # fmt: skip
    return out
