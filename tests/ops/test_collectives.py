"""Reductions over ranks: arithmetic of the reference, and the op of a group of one."""

from __future__ import annotations

import pytest
import torch

from spec_ops.backends import push
from spec_ops.ops.collectives import all_reduce_add_op, all_reduce_op
from spec_ops.ops.reference import collectives as reference
from tests.helpers.groups import alone


def test_sums_are_in_the_order_of_the_ranks_and_rounded_once():
    parts = [torch.tensor([value, -0.0, torch.inf]).bfloat16() for value in (256.0, 1.0, -256.0, 2**-7)]
    total = reference.sum_of(parts)
    assert total.tolist() == [1 + 2**-7, 0.0, torch.inf]  # in bfloat16, 256 + 1 is 256
    assert not total[1].signbit()
    assert reference.sum_of(parts[::-1])[0] == total[0]


def test_rounding_to_even_is_of_the_whole_sum():
    parts = [torch.tensor([value]).bfloat16() for value in (1.0, 2**-8, 2**-8)]
    assert reference.sum_of(parts).item() == 1 + 2**-7
    assert (parts[0] + parts[1] + parts[2]).item() == 1.0


def test_sum_with_a_residual_is_rounded_as_both():
    total, residual = torch.tensor([[1.0, -2.0] * 8]).bfloat16(), torch.tensor([[2**-9, 1.0] * 8]).bfloat16()
    weight = torch.arange(16).bfloat16()
    y, z, squares = reference.add_to(total, residual, weight)
    assert torch.equal(y, total + residual)
    assert torch.equal(z, y * weight)
    assert squares.tolist() == [[16.0]]


def test_of_one_rank(device):
    group = alone(device)
    keys = torch.tensor([[3, -(2**63)], [0, -1]], device=device)
    assert torch.equal(all_reduce_op(keys, "max", group), keys)
    x = torch.randn(3, 32, device=device).bfloat16()
    assert torch.equal(all_reduce_op(x.t(), "sum", group), x.t())
    y, z, squares = all_reduce_add_op(x, x, x[0], group)
    assert torch.equal(y, x + x)
    assert torch.equal(z, y * x[0])
    torch.testing.assert_close(squares, y.float().view(3, 2, 16).square().sum(-1))


@pytest.mark.parametrize(
    ("dtype", "reduce", "num_bytes", "reason"),
    [
        (torch.bfloat16, "sum", 1 << 18, None),
        (torch.int64, "max", 1 << 17, None),
        (torch.float16, "sum", (1 << 18) + 16, "must be of at most 262144 bytes, got 262160"),
        (torch.int64, "max", (1 << 18) + 8, "must be of at most 262144 bytes, got 262152"),
        (torch.bfloat16, "sum", 24, "must be of a multiple of 16 bytes, got 24"),
        (torch.float32, "sum", 64, "got sum of torch.float32"),
        (torch.int64, "sum", 64, "got sum of torch.int64"),
        (torch.bfloat16, "avg", 64, "got avg of torch.bfloat16"),
    ],
)
def test_what_the_kernels_take(dtype, reduce, num_bytes, reason):
    found = push.refusal(dtype, reduce, num_bytes, 1 << 18)
    assert found == reason if reason is None else found.endswith(reason)


def test_numbers_of_ranks():
    assert [size for size in range(10) if push.most_bytes(size)] == [2, 4, 8]
    assert push.most_bytes(3, "max") is None


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_workspace_takes_as_much_as_the_limits_say(size, monkeypatch):
    """Sums in shares, and keys, each of which travels as 16 bytes."""
    monkeypatch.setattr(push, "_workspaces", {})
    ranks = push.without_others("limits", size, torch.device("meta"))
    for reduce, dtype, least in (("sum", torch.bfloat16, 16), ("max", torch.int64, 8)):
        most = push.most_bytes(size, reduce)
        ranks.check("all_reduce", dtype, reduce, most)
        assert push.refusal(dtype, reduce, most + least, most)
        if push.ONE_SHOT_BYTES[size] < push.MOST_BYTES[size] or reduce == "max":
            with pytest.raises(ValueError, match=f"of at most {most} bytes, got {most + least}"):
                ranks.check("all_reduce", dtype, reduce, most + least)
