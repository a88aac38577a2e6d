"""Sums over ranks, in CUDA graphs.

    python -m benchmarks collectives                                                 # one GPU, which holds all ranks
    torchrun --nproc-per-node 2 --module benchmarks collectives                      # a GPU for each rank
    torchrun --nproc-per-node 2 --module benchmarks collectives --late 1000000       # does it hold (`late_ranks.py`)?

With one process all ranks are programs of one launch: that shows what the kernels cost besides the links between GPUs, and that
the protocol works. With several, NCCL and torch's symmetric memory are measured beside ours, and a time is the maximum over the
ranks. Of each way the first result is compared with the sum of the parts.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.rows import write_rows
from benchmarks.timing import median_ms, side_stream
from spec_ops.backends.push import PushWorkspace, connected, most_bytes, of_one_process, workspace_of
from spec_ops.cli.options import writable_file
from spec_ops.parallel import TensorParallel

PARTS = 50  # different ones, which the sums take in turn
TIMED, SAMPLES = 400, 20  # sums between two events at least: their graph is replayed back to back; and times of these
COLUMNS = 4096  # of the norm
SECONDS = 20  # that a kernel waits
Call = Callable[[torch.Tensor], torch.Tensor]


def bench_collectives(
    ranks: Annotated[list[int] | None, typer.Option(help="In one process: how many ranks; may be repeated.")] = None,
    kb: Annotated[list[int] | None, typer.Option(help="KiB of a rank's part; may be repeated.")] = None,
    late: Annotated[
        int | None, typer.Option(min=1, help="Under torchrun: no times, but so many sums with a rank late at random, compared.")
    ] = None,
    calls: Annotated[int, typer.Option(min=1, help="Sums in a CUDA graph.")] = 50,
    json: Annotated[Path | None, typer.Option(callback=writable_file, help="Write the figures to this file.")] = None,
) -> None:
    """Microseconds of sums over ranks in CUDA graphs; under torchrun beside NCCL and torch's symmetric memory."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if late is not None and not several:
        raise typer.BadParameter("needs processes that torchrun has started", param_hint="--late")
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a CUDA device", param_hint="collectives")
    if late is not None:
        _with_late_ranks(late)
        return
    sizes = [size << 10 for size in kb or (8, 32, 64, 128, 256)]
    rows = _of_processes(sizes, calls) if several else _of_one_process(ranks or [2, 4, 8], sizes, calls)
    if several and dist.get_rank():
        return
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if json is not None:
        write_rows(json, rows)


def _with_late_ranks(sums: int) -> None:
    from benchmarks.late_ranks import replay_late

    ranks = TensorParallel.connect("cuda", timeout=SECONDS)
    if not _connected(ranks):
        dist.destroy_process_group()
        if ranks.rank:
            raise typer.Exit(2)
        raise typer.BadParameter("needs 2, 4 or 8 GPUs of one host that have peer access to one another", param_hint="--late")
    pushes = workspace_of("collectives", ranks.name, ranks.device)
    done, wrong = replay_late(pushes, sums, lambda so_far: print(f"{so_far} sums", flush=True) if ranks.rank == 0 else None)
    print(f"rank {ranks.rank}: {done} sums, {wrong} numbers differ", flush=True)
    if wrong:
        raise typer.Exit(1)


def _connected(ranks: TensorParallel) -> bool:
    """Whether the ranks can write to one another's memory. If not, rank 0 was told why when they met."""
    return (ranks.name, str(ranks.device)) in connected()


