"""Results as text: tables, paragraphs, numbers of three digits."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.round.report import choice

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 128
Row = dict[str, Any]


def load(name: str, results: Path) -> dict[str, Any]:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def load_rounds(name: str, results: Path) -> dict[str, Any]:
    """A file of rounds with its greedy chains alone: rounds that sample or change logits, and trees, have a table of theirs."""
    found = load(name, results)
    return found | {"rows": [row for row in found["rows"] if not any(choice(row)) and row.get("topk", 1) <= 1]}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *rest = (f"| {' | '.join(line)} |" for line in [header, *rows])
    return "\n".join([first, "|" + "---|" * len(header), *rest])


def short(value: float) -> str:
    """Three digits where they count: 3.9, 11.9, 78, 503; 0.85."""
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def paragraph(text: str) -> str:
    """`text` in lines, code kept whole."""
    whole = re.sub(r"`[^`]*`", lambda match: match[0].replace(" ", "\0"), text)
    return "\n".join(textwrap.wrap(whole, WIDTH, break_long_words=False, break_on_hyphens=False)).replace("\0", " ")


def without_empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def listed(values: Iterable[float], form: Callable[[float], str] = short) -> str:
    """The range of `values`: "9 to 14", or one number."""
    low, high = form(min(found := list(values))), form(max(found))
    return low if low == high else f"{low} to {high}"
