"""Threads, captures and partitions of a GPU: what kernels keep between launches, and launches that need all of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

from spec_ops.backends import workspace as scratch  # noqa: E402
from spec_ops.backends.capture import capture_of_current_stream, pool_of_capture  # noqa: E402
from spec_ops.backends.triton.attention import launcher as steps  # noqa: E402
from spec_ops.backends.triton.runtime import cooperative, counters, launch, repeat  # noqa: E402
from spec_ops.backends.workspace import workspace, zeros_outside_graph_pools  # noqa: E402
from tests.backends.test_workspace import disjoint, in_threads  # noqa: E402
from tests.helpers.attention_calls import SERVED, call, static_call  # noqa: E402

TOO_LARGE = "Triton Error [CUDA]: too many blocks in cooperative launch"


@pytest.fixture
def no_plans() -> Iterator[None]:
    """Launches of earlier calls are not repeated, nor are these later."""
    repeat._plans.clear()
    yield
    repeat._plans.clear()


@pytest.mark.parametrize("family", SERVED)
def test_threads_with_streams_of_their_own(family):
    name, a, sets = static_call(family, 7, 2)
    expected = [call(name, a | given) for given in sets]
    streams = [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()

    def run(which: int) -> list[tuple[int, torch.Tensor]]:
        with torch.cuda.stream(streams[which]):
            return [(i, call(name, a | sets[i])) for turn in range(20) for i in [(3 * turn + which) % 10]]

    results = in_threads(len(streams), run)
    torch.cuda.synchronize()
    for results_of_one in results:
        assert all(torch.equal(out, expected[i]) for i, out in results_of_one)


def test_each_capture_has_an_id_and_counters_of_its_own():
    index = torch.cuda.current_device()
    assert capture_of_current_stream(index) == 0
    place = torch.device("cuda", index)
    sets, ids = [counters.arrival_counters(place, 8)], []
    for _ in range(3):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ids += [capture_of_current_stream(index)] * 2
            assert capture_of_current_stream(index) == ids[-1]
            sets.append(counters.arrival_counters(place, 8))
            torch.zeros(1, device=place)  # an empty graph warns
    assert 0 not in ids
    assert len(set(ids)) == 3
    assert disjoint(sets)


def test_a_buffer_is_made_while_another_thread_captures():
    """CUDA's usual mode of capture forbids other threads to allocate, and a failed attempt would end the capture."""
    torch.cuda.empty_cache()
    x = torch.ones(4, device="cuda")
    graph, capturing, made = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
    buffers = []

    def make() -> None:
        capturing.wait()
        try:
            buffers.append(zeros_outside_graph_pools(x.device, 200 << 20))  # more than torch has at hand: asks CUDA
        finally:
            made.set()

    thread = threading.Thread(target=make)
    thread.start()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y = x * 2
        capturing.set()
        assert made.wait(60)
        y = y + 1
    thread.join()
    assert buffers
    assert not buffers[0].any()
    graph.replay()
    assert torch.equal(y, x * 2 + 1)


@pytest.fixture
def place(monkeypatch) -> torch.device:
    """The GPU, where nobody keeps a workspace yet."""
    monkeypatch.setattr(scratch, "_buffers", {})
    monkeypatch.setattr(scratch, "_kept", [scratch._buffers])
    return torch.device("cuda", torch.cuda.current_device())


def captured(body: Callable[[], Any], **where: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `body`, and what `body` returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **where):
        made = body()
        torch.zeros(1, device="cuda")  # an empty graph warns
    return graph, made


def test_graphs_have_one_workspace_a_pool(place):
    """All are captured on one stream; the first use of a workspace is in a capture."""
    stream, shared = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def body() -> torch.Tensor:
        index = place.index
        pools.append(pool_of_capture(index, capture_of_current_stream(index)))
        return workspace("graphs", place, 1 << 20)

    pools: list[tuple[int, int] | int] = []
    graphs, buffers = zip(*(captured(body, stream=stream, pool=pool) for pool in (None, None, shared, shared)), strict=True)
    assert pools == [graph.pool() for graph in graphs]
    assert pools[2:] == [shared] * 2
    same = captured(body, stream=stream, pool=graphs[0].pool())[1]
    assert same.data_ptr() == buffers[0].data_ptr()
    with torch.cuda.stream(stream):
        eager = workspace("graphs", place, 1 << 20)
    assert buffers[2].data_ptr() == buffers[3].data_ptr()
    assert len({buffer.data_ptr() for buffer in (eager, *buffers)}) == 4
    assert not any(buffer.any() for buffer in (eager, *buffers))


