"""The table of block shapes as a file: written one entry a line, changed one class at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from spec_ops.backends.triton.attention.tuning import Config, Entry

ABOUT = (
    "Block shapes of the attention kernels. The smallest class that holds a call counts, then the shortest range of "
    "architectures; null is any size. Measured anew by python -m benchmarks tune --write; what the fields mean: tuning.py"
)
_DEFAULTS = {f.name: f.default for f in fields(Config) if f.compare}  # what `fitted` decides is left out


def _row(entry: Entry) -> dict:
    config = {name: value for name, value in asdict(entry.config).items() if value != _DEFAULTS.get(name, value)}
    shape = {"kernel": entry.kernel, "attention": entry.attention, "head_dim": entry.head_dim, "rows": entry.rows}
    shape |= {name: n for name in ("kv_bytes", "window", "page") if (n := getattr(entry, name)) is not None}
    return shape | {"arch": list(entry.arch)} | config | ({"measured": entry.measured} if entry.measured else {})


def write(entries: Sequence[Entry], path: Path) -> None:
    """One line per entry, to be read and compared by people."""
    rows = ",\n  ".join(json.dumps(_row(entry)) for entry in entries)
    path.write_text(f'{{\n "about": {json.dumps(ABOUT)},\n "entries": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


def with_choice(entries: Sequence[Entry], present: Entry, arch: int, config: Config, measured: str) -> tuple[Entry, ...]:
    """`entries` with `config` for the class of `present` on `arch` alone: in its place if that is all it is for, else before
    it, so that other architectures keep what they have."""
    made = replace(present, arch=(arch, arch), config=config, measured=measured)
    at = list(entries).index(present)
    after = at + 1 if present.arch == made.arch else at
    return (*entries[:at], made, *entries[after:])
