"""Compiles candidates of the search in processes of their own, several at a time, and says which of them can be launched.

A candidate is compiled by the launch function's own path, for tensors of the meta device, so that the process that measures
finds the binary in Triton's cache on disk.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.kernels.cases import Case
from benchmarks.tune.shapes import DTYPE, PAGE_SIZE, ShapeClass
from spec_ops.backends import AttentionCall
from spec_ops.backends.triton.attention import launcher as steps
from spec_ops.backends.triton.attention.tuning import SHARED, Config
from spec_ops.backends.triton.runtime.ahead import SHARED_LIMIT, Resources, resident_blocks, resources
from spec_ops.backends.triton.runtime.launch import Launch, pdl_arguments, recorded

CHECKED_BATCH = 8  # requests, at most, of binaries that must not spill at all: as many as `benchmarks/ahead.py` compiles for


def call(
    kernel: str,
    case: Case,
    config: Config,
    q: torch.Tensor,
    caches: Sequence[torch.Tensor],
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor | None,
    q_indptr: torch.Tensor | None,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """The launch function of `kernel` with `config`: what both the compiling and the measuring process run.

    Args:
        q: `[bs, q_len, heads, head_dim]`. caches: as `Pool.caches`. table: `[bs, pages]` int32. seq_lens: `[bs]` int32.
        tree_mask: `[bs, q_len]` int64 or None. q_indptr: `[bs + 1]` int32, for the ragged kernel. kv_scale: of both caches.

    Returns:
        `[bs, q_len, heads, v_head_dim]`
    """
    heads = case.heads
    mla, ragged = heads.kind == "mla", kernel == "ragged"
    made = AttentionCall(
        ("mla_" if mla else "mha_") + ("extend" if ragged else "target_verify"),
        q.flatten(0, 1) if ragged else q,
        caches[0],
        caches[-1],
        heads.v_head_dim if mla else None,
        table,
        seq_lens,
        scale=heads.scale,
        window_left=case.window,
        k_scale=kv_scale,
        v_scale=kv_scale,
    )
    if ragged:
        made.q_indptr, made.max_q_len = q_indptr, case.q_len
    elif tree_mask is not None:
        made.tree_mask, made.mask_len = tree_mask, case.q_len
    return steps.attention(made, config).view(*q.shape[:-1], heads.v_head_dim)


def variants(cases: Sequence[Case]) -> list[Case]:
    """One case for each binary: batch size and queries are constants of the kernels."""
    return list({(case.batch.bs, case.q_len): case for case in cases}.values())


def launch_of(kernel: str, case: Case, config: Config, kv_dtype: torch.dtype = DTYPE, page_size: int = PAGE_SIZE) -> Launch:
    """What `call` launches for the case on a GPU; nothing runs, and no memory is taken."""
    bs, heads = case.batch.bs, case.heads
    empty = functools.partial(torch.empty, device="meta")
    widths = [heads.head_dim] if heads.kind == "mla" else [heads.head_dim, heads.v_head_dim]
    rows = (1024, page_size) if heads.kind == "mla" else (1024, page_size, heads.num_kv_heads)
    with recorded() as launches:
        call(
            kernel,
            case,
            config,
            empty(bs, case.q_len, heads.num_heads, heads.head_dim, dtype=DTYPE),
            [empty(*rows, width, dtype=kv_dtype) for width in widths],
            empty(bs, -(-case.batch.low // page_size), dtype=torch.int32),
            empty(bs, dtype=torch.int32),
            empty(bs, case.q_len, dtype=torch.int64) if case.mask == "tree" else None,
            empty(bs + 1, dtype=torch.int32),
        )
    (launch,) = launches
    if "COOPERATIVE" in launch.arguments:  # the meta device is no CUDA device
        launch.arguments["COOPERATIVE"] = launch.options["launch_cooperative_grid"] = config.cooperative
    return launch


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate: `used` by its most demanding binary, and why it is left out, "" if it is not."""

    used: Resources | None
    refused: str


def verdict(used: Resources, shape: ShapeClass, config: Config, bs: int) -> str:
    """Why a candidate that takes `used` for `bs` requests is left out; "" if it is not.

    For many requests the vectors of their lengths spill a few words before the loop over keys, whatever the block; times tell
    what that costs.
    """
    if used.shared_bytes > (limit := SHARED.get(shape.arch, 99) * 1024):
        return f"too much shared memory: {used.shared_bytes} bytes of {limit}"
    if shape.hot and used.spill_bytes and (bs <= CHECKED_BATCH or used.loop_spills != 0):
        return f"spills: {used.spill_bytes} bytes for {bs} requests"
    if used.serialized:
        return "each wgmma waits for the one before"
    if shape.arch in SHARED_LIMIT and (n := resident_blocks(used, config.num_warps, shape.arch)) < config.programs:
        return f"too many programs: {n} fit on a multiprocessor"
    return ""


def compile_candidate(shape: ShapeClass, config: Config) -> Outcome:
    """Compiles every binary of the candidate for the current GPU, up to the first that refuses it."""
    found: list[Resources] = []
    for case in variants(shape.cases()):
        kernel, arguments, options, early = launch_of(shape.entry.kernel, case, config, shape.kv_dtype, shape.page_size)
        try:
            found.append(resources(kernel.warmup(grid=(1,), **arguments, **options, **pdl_arguments(kernel, early))))
        except Exception as error:  # of the compiler, about this candidate alone
            return Outcome(None, f"does not compile: {type(error).__name__}: {error}")
        if reason := verdict(found[-1], shape, config, case.batch.bs):
            return Outcome(found[-1], reason)
    return Outcome(max(found, key=lambda used: (used.spill_bytes, used.registers)), "")


Compiling = dict[tuple[str, Config], "Future[Outcome]"]


@contextmanager
def compiling(
    shapes: Sequence[ShapeClass], jobs: int, compiled: Callable[[ShapeClass, Config], Outcome] = compile_candidate
) -> Iterator[Compiling]:
    """Inside, the candidates of all `shapes` are being compiled by `jobs` processes, in that order; those left are dropped."""
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))  # a forked process cannot use CUDA
    try:
        yield {(str(s), config): pool.submit(compiled, s, config) for s in shapes for config in s.candidates()}
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
