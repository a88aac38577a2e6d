"""What kernels keep between launches: one buffer, or set of counters, for each who may run at the same time."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spec_ops.backends import capture, workspace

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.runtime import counters, launch

GPU = torch.device("cuda", 0)


def in_threads(count: int, call: Callable[[int], object]) -> list:
    """What `call(i)` returns in each of `count` threads that begin at once."""
    together = threading.Barrier(count)

    def run(i: int) -> object:
        together.wait()
        return call(i)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def test_threads_of_one_stream_get_one_buffer(monkeypatch):
    made = []

    def slowly(device: torch.device, num_bytes: int) -> torch.Tensor:
        time.sleep(0.01)  # the others ask meanwhile
        made.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(workspace, "_buffers", {})
    monkeypatch.setattr(workspace, "zeros_outside_graph_pools", slowly)
    got = in_threads(8, lambda i: workspace.workspace("threads", torch.device("cpu"), 64).data_ptr())
    assert len(made) == 1
    assert set(got) == {made[0].data_ptr()}


class Now(threading.local):
    """What torch and CUDA would say in this thread."""

    stream = 7
    capture = 0
    pool: tuple[int, int] | int = (0, 0)
    in_use: frozenset = frozenset()


@pytest.fixture
def now(monkeypatch) -> Now:
    """Counters and workspaces without a GPU: in host memory, and streams, captures and pools as the test says."""
    said = Now()
    monkeypatch.setattr(workspace, "_buffers", {})
    monkeypatch.setattr(workspace, "capture_of_current_stream", lambda index: said.capture)
    monkeypatch.setattr(workspace, "pool_of_capture", lambda index, number: said.pool)
    monkeypatch.setattr(workspace, "pools_in_use", lambda: said.in_use)
    monkeypatch.setattr(workspace, "zeros_outside_graph_pools", lambda _, n: torch.zeros(n, dtype=torch.uint8))
    monkeypatch.setattr(counters, "_sets", {})
    monkeypatch.setattr(counters, "_room", {})
    monkeypatch.setattr(counters, "_slabs", {})
    monkeypatch.setattr(counters, "capture_of_current_stream", lambda index: said.capture)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: said.stream, raising=False)
    monkeypatch.setattr(counters, "zeros_outside_graph_pools", lambda _, n: torch.zeros(n, dtype=torch.uint8))
    return said


def place(given: torch.Tensor) -> tuple[int, int]:
    return given.data_ptr(), given.data_ptr() + 4 * given.numel()


def disjoint(sets: list[torch.Tensor]) -> bool:
    places = sorted(map(place, sets))
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


class SlowDict(dict):
    """Hands over to another thread between a look and what follows from it."""

    def get(self, *args):
        found = super().get(*args)
        time.sleep(0.001)
        return found


def test_threads_on_streams_of_their_own_share_no_counters(now, monkeypatch):
    counters.arrival_counters(GPU, 8)  # the slab is there
    monkeypatch.setattr(counters, "_room", SlowDict(counters._room))

    def call(i: int) -> torch.Tensor:
        now.stream = 100 + i
        return counters.arrival_counters(GPU, 8)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert disjoint(in_threads(16, call))
    finally:
        sys.setswitchinterval(interval)


def test_each_graph_has_counters_of_its_own(now):
    eager = counters.arrival_counters(GPU, 300)
    now.capture = 1
    first = counters.arrival_counters(GPU, 300)
    assert place(counters.arrival_counters(GPU, 5)) == place(first)  # a later launch of the same graph
    now.capture = 2
    second = counters.arrival_counters(GPU, 300)
    assert disjoint([eager, first, second])
    assert disjoint([second, counters.arrival_counters(GPU, 300, "another kernel")])
    now.capture = 0
    assert place(counters.arrival_counters(GPU, 300)) == place(eager)


@pytest.mark.parametrize("tiles", [1025, 1025 * 32, counters.SLAB + 1])
def test_more_tiles_than_a_set_has(now, tiles):
    """Another set takes the place of the one that is too small, which a graph may hold."""
    small = counters.arrival_counters(GPU, 1)
    large = counters.arrival_counters(GPU, tiles)
    assert large.numel() >= tiles
    assert not large.any()
    assert disjoint([small, large])
    assert place(counters.arrival_counters(GPU, 1)) == place(large)
    first = place(small)[0]
    del small
    gc.collect()
    assert any(kept.data_ptr() <= first < kept.data_ptr() + kept.numel() for kept in counters._slabs.values())


def test_a_slab_that_is_used_up_is_followed_by_another(now, monkeypatch):
    monkeypatch.setattr(counters, "SLAB", 2 * counters.LEAST)
    sets = [counters.arrival_counters(GPU, 1)]
    for graph in range(1, 6):
        now.capture = graph
        sets.append(counters.arrival_counters(GPU, 1))
    assert disjoint(sets)


def test_the_first_call_may_not_be_captured(now):
    now.capture = 1
    with pytest.raises(RuntimeError, match="must come before a CUDA graph capture"):
        counters.arrival_counters(GPU, 1)


def in_graph(now: Now, number: int, pool: tuple[int, int] | int, device: torch.device = GPU) -> torch.Tensor:
    """The workspace of a launch in capture `number`, which torch serves from `pool`."""
    now.capture, now.pool = number, pool
    now.in_use |= {(device.index, pool)}
    return workspace.workspace("graphs", device, 64)


def test_graphs_of_one_stream_have_one_workspace_a_pool(now):
    eager = workspace.workspace("graphs", GPU, 64)
    first, second = in_graph(now, 1, (1, 0)), in_graph(now, 2, (2, 0))
    assert len({t.data_ptr() for t in (eager, first, second)}) == 3
    assert in_graph(now, 3, (1, 0)).data_ptr() == first.data_ptr()
    without_pool = [in_graph(now, number, number) for number in (4, 5)]
    assert len({t.data_ptr() for t in (eager, first, second, *without_pool)}) == 5
    now.capture = 0
    assert workspace.workspace("graphs", GPU, 64).data_ptr() == eager.data_ptr()


def test_branches_of_one_graph_have_workspaces_of_their_own(now):
    """Those that run at the same time were captured on streams of their own."""
    first = in_graph(now, 1, (1, 0))
    now.stream = 8
    assert in_graph(now, 1, (1, 0)).data_ptr() != first.data_ptr()


def test_workspaces_of_gone_pools_are_freed(now):
    """When the next graph needs one: of its device alone, and only where torch tells that the graphs are gone."""
    other = torch.device("cuda", 1)
    eager = workspace.workspace("graphs", GPU, 64)
    gone = weakref.ref(in_graph(now, 1, (1, 0)).untyped_storage())
    held = [in_graph(now, 2, (2, 0)), in_graph(now, 3, 3), in_graph(now, 4, (1, 0), other)]
    now.in_use -= {(0, (1, 0)), (0, 3)}
    in_graph(now, 5, (2, 0))
    assert gone() is not None
    in_graph(now, 6, (6, 0))
    assert gone() is None
    again = [in_graph(now, 7, (2, 0)), in_graph(now, 3, 3), in_graph(now, 4, (1, 0), other)]
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in held]
    now.capture = 0
    assert workspace.workspace("graphs", GPU, 64).data_ptr() == eager.data_ptr()


def segment(device: int, address: int, size: int, pool: tuple[int, int]) -> dict:
    """Of `torch.cuda.memory_snapshot`."""
    return {"device": device, "address": address, "total_size": size, "segment_pool_id": pool}


class Snapshots:
    """torch's memory, whose next tensor lies at `next`, and how often it was asked for all of it."""

    def __init__(self, monkeypatch, *segments: dict) -> None:
        self.next, self.asked, self.segments = 0, 0, segments
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: self)
        capture.pool_of_capture.cache_clear()

    def data_ptr(self) -> int:
        return self.next

    def snapshot(self, include_traces: bool) -> tuple[dict, ...]:
        assert not include_traces
        self.asked += 1
        return self.segments


