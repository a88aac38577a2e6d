"""Products of few rows with weights of 8 and 4 bits, beside what torch and torchao have for them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published.text import Row, listed, load, paragraph, short, table, without_empty_columns

FILE = "h200-weight-products"
OTHERS = {"torch": "torch.mm, dequantized", "scaled_mm": "torch._scaled_mm", "int4pack": "torch's int4", "mslk": "mslk's int4"}
SHOWN = (1, 8, 32, 64, 128)  # rows; all of them are in the file
SHAPES = ((4096, 4096), (28672, 4096))  # n, k of those that are shown: of Llama 8B's output product, and gate and up


def products(results: Path) -> str:
    """A line for each format and number of rows of the weights that are shown, and how all of them compare."""
    rows = [row for row in load(FILE, results)["rows"] if "weights" in row]
    lines = [_line(row) for row in rows if row["m"] in SHOWN and (row["n"], row["k"]) in SHAPES]
    told = []
    for name, title in OTHERS.items():
        ratios = [row[f"{name}_us"] / row["us"] for row in rows if f"{name}_us" in row]
        if ratios:
            ahead = sum(ratio > 1 for ratio in ratios)
            told.append(
                f"{title} takes {listed(ratios)} times as long as ours, which is faster in {ahead} of {len(ratios)} cases"
            )
    worst = max(row["error_over_torch"] for row in rows)
    intro = "Products of few rows with stored weights, microseconds (`python -m benchmarks.skinny_mm --weights KIND`,"
    intro += (
        f" `benchmarks/results/{FILE}.json`). The floor is the bytes of the weight, its scales, the rows and the result over"
    )
    intro += " the copy rate; `torch._scaled_mm` rounds the rows to 8 bits, which is in its time:"
    outro = f"Over all products, {'; '.join(told)}. " if told else ""
    outro += f"The error is at most {worst:.2f} times that of `torch.mm` with the dequantized weight."
    header = ["n x k", "weights", "rows", "floor", "skinny_mm", "share of the floor", *OTHERS.values()]
    shown = without_empty_columns(header, lines)
    return "\n\n".join((paragraph(intro), table(*shown), paragraph(outro)))


def _line(row: Row) -> list[str]:
    times = [short(row[f"{name}_us"]) if f"{name}_us" in row else "" for name in OTHERS]
    share = f"{row['floor_us'] / row['us']:.2f}"
    return [f"{row['n']} x {row['k']}", row["weights"], str(row["m"]), short(row["floor_us"]), short(row["us"]), share, *times]
