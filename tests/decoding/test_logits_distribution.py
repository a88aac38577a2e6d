"""Sampled rounds keep the target's changed distribution: generation against the exact probability of every sequence."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig
from spec_ops.decoding.logits import LogitsChanges
from tests.decoding.test_generate import full_prefill
from tests.decoding.test_logits import changed
from tests.decoding.test_round_distribution import CHAIN, FAIL, LENGTH, PASS, PROMPTS, TREE, VOCAB, make_pair
from tests.helpers.exact import filtered_probs

DRAWS, ROWS = 40_000, 5_000
PARAMS = [  # one for each prompt: every group holds rows of both
    SamplingParams(1.0, seed=4, repetition_penalty=1.6, frequency_penalty=0.7, logit_bias={2: 0.8}, min_p=0.2),
    SamplingParams(0.8, seed=4, presence_penalty=1.0, top_k=3, bad_words_ids=[[3, 0], [1, 2]]),
]


def exact_joint(target, prompt: list[int], params: SamplingParams) -> np.ndarray:
    """Probability of every continuation of `LENGTH` tokens, in `itertools.product`'s order."""
    filters = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}

    def next_probs(output: list[int]) -> list[float]:
        logits = target.logits(full_prefill(target, prompt + output)[0].hidden[-1]).detach()
        return filtered_probs(changed(logits, prompt, output, params).tolist(), **filters)[0]

    known = {s: next_probs(list(s)) for n in range(LENGTH) for s in itertools.product(range(VOCAB), repeat=n)}
    sequences = itertools.product(range(VOCAB), repeat=LENGTH)
    return np.array([np.prod([known[s[:i]][s[i]] for i in range(LENGTH)]) for s in sequences])


def p_value(kind: str, mla: bool, config: SpeculationConfig, draws: int = DRAWS) -> float:
    target, draft = make_pair(kind, mla)
    generator = Generator(target, draft, config, max_batch_size=ROWS, max_seq_len=8, page_size=2)
    rows = [i % 2 for i in range(draws)]
    result = generator.generate([PROMPTS[i] for i in rows], max_new_tokens=LENGTH, sampling=[PARAMS[i] for i in rows])
    assert 1.2 < result.stats.accept_length < config.path_len - 0.2
    code = np.array(result.tokens) @ VOCAB ** np.arange(LENGTH)[::-1]
    statistic, freedom = 0.0, 0
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        expected = exact_joint(target, prompt, params) * (draws // 2)
        counts = np.bincount(code[i::2], minlength=VOCAB**LENGTH)
        if counts[expected == 0].any():
            return 0.0
        likely = expected >= 5  # the others together are one cell
        cells = [(counts[likely], expected[likely]), (counts[~likely].sum(keepdims=True), expected[~likely].sum(keepdims=True))]
        got, want = (np.concatenate(parts) for parts in zip(*cells, strict=True))
        got, want = got[want > 0], want[want > 0]
        statistic += float(((got - want) ** 2 / want).sum())
        freedom += len(want) - 1
    return float(scipy.stats.chi2.sf(statistic, freedom))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mla", "config"), [("eagle3", False, CHAIN), ("mtp", True, TREE)], ids=["chain", "tree"])
def test_sampled_rounds_keep_the_changed_distribution(kind, mla, config):
    assert p_value(kind, mla, config) > PASS


@pytest.mark.parametrize(("kind", "mla", "config"), [("eagle3", False, CHAIN), ("mtp", True, TREE)], ids=["chain", "tree"])
def test_penalties_that_do_not_count_the_path_are_caught(monkeypatch, kind, mla, config):
    monkeypatch.setattr(LogitsChanges, "_count_paths", lambda *args: None)
    assert p_value(kind, mla, config, DRAWS // 2) < FAIL
