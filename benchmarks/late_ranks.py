"""Sums over ranks of which one is late at random: every sum and maximum is compared with the reference, bit for bit.

    torchrun --nproc-per-node 2 --module benchmarks collectives --late 1000000

The parts hold zeros of both signs, infinities and NaN. Each rank replays CUDA graphs of its own, of several sizes and in an
order that is random and the same on all ranks. Before each replay one rank is held up on the device, by up to `LONGEST` cycles.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from spec_ops.backends.push import PushWorkspace, of_one_process
from spec_ops.ops.reference import collectives as reference

COLUMNS = (4096, 64, 16384, 1024, 4096, 1 << 18, 512, 16384)  # of a sum; no more than a slot has room for
# In turn, so that each size is computed in each: two shots have tiles of one warp up to some size, here of four at any too.
WAYS: tuple[dict[str, Any], ...] = ({"two_shot": False}, {"two_shot": True}, {"two_shot": True, "warps": 4})
GRAPHS = (list(range(50)), [3, 1, 2], [5])  # the seeds of the sums in each
LONGEST = 100_000
_AHEAD = 200  # replays that the host may be ahead of the device


def special(size: int, columns: int, seed: int) -> torch.Tensor:
    """Parts `[size, 1, columns]` bfloat16 with zeros of both signs, infinities and NaN."""
    g = torch.Generator().manual_seed(seed)
    parts = torch.randn(size, 1, columns, generator=g).bfloat16()
    for value in (0.0, -0.0, torch.inf, -torch.inf, torch.nan):
        parts[torch.rand(parts.shape, generator=g) < 0.02] = value
    parts[:, :, :6] = 0.0
    return parts.cuda()


def bits(x: torch.Tensor) -> torch.Tensor:
    """Of every number; all NaN are one."""
    return torch.where(x.isnan(), 7.0, x).view(torch.int16)


def captured(ranks: PushWorkspace, own: slice, calls: list[int], wrong: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of sums and maxima, each of which counts in `wrong` what differs from the reference.

    Args:
        ranks: whose buffers.
        own: the ranks whose parts this process gives, all in one launch.
        calls: the seed of each sum.
        wrong: int64, 0-dim.
    """
    from spec_ops.backends.triton.collectives import push

    local = own.stop - own.start
    cases = []
    for seed in calls:
        parts = special(ranks.size, min(COLUMNS[seed % len(COLUMNS)], ranks.slot_bytes // 2), seed)
        wanted = bits(reference.sum_of(list(parts)))
        keys = torch.randint(-(2**62), 2**62, (ranks.size, 33), generator=torch.Generator().manual_seed(seed)).cuda()
        keys[:, 0] = 0
        cases.append((parts[own].contiguous(), wanted, keys[own].contiguous(), keys.amax(0)))
        wrong.add_((wanted != wanted).sum() + (keys != keys).sum())  # loads what a capture must not load

    def run() -> None:
        for i, (parts, wanted, keys, largest) in enumerate(cases):
            out = torch.empty_like(parts)
            push.push(ranks, parts, out, "sum", local=local, **WAYS[i % len(WAYS)])
            wrong.add_((bits(out) != wanted).sum())
            if i % 5 == 1:
                out = torch.empty_like(keys)
                push.push(ranks, keys, out, "max", local=local)
                wrong.add_((out != largest).sum())

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    graph.inputs = cases  # type: ignore[attr-defined]  # whose memory it reads
    return graph


def compile_kernels(size: int, local: int, slot: int) -> None:
    """On a workspace that is thrown away, with slots of as many bytes: a first launch inside a capture would load modules
    there."""
    from spec_ops.backends.triton.collectives import push

    ranks = of_one_process(size, torch.device("cuda"), slot, 1)
    keys = torch.ones(local, 33, dtype=torch.int64, device="cuda")
    push.push(ranks, keys, torch.empty_like(keys), "max", local=local)
    for columns in sorted({min(columns, slot // 2) for columns in COLUMNS}):
        x = torch.ones(local, 1, columns, dtype=torch.bfloat16, device="cuda")
        for way in WAYS:
            push.push(ranks, x, torch.empty_like(x), "sum", local=local, **way)
    torch.cuda.synchronize()


def replay_late(ranks: PushWorkspace, sums: int, tell: Callable[[int], None]) -> tuple[int, int]:
    """Replays on one rank of several processes until `sums` sums are done: every rank must call it.

    Args:
        tell: is given the sums done so far, about once a second.

    Returns:
        How many sums were done, and how many numbers differed from the reference; 0 if none did.

    Raises:
        RuntimeError: a kernel waited for another rank in vain.
    """
    compile_kernels(ranks.size, 1, ranks.slot_bytes)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    own = slice(ranks.rank, ranks.rank + 1)
    graphs = [(captured(ranks, own, calls, wrong), len(calls)) for calls in GRAPHS]
    order, stream = random.Random(0), torch.cuda.current_stream()
    done = replays = 0
    told = time.monotonic()
    while done < sums:
        graph, count = order.choice(graphs)
        late, cycles = order.randrange(ranks.size), order.randrange(LONGEST)
        if late == ranks.rank:
            torch.cuda._sleep(cycles)
        graph.replay()
        done, replays = done + count, replays + 1
        if replays % _AHEAD == 0:
            stream.synchronize()
            if time.monotonic() - told > 1:
                told = time.monotonic()
                tell(done)
    stream.synchronize()
    if ranks.failed.item():
        raise RuntimeError(f"rank {ranks.rank} waited in vain")
    return done, int(wrong.item())
