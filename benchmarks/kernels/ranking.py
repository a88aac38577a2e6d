"""Turns measured times into what `select_backend` goes by.

    python -m benchmarks.kernels.ranking benchmarks/results/h200-kernels.json    # writes spec_ops/backends/measured.json

The inputs are results of `python -m benchmarks kernels`; where two of them hold the same case and backend, the later one
counts. Times of backends that "auto" never picks, or that were not taken in a CUDA graph, are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.kernels.report import by_case, case_of
from spec_ops.backends import get_backend, measured

ARCHS = {"NVIDIA H100": 90, "NVIDIA H200": 90, "NVIDIA B200": 100, "NVIDIA GB200": 100, "NVIDIA B300": 103}
KINDS = {"gqa": "mha", "mla": "mla"}
CLASS = ("arch", "kind", "mask", "kv_dtype", "group", "head_dim", "q_len")


def _arch(machine: str) -> int:
    found = next((arch for name, arch in ARCHS.items() if machine.startswith(name)), None)
    if found is None:
        raise SystemExit(f"ranking: the results' machine must be one of {sorted(ARCHS)}, got {machine!r}")
    return found


def _class_of(row: Mapping[str, Any]) -> tuple:
    heads, _, kv_heads = row["heads"].partition("/")
    group = int(heads) // int(kv_heads or 1)
    return (row["arch"], KINDS[row["kind"]], row["mask"], row["dtype"], group, row["head_dim"], row["q_len"])


def competes(row: Mapping[str, Any]) -> bool:
    """Whether `"auto"` could pick the row's backend."""
    backend = get_backend(row["backend"])
    return row["cuda_graph"] and backend is not None and not backend.host_plan and backend.by_name is None


def cases(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """The rows of each case (cache dtype and page size included), keyed by backend."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["page_size"]), []).append(dict(row))
    return [case for group in groups.values() for case in by_case(group).values()]


def relative_times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `measured.json`: one for each kind of call that at least two competing backends were measured in."""
    classes: dict[tuple, list[dict[str, float]]] = {}
    for case in cases(rows):
        us = {name: row["us"] for name, row in case.items() if competes(row)}
        if len(us) > 1:
            best = min(us.values())
            classes.setdefault(_class_of(next(iter(case.values()))), []).append({name: t / best for name, t in us.items()})
    made = []
    for key, found in sorted(classes.items()):
        names = sorted(set.intersection(*map(set, found)))  # in every case, so that their means are over the same ones
        if len(names) < 2:
            continue
        made.append(
            dict(zip(CLASS, key, strict=True))
            | {"cases": len(found)}
            | {"mean": {name: round(geometric_mean([case[name] for case in found]), 3) for name in names}}
            | {"worst": {name: round(max(case[name] for case in found), 3) for name in names}}
        )
    return made


def summarize(paths: Sequence[Path], root: Path) -> dict[str, Any]:
    """What `measured.json` holds of the results at `paths`, which are named relative to `root`."""
    rows: dict[tuple, dict[str, Any]] = {}
    sources = []
    for path in paths:
        found = json.loads(path.read_text())
        about = found["environment"]
        sources.append({"file": path.resolve().relative_to(root).as_posix()} | {k: about[k] for k in ("machine", "commit")})
        for row in found["rows"]:
            row = {**row, "arch": _arch(about["machine"])}
            if "window" not in row:  # a selection of its own: not every kernel has windows
                key = (case_of(row), *(row[name] for name in ("arch", "dtype", "page_size", "backend")))
                rows[key] = row
    return {
        "about": "Times over those of the fastest backend in the same case. Made by python -m benchmarks.kernels.ranking",
        "sources": sources,
        "rows": relative_times(list(rows.values())),
    }


def write(summary: Mapping[str, Any], path: Path) -> None:
    """One line per row, to be read and compared by people."""
    rows = ",\n  ".join(json.dumps(row) for row in summary["rows"])
    head = json.dumps({k: v for k, v in summary.items() if k != "rows"}, indent=1)
    path.write_text(f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    write(summarize([Path(name) for name in sys.argv[1:]], Path.cwd()), measured.PATH)
    print(measured.PATH)
