"""The chart of the front page: milliseconds a round beside other programs and the floor, and tokens/s of the shipped pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.published import peers, summary
from benchmarks.published.text import RESULTS, ROOT, load_rounds

PATH = ROOT / "docs" / "images" / "chart.svg"
CASES = ((1, 1024), (8, 1024), (32, 1024))
FLOOR, OURS, SGLANG, TRANSFORMERS = "memory floor", "spec_ops", "SGLang, fa3", "transformers, assisted"
COLORS = {FLOOR: "#b0bec5", OURS: "#3949ab", SGLANG: "#fb8c00", TRANSFORMERS: "#8d6e63"}
LIMIT_MS = 10.0  # a longer bar is cut here and says so


def data(results: Path = RESULTS) -> dict[str, Any]:
    """What the chart shows."""
    rounds: dict[str, dict[str, float]] = {}
    for bs, context in CASES:
        row = peers.ours(results, bs, context)
        assert row is not None
        rounds[f"batch {bs}"] = {FLOOR: row["floor_ms"], OURS: row["ms"], SGLANG: min(peers.sglang(results, bs, context))}
    assisted = next(row for row in load_rounds("h200-round", results)["rows"] if row["round"] == "assisted")
    rounds[f"batch {assisted['bs']}"][TRANSFORMERS] = assisted["ms"]
    plain, speculative, _ = summary.demo(results)
    return {"ms a round": rounds, "tokens/s": {"plain": plain, "speculative": speculative}}


def draw(path: Path = PATH, results: Path = RESULTS) -> None:
    """Write the chart as SVG; its description holds the numbers."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # no pyplot: it would look for a display
    from matplotlib.figure import Figure

    shown = data(results)
    with mpl.rc_context({"svg.hashsalt": "spec_ops", "font.size": 11}):
        figure = Figure(figsize=(10, 4.3), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2, width_ratios=(2.6, 1))
        _rounds(left, shown["ms a round"])
        _speeds(right, shown["tokens/s"])
        handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=4, frameon=False, fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Description": json.dumps(shown), "Date": None})


def _rounds(axes: Any, groups: dict[str, dict[str, float]]) -> None:
    y, ticks = 0.0, []
    for group, bars in groups.items():
        first = y
        for name, ms in bars.items():
            cut = ms > LIMIT_MS
            axes.barh(y, min(ms, LIMIT_MS), height=0.82, color=COLORS[name], label=name, hatch="" if not cut else "//")
            if cut:
                axes.text(LIMIT_MS - 0.15, y, f"{ms:.0f} →", va="center", ha="right", color="white", weight="bold")
            else:
                axes.text(ms + 0.08, y, f"{ms:.1f}", va="center", ha="left")
            y += 1
        ticks.append(((first + y - 1) / 2, group))
        y += 0.7
    axes.set(xlim=(0, LIMIT_MS), yticks=[tick for tick, _ in ticks], yticklabels=[name for _, name in ticks])
    axes.set_title("milliseconds a round (less is better)", loc="left", fontsize=11)
    axes.invert_yaxis()
    _clean(axes)


def _speeds(axes: Any, speeds: dict[str, float]) -> None:
    bars = axes.bar(list(speeds), list(speeds.values()), color=[COLORS[FLOOR], COLORS[OURS]], width=0.62)
    axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_title("tokens/s, shipped pair, batch 1", loc="left", fontsize=11)
    axes.margins(y=0.1)
    _clean(axes)


def _clean(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
