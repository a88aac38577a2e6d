"""Rows of float32 and float16 whose counts lead to a short list, in Triton's interpreter, against the CPU reference."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

import triton.language as tl

from spec_ops.backends.triton.sampling import narrowed, reach, support
from tests.helpers.op_cases import Rng
from tests.helpers.pairs import pairwise
from tests.interpreter.test_sampling import ALONE, VOCAB
from tests.interpreter.test_sampling_counts import assert_same, no_search, noted_searches, rows_of

WHICH = ["k", "p", "kp", "kpm", "pm", "km"]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(support, "shares", lambda *_: ALONE)
    monkeypatch.setattr(support, "COUNTED_VOCAB", VOCAB)


def cuts(rng: Rng, rows: int, which: str) -> tuple[torch.Tensor | None, ...]:
    """Top-k and top-p that cut something, and min-p."""
    k = torch.tensor([rng.choice([1, 2, 17, VOCAB // 3]) for _ in range(rows)])
    p = torch.tensor([rng.choice([-1.0, 0.0, 0.3, 0.9, 0.999]) for _ in range(rows)])
    m = torch.tensor([rng.choice([0.0, 1e-6, 0.02, 0.3]) for _ in range(rows)])
    return tuple(x if name in which else None for name, x in zip("kpm", (k, p, m), strict=True))


def hot_and_coins(rng: Rng, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    hot = torch.tensor([rng.choice([0.3, 0.6, 1.0, 2.0]) for _ in range(rows)])
    return torch.rand(rows, generator=torch.Generator().manual_seed(rng.getrandbits(32))), hot


@pairwise(kind=["normal", "peaked", "ties", "masked"], which=WHICH, dtype=[torch.float32, torch.float16])
def test_a_list_decides(kind, which, dtype, monkeypatch):
    no_search(monkeypatch)
    rng = Rng(f"{kind} {which} {dtype}")
    assert_same(rows_of(kind, rng, 4).to(dtype), *hot_and_coins(rng, 4), *cuts(rng, 4, which))


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("few", [1, 128])
def test_little_room(few, which, monkeypatch):
    """Bins before the list are kept, those after it are not; where the list, or a bin of it, is too short, more is looked
    at."""
    monkeypatch.setattr(narrowed, "NEAR", tl.constexpr(32))
    monkeypatch.setattr(reach, "FEW", tl.constexpr(few))
    monkeypatch.setattr(reach, "AT_ONCE", tl.constexpr(1))
    rng = Rng(f"{which} {few}")
    searched = noted_searches(monkeypatch)
    for kind in ("normal" if few == 1 else "peaked", "ties"):
        assert_same(rows_of(kind, rng, 4).float() + 1e-3 * rng.tensor(4, VOCAB), *hot_and_coins(rng, 4), *cuts(rng, 4, which))
    # of 16: a list of 32 does not reach from top-p's boundary to that of a large top-k
    assert len(searched) <= (12 if "kp" in which else 0)


@pytest.mark.parametrize(("until", "factor"), [(4000, 0.0), (2000, 0.0), (1850, 0.0), (1850, 1e3)])
def test_a_wrong_guess_changes_no_result(until, factor, monkeypatch):
    """Of the weight of all positive logits, or of the largest ones."""
    monkeypatch.setattr(narrowed, "NEAR", tl.constexpr(32))
    about = narrowed._about
    monkeypatch.setattr(narrowed, "_about", lambda place, *args: about(place, *args) * tl.where(place < until, factor, 1.0))
    rng, searched = Rng("guess"), noted_searches(monkeypatch)
    p, m = torch.tensor([0.3, 0.9, 0.99, 0.05]), torch.tensor([0.0, 0.3, 0.01, 0.3])
    rows, coins, hot = rng.tensor(4, VOCAB), torch.tensor([0.1, 0.5, 0.7, 0.9]), torch.ones(4)
    assert_same(rows, coins, hot, None, p, None)
    assert searched
    assert_same(rows, coins, hot, None, p, m)
    k = torch.tensor([200, 20, 100, 40])
    assert_same(rows, coins, hot, k, p, None)
    assert_same(rows, coins, hot, k, p, m)


def test_min_p_cuts_all_of_the_list(monkeypatch):
    """It and top-p cut in one bin, which fills the list, and all that min-p keeps lies above it."""
    monkeypatch.setattr(narrowed, "NEAR", tl.constexpr(32))
    searched = noted_searches(monkeypatch)
    rows = torch.full((1, VOCAB), -50.0)
    rows[0, 7], rows[0, 10:20], rows[0, 100:132] = 3.0, 2.0, 1.001
    one = torch.ones(1)
    assert_same(rows, torch.tensor([0.99]), one, None, torch.tensor([0.9]), torch.tensor([math.exp(1.003 - 3.0)]))
    assert searched == [0, 0]


def test_fewer_tokens_are_left_than_top_k_would_keep(monkeypatch):
    """Then top-p decides alone, if what is masked weighs nothing: it does at an endless temperature, even so far down."""
    monkeypatch.setattr(narrowed, "NEAR", tl.constexpr(32))
    rng, searched = Rng("masked"), noted_searches(monkeypatch)
    rows = rng.tensor(3, VOCAB)
    rows[:, 12:] = -math.inf
    rows[1, 12:] = -1000.0
    rows[2, 12:] = -300.0
    args = torch.tensor([0.3, 0.7, 0.9]), torch.tensor([1.0, 1.0, 500.0]), torch.tensor([50, 12, 200])
    assert_same(rows, *args, torch.tensor([0.9, 0.95, 0.05]), None)
    assert searched == [2, 2]
    assert_same(rows, *args, torch.tensor([0.9, 0.95, 1.0]), torch.tensor([0.2, 0.0, 0.1]))


def test_rows_that_no_list_decides(monkeypatch):
    """No distributions, greedy rows, nothing to cut, logits too large for a bin of their own, and more ties than there is room
    for."""
    monkeypatch.setattr(narrowed, "NEAR", tl.constexpr(32))
    searched = noted_searches(monkeypatch)
    rows = Rng("undecided").tensor(10, VOCAB) * 3
    rows[0, 7], rows[1, 250], rows[2] = math.nan, math.inf, -math.inf
    rows.view(torch.int32)[3, 9] = 0xFFC00000 - (1 << 32)  # a NaN with a sign
    rows[4, 5], rows[5] = 300.0, torch.where(torch.arange(VOCAB) % 4 == 0, 2.0, 1.0)
    hot = torch.ones(10).index_fill_(0, torch.tensor([6]), 0.0)
    p = torch.full((10,), 0.9).index_fill_(0, torch.tensor([7]), 1.0)
    m = torch.zeros(10).index_fill_(0, torch.tensor([8]), 1.5)
    assert_same(rows, torch.linspace(0, 0.99, 10), hot, None, p, m)
    assert sorted(searched) == sorted(2 * list(range(9)))


@pytest.mark.parametrize("zero", [0.0, -0.0, 2.0**-30, -(2.0**-30), -(2.0**-9)])
def test_a_boundary_near_zero(zero, monkeypatch):
    """The bins of the smallest values hold zeros of either sign, and neighbours of both signs."""
    no_search(monkeypatch)
    rows = Rng(f"zero {zero}").tensor(3, VOCAB) - 1.0
    rows[:, 3:90:3] = zero
    rows[:, 4:90:3] = torch.where(torch.arange(29) % 2 == 0, 2.0**-20, -(2.0**-20))
    coins, hot = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([1.0, 0.5, 2.0])
    assert_same(rows, coins, hot, None, torch.tensor([0.2, 0.4, 0.5]), None)
    assert_same(rows, coins, hot, torch.tensor([60, 70, 75]), None, None)
