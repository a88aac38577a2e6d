"""What the Gluon kernels for Hopper (`gqa.py`, `mla.py`, `mla_few.py`) share.

The division of work is Triton's in `schedule.py`, which Gluon cannot call: layouts are explicit here. Counters return to zero,
so these kernels have counters of their own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

LOG2E = gl.constexpr(1.4426950408889634)

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def await_predecessors(PDL: gl.constexpr):
    """`launch.await_predecessors`."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add(a, b):
    """For `gl.associative_scan`."""
    return a + b


@gluon.jit
def opaque_zero():
    """A zero that the compiler cannot see through.

    Without it the descriptors of all wgmma operands are computed once, before the loops, a hundred registers spill, and the
    kernel takes 1.5 times as long.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(bar):
    """At an mbarrier, for all threads of this warpgroup."""
    barrier()  # every warp has read before one thread says so
    mbarrier.arrive(bar)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next buffer of a ring, and the parity of its mbarriers' phase."""
    around = stage + 1 == STAGES
    return gl.where(around, 0, stage + 1), phase ^ around.to(gl.int32)


@gluon.jit
def range_start(index, share, longer):
    """Where range `index` begins: ranges hold `share` blocks each, the first `longer` of them one more."""
    return index * share + gl.minimum(index, longer)


@gluon.jit
def range_of(block, share, longer):
    """The range that holds `block`: the largest `r` with `range_start(r) <= block`."""
    r = block // (share + 1)
    return gl.where(r < longer, r, (block - longer) // share)


@gluon.jit
def block_counts(seq_lens, bs, BS: gl.constexpr, BLOCK_N: gl.constexpr):
    """For 4 warps, as `[BS]`: indices of requests, which of them are in use, and how many blocks of keys each has."""
    ids = gl.arange(0, BS, gl.BlockedLayout([1], [32], [4], [0]))
    in_use = ids < bs
    lens = gl.load(seq_lens + ids, mask=in_use, other=0)
    return ids, in_use, (gl.maximum(lens, 0) + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def nearest_piece(block, counts, ids, in_use, PIECE: gl.constexpr):
    """The end of a piece nearest to `block`: pieces are `PIECE` blocks of a request, from its first one on, or what is left."""
    ends = gl.associative_scan(counts, 0, add)
    b = gl.sum(((ends <= block) & in_use).to(gl.int32), 0)
    begin = gl.sum(gl.where(ids < b, counts, 0), 0)
    before = (block - begin) // PIECE * PIECE
    after = gl.minimum(before + PIECE, gl.sum(gl.where(ids == b, counts, 0), 0))
    return begin + gl.where(2 * (block - begin) > before + after, after, before)


@gluon.jit
def place(index, ranges, share, longer, counts, ids, in_use, PIECE: gl.constexpr = 0, extra=None):
    """Range `index` of `ranges`: its first block, the one after its last, the request that it begins in, and the first block of
    that request. Ranges from `ranges` on are empty; with a `PIECE`, ranges begin and end where pieces do, and others may be.

    `extra`: of the blocks counted for a request the last so many hold no keys; a range that would begin there begins where the
    next request does, and may be empty."""
    position = range_start(index, share, longer)
    stop = range_start(index + 1, share, longer)
    if PIECE > 0:
        position = nearest_piece(position, counts, ids, in_use, PIECE)
        stop = nearest_piece(stop, counts, ids, in_use, PIECE)
    if index >= ranges:
        stop = position
    ends = gl.associative_scan(counts, 0, add)
    b = gl.sum(((ends <= position) & in_use).to(gl.int32), 0)
    if extra is not None:
        end = gl.sum(gl.where((ids == b) & in_use, ends, 0), 0)
        if end <= position + extra:
            position = gl.maximum(position, end)
            b = gl.sum(((ends <= position) & in_use).to(gl.int32), 0)
    begin = gl.sum(gl.where(ids < b, counts, 0), 0)
    return position, stop, b, begin


@gluon.jit
def tile_splits(side, sides, first_begin, last_end, stop, share, longer):
    """Of the tile in which a range begins (`side` 0) or ends (`side` 1 of 2): the first range with a part of it, and how many
    ranges have one.

    `first_begin`: where the first of the two begins; `last_end`: where the other ends, or the only one; `stop`: where the range
    ends. On its inner side a tile is this range's alone, so there any block of the range stands for the tile's.
    """
    first = range_of(gl.where(side == 0, first_begin, stop - 1), share, longer)
    return first, range_of(gl.where(side == sides - 1, last_end, stop) - 1, share, longer) - first + 1


@gluon.jit
def whole_ranges(counts, total, ranges):
    """`schedule.whole_ranges`. Where it gives a length, that is the `share` of `range_start` and `range_of`: none is longer."""
    share = gl.maximum(gl.cdiv(total, ranges), 1)
    fewest = (counts + share) // (share + 1)
    needed = (counts + share - 1) // share
    fits = gl.sum(needed, 0) <= ranges
    length = gl.where(fits, share, gl.where(gl.sum(fewest, 0) <= ranges, share + 1, 0))
    return length, gl.where(fits, needed, fewest)


@gluon.jit
def padded(count, length):
    """`count` blocks of a request, rounded up to whole ranges of `length` (0: as they are)."""
    return gl.where(length > 0, gl.cdiv(count, gl.maximum(length, 1)) * length, count)


@gluon.jit
def exp_shift(m):
    """What to subtract before exp2: a row that has seen nothing yet has no maximum."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def denominator(m, l, sinks, head, in_use, HAS_SINKS: gl.constexpr):
    """What to multiply a row's sums by; the sink takes its share."""
    if HAS_SINKS:
        sink = gl.load(sinks + head, mask=in_use, other=0.0).to(gl.float32) * LOG2E
        top = exp_shift(gl.maximum(m, sink))  # -inf: saw nothing, and a sink that takes nothing
        shrink = gl.exp2(m - top)
        total = l * shrink + gl.exp2(sink - top)
        return shrink / gl.where(total > 0, total, 1.0)
    else:
        return 1.0 / gl.where(l > 0, l, 1.0)


@gluon.jit
def await_all(counter, expected, leaving=1):
    """Wait until `expected` have arrived (low half of the counter), then leave as `leaving` of them (high half); the last to
    leave clears it."""
    value = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while (value & 0xFFFF) < expected:
        value = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    if gl.atomic_add(counter, leaving * 0x10000, sem="relaxed", scope="gpu") >> 16 == expected - leaving:
        gl.store(counter, 0)
