"""Expected drafts by both rules: as enumeration in exact numbers has it, and over rounds of the shipped pair."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from benchmarks import blocks
from tests.helpers import accept_oracle as oracle


def test_expectations_are_those_of_the_exact_chances():
    rng = random.Random(0)
    for _ in range(50):
        steps, vocab = rng.randint(1, 4), 3
        rows = [[[rng.randint(1, 9) for _ in range(vocab)] for _ in range(steps + 1)] for _ in range(2)]
        p, q = ([[Fraction(x, sum(row)) for x in row] for row in model] for model in rows)
        drafts = [rng.randrange(vocab) for _ in range(steps)]
        _, chances = oracle.block_chances(drafts, p, q)
        exact, later = Fraction(0), Fraction(1)
        for i in range(steps, 0, -1):
            exact += later * chances[i - 1] * i
            later *= 1 - chances[i - 1]
        target, draft = (
            torch.tensor([[[float(x) for x in row] for row in model[:steps]]], dtype=torch.double) for model in (p, q)
        )
        own = [model.gather(2, torch.tensor(drafts)[None, :, None])[..., 0] for model in (target, draft)]
        assert blocks.expected_by_blocks(*own, target, draft).item() == pytest.approx(float(exact), abs=1e-12)
        ratios = [min(p[i][x] / q[i][x], Fraction(1)) for i, x in enumerate(drafts)]
        by_tokens = sum(torch.tensor([float(r) for r in ratios[: i + 1]]).double().prod().item() for i in range(steps))
        assert blocks.expected_by_tokens(*own).item() == pytest.approx(by_tokens, abs=1e-6)


@pytest.mark.slow
def test_rounds_of_the_shipped_pair():
    row = blocks.measure(steps=3, temperature=1.0, prompts=4, seed=1, max_new_tokens=24)
    assert row["request_rounds"] > 20
    assert row["difference"] == pytest.approx(row["expected_by_blocks"] - row["expected_by_tokens"], abs=2e-4)
    # What was accepted is one outcome of what was expected by blocks: a draft or so of chance a round.
    assert abs(row["accept_length"] - row["expected_by_blocks"]) < 4 / row["request_rounds"] ** 0.5