@pytest.fixture
def snapshots(monkeypatch):
    memory = [segment(1, 400, 100, (9, 0)), segment(0, 100, 100, (0, 0)), segment(0, 200, 100, (3, 0)),
              segment(0, 400, 100, (0, 4))]  # fmt: skip
    yield Snapshots(monkeypatch, *memory)
    capture.pool_of_capture.cache_clear()


@pytest.mark.parametrize(("address", "pool"), [(200, (3, 0)), (299, (3, 0)), (400, (0, 4)), (150, 77), (300, 77), (20, 77)])
def test_the_pool_of_a_capture_is_where_its_tensors_lie(address, pool, snapshots):
    snapshots.next = address
    assert [capture.pool_of_capture(0, 77) for _ in range(3)] == [pool] * 3
    assert snapshots.asked == 1


def test_each_capture_is_looked_up(snapshots):
    pools = []
    for number, address in enumerate((200, 400, 200)):
        snapshots.next = address
        pools.append(capture.pool_of_capture(0, number))
    assert pools == [(3, 0), (0, 4), (3, 0)]


def test_another_allocator_tells_no_pool(snapshots, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    snapshots.next = 200
    assert capture.pool_of_capture(0, 77) == 77
    assert snapshots.asked == 0


def test_pools_in_use_are_those_that_hold_memory(snapshots):
    assert capture.pools_in_use() == {(0, (0, 0)), (0, (3, 0)), (0, (0, 4)), (1, (9, 0))}


@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access"), torch.cuda.OutOfMemoryError("no memory left")])
def test_a_failure_to_allocate_says_what_it_was(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(type(error)) as caught:
        workspace.zeros_outside_graph_pools(torch.device("cpu"), 64)
    assert caught.value is error


class Kernel:
    """Counts its launches."""

    arg_names = ("x",)

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid):
        return self.run

    def run(self, *args, **kwargs) -> None:
        self.launches += 1


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is about launches, not about kernels")
def test_recording_is_the_recording_threads_alone():
    """What another thread launches meanwhile has to run."""
    kernel = Kernel()
    with launch.recorded() as launches:
        launch.launch(kernel, (1,), 5)
        assert (kernel.launches, len(launches)) == (0, 1)
        in_threads(1, lambda i: launch.launch(kernel, (1,), 5))
        assert (kernel.launches, len(launches)) == (1, 1)
    launch.launch(kernel, (1,), 5)
    assert kernel.launches == 2
