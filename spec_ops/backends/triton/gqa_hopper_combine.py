"""From accumulators to results for `gqa_hopper.py`: whole tiles, partial results, and their combination, in Gluon.

A tile is here the 64 query rows of one warpgroup: the two warpgroups of a program announce, await and combine by themselves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from spec_ops.backends.triton.hopper import await_all, barrier, denominator, exp_shift, range_of, range_start


@gluon.jit
def row_offset(row, kv_head, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr):
    """Where in a request's output `[Q_LEN, KV_HEADS * GROUP, D]` a row of a KV head's tile goes."""
    return (row // GROUP * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP) * D


@gluon.jit
def finish(
    acc, m, l, out, sinks, partial_acc, partial_ml, counter,
    b, row0, kv_head, is_whole, slot, v_scale,
    ROWS: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Write a warpgroup's rows: the result if the whole tile was seen, else a partial result."""
    by_row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    local = gl.arange(0, 64, by_row)
    column = gl.arange(0, D, gl.SliceLayout(0, acc.type.layout))
    row = row0 + local
    in_use = row < ROWS
    m = gl.convert_layout(m, by_row)
    l = gl.convert_layout(l, by_row)
    if is_whole:
        scale = denominator(m, l, sinks, kv_head * GROUP + row % GROUP, in_use, HAS_SINKS) * v_scale
        o = out + b.to(gl.int64) * (ROWS * KV_HEADS * D) + row_offset(row, kv_head, GROUP, KV_HEADS, D)
        result = (acc * gl.expand_dims(scale, 1)).to(out.dtype.element_ty)
        gl.store(gl.expand_dims(o, 1) + gl.expand_dims(column, 0), result, mask=gl.expand_dims(in_use, 1))
    else:
        base = slot.to(gl.int64) * 64
        a = partial_acc + (base + local) * D
        gl.store(gl.expand_dims(a, 1) + gl.expand_dims(column, 0), acc, mask=gl.expand_dims(in_use, 1))
        gl.store(partial_ml + base * 2 + local, m)
        gl.store(partial_ml + base * 2 + 64 + local, l)
        barrier()  # every thread's part is written before one thread announces it
        gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def _combine(
    partial_acc, partial_ml, out, sinks, unit, splits, slots, ends_first, row0, rows, kv_head, v_scale, TILES: gl.constexpr,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr,
    N_ROWS: gl.constexpr, SPLITS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Merge a tile's partial results: every `splits`-th piece of `N_ROWS` rows from `unit` on, `SPLITS` at a time.

    `layout` is that of `[N_ROWS, SPLITS, D]`.
    """
    by_row: gl.constexpr = gl.SliceLayout(2, layout)  # [N_ROWS, SPLITS]
    merged: gl.constexpr = gl.SliceLayout(1, layout)  # [N_ROWS, D]
    local = gl.arange(0, N_ROWS, gl.SliceLayout(1, by_row))
    split = gl.arange(0, SPLITS, gl.SliceLayout(0, by_row))
    column = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    out_column = gl.arange(0, D, gl.SliceLayout(0, merged))
    for piece in range(unit, gl.cdiv(rows, N_ROWS), splits):
        row = piece * N_ROWS + local
        live = row < rows
        m = gl.full([N_ROWS], float("-inf"), gl.float32, row.type.layout)
        l = gl.full([N_ROWS], 0.0, gl.float32, row.type.layout)
        acc = gl.full([N_ROWS, D], 0.0, gl.float32, merged)
        for start in range(0, splits, SPLITS):
            i = start + split
            slot = (slots + (2 * i + gl.where(i == 0, ends_first, 0)) * TILES).to(gl.int64)
            there = gl.expand_dims(i < splits, 0) & gl.expand_dims(live, 1)
            # .cg: partials come from other SMs, so L1 must not answer
            ml = partial_ml + gl.expand_dims(slot * 128, 0) + gl.expand_dims(row, 1)
            m_i = gl.load(ml, mask=there, other=float("-inf"), cache_modifier=".cg")
            l_i = gl.load(ml + 64, mask=there, other=0.0, cache_modifier=".cg")
            a = partial_acc + (gl.expand_dims(slot * 64, 0) + gl.expand_dims(row, 1)) * D
            a = gl.expand_dims(a, 2) + gl.expand_dims(gl.expand_dims(column, 0), 0)
            a_i = gl.load(a, mask=gl.expand_dims(there, 2), other=0.0, cache_modifier=".cg")
            m_new = gl.maximum(m, gl.max(m_i, 1))
            shift = exp_shift(m_new)
            shrink = gl.exp2(m - shift)
            grow = gl.exp2(m_i - gl.expand_dims(shift, 1))
            factor = gl.convert_layout(shrink, gl.SliceLayout(1, merged))
            acc = acc * gl.expand_dims(factor, 1) + gl.sum(a_i * gl.expand_dims(grow, 2), 1)
            l = l * shrink + gl.sum(l_i * grow, 1)
            m = m_new
        scale = denominator(m, l, sinks, kv_head * GROUP + (row0 + row) % GROUP, live, HAS_SINKS) * v_scale
        result = (acc * gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, merged)), 1)).to(out.dtype.element_ty)
        row = piece * N_ROWS + gl.arange(0, N_ROWS, gl.SliceLayout(1, merged))
        o = out + row_offset(row0 + row, kv_head, GROUP, KV_HEADS, D)
        gl.store(gl.expand_dims(o, 1) + gl.expand_dims(out_column, 0), result, mask=gl.expand_dims(row < rows, 1))


@gluon.jit
def combine_unfinished(
    partial_acc, partial_ml, counters, out, sinks, v_scale, index, total, ranges, range_begin, stop, tile, row0, kv_head,
    first_b, first_begin, first_end, last_b, last_begin, last_end, TILES: gl.constexpr,
    ROWS: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Every warpgroup has announced all its partial results before any waits for others'."""
    rows = gl.minimum(ROWS - row0, 64)
    for side in range(2):
        b = gl.where(side == 0, first_b, last_b)
        begin = gl.where(side == 0, first_begin, last_begin)
        end = gl.where(side == 0, first_end, last_end)
        unfinished = (range_begin < stop) & ((begin < range_begin) | (end > stop))
        if unfinished & ((side == 0) | (last_b != first_b)):
            first_range = range_of(begin, total, ranges)
            splits = range_of(end - 1, total, ranges) - first_range + 1
            await_all(counters + b * TILES + tile, splits)
            unit = index - first_range
            ends_first = (range_start(first_range, total, ranges) < begin).to(gl.int32)
            slots = first_range * 2 * TILES + tile
            o = out + b.to(gl.int64) * (ROWS * KV_HEADS * D)
            # 4,096 numbers a turn for head_dim 64. Few splits: many rows at a time.
            if splits <= 4:
                _combine(
                    partial_acc, partial_ml, o, sinks, unit, splits, slots, ends_first, row0, rows, kv_head, v_scale, TILES,
                    GROUP, KV_HEADS, D, HAS_SINKS, 16, 4, gl.BlockedLayout([1, 1, 4], [2, 1, 16], [4, 1, 1], [2, 1, 0]),
                )  # fmt: skip
            elif splits <= 16:
                _combine(
                    partial_acc, partial_ml, o, sinks, unit, splits, slots, ends_first, row0, rows, kv_head, v_scale, TILES,
                    GROUP, KV_HEADS, D, HAS_SINKS, 4, 16, gl.BlockedLayout([1, 1, 4], [1, 2, 16], [4, 1, 1], [2, 1, 0]),
                )  # fmt: skip
            else:
                _combine(
                    partial_acc, partial_ml, o, sinks, unit, splits, slots, ends_first, row0, rows, kv_head, v_scale, TILES,
                    GROUP, KV_HEADS, D, HAS_SINKS, 1, 64, gl.BlockedLayout([1, 1, 4], [1, 2, 16], [1, 4, 1], [2, 1, 0]),
                )  # fmt: skip
