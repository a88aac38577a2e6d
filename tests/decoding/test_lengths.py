"""Chain lengths that a generator chooses: the text stays plain decoding's, and the choice is close to the best."""

from __future__ import annotations

import functools
import json
import random
import sys

import pytest
import torch
from torch._dynamo.utils import counters

from spec_ops.decoding import Generator, PromptLookup, SamplingParams, SpeculationConfig, generate
from spec_ops.decoding.lengths import GAIN, PROBE, WARMING, LengthChooser, Planned
from tests.decoding.test_generate import PROMPTS, full_prefill, make_draft, make_target
from tests.decoding.test_refill import LateReader
from tests.helpers.pairs import pairwise
from tests.helpers.paths import ROOT
from tests.passes.test_compile import OPTIONS, one_layer

LENGTHS = (0, 1, 3, 5, 7)
AUTO = SpeculationConfig.auto()
REPEATED = [[1, 2, 3, 4, 5, 6] * 4, [7, 8, 9, 7, 8], [3] * 13, [11]]


@pytest.fixture(scope="module", params=[False, True], ids=["gqa", "mla"])
def target(request):
    return make_target(request.param)


@pytest.fixture
def any_length(monkeypatch):
    """Every round has a random length."""
    rng = random.Random(0)
    monkeypatch.setattr(LengthChooser, "plan", lambda self, rows: Planned(rng.choice(self.lengths), dict.fromkeys(rows, True)))


def make(kind: str, target):
    if kind.startswith("lookup"):
        return PromptLookup(otherwise=make_draft("eagle3", target) if kind == "lookup+eagle3" else None)
    return make_draft(kind, target)


@functools.cache
def target_and_text(mla: bool):
    target = make_target(mla)
    return target, generate(target, None, PROMPTS + REPEATED, max_new_tokens=20, page_size=4).tokens


@pytest.mark.slow
@pairwise(kind=["eagle3", "mtp", "standalone", "self", "lookup", "lookup+eagle3"], late=[False, True], mla=[False, True])
def test_rounds_of_any_length_may_follow_each_other(any_length, monkeypatch, kind, late, mla):
    """Greedy text, and rows that are refilled between rounds of different lengths."""
    if late:
        monkeypatch.setattr(sys.modules[Generator.__module__], "OutputReader", LateReader)
    target, plain = target_and_text(mla)
    result = generate(target, make(kind, target), PROMPTS + REPEATED, AUTO, max_new_tokens=20, page_size=4, max_batch_size=5)
    assert result.tokens == plain
    stats = result.stats
    assert set(stats.lengths) == set(LENGTHS)
    assert sum(stats.lengths.values()) == stats.rounds
    if kind == "self":  # every draft is accepted, but for those of rounds that a limit cut
        assert set(stats.acceptance_rates) == {1.0}


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "standalone"])
def test_caches_after_rounds_of_any_length_equal_a_fresh_prefill(any_length, target, kind):
    """Also the draft's: a round that verifies no draft still lets it read the new token."""
    draft = make_draft(kind, target)
    generator = Generator(target, draft, AUTO, max_batch_size=1, max_seq_len=64, page_size=4)
    text = PROMPTS[0] + generator.generate(PROMPTS[:1], max_new_tokens=25).tokens[0]
    committed, offset, state = len(text) - 1, draft.token_offset, generator.buckets.state(1)
    output, fresh = full_prefill(target, text[:committed])
    hidden = torch.zeros(committed + 1, draft.config.hidden_size) if offset else draft.encode(output)
    _, fresh_draft = full_prefill(draft, text[1 - offset : committed + 1], hidden)
    for cache, expected, length in (
        (generator.target_cache, fresh, committed),
        (generator.draft_cache, fresh_draft, committed + offset),
    ):
        for got, want in zip(cache.tensors(), expected.tensors(), strict=True):
            # fp32; different batch shapes change the order of sums in the matrix products
            rows = got[state.block_tables[0].long()].flatten(0, 1)[:length]
            torch.testing.assert_close(rows, want.flatten(0, 1)[:length], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "lookup"])
