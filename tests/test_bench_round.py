"""`python -m spec_ops bench round`: a one-layer round on a GPU, and a clear refusal without one."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from spec_ops import cli


@pytest.mark.gpu
def test_one_layer_round(tmp_path):
    path = tmp_path / "round.json"
    args = ["bench", "round", "--layers", "1", "--batch-size", "2", "--context", "128", "--repeats", "5", "--json", str(path)]
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["passes"] for row in rows] == [False, True]
    for row in rows:
        assert row["ms"] > row["floor_ms"] > 0
        assert row["graph_launches"] == 1
        assert row["host_launches"] == row["host_syncs"] == 0
        assert row["kernels"] > 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu():
    result = CliRunner().invoke(cli.app, ["bench", "round"])
    assert result.exit_code == 2
    assert "CUDA" in result.output
