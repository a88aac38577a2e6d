"""The loading warps of the Gluon MLA kernel (`mla.py`), and the barriers by which they and its two warpgroups hear of one
another."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from spec_ops.backends.triton.attention.hopper.mla_paths import has_partner, path_block, tail_of, takes_turns, turns_of, walk
from spec_ops.backends.triton.attention.hopper.pages import announce, copy, expect, pages_of

# Barriers. "Full": TMA has written; "free": everyone has read; the others: one warpgroup has written to shared memory.
EVEN_LEFT, EVEN_RIGHT, ODD_LEFT, ODD_RIGHT, QUERIES = (gl.constexpr(i) for i in range(5))
FREE = gl.constexpr(5)  # added to one of the five above
EVEN_WEIGHTS, ODD_WEIGHTS, EVEN_SUM, ODD_SUM = (gl.constexpr(i) for i in range(10, 14))
BARRIERS = gl.constexpr(14)


@gluon.jit
def _load_queries(q_rows, chunks, rest, bars, segments, b, row0, ROWS: gl.constexpr, Q_BOX: gl.constexpr):
    mbarrier.wait(bars.index(QUERIES + FREE), (segments & 1) ^ 1)
    full = bars.index(QUERIES)
    mbarrier.expect(full, 576 * Q_BOX * 2)
    for c in gl.static_range(9):
        chunk = chunks.index(c) if c < 8 else rest.index(0)
        tma.async_copy_global_to_shared(q_rows, [b * ROWS + row0, c * 64], full, chunk.slice(0, Q_BOX))


@gluon.jit
def _pages(table, key, seen, pool, tree, PAGE: gl.constexpr, BOX: gl.constexpr):
    """`pages_of` a block; where paths take turns, and then which of the gathered blocks it is if it is one of them."""
    pages = pages_of(table, key, seen, pool, PAGE, 64, BOX)
    if tree is not None:
        _, plan, tail, reaches = tree
        pages = pages + (path_block(plan, key // 64, tail, reaches),)  # noqa: RUF005  tuples of Triton are not unpacked
    return pages


@gluon.jit
def _copy(
    kv_rows, kv_distance, tree, chunks, chunk, CHUNKS: gl.constexpr, bar, pages, key, column, PAGE: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """`pages.copy` of a block of keys: the request's, or from a tree's tail on one of a path."""
    if tree is None:
        copy(kv_rows, kv_distance, chunks, chunk, CHUNKS, bar, pages, key, column, PAGE, BOX)
    else:
        path_rows, _, tail, _ = tree
        if key < tail * 64:
            copy(kv_rows, kv_distance, chunks, chunk, CHUNKS, bar, pages, key, column, PAGE, BOX)
        else:
            PARTS: gl.constexpr = 1 if BOX == 1 else 64 // BOX
            copy(path_rows, 72, chunks, chunk, CHUNKS, bar, (pages[PARTS],), 0, column, 64, 1 if BOX == 1 else 64)


@gluon.jit
def load(
    q_rows, kv_rows, kv_distance, q_smem, q_rest_smem, kv_smem, kv_rest_smem, bars,
    block_tables, seq_lens, table_stride, pool, position, stop, b, begin, extra, row0, path_rows, plan, plan_stride,
    ROWS: gl.constexpr, PAGE: gl.constexpr, Q_BOX: gl.constexpr, BOX: gl.constexpr, MASK_LEN: gl.constexpr,
    PIECE: gl.constexpr,
):  # fmt: skip
    """The loading warps. Parts of blocks come in the order in which the warpgroups free them.

    `path_rows`, `plan`, `plan_stride`: of `mla_paths.gathered`, the plan from this tile's on, where paths take turns; their
    blocks are walked piece by piece.
    """
    TREE: gl.constexpr = takes_turns(PIECE, MASK_LEN)
    half_bytes: gl.constexpr = 64 * 256 * 2
    rest_bytes: gl.constexpr = 64 * 64 * 2
    halves = kv_smem._reinterpret(kv_smem.dtype, [16, 64, 64], kv_smem.layout)
    q_chunks = q_smem._reinterpret(q_smem.dtype, [8, 64, 64], q_rest_smem.layout)
    segments = 0
    evens = 0
    odds = 0
    range_begin = position
    while position < stop:
        seq_len = gl.maximum(gl.load(seq_lens + b), 0)
        tree = None
        if TREE:
            paths = plan + b * plan_stride
            turns, reaches = turns_of(paths)
            _, tail = tail_of(seq_len, MASK_LEN)
            tree = path_rows, paths, tail, reaches
        count = gl.cdiv(seq_len, 64)
        end = begin + count
        if count > 0:
            last = gl.minimum(end, stop) - begin
            first = position - begin
            table = block_tables + b.to(gl.int64) * table_stride
            seen = gl.minimum(seq_len, last * 64)
            walked, lonely = last, last
            if TREE:
                last = gl.minimum(first + PIECE, last)
                walked, lonely = walk(first, last, tail, turns, reaches, PIECE)
            even = _pages(table, first * 64, seen, pool, tree, PAGE, BOX)
            odd = _pages(table, first * 64 + 64, seen, pool, tree, PAGE, BOX)
            if TREE:
                fresh = (first == 0) | (position == range_begin)
                if fresh:
                    _load_queries(q_rows, q_chunks, q_rest_smem, bars, segments, b, row0, ROWS, Q_BOX)
                segments += fresh.to(gl.int32)
            else:
                _load_queries(q_rows, q_chunks, q_rest_smem, bars, segments, b, row0, ROWS, Q_BOX)
                segments += 1
            for k in range(first, walked, 2):
                key = k * 64
                even_free = (evens & 1) ^ 1
                odd_free = (odds & 1) ^ 1

                full = bars.index(EVEN_LEFT)
                mbarrier.wait(bars.index(EVEN_LEFT + FREE), even_free)
                expect(full, half_bytes, BOX)
                _copy(kv_rows, kv_distance, tree, halves, 0, 4, full, even, key, 0, PAGE, BOX)
                announce(full, BOX)
                full = bars.index(EVEN_RIGHT)
                mbarrier.wait(bars.index(EVEN_RIGHT + FREE), even_free)
                expect(full, half_bytes + rest_bytes, BOX)
                _copy(kv_rows, kv_distance, tree, halves, 4, 4, full, even, key, 256, PAGE, BOX)
                _copy(kv_rows, kv_distance, tree, kv_rest_smem, 0, 1, full, even, key, 512, PAGE, BOX)
                announce(full, BOX)
                even = _pages(table, key + 128, seen, pool, tree, PAGE, BOX)
                if has_partner(k, walked, lonely, TREE):
                    key += 64
                    full = bars.index(ODD_LEFT)
                    mbarrier.wait(bars.index(ODD_LEFT + FREE), odd_free)
                    expect(full, half_bytes + rest_bytes, BOX)
                    _copy(kv_rows, kv_distance, tree, halves, 8, 4, full, odd, key, 0, PAGE, BOX)
                    _copy(kv_rows, kv_distance, tree, kv_rest_smem, 1, 1, full, odd, key, 512, PAGE, BOX)
                    announce(full, BOX)
                    full = bars.index(ODD_RIGHT)
                    mbarrier.wait(bars.index(ODD_RIGHT + FREE), odd_free)
                    expect(full, half_bytes, BOX)
                    _copy(kv_rows, kv_distance, tree, halves, 12, 4, full, odd, key, 256, PAGE, BOX)
                    announce(full, BOX)
                    odd = _pages(table, key + 128, seen, pool, tree, PAGE, BOX)
                    odds += 1
                evens += 1
            position = begin + last
            if extra is not None:
                end += extra
                position = gl.where(last == count, end, position)
        if TREE:
            passed = position >= end
            begin = gl.where(passed, end, begin)
            b += passed.to(gl.int32)
        else:
            begin = end
            b += 1
