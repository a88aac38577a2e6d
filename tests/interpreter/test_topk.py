"""The kernel of `topk_logits` in Triton's interpreter: one part and several, and those of the row's end."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.drafting import topk
from tests.helpers.topk import SCORES, check_topk, rows_of


def call(logits, k, scores):
    return topk.topk_logits(logits, k, scores, torch.float32)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(topk, "PART", 64)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 128, 200, 321])
def test_parts(vocab, scores):
    for k in {1, min(3, vocab), min(32, vocab)}:
        check_topk(rows_of((3, vocab), torch.float32), k, scores, call)


@pytest.mark.parametrize("scores", SCORES)
def test_rows_without_numbers(scores):
    inf, nan = float("inf"), float("nan")
    logits = torch.full((6, 200), -inf)
    logits[1, 199] = 2.0
    logits[2, [5, 150]] = torch.tensor([inf, 3.0])
    logits[3, [9, 190]] = torch.tensor([3.0, -nan])
    logits[4, [0, 130]] = nan
    logits[5, 64:128] = torch.arange(64.0)  # one part alone
    check_topk(logits, 5, scores, call)


def test_equals_come_by_id():
    logits = torch.zeros(2, 200)
    logits[0, [199, 70, 7]] = 1.0
    logits[1, [3, 100]] = -0.0
    _, ids = call(logits, 4, "softmax")
    assert ids.tolist() == [[7, 70, 199, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zeros_keep_their_signs(dtype):
    for vocab, columns in ((40, [3, 7, 39]), (200, [7, 70, 199])):
        wide = torch.full((2, vocab, 2), -1.0, dtype=dtype)
        wide[0, columns, 1] = torch.tensor([-0.0, 0.0, -0.0], dtype=dtype)
        wide[1, columns, 1] = torch.tensor([2.0, -0.0, float("nan")], dtype=dtype)
        values, ids = call(wide[..., 1], 3, "none")
        assert ids.tolist() == [columns, [columns[2], *columns[:2]]]
        assert values.signbit()[:, 1:].tolist() == [[False, True], [False, True]]
        assert values[0, 0].signbit()


def test_any_layout():
    wide = rows_of((4, 2, 150), torch.float32)
    for logits in (wide.transpose(0, 1), wide[:, :, ::2], wide[:, :1].expand(4, 3, 150)):
        check_topk(logits, 5, "log_softmax", call)
