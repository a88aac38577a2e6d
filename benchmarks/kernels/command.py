"""`python -m benchmarks kernels`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from spec_ops.cli.options import DTYPES, console, parse_device, parse_dtype, plot_file, writable_file


def bench_kernels(
    kind: Annotated[str | None, typer.Option(help="gqa or mla; default both.")] = None,
    heads: Annotated[list[str] | None, typer.Option(help="32/8, 32/8:128 (GQA) or 128 (MLA 512+64); may be repeated.")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="8x8192; 32x512-65536: log-uniform lengths; 48x500-2000+120000: one of them that long. May be repeated."
        ),
    ] = None,
    q_len: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    mask: Annotated[list[str] | None, typer.Option(help="causal or tree; may be repeated.")] = None,
    window: Annotated[int, typer.Option(min=-1, help="Keys before a query's own that it sees; -1 for all.")] = -1,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated; default all that run here but reference; torch-flex compiles anew per case."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the cache; float8_e4m3fn takes bfloat16 queries.")] = "bfloat16",
    page_size: Annotated[list[int], typer.Option(min=1, max=128, help="May be repeated.")] = [64],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="Two batches, q_len 1 and 16, less time for each.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile first; default on CUDA one per processor, 16 at most.")
    ] = None,
    time_budget: Annotated[float | None, typer.Option(min=0, help="Seconds; what is there by then is written.")] = None,
    copy_rate: Annotated[float | None, typer.Option(min=1, help="Bytes a second, read and written; default measured.")] = None,
    matmul_rate: Annotated[float | None, typer.Option(min=1, help="Bfloat16 operations a second; default measured.")] = None,
    device: Annotated[str, typer.Option(help="cpu runs tiny cases by the wall clock.")] = "cuda",
    out: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Write the rows as JSON, with machine, versions and commit.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=plot_file, help="Write a roofline plot as PNG; needs matplotlib.")
    ] = None,
) -> None:
    """Correctness and microseconds of every attention kernel, next to each other and to the machine's floor."""
    from benchmarks.kernels import cases as kernel_cases
    from benchmarks.kernels import measure as kernels
    from benchmarks.kernels import report as kernel_report

    place, kv_dtype = parse_device(device), parse_dtype(dtype, DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn})
    try:
        cases = kernel_cases.select(kind, heads, case, q_len, mask, quick, window)
        backends = kernels.check_backends(backend, place)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    fine = kernel_report.run(
        console,
        cases,
        backends,
        device=place,
        dtype=torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype,
        kv_dtype=kv_dtype,
        page_sizes=page_size,
        # Each process takes half a gigabyte of the device.
        jobs=(min(os.cpu_count() or 1, 16) if place.type == "cuda" else 0) if jobs is None else jobs,
        copy_rate=copy_rate,
        matmul_rate=matmul_rate,
        min_ms=5.0 if quick else 20.0,
        time_budget=time_budget,
        out=out,
        plot=plot,
    )
    if not fine:
        console.print("[red]some results are wrong or some kernels failed[/red]")
        raise typer.Exit(1)