def test_changed_logits_and_sampling(any_length, target, kind):
    """Penalties count what rounds of any length emitted. Rows of top_k 1 are greedy in sampled rounds."""
    sampling = [SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, suppress_tokens=[3, 8])] * 3
    options = {"max_new_tokens": 20, "page_size": 4}
    plain = generate(target, None, REPEATED[:3], sampling=sampling, **options).tokens
    assert generate(target, make(kind, target), REPEATED[:3], AUTO, sampling=sampling, **options).tokens == plain
    rows = [SamplingParams(1.0, top_k=1), SamplingParams(1.0, top_k=20, seed=3)]
    sampled = generate(target, make(kind, target), REPEATED[:2], AUTO, sampling=rows, **options).tokens
    assert sampled[0] == generate(target, None, REPEATED[:1], **options).tokens[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "eagle3"], ids=["lookup", "head"])
def test_each_length_is_compiled_once(any_length, kind):
    torch._dynamo.reset()
    target = one_layer(False)
    draft, config = PromptLookup() if kind is None else make_draft(kind, target), SpeculationConfig(lengths=(0, 2))
    expected = generate(target, None, REPEATED[:3], max_new_tokens=12).tokens
    generator = Generator(target, draft, config, **OPTIONS)
    build = generator.buckets.build
    generator.buckets.build = lambda *args, **kwargs: torch.compile(  # type: ignore[method-assign]
        build(*args, **kwargs), backend="eager", fullgraph=True, dynamic=False
    )
    counters.clear()
    result = generator.generate(REPEATED[:3], max_new_tokens=12)
    assert result.tokens == expected
    assert set(result.stats.lengths) == {0, 2}
    with torch._dynamo.config.patch(error_on_recompile=True):
        generator.generate(PROMPTS[:3], max_new_tokens=9)
    assert counters["stats"]["unique_graphs"] == 2
    assert {key[2] for key in generator.buckets.rounds} == {0, 2}


def test_a_length_that_is_compiled_is_announced(target, capsys, monkeypatch):
    monkeypatch.setattr("spec_ops.passes.compile", lambda module, **_: module)
    generator = Generator(target, make_draft("self", target), SpeculationConfig(lengths=(1, 3)), compile=True, **OPTIONS)
    generator.generate(PROMPTS[:1], max_new_tokens=12, progress=True)
    assert "compiling the round for batch size 1 and 3 draft steps (once" in capsys.readouterr().err


def test_the_choice_follows_what_is_accepted(target):
    """A draft that is always right gets the longest chains, one that is never right none. Costs are given: no time decides."""
    config = SpeculationConfig.auto(draft_cost=0.1)
    right = generate(target, make_draft("self", target), PROMPTS[:1], config, max_new_tokens=80)
    assert right.stats.lengths[7] > sum(right.stats.lengths.values()) / 2
    wrong = Generator(target, PromptLookup(60, 60), config, max_batch_size=1, max_seq_len=128)  # finds nothing
    stats = wrong.generate(PROMPTS[:1], max_new_tokens=60).stats
    assert stats.lengths[0] > 50
    assert stats.rounds == 59
    # What was learned outlives the call.
    assert wrong.generate(PROMPTS[1:2], max_new_tokens=30).stats.lengths == {0: 29}


@pytest.mark.parametrize("kind", ["self", "lookup"])
def test_rounds_without_drafts_say_when_drafts_would_be_right(target, kind):
    """So no chain has to be tried to find out, and none is: it would be compiled first."""
    generator = Generator(target, make(kind, target), AUTO, max_batch_size=1, max_seq_len=128)
    nothing_right = learned([0.0] * 7, draft_cost=0.1)
    generator.buckets.choosers[1, False, None] = nothing_right
    prompt = [3] * 13 if kind == "lookup" else PROMPTS[0]
    stats = generator.generate([prompt], max_new_tokens=PROBE).stats
    assert stats.lengths[0] > 0
    assert stats.lengths.get(1, 0) > (5 if kind == "self" else 0)


