"""`python -m benchmarks collectives` without a GPU, and on one."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from spec_ops.parallel import TensorParallel
from tests.helpers.command_line import refusal, run_benchmarks


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said without a GPU")
def test_without_a_gpu():
    assert "needs a CUDA device" in refusal(run_benchmarks("collectives"), "collectives")


def test_ranks_that_are_late_are_processes():
    assert "that torchrun has started" in refusal(run_benchmarks("collectives", "--late", "10"), "--late")


@pytest.mark.parametrize("rank", [0, 1])
def test_late_ranks_without_peer_access(monkeypatch, rank):
    """One line, of rank 0, and no traceback of any."""
    ended: list[int] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(TensorParallel, "connect", lambda device, *, timeout: TensorParallel.fake(2, rank))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(rank))
    result = run_benchmarks("collectives", "--late", "10")
    assert (result.exit_code, ended) == (2, [rank])
    if rank:
        assert result.output == ""
    else:
        assert "needs 2, 4 or 8 GPUs of one host that have peer access" in refusal(result, "--late")


@pytest.mark.gpu
def test_ranks_on_one_gpu(tmp_path):
    path = tmp_path / "collectives.json"
    result = run_benchmarks("collectives", "--ranks", "2", "--kb", "8", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["ranks"], row["gpus"], row["kib"], row["way"], row["calls"]) for row in rows] == [
        (2, 1, 8, "push", 50),
        (2, 1, 8, "push, residual and norm", 50),
    ]
    assert all(0.5 < row["us"] < 50 for row in rows)
    assert "must be 2, 4 or 8, got 3" in refusal(run_benchmarks("collectives", "--ranks", "3"), "--ranks")
