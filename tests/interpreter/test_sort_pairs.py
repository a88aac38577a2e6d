"""Pairs sorted by expert in Triton's interpreter, against `torch.sort` of their ids."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.moe import sort
from tests.helpers.mixtures import check_sorted, routing_ids


def random_ids(tokens: int, k: int, low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high, (tokens, k), generator=torch.Generator().manual_seed(tokens + k))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("routing", ["uniform", "zipf", "identical"])
def test_routings(routing, dtype):
    """Experts that nobody goes to, and ones that most do."""
    for tokens, k, experts in ((1, 1, 1), (1, 1, 3), (70, 3, 7), (65, 4, 32), (300, 2, 5)):
        ids = routing_ids(routing, tokens, experts, k, torch.Generator().manual_seed(tokens))
        check_sorted(sort.sorted_pairs(ids.to(dtype), experts), ids, experts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_no_expert(dtype):
    """Padding, experts of other ranks, and every pair: before the first expert is as much room as there are negative ids."""
    for low, high in ((-3, 9), (-(2**31), 2**31), (-9, 0), (5, 9)):
        ids = random_ids(40, 3, low, high).to(dtype)
        check_sorted(sort.sorted_pairs(ids, 5), ids, 5)


def test_ids_that_32_bits_do_not_hold():
    ids = random_ids(40, 3, -3, 9)
    ids[::3] += 2**32
    ids[1::3] -= 2**32
    check_sorted(sort.sorted_pairs(ids, 5), ids, 5)


@pytest.mark.parametrize("pairs", [1, 2, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 9000])
def test_numbers_of_pairs_around_those_of_blocks(pairs):
    for ids in (random_ids(pairs, 1, -1, 4), torch.full((pairs, 1), 1)):
        check_sorted(sort.sorted_pairs(ids, 3), ids, 3)


def test_no_pairs():
    for shape in ((0, 4), (5, 0)):
        order, offsets = sort.sorted_pairs(torch.empty(shape, dtype=torch.int64), 3)
        assert order.numel() == 0
        assert offsets.tolist() == [0] * 4


def test_strided_ids():
    ids = random_ids(6, 50, -1, 6)
    for view in (ids.t(), ids[1:3, ::2]):
        check_sorted(sort.sorted_pairs(view, 5), view, 5)
