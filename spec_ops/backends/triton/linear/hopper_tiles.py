"""Which products `hopper_mm.py` and `hopper_float8.py` compute, and in which tiles. Without Triton, since passes ask too.

Figures: `docs/notebook/products.md`, "4 bits at 17 to 128 rows on Hopper".
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from spec_ops.backends.registry import BackendError
from spec_ops.backends.weight_format import WeightFormat

ARCH = 90
BLOCK_K = 128  # of k: what one row of a tile of x in shared memory holds; bytes of the weight, half as many
WIDTH = 64  # columns of a warpgroup: of one `wgmma`
MANY_COLUMNS = 8192  # from which two warpgroups read rows of float8 less often, and are not too few programs
K_UNIT = 64  # what k is a multiple of: half a block, the rest of which is read as zeros
STORED_ROWS, TRITON_INT4_ROWS = 128, 64  # most of `skinny_mm`, and of int4 that `takes` refuses
# Of a tile of so many rows and warpgroups, in flight: about as many as shared memory holds.
STAGES = {(32, 1): 16, (32, 2): 12, (32, 3): 11, (64, 1): 11, (64, 2): 9, (64, 3): 7, (128, 1): 6, (128, 2): 5}


class HopperTile(NamedTuple):
    """What a program computes at a time: all rows, up to `block_m`, and 64 columns for each of `consumers` warpgroups; `stages`
    blocks of `BLOCK_K` of k are in flight. `splits`: see `splits_of`."""

    block_m: int
    consumers: int
    stages: int
    splits: int

    @property
    def lines(self) -> bool:
        """Whether results are written in lines (`hopper_shares.store_sums`)."""
        return self.block_m == 128


def takes(m: int, n: int, k: int, stored: WeightFormat, dtype: torch.dtype, scale_dtype: torch.dtype) -> bool:
    """Whether `hopper_mm.py` computes `m` rows of `dtype`, on Hopper; else `skinny_mm_kernel` is the faster one, or alone has
    what the weight needs."""
    int4 = stored.kind == "int4"
    if dtype != torch.bfloat16 or k % K_UNIT or not (int4 or stored.float4) or (int4 and scale_dtype != dtype):
        return False
    return 16 < m <= STORED_ROWS and m * n < 2**31


def choose(m: int, n: int, k: int, stored: WeightFormat, sms: int, words: bool = True) -> HopperTile:
    """For `m` rows that `takes` takes: the tile of the least `_us`. `words`: whether 4-bit floats have scales in words."""
    block_m = next(size for size in (32, 64, 128) if m <= size)
    # Three warpgroups leave too few registers for the scales and zero points of small groups, and for scales that are no words.
    few = stored.kind == "int4" and stored.columns < (64 if block_m == 32 else BLOCK_K)
    few = few or (stored.float4 and block_m == 64 and not words)
    return _cheapest(block_m, 2 if few else 3, n, -(-k // BLOCK_K), sms)


@functools.lru_cache(maxsize=4096)
def _cheapest(block_m: int, most_consumers: int, n: int, blocks: int, sms: int) -> HopperTile:
    tiles = []
    for (rows, consumers), stages in STAGES.items():
        if rows == block_m and consumers <= most_consumers:
            most = sms // -(-n // (consumers * WIDTH))  # programs that can share a tile
            tiles += [HopperTile(rows, consumers, stages, splits) for splits in range(max(1, min(most, blocks)) + 1)]
    return min(tiles, key=lambda tile: _us(tile, -(-n // (tile.consumers * WIDTH)), blocks, sms))


def _us(tile: HopperTile, tiles: int, blocks: int, sms: int) -> float:
    """Of so many tiles of `blocks` of k, beside what every tile takes: fitted to launches of int4 and MXFP4 on an H200."""
    size = tile.consumers * tile.block_m / 64
    of_block = 0.24 + 0.19 * tile.consumers + 0.08 * size
    if tile.splits == 1:
        return -(-tiles // sms) * (blocks * of_block + 2) - 2
    if tile.splits == 0:
        share = -(-tiles * blocks // sms)
        return share * of_block + 1.5 * share / blocks + 1 + size * (1.5 + 0.2 * sms / tiles)
    share = -(-blocks // tile.splits)
    return share * of_block + 0.6 + size * (0.5 + 0.2 * -(-blocks // share))


def most_rows(n: int, k: int, stored: WeightFormat, dtype: torch.dtype, scale_dtype: torch.dtype, arch: int) -> int:
    """Most rows of `dtype` that `skinny_mm` takes on `arch` (90 for sm_90) with such a weight of 8 or 4 bits."""
    if stored.kind != "int4":
        return STORED_ROWS
    on_hopper = arch == ARCH and takes(STORED_ROWS, n, k, stored, dtype, scale_dtype)
    return STORED_ROWS if on_hopper else TRITON_INT4_ROWS


FLOAT8_ROWS = 128  # most of `float8_mm`
# Rows from which products of rows of float8 are its. With fewer `skinny_mm` takes as long, whose rows are these times their
# scales in 16 bits: the same numbers, up to that rounding.
FLOAT8_LEAST_ROWS = 17
PARTS_MOST_COLUMNS = 32768  # that a program taking a row apart keeps in registers
PARTS_LONG = 8192  # of k
PARTS_LEAST_ROWS = 33  # of bfloat16 that are taken apart: with fewer, converting the weight is faster
SHARED_BYTES = 227 * 1024 - 2048  # of a program, but barriers and what alignment takes
MOST_STAGES = 12
LEAST_BLOCKS = 8  # of k of a program that shares a tile
BUSY = 0.7  # least share of the multiprocessors that is busy on average, where blocks are not shared out equally


def splits_of(tiles: int, blocks: int, sms: int) -> int:
    """How many programs share each of so many tiles of `blocks` of k: 1 means whole tiles, and 0 that all multiprocessors have
    equal shares of all tiles, so that most tiles are shared by two or more, and a program's sums may be of two.

    Whole tiles leave some multiprocessors idle, which costs less than exchanging sums."""
    if tiles <= sms:
        return max(1, min(sms // tiles, blocks // LEAST_BLOCKS))
    return 1 if tiles >= BUSY * sms * -(-tiles // sms) else 0


class Float8Tile(NamedTuple):
    """As `HopperTile`, of `hopper_float8.py`; `splits`: see `splits_of`."""

    block_m: int
    consumers: int
    stages: int
    splits: int


def float8_tile(block_m: int, consumers: int, x_blocks: bool, splits: int, parts: int = 1) -> Float8Tile:
    """With as many stages as shared memory holds, up to `MOST_STAGES`, or to what leaves no room for a second program: launches
    are early."""
    stage = (consumers * WIDTH + parts * block_m) * BLOCK_K + 4 * block_m * x_blocks
    room = SHARED_BYTES - consumers * min(4096, 2 * WIDTH * block_m)  # results on their way to memory
    most = max(MOST_STAGES, SHARED_BYTES // 2 // stage + 1)
    return Float8Tile(block_m, consumers, min(most, room // stage), splits)


def choose_float8(m: int, n: int, k: int, x_blocks: bool, sms: int) -> Float8Tile:
    """For `m` rows, whose scales are of blocks of k or not, and `n` columns.

    Rows are read for each tile, so wide tiles read less. But sums that programs exchange are as long as tiles are wide: so few
    columns have narrow tiles."""
    block_m = next(size for size in (8, 16, 32, 64, 128) if m <= size)
    consumers = 2 if n >= MANY_COLUMNS and block_m >= (64 if x_blocks else 128) else 1
    return float8_tile(block_m, consumers, x_blocks, splits_of(-(-n // (consumers * WIDTH)), k // BLOCK_K, sms))


def choose_parts(m: int, n: int, k: int, stored: WeightFormat, dtype: torch.dtype, sms: int) -> Float8Tile | None:
    """For `m` rows of bfloat16 in two parts of float8 (`row_parts.py`); None if `skinny_mm_kernel` is the faster one, or alone
    has what the weight needs."""
    if dtype != torch.bfloat16 or stored.kind != "float8" or k % BLOCK_K or not PARTS_LEAST_ROWS <= m <= FLOAT8_ROWS:
        return None
    whole, blocks = stored.columns == k and stored.rows in (1, n), stored.rows == stored.columns == BLOCK_K
    if not (whole or blocks) or k > PARTS_MOST_COLUMNS or m * n >= 2**31:
        return None
    block_m, long = (64 if m <= 64 else 128), k >= PARTS_LONG
    consumers = 2 if n >= (MANY_COLUMNS // 2 if block_m == 128 and long else MANY_COLUMNS) else 1
    tiles = -(-n // (consumers * WIDTH))
    # A quarter of the multiprocessors is left to the launch that takes the next rows apart, unless blocks of k are many.
    splits = splits_of(tiles, k // BLOCK_K, sms if long or tiles > 3 * sms // 4 else 3 * sms // 4)
    if (splits == 0 and not long) or (splits == 1 and tiles < sms // 2) or 0 < tiles * splits < sms // 3:
        return None
    return float8_tile(block_m, consumers, False, splits, 2)


def float8_mm_refusal(m: int, n: int, k: int, dtype: torch.dtype, arch: int | None) -> Exception | None:
    """Why `hopper_float8.py` does not compute `float8_mm` of `m` rows with a weight `[n, k]` on `arch` (90 for sm_90; None: a
    CPU); None if it does. What holds everywhere, and strides, are checked apart."""
    if arch != ARCH:
        got = "a CPU" if arch is None else f"sm_{arch}"
        return BackendError(f"float8_mm: needs a GPU of sm_{ARCH} (Hopper), got {got}")
    if dtype not in (torch.bfloat16, torch.float16):
        return TypeError(f"float8_mm: `dtype` must be torch.bfloat16 or torch.float16 on CUDA, got {dtype}")
    if k == 0 or k % BLOCK_K:
        return ValueError(f"float8_mm: the columns of `x` must be a multiple of {BLOCK_K}, got {k}")
    if m > FLOAT8_ROWS:
        return ValueError(f"float8_mm: `x` must have at most {FLOAT8_ROWS} rows, got {m}")
    if m * n >= 2**31:  # the kernel addresses the output in 32 bits
        return ValueError(f"float8_mm: `x` rows times `weight` rows must be less than 2^31, got {m} times {n}")
    return None