def test_sampled_runs_with_given_costs_repeat(target):
    config, draft = SpeculationConfig.auto(draft_cost=0.05), make_draft("eagle3", target)
    options = {"max_new_tokens": 30, "sampling": SamplingParams(0.9, seed=4)}
    first, again = (generate(target, draft, PROMPTS[:3], config, **options) for _ in range(2))
    assert first.tokens == again.tokens
    assert first.stats.lengths == again.stats.lengths


def test_grammars_take_the_longest(target):
    class Anything:
        def fill_next_token_bitmask(self, bitmask, index: int = 0) -> None:
            bitmask[index] = -1

        def accept_token(self, token: int) -> bool:
            return True

        def rollback(self, count: int) -> None:
            pass

        def is_terminated(self) -> bool:
            return False

        def reset(self) -> None:
            pass

    draft, plain = make_draft("self", target), generate(target, None, PROMPTS[:1], max_new_tokens=17).tokens
    result = generate(target, draft, PROMPTS[:1], AUTO, max_new_tokens=17, matchers=[Anything()])
    assert result.tokens == plain
    assert (result.stats.rounds, result.stats.lengths) == (2, {})


def simulate(rates, cost, tokens: int = 6000, fixed: int | None = None, batch: int = 1, seed: int = 0):
    """Time a token and rounds by length, over texts in which the draft at place `p` is right with probability `rates(p)`.
    Every run of a seed sees the same texts. Rounds are read one late, and their times scatter."""
    texts = [random.Random(1000 * seed + row) for row in range(batch)]
    right = [[text.random() < rates(place) for place in range(2 * tokens)] for text in texts]
    noise, chooser = random.Random(seed), LengthChooser(LENGTHS)
    places, time, gained, rounds, late = [0] * batch, 0.0, 0, dict.fromkeys(LENGTHS, 0), None
    while gained < tokens * batch:
        planned = chooser.plan(range(batch)) if fixed is None else Planned(fixed, {})
        length, accepted = planned.length, {}
        rounds[length] += 1
        for row, place in enumerate(places):
            here = right[row][place : place + max(length, 1)]
            accepted[row] = here.index(False) if False in here else len(here)
            places[row] += min(accepted[row], length) + 1
            gained += min(accepted[row], length) + 1
        seconds = cost(length) * noise.uniform(0.97, 1.03)
        time += seconds
        if fixed is None:
            if late is not None:
                chooser.observe(*late)
            late = planned, accepted, dict.fromkeys(accepted, False), seconds
    return time / gained, rounds


