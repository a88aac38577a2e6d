"""What `python -m benchmarks kernels` shows and writes: progress, tables, JSON, the roofline."""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.kernels import roofline
from benchmarks.kernels.cases import Case
from benchmarks.kernels.measure import Note, measure
from benchmarks.kernels.warmup import warm_up
from benchmarks.rows import environment, write_rows
from benchmarks.timing import Ceilings, measure_ceilings

CASE = ("kind", "heads", "head_dim", "bs", "context", "lengths", "q_len", "mask", "page_size")
LOG_WIDTH = 240


def for_tables(console: Console) -> Console:
    """The console, or for a file one of `LOG_WIDTH` columns: rich would cut tables to 80."""
    return console if console.is_terminal else Console(file=console.file, width=LOG_WIDTH, highlight=False)


def case_of(row: Mapping[str, Any]) -> tuple:
    """What tells the row's case from others; a window is there only where there is one."""
    return (*(row[name] for name in CASE), row.get("window"))


def by_case(rows: Sequence[dict[str, Any]]) -> dict[tuple, dict[str, dict[str, Any]]]:
    """The rows of each case, keyed by backend."""
    cases: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(case_of(row), {})[row["backend"]] = row
    return cases


def times_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line per case: the floor, and each backend's microseconds with its share of the floor; wrong results in red."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    table = Table("kind", "heads", "bs x context", "q_len", "mask", title="microseconds (share of the floor)")
    for name in ("floor", *backends):
        table.add_column(name, justify="right", no_wrap=True)
    for found in by_case(rows).values():
        row = next(iter(found.values()))
        context = f"~{row['context']} {row['lengths']}" if row["lengths"] != "equal" else str(row["context"])
        cells = [f"{r['us']:.1f} ({r['share_of_floor']:.0%})" if (r := found.get(name)) else "" for name in backends]
        wrong = [(r := found.get(name)) is not None and not r["correct"] for name in backends]
        cells = [f"[red]{cell} wrong[/red]" if bad else cell for cell, bad in zip(cells, wrong, strict=True)]
        heads = f"{row['heads']}:{row['head_dim']}"
        shape = f"{row['bs']} x {context}" + (f", window {row['window']}" if "window" in row else "")
        shape += f", pages of {row['page_size']}" if row["page_size"] != 64 else ""
        table.add_row(row["kind"], heads, shape, str(row["q_len"]), row["mask"], f"{row['floor_us']:.1f}", *cells)
    return table


def summary_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line per kind and backend.

    `times as fast` is over the fastest other backend with a correct result in the same case: the geometric mean, and the worst
    case. `unequal / equal` is the worst time over that of equal lengths with the same total.
    """
    table = Table(
        "kind", "backend", "cases", "share of the floor", "times as fast", "worst", "unequal / equal", "error", "wrong"
    )
    cases = by_case(rows)
    for kind, backend in dict.fromkeys((row["kind"], row["backend"]) for row in rows):
        mine = {key: found[backend] for key, found in cases.items() if key[0] == kind and backend in found}
        ahead = []
        for key, row in mine.items():
            others = [r["us"] for name, r in cases[key].items() if name != backend and r["correct"]]
            if others:
                ahead.append(min(others) / row["us"])
        spread = [
            row["us"] / twin["us"]
            for row in mine.values()
            if row["lengths"] != "equal" and (twin := mine.get(case_of(row | {"lengths": "equal"})))
        ]
        errors = [row["error"] / row["reference_error"] for row in mine.values() if row["error"] and row["reference_error"]]
        table.add_row(
            kind,
            backend,
            str(len(mine)),
            f"{geometric_mean(row['floor_us'] / row['us'] for row in mine.values()):.0%}",
            f"{geometric_mean(ahead):.2f}" if ahead else "",
            f"{min(ahead):.2f}" if ahead else "",
            f"{max(spread):.2f}" if spread else "",
            f"{max(errors):.2f} of torch's" if errors else "",
            str(sum(not row["correct"] for row in mine.values())),
        )
    return table


def notes_table(notes: Sequence[Note]) -> Table:
    """A line per backend and reason, with the number of cases and the first of them."""
    table = Table("backend", "cases", "first", "no time because", title="without a time")
    counts = Counter((note.backend, note.reason, note.failed) for note in notes)
    for (backend, reason, failed), count in counts.items():
        first = next(note.case for note in notes if (note.backend, note.reason) == (backend, reason))
        short = escape(textwrap.shorten(reason, 300))  # a compiler's message can fill pages; the JSON has it all
        table.add_row(backend, str(count), first, ("[red]failed:[/red] " if failed else "") + short)
    return table


def run(
    console: Console,
    cases: Sequence[Case],
    backends: Sequence[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_sizes: Sequence[int],
    jobs: int,
    copy_rate: float | None,
    matmul_rate: float | None,
    min_ms: float,
    time_budget: float | None,
    out: Path | None,
    plot: Path | None,
) -> bool:
    """Measure all cases, show the tables and write the files, also when interrupted. True if nothing was wrong or failed.

    `jobs`: processes that compile the kernels first; 0: each is compiled when its turn comes. They count for the time budget.
    """
    deadline = math.inf if time_budget is None else time.monotonic() + time_budget
    ceilings = measure_ceilings(device, copy_rate, matmul_rate)
    console.print(f"copy {ceilings.copy / 1e12:.3g} TB/s, bf16 matrix product {ceilings.matmul / 1e12:.4g} TFLOP/s")
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    total = len(cases) * len(backends) * len(page_sizes)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress, torch.no_grad():
            compiling = progress.add_task("compiling", total=None) if jobs else None
            task = progress.add_task("measuring", total=total)
            what: dict[str, Any] = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype}
            if compiling is not None:
                warm_up(
                    cases, backends, jobs, **what, page_sizes=page_sizes,
                    tick=lambda done, total, _: progress.update(compiling, completed=done, total=total),
                )  # fmt: skip
            what |= {"ceilings": ceilings, "min_ms": min_ms, "deadline": deadline}
            for page_size in page_sizes:
                for result in measure(cases, backends, **what, page_size=page_size):
                    if isinstance(result, Note):
                        notes.append(result)
                    else:
                        rows.append(result)
                    progress.advance(task)
    finally:
        _show(console, rows, notes, ceilings, out, plot)
    if left := total - len(rows) - len(notes):
        console.print(f"[yellow]time budget spent: {left} of {total} not measured[/yellow]")
    return all(row["correct"] for row in rows) and not any(note.failed for note in notes)


def _show(
    console: Console, rows: list[dict[str, Any]], notes: list[Note], ceilings: Ceilings, out: Path | None, plot: Path | None
) -> None:
    if out is not None:
        write_rows(out, rows, ceilings=vars(ceilings), notes=[vars(note) for note in notes])
    console = for_tables(console)
    if rows:
        console.print(times_table(rows), summary_table(rows))
    if notes:
        console.print(notes_table(notes))
    if plot is not None and rows:
        roofline.plot(plot, rows, ceilings, roofline.title(environment()))
