"""Absorbed-MLA paged attention for Hopper (sm_90), in Gluon: draft decode, verify and draft extend in one launch.

Same contract and division of work as `split_kv.py` (see `schedule.py`); what differs is the inside of a program. A tile is 64
query rows. Their accumulator, 64 x 512 float32, fills the registers of two warpgroups, so two tiles cannot take turns on the
tensor cores; two KV blocks of one tile do (an idea of FlashMLA's:
https://github.com/deepseek-ai/FlashMLA/blob/main/docs/20250422-new-kernel-deep-dive.md):

- the *even* warpgroup computes logits and weights of blocks 0, 2, 4, ... and accumulates columns 0 to 255 over all blocks,
- the *odd* warpgroup those of blocks 1, 3, 5, ... and columns 256 to 511,
- a third partition loads queries and KV blocks, half a block at a time (`pages.py`).

Weights and row maxima go through shared memory, each block's relative to the maximum of the blocks up to it. Unlike in
FlashMLA, both warpgroups then finish a block before they start its partner, so that a block is free for reloading half an
iteration earlier. Weights take the place of their block's rotary part, which is no longer read by then.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.hopper.combine import combine_unfinished, finish, finish_part, striped
from spec_ops.backends.triton.attention.hopper.host import (
    aligned_ranges,
    box_of,
    is_token_rows,
    pool_of,
    query_rows,
    token_rows,
    tree_arguments,
)
from spec_ops.backends.triton.attention.hopper.mask import seen_slots, visible, zero_rows
from spec_ops.backends.triton.attention.hopper.mla_load import (
    BARRIERS,
    EVEN_LEFT,
    EVEN_RIGHT,
    EVEN_SUM,
    EVEN_WEIGHTS,
    FREE,
    ODD_LEFT,
    ODD_RIGHT,
    ODD_SUM,
    ODD_WEIGHTS,
    QUERIES,
    load,
)
from spec_ops.backends.triton.attention.hopper.mla_paths import (
    gathered,
    has_partner,
    on_path,
    plan_width,
    queries_of_a_tile,
    tail_of,
    takes_turns,
    turns_of,
    walk,
)
from spec_ops.backends.triton.attention.hopper.pages import arrivals, await_copies, loading_warps
from spec_ops.backends.triton.attention.hopper.pieces import fold_pieces, piece_slot, slots_of
from spec_ops.backends.triton.attention.hopper.program import (
    LOG2E,
    await_predecessors,
    block_counts,
    exp_shift,
    opaque_zero,
    place,
)
from spec_ops.backends.triton.attention.operands import packed, result_of, unit_rows, window_within
from spec_ops.backends.triton.runtime.launch import arch_of, launch, num_sms, on_gpu
from spec_ops.backends.triton.runtime.repeat import counted, empty

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # logits
S_ROW = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))  # a warpgroup's accumulator
O_ROW = gl.constexpr(gl.SliceLayout(1, O_LAYOUT.value))
P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, O_LAYOUT.value, 2))
ROW_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Blocks that a request counts beyond its own, where ranges have at least so many; timed (`docs/notebook/pages.md`).
EXTRA, EXTRA_FROM = 4, 8


@gluon.jit
def _scale_rows(acc, factor):
    return acc * gl.expand_dims(gl.convert_layout(factor, O_ROW), 1)


@gluon.jit
def _logits(
    q_smem, q_rest_smem, kv_smem, kv_rest_smem, bars, phase, ODD: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Products `[64, 64]` of the queries with this warpgroup's block: the half that arrives first comes first."""
    s = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    z = opaque_zero()
    if ODD:
        await_copies(bars.index(ODD_LEFT), phase, BOX)
        s = warpgroup_mma(q_smem.index(z + 0), kv_smem.index(z + 2).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rest_smem.index(z), kv_rest_smem.index(z + 1).permute((1, 0)), s, is_async=True)
        await_copies(bars.index(ODD_RIGHT), phase, BOX)
        s = warpgroup_mma(q_smem.index(z + 1), kv_smem.index(z + 3).permute((1, 0)), s, is_async=True)
    else:
        await_copies(bars.index(EVEN_LEFT), phase, BOX)
        s = warpgroup_mma(q_smem.index(z + 0), kv_smem.index(z + 0).permute((1, 0)), s, use_acc=False, is_async=True)
        await_copies(bars.index(EVEN_RIGHT), phase, BOX)
        s = warpgroup_mma(q_smem.index(z + 1), kv_smem.index(z + 1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q_rest_smem.index(z), kv_rest_smem.index(z + 0).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def _attend(
    q_smem, q_rest_smem, kv_smem, kv_rest_smem, row_smem, bars,
    out, seq_lens, tree_mask, mask_stride, sinks, partial_acc, partial_ml, counters, qk_scale, v_scale,
    index, share, longer, range_begin, stop, b, begin, extra, hm, HM: gl.constexpr,
    ROWS: gl.constexpr, HEADS: gl.constexpr, Q_LEN: gl.constexpr, MASK_LEN: gl.constexpr, HAS_SINKS: gl.constexpr,
    STRIPED: gl.constexpr, ODD: gl.constexpr, BOX: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: logits and weights of every other block, and half of the output columns of all blocks.

    `PIECE`: each piece of so many blocks is an online softmax of its own (`pieces.py`); 0: all blocks of a range are one.
    """
    row0 = hm * 64
    row = row0 + gl.arange(0, 64, S_ROW)
    query = row // HEADS
    even_max = row_smem.index(0)
    odd_max = row_smem.index(1)
    sums = row_smem.index(2)
    TREE: gl.constexpr = takes_turns(PIECE, MASK_LEN)
    HOLES: gl.constexpr = MASK_LEN > Q_LEN and not TREE  # paths' rows are zeros where nobody sees any
    even_weights = kv_rest_smem.index(0)
    odd_weights = kv_rest_smem.index(1)
    segments = 0
    pieces = 0
    evens = 0
    odds = 0
    first_b = b
    first_begin = begin
    position = range_begin
    while ((position if PIECE > 0 else begin) < stop) & (range_begin < stop):
        seq_len = gl.load(seq_lens + b)
        count = gl.cdiv(gl.maximum(seq_len, 0), 64)
        end = begin + count
        if count > 0:
            last = gl.minimum(end, stop) - begin
            first = gl.maximum(range_begin - begin, 0)
            piece, until = first, last
            if PIECE > 0:
                piece = position - begin
                until = gl.minimum(piece + PIECE, last)
            walked, lonely = until, last  # blocks of `[piece, walked)` are walked, and from `lonely` on without partners
            words = query.to(gl.int64)
            if TREE:
                # The kernel's `tree_mask` is `plan`, and `words` what that says of each row.
                plan = tree_mask + b * mask_stride
                local = query - row0 // HEADS
                words = gl.load(plan + (1 + queries_of_a_tile(Q_LEN, HEADS)) + local, mask=row < ROWS, other=0)
                turns, reaches = turns_of(plan)
                prefix, tail = tail_of(seq_len, MASK_LEN)
                walked, lonely = walk(piece, until, tail, turns, reaches, PIECE)
                ends = until == last
                last = walked
            elif MASK_LEN > 0:
                words = gl.load(tree_mask + b * mask_stride + query, mask=row < ROWS, other=0)
            all_seen = seq_len - (MASK_LEN if MASK_LEN > 0 else Q_LEN - 1)  # keys before this are seen by every query
            some_seen = seq_len  # keys before this are seen by some query
            slots = 0
            if HOLES:
                some_seen = seq_len - MASK_LEN
                slots = seen_slots(tree_mask + b * mask_stride, Q_LEN)
            m = gl.full([64], float("-inf"), gl.float32, S_ROW)
            l = gl.full([64], 0.0, gl.float32, S_ROW)
            acc = gl.zeros([64, 256], gl.float32, O_LAYOUT)
            if PIECE > 0:
                # Not again: where the last piece has no block for the odd warpgroup, the next queries may have come.
                mbarrier.wait(bars.index(QUERIES), segments & 1, pred=piece == first)
            else:
                mbarrier.wait(bars.index(QUERIES), segments & 1)

            for k in range(piece, walked, 2):
                z = opaque_zero()
                even_phase = evens & 1
                odd_phase = odds & 1
                start = k * 64
                if ODD:
                    if has_partner(k, last, lonely, TREE):
                        s = _logits(q_smem, q_rest_smem, kv_smem, kv_rest_smem, bars, odd_phase, True, BOX)
                        if TREE:
                            mbarrier.arrive(bars.index(QUERIES + FREE), pred=ends & (k + 2 >= last))
                            if k + 1 >= tail:
                                s = on_path(s, k + 1, tail, prefix, piece, words, PIECE)
                        else:
                            mbarrier.arrive(bars.index(QUERIES + FREE), pred=k + 3 >= last)
                            if start + 128 > all_seen:
                                s = visible(s, start + 64, seq_len, query, words, Q_LEN, MASK_LEN, 1, False)
                        top = gl.max(s, 1) * qk_scale

                        mbarrier.wait(bars.index(EVEN_WEIGHTS), even_phase)
                        m_even = even_max.load(S_ROW)
                        shrink = gl.exp2(m - exp_shift(m_even))
                        m = gl.maximum(m_even, top)
                        odd_max.store(m)
                        shift = exp_shift(m)
                        p = gl.exp2(s * qk_scale - gl.expand_dims(shift, 1))
                        weights = p.to(q_smem.dtype)
                        odd_weights.store(weights)
                        fence_async_shared()
                        # Ahead of this warpgroup's own product: the even one has nothing to do until it hears this.
                        mbarrier.arrive(bars.index(ODD_WEIGHTS))
                        acc = _scale_rows(acc, shrink)
                        if HOLES:  # noqa: SIM102  decided while compiling: else only a last block, which has no partner
                            if start + 64 > some_seen:
                                zero_rows(kv_smem.index(1), seq_len - start, slots, MASK_LEN, HOLES)
                        token = warpgroup_mma(kv_rest_smem.index(z), kv_smem.index(z + 1), acc, is_async=True)
                        l = l * shrink
                        shrink = gl.exp2(m_even - shift)
                        l = l * shrink + gl.sum(p, 1)
                        acc = warpgroup_mma_wait(0, [token])
                        mbarrier.arrive(bars.index(EVEN_RIGHT + FREE))
                        acc = _scale_rows(acc, shrink)
                        if not TREE:  # noqa: SIM102
                            if start + 128 > some_seen:
                                zero_rows(kv_smem.index(3), seq_len - start - 64, slots, MASK_LEN, HOLES)
                        token = warpgroup_mma(gl.convert_layout(weights, P_LAYOUT), kv_smem.index(z + 3), acc, is_async=True)
                        acc = warpgroup_mma_wait(0, [token])
                        mbarrier.arrive(bars.index(ODD_RIGHT + FREE))
                    else:  # a block without a partner
                        mbarrier.wait(bars.index(EVEN_WEIGHTS), even_phase)
                        if TREE:
                            mbarrier.arrive(bars.index(QUERIES + FREE), pred=ends & (k + 2 >= last))
                        else:
                            mbarrier.arrive(bars.index(QUERIES + FREE), pred=k == first)
                        m_even = even_max.load(S_ROW)
                        shrink = gl.exp2(m - exp_shift(m_even))
                        l = l * shrink
                        m = m_even
                        acc = _scale_rows(acc, shrink)
                        if not TREE:  # noqa: SIM102
                            if start + 64 > some_seen:
                                zero_rows(kv_smem.index(1), seq_len - start, slots, MASK_LEN, HOLES)
                        token = warpgroup_mma(kv_rest_smem.index(z), kv_smem.index(z + 1), acc, is_async=True)
                        acc = warpgroup_mma_wait(0, [token])
                        mbarrier.arrive(bars.index(EVEN_RIGHT + FREE))
                else:
                    s = _logits(q_smem, q_rest_smem, kv_smem, kv_rest_smem, bars, even_phase, False, BOX)
                    if TREE:
                        mbarrier.arrive(bars.index(QUERIES + FREE), pred=ends & (k + 2 >= last))
                        if k >= tail:
                            s = on_path(s, k, tail, prefix, piece, words, PIECE)
                    else:
                        mbarrier.arrive(bars.index(QUERIES + FREE), pred=k + 2 >= last)
                        if start + 64 > all_seen:
                            s = visible(s, start, seq_len, query, words, Q_LEN, MASK_LEN, 1, False)
                    m_even = gl.maximum(m, gl.max(s, 1) * qk_scale)
                    even_max.store(m_even)
                    shift = exp_shift(m_even)
                    p = gl.exp2(s * qk_scale - gl.expand_dims(shift, 1))
                    weights = p.to(q_smem.dtype)
                    even_weights.store(weights)
                    fence_async_shared()
                    mbarrier.arrive(bars.index(EVEN_WEIGHTS))
                    shrink = gl.exp2(m - shift)
                    l = l * shrink + gl.sum(p, 1)
                    m = m_even
                    acc = _scale_rows(acc, shrink)
                    if not TREE:  # noqa: SIM102
                        if start + 64 > some_seen:
                            zero_rows(kv_smem.index(0), seq_len - start, slots, MASK_LEN, HOLES)
                    token = warpgroup_mma(gl.convert_layout(weights, P_LAYOUT), kv_smem.index(z), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, [token])
                    mbarrier.arrive(bars.index(EVEN_LEFT + FREE))
                    if has_partner(k, last, lonely, TREE):
                        mbarrier.wait(bars.index(ODD_WEIGHTS), odd_phase)
                        m = odd_max.load(S_ROW)
                        shrink = gl.exp2(m_even - exp_shift(m))
                        l = l * shrink
                        acc = _scale_rows(acc, shrink)
                        if not TREE:  # noqa: SIM102
                            if start + 128 > some_seen:
                                zero_rows(kv_smem.index(2), seq_len - start - 64, slots, MASK_LEN, HOLES)
                        token = warpgroup_mma(kv_rest_smem.index(z + 1), kv_smem.index(z + 2), acc, is_async=True)
                        acc = warpgroup_mma_wait(0, [token])
                        mbarrier.arrive(bars.index(ODD_LEFT + FREE))
                evens += 1
                odds += has_partner(k, last, lonely, TREE).to(gl.int32)

            turn = (pieces if PIECE > 0 else segments) & 1
            if ODD:
                mbarrier.wait(bars.index(EVEN_SUM), turn)
                l = l + sums.load(S_ROW)
                sums.store(l)
                mbarrier.arrive(bars.index(ODD_SUM))
            else:
                sums.store(l)
                mbarrier.arrive(bars.index(EVEN_SUM))
                mbarrier.wait(bars.index(ODD_SUM), turn)
                l = sums.load(S_ROW)
            if PIECE > 0:
                segments += (ends if TREE else until == last).to(gl.int32)
                pieces += 1
                position = begin + until
                is_whole = count <= PIECE
                slot = piece_slot(b, begin, piece, PIECE) * HM + hm
                finish(
                    acc, m, l, out, sinks, partial_acc, partial_ml, counters + b * HM + hm,
                    b, row0, 0, is_whole, slot, v_scale, ROWS, HEADS, 1, 512, HAS_SINKS, 256 if ODD else 0, STRIPED, True,
                )  # fmt: skip
            else:
                segments += 1
                finish_part(
                    acc, m, l, out, sinks, partial_acc, partial_ml, counters + b * HM + hm, index, share, longer, stop, first,
                    end, b, hm, row0, 0, v_scale, HM, ROWS, HEADS, 1, 512, HAS_SINKS, 256 if ODD else 0, STRIPED,
                )  # fmt: skip
        if PIECE > 0:
            passed = position >= end
            begin = gl.where(passed, end, begin)
            b += passed.to(gl.int32)
        else:
            begin = end + gl.where(count > 0, extra, 0)
            b += 1
    if PIECE > 0:
        fold_pieces(
            partial_acc, partial_ml, counters, out, sinks, v_scale, seq_lens, range_begin, stop, hm, row0,
            first_b, first_begin, HM, ROWS, HEADS, HAS_SINKS, 256 if ODD else 0, PIECE,
        )  # fmt: skip
    else:
        combine_unfinished(
            partial_acc, partial_ml, counters, out, sinks, v_scale, index, share, longer, range_begin, stop, hm, row0, 0,
            first_b, first_begin, b - 1, begin - extra, HM, ROWS, HEADS, 1, 512, HAS_SINKS,
            256 if ODD else 0, 256, STRIPED,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["bs", "ranges", "table_stride", "mask_stride", "kv_distance", "pool"])
def mla_hopper_attention(
    q_rows, kv_rows, kv_distance, pool, out, block_tables, seq_lens, tree_mask, sinks,
    partial_acc, partial_ml, counters,
    qk_scale, v_scale, bs, ranges, table_stride, mask_stride,
    Q_LEN: gl.constexpr, HEADS: gl.constexpr, ROW_BLOCKS: gl.constexpr, PAGE: gl.constexpr, MASK_LEN: gl.constexpr,
    HAS_SINKS: gl.constexpr, BS: gl.constexpr, Q_BOX: gl.constexpr, BOX: gl.constexpr, STRIPED: gl.constexpr,
    MIN_BLOCKS: gl.constexpr, EXTRA: gl.constexpr, EXTRA_FROM: gl.constexpr, PIECE: gl.constexpr, PDL: gl.constexpr,
    path_rows=None,
):  # fmt: skip
    """Descriptors: queries `[bs * Q_LEN * HEADS, 576]` in `Q_BOX` x 64; cache `[tokens, 576]` in `BOX` x 64 (`pages.py`).

    With a `PIECE` and a tree `path_rows` are the keys of its paths, and `tree_mask` is a plan (`mla_paths.gathered`).
    """
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        mbarrier.init(bars.index(i), count=2 if i == QUERIES + FREE else arrivals(BOX) if i < QUERIES else 1)
    fence_async_shared()
    await_predecessors(PDL)

    ROWS: gl.constexpr = Q_LEN * HEADS
    HM: gl.constexpr = ROW_BLOCKS
    pid = gl.program_id(0)
    index = pid // HM
    hm = pid % HM

    ids, in_use, counts = block_counts(seq_lens, bs, BS, 64)
    total = gl.sum(counts, 0)

    # Requests without keys belong to no range.
    if gl.sum(((counts == 0) & in_use).to(gl.int32), 0) > 0:
        rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        zero_row = gl.arange(0, 64, gl.SliceLayout(1, rows_layout))
        zero_column = gl.arange(0, 512, gl.SliceLayout(0, rows_layout))
        for empty in range(index, bs, ranges):
            if gl.load(seq_lens + empty) <= 0:
                o = out + ((empty * ROWS + hm * 64).to(gl.int64) + zero_row) * 512
                zero = gl.full([64, 512], 0.0, out.dtype.element_ty, rows_layout)
                mask = gl.expand_dims(hm * 64 + zero_row < ROWS, 1)
                gl.store(gl.expand_dims(o, 1) + gl.expand_dims(zero_column, 0), zero, mask=mask)

    # Fewer ranges than programs where a range would be too short to pay for its partial result.
    ranges = gl.maximum(gl.minimum(ranges, gl.cdiv(total, MIN_BLOCKS)), 1)
    share = total // ranges
    longer = total - share * ranges
    plan, plan_stride, extra = None, None, None
    if PIECE == 0:
        # Where a range goes on into another request it loads queries and writes results once more. So a request counts as more
        # blocks than it has, unless requests end where ranges end.
        apart = (longer > 0) | (gl.sum(counts % gl.maximum(share, 1), 0) > 0)
        extra = gl.where(apart & (share >= EXTRA_FROM) & (bs > 1), EXTRA, 0)
        counts = gl.where(counts > 0, counts + extra, 0)
        total = gl.sum(counts, 0)
        share = total // ranges
        longer = total - share * ranges
    position, stop, b, begin = place(index, ranges, share, longer, counts, ids, in_use, PIECE, extra)

    if takes_turns(PIECE, MASK_LEN):
        plan = tree_mask + hm * plan_width(Q_LEN, HEADS)
        plan_stride = mask_stride
        tree_mask = plan

    dtype: gl.constexpr = q_rows.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, 256], shared)
    q_rest_smem = gl.allocate_shared_memory(dtype, [1, 64, 64], shared)
    kv_smem = gl.allocate_shared_memory(dtype, [4, 64, 256], shared)  # even left, even right, odd left, odd right
    kv_rest_smem = gl.allocate_shared_memory(dtype, [2, 64, 64], shared)
    row_smem = gl.allocate_shared_memory(gl.float32, [3, 64], ROW_SHARED)

    gl.warp_specialize(
        [
            (_attend, (
                q_smem, q_rest_smem, kv_smem, kv_rest_smem, row_smem, bars,
                out, seq_lens, tree_mask, mask_stride, sinks, partial_acc, partial_ml, counters, qk_scale, v_scale,
                index, share, longer, position, stop, b, begin, extra, hm, HM, ROWS, HEADS, Q_LEN, MASK_LEN, HAS_SINKS,
                STRIPED, False, BOX, PIECE,
            )),
            (_attend, (
                q_smem, q_rest_smem, kv_smem, kv_rest_smem, row_smem, bars,
                out, seq_lens, tree_mask, mask_stride, sinks, partial_acc, partial_ml, counters, qk_scale, v_scale,
                index, share, longer, position, stop, b, begin, extra, hm, HM, ROWS, HEADS, Q_LEN, MASK_LEN, HAS_SINKS,
                STRIPED, True, BOX, PIECE,
            )),
            (load, (
                q_rows, kv_rows, kv_distance, q_smem, q_rest_smem, kv_smem, kv_rest_smem, bars,
                block_tables, seq_lens, table_stride, pool, position, stop, b, begin, extra, hm * 64, path_rows, plan,
                plan_stride, ROWS, PAGE, Q_BOX, BOX, MASK_LEN, PIECE,
            )),
        ],
        [4, loading_warps(BOX)],
        [232, 40],
    )  # fmt: skip


def supports(call: AttentionCall) -> bool:
    """Whether `mla` here can serve a call, by shapes, dtypes, strides and the alignment of the cache."""
    q, kv_cache = call.q, call.k_cache
    pages, page_size, dim = kv_cache.shape
    return (
        on_gpu(q)
        and arch_of(q.device) == 90
        and (call.kv_lora_rank, dim) == (512, 576)
        and q.dtype in (torch.bfloat16, torch.float16)
        and kv_cache.dtype == q.dtype
        and pages > 0
        and is_token_rows(kv_cache)
        and window_within(call.window_left, call.block_tables, page_size) < 0
        and call.softcap == 0
    )


def mla(call: AttentionCall, min_blocks: int | None = None, piece: int = 0, ranges: int | None = None) -> torch.Tensor:
    """mla_draft_decode, mla_target_verify, mla_draft_extend, where `supports` says so.

    Args:
        piece: blocks of a piece, an even number: the result is then batch-invariant (`pieces.py`).
        ranges: into how many the blocks are divided; default as many as the GPU has room for at once.
    """
    kv_cache, kv_scale, seq_lens = call.k_cache, call.k_scale, call.seq_lens.contiguous()
    bs, q_len, heads, dim = call.q.shape
    out = result_of(call)
    if out.numel() == 0:
        return out
    q, block_tables = query_rows(call.q), unit_rows(call.block_tables)
    sinks = packed(call.sinks)
    tree_mask, mask_stride, mask_len = tree_arguments(call)
    rows = q_len * heads
    tiles = triton.cdiv(rows, 64)
    ranges = ranges or aligned_ranges(max(1, num_sms(q.device) // tiles), bs)
    slots = tiles * (slots_of(call, bs, piece) if piece else ranges * 2)
    partial = empty((slots * 64 * (512 + 2),), torch.float32, q.device)
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    q_box = max(8, min(64, triton.next_power_of_2(rows)))
    box = box_of(kv_cache, 64)
    pool = pool_of(kv_cache, box, q_len, mask_len)
    path_rows = None
    if tree_mask is not None and piece:
        pool = None  # what no query sees is not read
        tree_mask, path_rows, mask_stride = gathered(call, tree_mask, block_tables, seq_lens, box)
    launch(
        mla_hopper_attention, (ranges * tiles,),
        TensorDescriptor(q, [bs * rows, dim], [dim, 1], [q_box, 64], layout),
        token_rows(kv_cache, box), kv_cache.stride(1) // 8, pool,
        out, block_tables, seq_lens, tree_mask, sinks,
        partial, partial[slots * 64 * 512 :], counted(q.device, bs * tiles, "mla_hopper"),
        call.scale * kv_scale * LOG2E.value, kv_scale, bs, ranges,
        block_tables.stride(0), mask_stride,
        Q_LEN=q_len, HEADS=heads, ROW_BLOCKS=tiles, PAGE=kv_cache.shape[1],
        MASK_LEN=mask_len, HAS_SINKS=sinks is not None,
        BS=max(256 if piece else 32, triton.next_power_of_2(bs)), Q_BOX=q_box, BOX=box,
        STRIPED=not piece and striped(ranges, bs), MIN_BLOCKS=min_blocks or (1 if tiles == 1 else 2), PIECE=piece,
        EXTRA=EXTRA, EXTRA_FROM=EXTRA_FROM, path_rows=path_rows,
        num_warps=4, **({"enable_fp_fusion": False} if piece else {}),
        # With one range no tile is split, and no program waits for another.
        launch_cooperative_grid=ranges > 1, early=True,
    )  # fmt: skip
    return out
