"""Sums over ranks that share one GPU: the protocol on streams that are late at random, in CUDA graphs of several sizes."""

from __future__ import annotations

import dataclasses
import os
import random

import pytest
import torch

from spec_ops.backends.push import PushWorkspace, of_one_process
from spec_ops.ops.reference import collectives as reference

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

from spec_ops.backends.triton.collectives import push  # noqa: E402

COLUMNS = (4096, 64, 16384, 1024, 4096, 32768, 512, 16384)


def special(size: int, columns: int, seed: int) -> torch.Tensor:
    """Parts with zeros of both signs, infinities and NaN."""
    g = torch.Generator().manual_seed(seed)
    parts = torch.randn(size, 1, columns, generator=g).bfloat16()
    for value in (0.0, -0.0, torch.inf, -torch.inf, torch.nan):
        parts[torch.rand(parts.shape, generator=g) < 0.02] = value
    parts[:, :, :6] = 0.0
    return parts.cuda()


def bits(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 7.0, x).view(torch.int16)


def captured(
    ranks: PushWorkspace, own: slice, calls: list[int], wrong: torch.Tensor, *, warps: int = 4
) -> torch.cuda.CUDAGraph:
    """A graph of sums and maxima, each of which counts what differs from the reference, bit for bit."""
    local = own.stop - own.start
    cases = []
    for seed in calls:
        parts = special(ranks.size, COLUMNS[seed % len(COLUMNS)], seed)
        wanted = bits(reference.sum_of(list(parts)))
        keys = torch.randint(-(2**62), 2**62, (ranks.size, 33), generator=torch.Generator().manual_seed(seed)).cuda()
        keys[:, 0] = 0
        cases.append((parts[own].contiguous(), wanted, keys[own].contiguous(), keys.amax(0)))
        wrong.add_((wanted != wanted).sum() + (keys != keys).sum())  # loads what a capture must not load

    def run() -> None:
        for i, (parts, wanted, keys, largest) in enumerate(cases):
            out = torch.empty_like(parts)
            push.push(ranks, parts, out, "sum", warps=warps, local=local)
            wrong.add_((bits(out) != wanted).sum())
            if i % 3 == 1:
                out = torch.empty_like(keys)
                push.push(ranks, keys, out, "max", local=local)
                wrong.add_((out != largest).sum())

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    graph.inputs = cases  # whose memory it reads
    return graph


def compile_kernels(size: int, local: int, warps: int = 4) -> None:
    """On a workspace that is thrown away: a first launch inside a capture would load modules there."""
    ranks = of_one_process(size, torch.device("cuda"), 1 << 16, 1)
    for columns in (64, 1024):
        for x in (torch.ones(local, 1, columns).bfloat16().cuda(), torch.ones(local, 33, dtype=torch.int64).cuda()):
            push.push(ranks, x, torch.empty_like(x), "max" if x.dtype == torch.int64 else "sum", warps=warps, local=local)
    torch.cuda.synchronize()


def check_in_one_launch(size: int, replays: int) -> None:
    compile_kernels(size, size)
    ranks = of_one_process(size, torch.device("cuda"), 1 << 16, 1_000_000)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graphs = [captured(ranks, slice(0, size), calls, wrong) for calls in (list(range(20)), [3, 1, 2], [5])]
    order = random.Random(size)
    for _ in range(replays):
        order.choice(graphs).replay()
    torch.cuda.synchronize()
    assert (wrong.item(), ranks.failed.item()) == (0, 0)


def check_late(size: int, replays: int) -> None:
    """Each rank on a stream of its own, with graphs of its own; they wait for one another on the device."""
    compile_kernels(size, 1)
    ranks = of_one_process(size, torch.device("cuda"), 1 << 16, 20_000_000)
    mine = [dataclasses.replace(ranks, rank=rank, state=ranks.state[rank : rank + 1]) for rank in range(size)]
    wrong = torch.zeros(size, dtype=torch.int64, device="cuda")
    both = [
        [captured(mine[rank], slice(rank, rank + 1), calls, wrong[rank]) for rank in range(size)]
        for calls in (list(range(10)), [3, 1, 2])
    ]
    streams = [torch.cuda.Stream() for _ in range(size)]
    torch.cuda.synchronize()
    order = random.Random(size)
    for _ in range(replays):
        graphs, late = order.choice(both), order.randrange(size)
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if rank == late or order.random() < 0.3:
                    torch.cuda._sleep(order.randrange(100_000))
                graphs[rank].replay()
    torch.cuda.synchronize()
    assert (wrong.tolist(), ranks.failed.item()) == ([0] * size, 0)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_in_one_launch(size):
    check_in_one_launch(size, 100)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_are_late(size):
    check_late(size, 100)


def test_a_rank_that_does_not_come():
    ranks = of_one_process(2, torch.device("cuda"), 1 << 16, 1000)
    x = torch.ones(1, 1, 4096, device="cuda").bfloat16()
    out = torch.zeros_like(x)
    push.push(ranks, x, out, "sum")
    torch.cuda.synchronize()
    assert out.isnan().all()
    assert ranks.failed.item() == 1
