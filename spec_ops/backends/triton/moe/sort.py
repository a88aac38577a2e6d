"""Pairs of a token and one of its experts, sorted by expert on the device, in one launch.

A program has an expert. It reads all ids twice, from L2: once to count those below its own, which is where its pairs begin, and
once to write them there in their order. Programs share nothing, so the result is the same in any order that they run in. They
read experts x pairs ids, twice: 2 MB for 128 experts and 1024 pairs. What the products leave between them bounds the pairs of a
launch (`grouped.TEMPORARY`), so that this stays below what a sort of several launches takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant, variant_of
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, recorded

BLOCK = 1024  # ids that a program reads at once
LARGE_BLOCK = 4096  # where there are more pairs


class Sorted(NamedTuple):
    """Pairs sorted by expert.

    Attributes:
        order: `[pairs]`, the pair `token * k + slot` at each place; pairs of an expert keep their order. Before those of the
            first expert and after those of the last one, which is where others would be, it is not written.
        offsets: `[E + 1]`, where each expert's pairs begin: before them is room for those of negative experts.
    """

    order: torch.Tensor
    offsets: torch.Tensor


@triton.jit(do_not_specialize=["pairs"])
def sort_pairs_kernel(ids, order, offsets, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program `expert`. `ids [pairs]`."""
    await_predecessors(PDL)
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    below = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + place
        below += (tl.load(ids + pair, mask=pair < pairs, other=expert) < expert).to(tl.int32)
    first = tl.sum(below, 0)
    tl.store(offsets + expert, first)
    for start in range(0, pairs, BLOCK):
        pair = start + place
        mine = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + first + rank - 1, pair.to(tl.int64), mask=mine)
        first += tl.max(rank, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(offsets + expert + 1, first)


def sorted_pairs(ids: torch.Tensor, experts: int) -> Sorted:
    """`ids [tokens, k]`, int32 or int64."""
    flat = ids.contiguous().view(-1)
    order = flat.new_empty(flat.shape, dtype=torch.int64)
    offsets = flat.new_empty(experts + 1, dtype=torch.int32)
    large = flat.numel() > BLOCK
    with device_guard(flat):
        launch(
            sort_pairs_kernel, (experts,), flat, order, offsets, flat.numel(), BLOCK=LARGE_BLOCK if large else BLOCK,
            num_warps=16 if large else 4, early=True,
        )  # fmt: skip
    return Sorted(order, offsets)


def ahead() -> Iterator[Variant]:
    for dtype in (torch.int32, torch.int64):
        for tokens in (128, 4096):
            with recorded() as launches:
                sorted_pairs(torch.empty(tokens, 8, dtype=dtype, device="meta"), 128)
            yield variant_of(f"sort_pairs, {tokens} tokens of 8 experts, {str(dtype).removeprefix('torch.')}", launches[0])
