"""What the Gluon kernels of products on Hopper share (`hopper_mm.py`, `hopper_float8.py`): a warp that loads, and programs with
equal shares of a weight's blocks of k.

The blocks of all tiles are one list, one tile after the other, and each program has as many of them as the others. So a tile
may be shared by several. Each then writes its sum, and the last one to arrive adds them up, in the order of k: none waits for
another. How many programs there are, and whether they share tiles at all, is said in `hopper_tiles.py`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from spec_ops.backends.triton.attention.hopper.program import (
    await_predecessors,
    barrier,
    next_stage,
    opaque_zero,
    range_of,
    range_start,
)
from spec_ops.backends.triton.linear.hopper_tiles import WIDTH
from spec_ops.backends.triton.runtime.counters import arrival_counters
from spec_ops.backends.triton.runtime.launch import num_sms


@gluon.jit
def shares(partial, tiles, blocks):
    """The first block of this program's and the one after its last, the `share` and `longer` of all (`range_start`), and how
    many blocks a tile has in the list; whole tiles if there is no place for `partial` sums.

    Programs of which each tile has as many have no block of another: a tile then ends with blocks that nobody has, so that its
    last program may have fewer than the others."""
    programs = gl.num_programs(0)
    index = gl.program_id(0)
    pitch = blocks
    unit = 1
    if partial is None:
        unit = blocks
    total = tiles * (blocks // unit)
    share = total // programs
    longer = total - share * programs
    start = range_start(index, share, longer) * unit
    stop = range_start(index + 1, share, longer) * unit
    if partial is not None:  # noqa: SIM102  # known when the kernel is compiled, the other when it runs
        if programs % tiles == 0:
            splits = programs // tiles
            share = gl.cdiv(blocks, splits)
            longer = longer * 0
            pitch = share * splits
            start = index * share
            stop = gl.minimum(start + share, index // splits * pitch + blocks)
    return start, stop, share, longer, pitch


@gluon.jit
def _ask_for_weight(rows, row_stride, n0, column, N, WIDTH: gl.constexpr):
    """`WIDTH` rows of the weight, from byte `column` on, on their way to L2, as `skinny_mm.ask_for_weight` does it."""
    row = gl.minimum(n0 + gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [1], [0])), N - 1)
    line = (rows + row.to(gl.int64) * row_stride + column).to(gl.int64)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _copy_factors(factors, row_stride, column_stride, block, M, to, full):
    """Those of a block of k on their way to shared memory; for rows beyond the last those of the last one. `full` counts them
    too."""
    row = gl.minimum(gl.arange(0, to.shape[0], gl.BlockedLayout([1], [32], [1], [0])), M - 1)
    at = factors + row.to(gl.int64) * row_stride + block.to(gl.int64) * column_stride
    async_copy.async_copy_global_to_shared(to, at)
    async_copy.mbarrier_arrive(full)
    barrier()  # every lane is counted before one arrives


@gluon.jit
def load_blocks(
    x, weight, weight_rows, row_stride, N, x_smem, w_smem, full, free, start, stop, blocks, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr, factors=None, factor_row=None, factor_column=None, f_smem=None, M=None,
    X_PARTS: gl.constexpr = 1,
):  # fmt: skip
    """The loading warp: each block of the weight and of the rows, as many tiles of them as `X_PARTS`, and of `factors
    [M, blocks]`, float32, a number for each row.

    Before the wait for earlier kernels it asks for its first blocks of the weight: their way to L2."""
    WIDTH: gl.constexpr = w_smem.shape[1]
    STORED: gl.constexpr = w_smem.shape[2]
    BLOCK_K: gl.constexpr = x_smem.shape[2]
    ROW_BYTES: gl.constexpr = BLOCK_K * x_smem.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = X_PARTS * x_smem.shape[1] * ROW_BYTES + CONSUMERS * WIDTH * STORED
    if PDL:
        for position in range(start, gl.minimum(stop, start + STAGES)):
            tile = position // blocks
            for c in gl.static_range(CONSUMERS):
                n0 = (tile * CONSUMERS + c) * WIDTH
                _ask_for_weight(weight_rows, row_stride, n0, (position - tile * blocks) * STORED, N, WIDTH)
    await_predecessors(PDL)
    stage = 0
    phase = 1  # all stages are free: waiting for the phase before the first does not wait
    for position in range(start, stop):
        tile = position // blocks
        block = position - tile * blocks
        mbarrier.wait(free.index(stage), phase)
        if factors is not None:
            _copy_factors(factors, factor_row, factor_column, block, M, f_smem.index(stage), full.index(stage))
        mbarrier.expect(full.index(stage), BYTES)
        for c in gl.static_range(CONSUMERS):
            at = [(tile * CONSUMERS + c) * WIDTH, block * STORED]
            tma.async_copy_global_to_shared(weight, at, full.index(stage), w_smem.index(stage * CONSUMERS + c))
        tma.async_copy_global_to_shared(x, [0, block * BLOCK_K], full.index(stage), x_smem.index(stage * X_PARTS))
        if X_PARTS == 2:
            rests = x_smem.index(stage * X_PARTS + 1)
            tma.async_copy_global_to_shared(x, [x_smem.shape[1], block * BLOCK_K], full.index(stage), rests)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _in_order(acc):
    """`acc`, sums of `wgmma`, as one row: four numbers of a thread, then the next thread's. So threads read and write 16 bytes
    at a time, and warps 512."""
    WIDTH: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    split = gl.reshape(acc, [WIDTH // 16, 2, 8, ROWS // 8, 4, 2])
    return gl.reshape(gl.permute(split, (3, 0, 2, 4, 1, 5)), [WIDTH * ROWS])


@gluon.jit
def _as_sums(row, WIDTH: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """The inverse of `_in_order`."""
    split = gl.reshape(row, [ROWS // 8, WIDTH // 16, 8, 4, 2, 2])
    acc = gl.reshape(gl.permute(split, (1, 4, 2, 0, 3, 5)), [WIDTH, ROWS])
    return gl.convert_layout(acc, layout, assert_trivial=True)


@gluon.jit
def combined(
    acc, partial, counters, tile, first, last, blocks, index, share, longer, CONSUMERS: gl.constexpr, WARPGROUP: gl.constexpr
):  # fmt: skip
    """The sum over all of k of `acc`, of blocks `first` to `last` of a tile, and whether this program has it: the last one to
    arrive, which adds the programs' sums in the order of k."""
    complete = (first == 0) & (last == blocks)
    if not complete:
        SUMS: gl.constexpr = acc.type.layout
        WIDTH: gl.constexpr = acc.shape[0]
        ROWS: gl.constexpr = acc.shape[1]
        SLOT: gl.constexpr = CONSUMERS * WIDTH * ROWS
        written = _in_order(acc)
        mine = partial + WARPGROUP * (WIDTH * ROWS) + gl.arange(0, WIDTH * ROWS, written.type.layout)
        # A program has at most two unfinished tiles: one that began before it (slot 0) and one that goes on after it (slot 1).
        gl.store(mine + (2 * index + (first == 0).to(gl.int32)) * SLOT, written)
        first_program = range_of(tile * blocks, share, longer)
        last_program = range_of(tile * blocks + blocks - 1, share, longer)
        counter = counters + tile * CONSUMERS + WARPGROUP
        barrier()  # every thread's part is written before one thread announces it
        arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        complete = arrived == last_program - first_program
        if complete:
            gl.store(counter, 0)  # for the next launch
            # .cg: partial sums come from other multiprocessors, so L1 must not answer
            whole = gl.load(mine + (2 * first_program + 1) * SLOT, cache_modifier=".cg")
            ahead = gl.load(mine + 2 * (first_program + 1) * SLOT, cache_modifier=".cg")
            for program in range(first_program + 2, last_program + 1):
                part = ahead
                ahead = gl.load(mine + 2 * program * SLOT, cache_modifier=".cg")
                whole += part
            whole += ahead
            acc = _as_sums(whole, WIDTH, ROWS, SUMS)
    return acc, complete


