"""From accumulators to results for `gqa.py` and `mla.py`: whole tiles, partial results, and their combination.

A tile is 64 query rows. GQA's has the columns of one warpgroup, and the two warpgroups of a program announce, await and combine
by themselves; MLA's is shared by two warpgroups with half of the columns each (`COLUMN0`), and counts two arrivals a program.

Partial results lie in memory in one of two ways (`striped`). With up to 16 splits a tile, by strips of 8 columns: `[D / 8, 64
rows, 8]`. In the layout that `wgmma` leaves in registers four threads hold 8 columns of a row, so a warp writes 256 bytes in a
row; and a program combines whole strips, so a thread needs the weights of one row and all its loads fit in one iteration. With
more splits, by rows, of which each program combines one or two. An iteration costs 1 to 2 us, and so does code that is in no
cache yet (`docs/notebook/mla.md`).

A tile in two needs none of that: its second part is the first thing that the next range walks, so the range that has the first
one waits for it, if at all, and adds it to what lies in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from spec_ops.backends.triton.attention.hopper.program import (
    await_all,
    barrier,
    denominator,
    exp_shift,
    range_start,
    tile_splits,
)


def striped(ranges: int, bs: int) -> bool:
    """How partial results are to lie: there are `ranges` ranges for `bs` requests."""
    return ranges <= 16 * bs


@gluon.constexpr_function
def _wide(columns):
    """A layout of `[64, columns]` in which a thread has 8 columns in a row, of the rows that `wgmma` gives to its warp."""
    more = [[0, 2**i] for i in range(5, 10) if 2**i < columns]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *more, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def _row_offset(row, kv_head, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr):
    """Where in a request's output `[Q_LEN, KV_HEADS * GROUP, D]` a row of a KV head's tile goes."""
    return (row // GROUP * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP) * D


@gluon.jit
def _partial_offset(row, column, D: gl.constexpr, STRIPED: gl.constexpr):
    """Where in a partial result a row's columns lie."""
    if STRIPED:
        return gl.expand_dims(row * 8, 1) + gl.expand_dims(column // 8 * 512 + column % 8, 0)
    else:
        return gl.expand_dims(row * D, 1) + gl.expand_dims(column, 0)


@gluon.jit
def finish(
    acc, m, l, out, sinks, partial_acc, partial_ml, counter, b, row0, kv_head, is_whole, slot, v_scale,
    ROWS: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr,
    COLUMN0: gl.constexpr, STRIPED: gl.constexpr, ONE_ZERO: gl.constexpr = False,
):  # fmt: skip
    """Write a warpgroup's columns from `COLUMN0` on: the result if the whole tile was seen, else a partial result.

    `ONE_ZERO`: a zero's sign does not reach the result (of `pieces.py`, whose stores are narrow).
    """
    by_row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    local = gl.arange(0, 64, by_row)
    column = COLUMN0 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    row = row0 + local
    in_use = row < ROWS
    m = gl.convert_layout(m, by_row)
    l = gl.convert_layout(l, by_row)
    if is_whole:
        scale = denominator(m, l, sinks, kv_head * GROUP + row % GROUP, in_use, HAS_SINKS) * v_scale
        o = out + b.to(gl.int64) * (ROWS * KV_HEADS * D) + _row_offset(row, kv_head, GROUP, KV_HEADS, D)
        result = (acc * gl.expand_dims(scale, 1)).to(out.dtype.element_ty)
        if ONE_ZERO:
            result = gl.where(result == 0, gl.zeros_like(result), result)
        if ONE_ZERO or D < 512:
            gl.store(gl.expand_dims(o, 1) + gl.expand_dims(column, 0), result, mask=gl.expand_dims(in_use, 1))
        else:
            wide: gl.constexpr = _wide(acc.shape[1])  # 16 bytes a store in place of 4
            wide_row = row0 + gl.arange(0, 64, gl.SliceLayout(1, wide))
            wide_column = COLUMN0 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, wide))
            o = out + b.to(gl.int64) * (ROWS * KV_HEADS * D)
            o = gl.expand_dims(o + _row_offset(wide_row, kv_head, GROUP, KV_HEADS, D), 1) + gl.expand_dims(wide_column, 0)
            gl.store(o, gl.convert_layout(result, wide), mask=gl.expand_dims(wide_row < ROWS, 1))
    else:
        base = slot.to(gl.int64) * 64
        offset = _partial_offset(local, column, D, STRIPED)
        gl.store(partial_acc + base * D + offset, acc, mask=gl.expand_dims(in_use, 1))
        if COLUMN0 == 0:
            gl.store(partial_ml + base * 2 + local, m)
            gl.store(partial_ml + base * 2 + 64 + local, l)
        barrier()  # every thread's part is written before one thread announces it
        gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def _add_next(
    acc, m, l, partial_acc, partial_ml, counter, slot, D: gl.constexpr, COLUMN0: gl.constexpr,
):  # fmt: skip
    """A warpgroup's columns of a tile in two, its maxima and sums, with what the next range wrote to `slot`."""
    layout: gl.constexpr = acc.type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    COLUMNS: gl.constexpr = acc.shape[1]
    local = gl.arange(0, 64, by_row)
    column = COLUMN0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    await_all(counter, D // COLUMNS)
    base = slot.to(gl.int64) * 64
    # .cg: partials come from other SMs, so L1 must not answer
    m_2 = gl.load(partial_ml + base * 2 + local, cache_modifier=".cg")
    l_2 = gl.load(partial_ml + base * 2 + 64 + local, cache_modifier=".cg")
    # Rows past the end of the tile hold what was there before, and are not stored.
    acc_2 = gl.load(partial_acc + base * D + _partial_offset(local, column, D, True), cache_modifier=".cg")
    m_1 = gl.convert_layout(m, by_row)
    top = gl.maximum(m_1, m_2)
    shift = exp_shift(top)
    keep = gl.exp2(m_1 - shift)
    grow = gl.exp2(m_2 - shift)
    acc = acc * gl.expand_dims(keep, 1) + acc_2 * gl.expand_dims(grow, 1)
    l_1 = gl.convert_layout(l, by_row) * keep + l_2 * grow
    return acc, gl.convert_layout(top, m.type.layout), gl.convert_layout(l_1, l.type.layout)


@gluon.jit
def finish_part(
    acc, m, l, out, sinks, partial_acc, partial_ml, counter, index, share, longer, stop, first, end, b, tile, row0, kv_head,
    v_scale, TILES: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr,
    HAS_SINKS: gl.constexpr, COLUMN0: gl.constexpr, STRIPED: gl.constexpr,
):  # fmt: skip
    """`finish` a range's part of a tile: from the request's block `first` on, to where the request or the range ends."""
    is_whole = (first == 0) & (end <= stop)
    # A range has at most two unfinished tiles: one that ends in it (slot 0) and one that goes on after it (slot 1).
    slot = (index * 2 + (end > stop).to(gl.int32)) * TILES + tile
    if STRIPED:  # noqa: SIM102  decided while compiling: with more splits hardly a tile is in two
        if (first == 0) & (end > stop) & (end <= range_start(index + 2, share, longer)):
            acc, m, l = _add_next(acc, m, l, partial_acc, partial_ml, counter, (index + 1) * 2 * TILES + tile, D, COLUMN0)
            is_whole = first == 0
    finish(
        acc, m, l, out, sinks, partial_acc, partial_ml, counter, b, row0, kv_head, is_whole, slot, v_scale,
        ROWS, GROUP, KV_HEADS, D, HAS_SINKS, COLUMN0, STRIPED,
    )  # fmt: skip


@gluon.jit
def _combine_strips(
    partial_acc, partial_ml, out, sinks, unit, splits, slots, row0, rows, kv_head, v_scale, TILES: gl.constexpr,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr, COLUMN0: gl.constexpr,
    COLUMNS: gl.constexpr, SPLITS: gl.constexpr, STRIPS: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Merge `COLUMNS` columns of a tile's partial results: `STRIPS` strips of every `splits * STRIPS`, from `unit * STRIPS` on.

    There are at most `SPLITS` splits or, with `MORE`, any number.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 16, 2], [1, 4, 1], [2, 1, 0])  # [SPLITS, 64, 8 * STRIPS]
    by_row: gl.constexpr = gl.SliceLayout(2, layout)
    merged: gl.constexpr = gl.SliceLayout(0, layout)
    merged_row: gl.constexpr = gl.SliceLayout(1, merged)
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, by_row))
    row = gl.arange(0, 64, gl.SliceLayout(0, by_row))
    out_row = gl.arange(0, 64, merged_row)
    column = gl.arange(0, 8 * STRIPS, gl.SliceLayout(0, merged))
    offset = gl.expand_dims(out_row * 8, 1) + gl.expand_dims(column // 8 * 512 + column % 8, 0)
    for strip in range(unit * STRIPS, COLUMNS // 8, splits * STRIPS):
        m = gl.full([64], float("-inf"), gl.float32, row.type.layout)
        l = gl.full([64], 0.0, gl.float32, row.type.layout)
        acc = gl.full([64, 8 * STRIPS], 0.0, gl.float32, merged)
        for start in range(0, splits if MORE else 1, SPLITS):
            # Loads have no masks, which would be more instructions than all else: beyond the last split the last one is
            # read again, with weight zero, and rows past the end of the tile hold what was there before, which is not stored.
            i = gl.minimum(start + split, splits - 1)
            slot = (slots + (2 * i + (i < splits - 1).to(gl.int32)) * TILES).to(gl.int64)
            # .cg: partials come from other SMs, so L1 must not answer
            ml = gl.expand_dims(partial_ml + slot * 128, 1) + gl.expand_dims(row, 0)
            m_i = gl.load(ml, cache_modifier=".cg")
            l_i = gl.load(ml + 64, cache_modifier=".cg")
            a = partial_acc + (COLUMN0 // 8 + strip) * 512 + slot * (64 * D)
            a_i = gl.load(gl.expand_dims(gl.expand_dims(a, 1), 2) + gl.expand_dims(offset, 0), cache_modifier=".cg")
            m_i = gl.where(gl.expand_dims(start + split < splits, 1), m_i, float("-inf"))
            m_new = gl.maximum(m, gl.max(m_i, 0))
            shift = exp_shift(m_new)
            shrink = gl.exp2(m - shift)
            grow = gl.exp2(m_i - gl.expand_dims(shift, 0))
            factor = gl.convert_layout(shrink, merged_row)
            acc = acc * gl.expand_dims(factor, 1) + gl.sum(a_i * gl.expand_dims(grow, 2), 0)
            l = l * shrink + gl.sum(l_i * grow, 0)
            m = m_new
        scale = denominator(m, l, sinks, kv_head * GROUP + (row0 + row) % GROUP, row < rows, HAS_SINKS) * v_scale
        result = (acc * gl.expand_dims(gl.convert_layout(scale, merged_row), 1)).to(out.dtype.element_ty)
        o = gl.expand_dims(_row_offset(row0 + out_row, kv_head, GROUP, KV_HEADS, D), 1) + gl.expand_dims(column, 0)
        gl.store(out + (COLUMN0 + strip * 8) + o, result, mask=gl.expand_dims(out_row < rows, 1))


@gluon.jit
def _combine_in_turns(
    partial_acc, partial_ml, out, sinks, unit, splits, slots, row0, rows, kv_head, v_scale, TILES: gl.constexpr,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr, COLUMN0: gl.constexpr,
    COLUMNS: gl.constexpr, SPLITS: gl.constexpr, STRIPS: gl.constexpr,
):  # fmt: skip
    """`_combine_strips` of any number of splits in one loop, which adds up `SPLITS` of them while the next are on their way."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 16, 2], [1, 4, 1], [2, 1, 0])  # [SPLITS, 64, 8 * STRIPS]
    by_row: gl.constexpr = gl.SliceLayout(2, layout)
    merged: gl.constexpr = gl.SliceLayout(0, layout)
    merged_row: gl.constexpr = gl.SliceLayout(1, merged)
    PIECES: gl.constexpr = COLUMNS // 8 // STRIPS
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, by_row))
    row = gl.arange(0, 64, gl.SliceLayout(0, by_row))
    out_row = gl.arange(0, 64, merged_row)
    column = gl.arange(0, 8 * STRIPS, gl.SliceLayout(0, merged))
    offset = gl.expand_dims(out_row * 8, 1) + gl.expand_dims(column // 8 * 512 + column % 8, 0)
    m = gl.full([64], float("-inf"), gl.float32, row.type.layout)
    l = gl.full([64], 0.0, gl.float32, row.type.layout)
    acc = gl.full([64, 8 * STRIPS], 0.0, gl.float32, merged)
    next_m = gl.full([SPLITS, 64], float("-inf"), gl.float32, by_row)  # at first nothing is added
    next_l = gl.full([SPLITS, 64], 0.0, gl.float32, by_row)
    next_acc = gl.full([SPLITS, 64, 8 * STRIPS], 0.0, gl.float32, layout)
    piece = unit
    start = 0 - SPLITS  # how many splits of the piece are added
    next_piece = unit
    next_start = 0
    while piece < PIECES:
        m_i, l_i, acc_i = next_m, next_l, next_acc
        i = next_start + split
        slot = (slots + (2 * i + (i < splits - 1).to(gl.int32)) * TILES).to(gl.int64)
        there = gl.expand_dims((i < splits) & (next_piece < PIECES), 1)
        # .cg: partials come from other SMs, so L1 must not answer
        ml = gl.expand_dims(partial_ml + slot * 128, 1) + gl.expand_dims(row, 0)
        next_m = gl.load(ml, mask=there, other=float("-inf"), cache_modifier=".cg")
        next_l = gl.load(ml + 64, mask=there, other=0.0, cache_modifier=".cg")
        a = gl.expand_dims(partial_acc + (COLUMN0 // 8 + next_piece * STRIPS) * 512 + slot * (64 * D), 1)
        a = gl.expand_dims(a, 2) + gl.expand_dims(offset, 0)
        next_acc = gl.load(a, mask=gl.expand_dims(there, 2), other=0.0, cache_modifier=".cg")
        around = next_start + SPLITS >= splits
        next_piece = gl.where(around, next_piece + splits, next_piece)
        next_start = gl.where(around, 0, next_start + SPLITS)

        m_new = gl.maximum(m, gl.max(m_i, 0))
        shift = exp_shift(m_new)
        shrink = gl.exp2(m - shift)
        grow = gl.exp2(m_i - gl.expand_dims(shift, 0))
        factor = gl.convert_layout(shrink, merged_row)
        acc = acc * gl.expand_dims(factor, 1) + gl.sum(acc_i * gl.expand_dims(grow, 2), 0)
        l = l * shrink + gl.sum(l_i * grow, 0)
        m = m_new
        start += SPLITS
        if start >= splits:
            scale = denominator(m, l, sinks, kv_head * GROUP + (row0 + row) % GROUP, row < rows, HAS_SINKS) * v_scale
            result = (acc * gl.expand_dims(gl.convert_layout(scale, merged_row), 1)).to(out.dtype.element_ty)
            o = gl.expand_dims(_row_offset(row0 + out_row, kv_head, GROUP, KV_HEADS, D), 1) + gl.expand_dims(column, 0)
            gl.store(out + (COLUMN0 + piece * STRIPS * 8) + o, result, mask=gl.expand_dims(out_row < rows, 1))
            m = gl.full([64], float("-inf"), gl.float32, row.type.layout)
            l = gl.full([64], 0.0, gl.float32, row.type.layout)
            acc = gl.full([64, 8 * STRIPS], 0.0, gl.float32, merged)
            start = 0
            piece += splits


@gluon.jit
def _combine_rows(
    partial_acc, partial_ml, out, sinks, unit, splits, slots, row0, rows, kv_head, v_scale, TILES: gl.constexpr,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr, COLUMN0: gl.constexpr,
    COLUMNS: gl.constexpr, SPLITS: gl.constexpr, N_ROWS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Merge `COLUMNS` columns of a tile's partial results: `N_ROWS` rows of every `splits * N_ROWS`, from `unit * N_ROWS` on,
    `SPLITS` splits at a time. `layout` is that of `[N_ROWS, SPLITS, COLUMNS]`.
    """
    by_row: gl.constexpr = gl.SliceLayout(2, layout)
    merged: gl.constexpr = gl.SliceLayout(1, layout)
    local = gl.arange(0, N_ROWS, gl.SliceLayout(1, by_row))
    split = gl.arange(0, SPLITS, gl.SliceLayout(0, by_row))
    column = COLUMN0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    for first in range(unit * N_ROWS, rows, splits * N_ROWS):
        row = first + local
        live = row < rows
        m = gl.full([N_ROWS], float("-inf"), gl.float32, row.type.layout)
        l = gl.full([N_ROWS], 0.0, gl.float32, row.type.layout)
        acc = gl.full([N_ROWS, COLUMNS], 0.0, gl.float32, merged)
        for start in range(0, splits, SPLITS):
            i = start + split
            slot = (slots + (2 * i + (i < splits - 1).to(gl.int32)) * TILES).to(gl.int64)
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
        row = first + gl.arange(0, N_ROWS, gl.SliceLayout(1, merged))
        out_column = COLUMN0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, merged))
        o = out + gl.expand_dims(_row_offset(row0 + row, kv_head, GROUP, KV_HEADS, D), 1) + gl.expand_dims(out_column, 0)
        gl.store(o, result, mask=gl.expand_dims(row < rows, 1))


@gluon.jit
def combine_unfinished(
    partial_acc, partial_ml, counters, out, sinks, v_scale, index, share, longer, range_begin, stop, tile, row0, kv_head,
    first_b, first_begin, last_b, last_end, TILES: gl.constexpr,
    ROWS: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr,
    COLUMN0: gl.constexpr, COLUMNS: gl.constexpr, STRIPED: gl.constexpr,
):  # fmt: skip
    """Every warpgroup has announced all its partial results before it waits here for others'.

    `COLUMNS` is 256 (MLA) or at most 128 (GQA).
    """
    rows = gl.minimum(ROWS - row0, 64)
    sides = gl.where(range_begin < stop, gl.where(first_b == last_b, 1, 2), 0)
    for side in range(sides):
        b = gl.where(side == 0, first_b, last_b)
        first_range, splits = tile_splits(side, sides, first_begin, last_end, stop, share, longer)
        if splits > (2 if STRIPED else 1):  # `finish_part` sees to two
            await_all(counters + b * TILES + tile, splits * (D // COLUMNS))
            unit = index - first_range
            slots = first_range * 2 * TILES + tile
            o = out + b.to(gl.int64) * (ROWS * KV_HEADS * D)
            if STRIPED and COLUMNS == 256:
                _combine_in_turns(
                    partial_acc, partial_ml, o, sinks, unit, splits, slots, row0, rows, kv_head, v_scale, TILES,
                    GROUP, KV_HEADS, D, HAS_SINKS, COLUMN0, COLUMNS, 4, 2,
                )  # fmt: skip
            elif STRIPED:
                # One iteration for the usual numbers of splits, 64 values a thread.
                for few in gl.static_range(2, 5, 2):
                    if (splits <= 4) == (few == 2):
                        _combine_strips(
                            partial_acc, partial_ml, o, sinks, unit, splits, slots, row0, rows, kv_head, v_scale, TILES,
                            GROUP, KV_HEADS, D, HAS_SINKS, COLUMN0, COLUMNS, 2**few, 16 // 2**few, few == 4,
                        )  # fmt: skip
            else:
                lanes: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 2, 16], [1, 256 // COLUMNS, COLUMNS // 64], [2, 1, 0])
                _combine_rows(
                    partial_acc, partial_ml, o, sinks, unit, splits, slots, row0, rows, kv_head, v_scale, TILES,
                    GROUP, KV_HEADS, D, HAS_SINKS, COLUMN0, COLUMNS, 32 if COLUMNS == 256 else 64, 1, lanes,
                )  # fmt: skip
