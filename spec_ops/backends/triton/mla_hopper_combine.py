"""From accumulators to results for `mla_hopper.py`: whole tiles, partial results, and their combination, in Gluon.

A tile is 64 query rows by 512 columns. Each of the two warpgroups writes 256 columns, announces them and waits by itself: a
tile's counter counts two arrivals per program. Ranges are exactly equal here: whole ones were no faster (`docs/decisions.md`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from spec_ops.backends.triton.hopper import await_all, barrier, denominator, exp_shift, range_of, range_start

O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))  # a warpgroup's accumulator
O_ROW = gl.constexpr(gl.SliceLayout(1, O_LAYOUT.value))
O_COLUMN = gl.constexpr(gl.SliceLayout(0, O_LAYOUT.value))


@gluon.jit
def finish(
    acc, m, l, out, sinks, partial_acc, partial_ml, counters,
    b, row0, is_whole, slot, hm, HM: gl.constexpr, v_scale,
    ROWS: gl.constexpr, HEADS: gl.constexpr, HAS_SINKS: gl.constexpr, COLUMN0: gl.constexpr,
):  # fmt: skip
    """Write this warpgroup's columns: the result if the whole tile was seen, else a partial result."""
    local = gl.arange(0, 64, O_ROW)
    column = COLUMN0 + gl.arange(0, 256, O_COLUMN)
    in_use = row0 + local < ROWS
    m = gl.convert_layout(m, O_ROW)
    l = gl.convert_layout(l, O_ROW)
    if is_whole:
        scale = denominator(m, l, sinks, (row0 + local) % HEADS, in_use, HAS_SINKS) * v_scale
        o = out + ((b * ROWS + row0).to(gl.int64) + local) * 512
        result = (acc * gl.expand_dims(scale, 1)).to(out.dtype.element_ty)
        gl.store(gl.expand_dims(o, 1) + gl.expand_dims(column, 0), result, mask=gl.expand_dims(in_use, 1))
    else:
        base = slot.to(gl.int64) * 64
        a = partial_acc + (base + local) * 512
        gl.store(gl.expand_dims(a, 1) + gl.expand_dims(column, 0), acc, mask=gl.expand_dims(in_use, 1))
        if COLUMN0 == 0:
            gl.store(partial_ml + base * 2 + local, m)
            gl.store(partial_ml + base * 2 + 64 + local, l)
        barrier()  # every thread's part is written before one thread announces it
        gl.atomic_add(counters + b * HM + hm, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def _combine(
    partial_acc, partial_ml, out, sinks, unit, units, splits, slots, ends_first, row0, rows, v_scale, HM: gl.constexpr,
    HEADS: gl.constexpr, HAS_SINKS: gl.constexpr, COLUMN0: gl.constexpr, N_ROWS: gl.constexpr, SPLITS: gl.constexpr,
    COLUMNS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Merge 256 columns of a tile's partial results: every `units`-th piece of `N_ROWS x COLUMNS` from `unit` on.

    `SPLITS` at a time; `layout` is that of `[N_ROWS, SPLITS, COLUMNS]`.
    """
    PARTS: gl.constexpr = 256 // COLUMNS
    by_row: gl.constexpr = gl.SliceLayout(2, layout)  # [N_ROWS, SPLITS]
    merged: gl.constexpr = gl.SliceLayout(1, layout)  # [N_ROWS, COLUMNS]
    local = gl.arange(0, N_ROWS, gl.SliceLayout(1, by_row))
    split = gl.arange(0, SPLITS, gl.SliceLayout(0, by_row))
    for piece in range(unit, gl.cdiv(rows, N_ROWS) * PARTS, units):
        row = piece // PARTS * N_ROWS + local
        live = row < rows
        column0 = COLUMN0 + piece % PARTS * COLUMNS
        column = column0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
        m = gl.full([N_ROWS], float("-inf"), gl.float32, row.type.layout)
        l = gl.full([N_ROWS], 0.0, gl.float32, row.type.layout)
        acc = gl.full([N_ROWS, COLUMNS], 0.0, gl.float32, merged)
        for start in range(0, splits, SPLITS):
            i = start + split
            slot = (slots + (2 * i + gl.where(i == 0, ends_first, 0)) * HM).to(gl.int64)
            there = gl.expand_dims(i < splits, 0) & gl.expand_dims(live, 1)
            # .cg: partials come from other SMs, so L1 must not answer
            ml = partial_ml + gl.expand_dims(slot * 128, 0) + gl.expand_dims(row, 1)
            m_i = gl.load(ml, mask=there, other=float("-inf"), cache_modifier=".cg")
            l_i = gl.load(ml + 64, mask=there, other=0.0, cache_modifier=".cg")
            a = partial_acc + (gl.expand_dims(slot * 64, 0) + gl.expand_dims(row, 1)) * 512
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
        scale = denominator(m, l, sinks, (row0 + row) % HEADS, live, HAS_SINKS) * v_scale
        result = (acc * gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, merged)), 1)).to(out.dtype.element_ty)
        row = piece // PARTS * N_ROWS + gl.arange(0, N_ROWS, gl.SliceLayout(1, merged))
        column = column0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, merged))
        o = out + gl.expand_dims(row * 512, 1) + gl.expand_dims(column, 0)
        gl.store(o, result, mask=gl.expand_dims(row < rows, 1))


@gluon.jit
def combine_unfinished(
    partial_acc, partial_ml, counters, out, sinks, v_scale, index, total, ranges, range_begin, stop, hm, HM: gl.constexpr,
    first_b, first_begin, first_end, last_b, last_begin, last_end,
    ROWS: gl.constexpr, HEADS: gl.constexpr, HAS_SINKS: gl.constexpr, COLUMN0: gl.constexpr,
):  # fmt: skip
    """Every program has announced all its partial results before any waits for others'; both warpgroups announce and wait."""
    row0 = hm * 64
    rows = gl.minimum(ROWS - row0, 64)
    for side in range(2):
        b = gl.where(side == 0, first_b, last_b)
        begin = gl.where(side == 0, first_begin, last_begin)
        end = gl.where(side == 0, first_end, last_end)
        unfinished = (range_begin < stop) & ((begin < range_begin) | (end > stop))
        if unfinished & ((side == 0) | (last_b != first_b)):
            first_range = range_of(begin, total, ranges)
            splits = range_of(end - 1, total, ranges) - first_range + 1
            await_all(counters + b * HM + hm, 2 * splits)
            unit = index - first_range
            ends_first = (range_start(first_range, total, ranges) < begin).to(gl.int32)
            slots = first_range * 2 * HM + hm
            o = out + (b * ROWS + row0).to(gl.int64) * 512
            # 32 or 64 values a thread. Few splits: many rows at a time. Many splits of few rows: a row's columns in pieces.
            by_column: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 2, 16], [1, 1, 4], [2, 1, 0])
            if splits <= 2:
                _combine(
                    partial_acc, partial_ml, o, sinks, unit, splits, splits, slots, ends_first, row0, rows, v_scale, HM,
                    HEADS, HAS_SINKS, COLUMN0, 16, 2, 256, by_column,
                )  # fmt: skip
            elif splits <= 4:
                _combine(
                    partial_acc, partial_ml, o, sinks, unit, splits, splits, slots, ends_first, row0, rows, v_scale, HM,
                    HEADS, HAS_SINKS, COLUMN0, 8, 4, 256, by_column,
                )  # fmt: skip
            elif splits <= 16:
                _combine(
                    partial_acc, partial_ml, o, sinks, unit, splits, splits, slots, ends_first, row0, rows, v_scale, HM,
                    HEADS, HAS_SINKS, COLUMN0, 2, 16, 256, by_column,
                )  # fmt: skip
            elif ROWS > 16:
                _combine(
                    partial_acc, partial_ml, o, sinks, unit, splits, splits, slots, ends_first, row0, rows, v_scale, HM,
                    HEADS, HAS_SINKS, COLUMN0, 1, 32, 256, by_column,
                )  # fmt: skip
            elif splits <= 64:
                _combine(
                    partial_acc, partial_ml, o, sinks, unit, splits, splits, slots, ends_first, row0, rows, v_scale, HM,
                    HEADS, HAS_SINKS, COLUMN0, 1, 64, 64, gl.BlockedLayout([1, 1, 4], [1, 2, 16], [1, 4, 1], [2, 1, 0]),
                )  # fmt: skip
            else:
                _combine(
                    partial_acc, partial_ml, o, sinks, unit, splits, splits, slots, ends_first, row0, rows, v_scale, HM,
                    HEADS, HAS_SINKS, COLUMN0, 1, 256, 32, gl.BlockedLayout([1, 1, 4], [1, 4, 8], [1, 4, 1], [2, 1, 0]),
                )  # fmt: skip
