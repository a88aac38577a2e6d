"""How many tokens of a row have each logit: bfloat16 has few values, and their counts tell all of a row's sums exactly.

A bin is a value; the first and last of each sign hold all that are larger or smaller than any other. They are counted in shared
memory, whose atomics take less than weighing a token would.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.sampling.shared import MANY_WORDS, WIDTH, add_one, clear_words, read_words
from spec_ops.backends.triton.sampling.weights import key_logit

SIGN_BINS = tl.constexpr(4096)  # 32 powers of two, each of 128 values of bfloat16
BINS = MANY_WORDS
GROUP = tl.constexpr(32)  # bins next to each other, one a thread of a warp
GROUPS = tl.constexpr(256)
SMALLEST = tl.constexpr(103 << 7)  # 2**-24, as the upper half of a float32; those of one bin are below 2**8


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
def counts_at(bins, place, padding):
    """How many tokens are in the bins at some places; `padding`: how many of the last one are none."""
    count = read_words(bins, tl.where(place < SIGN_BINS, SIGN_BINS - 1 - place, place))
    return tl.where(place == BINS - 1, count - padding, count)


@triton.jit
def all_places():
    """`[GROUPS, GROUP]`: sums over all bins have two steps, groups and bins of a group. Scans of all would take thousands of
    instructions, most of them for what warps tell one another."""
    return tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def places_of(group):
    return group * GROUP + tl.arange(0, GROUP)


@triton.jit
def count_values(bins, logits, stride, steps, vocab, TILE: tl.constexpr):
    """Count in the bins how many of `steps` tiles of ids have each value, NaN as infinity; the padding, for `counts_at`."""
    clear_words(bins, tl.arange(0, BINS))
    tl.debug_barrier()
    for i in range(0, steps):
        ids = i * TILE + tl.arange(0, TILE)
        value = tl.load(logits + ids.to(tl.int64) * stride, mask=ids < vocab, other=float("-inf"))
        size = (value.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)  # an integer: of NaN it is the largest
        at = tl.minimum(tl.maximum(size, SMALLEST), SMALLEST + (SIGN_BINS - 1))
        add_one(bins - SMALLEST * WIDTH, tl.where(value < 0, at + SIGN_BINS, at))
    tl.debug_barrier()
    return steps * TILE - vocab
