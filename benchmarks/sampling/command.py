"""`python -m benchmarks sampling`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spec_ops.cli.options import console, parse_device, parse_dtype, writable_file


def bench_sampling(
    job: Annotated[
        list[str] | None, typer.Option(help="draw, support, verify or accept; may be repeated; default all.")
    ] = None,
    vocab: Annotated[list[int] | None, typer.Option(min=2, help="May be repeated; default 32000, 128256 and 201088.")] = None,
    rows: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of logits, 4 a request in verify and accept; may be repeated; default 1 to 512."),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="nothing, top-p, top-k-top-p or min-p; may be repeated; default all.")
    ] = None,
    logits: Annotated[list[str] | None, typer.Option(help="peaked or flat; may be repeated; default both.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="May be repeated; default all that can be had.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the logits: bfloat16, float16 or float32.")] = "bfloat16",
    temperature: Annotated[float, typer.Option(min=0.01)] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="Vocabulary 128256, rows 4, 32 and 512, where not given.")] = False,
    time_budget: Annotated[float | None, typer.Option(min=0, help="Seconds; what is there by then is written.")] = None,
    copy_rate: Annotated[float | None, typer.Option(min=1, help="Bytes a second, read and written; default measured.")] = None,
    device: Annotated[str, typer.Option(help="cpu runs the reference by the wall clock; give a small --vocab.")] = "cuda",
    json: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Write the rows, with machine, versions and commit.")
    ] = None,
) -> None:
    """Microseconds of sampling from logits and of acceptance beside FlashInfer's and torch's, and beside reading alone.

    Every result is checked against a float64 sort before it is timed."""
    from benchmarks.sampling import cases, measure, report

    place = parse_device(device)
    parse_dtype(dtype)
    if quick:
        vocab, rows = vocab or [128256], rows or [4, 32, 512]
    try:
        chosen = cases.select(job, vocab, rows, setting, logits, dtype, temperature)
        names = measure.check_kernels(kernel)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    fine = report.run(
        console,
        chosen,
        names,
        device=place,
        copy_rate=copy_rate,
        min_ms=2.0 if quick else 4.0,
        time_budget=time_budget,
        out=json,
    )
    if not fine:
        console.print("[red]some of our results are wrong, or some of our kernels failed[/red]")
        raise typer.Exit(1)