def _of_one_process(counts: list[int], sizes: list[int], calls: int) -> list[dict[str, Any]]:
    """All ranks on one GPU, in one launch."""
    rows = []
    for count in counts:
        if most_bytes(count) is None:
            raise typer.BadParameter(f"must be 2, 4 or 8, got {count}", param_hint="--ranks")
        for size in sizes:
            workspace = of_one_process(count, torch.device("cuda"), max(sizes), SECONDS * 1_000_000)
            parts = torch.randn(PARTS, count, size // 2 // COLUMNS, COLUMNS, device="cuda").bfloat16()
            for way, call in _ours(workspace, parts[0], count).items():
                rows.append({"ranks": count, "gpus": 1, "kib": size >> 10, "way": way, **_measured(call, parts, calls)})
                if workspace.failed.item():
                    raise RuntimeError(f"{way}: a rank waited in vain")
    return rows


def _of_processes(sizes: list[int], calls: int) -> list[dict[str, Any]]:
    """A GPU for each rank."""
    import torch.distributed._symmetric_memory as symmetric

    ranks = TensorParallel.connect("cuda", timeout=SECONDS)
    rows = []
    for size in sizes:
        generator = torch.Generator("cuda").manual_seed(ranks.rank)
        parts = torch.randn(PARTS, 1, size // 2 // COLUMNS, COLUMNS, device="cuda", generator=generator).bfloat16()
        ways: dict[str, Call] = {"NCCL": ranks.all_reduce}
        if _connected(ranks):
            shared = symmetric.empty(parts[0].numel(), dtype=torch.bfloat16, device=parts.device)
            symmetric.rendezvous(shared, ranks.group)
            ways["symm_mem one-shot"] = _torchs(torch.ops.symm_mem.one_shot_all_reduce, shared, ranks.name)
            ways["symm_mem two-shot"] = _torchs(torch.ops.symm_mem.two_shot_all_reduce_, shared, ranks.name)
            workspace = workspace_of("collectives", ranks.name, ranks.device)
            if size <= most_bytes(ranks.size):  # type: ignore[operator]  # connected ranks have some
                ways |= _ours(workspace, parts[0], 1)
        for way, call in ways.items():
            figures = _measured(call, parts, calls, ranks)
            rows.append({"ranks": ranks.size, "gpus": ranks.size, "kib": size >> 10, "way": way, **figures})
    return rows


def _torchs(op: Any, shared: torch.Tensor, group: str) -> Call:
    """On memory of torch's, into which a part is copied first."""

    def call(part: torch.Tensor) -> torch.Tensor:
        shared.copy_(part.view(-1))
        return op(shared, "sum", group).view(part.shape).clone()

    return call


def _ours(workspace: PushWorkspace, part: torch.Tensor, local: int) -> dict[str, Call]:
    from spec_ops.backends.triton.collectives.push import push

    residual, weight = torch.zeros_like(part), torch.ones(COLUMNS, device="cuda", dtype=part.dtype)
    squares = torch.empty(part.numel() // 16, device="cuda")

    def alone(part: torch.Tensor, two_shot: bool) -> torch.Tensor:
        out = torch.empty_like(part)
        push(workspace, part, out, "sum", local=local, two_shot=two_shot)
        return out

    def with_norm(part: torch.Tensor, two_shot: bool) -> torch.Tensor:
        out, z = torch.empty_like(part), torch.empty_like(part)
        push(workspace, part, out, "sum", (residual, weight, z, squares, COLUMNS), local=local, two_shot=two_shot)
        return out

    ways = {}
    for shots, two_shot in (("push", False), ("two-shot push", True)):
        fits = (2 * part.nbytes // local // workspace.size if two_shot else part.nbytes // local) <= workspace.slot_bytes
        if fits and (not two_shot or workspace.size > 2):
            ways[shots] = functools.partial(alone, two_shot=two_shot)
            ways[f"{shots}, residual and norm"] = functools.partial(with_norm, two_shot=two_shot)
    return ways


def _measured(call: Call, parts: torch.Tensor, calls: int, ranks: TensorParallel | None = None) -> dict[str, Any]:
    """Microseconds of a call, after a look at whether the first one's result is near the sum.

    Not by `time_calls`, which replays as often as there is time for: ranks must make the same calls.
    """
    graph, replays = torch.cuda.CUDAGraph(), math.ceil(TIMED / calls)

    def replayed() -> None:
        for _ in range(replays):
            graph.replay()

    with side_stream():
        for part in parts:
            call(part)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            outputs = [call(parts[i % PARTS]) for i in range(calls)]
        outputs[0].fill_(torch.nan)
        median_ms(replayed, 3)
        us = torch.tensor(median_ms(replayed, SAMPLES) / (replays * calls) * 1e3, device="cuda")
    total = parts[0].double().sum(0)
    if ranks is not None:
        dist.all_reduce(us, dist.ReduceOp.MAX, group=ranks.group)
        dist.all_reduce(total, group=ranks.group)
    error = (outputs[0].double() - total).abs().max().item()
    if not error <= 2**-7 * total.abs().max().item():
        raise RuntimeError(f"a sum differs from the exact one by {error}")
    return {"calls": calls, "us": round(us.item(), 2)}
