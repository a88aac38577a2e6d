"""Which ranks write to one another's memory, and what is said when one does not come."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from spec_ops.backends.push import of_one_process
from spec_ops.parallel import RankError, TensorParallel
from spec_ops.parallel.group import _apart, _digest

TWO = [("a", 0), ("a", 1)]


@pytest.mark.parametrize(
    ("places", "peers", "reason"),
    [
        (TWO, True, None),
        ([("a", 0), ("a", 0)], True, None),  # CUDA_VISIBLE_DEVICES of one each
        (TWO, False, "peer access to cuda:1"),
        ([("a", 0), ("a", 5)], True, "peer access to cuda:5"),
        ([("a", 0), ("b", 0)], True, "GPUs of one host"),
        ([("a", 0), ("a", 1), ("a", 2)], True, "2, 4 or 8 ranks, not 3"),
        ([("a", 0), ("a", 0), ("a", 1), ("a", 1)], True, "a GPU for each rank"),
    ],
)
def test_who_is_apart(places, peers, reason):
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=4),
        mock.patch.object(torch.cuda, "can_device_access_peer", return_value=peers),
    ):
        assert _apart(places, torch.device("cuda", 0)) == reason


@pytest.mark.parametrize("given", [None, "9000"])
def test_nccl_ends_a_process_soon_after_it_has_given_up(monkeypatch, given):
    """torch waits a minute first. What the user has set stays."""
    name = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    for needed, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(needed, value)

    def nobody(*args: object, **options: object) -> None:
        raise RuntimeError(f"waits {os.environ[name]} ms")

    with mock.patch.object(dist, "init_process_group", nobody), pytest.raises(RankError, match=f"waits {given or 500} ms"):
        TensorParallel.connect("cpu")


def test_a_kernel_that_gave_up_is_an_error_of_its_round():
    ranks = TensorParallel.__new__(TensorParallel)
    ranks.size, ranks.check_rounds = 2, False
    ranks._pushes = of_one_process(2, torch.device("cpu"), 64, 1)
    ranks.check_round(torch.zeros(1))
    ranks._pushes.failed.fill_(1)
    with pytest.raises(RankError, match=r"generate: another rank of the 2 is gone, or waits .*: a sum timed out"):
        ranks.check_round(torch.zeros(1))


def test_hashes_of_what_ranks_compare():
    """Of tensors the bytes, the shape and the dtype count, not where they lie; a number may be a tensor without dimensions."""
    x = torch.arange(6).view(2, 3)
    same = [x, x.t().contiguous().t(), x.clone()]
    other = [x.view(3, 2), x.int(), x + 1, x.float(), torch.tensor(3), torch.tensor(4), 3, "3", None]
    assert len({_digest(value) for value in same}) == 1
    assert len({_digest(value) for value in [x, *other]}) == 10
