"""The README's code block runs, and its figures are those of `benchmarks/results`."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_code_block_runs():
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    run = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert "tokens a round" in run.stdout


@pytest.mark.parametrize("name", ["cpu-plain", "cpu-chain3", "cpu-chain3-sampled", "cpu-tree3x4"])
def test_accept_lengths_come_from_the_results(name):
    (row,) = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    assert re.search(rf"\| {row.get('num_tokens', 1)} \| {row['accept_length']:.2f} \|", README)


def kernel_times() -> dict[tuple, dict[str, dict]]:
    """Rows of the H200 kernel benchmark by case, then by backend."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in json.loads((ROOT / "benchmarks" / "results" / "h200-kernels.json").read_text())["rows"]:
        case = (row["heads"], row["head_dim"], row["bs"], row["context"], row["lengths"], row["q_len"], row["mask"])
        found.setdefault(case, {})[row["backend"]] = row
    return found


def test_kernel_times_come_from_the_results():
    times = kernel_times()
    cells = r"\| (\d+/\d+), (\d+) \| (\d+), ([\d to]+) \| (\d+)(, tree)? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|"
    lines = re.findall(cells, README)
    assert len(lines) == 8
    for heads, dim, bs, context, q_len, tree, *shown in lines:
        unequal = " to " in context
        (rows,) = [
            rows
            for (h, d, b, c, lengths, q, mask), rows in times.items()
            if (h, d, b, q, mask) == (heads, int(dim), int(bs), int(q_len), "tree" if tree else "causal")
            and (lengths != "equal" if unequal else lengths == "equal" and c == int(context))
        ]
        wanted = [rows["triton"]["floor_us"], rows["triton"]["us"], rows["flashinfer-xqa"]["us"]]
        for text, value in zip(shown, wanted, strict=True):
            assert float(text) == pytest.approx(value, abs=0.5 if float(text) >= 20 else 0.06)


def test_kernel_summary_comes_from_the_results():
    rows = [rows for rows in kernel_times().values() if {"triton", "flashinfer-xqa"} <= rows.keys()]
    ratios = [r["flashinfer-xqa"]["us"] / r["triton"]["us"] for r in rows]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    text = f"Over the {len(rows)} GQA cases of that file the Triton kernel is {mean:.2f} times as fast in the geometric mean"
    assert text in README
    assert f"({min(ratios):.2f} to {max(ratios):.1f})" in README
    worst = max(r["triton"]["error"] / r["triton"]["reference_error"] for r in kernel_times().values())
    assert f"its error at most {worst:.2f}" in README


def test_round_times_come_from_the_results():
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200-round-triton.json").read_text())["rows"]
    ms = {(row["bs"], row["context"]): row["ms"] for row in rows}
    text = f"{ms[1, 1024]:.2f} ms at batch 1 and context 1024 (floor {rows[0]['floor_ms']:.1f}), {ms[8, 1024]:.1f} at batch 8"
    text += f", {ms[32, 1024]:.1f} at batch 32, {ms[1, 32768]:.1f} at batch 1 and context 32768"
    assert text in " ".join(README.split())
