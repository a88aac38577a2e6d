"""A rank that is gone, and processes that are none."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from spec_ops.parallel import RankError, TensorParallel
from tests.parallel import world


def test_a_rank_that_dies_ends_the_other(tmp_path):
    processes = world.start(2, "tests.parallel.death", tmp_path)
    printed = world.finish(processes, tmp_path, 120)
    assert processes[1].exitcode == 3, printed
    result = json.loads((tmp_path / "0.json").read_text())["case_death"]
    assert result["error"].startswith("generate: another rank of the 2 is gone, or waits for something else: ")
    assert "\n" not in result["error"]
    assert result["seconds"] < 10


def test_without_torchrun(monkeypatch):
    assert not dist.is_initialized()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RankError, match="must have WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start the processes with `torchrun"):
        TensorParallel.connect("cpu")
    with pytest.raises(ValueError, match=r"torch\.distributed must be initialized: start the processes with `torchrun"):
        TensorParallel()
