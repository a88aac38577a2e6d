"""What `generate` counts: histograms of accepted lengths, and the acceptance rates that follow from them."""

from __future__ import annotations

import math
import random

import pytest

from spec_ops.decoding import GenerationStats, SamplingParams, SpeculationConfig, generate
from tests.decoding.test_generate import PROMPTS, make_draft, make_target


@pytest.fixture(scope="module")
def target():
    return make_target(mla=False)


def test_histograms_are_what_the_callback_saw(target):
    """Sampled trees: some drafts are accepted. Requests end by a limit, a stop token, `stop_when`, the prefill."""
    limits, gains = [24, 13, 24, 24, 1], [[] for _ in range(5)]
    config = SpeculationConfig(3, 4, 10)

    def run(**options):
        return generate(target, make_draft("self", target), PROMPTS[:5], config, max_new_tokens=limits,
                        sampling=SamplingParams(0.15, seed=5), **options)  # fmt: skip

    free = run()
    # Request 2 ends with the second token of some round, request 3 in the middle of another and without what came last.
    stop = free.tokens[2][9]
    result = run(
        stop_tokens=[stop],
        stop_when=lambda request, tokens, count: count - 1 if request == 3 and count > 2 else None,
        on_tokens=lambda request, tokens: gains[request].append(len(tokens)),
    )
    stats = result.stats
    rounds = [lengths[1:] for lengths in gains]  # the first call is of the prefill's token
    assert stats.histograms == [[lengths.count(n) for n in range(1, 5)] for lengths in rounds]
    assert stats.histogram == [sum(column) for column in zip(*stats.histograms, strict=True)]
    assert sum(stats.histogram) == stats.request_rounds
    assert sum(n * count for n, count in enumerate(stats.histogram, 1)) == stats.new_tokens - stats.requests
    assert stats.last_lengths == [lengths[-1] if lengths else 0 for lengths in rounds]
    assert stats.accept_lengths == [sum(lengths) / len(lengths) if lengths else 0 for lengths in rounds]
    assert stats.last_lengths[4] == 0 == sum(stats.histograms[4])
    assert len(result.tokens[3]) < 24
    assert sum(count > 0 for count in stats.histogram) > 2  # drafts were accepted, and some were not
    assert all(a >= b for a, b in zip([1, *stats.acceptance_rates], [*stats.acceptance_rates, 0], strict=True))


def test_a_cut_round_is_no_rejection(target):
    """The target drafts for itself, so every draft is accepted; 23 = 5 * 4 + 3 tokens end with a round that a limit cut."""
    stats = generate(target, make_draft("self", target), PROMPTS[:2], max_new_tokens=[24, 2]).stats
    assert stats.histograms == [[0, 0, 1, 5], [1, 0, 0, 0]]
    assert stats.last_lengths == [3, 1]
    assert stats.acceptance_rates == [1, 1, 1]


def test_plain_decoding_has_no_draft_position(target):
    stats = generate(target, None, PROMPTS[:2], max_new_tokens=5).stats
    assert (stats.histograms, stats.acceptance_rates, stats.accept_lengths) == ([[4], [4]], [], [1, 1])


def test_rates_of_short_texts_are_unbiased():
    """Simulated rounds with known chances of acceptance, in texts of five tokens: most last rounds are cut."""
    rng, chances = random.Random(0), (0.9, 0.7, 0.4)
    stats = GenerationStats.of(20_000, 4)
    for request in range(20_000):
        room = 5
        while room:
            accepted = next((k for k, chance in enumerate(chances) if rng.random() >= chance), 3)
            gained = min(accepted + 1, room)
            room -= gained
            stats.add_round(request, gained, ended=not room)
    # Three standard errors of a share of 20,000 rounds: 0.01. Cut rounds taken for rejections, or left out, are 0.05 off.
    assert stats.acceptance_rates == pytest.approx([0.9, 0.63, 0.252], abs=0.01)


def test_positions_without_evidence():
    stats = GenerationStats.of(2, 4)
    assert stats.acceptance_rates == pytest.approx([math.nan] * 3, nan_ok=True)
    stats.add_round(0, 2, ended=True)
    stats.add_round(1, 1, ended=False)
    assert stats.acceptance_rates == pytest.approx([0.5, math.nan, math.nan], nan_ok=True)
    stats.add_round(1, 2, ended=False)
    assert stats.acceptance_rates == pytest.approx([2 / 3, 0, 0])  # nobody passed position 2, so nobody position 3


def test_the_repr_shows_the_accept_length():
    stats = GenerationStats.of(1, 3)
    for tokens in (3, 3, 1, 2):
        stats.add_round(0, tokens, ended=False)
    stats.new_tokens, stats.rounds = 10, 4
    assert repr(stats) == (
        "GenerationStats(requests=1, new_tokens=10, rounds=4, accept_length=2.25, acceptance_rates=[0.75, 0.50], "
        "histogram=[1, 1, 2], tokens_per_second=0.0, seconds=0.00)"
    )
