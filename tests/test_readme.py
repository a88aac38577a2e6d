"""The README's code block runs, and its accept lengths are those of `benchmarks/results`."""

from __future__ import annotations

import json
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
