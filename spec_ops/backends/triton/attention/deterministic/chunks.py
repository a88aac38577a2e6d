"""Chunks of keys, and how programs share them.

A chunk's begin is a fact of its position: `CHUNK` keys each in the first 8 of that length, twice as many in as many keys after
those, four times as many beyond. Long contexts have fewer partial results to write and merge, and short ones as many programs
at work as before. Positions are counted in units of `CHUNK` keys here.

Programs take pieces in rounds, the longest first, and every other round backwards, so that all get about the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.attention.schedule import kv_blocks

SECOND = tl.constexpr(8)  # units before the first chunk of two
THIRD = tl.constexpr(16)  # and of four
# The first chunk of each length.
SECOND_CHUNK = tl.constexpr(8)
THIRD_CHUNK = tl.constexpr(12)


def most_chunks(units: int) -> int:
    """`chunks_before`, on the host."""
    short, middle, long = min(units, 8), min(max(units - 8, 0), 8), max(units - 16, 0)
    return short + triton.cdiv(middle, 2) + triton.cdiv(long, 4)


@triton.jit
def chunks_before(units):
    """Chunks that begin in the first `units` units."""
    middle = tl.minimum(tl.maximum(units - SECOND, 0), THIRD - SECOND)
    return tl.minimum(units, SECOND) + tl.cdiv(middle, 2) + tl.cdiv(tl.maximum(units - THIRD, 0), 4)


@triton.jit
def chunk_of(unit):
    """The chunk that holds a unit."""
    return chunks_before(unit + 1) - 1


@triton.jit
def chunk_start(chunk):
    """The unit at which a chunk begins."""
    middle = tl.minimum(tl.maximum(chunk - SECOND_CHUNK, 0), THIRD_CHUNK - SECOND_CHUNK)
    return tl.minimum(chunk, SECOND_CHUNK) + 2 * middle + 4 * tl.maximum(chunk - THIRD_CHUNK, 0)


@triton.jit
def seen_chunks(seq_len, span, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First chunk, and number of chunks, that any query of a request looks at. `span`: of `kv_blocks`."""
    first, units = kv_blocks(seq_len, span, WINDOW, CHUNK)
    first_chunk = chunk_of(first)
    return first_chunk, chunks_before(first + units) - first_chunk


@triton.jit
def divide(seq_lens, bs, span, ranges, capacity, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BS: tl.constexpr):
    """`[BS]` pieces of each request: its chunks if it is split, else 1 (also for an empty one, whose zeros someone must write).

    A request stays whole if requests like this one, dealt to `ranges` programs, would take at most a quarter longer than an
    even division of their units. At most `capacity` chunks in all get a place for their partial results. `span`: see
    `kv_blocks`. Also returns each request's first chunk and, but for those out of the batch, chunks.
    """
    ids = tl.arange(0, BS)
    lens = tl.load(seq_lens + ids, mask=ids < bs, other=0)
    _, units = kv_blocks(lens, span, WINDOW, CHUNK)
    units = tl.where(ids < bs, tl.maximum(units, 1), 0)
    first, chunks = seen_chunks(lens, span, WINDOW, CHUNK)
    chunks = tl.where(ids < bs, tl.maximum(chunks, 1), 0)
    total = tl.sum(units, 0)
    turn = tl.maximum(units, 1) * ranges
    split = (chunks > 1) & (4 * tl.cdiv(total, turn) * tl.maximum(units, 1) > 5 * tl.cdiv(total, ranges))
    split = split & (tl.cumsum(tl.where(split, chunks, 0), 0) <= capacity)
    return tl.where(split, chunks, tl.minimum(chunks, 1)), first, chunks


@triton.jit
def first_slot(pieces, b, BS: tl.constexpr):
    """Where request `b`'s partial results begin: after those of the split requests before it."""
    return tl.sum(tl.where((tl.arange(0, BS) < b) & (pieces > 1), pieces, 0), 0)


@triton.jit
def in_order_of_length(pieces, first, chunks):
    """Running numbers of pieces, request after request: of the longest chunks, then of the middle ones, then of the short ones.
    Whole requests of several chunks are among the first, those of one among the last. `find` looks a piece up."""
    last = first + chunks
    split = pieces > 1
    long = tl.where(split, tl.maximum(last - tl.maximum(first, THIRD_CHUNK), 0), tl.where(chunks > 1, 1, 0))
    middle = tl.maximum(tl.minimum(last, THIRD_CHUNK) - tl.maximum(first, SECOND_CHUNK), 0)
    middle = tl.where(split, middle, 0)
    longs = tl.sum(long, 0)
    middles = longs + tl.sum(middle, 0)
    return tl.cumsum(long, 0), longs + tl.cumsum(middle, 0), middles + tl.cumsum(pieces - long - middle, 0)


@triton.jit
def _until(ends, piece):
    return tl.where(ends <= piece, ends, 0)


@triton.jit
def find(ends, piece):
    """The request of a piece, and the first chunk of that length; its number among that request's pieces of that length."""
    long, middle, short = ends
    is_long = piece < tl.max(long, 0)
    is_short = piece >= tl.max(middle, 0)
    of_length = tl.where(is_long, long, tl.where(is_short, short, middle))
    before = tl.maximum(_until(long, piece), tl.maximum(_until(middle, piece), _until(short, piece)))
    begin = tl.where(is_long, THIRD_CHUNK, tl.where(is_short, 0, SECOND_CHUNK))
    return tl.sum((of_length <= piece).to(tl.int32), 0), begin, piece - tl.max(before, 0)


@triton.jit
def item_of(turn):
    """What the program takes in its turn, of items dealt to all programs."""
    programs = tl.num_programs(0)
    at = tl.program_id(0)
    return turn * programs + tl.where(turn % 2 == 1, programs - 1 - at, at)


@triton.jit
def turns_of(items):
    """How many turns a program has."""
    whole = items // tl.num_programs(0)
    return whole + (item_of(whole) < items).to(tl.int32)
