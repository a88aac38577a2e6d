"""What the launches of the Hopper kernels share: how many ranges, what TMA can read, a tree's arguments."""

from __future__ import annotations

import math

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.operands import packed

MIN_BOX = 16  # tokens that TMA copies at a time


def aligned_ranges(ranges: int, bs: int) -> int:
    """`ranges`, or a few less, so that requests of equal length begin where a range begins: one tile a range, and so one load
    of queries and one partial result."""
    whole = ranges // bs * bs
    return whole if whole * 16 >= ranges * 15 else ranges


def box_of(cache: torch.Tensor, block_n: int) -> int:
    """`BOX` of `pages.py` for blocks of `block_n` keys out of the pages of `cache`."""
    box = math.gcd(cache.shape[1], block_n)
    return box if box >= MIN_BOX else 1


def pool_of(cache: torch.Tensor, box: int, q_len: int, mask_len: int) -> int | None:
    """`pool` of `pages.py`: how many pages `cache` has, where `cp.async` reads pages that no query may see any key of."""
    return cache.shape[0] if box == 1 and mask_len > q_len else None


def token_rows(cache: torch.Tensor, box: int) -> TensorDescriptor | torch.Tensor:
    """`cache [pages, page, ..., dim]` (`is_token_rows`) as `pages.py` reads it."""
    if box == 1:
        return cache
    shape, layout = [cache.shape[0] * cache.shape[1], math.prod(cache.shape[2:])], gl.NVMMASharedLayout(128, 16, rank=2)
    return TensorDescriptor(cache, shape, [cache.stride(1), 1], [box, 64], layout)


def query_rows(q: torch.Tensor) -> torch.Tensor:
    """`q`, or a copy that TMA can read: contiguous, from a multiple of 16 bytes on."""
    return q if q.is_contiguous() and q.data_ptr() % 16 == 0 else q.clone(memory_format=torch.contiguous_format)


def is_token_rows(cache: torch.Tensor) -> bool:
    """Whether a descriptor can read `cache [pages, page, ..., dim]` of 16-bit numbers, or queries, as `[tokens, row]`:
    dense rows at one distance, in steps of 16 bytes."""
    return (
        cache.stride(-1) == 1
        and (cache.dim() == 3 or cache.stride(2) == cache.shape[3])
        and cache.stride(1) >= math.prod(cache.shape[2:])
        and cache.stride(0) == cache.shape[1] * cache.stride(1)
        and cache.stride(1) % 8 == 0
        and cache.data_ptr() % 16 == 0
    )


def tree_arguments(call: AttentionCall) -> tuple[torch.Tensor | None, int, int]:
    """The tree mask, contiguous, with its stride and `mask_len`; None, 0, 0 for a chain."""
    mask = packed(call.tree_mask)
    return (None, 0, 0) if mask is None else (mask, mask.stride(0), call.mask_len)
