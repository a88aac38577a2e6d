"""Texts and logits of batch-invariant decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.published.text import load, paragraph, table

FILE = "h200-invariance"
MODELS = {"pair": "shipped pair", "llama": "Llama, 8 layers", "qwen3": "Qwen3, 8 layers"}


def measured(results: Path) -> list[dict[str, Any]]:
    """The rows of the ways that were decoded; none before there is a file."""
    rows = load(FILE, results)["rows"] if (results / f"{FILE}.json").exists() else []
    return [row for row in rows if "error" not in row]


def equal(results: Path) -> bool | None:
    """Whether all texts and logits with the flag were those of plain decoding; None if none were measured."""
    rows = [row for row in measured(results) if row["invariant"]]
    return not any(row["differ"] or row.get("logits_differ") for row in rows) if rows else None


def price(results: Path) -> list[dict[str, Any]]:
    """What a prompt and a round cost with the flag; none before they were timed."""
    return load(FILE, results).get("price", []) if (results / f"{FILE}.json").exists() else []


def texts(results: Path) -> str:
    """Of each way to decode, how many texts differ from plain decoding's, with the flag and without."""
    intro, command = "Texts that differ from those of plain decoding at batch 32, in bf16", "`python -m benchmarks invariance`"
    rows = measured(results)
    if not rows:
        return paragraph(f"{intro} ({command}): not measured yet.")
    intro += f" ({command}, `benchmarks/results/{FILE}.json`)"
    without = {(row["model"], row["way"]): f"{row['differ']} of {row['texts']}" for row in rows if not row["invariant"]}
    lines = []
    for row in rows:
        if row["invariant"]:
            differ = f"{row['differ']} of {row['texts']}"
            logits = f"{row['logits_differ']} of {row['tokens']}" if "logits_differ" in row else ""
            key = row["model"], row["way"]
            lines.append(
                [MODELS[row["model"]], row["way"], differ, logits, without.get(key, ""), f"{row['accept_length']:.2f}"]
            )
    header = ("model", "decoded", "texts", "logits of tokens", "texts without the flag", "tokens a round")
    intro += ". Random models have many near ties. A token's logits differ if any bit does"
    return paragraph(f"{intro}:") + "\n\n" + table(header, lines)
