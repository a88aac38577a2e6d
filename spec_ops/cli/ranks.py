"""`--tp N`: a command in N processes, one GPU each, of which the first prints."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from spec_ops.cli.options import console, refusing
from spec_ops.parallel import RankError, TensorParallel, shard_config

Ranks = Annotated[
    int, typer.Option("--tp", min=1, help="Share the models among this many processes, on a GPU each or on the CPU.")
]


def check_shares(ranks: int, device: torch.device, pair: Path | None, others: dict[str, bool]) -> None:
    """Refuse what ranks cannot share, before processes are started.

    Args:
        others: options that do not go with `--tp`, and whether they were given.
    """
    if given := [name for name, there in others.items() if there]:
        raise typer.BadParameter(f"shares pairs of models of spec_ops, as they are: leave out {given[0]}", param_hint="--tp")
    if device.type == "cuda" and ranks > (count := torch.cuda.device_count()):
        raise typer.BadParameter(f"must be at most {count}, the number of CUDA devices, got {ranks}", param_hint="--tp")
    from spec_ops.models.pretrained import pair_on_meta

    with refusing("--pair / --tp"):
        target, draft, _ = pair_on_meta(pair)
        for model in (target, draft):
            shard_config(model.config, ranks)


def start(ranks: int) -> None:
    """Run this process's command line in `ranks` processes, unless torchrun has started this one so. Ends with their exit code.

    Raises:
        typer.BadParameter: torchrun has started another number of them.
    """
    if "WORLD_SIZE" in os.environ:
        if (size := os.environ["WORLD_SIZE"]) != str(ranks):
            raise typer.BadParameter(f"must be the number of torchrun's processes, {size}, got {ranks}", param_hint="--tp")
        return
    started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "spec_ops"]
    # As torchrun would set it with a line that says so.
    threads = {"OMP_NUM_THREADS": "1"}
    raise typer.Exit(subprocess.run([sys.executable, *started, *sys.argv[1:]], env=threads | os.environ).returncode)


def join(device: torch.device) -> tuple[TensorParallel, torch.device]:
    """The ranks, of which only the first prints from now on, and this one's device. The process is a rank until it ends."""
    try:
        ranks = TensorParallel.connect(device.type)
    except RankError as error:
        raise typer.BadParameter(str(error), param_hint="--tp") from error
    atexit.register(torch.distributed.destroy_process_group)
    console.quiet = ranks.rank > 0
    return ranks, ranks.device
