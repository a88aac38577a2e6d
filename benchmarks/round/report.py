"""What `python -m benchmarks round` makes of its rows: tables, and whether `auto` chose well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


# What a row says of how tokens are chosen, and weights are stored and shared; one without them is of a greedy round of
# unchanged logits and weights of 16 bits in one process.
CHOICE = (
    "sampled", "temperature", "top_k", "top_p", "min_p", "penalties", "invariant", "weights", "tp", "collective", "gpus",
    "expert_parallel", "whole_draft",
)  # fmt: skip


def kind(row: Mapping[str, Any]) -> str:
    """Of the round: `"speculative"`, `"speculative, sampled, penalties"`, `"plain, float8, transformers"`."""
    parts = [row.get("round", "speculative"), *(name for name in ("sampled", "penalties", "invariant") if row.get(name))]
    parts += [row["weights"]] if row.get("weights") else []
    parts += [_ranks(row)] if row.get("tp") else []
    return ", ".join(parts + [path for path in [row.get("path", "own")] if path != "own"])


def _ranks(row: Mapping[str, Any]) -> str:
    alone = " alone" if row["gpus"] < row["tp"] else ""
    names = {"expert_parallel": ", whole experts", "whole_draft": ", whole draft"}
    whole = "".join(said for name, said in names.items() if row.get(name))
    return f"one of {row['tp']} ranks{alone}, {row['collective']}{whole}"


def choice(row: Mapping[str, Any]) -> tuple:
    return tuple(row.get(name) for name in CHOICE)


def base(row: dict[str, Any]) -> tuple:
    """What rows must share to be compared: target, batch, context."""
    return row["model"].partition("+")[0], row["bs"], row["context"]


def draft_shape(row: Mapping[str, Any]) -> str:
    """`"S=3"`, `"S=3, K=4, 16 tokens"`; of older files, which hold no trees' tokens, without them."""
    tree = [f"K={row['topk']}", *([f"{row['num_tokens']} tokens"] if "num_tokens" in row else [])] if row["topk"] > 1 else []
    return ", ".join([f"S={row['steps']}", *tree])


def judge_auto(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case measured with `auto` and a named backend: the fastest, how far `auto` is behind, and why."""
    cases: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["round"] != "assisted":
            key = (row["model"], row["bs"], row["context"], draft_shape(row), kind(row), row["passes"])
            cases.setdefault((*key, choice(row)), {})[row["backend"]] = row
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
            why = "it plans on the host, so it is used by name only" if planned else "what `auto` chose has a better rank"
        shared = {name: row[name] for name in ("model", "bs", "context", "round", "passes")}
        shared |= {name: row[name] for name in CHOICE if name in row}
        verdicts.append(
            shared | {"fastest": row["backend"], "auto_over_fastest": round(ratio, 3), "auto_wins": why is None, "why": why}
        )
    return verdicts


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0: no "-0.00"


def rounds_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line per row, with the milliseconds above the floor by kind."""
    lengths = sorted({row["accept_length"] for row in rows if row["steps"]})
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
            f"{row['model']}, {draft_shape(row)}",
            kind(row),
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
    kinds = list(dict.fromkeys(map(kind, rows)))
    if len(kinds) == 1:
        return None
    cases: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["passes"] or row["round"] == "assisted":
            best = cases.setdefault(base(row), {})
            if kind(row) not in best or row["ms"] < best[kind(row)]["ms"]:
                best[kind(row)] = row
    table = Table("model", "batch, context", *kinds, title="tokens a second (ms a round), fastest backend, passes on")
    for (model, bs, context), found in cases.items():
        cells = [f"{found[k]['tokens_per_s']:.0f} ({found[k]['ms']:.2f})" if k in found else "" for k in kinds]
        table.add_row(model, f"{bs}, {context}", *cells)
    return table


def beside_base(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row of a round that samples, changes logits, has weights of fewer bits or is shared by ranks, with the row of the
    same case that it is judged by: a sampled round by the greedy one, any other by the one without."""

    def case(row: dict[str, Any]) -> tuple:
        shape = row["model"], row["bs"], row["context"], draft_shape(row), row.get("path", "own")
        return (*shape, row.get("round", "speculative"), row["backend"], row["passes"])

    def without(row: dict[str, Any]) -> tuple:
        last = next((name for name in ("tp", "invariant", "penalties", "weights") if row.get(name)), None)
        dropped = {None: CHOICE, "tp": ("tp", "collective", "gpus")}.get(last, (last,))
        return choice({name: value for name, value in row.items() if name not in dropped})

    found = {(case(row), choice(row)): row for row in rows}
    pairs = [(row, found.get((case(row), without(row)))) for row in rows if any(choice(row))]
    return [(row, other) for row, other in pairs if other is not None]


def with_bf16_ms(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows; those of weights of fewer bits with `bf16_ms`, of the same round with 16, where that was measured."""
    pairs = [(row, other) for row, other in beside_base(rows) if row.get("weights") and not other.get("weights")]
    found = {id(row): {"bf16_ms": other["ms"]} for row, other in pairs}
    return [row | found.get(id(row), {}) for row in rows]


def describe_choice(row: Mapping[str, Any]) -> str:
    """`"greedy"`, `"temperature 0.6, top-p 0.9"`, `"greedy, penalties, bias, bitmask"`, `"greedy, float8"`."""
    told = [] if row.get("sampled") else ["greedy"]
    if row.get("sampled"):
        told.append(f"temperature {row['temperature']:g}")
        told += [f"top-k {row['top_k']}"] * (row["top_k"] > 0) + [f"top-p {row['top_p']:g}"] * (row["top_p"] < 1)
        told += [f"min-p {row['min_p']:g}"] * (row["min_p"] > 0)
    told += ["penalties, bias, bitmask"] * bool(row.get("penalties")) + ["batch-invariant"] * bool(row.get("invariant"))
    told += [row["weights"]] if row.get("weights") else []
    told += [_ranks(row)] if row.get("tp") else []
    return ", ".join(told)


def choice_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """A line per round that samples, changes logits or has weights of fewer bits, beside the one that it is judged by; None if
    there is none."""
    pairs = beside_base(rows)
    if not pairs:
        return None
    table = Table("model", "batch, context", "round", "passes", "tokens, weights", "ms", "beside", "ms", "ratio")
    for row, other in pairs:
        shown = (f"{row['model']}, {draft_shape(row)}", f"{row['bs']}, {row['context']}", row["round"])
        times = (f"{row['ms']:.2f}", describe_choice(other), f"{other['ms']:.2f}", f"{row['ms'] / other['ms']:.3f}")
        table.add_row(*shown, "on" if row["passes"] else "off", describe_choice(row), *times)
    return table


def auto_table(verdicts: Sequence[dict[str, Any]]) -> Table:
    table = Table("model", "round", "passes", "batch, context", "fastest", "auto / fastest", "why auto is not the fastest")
    for v in verdicts:
        shown = (v["model"], kind(v), "on" if v["passes"] else "off", f"{v['bs']}, {v['context']}", v["fastest"])
        ratio = f"{v['auto_over_fastest']:.2f}"
        table.add_row(*shown, ratio if v["auto_wins"] else f"[red]{ratio}[/red]", v["why"] or "")
    return table