def test_graphs_of_one_stream_are_replayed_at_the_same_time(place):
    """Each fills its workspace, waits until the other has, and reads it."""
    torch.cuda._sleep(1)  # its kernel is loaded before a capture
    zeros = torch.zeros(1 << 10, dtype=torch.uint8, device=place)
    filled = [zeros.clone() for _ in range(2)]

    def body(value: int) -> Callable[[], torch.Tensor]:
        def fill_and_read() -> torch.Tensor:
            buffer = workspace("replayed", place, 1 << 10)
            buffer.fill_(value)
            torch.cuda._sleep(100_000_000)  # some 50 ms
            return filled[value - 1].copy_(buffer)

        return fill_and_read

    graphs = [captured(body(value))[0] for value in (1, 2)]
    torch.cuda.synchronize()
    for graph in graphs:
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.replay()
    torch.cuda.synchronize()
    assert [out.unique().tolist() for out in filled] == [[1], [2]]


def test_a_workspace_that_a_branch_of_a_graph_uses(place):
    """Branches on streams of their own run at the same time."""
    capturing, side = torch.cuda.Stream(), torch.cuda.Stream()

    def body() -> list[torch.Tensor]:
        first = workspace("branches", place, 1 << 20)
        side.wait_stream(capturing)
        with torch.cuda.stream(side):
            second = workspace("branches", place, 1 << 20)
            second.add_(1)
        capturing.wait_stream(side)
        return [first, second]

    graph, (first, second) = captured(body, stream=capturing)
    graph.replay()
    torch.cuda.synchronize()
    assert not first.any()
    assert bool((second == 1).all())


def test_workspaces_do_not_outlive_their_graphs_for_long(place):
    """A graph's workspace goes when the next one needs its own; `release_workspaces` frees all."""
    size = 64 << 20
    captured(lambda: workspace("before", place, 64))  # what torch allocates once
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        captured(lambda: workspace("many", place, size))[0].replay()
        assert torch.cuda.memory_allocated() - before <= size + (4 << 20)
        assert [key.use for key in scratch._buffers] == ["many"]
    kept = [captured(lambda: workspace("many", place, size)) for _ in range(2)]
    assert len(scratch._buffers) == 2
    kept.clear()
    scratch.release_workspaces()
    assert torch.cuda.memory_allocated() - before <= 1 << 20
    assert not scratch._buffers


@pytest.mark.parametrize("family", SERVED)
def test_a_grid_too_large_for_a_partition_is_launched_otherwise(family, monkeypatch, no_plans):
    """As CUDA refuses it: the programs then do not wait for one another."""
    name, a, sets = static_call(family, 7, 3)
    expected = [call(name, a | given) for given in sets]
    refused = []

    def refuse(kernel, grid, *args, **kwargs):
        if kwargs.get("launch_cooperative_grid"):
            refused.append(kernel)
            raise RuntimeError(TOO_LARGE)
        return launch.launch(kernel, grid, *args, **kwargs)

    modules = [steps]
    if torch.cuda.get_device_capability() == (9, 0):
        from spec_ops.backends.triton.attention.hopper import gqa as gqa_hopper
        from spec_ops.backends.triton.attention.hopper import mla as mla_hopper
        from spec_ops.backends.triton.attention.hopper import mla_few as mla_hopper_few

        modules += [gqa_hopper, mla_hopper, mla_hopper_few]
    for module in modules:
        monkeypatch.setattr(module, "launch", refuse)
    monkeypatch.setattr(cooperative, "_refused", set())
    repeat._plans.clear()
    for given, whole in zip(sets, expected, strict=True):
        torch.testing.assert_close(call(name, a | given), whole, rtol=2e-2, atol=2e-2)  # merged by others, or other tiles
    assert bool(refused) == (family != "ragged")
    assert len(refused) == len(set(refused))  # of calls of one shape, the first alone tries


def test_other_failures_of_a_launch_are_not_taken_for_it(monkeypatch, no_plans):
    name, a, sets = static_call("chain of 4", 7, 3)

    def fail(*args, **kwargs):
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setattr(steps, "launch", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        call(name, a | sets[0])


@pytest.mark.skipif(not hasattr(torch._C, "_CUDAGreenContext"), reason="this torch knows no green contexts")
@pytest.mark.parametrize("family", SERVED)
def test_in_a_green_context(family):
    """A part of the multiprocessors: fewer programs fit than the device has room for."""
    from torch.cuda import green_contexts

    name, a, sets = static_call(family, 7, 4)
    expected = [call(name, a | given) for given in sets]
    torch.cuda.synchronize()
    context = green_contexts.GreenContext.create(num_sms=16, device_id=torch.cuda.current_device())
    context.set_context()
    try:
        outs = [call(name, a | given) for given in sets]
        torch.cuda.synchronize()
    finally:
        context.pop_context()
    for out, whole in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, whole, rtol=2e-2, atol=2e-2)
