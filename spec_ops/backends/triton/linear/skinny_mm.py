"""Products of at most 64 rows with a weight that is read once: `x [m, k] @ weight [n, k]^T` in one launch.

Such a product takes as long as its weight takes to come from memory, so all multiprocessors have to ask for weights all the
time. A program computes `BLOCK_N` columns for all rows, over a share of k where there are fewer tiles than programs fit
(`splits`): then each writes a partial sum and announces it, and the last one adds them up, always in the order of k. Weights
are the long operand (`out^T = weight x^T`), so that rows pad to 8 and not to 64.

Every program reads all rows over its share of k, from L2: `BLOCK_M / BLOCK_N` bytes of `x` for each byte of the weight. Up to
16 rows that is at most one, and narrow tiles, of which each warp takes a chunk of k, need the fewest partial sums. With more
rows a tile has the 64 columns of a warpgroup's instruction (`wgmma`), which reads both operands from shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_ops.backends.registry import device_arch
from spec_ops.backends.triton.attention.schedule import arrive
from spec_ops.backends.triton.attention.tuning import SHARED
from spec_ops.backends.triton.runtime.ahead import ARCHS, Variant
from spec_ops.backends.triton.runtime.counters import arrival_counters
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, num_sms

CHUNK = 64  # of k: what one row of shared memory holds (128 bytes)
WARPGROUP = tl.constexpr(64)  # columns from which a tile is one product of 128 threads
ASKED = 2  # blocks of the weight that a program asks for before it may begin, if it is launched early


class Tile(NamedTuple):
    """What a program computes at a time, `block_k` of k in each iteration, and how many programs a multiprocessor gets at most.

    Below `WARPGROUP` columns each warp has a chunk of k.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    programs: int


# The first that holds the rows; figures in `docs/notebook/products.md`.
TILES = (Tile(8, 16, 256, 4, 3), Tile(16, 16, 256, 4, 3), Tile(32, 64, 128, 4, 1), Tile(64, 64, 128, 4, 1))
MAX_ROWS = TILES[-1].block_m


