"""From accumulators to results for `mla_few.py`: whole tiles, partial results, and their combination, in Gluon.

A tile is here all rows of a request, up to 16, by 512 columns, transposed: `[512, N]`. One warpgroup of a program has all of
it, so a program announces once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from spec_ops.backends.triton.attention.hopper.program import await_all, barrier, denominator, exp_shift, tile_splits


@gluon.jit
def finish(
    acc, m, l, out, sinks, partial_acc, partial_ml, counters, b, is_whole, slot, v_scale,
    ROWS: gl.constexpr, HEADS: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Write a tile: the result if all of it was seen, else a partial result `[512, N]`, its maxima and sums, announced."""
    layout: gl.constexpr = acc[0].type.layout
    N: gl.constexpr = acc[0].shape[1]
    row = gl.arange(0, N, gl.SliceLayout(0, layout))
    if is_whole:
        scale = gl.expand_dims(denominator(m, l, sinks, row % HEADS, row < ROWS, HAS_SINKS) * v_scale, 0)
        by_row: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        out_row = gl.arange(0, N, gl.SliceLayout(0, by_row))
        out_column = gl.arange(0, 64, gl.SliceLayout(1, by_row))
        o = out + b.to(gl.int64) * (ROWS * 512)
        o = o + gl.expand_dims(out_row * 512, 0) + gl.expand_dims(out_column, 1)
        for c in gl.static_range(8):
            result = gl.convert_layout((acc[c] * scale).to(out.dtype.element_ty), by_row)
            gl.store(o + c * 64, result, mask=gl.expand_dims(out_row < ROWS, 0))
    else:
        column = gl.arange(0, 64, gl.SliceLayout(1, layout))
        a = partial_acc + slot.to(gl.int64) * (512 * N) + gl.expand_dims(column * N, 1) + gl.expand_dims(row, 0)
        for c in gl.static_range(8):
            gl.store(a + c * 64 * N, acc[c])
        ml = partial_ml + slot * (2 * N) + row
        gl.store(ml, m)
        gl.store(ml + N, l)
        barrier()  # every thread's part is written before one thread announces it
        gl.atomic_add(counters + b, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def _combine(
    partial_acc, partial_ml, out, sinks, unit, splits, slots, v_scale, N: gl.constexpr, ROWS: gl.constexpr,
    HEADS: gl.constexpr, HAS_SINKS: gl.constexpr, SPLITS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Merge a tile's partial results: every `splits`-th piece of `COLUMNS` columns from `unit` on, `SPLITS` results at a time.

    `layout` is that of `[SPLITS, COLUMNS, N]`.
    """
    by_split: gl.constexpr = gl.SliceLayout(1, layout)  # [SPLITS, N]
    merged: gl.constexpr = gl.SliceLayout(0, layout)  # [COLUMNS, N]
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, by_split))
    row = gl.arange(0, N, gl.SliceLayout(0, by_split))
    a_row = gl.arange(0, N, gl.SliceLayout(0, merged))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, merged))
    tile = gl.expand_dims(column * N, 1) + gl.expand_dims(a_row, 0)
    for piece in range(unit, 512 // COLUMNS, splits):
        m = gl.full([N], float("-inf"), gl.float32, row.type.layout)
        l = gl.full([N], 0.0, gl.float32, row.type.layout)
        acc = gl.full([COLUMNS, N], 0.0, gl.float32, merged)
        for start in range(0, splits, SPLITS):
            i = start + split
            slot = slots + 2 * i + (i < splits - 1).to(gl.int32)
            there = gl.expand_dims(i < splits, 1)
            # .cg: partials come from other SMs, so L1 must not answer
            ml = partial_ml + gl.expand_dims(slot * (2 * N), 1) + gl.expand_dims(row, 0)
            m_i = gl.load(ml, mask=there, other=float("-inf"), cache_modifier=".cg")
            l_i = gl.load(ml + N, mask=there, other=0.0, cache_modifier=".cg")
            a = partial_acc + gl.expand_dims(gl.expand_dims(slot.to(gl.int64) * (512 * N), 1), 1)
            a = a + gl.expand_dims(piece * (COLUMNS * N) + tile, 0)
            a_i = gl.load(a, mask=gl.expand_dims(there, 1), other=0.0, cache_modifier=".cg")
            m_new = gl.maximum(m, gl.max(m_i, 0))
            shift = exp_shift(m_new)
            shrink = gl.exp2(m - shift)
            grow = gl.exp2(m_i - gl.expand_dims(shift, 0))
            factor = gl.convert_layout(shrink, gl.SliceLayout(0, merged))
            acc = acc * gl.expand_dims(factor, 0) + gl.sum(a_i * gl.expand_dims(grow, 1), 0)
            l = l * shrink + gl.sum(l_i * grow, 0)
            m = m_new
        scale = denominator(m, l, sinks, row % HEADS, row < ROWS, HAS_SINKS) * v_scale
        result = acc * gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(0, merged)), 0)
        o = out + piece * COLUMNS + gl.expand_dims(column, 1) + gl.expand_dims(a_row * 512, 0)
        gl.store(o, result.to(out.dtype.element_ty), mask=gl.expand_dims(a_row < ROWS, 0))


@gluon.jit
def combine_unfinished(
    partial_acc, partial_ml, counters, out, sinks, v_scale, index, share, longer, range_begin, stop,
    first_b, first_begin, last_b, last_end,
    N: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Every program has announced all its partial results before any waits for others'."""
    LANES: gl.constexpr = N // 4  # of four rows each
    sides = gl.where(range_begin < stop, gl.where(first_b == last_b, 1, 2), 0)
    for side in range(sides):
        b = gl.where(side == 0, first_b, last_b)
        first_range, splits = tile_splits(side, sides, first_begin, last_end, stop, share, longer)
        if splits > 1:
            await_all(counters + b, splits)
            unit = index - first_range
            slots = first_range * 2
            o = out + b.to(gl.int64) * (ROWS * 512)
            by_column: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // LANES, LANES], [1, 4, 1], [2, 1, 0])
            by_split: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // LANES, LANES], [4, 1, 1], [2, 1, 0])
            # 8,192 numbers an iteration, of the next power of two of splits, up to 64. Few splits: wide pieces.
            for power in gl.static_range(1, 7):
                if (splits > 2**power // 2) & ((splits <= 2**power) | (power == 6)):
                    _combine(
                        partial_acc, partial_ml, o, sinks, unit, splits, slots, v_scale, N, ROWS, HEADS, HAS_SINKS,
                        2**power, 8192 // N // 2**power, by_column if power < 5 else by_split,
                    )  # fmt: skip
