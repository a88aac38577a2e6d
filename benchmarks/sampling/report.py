"""What `python -m benchmarks sampling` shows and writes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.kernels.measure import Note
from benchmarks.kernels.report import for_tables, notes_table
from benchmarks.rows import write_rows
from benchmarks.sampling.cases import JOBS, Case
from benchmarks.sampling.kernels import KERNELS, OURS, READ
from benchmarks.sampling.measure import measure
from benchmarks.timing import measure_ceilings

CASE = ("job", "vocab", "rows", "setting", "logits")
Row = dict[str, Any]


def by_case(rows: Sequence[Row]) -> dict[tuple, dict[str, Row]]:
    """The rows of each case, by kernel."""
    cases: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row[name] for name in CASE), {})[row["kernel"]] = row
    return cases


def times_table(job: str, rows: Sequence[Row]) -> Table:
    """A line per case of one job: the floor, and each kernel's microseconds."""
    mine = [row for row in rows if row["job"] == job]
    names = [name for name in KERNELS[job] if any(row["kernel"] == name for row in mine)]
    table = Table("vocabulary", "rows", "cut", "logits", title=f"{job}, {JOBS[job]}: microseconds")
    for name in ("floor", *names):
        table.add_column(name, justify="right")
    for (_, vocab, count, setting, logits), found in by_case(mine).items():
        times = [f"{found[name]['us']:.1f}" if name in found else "" for name in names]
        floor = next(iter(found.values()))["floor_us"]
        table.add_row(f"{vocab:,}", str(count), setting, logits, f"{floor:.1f}", *times)
    return table


def ahead(rows: Sequence[Row], job: str) -> list[tuple[tuple, float]]:
    """Per case of the job that both have: the time of FlashInfer's fastest over this package's."""
    found = []
    for case, kernels in by_case(rows).items():
        theirs = [row["us"] for name, row in kernels.items() if name.startswith("flashinfer")]
        if case[0] == job and OURS in kernels and theirs:
            found.append((case, min(theirs) / kernels[OURS]["us"]))
    return found


def summary_table(rows: Sequence[Row]) -> Table:
    """A line per job: how this package's time stands to the fastest of FlashInfer's, and to reading the logits."""
    table = Table("job", "cases", "times as fast as FlashInfer", "worst", "case", "over reading, 512 rows and more", "worst")
    for job in dict.fromkeys(row["job"] for row in rows):
        ratios = ahead(rows, job)
        worst = min(ratios, key=lambda pair: pair[1], default=None)
        reads = [
            found[OURS]["us"] / max(found[READ]["us"], found[READ]["floor_us"])
            for case, found in by_case(rows).items()
            if case[0] == job and case[2] >= 512 and {OURS, READ} <= found.keys()
        ]
        table.add_row(
            job,
            str(sum(case[0] == job for case in by_case(rows))),
            f"{geometric_mean(ratio for _, ratio in ratios):.2f}" if ratios else "",
            f"{worst[1]:.2f}" if worst else "",
            " ".join(map(str, worst[0][1:])) if worst else "",
            f"{geometric_mean(reads):.2f}" if reads else "",
            f"{max(reads):.2f}" if reads else "",
        )
    return table


def run(
    console: Console,
    cases: Sequence[Case],
    names: Sequence[str],
    *,
    device: torch.device,
    copy_rate: float | None,
    min_ms: float,
    time_budget: float | None,
    out: Path | None,
) -> bool:
    """Measure, show the tables and write the file, also when interrupted. True if no kernel of ours was wrong or failed."""
    deadline = math.inf if time_budget is None else time.monotonic() + time_budget
    copy = measure_ceilings(device, copy_rate, matmul=1.0).copy
    console.print(f"copy {copy / 1e12:.3g} TB/s")
    rows: list[Row] = []
    notes: list[Note] = []
    total = sum(name in KERNELS[case.job] for case in cases for name in names)
    try:
        with Progress(console=console) as progress, torch.no_grad():
            task = progress.add_task("measuring", total=total)
            for result in measure(cases, names, device=device, copy=copy, min_ms=min_ms, deadline=deadline):
                (notes if isinstance(result, Note) else rows).append(result)  # type: ignore[arg-type]
                progress.advance(task)
    finally:
        if out is not None:
            write_rows(out, rows, copy=copy, notes=[vars(note) for note in notes])
        wide = for_tables(console)
        for job in dict.fromkeys(row["job"] for row in rows):
            wide.print(times_table(job, rows))
        if rows:
            wide.print(summary_table(rows))
        if notes:
            wide.print(notes_table(notes))
    if left := total - len(rows) - len(notes):
        console.print(f"[yellow]time budget spent: {left} of {total} not measured[/yellow]")
    return not any(note.failed and note.backend.startswith(OURS) for note in notes)
