"""What the launches of the Hopper kernels share: how many ranges, what TMA can read, a tree's arguments."""

from __future__ import annotations

import math

import torch

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.operands import packed


def aligned_ranges(ranges: int, bs: int) -> int:
    """`ranges`, or a few less, so that requests of equal length begin where a range begins: one tile a range, and so one load
    of queries and one partial result."""
    whole = ranges // bs * bs
    return whole if whole * 16 >= ranges * 15 else ranges


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
