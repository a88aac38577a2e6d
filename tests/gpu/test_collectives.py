"""Sums over ranks that share one GPU: the protocol on streams that are late at random, in CUDA graphs of several sizes."""

from __future__ import annotations

import dataclasses
import os
import random

import pytest
import torch

from benchmarks.late_ranks import captured, compile_kernels
from spec_ops.backends.push import of_one_process

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

from spec_ops.backends.triton.collectives import push  # noqa: E402

SLOT = 1 << 16  # bytes: of more there are too many programs for all ranks of one GPU


def check_in_one_launch(size: int, replays: int) -> None:
    compile_kernels(size, size, SLOT)
    ranks = of_one_process(size, torch.device("cuda"), SLOT, 1_000_000)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graphs = [captured(ranks, slice(0, size), calls, wrong) for calls in (list(range(20)), [3, 1, 2], [5])]
    order = random.Random(size)
    for _ in range(replays):
        order.choice(graphs).replay()
    torch.cuda.synchronize()
    assert (wrong.item(), ranks.failed.item()) == (0, 0)


def check_late(size: int, replays: int) -> None:
    """Each rank on a stream of its own, with graphs of its own; they wait for one another on the device."""
    compile_kernels(size, 1, SLOT)
    ranks = of_one_process(size, torch.device("cuda"), SLOT, 20_000_000)
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


@pytest.mark.parametrize("two_shot", [False, True])
def test_a_rank_that_does_not_come(two_shot):
    ranks = of_one_process(2, torch.device("cuda"), SLOT, 1000)
    x = torch.ones(1, 1, 4096, device="cuda").bfloat16()
    out = torch.zeros_like(x)
    push.push(ranks, x, out, "sum", two_shot=two_shot)
    torch.cuda.synchronize()
    assert out.isnan().all()
    assert ranks.failed.item() == 1