TRACES = {
    "easy": (lambda place: 0.9, 0.05, 1),
    "middling": (lambda place: 0.6, 0.08, 1),
    "dear drafts": (lambda place: 0.8, 0.2, 1),
    "hard": (lambda place: 0.3, 0.1, 1),
    "hopeless": (lambda place: 0.03, 0.1, 1),
    "long quotations": (lambda place: 0.95 if place // 100 % 2 else 0.05, 0.05, 1),
    "short quotations": (lambda place: 0.97 if place // 30 % 3 == 0 else 0.03, 0.05, 1),
    "becomes easy": (lambda place: 0.9 if place > 3000 else 0.1, 0.08, 1),
    "becomes hard": (lambda place: 0.1 if place > 3000 else 0.9, 0.08, 1),
    "a batch": (lambda place: 0.7, 0.15, 8),
}


@pytest.mark.parametrize("trace", TRACES)
def test_the_choice_is_within_three_percent_of_the_best_fixed_length(trace):
    rates, slope, batch = TRACES[trace]

    def cost(length: int) -> float:
        return 0.005 * (1 + slope * length)

    fixed = [simulate(rates, cost, fixed=length, batch=batch)[0] for length in LENGTHS]
    chosen, rounds = simulate(rates, cost, batch=batch)
    assert chosen < 1.03 * min(fixed), (chosen / min(fixed), rounds)
    assert chosen < 0.9 * max(fixed)
    if "becomes" in trace or "quotations" in trace:  # no fixed length is as good
        assert chosen < 0.96 * min(fixed)


def replay(texts: list[str], cost: float, fixed: int | None = None) -> float:
    """Time a token over texts of which `texts[i][place]` drafts in a row would be right, one after another, read one round
    late. A step costs `cost` of a round without drafts."""
    chooser, time, gained = LengthChooser(LENGTHS, cost), 0.0, 0
    for text in texts:
        chooser.begin()
        place, late = 0, None
        while place < len(text):
            planned = chooser.plan([0]) if fixed is None else Planned(fixed, {})
            accepted = min(int(text[place]), max(planned.length, 1))
            count = min(min(accepted, planned.length) + 1, len(text) - place)
            place, gained, time = place + count, gained + count, time + 1 + cost * planned.length
            if late is not None and fixed is None:
                chooser.observe(*late)
            late = planned, {0: accepted}, {0: place == len(text)}, None
    return time / gained


@pytest.mark.parametrize("cost", [0.03, 0.1, 0.25])
@pytest.mark.parametrize("kind", ["edit", "summary", "continue"])
def test_the_choice_is_within_three_percent_on_texts_that_were_decoded(kind, cost):
    """Drafts looked up in eight prompts and their answers: their luck comes in stretches, unlike that of `simulate`."""
    texts = json.loads((ROOT / "tests" / "helpers" / "data" / "lookup_traces.json").read_text(encoding="utf-8"))[kind]
    fixed = [replay(texts, cost, length) for length in LENGTHS]
    assert replay(texts, cost) < 1.03 * min(fixed)


def learned(rates: list[float], lengths=LENGTHS, rounds: int = 400, **options) -> LengthChooser:
    """A chooser that saw rounds of all lengths in which the draft at position `k` is accepted with `rates[k - 1]`."""
    chooser, rng = LengthChooser(lengths, **options), random.Random(0)
    for _ in range(rounds):
        accepted = 0
        while accepted < lengths[-1] and rng.random() < rates[accepted]:
            accepted += 1
        for length in lengths:
            shown = min(accepted, length) if length or not chooser.sees_first else min(accepted, 1)
            chooser.observe(Planned(length, {0: True}), {0: shown}, {0: False}, 1 + 0.1 * length)
    return chooser


def test_expected_tokens_are_sums_of_products():
    rates = [0.9, 0.8, 0.5, 0.5, 0.5, 0.5, 0.5]
    got, path, expected = learned(rates).expected_tokens(True), 1.0, [1.0]
    for rate in rates:
        path *= rate
        expected.append(expected[-1] + path)
    assert got == pytest.approx(expected, rel=0.1)  # the last 50 observations of each position


def test_what_cut_a_round_is_no_rejection():
    chooser = LengthChooser((1, 7))
    for _ in range(200):
        chooser.observe(Planned(7, {0: True}), {0: 2}, {0: True}, None)
    assert chooser.expected_tokens(True)[2] == pytest.approx(3, abs=0.1)


def test_costs_are_measured_after_the_first_rounds_and_rise():
    chooser = LengthChooser(LENGTHS)
    assert list(chooser.costs().values()) == pytest.approx([1, 1.05, 1.15, 1.25, 1.35])  # assumed

    def time(length: int, *seconds: float) -> None:
        for one in seconds:
            chooser.observe(Planned(length, {}), {}, {}, one)

    time(3, *[100.0] * WARMING, 2.3, 2.3, 9.0)  # compiled, recorded; then a hiccup
    assert list(chooser.costs().values()) == pytest.approx([2, 2.1, 2.3, 2.5, 2.7])
    time(1, *[100.0] * WARMING, 1.9)
    assert list(chooser.costs().values()) == pytest.approx([1.7, 1.9, 2.3, 2.7, 3.1])  # on a line
    time(7, *[100.0] * WARMING, *[2.0] * 9)  # a longer chain takes no less: 3 was timed on a busy machine
    costs = chooser.costs()
    assert costs[3] == costs[7] == pytest.approx((2.3 * 3 + 2.0 * 9) / 12)
    assert LengthChooser(LENGTHS, 0.2).costs() == pytest.approx({0: 1, 1: 1.2, 3: 1.6, 5: 2.0, 7: 2.4})


def plans(chooser: LengthChooser, count: int) -> list[int]:
    return [chooser.plan([0]).length for _ in range(count)]


def test_longer_chains_are_tried_now_and_then_where_they_might_pay():
    short = learned([0.95] * 2 + [0.0] * 5, lengths=(1, 2, 7), draft_cost=0.3)
    lengths = plans(short, 8 * PROBE)
    assert lengths[0] == 2
    assert [i for i, n in enumerate(lengths) if n == 7] == [PROBE, PROBE + 2 * PROBE + 1, PROBE + 6 * PROBE + 2]
    # One draft is right so seldom that even a chain right from then on would not pay.
    assert set(plans(learned([0.1] * 7, draft_cost=0.3), 8 * PROBE)) == {0}
    # Rounds without drafts that say nothing about them: one might be right.
    unseen = learned([0.1] * 7, draft_cost=0.3, sees_first=False)
    assert set(plans(unseen, 8 * PROBE)) == {0, 1}


def test_small_gains_change_nothing():
    chooser = LengthChooser((1, 3), draft_cost=0.2)
    chooser._current = 1
    for _ in range(400):  # 1.5 tokens for 1.2 and 1.875 for 1.6: 1 is better
        chooser.observe(Planned(3, {0: True}), {0: 0}, {0: False}, None)
    assert plans(chooser, 1) == [1]
    tokens = chooser.expected_tokens(True)
    assert tokens[3] / 1.6 < GAIN * tokens[1] / 1.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": 5}, "`lengths` must be a list of 2 to 8 chain lengths, got 5"),
        ({"lengths": (3,)}, r"`lengths` must be a list of 2 to 8"),
        ({"lengths": tuple(range(9))}, r"`lengths` must be a list of 2 to 8"),
        ({"lengths": (3, 1)}, r"`lengths` must be different and in order, got \[3, 1\]"),
        ({"lengths": (1, 1)}, r"`lengths` must be different and in order, got \[1, 1\]"),
        ({"lengths": (1, 99)}, r"`lengths` must be at most 63, got \[1, 99\]"),
        ({"lengths": (-1, 1)}, r"`lengths\[0\]` must be an int of at least 0, got -1"),
        ({"lengths": (1, 64)}, r"`lengths` must be at most 63, got \[1, 64\]"),
        ({"lengths": (1, 3), "topk": 2}, "`lengths` must be None for a tree"),
        ({"lengths": (1, 3), "num_steps": 5}, r"`num_steps` must be the longest of `lengths` \[1, 3\], got 5"),
        ({"draft_cost": 0.1}, "`draft_cost` must be None without `lengths`, got 0.1"),
        ({"lengths": (1, 3), "draft_cost": 0}, r"`draft_cost` must be None or a number in \(0, 10\], got 0"),
    ],
)
def test_bad_lengths_are_named(settings, message):
    with pytest.raises(ValueError, match=f"SpeculationConfig: {message}"):
        SpeculationConfig(**settings)


