"""What a program of each of the two kernels of `few.py` works on, and how many of them there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

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


class ScaledTile(NamedTuple):
    """What a program works on where numbers are scaled, and warps have chunks of k: rows of the weight, all of its loads
    together, and `block_k` of each; how many programs a multiprocessor gets at most, by registers. Figures:
    `docs/notebook/mixtures.md`."""

    rows: int
    block_k: int
    programs: int


# By tokens. More of them take the tile of 64 columns for `wgmma`.
SCALED_TILES = {8: ScaledTile(32, 512, 4), 16: ScaledTile(64, 256, 4), 32: ScaledTile(64, 256, 3)}


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
    first = _fitted(tokens, inner * (1 + halves), hidden, 1, sizes.tiles, chunked, sms, arch, bits, scaled, loads)
    block_n = first.block_n // (1 + halves)
    first = replace(first, block_n=block_n, rows=block_n * (1 + neighbours))
    return first, _fitted(tokens, hidden, inner, min(k, experts), 1, few and inner % CHUNK == 0, sms, arch, bits, scaled)


def _fitted(
    tokens: int, columns: int, inner: int, products: int, tiles: int, chunked: bool, sms: int, arch: int, bits: int,
    scaled: bool, loads: int = 1,
) -> Config:  # fmt: skip
    """For a product of `columns` columns over `inner`, of which a program adds up `products` at least.

    Args:
        tiles: that share the grid: 1, or the experts.
        loads: of the weight, of as many rows as there are columns, in each iteration.
    """
    block_m = next(m for m in (8, 16, 32, MAX_TOKENS) if tokens <= m)
    block_n, block_k, most = (16, 256, 3) if chunked else (64, 128 // loads, 2)
    chunk = CHUNK
    rest = 2048  # 1 KB of each program's shared memory is the system's; barriers
    if scaled and chunked:
        rows, block_k, most = SCALED_TILES[block_m]
        block_n = rows // loads
        # A batch of fewer products than warps is computed twice.
        chunk = 128 if inner % 128 == 0 and block_k >= 4 * 128 else CHUNK
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
    splits = 1
    if tiles == 1:  # at least two blocks for each, and partial sums of at most a quarter of the weight's bytes
        splits = max(1, min(sms * programs // grid, blocks // 2, products * inner * bits // (128 * block_m)))
    programs = min(programs, triton.cdiv(grid * splits, sms))
    buffers = max(2, min((shared // programs - rest) // buffer, triton.cdiv(blocks, splits)))
    asynchronous = not chunked and 90 <= arch < 120 and bits == 16
    full = arch < 120 and (programs + 1) * (buffers * buffer + 1024) > shared + 1024
    stages = buffers + (not asynchronous)
    again = scaled and chunked and block_m <= 16
    # What is computed again would take more of them than the first time.
    registers = 65536 // (128 * room) // 8 * 8 if again and room > 2 else None
    return Config(
        block_m, block_n, block_n, block_k, chunked, splits, stages, programs, full, chunk, 4, scaled, again, registers
    )  # fmt: skip
