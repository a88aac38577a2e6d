"""The whole round keeps the target's distribution: generation with a tiny random model against the exact probability of every
sequence, which shows what tests of the acceptance op alone cannot: which uniforms, distributions and cache rows the round uses.

20,000 requests a case, with fixed seeds and the round's own hash as generator, so a run repeats exactly. Thresholds as in
`test_accept_distribution`: 7 p-values of right rounds are looked at, so another hash or initialization would fail a right round
with a chance of 0.7% (`PASS`); rounds broken on purpose must fall below `FAIL`, three orders lower.
"""

from __future__ import annotations

import itertools
import random
from unittest import mock

import numpy as np
import pytest
import scipy.stats
import torch

import spec_ops
import spec_ops.decoding.draft
import spec_ops.decoding.round
from spec_ops.decoding import Generator, PromptLookup, SamplingParams, SpeculationConfig, SpeculativeRound
from spec_ops.decoding.lengths import LengthChooser, Planned
from spec_ops.models import CausalLM, Eagle3Draft, ModelConfig, MTPDraft, PagedAttention, PagedKVCache, StandaloneDraft
from tests.helpers.exact import filtered_probs

DRAWS, CONTROL_DRAWS, ROWS = 20_000, 10_000, 5_000  # in groups: state that a group leaves would show too
PASS, FAIL = 1e-3, 1e-6
VOCAB, LENGTH = 4, 4  # the prefill's token and three more: at least two rounds for a chain of two drafts with a rejection
PROMPTS = [[1], [2, 0, 3]]
PLAIN, FILTERED = {"temperature": 1.0}, {"temperature": 0.9, "top_k": 3, "top_p": 0.9}
MIN_P = {"temperature": 1.0, "min_p": 0.4}
CHAIN, TREE = SpeculationConfig(2, block_verification=True), SpeculationConfig(2, 2, 5)
BY_TOKENS = SpeculationConfig(2, block_verification=False)
MIXED = SpeculationConfig(lengths=(0, 1, 2, 3))


def model_config(mla: bool) -> ModelConfig:
    attention = (
        {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
        if mla
        else {"num_kv_heads": 1, "head_dim": 4}
    )
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, aux_layers=(0,), **attention
    )


def language_model(seed: int, mla: bool) -> CausalLM:
    torch.manual_seed(seed)
    return CausalLM(model_config(mla))


def make_pair(kind: str, mla: bool):
    target = language_model(1, mla)
    if kind == "standalone":
        return target, StandaloneDraft(language_model(2, mla))
    torch.manual_seed(3)
    if kind == "mtp":
        return target, MTPDraft(model_config(mla), target)
    reduced = torch.tensor([3, 0, 2])  # 1 is never drafted, and only one id keeps its place
    head = Eagle3Draft(model_config(False), target, reduced)
    return target, head if kind == "eagle3" else PromptLookup(otherwise=head)


def exact_joint(target: CausalLM, prompt: list[int], sampling: dict) -> np.ndarray:
    """Probability of every continuation of `LENGTH` tokens, in `itertools.product`'s order: softmax and filters in float64 over
    one prefill of every sequence, so neither the round's steps nor its sampling op take part."""
    sequences = list(itertools.product(range(VOCAB), repeat=LENGTH))
    size, count = len(prompt) + LENGTH, len(sequences)
    cache = PagedKVCache(target.config, count, size)
    attention = PagedAttention(
        cache,
        "extend",
        torch.arange(count, dtype=torch.int32)[:, None],
        torch.full((count,), size, dtype=torch.int32),
        torch.arange(count * size),
        q_indptr=torch.arange(0, count * size + 1, size, dtype=torch.int32),
        max_q_len=size,
    )
    tokens = torch.tensor([prompt + list(sequence) for sequence in sequences])
    with torch.no_grad():
        hidden = target(tokens.flatten(), torch.arange(size).repeat(count), attention).hidden
        logits = target.logits(hidden).unflatten(0, (count, size))[:, len(prompt) - 1 : -1]
    rows = [[filtered_probs(row, **sampling)[0] for row in sequence] for sequence in logits.tolist()]
    return np.array([[row[t] for row, t in zip(p, s, strict=True)] for p, s in zip(rows, sequences, strict=True)]).prod(1)


def rounds_of_any_length():
    """Where a generator chooses the lengths of rounds, it draws them. The real choice prefers few."""
    rng = random.Random(0)
    return mock.patch.object(LengthChooser, "plan", lambda self, rows: Planned(rng.choice(self.lengths), {}))


