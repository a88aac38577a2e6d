"""`python -m benchmarks tune`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.tune.report import classes_table, tune
from spec_ops.cli.options import console, writable_file


def bench_tune(
    class_: Annotated[
        list[str] | None, typer.Option("--class", help="As split/gqa/128/16, or a beginning: split/mla; may be repeated.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list the classes.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile; default one per processor.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Least CUDA-graph replays to take the median of.")] = 7,
    json: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Write all figures, with machine, versions and commit.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Put the winners into the table, for this architecture.")] = False,
    table: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The table to go by and write to; default the package's own."),
    ] = None,
) -> None:
    """Compile and time block shapes of the Triton attention kernels around those of the table, on the GPU at hand.

    A class is what one entry of `tuning.json` stands for. Takes minutes: compiling is most of it."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("times kernels on a GPU, and no CUDA device is available", param_hint="tune")
    from benchmarks.tune import shapes as tune_shapes
    from spec_ops.backends.registry import device_arch
    from spec_ops.backends.triton.attention import tuning

    arch = device_arch(torch.device("cuda"))
    assert arch is not None
    path = table or tuning.PATH
    try:
        shapes = tune_shapes.select(tune_shapes.classes(tuning.read(path), arch), class_)
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "--table" if not isinstance(error, ValueError) else "--class / --table"
        raise typer.BadParameter(f"{type(error).__name__}: {error}", param_hint=hint) from error
    console.print(classes_table(shapes, arch))
    if not listing:
        tune(console, shapes, jobs or os.cpu_count() or 1, repeats, json, path if write else None)