@dataclass(frozen=True)
class Config:
    """A tile, programs that share its k, Triton's count of stages, and programs that a multiprocessor holds at once; `full`: it
    has no room for more of them, so that a launch may be early."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    splits: int
    num_stages: int
    programs: int
    full: bool


def choose(m: int, n: int, k: int, sms: int, arch: int) -> Config:
    return fitted(next(tile for tile in TILES if m <= tile.block_m), n, k, sms, arch)


def fitted(tile: Tile, n: int, k: int, sms: int, arch: int) -> Config:
    """As many splits as give every program its place at once, and as many blocks in flight as shared memory holds."""
    block_m, block_n, block_k, num_warps, most = tile
    blocks = triton.cdiv(k, block_k)
    buffer = 2 * block_k * (block_n + block_m)
    rest = 2048  # 1 KB of each program's shared memory is the system's; barriers
    shared = SHARED.get(arch, 99) * 1024
    programs = max(1, min(most, shared // (2 * buffer + rest)))
    # At least two blocks for each, and partial sums of at most a quarter of the weight's bytes.
    tiles = triton.cdiv(n, block_n)
    splits = max(1, min(sms * programs // tiles, blocks // 2, k // (8 * block_m)))
    programs = min(programs, triton.cdiv(tiles * splits, sms))  # the rest of the memory is for blocks in flight
    buffers = min((shared // programs - rest) // buffer, triton.cdiv(blocks, splits))
    # A stage is the product itself, except that Triton adds a buffer where the product is asynchronous (wgmma, tcgen05).
    asynchronous = block_n >= WARPGROUP.value and 90 <= arch < 120
    # Not on sm_120: its 99 KiB leave two to four blocks in flight, and Triton 3.6 keeps values on the stack to ask for two.
    full = arch < 120 and (programs + 1) * (buffers * buffer + 1024) > shared + 1024
    return Config(block_m, block_n, block_k, num_warps, splits, max(2, buffers + (not asynchronous)), programs, full)


@triton.jit
def ask_for_weight(
    weight, row_stride, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, ASKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Before the wait for earlier kernels: this program's first `ASKED` blocks of the weight on their way to L2. No kernel's
    result is read or overtaken by that, not even where one writes the weight: L2 is what all of them see."""
    if PDL and ASKED > 0:
        pid = tl.program_id(0)
        first = pid % SPLITS * tl.cdiv(K, BLOCK_K) // SPLITS
        LINES: tl.constexpr = ASKED * BLOCK_K // 64  # of 128 bytes in a row
        i = tl.arange(0, BLOCK_N * LINES)
        row = tl.minimum(pid // SPLITS * BLOCK_N + i // LINES, N - 1)
        column = tl.minimum(first * BLOCK_K + i % LINES * 64, K - 1)
        line = (weight + row.to(tl.int64) * row_stride + column).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def products(
    x, weight, partial, counters, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This program's tile of the transposed product, `[BLOCK_N, BLOCK_M]`, and whether it is summed over all of k, as
    only the last program of a tile to arrive has it. The arguments are those of `skinny_mm_kernel`."""
    pid = tl.program_id(0)
    tile = pid // SPLITS
    split = pid % SPLITS
    blocks = tl.cdiv(K, BLOCK_K)
    first = split * blocks // SPLITS
    end = (split + 1) * blocks // SPLITS
    if BLOCK_N < WARPGROUP:
        # A batch of products, of which Triton gives each warp its own: no warp reads what another one reads.
        CHUNKS: tl.constexpr = BLOCK_K // CHUNK
        sums = tl.zeros([CHUNKS, BLOCK_N, BLOCK_M], tl.float32)
        for block in tl.range(first, end, num_stages=STAGES):
            columns = weight.load([block * CHUNKS, tile * BLOCK_N, 0])
            rows = x.load([block * CHUNKS, 0, 0])
            sums = tl.dot(columns, tl.permute(rows, (0, 2, 1)), sums)
        acc = tl.sum(sums, 0)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for block in tl.range(first, end, num_stages=STAGES):
            columns = weight.load([tile * BLOCK_N, block * BLOCK_K])
            rows = x.load([0, block * BLOCK_K])
            acc = tl.dot(columns, tl.permute(rows, (1, 0)), acc)
    complete = True
    if SPLITS > 1:
        local = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(partial + pid * (BLOCK_N * BLOCK_M) + local, acc)
        complete = (arrive(counters + tile, SPLITS) & 0xFFFF) == SPLITS - 1
        if complete:
            # Its own sum is read back too: the order of addition must not depend on who is last.
            parts = partial + tile * (SPLITS * BLOCK_N * BLOCK_M) + local
            if BLOCK_N < WARPGROUP:
                acc = tl.load(parts)
                for i in tl.static_range(1, SPLITS):
                    acc += tl.load(parts + i * (BLOCK_N * BLOCK_M))
            else:
                # ptxas keeps few such reads in flight, so they go through shared memory, as many as fit where blocks were.
                ROOM: tl.constexpr = ((STAGES - 1) * BLOCK_K * (BLOCK_N + BLOCK_M)) // (2 * BLOCK_N * BLOCK_M)
                acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for i in tl.range(0, SPLITS, num_stages=min(SPLITS, ROOM) + 1):
                    acc += tl.load(parts + i * (BLOCK_N * BLOCK_M))
    return acc, complete


@triton.jit
def store_transposed(out, acc, n, m, N, M):
    """`acc`, at columns `n` and rows `m`, to the contiguous `out [M, N]`."""
    to = out + m[None, :] * N + n[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["M"])
def skinny_mm_kernel(
    x, weight, partial, counters, M, N, K, weight_rows, row_stride, bias, out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, ASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`x`, `weight`: tensor descriptors of what `_block_shape` says, of `BLOCK_M` and `BLOCK_N` rows. `partial`, `counters`: of
    the sums that the programs of a tile exchange, None if there is one. `weight_rows`: the weight, as a pointer. `bias [N]`
    or None; `out [M, N]` is contiguous."""
    ask_for_weight(weight_rows, row_stride, N, K, BLOCK_N, BLOCK_K, SPLITS, ASKED, PDL)
    await_predecessors(PDL)
    acc, complete = products(x, weight, partial, counters, K, BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, SPLITS, STAGES)
    if complete:
        n = tl.program_id(0) // SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        store_transposed(out, acc, n, tl.arange(0, BLOCK_M), N, M)


@functools.cache
def _arch(device: torch.device) -> int:
    return device_arch(device) or 90  # Triton's interpreter stands in for sm_90


def _tma_reads(rows: torch.Tensor) -> bool:
    """Whether a tensor descriptor can read `rows [n, k]`: unit columns, rows and start at multiples of 16 bytes."""
    aligned = rows.stride(0) * rows.element_size() % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] and aligned


def _block_shape(rows: int, config: Config) -> list[int]:
    """Of `[k / CHUNK, n, CHUNK]` where warps take chunks, of `[n, k]` else."""
    if config.block_n < WARPGROUP.value:
        return [config.block_k // CHUNK, rows, CHUNK]
    return [rows, config.block_k]


def _descriptor(matrix: torch.Tensor, rows: int, config: Config) -> TensorDescriptor:
    (n, k), block = matrix.shape, _block_shape(rows, config)
    if len(block) == 3:
        return TensorDescriptor(matrix, [k // CHUNK, n, CHUNK], [CHUNK, matrix.stride(0), 1], block)
    return TensorDescriptor(matrix, [n, k], [matrix.stride(0), 1], block)


def run(
    kernel: Any, name: str, x: torch.Tensor, weight: torch.Tensor, config: Config | None, *args: Any, **constants: Any
) -> None:
    """Launches `kernel`, which takes what `skinny_mm_kernel` takes up to `row_stride` and then `args`, for the op `name`.

    An `x` that TMA cannot read is copied.

    Raises:
        ValueError: more than `MAX_ROWS` rows, 2^31 outputs or more, k no multiple of 64, or a weight that TMA cannot read.
    """
    (m, k), n = x.shape, weight.shape[0]
    if m > MAX_ROWS:
        raise ValueError(f"{name}: `x` must have at most {MAX_ROWS} rows, got {m}")
    if m * n >= 2**31:  # kernels address the output in 32 bits
        raise ValueError(f"{name}: `x` rows times `weight` rows must be less than 2^31, got {m} times {n}")
    if k == 0 or k % CHUNK:
        raise ValueError(f"{name}: the columns of `x` must be a multiple of {CHUNK}, got {k}")
    if not _tma_reads(weight):
        raise ValueError(
            f"{name}: `weight` must have contiguous rows that start at multiples of 16 bytes, got strides "
            f"{tuple(weight.stride())} at address {weight.data_ptr():#x}"
        )
    x = x if _tma_reads(x) else x.clone(memory_format=torch.contiguous_format)
    config = config or choose(m, n, k, num_sms(x.device), _arch(x.device))
    block_m, block_n, splits = config.block_m, config.block_n, config.splits
    tiles = triton.cdiv(n, block_n)
    partial = counters = None
    if splits > 1:
        partial = torch.empty(tiles * splits * block_n * block_m, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device, tiles, "skinny_mm")
    with device_guard(x):
        launch(
            kernel, (tiles * splits,), _descriptor(x, block_m, config), _descriptor(weight, block_n, config), partial, counters,
            m, n, k, weight, weight.stride(0), *args, **constants, **_constants(config), num_warps=config.num_warps,
            early=config.full,
        )  # fmt: skip


def _constants(config: Config) -> dict[str, Any]:
    return {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "CHUNK": CHUNK,
        "SPLITS": config.splits, "STAGES": config.num_stages, "ASKED": ASKED if config.full else 0,
    }  # fmt: skip


def skinny_mm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Config | None = None) -> torch.Tensor:
    """See `spec_ops.ops.linear`; raises as `run` does."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    if out.numel():
        run(skinny_mm_kernel, "skinny_mm", x, weight, config, None if bias is None else bias.contiguous(), out)
    return out


def ahead() -> Iterator[Variant]:
    shapes = (
        [(m, 6144, 4096) for m in (4, 32, 64)] + [(m, 4096, 4096) for m in (16, 32)] + [(m, 1536, 7168) for m in (4, 16, 64)]
    )
    for shape in shapes:
        yield from variants(skinny_mm_kernel, "skinny_mm", shape, {"out": "*bf16:16"}, {"bias": None})


def variants(
    kernel: Any, name: str, shape: tuple[int, int, int], signature: dict[str, str], constexprs: dict[str, Any]
) -> Iterator[Variant]:
    """The variants of `kernel` for m, n and k; `signature` and `constexprs` are of the arguments that `skinny_mm_kernel` lacks
    or that follow its `row_stride`."""
    chosen: dict[Config, list[int]] = {}
    for arch in (a for a in ARCHS if a >= 90):  # older ones have no tensor descriptors, and no pass gives them these products
        chosen.setdefault(choose(*shape, 132, arch), []).append(arch)
    m, n, k = shape
    for config, archs in chosen.items():
        blocks = {
            key: f"tensordesc<bf16{_block_shape(rows, config)}>"
            for key, rows in (("x", config.block_m), ("weight", config.block_n))
        }
        split = {"partial": "*fp32:16", "counters": "*i32:16"}
        sizes = {"M": "i32", "N": "i32:16", "K": "i32:16", "weight_rows": "*bf16:16", "row_stride": "i32:16"}
        yield Variant(
            f"{name}, {m} x {n} x {k} on sm_{archs[0]}",
            kernel,
            {**blocks, **sizes, **(split if config.splits > 1 else {}), **signature},
            {**_constants(config), **({} if config.splits > 1 else dict.fromkeys(split)), **constexprs},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            archs=tuple(archs),
            programs=config.programs,
            early=config.full,
        )
