"""How a report words what passes noted: each reason once, places short, with the user's source."""

from __future__ import annotations

import linecache
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from spec_ops.passes.base import Note


class Kernel(NamedTuple):
    """The backend of some attention calls, counted by op; why not another, each reason with its ops; what is not
    installed; where the calls are, by op."""

    backend: str
    calls: Counter[str]
    others: dict[str, list[str]]
    missing: str | None
    places: dict[str, list[str]]


class Group(NamedTuple):
    """Notes that say the same of several things: the reason, what it was said of, and where."""

    reason: str
    subjects: Counter[str]
    places: list[str]


def groups(notes: Iterable[Note]) -> list[Group]:
    """Each reason once. A note is `"subject: reason"`, or a reason alone."""
    found: dict[str, Group] = {}
    for note in notes:
        subject, colon, reason = note.text.partition(": ")
        group = found.setdefault(reason if colon else note.text, Group(reason if colon else note.text, Counter(), []))
        group.subjects[subject if colon else ""] += 1
        if note.where not in group.places:
            group.places.append(note.where)
    return list(found.values())


def short_place(where: str) -> str:
    """`file:line`, the file relative to the current folder if it is below it."""
    file, _, line = where.rpartition(":")
    with_parents = Path(os.path.abspath(file))
    inside = Path.cwd() in with_parents.parents
    return f"{with_parents.relative_to(Path.cwd()) if inside else file}:{line}"


def source_text(where: str) -> str:
    """The line of source at `file:line`, without its indentation; empty if it cannot be read."""
    file, _, line = where.rpartition(":")
    return linecache.getline(file, int(line)).strip()


def places_of(places: list[str]) -> str:
    """`file:line, line`, each file once."""
    files: dict[str, list[str]] = {}
    for place in places:
        file, _, line = short_place(place).rpartition(":")
        files.setdefault(file, []).append(line)
    return "; ".join(f"{file}:{', '.join(sorted(lines, key=int))}" for file, lines in files.items())


def with_times(names: Counter[str]) -> list[str]:
    return [name + (f" x{times}" if times > 1 else "") for name, times in names.items() if name]


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1] if names else ""
