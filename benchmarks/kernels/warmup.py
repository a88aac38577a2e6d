"""Compiles what `python -m benchmarks kernels` is about to time, in processes side by side.

Triton, and FlashInfer where it compiles at first use, take seconds a kernel on one processor and keep the binary on disk. So
every kernel is called once, by some process, on short contexts; the process that measures then finds the binary. All of them
assemble with Inductor's ptxas, which is part of the binary's key: measuring FlexAttention would change it half-way.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

import torch

from benchmarks.kernels.cases import Batch, Case, Pool, Problem, pages_needed
from spec_ops.passes.manager import find_binaries_where_inductor_does

# A page table this wide is, like those of long contexts, a multiple of 16 wide: for others Triton compiles anew.
PAGES = 16


def short_cases(cases: Sequence[Case], page_size: int) -> list[Case]:
    """One case for each binary: batch size, queries and mask are constants of the kernels, lengths are not."""

    def short(case: Case) -> Case:
        length = min(PAGES * page_size, max(case.batch.lens()))
        return replace(case, batch=Batch(case.batch.bs, length, length))

    return list(dict.fromkeys(map(short, cases)))


def call_once(case: Case, backend: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int) -> str:
    """Why the backend does not run the case, "" if it does."""
    pool = Pool(case.heads, pages_needed(case, page_size), page_size, dtype, kv_dtype, device)
    try:
        with torch.no_grad():
            Problem(case, pool, 1).call(0, backend)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # a refusal, or what the measurement will come upon, too
        return f"{type(error).__name__}: {error}"
    return ""


def warm_up(
    cases: Sequence[Case],
    backends: Sequence[str],
    jobs: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_sizes: Sequence[int],
    tick: Callable[[int, int, str], None] = lambda done, total, refused: None,
) -> None:
    """Calls every backend on every short case with every size of pages in `jobs` processes.

    Args:
        cases, backends, device, dtype, kv_dtype: as `kernels.measure` takes them; torch's own are left out.
        tick: how many calls are done, of how many, and what `call_once` says of the last one.

    Raises:
        concurrent.futures.process.BrokenProcessPool: a process died, as the measuring one would have.
    """
    own = [backend for backend in backends if not backend.startswith("torch-")]
    todo = [(case, backend, size) for size in page_sizes for case in short_cases(cases, size) for backend in own]
    if not todo:
        return
    find_binaries_where_inductor_does()  # here and, through the environment, there
    # A forked process cannot use CUDA.
    with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=multiprocessing.get_context("spawn")) as pool:
        calls = [pool.submit(call_once, case, backend, device, dtype, kv_dtype, size) for case, backend, size in todo]
        for done, call in enumerate(as_completed(calls), 1):
            tick(done, len(todo), call.result())
