"""`python -m benchmarks moe` with tiny layers on a CPU: its rows, what they count, and that both ways compute the same."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import moe
from benchmarks.__main__ import app


def test_rows(tmp_path):
    path = tmp_path / "moe.json"
    small = ["--model", "tiny", "--model", "tiny-oss", "--tokens", "1", "--tokens", "9", "--min-ms", "0", "--dtype", "float32"]
    result = CliRunner().invoke(app, ["moe", *small, "--copy-rate", "1e9", "--device", "cpu", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        shape = moe.SHAPES[row["model"]]
        assert row["difference"] < 1e-5
        most = shape.k if row["tokens"] == 1 or row["routing"] == "identical" else shape.experts
        assert shape.k <= row["touched_experts"] <= most
        moved = 4 * (row["touched_experts"] * shape.expert_elements + 2 * row["tokens"] * shape.hidden)
        assert row["floor_us"] == pytest.approx(moved / 1e9 * 1e6, abs=0.01)
        assert min(row["us"], row["peer_us"], row["route_us"]) > 0


def test_zipf_touches_fewer_experts_than_uniform():
    shape = moe.SHAPES["qwen3-30b-a3b"]
    touched = {r: moe.logits_of(r, 32, shape, 0).topk(shape.k).indices.unique().numel() for r in moe.ROUTINGS}
    assert touched["identical"] == 8 < touched["zipf"] < touched["uniform"] <= 128


def test_an_expert_has_as_many_elements_as_its_tensors():
    for name in ("tiny", "tiny-oss"):
        shape = moe.SHAPES[name]
        made = moe.stacks(shape, torch.float32, torch.device("cpu"))
        assert sum(t[0].numel() for t in made.values()) == shape.expert_elements


@pytest.mark.parametrize(("kind", "bytes_an_element"), [("mxfp4", 17 / 32), ("float8_block", 1)])
def test_rows_of_stored_weights(kind, bytes_an_element, tmp_path):
    path = tmp_path / "moe.json"
    small = [
        "--model",
        "tiny",
        "--model",
        "tiny-oss",
        "--tokens",
        "2",
        "--routing",
        "uniform",
        "--min-ms",
        "0",
        "--weights",
        kind,
    ]
    result = CliRunner().invoke(app, ["moe", *small, "--copy-rate", "1e9", "--device", "cpu", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["weights"], row["model"]) for row in rows] == [(kind, "tiny"), (kind, "tiny-oss")]
    for row in rows:
        shape = moe.SHAPES[row["model"]]
        assert "peer_us" not in row
        weights = 3 * shape.hidden * shape.inner * bytes_an_element + 2 * (shape.oss and 2 * shape.inner + shape.hidden)
        moved = row["touched_experts"] * weights + 2 * 2 * row["tokens"] * shape.hidden
        assert row["floor_us"] == pytest.approx(moved / 1e3, rel=0.01)


@pytest.mark.parametrize(("option", "value"), [("--model", "gpt-5"), ("--routing", "fair"), ("--weights", "int3")])
def test_unknown_names(option, value):
    result = CliRunner().invoke(app, ["moe", option, value, "--device", "cpu"])
    assert result.exit_code == 2
    assert f"got {value}" in result.output
