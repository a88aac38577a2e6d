"""`python -m benchmarks ahead`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from spec_ops.cli.options import console, writable_file


def _differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """A line for each name whose hashes differ, or that only one of the two lists has."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lines.append(f"missing: {name}")
        elif name not in old:
            lines.append(f"new: {name}")
        elif old[name] != new[name]:
            lines.append(f"changed: {name}")
    return lines


def _read_hashes(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"must be a readable JSON file, got {path}: {error}", param_hint="--compare") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise typer.BadParameter(f"must hold an object of names and hashes, got {path}", param_hint="--compare")
    return found


def bench_ahead(
    arch: Annotated[list[int], typer.Option(help="90 for sm_90; may be repeated.")] = [80, 86, 89, 90, 100, 103, 120],  # noqa: B006
    kernel: Annotated[str, typer.Option(help="Only variants whose name contains this.")] = "",
    hashes: Annotated[
        Path | None,
        typer.Option(
            callback=writable_file, help="Write here a SHA-256 of the PTX of each variant instead; does not run the assembler."
        ),
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="Compare such hashes with those in this file.")] = None,
) -> None:
    """Compile every Triton kernel ahead of time, without a GPU: registers, shared memory and spills on each architecture.

    Exit code 1 if a hot kernel spills, or its wgmma are serialized (if that is known: are not), one needs more shared memory
    than the architecture has or the launch counts on, or fewer blocks fit on a multiprocessor than it counts on, or more where
    they must spread evenly.

    With --compare, exit code 1 if a hash differs, or if only one of the two lists has a variant; --arch and --kernel narrow
    both lists. Hashes hold for one version of Triton."""
    from benchmarks.kernels.report import for_tables
    from spec_ops.backends.triton.runtime.ahead import (
        ARCHS,
        SHARED_LIMIT,
        as_counted_on,
        compile_ahead,
        lowered,
        ptx_hash,
        variants,
    )

    if unknown := sorted(set(arch) - set(ARCHS)):
        raise typer.BadParameter(f"must be one of {list(ARCHS)}, got {unknown}", param_hint="--arch")
    if hashes is not None or compare is not None:
        known = None if compare is None else _read_hashes(compare)
        found = {
            f"{variant.name} sm_{a}": ptx_hash(lowered(variant, a).ptx)
            for variant in track([v for v in variants() if kernel in v.name], "compiling", console=console, transient=True)
            for a in arch
            if a in variant.archs
        }
        if hashes is not None:
            hashes.parent.mkdir(parents=True, exist_ok=True)
            hashes.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="utf-8")
        if known is not None:
            asked = {n: v for n, v in known.items() if kernel in n and any(n.endswith(f" sm_{a}") for a in arch)}
            differences = _differences(asked, found)
            for line in differences:
                typer.echo(line)
            typer.echo(f"{len(differences)} of {len(asked | found)} differ")
            if differences:
                raise typer.Exit(1)
        return
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
            slow = used.spill_bytes > 0 or used.serialized != (variant.serialized and a == 90)
            bad = (variant.hot and slow) or used.shared_bytes > SHARED_LIMIT[a]
            bad |= variant.estimated is not None and used.shared_bytes > variant.estimated[a]
            bad |= not as_counted_on(variant, used, a)
            failed |= bad
            figures = " / ".join(map(str, used[:4])) + (", wgmma serialized" if used.serialized else "")
            cells.append(("[red]" if bad else "") + figures)
        table.add_row(variant.name + ("" if variant.hot else " (not hot)"), *cells)
    for_tables(console).print(table)
    if failed:
        raise typer.Exit(1)
