"""How many tokens of a row have each logit: bfloat16 has few values, and their counts tell all of a row's sums exactly.

A bin is a value; the first and last of each sign hold all that are larger or smaller than any other. They are counted in shared
memory, whose atomics take less than weighing a token would: for those Triton has no operation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.sampling.weights import key_logit

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SIGN_BINS = tl.constexpr(4096)  # 32 powers of two, each of 128 values of bfloat16
BINS = tl.constexpr(8192)
WIDTH = tl.constexpr(1 if triton.knobs.runtime.interpret else 4)  # of a bin in what addresses count
SMALLEST = tl.constexpr(103 << 7)  # 2**-24, as the upper half of a float32; those of one bin are below 2**8


@triton.jit
def shared_bins(workspace):
    """Where a program's bins are: an address in shared memory, or the interpreter's stand-in for it."""
    if INTERPRETED:
        return workspace + tl.program_id(0) * BINS
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b32 bins[8192]; mov.u32 $0, bins; }", "=r,r", [tl.full([], 0, tl.int32)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _clear(bins, at):
    if INTERPRETED:
        tl.store(bins + at, 0)
    else:
        tl.inline_asm_elementwise(
            "st.shared.u32 [$1], 0; mov.u32 $0, 0;", "=r,r", [bins + at * WIDTH], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _add_one(bins, at):
    if INTERPRETED:
        tl.atomic_add(bins + at, 1)
    else:
        tl.inline_asm_elementwise(
            "red.shared.add.u32 [$1], 1; mov.u32 $0, 0;", "=r,r", [bins + at * WIDTH], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _read(bins, at):
    if INTERPRETED:
        return tl.load(bins + at)
    return tl.inline_asm_elementwise(
        "ld.shared.u32 $0, [$1];", "=r,r", [bins + at * WIDTH], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def is_shared_by_values(place):
    """Whether the bin at a place holds more than one value: of each sign the largest ones, and the smallest."""
    return (place % SIGN_BINS == 0) | (place % SIGN_BINS == SIGN_BINS - 1)


@triton.jit
def place_key(place):
    """`logit_key` of bfloat16; places of bins go from the largest value to the least."""
    return tl.where(place < SIGN_BINS, SMALLEST + SIGN_BINS - 1 - place, SIGN_BINS - SMALLEST - 1 - place)


@triton.jit
def place_value(place):
    return key_logit(place_key(place), 16)


@triton.jit
def count_values(bins, logits, stride, start, steps, vocab, TILE: tl.constexpr):
    """int32 `[BINS]`, at places: how many of `steps` tiles of ids from `start` on have each value. NaN is as infinity is."""
    place = tl.arange(0, BINS)
    _clear(bins, place)
    tl.debug_barrier()
    for i in range(0, steps):
        ids = start + i * TILE + tl.arange(0, TILE)
        value = tl.load(logits + ids.to(tl.int64) * stride, mask=ids < vocab, other=float("-inf"))
        size = (value.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)  # an integer: of NaN it is the largest
        at = tl.minimum(tl.maximum(size, SMALLEST), SMALLEST + (SIGN_BINS - 1))
        _add_one(bins - SMALLEST * WIDTH, tl.where(value < 0, at + SIGN_BINS, at))
    tl.debug_barrier()
    count = _read(bins, tl.where(place < SIGN_BINS, SIGN_BINS - 1 - place, place))
    padding = tl.maximum(start + steps * TILE - tl.maximum(vocab, start), 0)
    return tl.where(place == BINS - 1, count - padding, count)
