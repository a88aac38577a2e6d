"""The batch-invariant variant of the Gluon MLA kernel (`mla.py` with a `PIECE`): the bits of a row's result depend on that
query and on the keys it sees, on nothing else.

A request's keys are cut into pieces of `PIECE` blocks of 64, counted from its first key. A piece is one online softmax, in one
program, and pieces are merged by a left fold (`merge`). What may depend on the batch is which program takes a piece, and which
rows of a tile it merges; the arithmetic of a row does not, for these reasons:

* A block's place in its piece decides which warpgroup takes it, and so the order in which its products are added: `PIECE` is
  even, ranges begin and end where pieces do (`program.place`), and a piece has no partnerless block but its last.
* Rows of a tile share instructions, never numbers. Keys that a row does not see have weight 0, and adding 0 changes nothing, so
  it does not matter which further blocks its neighbours need, or whether an even block has an odd partner.
* Layouts are explicit in Gluon: a row's weights are summed in one order, in masked and in whole blocks.
* Merging a piece that a row does not see multiplies by `exp2(0) == 1` and adds 0; merging the first one is the identity. So a
  request of one piece, whose result is written at once, has the bits of the fold.
* Multiplications and additions are not fused (`enable_fp_fusion=False`): which are is the compiler's choice, and the number of
  queries compiles anew.
* Only a zero's sign can differ, and it is taken off.

A partial result is 64 rows of 2 KB, written and read: a second accumulator in registers would leave no room for the first.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.hopper.program import await_all, denominator, exp_shift


def blocks_of(call: AttentionCall) -> int:
    """The most blocks of 64 keys that a request can have: lengths are on the device."""
    return triton.cdiv(call.block_tables.shape[1] * call.page_size, 64)


def slots_of(call: AttentionCall, bs: int, piece: int) -> int:
    """How many values `piece_slot` has for `bs` requests at most; 1 if none has two pieces."""
    most = blocks_of(call)
    return bs * most // piece + bs if most > piece else 1


@gluon.jit
def piece_slot(b, begin, first, PIECE: gl.constexpr):
    """Where the partial result of a piece lies, if request `b` begins at block `begin` and the piece `first` blocks later. No
    two have the same one: a request of `n` pieces takes at least `(n - 1) * PIECE + 1` blocks."""
    return (begin + first) // PIECE + b


@gluon.jit
def merge(m, l, acc, m_next, l_next, acc_next):
    """Maximum, sum and output of all pieces up to the next one, from those before it and its own."""
    m_new = gl.maximum(m, m_next)
    shift = exp_shift(m_new)
    keep = gl.exp2(m - shift)
    add = gl.exp2(m_next - shift)
    return m_new, l * keep + l_next * add, acc * gl.expand_dims(keep, 1) + acc_next * gl.expand_dims(add, 1)


@gluon.jit
def _fold_rows(
    partial_acc, partial_ml, out, sinks, slot0, pieces, first_row, stop_row, row0, v_scale, HM: gl.constexpr,
    HEADS: gl.constexpr, HAS_SINKS: gl.constexpr, COLUMN0: gl.constexpr, N_ROWS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Merge 256 columns of the rows `[first_row, stop_row)` of a tile: `N_ROWS` at a time, of `AHEAD` pieces at a time.

    Reads have no masks, which would have each wait for the use of the one before: past the last piece it is read again, and
    counts for nothing.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [2, 2], [1, 0])
    local = gl.arange(0, N_ROWS, gl.SliceLayout(1, layout))
    column = COLUMN0 + gl.arange(0, 256, gl.SliceLayout(0, layout))
    for first in range(first_row, stop_row, N_ROWS):
        row = first + local
        there = gl.minimum(row, stop_row - 1)
        m = gl.full([N_ROWS], float("-inf"), gl.float32, row.type.layout)
        l = gl.full([N_ROWS], 0.0, gl.float32, row.type.layout)
        acc = gl.full([N_ROWS, 256], 0.0, gl.float32, layout)
        for start in range(0, pieces, AHEAD):
            parts = ()
            for i in gl.static_range(AHEAD):
                slot = (slot0 + gl.minimum(start + i, pieces - 1) * HM).to(gl.int64)
                ml = partial_ml + slot * 128 + there
                a = gl.expand_dims(partial_acc + slot * (64 * 512) + there * 512, 1) + gl.expand_dims(column, 0)
                # .cg: partials come from other SMs, so L1 must not answer
                m_i = gl.load(ml, cache_modifier=".cg")
                l_i = gl.load(ml + 64, cache_modifier=".cg")
                parts += ((m_i, l_i, gl.load(a, cache_modifier=".cg")),)  # type: ignore[assignment]
            for i in gl.static_range(AHEAD):
                m_i, l_i, a_i = parts[i]  # type: ignore[misc, var-annotated]
                m_i = gl.where(start + i < pieces, m_i, float("-inf"))
                m, l, acc = merge(m, l, acc, m_i, l_i, a_i)
        scale = denominator(m, l, sinks, (row0 + row) % HEADS, row < stop_row, HAS_SINKS) * v_scale
        result = (acc * gl.expand_dims(scale, 1)).to(out.dtype.element_ty)
        result = gl.where(result == 0, gl.zeros_like(result), result)
        o = gl.expand_dims(out + (row0 + row) * 512, 1) + gl.expand_dims(column, 0)
        gl.store(o, result, mask=gl.expand_dims(row < stop_row, 1))


@gluon.jit
def fold_pieces(
    partial_acc, partial_ml, counters, out, sinks, v_scale, seq_lens, position, stop, tile, row0, b, begin,
    HM: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, HAS_SINKS: gl.constexpr, COLUMN0: gl.constexpr,
    PIECE: gl.constexpr,
):  # fmt: skip
    """Merge a warpgroup's columns of the requests of several pieces in the range `[position, stop)`, which begins in request
    `b`, whose first block is `begin`: a range merges as large a part of a tile's rows as it has of the request's pieces.

    Every warpgroup has announced all its partial results before any waits for others'.
    """
    rows = gl.minimum(ROWS - row0, 64)
    while position < stop:
        count = gl.cdiv(gl.maximum(gl.load(seq_lens + b), 0), 64)
        end = begin + count
        if count > PIECE:
            pieces = gl.cdiv(count, PIECE)
            first = (position - begin) // PIECE
            here = gl.cdiv(gl.minimum(end, stop) - position, PIECE)
            await_all(counters + b * HM + tile, pieces * 2, here)
            first_row = rows * first // pieces
            stop_row = rows * (first + here) // pieces
            slot0 = piece_slot(b, begin, 0, PIECE) * HM + tile
            o = out + b.to(gl.int64) * (ROWS * 512)
            if pieces <= 4:
                _fold_rows(
                    partial_acc, partial_ml, o, sinks, slot0, pieces, first_row, stop_row, row0, v_scale, HM, HEADS, HAS_SINKS,
                    COLUMN0, 8, 4,
                )  # fmt: skip
            else:
                _fold_rows(
                    partial_acc, partial_ml, o, sinks, slot0, pieces, first_row, stop_row, row0, v_scale, HM, HEADS, HAS_SINKS,
                    COLUMN0, 4, 8,
                )  # fmt: skip
        position = gl.maximum(position, gl.minimum(end, stop))
        begin = end
        b += 1
