"""`python -m benchmarks lengths`: texts repeat themselves as asked, and fixed lengths are fixed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.lengths import CHOSEN

TINY = ["lengths", "--model", "tiny", "--device", "cpu", "--dtype", "float32", "--repeats", "1", "--layers", "1"]


@pytest.mark.slow
def test_chosen_beside_fixed(tmp_path):
    file = tmp_path / "rows.json"
    arguments = [*TINY, "--new-tokens", "60", "--length", "0", "--length", "3", "--period", "90", "--period", "6"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    found = {(row["period"], row["length"]): row for row in rows}
    assert list(found) == [(period, way) for period in (90, 6) for way in (0, 3, CHOSEN)]
    assert all(row["same_text"] for row in rows)
    assert found[90, 0]["accept_length"] == found[6, 0]["accept_length"] == 1.0
    assert found[90, 3]["accept_length"] < 1.5 < 3 < found[6, 3]["accept_length"]  # of at most 4
    for period in (90, 6):
        best = min(found[period, length]["ms_per_token"] for length in (0, 3))
        assert found[period, CHOSEN]["over_best_fixed"] == pytest.approx(found[period, CHOSEN]["ms_per_token"] / best, abs=1e-3)


def test_mistakes_are_named():
    result = CliRunner().invoke(app, [*TINY[:2], "no-such-model"])
    assert result.exit_code == 2
    assert "no-such-model" in result.output
