"""`topk_logits` on a CPU and on a GPU: torch's log_softmax and topk, in an order that torch leaves open."""

from __future__ import annotations

import pytest
import torch

import spec_ops
from tests.helpers.topk import SCORES, check_topk, rows_of


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scores_and_ids(device, dtype, scores):
    for shape, k in (((3, 40), 4), ((2, 3, 5), 5), ((1,), 1), ((4, 5000), 32), ((0, 7), 2)):
        check_topk(rows_of(shape, dtype).to(device), k, scores)


def test_the_first_of_equals(device):
    logits = torch.zeros(2, 5000, device=device)
    logits[0, [4999, 2100, 7]] = 1.0
    logits[1, [3, 2048]] = -0.0  # equal to 0
    _, ids = spec_ops.topk_logits(logits, 4)
    assert ids.tolist() == [[7, 2100, 4999, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_zeros_keep_their_signs(device, dtype):
    logits = torch.full((2, 5000), -1.0, device=device, dtype=dtype)
    logits[0, [4999, 2100, 7]] = torch.tensor([-0.0, 0.0, -0.0], device=device, dtype=dtype)
    logits[1, [3, 2048]] = torch.tensor([2.0, -0.0], device=device, dtype=dtype)
    values, ids = spec_ops.topk_logits(logits, 3, scores="none")
    assert ids.tolist() == [[7, 2100, 4999], [3, 2048, 0]]
    assert values.signbit().tolist() == [[True, False, True], [False, True, True]]


@pytest.mark.parametrize("scores", SCORES)
def test_rows_without_numbers(device, scores):
    inf, nan = float("inf"), float("nan")
    logits = torch.full((5, 4100), -inf, device=device)
    logits[1, 4099] = 2.0
    logits[2, [5, 4000]] = torch.tensor([inf, 3.0], device=device)
    logits[3, [9, 4001]] = torch.tensor([3.0, -nan], device=device)
    logits[4, [0, 2500]] = nan
    check_topk(logits, 3, scores)


def test_any_layout(device):
    wide = rows_of((6, 2, 300), torch.float32).to(device)
    for logits in (wide.transpose(0, 1), wide[:, :, ::3], wide[:, :1].expand(6, 4, 300), wide.permute(2, 1, 0)):
        check_topk(logits, 5, "log_softmax")


def test_no_rows_of_a_view(device):
    for logits in (torch.zeros(0, 24, device=device)[:, ::2], torch.zeros(12, 0, device=device).t()):
        assert [result.stride() for result in spec_ops.topk_logits(logits, 3)] == [(3, 1)] * 2


def test_scores_are_rounded_once(device):
    logits = rows_of((7, 900), torch.bfloat16).to(device)
    exact, ids = spec_ops.topk_logits(logits, 6, scores="softmax")
    rounded, same = spec_ops.topk_logits(logits, 6, scores="softmax", dtype=torch.float16)
    assert rounded.dtype == torch.float16
    assert torch.equal(rounded, exact.half())
    assert torch.equal(ids, same)


def test_rows_do_not_depend_on_others(device):
    logits = rows_of((9, 7000), torch.bfloat16).to(device)
    together = spec_ops.topk_logits(logits, 8)
    for row in range(9):
        for all_rows, alone in zip(together, spec_ops.topk_logits(logits[row : row + 1], 8), strict=True):
            assert torch.equal(all_rows[row], alone[0])
