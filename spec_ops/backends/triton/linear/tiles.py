"""The tiles of `skinny_mm.py`: what a program computes at a time, how many share a tile, and how many a multiprocessor holds.

Figures: `docs/notebook/products.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import triton

from spec_ops.backends.triton.attention.tuning import SHARED
from spec_ops.backends.triton.linear.operands import CHUNK
from spec_ops.backends.triton.linear.quantized import WARPGROUP
from spec_ops.backends.weight_format import WeightFormat


class Tile(NamedTuple):
    """What a program computes at a time, `block_k` of k in each iteration, and how many programs a multiprocessor gets at most.

    Below `WARPGROUP` columns each warp has a chunk of k, and so it has if `chunked`.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    programs: int
    chunked: bool = False

    @property
    def chunks(self) -> bool:
        """Whether each warp has a chunk of k."""
        return self.chunked or self.block_n < WARPGROUP.value


# The first that holds the rows; figures in `docs/notebook/products.md`.
TILES: tuple[Tile, ...] = (Tile(8, 16, 256, 4, 3), Tile(16, 16, 256, 4, 3), Tile(32, 64, 128, 4, 1), Tile(64, 64, 128, 4, 1))
MAX_ROWS = TILES[-1].block_m  # of 16 bits
# Of weights of fewer bits. A warp's chunk of bytes is what `mma.sync` takes; for `wgmma` 4 bits would be read byte by byte.
QUANTIZED_TILES = {
    8: (Tile(8, 16, 512, 4, 3), Tile(16, 16, 512, 4, 3), Tile(32, 64, 256, 4, 2), Tile(64, 64, 128, 4, 2)),
    4: (Tile(8, 32, 512, 4, 4), Tile(16, 32, 512, 4, 3), Tile(32, 32, 512, 4, 2), Tile(64, 64, 128, 4, 2)),
}
# Of int4 in groups of less than 128: registers hold scales and zero points of less of k.
SMALL_GROUP_TILES = (Tile(8, 32, 512, 4, 4), Tile(16, 32, 256, 4, 3), Tile(32, 32, 256, 4, 2), Tile(64, 64, 128, 4, 2))
# Of 4-bit floats: those that `wgmma` takes from registers, Triton would compute one by one.
FLOAT4_TILES = (Tile(8, 32, 512, 4, 4), Tile(16, 32, 512, 4, 4), Tile(32, 32, 512, 4, 2), Tile(64, 32, 256, 4, 2))
# Where columns are enough for as many programs as fit, which then share no sums.
MANY_COLUMNS = {8: (Tile(8, 16, 512, 4, 4), Tile(16, 64, 256, 4, 2)), 4: ()}
# Most rows of `x` that are loaded, and not read by TMA (`quantized.chunked_rows`): of weights of 8 bits on Hopper, by whether
# columns are many, and whether all of k shares a scale.
LOADED_ROWS = {(True, True): 4, (True, False): 2, (False, True): 1, (False, False): 0}
# On Hopper, 4 bits with groups of a chunk or more. Tiles of 2 and 4 rows are computed as 8, but bring and keep only these.
MANY_INT4_COLUMNS = (Tile(16, 64, 512, 4, 3, True),)
HOPPER_ROWS = (2, 4, 8)
HOPPER_TILE, NARROW_HOPPER_TILE = Tile(8, 64, 512, 4, 4, True), Tile(8, 16, 1024, 4, 4)
WORD_ROWS = 16  # up to so many, weights of 4 bits are read in words
# For more rows, all of them in one tile, so that the weight is read once; with a weight of 16 bits cuBLAS computes them. int4
# has no such tile: because of `zero` it took up to twice as long as dequantizing the weight and multiplying.
WIDE_TILE, NARROW_TILE = Tile(128, 128, 128, 8, 1), Tile(128, 64, 128, 4, 2)
SMALL_TILE = Tile(128, 128, 64, 8, 1)  # of sm_120, whose 99 KiB hold one block of the others
MAX_STORED_ROWS = WIDE_TILE.block_m


def most_rows(stored: WeightFormat) -> int:
    """Most rows of `x` with a weight of this format."""
    return MAX_STORED_ROWS if stored.bits == 8 or stored.float4 else MAX_ROWS


