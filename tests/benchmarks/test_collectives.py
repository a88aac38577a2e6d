"""`python -m benchmarks collectives` without a GPU, and on one."""

from __future__ import annotations

import json

import pytest
import torch

from tests.helpers.command_line import refusal, run_benchmarks


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said without a GPU")
def test_without_a_gpu():
    assert "needs a CUDA device" in refusal(run_benchmarks("collectives"), "collectives")


def test_ranks_that_are_late_are_processes():
    assert "that torchrun has started" in refusal(run_benchmarks("collectives", "--late", "10"), "--late")


@pytest.mark.gpu
def test_ranks_on_one_gpu(tmp_path):
    path = tmp_path / "collectives.json"
    result = run_benchmarks("collectives", "--ranks", "2", "--kb", "8", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["ranks"], row["gpus"], row["kib"], row["way"]) for row in rows] == [
        (2, 1, 8, "push"),
        (2, 1, 8, "push, residual and norm"),
    ]
    assert all(0.5 < row["us"] < 50 for row in rows)
    assert "must be 2, 4 or 8, got 3" in refusal(run_benchmarks("collectives", "--ranks", "3"), "--ranks")