@pytest.mark.parametrize(
    ("draft", "config", "length", "message"),
    [
        (PromptLookup(), SpeculationConfig(2), 3, r"must be an int in \[0, 2\], got 3"),
        (PromptLookup(), AUTO, -1, r"must be an int in \[0, 7\], got -1"),
        (None, None, 1, "must be None without a draft, got 1"),
        ("eagle3", SpeculationConfig(2, 2), 1, "must be None with a tree, got 1"),
    ],
)
def test_a_round_of_a_length_that_there_is_no_room_for(draft, config, length, message):
    """It would write past the pages that requests keep free for it."""
    target = make_target(False)
    draft = make_draft(draft, target) if isinstance(draft, str) else draft
    generator = Generator(target, draft, config, max_batch_size=1, max_seq_len=32, page_size=4)
    with pytest.raises(ValueError, match=f"Generator: `length` {message}"):
        generator.round(1, length=length)


def test_the_longest_length_is_num_steps():
    config = SpeculationConfig(lengths=[0, 2, 6], draft_cost=0.1)
    assert (config.lengths, config.num_steps, config.num_tokens, config.path_len) == ((0, 2, 6), 6, 7, 7)
    assert config.of_length(2) == SpeculationConfig(2)
    assert SpeculationConfig(lengths=(0, 2, 6), num_draft_tokens=7).of_length(2) == SpeculationConfig(2)
    assert SpeculationConfig.auto().lengths == LENGTHS
