"""How the loading warps of the Gluon kernels read keys and values out of pages.

A block of keys is copied by 64 columns, a *chunk*, at a time. Where pages hold whole pieces of it, each piece is a *box*, which
TMA copies; one mbarrier expects the bytes of all boxes of a part of a block. TMA of Hopper has no gather, so rows of smaller
pages are copied one by one, 16 bytes a thread (`cp.async`): four warps share them (`loading_warps`), and each of their threads
arrives at the mbarrier when its own copies are there.

`BOX` is a box's tokens, 1 for row by row (`host.box_of`). `rows` is a descriptor of `BOX` x 64 over `[tokens, width]`; row by
row it is the cache itself, `distance` the distance of its tokens in steps of 8 numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

ROW_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of a chunk, for 4 warps


@gluon.constexpr_function
def loading_warps(box):
    return 4 if box == 1 else 1


@gluon.constexpr_function
def arrivals(box):
    """At the mbarrier of what has been loaded."""
    return 32 * loading_warps(box) if box == 1 else 1


@gluon.jit
def _keys(BLOCK_N: gl.constexpr):
    return gl.arange(0, BLOCK_N, gl.SliceLayout(1, ROW_LAYOUT))


@gluon.jit
def pages_of(table, key, end, pool, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr):
    """Pages of the block that begins at `key`: a tuple of one a box, or of one vector, a page a row. Keys from `end` on are in
    page 0, since tables may end there, and so are those of a page that is none of the `pool` (`host.pool_of`): no query sees
    them, and their page id may be anything. TMA reads zeros out of the pool, `cp.async` would read any address.

    A block's pages are asked for while the one before it is copied: the latency of memory is longer than all that.
    """
    if BOX == 1:
        n = key + _keys(BLOCK_N)
        page = gl.load(table + n // PAGE, mask=n < end, other=0)
        if pool is not None:
            page = gl.where((page >= 0) & (page < pool), page, 0)
        return (page,)
    else:
        pages = ()
        for part in gl.static_range(BLOCK_N // BOX):
            first = key + part * BOX
            pages += (gl.load(table + first // PAGE, mask=first < end, other=0),)  # type: ignore[assignment]
        return pages


@gluon.jit
def expect(bar, BYTES: gl.constexpr, BOX: gl.constexpr):
    """Before the copies that arrive at `bar`."""
    if BOX > 1:
        mbarrier.expect(bar, BYTES)


@gluon.jit
def copy(
    rows, distance, chunks, chunk, CHUNKS: gl.constexpr, bar, pages, key, column, PAGE: gl.constexpr, BOX: gl.constexpr
):  # fmt: skip
    """Start to copy the columns from `column` on of the block that begins at `key`, to `CHUNKS` of `chunks [n, BLOCK_N, 64]`
    from `chunk` on."""
    BLOCK_N: gl.constexpr = chunks.shape[1]
    if BOX == 1:
        slot = pages[0] * PAGE + (key + _keys(BLOCK_N)) % PAGE
        first = gl.expand_dims(rows + slot.to(gl.int64) * distance * 8 + column, 1)
        first = first + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, ROW_LAYOUT)), 0)
        for c in gl.static_range(CHUNKS):
            async_copy.async_copy_global_to_shared(chunks.index(chunk + c), first + c * 64)
    else:
        for part in gl.static_range(BLOCK_N // BOX):
            slot = pages[part] * PAGE + (key + part * BOX) % PAGE
            for c in gl.static_range(CHUNKS):
                box = chunks.index(chunk + c).slice(part * BOX, BOX)
                tma.async_copy_global_to_shared(rows, [slot, column + c * 64], bar, box)


@gluon.jit
def announce(bar, BOX: gl.constexpr):
    """After the copies that arrive at `bar`."""
    if BOX == 1:
        async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def await_copies(bar, phase, BOX: gl.constexpr):
    """Wait for what was copied, before `wgmma` reads it: unlike TMA, `cp.async` does not write where that reads without a
    fence."""
    mbarrier.wait(bar, phase)
    if BOX == 1:
        fence_async_shared()