@dataclass(frozen=True)
class Config:
    """A tile, programs that share its k, Triton's count of stages, and programs that a multiprocessor holds at once; `full`: it
    has no room for more of them, so that a launch may be early. `chunk` divides k; below `WARPGROUP` columns warps take it.
    `loaded`: rows of `x` are (`quantized.chunked_rows`). `max_registers` of a thread, if not as many as the assembler likes."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    splits: int
    num_stages: int
    programs: int
    full: bool
    chunk: int = CHUNK
    chunked: bool = False
    loaded: bool = False
    max_registers: int | None = None

    @property
    def chunks(self) -> bool:
        """As of `Tile`."""
        return self.chunked or self.block_n < WARPGROUP.value

    @property
    def limit(self) -> dict[str, int]:
        """`max_registers` as a launch takes it."""
        return {} if self.max_registers is None else {"maxnreg": self.max_registers}


def _hopper_tile(m: int, n: int, k: int, stored: WeightFormat) -> Tile | None:
    """The tile of a weight of 4 bits on Hopper, None if it is one of those of all GPUs."""
    if stored.bits != 4 or m > HOPPER_ROWS[-1] or k % 128 or not (stored.float4 or stored.columns % 128 == 0):
        return None
    rows = next(rows for rows in HOPPER_ROWS if m <= rows)
    # The fewer rows, the less it takes to add up the sums of several programs; narrow tiles need fewer such sums.
    wide = n >= 16384 or (n >= 4096 and (rows <= 2 or (rows <= 4 and k >= 8192)))
    return (HOPPER_TILE if wide else NARROW_HOPPER_TILE)._replace(block_m=rows)


def choose(m: int, n: int, k: int, sms: int, arch: int, stored: WeightFormat | None = None) -> Config:
    """`stored`: the weight's format, by default 16 bits."""
    tiles, loaded = TILES, False
    if stored is not None and stored.bits < 16:
        chunked = stored.kind == "int4" and stored.columns % 128 == 0 and 90 <= arch < 100
        tiles = MANY_INT4_COLUMNS if chunked else MANY_COLUMNS[stored.bits]
        many = tuple(tile for tile in tiles if n >= tile.block_n * tile.programs * sms)
        loaded = stored.bits == 8 and 90 <= arch < 100 and m <= LOADED_ROWS[bool(many), stored.columns == k]
        few = FLOAT4_TILES if stored.float4 else QUANTIZED_TILES[stored.bits]
        few = SMALL_GROUP_TILES if stored.kind == "int4" and stored.columns < 128 else few
        wide = WIDE_TILE if stored.bits == 8 and n >= WIDE_TILE.block_n * sms else NARROW_TILE
        tiles = (*many, *few, SMALL_TILE if arch >= 120 else wide)
        if 90 <= arch < 100 and (hopper := _hopper_tile(m, n, k, stored)) is not None:
            tiles = (hopper,)
    return replace(fitted(next(tile for tile in tiles if m <= tile.block_m), n, k, sms, arch, stored), loaded=loaded)


def fitted(
    tile: Tile, n: int, k: int, sms: int, arch: int, stored: WeightFormat | None = None, splits: int | None = None
) -> Config:
    """As many splits as give every program its place at once, unless they are given, and as many blocks in flight as shared
    memory holds."""
    block_m, block_n, block_k, num_warps, most, chunked = tile
    chunk, bits = CHUNK, 16
    if stored is not None and stored.bits < 16:
        # A row of shared memory holds 128 numbers of 8 bits, but a chunk has one scale, unless numbers are scaled.
        chunk, bits = 128 if k % 128 == 0 else 64, stored.bits
        if tile.chunks or not stored.float4:
            chunk = min(chunk, block_k // num_warps if stored.float4 else stored.columns)
        block_k = block_k if tile.chunks or stored.float4 else min(block_k, stored.columns)
    blocks = triton.cdiv(k, block_k)
    words = bits == 4 and tile.chunks and block_m <= WORD_ROWS
    buffer = block_k * (block_n * bits // 8 + 2 * block_m)
    if words and stored is not None and stored.kind == "int4":
        buffer += 4 * block_n * block_k // chunk  # scales and zero points
        most = min(most, 3) if chunk == 32 else most  # by registers
    rest = 2048  # 1 KB of each program's shared memory is the system's; barriers
    if block_m > MAX_ROWS:
        rest += 2 * block_k * block_m  # Triton's buffer more of what an asynchronous product reads
    elif bits < 16 and not tile.chunks:
        # A tile's sums on their way to memory, and what tcgen05 does not take from registers: numbers of 4 bits, and ones.
        rest += 4 * block_n * block_m + 2 * block_n * block_k * (bits == 4 and 100 <= arch < 120)
    if stored is not None and stored.float4:
        rest += (1 if words else 4) * block_n * block_k // stored.columns  # scales on their way between threads
    elif bits == 4 and tile.chunks and not words and chunk < 128:
        rest += (256 << 10) // chunk  # what threads exchange of narrow chunks, as compiled
    shared = SHARED.get(arch, 99) * 1024
    programs = max(1, min(most, shared // (2 * buffer + rest)))
    # At least two blocks for each, and partial sums of at most a quarter of the weight's bytes.
    tiles = triton.cdiv(n, block_n)
    if splits is None:
        splits = max(1, min(sms * programs // tiles, blocks // 2, k * bits // (128 * block_m)))
    programs = min(programs, triton.cdiv(tiles * splits, sms))  # the rest of the memory is for blocks in flight
    room = (shared // programs - rest) // buffer
    buffers = min(room, triton.cdiv(blocks, splits))
    if words and 90 <= arch < 100:
        # Room for no program more, so that a launch may be early, even if that is more buffers than blocks.
        buffers = max(buffers, min(room, ((shared + 1024) // (programs + 1) - 1024) // buffer + 1))
    # A stage is the product itself, except that Triton adds a buffer where the product is asynchronous (wgmma, tcgen05): where
    # it reads the weight's buffer.
    asynchronous = not tile.chunks and 90 <= arch < 120 and bits == 16
    # Not on sm_120: its 99 KiB leave two to four blocks in flight, and Triton 3.6 keeps values on the stack to ask for two.
    full = arch < 120 and (programs + 1) * (buffers * buffer + 1024) > shared + 1024
    full |= words and 90 <= arch < 100 and block_n == 64 and num_warps * programs >= 16  # by registers
    stages = max(2, buffers + (not asynchronous))
    # Else the assembler takes some more, or spills: for MXFP4 because of a second loop, which nearly never runs.
    limited = words and stored is not None and (stored.kind == "mxfp4" or block_n * block_m >= 512 or chunk == 32)
    limit = min(255, 65536 // (32 * num_warps * programs) // 8 * 8) if limited else None
    return Config(block_m, block_n, block_k, num_warps, splits, stages, programs, full, chunk, chunked, max_registers=limit)


def takes_words(stored: WeightFormat, config: Config) -> bool:
    """Whether the weight is read as words of eight numbers."""
    return stored.bits == 4 and config.chunks and config.block_m <= WORD_ROWS
