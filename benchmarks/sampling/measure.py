"""Correctness and time of every sampling kernel next to the others, case by case, in one run.

A kernel is timed once its result is right, as the replay of a CUDA graph over buffers that L2 does not hold together; what the
last replay wrote is checked as well.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.kernels.measure import Note
from benchmarks.sampling.cases import Case, Problem, num_sets
from benchmarks.sampling.expected import Expected
from benchmarks.sampling.kernels import KERNELS, NAMES, READ, Kernel
from benchmarks.timing import side_stream, time_calls
from spec_ops.backends import BackendError


def check_kernels(names: Sequence[str] | None) -> list[str]:
    """`names`, or all. Raises a ValueError for one that is unknown."""
    if unknown := sorted(set(names or ()) - set(NAMES)):
        raise ValueError(f"--kernel must be one of {NAMES}, got {unknown}")
    return list(dict.fromkeys(names or NAMES))


def measure(
    cases: Sequence[Case],
    names: Sequence[str],
    *,
    device: torch.device,
    copy: float,
    min_ms: float = 4.0,
    deadline: float = math.inf,
) -> Iterator[dict[str, Any] | Note]:
    """A row or a note per case and kernel that does its job, until `time.monotonic()` passes `deadline`.

    Args:
        names: keys of `KERNELS[job]`. copy: bytes a second, for the floor.
    """
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    for case in cases:
        if time.monotonic() > deadline:
            return
        problem = Problem(case, device, num_sets(case, l2))
        expected = Expected(problem)
        for name in names:
            if name in KERNELS[case.job] and time.monotonic() <= deadline:
                yield _measure_one(problem, expected, name, copy, min_ms)


def _measure_one(problem: Problem, expected: Expected, name: str, copy: float, min_ms: float) -> dict[str, Any] | Note:
    case, kernel = problem.case, KERNELS[problem.case.job][name]
    try:
        with side_stream():
            calls = _calls(problem, kernel)
            if why := _wrong(expected, name, kernel, calls[0]()):
                return Note(name, str(case), f"wrong: {why}", failed=True)
            timing = time_calls(calls, min_ms=min_ms, min_replays=5)
            if why := _wrong(expected, name, kernel, timing.output):
                return Note(name, str(case), f"wrong in the replay: {why}", failed=True)
    except (BackendError, ImportError) as error:
        return Note(name, str(case), str(error), failed=False)
    except Exception as error:
        if problem.temperature.is_cuda:
            torch.cuda.synchronize()  # raises again if the context is lost: nothing measured after it would mean anything
        return Note(name, str(case), f"{type(error).__name__}: {error}".strip(), failed=True)
    finally:
        calls = []
        torch.cuda.empty_cache()  # graphs keep the memory of their intermediate results
    floor = case.read_bytes() / copy * 1e6
    return {
        "job": case.job,
        "vocab": case.vocab,
        "rows": case.rows,
        "setting": case.setting.name,
        "top_k": case.setting.top_k,
        "top_p": case.setting.top_p,
        "min_p": case.setting.min_p,
        "temperature": case.temperature,
        "logits": case.logits,
        "dtype": case.dtype,
        "kernel": name,
        "us": round(timing.us, 2),
        "floor_us": round(floor, 2),
        "bytes": case.read_bytes(),
        "correct": True,
        "cuda_graph": timing.cuda_graph,
        "buffer_sets": len(problem.logits),
    }


def _calls(problem: Problem, kernel: Kernel) -> list[Callable[[], torch.Tensor]]:
    """A call per buffer set."""
    calls: list[Callable[[], torch.Tensor]] = []
    for index in range(len(problem.logits)):
        given = () if kernel.prepare is None else (kernel.prepare(problem, index),)
        calls.append(functools.partial(kernel.function, problem, index, *given))
    return calls


def _wrong(expected: Expected, name: str, kernel: Kernel, out: torch.Tensor) -> str:
    if name == READ:
        return "" if float(out.max()) == float(expected.problem.logits[0].max()) else "another largest logit"
    return expected.wrong(out, kernel.exact, kernel.block)
