"""What `python -m benchmarks round` does: the cases of its options, progress, tables, JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.kernels.measure import Note
from benchmarks.kernels.report import for_tables, notes_table
from benchmarks.round.jobs import fitting, run
from benchmarks.round.measure import RoundCase
from benchmarks.round.report import (
    auto_table,
    beside_table,
    choice,
    choice_table,
    draft_shape,
    judge_auto,
    rounds_table,
    with_bf16_ms,
)
from benchmarks.rows import write_rows
from spec_ops.decoding import SpeculationConfig


def plan(
    *,
    model: Sequence[str],
    batch_size: Sequence[int],
    context: Sequence[int],
    layers: Sequence[int] | None,
    steps: Sequence[int],
    tree: tuple[int, int | None],
    backend: Sequence[str],
    passes: Sequence[bool],
    extra: tuple[bool, bool, bool, bool],
    accept_length: float | None,
    common: dict[str, Any],
    choices: Sequence[dict[str, Any]] = ({},),
    paths: Sequence[str] = ("own",),
) -> list[RoundCase]:
    """A case for every combination; plain and assisted rounds once for all settings that they do not depend on.

    Args:
        tree: width and tokens of the draft, as in `SpeculationConfig`. extra: whether naive, plain and assisted rounds, and
            those of prompt lookup too.
        choices: how tokens are chosen, attributes of speculative and plain rounds; one round for each. Default greedily.
        accept_length: default three quarters of the longest path. common: further attributes of all cases.
        paths: of the target of speculative and plain rounds: `"own"`, `"transformers"`.

    Raises:
        ValueError: an impossible draft or accept length.
    """
    naive, plain, assisted, lookup = extra
    cases: list[RoundCase] = []
    for name, count, size in itertools.product(model, layers or [None], batch_size):  # type: ignore[list-item]
        shared = common | {"model": name, "layers": count, "batch_size": size, "contexts": tuple(dict.fromkeys(context))}
        for number in steps:
            path_len = SpeculationConfig(number, *tree).path_len
            gained = accept_length or 0.75 * path_len
            if gained > path_len:
                raise ValueError(f"--accept-length must be at most {path_len} tokens with {number} steps, got {gained:g}")
            drafted = shared | {"steps": number, "topk": tree[0], "tree_tokens": tree[1], "accept_length": gained}
            for kernel, on in itertools.product(backend, passes):
                options = drafted | {"backend": kernel, "passes": on}
                every = list(itertools.product(paths, choices))
                cases += [RoundCase(path=path, **options, **choice) for path, choice in every]
                cases += [RoundCase(round="naive", **options)] * naive
                cases += [RoundCase(round="lookup", path=path, **options, **choice) for path, choice in every * lookup]
            if assisted and size == 1:
                shortest = drafted | {"contexts": (min(context),)}
                cases.append(RoundCase(round="assisted", backend="transformers", passes=False, **shortest))
        if plain or lookup:
            for path, kernel, on, choice in itertools.product(paths, backend, passes, choices):
                drafts_aside = {name: value for name, value in choice.items() if name != "whole_draft"}
                options = shared | drafts_aside | {"path": path, "backend": kernel, "passes": on}
                cases += [RoundCase(round="plain", **options)] * plain + [RoundCase(round="plain-lookup", **options)] * lookup
    return list(dict.fromkeys(cases))


class Report:
    """The file of rows: written after every case, so that an interrupted run leaves what it has."""

    def __init__(self, path: Path | None, append: bool, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.earlier: dict[str, Any] = {"rows": [], "notes": [], "earlier_runs": [], "shapes": {}}
        if append and path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            self.earlier = {**self.earlier, **found, "earlier_runs": [*found.get("earlier_runs", []), found["environment"]]}

    def write(self, cases: Sequence[RoundCase], rows: Sequence[dict[str, Any]], notes: Sequence[Note]) -> None:
        """`cases` are those done so far, `rows` and `notes` what is new; earlier ones of the same cases go."""
        if self.path is None:
            return
        earlier, new = self.earlier, {_identity(row): row for row in rows}
        rows = [*(_beside(new.pop(_identity(row), row), row) for row in earlier["rows"]), *new.values()]
        shapes = earlier["shapes"] | {case.shape.label: case.shape.about for case in cases}
        again = {str(case) for case in cases} | {note.case for note in notes}
        told = [*(note for note in earlier["notes"] if note["case"] not in again), *(vars(note) for note in notes)]
        more = {"earlier_runs": earlier["earlier_runs"], "shapes": shapes, "auto": judge_auto(rows), "notes": told}
        write_rows(self.path, rows, **self.settings, **more)


def _beside(row: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """A row with what the file's row of the same case says of another engine, which no command here measures."""
    return {name: earlier[name] for name in ("peer", "peer_ms") if name in earlier} | row


def _identity(row: dict[str, Any]) -> tuple:
    case = tuple(row[name] for name in ("model", "bs", "context", "backend", "passes"))
    # Older files hold no other round, and no other path.
    return (row.get("round", "speculative"), row.get("path", "own"), *case, draft_shape(row), choice(row))


def measure(
    console: Console,
    cases: list[RoundCase],
    memory: float,
    jobs: int,
    warm: bool,
    limit: float,
    timeline: Path | None,
    report: Report,
) -> tuple[list[dict[str, Any]], list[Note]]:
    """Rows and notes of all cases, in the order of `cases`."""
    cases, notes = fitting(cases, memory)
    if timeline is not None and cases:
        cases[0] = replace(cases[0], timeline=str(timeline.absolute()))
    found: dict[RoundCase, list[dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("rounds", total=len(cases))
        for case, results in run(
            cases, jobs=jobs, memory=memory, warm=warm, limit=limit, tell=lambda text: console.print(text, soft_wrap=True)
        ):
            notes += [result for result in results if isinstance(result, Note)]
            found[case] = [result for result in results if not isinstance(result, Note)]
            rows = with_bf16_ms([row for one in cases for row in found.get(one, [])])
            report.write(list(found), rows, notes)
            progress.advance(task)
    return rows, notes


def show(console: Console, rows: list[dict[str, Any]], notes: list[Note]) -> None:
    console = for_tables(console)
    if rows:
        console.print(rounds_table(rows))
        beside, chosen, verdicts = beside_table(rows), choice_table(rows), judge_auto(rows)
        for table in filter(None, (beside, chosen)):
            console.print(table)
        if verdicts:
            console.print(auto_table(verdicts))
    if notes:
        console.print(notes_table(notes))
