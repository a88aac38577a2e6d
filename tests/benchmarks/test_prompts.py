"""`python -m benchmarks prompts`: the three ways give the same texts, and rows that are refilled need the fewest rounds."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.prompts import LONGEST, SHORTEST, heavy_tailed


def test_the_three_ways(tmp_path):
    path = tmp_path / "prompts.json"
    small = ["--prompts", "6", "--batch-size", "2", "--median", "8", "--repeats", "1", "--single", "--device", "cpu"]
    result = CliRunner().invoke(app, ["prompts", *small, "--json", str(path)])
    assert result.exit_code == 0, result.output  # 1 where texts differ
    rows = {row["way"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["refilled", "groups", "single"]
    assert rows["refilled"]["rounds"] < rows["groups"]["rounds"] < rows["single"]["rounds"]
    assert len({row["new_tokens"] for row in rows.values()}) == 1
    assert rows["refilled"]["kv_pages"] < 10 * rows["single"]["kv_pages"]


def test_lengths_are_heavy_tailed():
    lengths = heavy_tailed(1000, 32, seed=0)
    assert sorted(lengths)[500] == pytest.approx(32, rel=0.15)
    assert min(lengths) == SHORTEST
    assert max(lengths) == LONGEST
