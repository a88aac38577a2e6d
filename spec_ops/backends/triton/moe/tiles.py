"""What a program of each of the two kernels of `few.py` works on, and how many of them there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from spec_ops.backends.triton.attention.tuning import SHARED
from spec_ops.backends.triton.linear.operands import CHUNK

MAX_TOKENS = 64


@dataclass(frozen=True)
class Config:
    """What a program of one of the two kernels works on.

    Attributes:
        block_m: tokens. block_n: columns of the result. rows: of the weight, in one load; twice as many as columns where a
            gate's and one of the up projection are neighbours. block_k: of the inner dimension, in each iteration.
        chunked: each warp has a chunk of k (`skinny_mm.py`).
        splits: programs that share the inner dimension.
        num_stages: Triton's. programs: that a multiprocessor holds at once.
        full: it has no room for more of them, so that a launch may be early.
        chunk: of k, what a warp has.
        num_warps: of a program.
        scaled: numbers of MXFP4 are, two at a time, and not sums (`stored.py`).
        again: sums are computed again where a scale was too great for one factor (`linear/float4_words.py`).
        max_registers: of a thread; None: as many as the assembler likes.
        ranges: programs that share all tiles (`ranges.py`); 0: each has one.
    """

    block_m: int
    block_n: int
    rows: int
    block_k: int
    chunked: bool
    splits: int
    num_stages: int
    programs: int
    full: bool
    chunk: int = CHUNK
    num_warps: int = 4
    scaled: bool = False
    again: bool = False
    max_registers: int | None = None
    ranges: int = 0


class ScaledTile(NamedTuple):
    """What a program works on where numbers are scaled, and warps have chunks of k: rows of the weight, all of its loads
    together, and `block_k` of each; how many programs a multiprocessor gets at most, by registers; `ranges`: whether each goes
    through a range of tiles. Figures: `docs/notebook/mixtures.md`."""

    rows: int
    block_k: int
    programs: int
    ranges: bool = False


# By tokens, for both kernels. More of them take the tile of 64 columns for `wgmma`.
SCALED_TILES = {
    8: (ScaledTile(32, 512, 4), ScaledTile(32, 512, 4)),
    16: (ScaledTile(64, 256, 4), ScaledTile(64, 256, 4)),
    32: (ScaledTile(64, 256, 3), ScaledTile(64, 256, 3)),
}
# On Hopper. Tiles of 2 and 4 tokens are computed as 8, but bring and keep only these.
HOPPER_FEW = (ScaledTile(64, 512, 3, True), ScaledTile(32, 1024, 3))
HOPPER_SCALED_TILES = {**SCALED_TILES, 2: HOPPER_FEW, 4: HOPPER_FEW, 8: HOPPER_FEW}


class Sizes(NamedTuple):
    """Of a call of `moe_experts`, and its layout. `scaled`: as in `Config`."""

    tokens: int
    k: int
    experts: int
    hidden: int
    inner: int
    gated: bool
    interleaved: bool
    transposed: bool
    bits: int = 16
    scaled: bool = False

    @property
    def tiles(self) -> int:
        """Experts that may be touched."""
        return min(self.experts, self.tokens * self.k)


def choose(sizes: Sizes, sms: int, arch: int) -> tuple[Config, Config]:
    """For both kernels."""
    tokens, k, experts, hidden, inner, gated, interleaved, transposed, bits, scaled = sizes
    # With fewer bits the rows are more of what a program reads: it takes more columns sooner.
    few = tokens <= (max(SCALED_TILES) if scaled else 16 if bits == 16 else 8) and not transposed
    chunked = few and hidden % CHUNK == 0
    neighbours = gated and interleaved
    halves = neighbours and not chunked  # 64 rows of the weight are 32 columns of the result
    loads = 1 + (gated and not halves)
    block_m = next(m for m in (8, 16, 32, MAX_TOKENS) if tokens <= m)
    tiles: tuple[ScaledTile | None, ...] = (None, None)
    if scaled and few:
        known = HOPPER_SCALED_TILES if 90 <= arch < 100 else SCALED_TILES
        block_m = min(m for m in known if tokens <= m)
        tiles = known[block_m]
    first = _fitted(block_m, inner * (1 + halves), hidden, 1, sizes.tiles, chunked, sms, arch, bits, scaled, tiles[0], loads)
    block_n = first.block_n // (1 + halves)
    full = first.full or (first.ranges > 0 and neighbours and first.programs == 3)  # by registers
    first = replace(first, block_n=block_n, rows=block_n * (1 + neighbours), full=full)
    chunked = few and inner % CHUNK == 0
    return first, _fitted(block_m, hidden, inner, min(k, experts), 1, chunked, sms, arch, bits, scaled, tiles[1])


def _fitted(
    block_m: int, columns: int, inner: int, products: int, tiles: int, chunked: bool, sms: int, arch: int, bits: int,
    scaled: bool, tile: ScaledTile | None, loads: int = 1,
) -> Config:  # fmt: skip
    """For a product of `columns` columns over `inner`, of which a program adds up `products` at least.

    Args:
        tiles: that share the grid: 1, or the experts.
        tile: where numbers are scaled and warps have chunks.
        loads: of the weight, of as many rows as there are columns, in each iteration.
    """
    block_n, block_k, most = (16, 256, 3) if chunked else (64, 128 // loads, 2)
    chunk = CHUNK
    rest = 2048  # 1 KB of each program's shared memory is the system's; barriers
    if tile is not None:
        rows, block_k, most, _ = tile
        block_n = rows // loads
        # A batch of fewer products than warps is computed twice.
        chunk = 128 if block_k >= 4 * 128 else CHUNK
        rest += rows * block_k // 32  # scales on their way between threads
    elif bits < 16:
        # A row of shared memory holds 128 numbers of 8 bits, and no product has two scales.
        chunk = 128 if inner % 128 == 0 else CHUNK
        spilling = bits == 4 and loads == 2 and arch >= 120  # with 64 tokens: numbers of two weights, and sums, in registers
        block_k = 512 if chunked else 64 if spilling else 128
        most = 2 if bits == 4 else most  # by registers
        block_n *= 1 + (chunked and bits == 4 and loads == 1)
        if not chunked:
            # Sums on their way to memory, and numbers that tcgen05 does not take from registers.
            rest += 4 * loads * block_n * block_m + 2 * loads * block_n * block_k * (100 <= arch < (120 if bits == 8 else 121))
    buffer = block_k * (loads * block_n * bits // 8 + 2 * block_m)
    shared = SHARED.get(arch, 99) * 1024
    room = programs = max(1, min(most, shared // (2 * buffer + rest)))
    blocks, grid = products * triton.cdiv(inner, block_k), tiles * triton.cdiv(columns, block_n)
    if bits == 8 and chunked and tiles == 1 and sms * programs < grid <= sms * (programs + 1):
        # All at once, if each keeps three blocks: else most of the GPU waits for the few programs of a second wave.
        programs += (shared // (programs + 1) - rest) // buffer >= 3
    splits, shares = 1, 0
    if tile is not None and tile.ranges and tiles <= sms * programs:
        shares = min(grid, sms * programs)
        rest += 16 * rows * block_m  # sums of all warps, beside the next tile's blocks
    elif tiles == 1:  # at least two blocks for each, and partial sums of at most a quarter of the weight's bytes
        splits = max(1, min(sms * programs // grid, blocks // 2, products * inner * bits // (128 * block_m)))
    programs = min(programs, triton.cdiv(grid * splits, sms))
    most_buffers = (shared // programs - rest) // buffer
    buffers = max(2, most_buffers if shares else min(most_buffers, triton.cdiv(blocks, splits)))
    asynchronous = not chunked and 90 <= arch < 120 and bits == 16
    full = arch < 120 and (programs + 1) * (buffers * buffer + 1024) > shared + 1024
    stages = buffers + (not asynchronous)
    again = scaled and chunked and block_m <= 16
    # What is computed again would take more of them than the first time.
    registers = 65536 // (128 * room) // 8 * 8 if again and room > 2 else None
    return Config(
        block_m, block_n, block_n, block_k, chunked, splits, stages, programs, full, chunk, 4, scaled, again, registers, shares
    )  # fmt: skip


def tma_reads(weight: torch.Tensor) -> bool:
    """Whether a tensor descriptor can read `weight [E, rows, columns]`."""
    (expert, row, column), size = weight.stride(), weight.element_size()
    return column == 1 and not (expert * size % 16 or row * size % 16 or weight.data_ptr() % 16) and min(expert, row) > 0
