"""Rows of bfloat16 whose values are counted, in Triton's interpreter, against the CPU reference."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.sampling import support
from spec_ops.ops.reference import sampling as reference
from tests.helpers.op_cases import Rng
from tests.helpers.undecided_rows import HOT, undecided_rows
from tests.interpreter.test_sampling import ALONE, CLOSE, VOCAB, settings


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(support, "shares", lambda *_: ALONE)
    monkeypatch.setattr(support, "COUNTED_VOCAB", VOCAB)


def no_search(monkeypatch) -> None:
    monkeypatch.setattr(support, "search_support", lambda *_: pytest.fail("counts do not decide"))


def noted_searches(monkeypatch) -> list[int]:
    """Rows that are searched from now on."""
    rows: list[int] = []
    search = support.search_support
    monkeypatch.setattr(support, "search_support", lambda *args: (rows.append(int(args[11].handle.data.item())), search(*args)))
    return rows


def assert_same(*args) -> None:
    tokens, found = support.sample_logits(*args)
    wanted_tokens, wanted = reference.sample_logits(*args)
    assert torch.equal(found[..., :2], wanted[..., :2]), (found, wanted)
    torch.testing.assert_close(found[..., 2], wanted[..., 2], **CLOSE)
    assert torch.equal(tokens, wanted_tokens)
    assert torch.equal(support.sampling_support(args[0], *args[2:]), found)


def rows_of(kind: str, rng: Rng, count: int) -> torch.Tensor:
    if kind == "peaked":
        rank = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(i)) for i in range(count)]) + 1
        return (-3 * rank.log() - 0.25).bfloat16()
    logits = rng.tensor(count, VOCAB) * 3
    if kind == "ties":
        logits = (logits.round() / 2).where(logits.round() != 0, torch.tensor(0.25))
    if kind == "masked":
        logits[:, ::3] = -math.inf
    return logits.bfloat16()


@pytest.mark.parametrize("which", ["k", "p", "m", "kp", "kpm", "pm"])
@pytest.mark.parametrize("kind", ["normal", "peaked", "ties", "masked"])
def test_counts_decide(kind, which, monkeypatch):
    no_search(monkeypatch)
    rng = Rng(f"{kind} {which}")
    hot = torch.tensor([rng.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(5)])
    uniforms = torch.rand(5, generator=torch.Generator().manual_seed(7))
    k, p, m = settings(rng, 5, VOCAB, which)
    if kind == "masked" and k is not None:
        k = k.clamp(max=VOCAB // 3)  # beyond the tokens that are left, top-k cuts among those of weight 0
    assert_same(rows_of(kind, rng, 5), uniforms, hot, k, p, m)


def test_fewer_tokens_are_left_than_top_k_would_keep(monkeypatch):
    """Top-k's boundary lies among masked tokens, in a bin of several values, and top-p's before it."""
    no_search(monkeypatch)
    k, p = torch.tensor([VOCAB // 3 * 2, VOCAB // 3 * 2 + 1, VOCAB - 1]), torch.tensor([0.999, 0.9, 0.3])
    assert_same(rows_of("masked", Rng(6), 3), torch.tensor([0.999, 0.5, 0.1]), torch.tensor([1.0, 0.5, 2.0]), k, p, None)


def test_a_high_temperature_leaves_padding_without_weight(monkeypatch):
    """The last tile is not full: what stands for a logit beyond the vocabulary would weigh something, as tokens of -256 do."""
    no_search(monkeypatch)
    top_p = torch.tensor([0.3, 0.9, 0.999])
    assert_same(rows_of("normal", Rng(5), 3), torch.tensor([0.2, 0.5, 0.999]), torch.full((3,), 30.0), None, top_p, None)


@pytest.mark.parametrize("share", [ALONE, ALONE._replace(tiles=2, rows=128)], ids="rows_{0.rows}".format)
def test_two_settings_that_cut_at_the_same_value(share, monkeypatch):
    """min-p keeps all tokens of the value of which top-k, or top-p, keeps some: of the first of two or four parts of a row,
    before the one that is drawn."""
    no_search(monkeypatch)
    monkeypatch.setattr(support, "shares", lambda *_: share)
    logits = torch.full((2, VOCAB), -1.0).index_fill_(1, torch.arange(5, VOCAB, 7), 1.0)
    logits[:, 150], logits[:, 290] = 3.0, 2.0
    uniforms, hot, m = torch.tensor([0.99, 0.95]), torch.ones(2), torch.full((2,), 0.1)
    assert_same(logits.bfloat16(), uniforms, hot, torch.tensor([5, 22]), None, m)
    assert_same(logits.bfloat16(), uniforms, hot, None, torch.tensor([0.6, 0.8]), m)


def test_settings_that_cut_nothing(monkeypatch):
    no_search(monkeypatch)
    off = torch.tensor([0, VOCAB, -1]), torch.tensor([1.0, 2.0, math.nan]), torch.tensor([0.0, -1.0, math.nan])
    assert_same(rows_of("normal", Rng(1), 3), torch.tensor([0.0, 0.5, 0.999]), torch.ones(3), *off)


def test_rows_that_are_greedy_or_keep_one_token(monkeypatch):
    no_search(monkeypatch)
    rows = rows_of("ties", Rng(2), 4)
    assert_same(
        rows, torch.full((4,), 0.9), torch.tensor([0.0, -1.0, math.nan, 1.0]), None, None, torch.tensor([0.5, 0.0, 0.0, 1.5])
    )
    assert_same(rows, torch.full((4,), 0.9), torch.ones(4), torch.ones(4, dtype=torch.int32), torch.zeros(4), None)


def test_rows_that_counts_do_not_decide(monkeypatch):
    logits = undecided_rows(rows_of("normal", Rng(3), 10))
    hot = torch.ones(10)
    hot[7] = HOT
    searched = noted_searches(monkeypatch)
    p = torch.full((10,), 0.5)
    wanted = reference.sampling_support(logits, hot, None, p, None)
    found = support.sampling_support(logits, hot, None, p, None)
    assert torch.equal(found[:, :2], wanted[:, :2])
    torch.testing.assert_close(found[:, 2], wanted[:, 2], **CLOSE)
    assert searched == list(range(9))


@pytest.mark.parametrize("zero", [0.0, -0.0, 2.0**-30, -(2.0**-30)])
def test_a_few_values_near_zero_are_no_obstacle(zero, monkeypatch):
    """The bins of the smallest values hold several, which weigh the same beside a top of 1 or more."""
    no_search(monkeypatch)
    logits = rows_of("normal", Rng(4), 2)
    logits[:, :5] = zero
    assert_same(logits, torch.tensor([0.3, 0.8]), torch.ones(2), None, torch.tensor([0.999999, 0.5]), None)
