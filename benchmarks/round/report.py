"""What `python -m benchmarks round` makes of its rows: tables, and whether `auto` chose well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from spec_ops.backends import get_backend

TOLERANCE = 1.05  # of `auto` over the fastest backend
PARTS = ("matmul", "attention", "other", "gaps")


def above_floor(row: dict[str, Any]) -> dict[str, float] | None:
    """Milliseconds above the floor by where they go; matrix products read the weights, attention the KV. None for a row without
    a profile. What matrix products gain on a floor that counts the copy rate can be below zero."""
    if "matmul_ms" not in row:
        return None
    floors = {"matmul": row["weights_floor_ms"], "attention": row["kv_floor_ms"]}
    return {part: row[f"{part}_ms"] - floors.get(part, 0.0) for part in PARTS}


def base(row: dict[str, Any]) -> tuple:
    """What rows must share to be compared: target, batch, context."""
    return row["model"].partition("+")[0], row["bs"], row["context"]


def judge_auto(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case measured with `auto` and a named backend: the fastest, how far `auto` is behind, and why."""
    cases: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["round"] != "assisted":
            key = (row["model"], row["bs"], row["context"], row["steps"], row["topk"], row["round"], row["passes"])
            cases.setdefault(key, {})[row["backend"]] = row
    verdicts = []
    for found in cases.values():
        if "auto" not in found or len(found) == 1:
            continue
        row = min(found.values(), key=lambda r: r["ms"])
        ratio = found["auto"]["ms"] / row["ms"]
        why = None
        if ratio > TOLERANCE:
            backend = get_backend(row["backend"])
            planned = backend is not None and backend.host_plan
            why = "it plans on the host, so it is used by name only" if planned else "its rank is behind what `auto` chose"
        shared = {name: row[name] for name in ("model", "bs", "context", "round", "passes")}
        verdicts.append(
            shared | {"fastest": row["backend"], "auto_over_fastest": round(ratio, 3), "auto_wins": why is None, "why": why}
        )
    return verdicts


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0: no "-0.00"


def rounds_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line per row, with the milliseconds above the floor by kind."""
    lengths = sorted({row["accept_length"] for row in rows if row["round"] != "plain"})
    stated = ", ".join(f"{length:g}" for length in lengths)
    table = Table(title=f"rounds; tokens/s at a stated accept length of {stated}" if stated else "rounds")
    for name in ("model", "round", "backend", "passes", "batch, context"):
        table.add_column(name)
    for name in (
        "ms",
        "floor",
        "share",
        *(f"+ {part}" for part in PARTS),
        "kernels",
        "graphs",
        "launches",
        "syncs",
        "tokens/s",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("cold s", "warm s"):
        table.add_column(name, justify="right")
    for row in rows:
        above = above_floor(row)
        parts = [""] * len(PARTS) if above is None else [_signed(above[part]) for part in PARTS]
        counts = [
            f"{row[name]:g}" if name in row else "" for name in ("kernels", "graph_launches", "host_launches", "host_syncs")
        ]
        seconds = ["" if row[f"compile_{kind}_s"] is None else f"{row[f'compile_{kind}_s']:.1f}" for kind in ("cold", "warm")]
        table.add_row(
            f"{row['model']}, S={row['steps']}" + (f", K={row['topk']}" if row["topk"] > 1 else ""),
            row["round"],
            row["backend"],
            "on" if row["passes"] else "off",
            f"{row['bs']}, {row['context']}",
            f"{row['ms']:.2f}",
            f"{row['floor_ms']:.2f}",
            f"{row['share_of_floor']:.0%}",
            *parts,
            *counts,
            f"{row['tokens_per_s']:.0f}",
            *seconds,
        )
    return table


def beside_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """A line per case with every kind of round beside the others, in tokens a second; None if there is one kind only."""
    kinds = list(dict.fromkeys(row["round"] for row in rows))
    if len(kinds) == 1:
        return None
    cases: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["passes"] or row["round"] == "assisted":
            best = cases.setdefault(base(row), {})
            if row["round"] not in best or row["ms"] < best[row["round"]]["ms"]:
                best[row["round"]] = row
    table = Table("model", "batch, context", *kinds, title="tokens a second (ms a round), fastest backend, passes on")
    for (model, bs, context), found in cases.items():
        cells = [f"{found[k]['tokens_per_s']:.0f} ({found[k]['ms']:.2f})" if k in found else "" for k in kinds]
        table.add_row(model, f"{bs}, {context}", *cells)
    return table


def auto_table(verdicts: Sequence[dict[str, Any]]) -> Table:
    table = Table("model", "round", "passes", "batch, context", "fastest", "auto / fastest", "why auto is not the fastest")
    for v in verdicts:
        shown = (v["model"], v["round"], "on" if v["passes"] else "off", f"{v['bs']}, {v['context']}", v["fastest"])
        ratio = f"{v['auto_over_fastest']:.2f}"
        table.add_row(*shown, ratio if v["auto_wins"] else f"[red]{ratio}[/red]", v["why"] or "")
    return table
