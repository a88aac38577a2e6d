"""Correctness and time of every attention kernel next to the others, case by case, in one run.

What is timed is the public function with `backend=...`, as users call it, replayed in a CUDA graph; what is checked is what the
last replay wrote. A backend that plans on the host plans at every call. Where its plan and its run can be had apart
(`PLANNERS`), the run is timed, and the row says so (`plan_excluded`).
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels.accuracy import exact_attention, relative_error, torch_attention
from benchmarks.kernels.cases import Case, Pool, Problem, num_sets, pages_needed
from benchmarks.timing import Ceilings, Timing, side_stream, time_calls
from spec_ops.backends import (
    AttentionCall,
    BackendError,
    available_backends,
    get_backend,
)
from spec_ops.backends.registry import device_arch, plans_on_host

if TYPE_CHECKING:
    from spec_ops.backends.flashinfer.planned import Planned

SDPA, FLEX = "torch-sdpa", "torch-flex"


def _flashinfer(kernel: str, call: AttentionCall) -> Planned:
    from spec_ops.backends.flashinfer.planned import plan  # it imports triton, which is not there on every platform

    return plan(call, kernel)


# Of backends that plan on the host: what plans a call once, to run it many times.
PLANNERS: dict[str, Callable[[AttentionCall], Planned]] = {
    f"flashinfer-{kernel}": functools.partial(_flashinfer, kernel) for kernel in ("fa2", "fa3")
}
MAX_ERROR_RATIO = 1.5  # of a kernel's error to that of torch's own attention
# A kernel on fp8 caches may round queries and softmax weights to e4m3 as well (FlashInfer's xqa does): each rounding is 2.6%
# in the root mean square, and both together 3.7%; the rest is room for the spread between cases.
FP8_MAX_ERROR = 0.05


@dataclass(frozen=True)
class Note:
    """Why a case has no row for a backend: refused, or `failed` (an error that the backend did not announce)."""

    backend: str
    case: str
    reason: str
    failed: bool


def check_backends(names: Sequence[str] | None, device: torch.device) -> list[str]:
    """`names`, or by default every backend that `device` and what is installed can run, and torch's SDPA; but not `reference`,
    which is there to be right, not fast.

    Raises:
        ValueError: a name that is none of a registered backend, `"auto"`, `"torch-sdpa"` and `"torch-flex"`.
    """
    known = [*available_backends(), "auto", SDPA, FLEX]
    if unknown := set(names or ()) - set(known):
        raise ValueError(f"--backend must be one of {known}, got {sorted(unknown)}")
    if names:
        return list(dict.fromkeys(names))
    arch, found = device_arch(device), []
    for backend in filter(None, map(get_backend, available_backends())):
        low, high = backend.capabilities or (0, 0)
        suits = backend.capabilities is None or (arch is not None and low <= arch <= high)
        if suits and backend.missing() is None and backend.name != "reference":
            found.append(backend.name)
    return [*found, SDPA]


def measure(
    cases: Sequence[Case],
    backends: Sequence[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    ceilings: Ceilings,
    min_ms: float = 20.0,
    deadline: float = math.inf,
) -> Iterator[dict[str, Any] | Note]:
    """A row or a note per case and backend, until `time.monotonic()` passes `deadline`.

    Args:
        cases: those of equal heads next to each other: they share a KV pool.
        backends: names of registered backends, `"auto"`, `"torch-sdpa"` and `"torch-flex"`.
        dtype, kv_dtype: of queries and caches.
    """
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    for heads, group in itertools.groupby(cases, key=lambda case: case.heads):
        members = [(case, num_sets(case, kv_dtype.itemsize, l2)) for case in group]
        num_pages = max(pages_needed(case, page_size) * sets for case, sets in members)
        pool = Pool(heads, num_pages, page_size, dtype, kv_dtype, device)
        for case, sets in members:
            if time.monotonic() > deadline:
                return
            problem = Problem(case, pool, sets)
            expected = Expected(problem)
            for backend in backends:
                if time.monotonic() > deadline:
                    return
                yield _measure_one(problem, expected, backend, ceilings, min_ms)
        del pool, problem, expected
        gc.collect()
        torch.cuda.empty_cache()


def _measure_one(
    problem: Problem, expected: Expected, backend: str, ceilings: Ceilings, min_ms: float
) -> dict[str, Any] | Note:
    case = problem.case
    try:
        with side_stream():
            calls, plan_excluded, graph = _calls(problem, backend)
            timing = time_calls(calls, min_ms=min_ms, graph=graph)
            return _row(problem, expected, backend, timing, ceilings) | {"plan_excluded": plan_excluded}
    except (BackendError, ImportError) as error:
        return Note(backend, str(case), str(error), failed=False)
    except Exception as error:
        if problem.pool.device.type == "cuda":
            torch.cuda.synchronize()  # raises again if the context is lost: nothing measured after it would mean anything
        return Note(backend, str(case), f"{type(error).__name__}: {error}".strip(), failed=True)
    finally:
        calls = timing = None  # type: ignore[assignment]
        torch.cuda.empty_cache()  # graphs and dense copies leave gigabytes of blocks that fit nothing else


def _row(problem: Problem, expected: Expected, backend: str, timing: Timing, ceilings: Ceilings) -> dict[str, Any]:
    case, pool, work = problem.case, problem.pool, problem.work()
    heads, batch = case.heads, case.batch
    error, reference_error = expected.error(timing.output), expected.reference_error
    limit = FP8_MAX_ERROR if pool.kv_scale is not None else MAX_ERROR_RATIO * reference_error
    floor = ceilings.floor_us(work.bytes, work.flops)
    return {
        "kind": heads.kind,
        "heads": str(heads),
        "head_dim": heads.head_dim,
        "bs": batch.bs,
        "context": batch.equalized().low,
        "lengths": batch.lengths,
        "q_len": case.q_len,
        "mask": case.mask,
        **({"window": case.window} if case.window >= 0 else {}),
        "dtype": str(pool.kv_dtype).removeprefix("torch."),
        "page_size": pool.page_size,
        "backend": backend,
        "us": round(timing.us, 2),
        "floor_us": round(floor, 2),
        "share_of_floor": round(floor / timing.us, 4),
        "error": error if math.isfinite(error) else None,
        "reference_error": reference_error,
        "correct": error <= limit,  # False for NaN
        "cuda_graph": timing.cuda_graph,
        "buffer_sets": len(problem.q),
        **asdict(work),
    }


class Expected:
    """The float64 result of a few requests of a case (the shortest, the longest, the middle one), and torch's own error."""

    def __init__(self, problem: Problem) -> None:
        lens, case, pool = problem.lens, problem.case, problem.pool
        self.requests = sorted({lens.index(min(lens)), lens.index(max(lens)), len(lens) // 2})
        exact, own = [], []
        for b in self.requests:
            q, (k, v) = problem.q[0][b], pool.rows(problem.tables[0][b], lens[b])
            inputs = (q, k, v, problem.visible(b), case.heads.scale)
            exact.append(exact_attention(*inputs))
            own.append(torch_attention(*inputs))
        self.exact = torch.stack(exact)
        self.reference_error = relative_error(torch.stack(own), self.exact)

    def error(self, out: torch.Tensor) -> float:
        """Relative error of `out [bs, q_len, heads, v_dim]` on these requests; NaN if anything of any request is not finite."""
        if not bool(out.isfinite().all()):
            return math.nan
        return relative_error(out[self.requests], self.exact)


def _calls(problem: Problem, backend: str) -> tuple[list[Callable[[], torch.Tensor]], bool, bool]:
    """A call per buffer set, whether host planning is left out of them, and whether a graph can hold them."""
    indices = range(len(problem.q))
    if backend in (SDPA, FLEX):
        return (_sdpa_calls if backend == SDPA else _flex_calls)(problem), False, True
    if not plans_on_host(backend):
        return [functools.partial(problem.call, i, backend) for i in indices], False, True
    if (plan := PLANNERS.get(backend)) is None:
        return [functools.partial(problem.call, i, backend) for i in indices], False, False
    return [_run_of(plan(_record(functools.partial(problem.call, i, backend)))) for i in indices], True, True


def _run_of(planned: Planned) -> Callable[[], torch.Tensor]:
    """The kernel alone, and the result of the op."""
    planned.run()
    out = planned.finish()

    def call() -> torch.Tensor:
        planned.run()
        return out

    return call


def _record(call: Callable[[], torch.Tensor]) -> AttentionCall:
    """What `call`'s op gets from its public function; nothing runs."""
    found: list[AttentionCall] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(AttentionCall.of(func._schema.name.split("::")[1], args))
            return args[0]

    with Recorder():
        call()
    (made,) = found
    return made


def _dense(problem: Problem) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per buffer set: queries, and contiguous copies of keys and values, as torch wants them: `[bs, heads, length, dim]`."""
    if problem.case.heads.kind == "mla":
        raise BackendError("torch's own attention is compared for GQA only")
    if problem.case.window >= 0:
        raise BackendError("torch's own attention is compared without a window only")
    for q, table in zip(problem.q, problem.tables, strict=True):
        yield q.transpose(1, 2), *(x.transpose(1, 2) for x in problem.pool.rows(table, max(problem.lens)))  # type: ignore[misc]


def _sdpa_calls(problem: Problem) -> list[Callable[[], torch.Tensor]]:
    case = problem.case
    if case.mask == "tree" or case.batch.unequal:
        raise BackendError(f"{SDPA} would need a dense mask for trees and unequal lengths, which no fast path of it takes")
    bias = causal_lower_right(case.q_len, case.batch.low) if case.q_len > 1 else None

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=case.heads.scale, enable_gqa=True)
        return out.transpose(1, 2)

    return [functools.partial(call, *inputs) for inputs in _dense(problem)]


def _flex_calls(problem: Problem) -> list[Callable[[], torch.Tensor]]:
    case, seq_lens, words, device = problem.case, problem.seq_lens, problem.tree_mask, problem.pool.device

    def visible(b, h, row, key):
        draft = key - (seq_lens[b] - case.q_len)
        if words is None:
            return draft <= row
        in_draft = (words[b, row] >> draft.clamp(0, case.q_len - 1)) & 1
        return (draft < 0) | ((in_draft == 1) & (draft < case.q_len))

    inputs = list(_dense(problem))
    mask = create_block_mask(visible, len(problem.lens), None, case.q_len, max(problem.lens), device=device.type)
    torch._dynamo.reset()  # past its limit of recompilations it would go on uncompiled
    # Uncompiled it computes the full matrix: slow and right, which is all that a CPU is for here.
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True) if device.type == "cuda" else flex_attention

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, block_mask=mask, scale=case.heads.scale, enable_gqa=True).transpose(1, 2)

    return [functools.partial(call, *one) for one in inputs]
