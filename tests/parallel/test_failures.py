"""A rank that is gone, and processes that are none."""

from __future__ import annotations

import json
import socket

import pytest
import torch.distributed as dist

from spec_ops.parallel import RankError, TensorParallel
from tests.helpers import world


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


WORLD = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("device", "changed", "message"),
    [
        ("cpu", {"RANK": "x"}, "RANK in the environment must be a number, got 'x'"),
        ("cpu", {"MASTER_PORT": ""}, "MASTER_PORT in the environment must be a number, got ''"),
        ("cpu", {"RANK": "5"}, "RANK in the environment must be below WORLD_SIZE, 2, got 5"),
        ("cpu", {"WORLD_SIZE": "0"}, "RANK in the environment must be below WORLD_SIZE, 0, got 0"),
        ("cuda", {"LOCAL_RANK": None}, "the environment must have LOCAL_RANK: start the processes with `torchrun"),
        ("cuda", {"RANK": "1", "LOCAL_RANK": "99"}, r"rank 1 must have a GPU: cuda:99 is not among the \d+ here"),
        ("cuda:99", {}, r"rank 0 must have a GPU: cuda:99 is not among the \d+ here"),
    ],
)
def test_an_environment_that_cannot_be(monkeypatch, device, changed, message):
    """torch waits ten minutes for rank 0 where a rank does not exist, and names no variable where one is wrong."""
    for name, value in (WORLD | changed).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=f"TensorParallel: {message}"):
        TensorParallel.connect(device, timeout=1)


def test_processes_that_do_not_come(monkeypatch):
    """Rank 1 of a world whose rank 0 nobody has started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    for name, value in (WORLD | {"RANK": "1", "MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match="TensorParallel: the processes did not find one another: ") as refused:
        TensorParallel.connect("cpu", timeout=0.5)
    assert "\n" not in str(refused.value)
