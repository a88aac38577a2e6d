"""The rows of `python -m benchmarks kernels` under the machine's roofline, as a PNG.

python -m benchmarks.kernels.roofline benchmarks/results/h200-kernels.json    # draws h200-kernels.png beside it

The published picture is `docs/images/h200-kernels.png`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import Ceilings

MARKERS = {"gqa": "o", "mla": "^"}


def title(environment: Mapping[str, str]) -> str:
    """Where and of which tree the rows were measured, as their file says."""
    return f"{environment['machine']}, torch {environment['torch']}, commit {environment['commit']}"


def plot(path: Path, rows: Sequence[dict[str, Any]], ceilings: Ceilings, title: str) -> None:
    """Left: operations a second over operations per byte, under the two ceilings. Right: share of the floor over bytes.

    Raises:
        ImportError: matplotlib, of the extra `bench`, is missing. ValueError: no rows.
    """
    if not rows:
        raise ValueError("plot: `rows` must hold at least one row, got none")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it would look for a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6), layout="constrained")
    FigureCanvasAgg(figure)
    roof, share = figure.subplots(1, 2)
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    for number, backend in enumerate(backends):
        for kind, marker in MARKERS.items():
            mine = [row for row in rows if (row["backend"], row["kind"]) == (backend, kind)]
            if not mine:
                continue
            style: dict[str, Any] = {
                "s": 22,
                "marker": marker,
                "color": f"C{number}",
                "alpha": 0.7,
                "label": f"{backend}, {kind}",
            }
            intensity = [row["flops"] / row["bytes"] for row in mine]
            roof.scatter(intensity, [row["flops"] / row["us"] / 1e6 for row in mine], **style)
            share.scatter([row["bytes"] / 1e6 for row in mine], [row["floor_us"] / row["us"] for row in mine], **style)
    ridge = ceilings.matmul / ceilings.copy
    intensities = [row["flops"] / row["bytes"] for row in rows]
    ends = sorted({min(intensities) / 2, ridge, max(*intensities, ridge) * 2})
    roof.plot(ends, [min(x * ceilings.copy, ceilings.matmul) / 1e12 for x in ends], color="black", linewidth=1)
    roof.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte that must move",
        ylabel="TFLOP/s",
        title=f"copy {ceilings.copy / 1e12:.2f} TB/s, bf16 matrix product {ceilings.matmul / 1e12:.0f} TFLOP/s",
    )
    share.axhline(1.0, color="black", linewidth=1)
    share.set(xscale="log", xlabel="MB that must move", ylabel="floor / time", ylim=(0, None), title="share of the floor")
    roof.legend(fontsize="small")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png", metadata={"Title": title})


def redraw(results: Path) -> Path:
    """The picture of a file of results, next to it and under its name."""
    found = json.loads(results.read_text(encoding="utf-8"))
    picture = results.with_suffix(".png")
    plot(picture, found["rows"], Ceilings(**found["ceilings"]), title(found["environment"]))
    return picture


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(redraw(Path(name)))
