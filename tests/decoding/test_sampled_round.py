"""Sampled rounds: greedy rows among sampled ones, every setting reaches the ops, drafts that are no distribution."""

from __future__ import annotations

import pytest
import torch

from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig, generate
from spec_ops.decoding.draft import first_drafts
from tests.decoding.test_generate import PROMPTS, make_draft, make_target

BLOCK, TOKENS = (SpeculationConfig(3, block_verification=value) for value in (True, False))
CONFIGS = {"block": BLOCK, "tokens": TOKENS, "tree": SpeculationConfig(3, 3, 8), "plain": None}
OPTIONS = {"max_batch_size": 4, "max_seq_len": 64, "page_size": 4}


@pytest.fixture(scope="module")
def target():
    return make_target(False)


@pytest.fixture(scope="module")
def plain_tokens(target):
    return generate(target, None, PROMPTS[:4], max_new_tokens=20, page_size=4).tokens


def generator(target, name: str, kind: str = "eagle3") -> Generator:
    config = CONFIGS[name]
    return Generator(target, None if config is None else make_draft(kind, target), config, **OPTIONS)


@pytest.mark.parametrize("kind", ["eagle3", "self"])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_rows_among_sampled_ones(target, plain_tokens, name, kind):
    sampling = [SamplingParams(), SamplingParams(1.5, seed=1), SamplingParams(0.0, top_k=3), SamplingParams(1.0, seed=2)]
    result = generator(target, name, kind).generate(PROMPTS[:4], max_new_tokens=20, sampling=sampling)
    for row, same in enumerate([True, False, True, False]):
        assert (result.tokens[row] == plain_tokens[row]) == same


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=["top_k", "top_p", "min_p"])
def test_a_setting_that_keeps_one_token_is_greedy(target, plain_tokens, name, setting):
    sampling = SamplingParams(3.0, seed=3, **setting)
    assert generator(target, name).generate(PROMPTS[:4], max_new_tokens=20, sampling=sampling).tokens == plain_tokens


@pytest.mark.parametrize("name", ["block", "tokens"])
def test_a_target_that_drafts_for_itself_accepts_all(target, name):
    sampling = SamplingParams(1.0, min_p=0.02, seed=4)
    stats = generator(target, name, "self").generate(PROMPTS[:4], max_new_tokens=21, sampling=sampling).stats
    assert stats.accept_length == 4.0


@pytest.mark.parametrize("name", ["block", "tokens"])
def test_drafts_without_a_distribution_are_none(target, name):
    """A head of NaN drafts nothing: every round gains the target's own token, the one that plain decoding would draw."""
    broken = generator(target, name)
    with torch.no_grad():
        broken.draft.lm_head.weight.fill_(torch.nan)
    sampling = SamplingParams(1.0, seed=5)
    result = broken.generate(PROMPTS[:4], max_new_tokens=20, sampling=sampling)
    assert result.stats.accept_length == 1.0
    assert result.tokens == generator(target, "plain").generate(PROMPTS[:4], max_new_tokens=20, sampling=sampling).tokens


def test_drafts_are_drawn_from_the_logits_that_are_kept(target):
    """A head that returns float32 in a bfloat16 model: logits and support are those of the state's dtype."""
    model = make_target(False).bfloat16()
    low = Generator(model, make_draft("eagle3", model).bfloat16(), BLOCK, **OPTIONS)
    own = low.draft.logits
    low.draft.logits = lambda hidden: own(hidden).float() * 1.001
    result = low.generate(PROMPTS[:4], max_new_tokens=8, sampling=SamplingParams(1.0, seed=6))
    assert all(len(tokens) == 8 for tokens in result.tokens)
    state = low.buckets.state(4)
    state.temperature.fill_(0.7)
    with torch.no_grad():
        first_drafts(low.draft, state, torch.randn(4, 64).bfloat16(), 1, True)
    again = torch.ops.spec_ops.sampling_support(state.draft_logits, state.temperature, state.top_k, state.top_p, state.min_p)
    assert state.draft_logits.dtype == torch.bfloat16
    assert torch.equal(state.draft_support, again)


def test_target_to_draft_inverts_the_map(target):
    draft = make_draft("eagle3", target)
    inverse = draft.target_to_draft()
    assert inverse.shape == (target.config.vocab_size,)
    assert torch.equal(inverse[draft.draft_to_target], torch.arange(len(draft.draft_to_target)))
    assert (inverse >= 0).sum() == len(draft.draft_to_target)
    assert make_draft("mtp", target).target_to_draft() is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_verification": 1}, "`block_verification` must be True, False or None, got 1"),
        ({"block_verification": "yes"}, "`block_verification` must be True, False or None, got 'yes'"),
        ({"topk": 2, "block_verification": True}, "`block_verification` must be False or None for a tree, got True"),
    ],
)
def test_bad_block_verification(config, message):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(**config)
    assert not SpeculationConfig(topk=2, block_verification=False).verifies_blocks
    assert not SpeculationConfig(topk=2).verifies_blocks
