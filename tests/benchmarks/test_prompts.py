"""`python -m benchmarks prompts`: the three ways give the same texts, and rows that are refilled need the fewest rounds."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.prompts import LONGEST, SHORTEST, heavy_tailed, kv_mib
from spec_ops.decoding import Generator
from spec_ops.models.pretrained import load_pair


@pytest.mark.slow
def test_the_three_ways(tmp_path):
    path = tmp_path / "prompts.json"
    small = [
        "--prompts",
        "6",
        "--batch-size",
        "2",
        "--median",
        "8",
        "--seed",
        "30",
        "--repeats",
        "1",
        "--single",
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(app, ["prompts", *small, "--json", str(path)])
    assert result.exit_code == 0, result.output  # 1 where texts differ
    rows = {row["way"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["refilled", "groups", "single"]
    assert rows["refilled"]["rounds"] < rows["groups"]["rounds"] < rows["single"]["rounds"]
    assert len({row["new_tokens"] for row in rows.values()}) == 1
    assert rows["refilled"]["kv_pages"] < 10 * rows["single"]["kv_pages"]
    pages = {way: rows[way]["kv_pages"] for way in rows}
    mib = {way: rows[way]["kv_mib"] for way in rows}
    assert mib["refilled"] / pages["refilled"] == pytest.approx(mib["single"] / pages["single"], rel=0.1)
    # Requests share pages: fewer than two of the longest would take. One at a time nothing is shared.
    assert mib["refilled"] < rows["refilled"]["unshared_kv_mib"] == pytest.approx(2 * mib["single"], rel=0.1)
    assert rows["single"]["unshared_kv_mib"] == mib["single"]
    assert {row["call_mib"] for row in rows.values()} == {None}  # of a GPU's allocator


def test_pages_of_both_models_are_counted():
    target, draft, _ = load_pair()
    generator = Generator(target, draft, max_batch_size=2, max_seq_len=128, page_size=16, num_pages=10)
    of_a_token = sum(math.prod(row) for model in (target, draft) for layer in model.config.kv_rows for row in layer) * 4
    assert kv_mib(generator, 10) == 10 * 16 * of_a_token / 2**20
    assert kv_mib(generator, 5) == kv_mib(generator, 10) / 2


def test_lengths_are_heavy_tailed():
    lengths = heavy_tailed(1000, 32, seed=0)
    assert sorted(lengths)[500] == pytest.approx(32, rel=0.15)
    assert min(lengths) == SHORTEST
    assert max(lengths) == LONGEST
