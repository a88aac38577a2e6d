"""Products of at most 16 rows with a weight that is read once: `x [m, k] @ weight [n, k]^T` in one launch.

Such a product takes as long as its weight takes to come from memory, so all multiprocessors have to ask for weights all the
time. A program computes `BLOCK_N` columns for all rows, over a share of k where there are fewer tiles than programs fit
(`splits`): then each writes a partial sum and announces it, and the last one adds them up, always in the order of k. Weights
are the long operand (`out^T = weight x^T`), so that rows pad to 8 and not to 64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_ops.backends.registry import device_arch
from spec_ops.backends.triton.ahead import ARCHS, Variant
from spec_ops.backends.triton.launch import device_guard, launch, num_sms
from spec_ops.backends.triton.schedule import arrive
from spec_ops.backends.triton.tuning import SHARED
from spec_ops.backends.triton.workspace import arrival_counters

MAX_ROWS = 16
CHUNK = 64  # of k: what one row of shared memory holds (128 bytes)
BLOCK_N, BLOCK_K, NUM_WARPS = 16, 256, 4  # a chunk of k for each warp; figures in `docs/decisions.md`
MAX_PROGRAMS = 3  # per multiprocessor


@dataclass(frozen=True)
class Config:
    """What follows from the sizes: padded rows, programs per tile, blocks in flight (Triton's count: one more), and programs
    that a multiprocessor holds at once."""

    block_m: int
    splits: int
    num_stages: int
    programs: int


def choose(m: int, n: int, k: int, sms: int, arch: int) -> Config:
    """As many splits as give every program its place at once, and as many blocks in flight as shared memory holds."""
    block_m = 8 if m <= 8 else 16
    blocks = triton.cdiv(k, BLOCK_K)
    buffer = 2 * BLOCK_K * (BLOCK_N + block_m)
    rest = 2048  # 1 KB of each program's shared memory is the system's; barriers
    shared = SHARED.get(arch, 99) * 1024
    programs = min(MAX_PROGRAMS, shared // (2 * buffer + rest))
    splits = max(1, min(sms * programs // triton.cdiv(n, BLOCK_N), blocks // 2))
    buffers = min((shared // programs - rest) // buffer, triton.cdiv(blocks, splits))
    return Config(block_m, splits, buffers + 1, programs)


@triton.jit(do_not_specialize=["M"])
def skinny_mm_kernel(
    x, weight, bias, out, partial, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`x`, `weight`: tensor descriptors of `[K / CHUNK, rows, CHUNK]`, blocks of `BLOCK_K / CHUNK` chunks and `BLOCK_M` or
    `BLOCK_N` rows. `bias [N]` or None; `out [M, N]` is contiguous."""
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    pid = tl.program_id(0)
    tile = pid // SPLITS
    split = pid % SPLITS
    blocks = tl.cdiv(K, BLOCK_K)
    # A batch of products, of which Triton gives each warp its own: no warp reads what another one reads.
    sums = tl.zeros([CHUNKS, BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(split * blocks // SPLITS, (split + 1) * blocks // SPLITS, num_stages=STAGES):
        columns = weight.load([block * CHUNKS, tile * BLOCK_N, 0])
        rows = x.load([block * CHUNKS, 0, 0])
        sums = tl.dot(columns, tl.permute(rows, (0, 2, 1)), sums)
    acc = tl.sum(sums, 0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    complete = True
    if SPLITS > 1:
        local = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(partial + pid * (BLOCK_N * BLOCK_M) + local, acc)
        complete = (arrive(counters + tile, SPLITS) & 0xFFFF) == SPLITS - 1
        if complete:
            # Its own sum is read back too: the order of addition must not depend on who is last.
            parts = partial + tile * (SPLITS * BLOCK_N * BLOCK_M) + local
            acc = tl.load(parts)
            for i in tl.static_range(1, SPLITS):
                acc += tl.load(parts + i * (BLOCK_N * BLOCK_M))
    if complete:
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        to = out + m[None, :] * N + n[:, None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@functools.cache
def _arch(device: torch.device) -> int:
    return device_arch(device) or 90  # Triton's interpreter stands in for sm_90


def _tma_reads(rows: torch.Tensor) -> bool:
    """Whether a tensor descriptor can read `rows [n, k]`: unit columns, rows and start at multiples of 16 bytes."""
    aligned = rows.stride(0) * rows.element_size() % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] and aligned


def _blocks(rows: torch.Tensor, block: int) -> TensorDescriptor:
    n, k = rows.shape
    return TensorDescriptor(rows, [k // CHUNK, n, CHUNK], [CHUNK, rows.stride(0), 1], [BLOCK_K // CHUNK, block, CHUNK])


def skinny_mm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Config | None = None) -> torch.Tensor:
    """See `spec_ops.ops.linear`. An `x` that TMA cannot read is copied.

    Raises:
        ValueError: more than `MAX_ROWS` rows, k no multiple of 64, or a weight that TMA cannot read.
    """
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_empty(m, n)
    if out.numel() == 0:
        return out
    if m > MAX_ROWS:
        raise ValueError(f"skinny_mm: `x` must have at most {MAX_ROWS} rows, got {m}")
    if k == 0 or k % CHUNK:
        raise ValueError(f"skinny_mm: the columns of `x` must be a multiple of {CHUNK}, got {k}")
    if not _tma_reads(weight):
        raise ValueError(
            "skinny_mm: `weight` must have contiguous rows that start at multiples of 16 bytes, got strides "
            f"{tuple(weight.stride())} at address {weight.data_ptr():#x}"
        )
    x = x if _tma_reads(x) else x.clone(memory_format=torch.contiguous_format)
    config = config or choose(m, n, k, num_sms(x.device), _arch(x.device))
    block_m, splits, tiles = config.block_m, config.splits, triton.cdiv(n, BLOCK_N)
    partial = counters = None
    if splits > 1:
        partial = torch.empty(tiles * splits * BLOCK_N * block_m, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device, tiles, "skinny_mm")
    with device_guard(x):
        launch(
            skinny_mm_kernel, (tiles * splits,), _blocks(x, block_m), _blocks(weight, BLOCK_N),
            None if bias is None else bias.contiguous(), out, partial, counters, m, n, k,
            BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, CHUNK=CHUNK, SPLITS=splits, STAGES=config.num_stages,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


def ahead() -> Iterator[Variant]:
    for m, n, k in ((4, 6144, 4096), (16, 4096, 4096), (4, 1536, 7168), (16, 1536, 7168)):
        chosen: dict[Config, list[int]] = {}
        for arch in ARCHS:
            chosen.setdefault(choose(m, n, k, 132, arch), []).append(arch)
        for config, archs in chosen.items():
            yield _variant(f"skinny_mm, {m} x {n} x {k} on sm_{archs[0]}", config, tuple(archs))


def _variant(name: str, config: Config, archs: tuple[int, ...]) -> Variant:
    def blocks(rows: int) -> str:
        return f"tensordesc<bf16{[BLOCK_K // CHUNK, rows, CHUNK]}>"

    split = {"partial": "*fp32:16", "counters": "*i32:16"}
    return Variant(
        name,
        skinny_mm_kernel,
        {"x": blocks(config.block_m), "weight": blocks(BLOCK_N), "out": "*bf16:16", "M": "i32", "N": "i32:16"}
        | {"K": "i32:16", **(split if config.splits > 1 else {})},
        {"bias": None, "BLOCK_M": config.block_m, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "CHUNK": CHUNK}
        | {"SPLITS": config.splits, "STAGES": config.num_stages, **({} if config.splits > 1 else dict.fromkeys(split))},
        num_warps=NUM_WARPS,
        num_stages=config.num_stages,
        archs=archs,
        programs=config.programs,
    )
