"""`python -m benchmarks ahead`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from spec_ops.cli.options import console


def bench_ahead(
    arch: Annotated[list[int], typer.Option(help="90 for sm_90; may be repeated.")] = [80, 86, 89, 90, 100, 103, 120],  # noqa: B006
    kernel: Annotated[str, typer.Option(help="Only variants whose name contains this.")] = "",
) -> None:
    """Compile every Triton kernel ahead of time, without a GPU: registers, shared memory and spills on each architecture.

    Exit code 1 if a hot kernel spills or its wgmma are serialized, one needs more shared memory than the architecture
    has or the launch counts on, or fewer blocks fit on a multiprocessor than it counts on, or more where they must spread
    evenly."""
    from benchmarks.kernels.report import for_tables
    from spec_ops.backends.triton.runtime.ahead import ARCHS, SHARED_LIMIT, compile_ahead, resident_blocks, variants

    if unknown := sorted(set(arch) - set(ARCHS)):
        raise typer.BadParameter(f"must be one of {list(ARCHS)}, got {unknown}", param_hint="--arch")
    table = Table("kernel", title="registers / shared bytes / spilled bytes / accesses to them in loops")
    for a in arch:
        table.add_column(f"sm_{a}", no_wrap=True)
    failed = False
    chosen = [v for v in variants() if kernel in v.name]
    for variant in track(chosen, "compiling", console=console, transient=True):
        cells = []
        for a in arch:
            if a not in variant.archs:
                cells.append("")
                continue
            used = compile_ahead(variant, a)
            bad = (variant.hot and (used.spill_bytes > 0 or used.serialized)) or used.shared_bytes > SHARED_LIMIT[a]
            # From sm_90 on the estimate lacks what fp8 and MLA take there; resident programs decide.
            bad |= variant.estimated is not None and a < 90 and used.shared_bytes > variant.estimated
            fit = resident_blocks(used, variant.num_warps, a)
            bad |= fit < variant.programs or (variant.early and fit > variant.programs)
            failed |= bad
            figures = " / ".join(map(str, used[:4])) + (", wgmma serialized" if used.serialized else "")
            cells.append(("[red]" if bad else "") + figures)
        table.add_row(variant.name + ("" if variant.hot else " (not hot)"), *cells)
    for_tables(console).print(table)
    if failed:
        raise typer.Exit(1)