@gluon.constexpr_function
def _line_layout(columns, rows):
    """Of results `[columns, rows]`: a warp has the columns that it has of a product's sums, a thread four of a row. So what it
    writes at a time is 8 rows of 32 bytes."""
    registers = [[1, 0], [2, 0]]
    row = 8
    while row < rows:
        registers.append([0, row])
        row *= 2
    return gl.DistributedLinearLayout(
        registers, [[4, 0], [8, 0], [0, 1], [0, 2], [0, 4]], [[16, 0], [32, 0]], [], [columns, rows]
    )  # fmt: skip


@gluon.jit
def store_sums(out, acc, n0, M, N, LINES: gl.constexpr):
    """`acc`, of columns from `n0` on and all rows, to the contiguous `out [M, N]`.

    `LINES`: by way of shared memory, 4 KiB for a warpgroup, so that threads write several columns at a time."""
    wanted: gl.constexpr = _line_layout(acc.shape[0], acc.shape[1]) if LINES else acc.type.layout
    written = acc.to(out.dtype.element_ty)
    if LINES:
        written = gl.convert_layout(written, wanted)
    n = n0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, wanted))
    m = gl.arange(0, acc.shape[1], gl.SliceLayout(0, wanted)) + opaque_zero()  # else places of all rows are kept through loops
    at = out + gl.expand_dims(m * N, 0) + gl.expand_dims(n, 1)
    gl.store(at, written, mask=gl.expand_dims(m < M, 0) & gl.expand_dims(n < N, 1))


def divided(
    device: torch.device, name: str, tiles: int, blocks: int, consumers: int, block_m: int, splits: int = 0
) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
    """Programs for `tiles` of `blocks` of k, `consumers` warpgroups and `block_m` rows, and where they exchange sums and count
    arrivals; None if each has whole tiles. `name`: of the kernel whose counters they are. `splits`: `hopper_tiles.splits_of`;
    with 1 there are as few programs as give none more tiles than it must have."""
    sms = num_sms(device)
    programs = min(sms, tiles * blocks)
    if splits == 1:
        programs = triton.cdiv(tiles, triton.cdiv(tiles, sms))
    elif splits:
        programs = tiles * min(splits, blocks)
    if programs > tiles and programs % tiles == 0:  # each tile has as many: none without a block (`shares`)
        programs = tiles * triton.cdiv(blocks, triton.cdiv(blocks, programs // tiles))
    if splits == 1 or tiles % programs == 0:
        return programs, None, None
    partial = torch.empty(2 * programs * consumers * WIDTH * block_m, dtype=torch.float32, device=device)
    return programs, partial, arrival_counters(device, tiles * consumers, name)


def tiles_of(n: int, consumers: int) -> int:
    """How many tiles a weight of `n` columns has."""
    return triton.cdiv(n, consumers * WIDTH)
