"""Timing shared by the benchmarks: medians of CUDA-graph replays, and the machine's two ceilings measured the same way."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

MIN_GRAPH_MS = 2.0  # a replay shorter than this would measure the gap between replays (some microseconds) as well
MAX_CALLS = 512  # in one graph
MAX_REPLAYS = 200
# Dense products take an H200 to its power limit: after 40 to 60 ms its clocks fall from 1950 to 1600 MHz, and an MLA verify
# that took 828 us takes 947, as does whatever comes next, for some 100 ms. So a measurement starts from rest, and is short.
REST_S = 0.15


@dataclass(frozen=True)
class Timing:
    """Median microseconds of a call, the first call's result after the last replay, and whether a CUDA graph was replayed."""

    us: float
    output: torch.Tensor
    cuda_graph: bool


def median_ms(step: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of `step` between CUDA events, run `repeats` times back to back."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def time_calls(
    calls: Sequence[Callable[[], torch.Tensor]],
    *,
    min_ms: float = 20.0,
    min_replays: int = 7,
    graph: bool = True,
    rest_s: float = REST_S,
) -> Timing:
    """Time of one of `calls`, which do the same work on different buffers and run in turn, so that none finds its data in L2.

    On CUDA all calls are captured in one graph (several times over if they are short), replayed at least `min_replays` times
    and for `min_ms`; before a last replay the first result is overwritten (`_poison`), so that the result returned is what the
    timed graph wrote. `graph=False` runs the calls from Python between events, for work that cannot be captured. The GPU has
    rested for `rest_s` seconds before either. On CPU: wall clock.
    """
    if not calls:
        raise ValueError("time_calls: `calls` must hold at least one call, got none")
    with side_stream():
        output = calls[0]()  # compiles; also says which device this is about
        if output.device.type != "cuda":
            return Timing(_wall_ms(calls, min_ms, min_replays) / len(calls) * 1e3, output, False)

        def run_all() -> None:
            for call in calls:
                call()

        run_all()  # outside the capture too, in case a kernel compiles anew for other pointers
        if not graph:
            replays = _replays(median_ms(run_all, 1), min_ms, min_replays)
            time.sleep(rest_s)
            ms = median_ms(run_all, replays)
            return Timing(ms / len(calls) * 1e3, output, False)
        captured, output = _capture(calls, 1)
        count, once = len(calls), median_ms(captured.replay, 3)
        if (rounds := min(math.ceil(MIN_GRAPH_MS / once), MAX_CALLS // count)) > 1:
            captured, output = _capture(calls, rounds)
            count, once = rounds * count, median_ms(captured.replay, 1)
        time.sleep(rest_s)
        ms = median_ms(captured.replay, _replays(once, min_ms, min_replays))
        _poison(output)
        captured.replay()
        return Timing(ms / count * 1e3, output, True)


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """On CUDA, a stream of the benchmarks' own, ordered after and before what surrounds it.

    Warm-up and capture share a stream, since kernels may keep a workspace per stream, which must not be made inside a capture;
    all share the same, since such workspaces are never freed.
    """
    if not torch.cuda.is_available():
        yield
        return
    outer, inner = torch.cuda.current_stream(), _stream(torch.cuda.current_device())
    inner.wait_stream(outer)
    try:
        with torch.cuda.stream(inner):
            yield
    finally:
        outer.wait_stream(inner)


def _poison(output: torch.Tensor) -> None:
    """NaN, or the least integer: what no kernel computes here."""
    output.fill_(math.nan if output.dtype.is_floating_point else torch.iinfo(output.dtype).min)


def _replays(once_ms: float, min_ms: float, min_replays: int) -> int:
    return min(max(min_replays, math.ceil(min_ms / once_ms)), max(min_replays, MAX_REPLAYS))


def _capture(calls: Sequence[Callable[[], torch.Tensor]], rounds: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `rounds` times all calls, and the first call's result: held, so that no later call gets its memory."""
    graph, first = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(rounds):
            for call in calls:
                out = call()
                first = out if first is None else first
    assert first is not None
    return graph, first


def _wall_ms(calls: Sequence[Callable[[], object]], min_ms: float, min_replays: int) -> float:
    times: list[float] = []
    while len(times) < min_replays or (sum(times) < min_ms and len(times) < MAX_REPLAYS):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do: `copy` bytes a second, read plus written, and `matmul` operations a second."""

    copy: float
    matmul: float

    def floor_us(self, bytes_moved: int, flops: int) -> float:
        """Microseconds below which no kernel can get: the slower of moving the bytes and doing the arithmetic."""
        return max(bytes_moved / self.copy, flops / self.matmul) * 1e6


def measure_ceilings(device: torch.device, copy: float | None = None, matmul: float | None = None) -> Ceilings:
    """A copy of 2 GiB and a bfloat16 product of 8192 cubed on random data (tiny ones on CPU), unless given."""
    cuda = device.type == "cuda"
    if copy is None:
        source = torch.empty(2**30 if cuda else 2**22, dtype=torch.bfloat16, device=device).normal_()
        target = torch.empty_like(source)
        # Not in a graph: its copy nodes run on a copy engine, at two thirds of the rate (H200).
        copy = 2 * source.nbytes / (time_calls([lambda: target.copy_(source)], graph=False).us * 1e-6)
        del source, target
    if matmul is None:
        n = 8192 if cuda else 256
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))  # zeros would run faster
        matmul = 2 * n**3 / (time_calls([lambda: a @ b]).us * 1e-6)
    if cuda:
        torch.cuda.empty_cache()
    return Ceilings(copy, matmul)
