"""What `python -m benchmarks tune` prints and writes."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.tune.search import Result
    from benchmarks.tune.shapes import ShapeClass
    from spec_ops.backends.triton.attention.tuning import Config

SHOWN = 6  # lines of a class's table, and the present config


def tune(
    console: Console, shapes: Sequence[ShapeClass], jobs: int, repeats: int, json: Path | None, write: Path | None
) -> list[Result]:
    """Compiles, measures, prints and writes class by class: what is done stays if the rest is interrupted."""
    from benchmarks.rows import write_rows
    from benchmarks.tune.compile import compiling
    from benchmarks.tune.search import tune_class

    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, compiling(shapes, jobs) as submitted:
        compiled = progress.add_task("compiling", total=len(submitted))
        for future in submitted.values():
            future.add_done_callback(lambda _: progress.advance(compiled))
        for shape in shapes:
            candidates = shape.candidates()
            outcomes = {config: submitted[str(shape), config].result() for config in candidates}
            kept = sum(not outcome.refused or config == shape.present for config, outcome in outcomes.items())
            timed = progress.add_task(f"timing {shape}", total=kept * len(shape.cases()))
            result = tune_class(shape, outcomes, repeats, lambda task=timed: progress.advance(task))  # type: ignore[misc]
            progress.remove_task(timed)
            results.append(result)
            console.print(class_table(result))
            if write is not None:
                write_choice(result, write)
            if json is not None:
                write_rows(json, [row for done in results for row in done.rows()], repeats=repeats, jobs=jobs)
    console.print(summary_table(results))
    if write is not None and any(r.choice != r.shape.present for r in results):
        console.print(f"changed {write}; next: [bold]python -m benchmarks ahead --kernel attention[/bold]", soft_wrap=True)
    return results


def write_choice(result: Result, path: Path) -> None:
    """Puts the choice of one class into the table at `path`, unless it is there already."""
    from benchmarks.rows import environment
    from benchmarks.tune import table as tune_table
    from spec_ops.backends.triton.attention import tuning

    if result.choice == result.shape.present:
        return
    about = environment()
    measured = f"{about['machine']}, triton {about.get('triton', 'unknown')}, commit {about['commit']}"
    shape = result.shape
    tune_table.write(tune_table.with_choice(tuning.read(path), shape.entry, shape.arch, result.choice, measured), path)


def classes_table(shapes: Sequence[ShapeClass], arch: int) -> Table:
    table = Table("class", "measured with", "queries", "cases", "candidates", "present", title=f"classes of sm_{arch}")
    for shape in shapes:
        heads = f"{shape.heads}:{shape.heads.head_dim}"
        queries = ", ".join(map(str, shape.q_lens))
        cells = (heads, queries, str(len(shape.cases())), str(len(shape.candidates())), _text(shape.present))
        table.add_row(str(shape), *cells)
    return table


def class_table(result: Result) -> Table:
    """The fastest candidates and the present config; the title counts those without a time."""
    reasons = Counter(result.why_not(config).split(":")[0] for config in result.outcomes if result.why_not(config))
    left_out = "; left out: " + ", ".join(f"{n} {name}" for name, n in reasons.items()) if reasons else ""
    table = Table("config", "registers", "spilled", "over the best", "worst case", "", title=f"{result.shape}{left_out}")
    ranked = result.ranked
    shown = [r for i, r in enumerate(ranked) if i < SHOWN or r.config == result.shape.present]
    for found in shown:
        used = result.outcomes[found.config].used
        marks = ["present"] if found.config == result.shape.present else []
        marks += ["[green]chosen[/green]"] if found.config == result.choice else []
        marks += [f"[yellow]{escape(reason)}[/yellow]"] if (reason := result.outcomes[found.config].refused) else []
        resources = (str(used.registers), str(used.spill_bytes)) if used else ("", "")
        table.add_row(_text(found.config), *resources, f"{found.relative:.3f}", f"{found.worst:.3f}", ", ".join(marks))
    if result.present is None:
        why = textwrap.shorten(result.why_not(result.shape.present), 200)
        table.add_row(_text(result.shape.present), "", "", "", "", f"present, [red]no time[/red]: {escape(why)}")
    return table


def summary_table(results: Sequence[Result]) -> Table:
    """A line per class: by how much its entry misses the best."""
    table = Table("class", "present", "to the best", "choice", "seconds", title="the table against what was measured")
    for result in results:
        present, choice = result.present, result.choice
        kept = choice == result.shape.present
        distance = f"{present.relative - 1:+.1%}" if present is not None else "[red]no time[/red]"
        cells: tuple[Any, ...] = ("kept" if kept else f"[green]{_text(choice)}[/green]", f"{result.seconds:.0f}")
        table.add_row(str(result.shape), _text(result.shape.present), distance, *cells)
    return table


def _text(config: Config) -> str:
    block = f"{config.block_m} x {config.block_n}"
    return f"{block}, {config.num_warps} warps, {config.num_stages} stages, {config.programs} programs"
