"""How many rows and keys a program of `gqa.py` takes at a time."""

from __future__ import annotations

import math
from typing import NamedTuple


class Tiling(NamedTuple):
    """Of a program: how many warpgroups have 64 rows each, keys of a block, how many blocks are loaded ahead."""

    warpgroups: int
    block_n: int
    stages: int


def tiling_of(head_dim: int, rows: int, bs: int, page_size: int) -> Tiling:
    """For `rows` of a KV head (figures: `docs/notebook/pages.md`)."""
    # Timed with several requests and whole blocks in a page; with less the loading warps need registers that three leave not.
    three = 128 < rows <= 192 or (head_dim == 64 and 256 < rows <= 384)
    if three and bs > 1 and page_size % 64 == 0:
        return Tiling(3, 64, 512 // head_dim)  # nor are there any for blocks of 128 keys
    if head_dim == 64:
        return Tiling(2, 128, 5)
    # Several tiles of rows read the same keys, so that less need be on its way; but one request has few blocks a program, and
    # with more ids of pages the loop over 128 keys spills: pages of 72 tokens are read row by row (`box_of`).
    return Tiling(2, 64, 4) if rows <= 128 or bs == 1 or math.gcd(page_size, 128) < 64 else Tiling(2, 128, 2)
