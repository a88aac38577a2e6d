"""What `python -m benchmarks sglang` and `vllm` share: options, engines one after another, the table."""

from __future__ import annotations

import json as json_
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.engines.checkpoints import MODELS
from benchmarks.engines.process import Row
from benchmarks.rows import write_rows
from spec_ops.cli.options import console, writable_file, writable_folder

OURS = "spec_ops"
LIMIT = "--seconds, --total-seconds"  # the options that end an engine
# Of a backend's name, its page size and seconds: what its rows have in common, and what its engine says.
EngineOf = Callable[[str, int, float], tuple[Row, Generator[Row]]]


# Options of both commands.
Model = Annotated[str, typer.Option(help=f"A shape: {', '.join(MODELS)}.")]
Backends = Annotated[list[str], typer.Option(help="NAME or NAME:PAGE_SIZE of an attention backend; may be repeated.")]
Cases = Annotated[list[str], typer.Option(help="BATCHxCONTEXT; may be repeated.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Of the target; default all.")]
Steps = Annotated[int, typer.Option(min=0, help="Draft steps S; 0 decodes without a draft.")]
Ranks = Annotated[int, typer.Option(min=1, help="GPUs.")]
Rounds = Annotated[tuple[int, int], typer.Option(min=1, help="Of a short and of a long call.")]
Repeats = Annotated[int, typer.Option(min=1, help="Of both calls.")]
Seconds = Annotated[float, typer.Option(min=1, help="For an engine, its start included.")]
TotalSeconds = Annotated[
    float | None, typer.Option(min=1, help="For all engines: each may take an equal share of what is left.")
]
Logs = Annotated[Path | None, typer.Option(callback=writable_folder, help="Folder to keep each engine's log in.")]
Json = Annotated[Path | None, typer.Option(callback=writable_file, help="Write the rows, with machine, versions and commit.")]
CASES = ["1x1024", "8x1024", "32x1024"]


def parse_backend(text: str, default: int) -> tuple[str, int]:
    """`NAME` or `NAME:PAGE_SIZE`; `default` is the engine's own page size. Our guides ask for 64."""
    name, _, page_size = text.partition(":")
    if not name or (page_size and not page_size.isdecimal()) or page_size == "0":
        raise typer.BadParameter(f"must be NAME or NAME:PAGE_SIZE, got {text!r}", param_hint="--backend")
    return name, int(page_size or (64 if name == OURS else default))


def parse_case(text: str) -> tuple[int, int]:
    batch_size, _, context = text.partition("x")
    if not (batch_size.isdecimal() and context.isdecimal() and int(batch_size) and int(context)):
        raise typer.BadParameter(f"must be BATCHxCONTEXT, got {text!r}", param_hint="--case")
    return int(batch_size), int(context)


def parse_option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json_.loads(value)
    except ValueError:
        raise typer.BadParameter(f"must be NAME=JSON, got {text!r}", param_hint="--engine-option") from None


def check_options(model: str, rounds: tuple[int, int]) -> None:
    if model not in MODELS:
        raise typer.BadParameter(f"must be one of {list(MODELS)}, got {model!r}", param_hint="--model")
    if rounds[0] >= rounds[1]:
        raise typer.BadParameter(f"must be a smaller and a larger number, got {rounds}", param_hint="--rounds")


def vocab_size(target: Path) -> int:
    return json_.loads((target / "config.json").read_text(encoding="utf-8"))["vocab_size"]


def measure_engines(
    backends: Sequence[tuple[str, int]],
    engine_of: EngineOf,
    *,
    seconds: float,
    total_seconds: float | None,
    json: Path | None,
    keep: Callable[[list[Row], Row], bool] = lambda rows, row: False,
) -> tuple[list[Row], bool]:
    """Start an engine for each backend, one after another, and tell what they measure.

    Args:
        backends: names and page sizes.
        seconds, total_seconds: for each of them, and for all: each may take an equal share of what is left.
        json: where rows are written after each engine.
        keep: is given the rows so far and one that is no case; whether it did something with it. Else its values are added to
            those that come after it.

    Returns:
        The rows, and whether an engine failed.
    """
    rows: list[Row] = []
    failed = False
    end = math.inf if total_seconds is None else time.monotonic() + total_seconds
    for number, (name, page_size) in enumerate(backends):
        share = min(seconds, max(0.0, end - time.monotonic()) / (len(backends) - number))
        common, found = engine_of(name, page_size, share)
        common = {"backend": name, "page_size": page_size} | common
        with closing(found), console.status(f"{name}, pages of {page_size}: starting"):
            try:
                for row in found:
                    if is_case(row):
                        rows.append(common | row)
                        console.print(f"{name}, {row['bs']} x {row['context']}: {row['ms_per_round']:.2f} ms", soft_wrap=True)
                    elif not keep(rows, common | row):
                        common |= row
            except (RuntimeError, ValueError) as error:
                failed = True
                console.print(f"[red]{name}[/red]: {escape(str(error))}", soft_wrap=True)
        if json is not None:
            write_rows(json, rows)
    return rows, failed


def is_case(row: Row) -> bool:
    return {"bs", "context", "ms_per_round"} <= row.keys()


def over_fastest(rows: Sequence[Row]) -> float | None:
    """Our time divided by that of the fastest other backend, as the geometric mean over the cases that have both; None if none
    has. A case counts only if every backend's rounds took some time: a held-up short call can leave none."""
    cases: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        of_case = cases.setdefault((row["bs"], row["context"]), {})
        of_case[row["backend"]] = min(row["ms_per_round"], of_case.get(row["backend"], math.inf))
    ratios = [
        found[OURS] / min(ms for name, ms in found.items() if name != OURS)
        for found in cases.values()
        if OURS in found and len(found) > 1 and min(found.values()) > 0
    ]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def show(console: Console, rows: Sequence[Row]) -> None:
    """A line for each case, a column for each backend and page size."""
    ways = list(dict.fromkeys((row["backend"], row["page_size"]) for row in rows))
    table = Table("batch x context", *(f"{name}, page {size}" for name, size in ways), title="milliseconds a round")
    for bs, context in dict.fromkeys((row["bs"], row["context"]) for row in rows):
        of = {(row["backend"], row["page_size"]): row for row in rows if (row["bs"], row["context"]) == (bs, context)}
        table.add_row(f"{bs} x {context}", *(f"{of[way]['ms_per_round']:.2f}" if way in of else "" for way in ways))
    console.print(table)
    if (ratio := over_fastest(rows)) is not None:
        console.print(f"{OURS} takes {ratio:.3f} of the time of the fastest other backend, geometric mean")