def p_value(kind: str, mla: bool, config: SpeculationConfig, sampling: dict, draws: int = DRAWS) -> float:
    target, draft = make_pair(kind, mla)
    # Lengths are drawn for each round of a group: more groups, more rounds.
    rows, draws = (ROWS, draws) if config.lengths is None else (ROWS // 8, CONTROL_DRAWS)
    generator = Generator(target, draft, config, max_batch_size=rows, max_seq_len=8, page_size=2)
    prompts = [PROMPTS[i % 2] for i in range(draws)]
    with rounds_of_any_length():
        result = generator.generate(prompts, max_new_tokens=LENGTH, sampling=SamplingParams(seed=4, **sampling))
    assert config.lengths is None or set(result.stats.lengths) == set(config.lengths)
    # A round that never accepted, or never rejected, would show little.
    assert 1.2 < result.stats.accept_length < config.path_len - 0.2
    code = np.array(result.tokens) @ VOCAB ** np.arange(LENGTH)[::-1]
    statistic, freedom = 0.0, 0
    for i, prompt in enumerate(PROMPTS):
        expected = exact_joint(target, prompt, sampling) * (draws // 2)
        counts = np.bincount(code[i::2], minlength=VOCAB**LENGTH)
        possible = expected > 0
        if counts[~possible].any():  # a sequence that the target cannot emit
            return 0.0
        rare = possible & (expected < 5)  # for chi-square: one class of all of them
        classes = [(counts[possible & ~rare], expected[possible & ~rare])]
        classes += [(counts[rare].sum(keepdims=True), expected[rare].sum(keepdims=True))] if rare.any() else []
        found, wanted = map(np.concatenate, zip(*classes, strict=True))
        statistic += float(((found - wanted) ** 2 / wanted).sum())
        freedom += len(wanted) - 1
    return float(scipy.stats.chi2.sf(statistic, freedom))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mla", "config", "sampling"),
    [
        pytest.param("eagle3", False, CHAIN, FILTERED, id="gqa-eagle3-block-filtered"),
        pytest.param("eagle3", False, BY_TOKENS, FILTERED, id="gqa-eagle3-tokens-filtered"),
        pytest.param("standalone", False, CHAIN, MIN_P, id="gqa-standalone-block-min-p"),
        pytest.param("mtp", True, TREE, FILTERED, id="mla-mtp-tree-filtered"),
        pytest.param("standalone", False, CHAIN, PLAIN, id="gqa-standalone-block"),
        pytest.param("lookup, else eagle3", True, CHAIN, PLAIN, id="mla-lookup-else-eagle3"),
        pytest.param("eagle3", False, MIXED, FILTERED, id="gqa-eagle3-mixed-lengths-filtered"),
    ],
)
def test_sampled_rounds_keep_the_distribution(kind, mla, config, sampling):
    assert p_value(kind, mla, config, sampling) > PASS


# Negative controls: rounds broken on purpose. `CONTROL_DRAWS` suffice, and make the test harder to fail by chance.

CONTROLS = {CHAIN: ("standalone", False), BY_TOKENS: ("standalone", False), TREE: ("mtp", True), MIXED: ("standalone", False)}


def broken_p_value(config: SpeculationConfig) -> float:
    return p_value(*CONTROLS[config], config, PLAIN, CONTROL_DRAWS)


def test_draft_coins_as_accept_coins_are_caught(monkeypatch):
    """The uniform that drew a draft also decides on it: both are hashed from one counter."""
    monkeypatch.setattr(spec_ops.decoding.round, "ACCEPT_COUNTER", spec_ops.decoding.draft.DRAFT_COUNTER)
    assert broken_p_value(CHAIN) < FAIL


@pytest.mark.slow
@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_accept_coin_as_final_coin_is_caught(monkeypatch, config):
    monkeypatch.setattr(spec_ops.decoding.round, "FINAL_COUNTER", spec_ops.decoding.round.ACCEPT_COUNTER)
    assert broken_p_value(config) < FAIL


@pytest.mark.slow
@pytest.mark.parametrize("config", [CHAIN, TREE, MIXED], ids=["chain", "tree", "mixed lengths"])
def test_the_same_coins_every_round_are_caught(monkeypatch, config):
    for module in (spec_ops.decoding.round, spec_ops.decoding.draft):
        monkeypatch.setattr(module, "COUNTERS", 0)
    assert broken_p_value(config) < FAIL


@pytest.mark.slow
@pytest.mark.parametrize("config", [CHAIN, BY_TOKENS], ids=["block", "tokens"])
def test_rejecting_with_another_distribution_is_caught(monkeypatch, config):
    """Drafts are drawn at the round's temperature, but judged as if they had been drawn at another."""
    accept = SpeculativeRound.accept

    def wrong(self, drafted, logits):
        flat = drafted.logits / 2
        support = spec_ops.sampling_support(flat, self.state.temperature)
        return accept(self, drafted._replace(logits=flat, support=support), logits)

    monkeypatch.setattr(SpeculativeRound, "accept", wrong)
    assert broken_p_value(config) < FAIL
