"""Prompt lookup in rounds: the text of plain decoding, sampling's distribution, and drafts that are in the history."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from spec_ops.decoding import Generator, PromptLookup, SamplingParams, SpeculationConfig, SpeculativeRound, generate
from spec_ops.models import PagedKVCache
from tests.decoding.test_generate import PROMPTS, make_draft, make_target
from tests.ops.test_lookup import drafts
from tests.passes.test_compile import OPTIONS, compiled_generator, one_layer

LOOKUPS = [PromptLookup(), PromptLookup(1), PromptLookup(3, 2)]
REPEATED = [[1, 2, 3, 4, 5, 6] * 4, [7, 8, 9, 7, 8], [3] * 13, [11]]


@pytest.fixture(scope="module", params=[False, True], ids=["gqa", "mla"])
def target(request):
    return make_target(request.param)


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    return generate(target, None, PROMPTS + REPEATED, max_new_tokens=18, page_size=4).tokens


def replayed(prompt: list[int], new: list[int], steps: int, lookup: PromptLookup) -> list[int]:
    """How many tokens each round of greedy decoding brings, by a matcher in plain Python."""
    text, brought = prompt + new[:1], []
    while len(text) < len(prompt) + len(new):
        left = new[len(text) - len(prompt) :]
        accepted = 0
        for draft, token in zip(drafts(text, steps, lookup.max_ngram, lookup.min_ngram), left, strict=False):
            if draft != token:
                break
            accepted += 1
        brought.append(min(accepted + 1, len(left)))
        text += left[: brought[-1]]
    return brought


@pytest.mark.parametrize("lookup", LOOKUPS, ids=lambda lookup: f"{lookup.min_ngram}to{lookup.max_ngram}")
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_greedy_text_is_plain_decodings_and_rounds_accept_what_the_text_repeats(target, plain, lookup, steps):
    prompts = PROMPTS + REPEATED
    result = generate(target, lookup, prompts, SpeculationConfig(steps), max_new_tokens=18, page_size=4)
    assert result.tokens == plain
    brought = [replayed(prompt, new, steps, lookup) for prompt, new in zip(prompts, plain, strict=True)]
    assert result.stats.histograms == [[row.count(n) for n in range(1, steps + 2)] for row in brought]
    assert result.stats.accept_length > 1  # some drafts were accepted


def test_drafts_where_the_text_has_room_no_longer(target, plain):
    """Limits, stop tokens and the end of the buffers, in groups of fewer rows than the bucket has."""
    prompts, limits = [PROMPTS[2], REPEATED[0], REPEATED[2]], [24, 1, 9]
    full = [plain[2], plain[8], plain[10]]
    stop = full[0][10]
    generator = Generator(target, PromptLookup(), SpeculationConfig(7), max_batch_size=4, max_seq_len=45, page_size=4)
    for _ in range(2):
        result = generator.generate(prompts, max_new_tokens=limits, stop_tokens=[stop])
        for got, want, limit in zip(result.tokens, full, limits, strict=True):
            want = want[:limit]
            assert got == (want[: want.index(stop) + 1] if stop in want else want)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "standalone", "self"])
def test_a_model_drafts_where_nothing_is_found(target, plain, kind):
    prompts = PROMPTS + REPEATED
    model, config = make_draft(kind, target), SpeculationConfig(3)
    alone = generate(target, PromptLookup(min_ngram=4), prompts, config, max_new_tokens=18, page_size=4)
    both = generate(target, PromptLookup(min_ngram=4, otherwise=model), prompts, config, max_new_tokens=18, page_size=4)
    assert both.tokens == alone.tokens == plain
    assert both.stats.accept_length >= alone.stats.accept_length
    if kind == "self":  # its drafts are the target's own tokens, and so is every text that is quoted for long enough
        assert both.stats.accept_length > max(3, alone.stats.accept_length)


def test_the_model_reads_what_was_accepted_of_the_text(target):
    """After rounds whose drafts came from the text, a model's chains are those that it would have drafted alone."""
    model, prompt = make_draft("standalone", target), REPEATED[0]
    states = []
    for draft in (PromptLookup(otherwise=model), model):
        generator = Generator(target, draft, SpeculationConfig(3), max_batch_size=1, max_seq_len=64, page_size=4)
        generator.generate([prompt], max_new_tokens=20)
        states.append(generator.buckets.state(1))
    both, alone = states
    assert both.committed_lens.tolist() == alone.committed_lens.tolist()
    assert both.draft_tokens.tolist() == alone.draft_tokens.tolist()
    torch.testing.assert_close(both.draft_hidden, alone.draft_hidden, rtol=1e-4, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("otherwise", [False, True], ids=["lookup", "with a model"])
def test_sampling_follows_the_seed_whatever_the_batch(target, otherwise):
    model = make_draft("eagle3", target) if otherwise else None
    lookup, sampling = PromptLookup(otherwise=model), SamplingParams(0.7, top_k=20, seed=5)
    alone = generate(target, lookup, REPEATED[:1], max_new_tokens=16, sampling=sampling)
    together = generate(target, lookup, REPEATED, max_new_tokens=16, sampling=sampling)
    assert together.tokens[:1] == alone.tokens
    greedy = generate(target, lookup, REPEATED, max_new_tokens=16, sampling=SamplingParams(1.0, top_k=1))
    assert greedy.tokens == generate(target, None, REPEATED, max_new_tokens=16).tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "eagle3"], ids=["lookup", "with a model"])
def test_the_round_is_one_graph(kind):
    torch._dynamo.reset()
    target, config = one_layer(False), SpeculationConfig(2)
    lookup = PromptLookup(4, 2, None if kind is None else make_draft(kind, target))
    sampling = [SamplingParams(), SamplingParams(0.8, top_k=30, seed=1)]
    expected = Generator(target, lookup, config, **OPTIONS).generate(REPEATED[:2], max_new_tokens=12, sampling=sampling)
    generator = compiled_generator(target, lookup, config, "aot_eager" if kind is None else "eager")
    counters.clear()
    assert generator.generate(REPEATED[:2], max_new_tokens=12, sampling=sampling).tokens == expected.tokens
    with torch._dynamo.config.patch(error_on_recompile=True):
        generator.generate(PROMPTS[:2], max_new_tokens=9, sampling=sampling)
    assert counters["stats"]["unique_graphs"] == 1


def test_changed_logits_decide_over_the_drafts(target):
    """A bias that forbids what the text repeats: drafts of it are rejected."""
    sampling = SamplingParams(suppress_tokens=[3, 8], repetition_penalty=1.3)
    plain = generate(target, None, REPEATED, max_new_tokens=16, sampling=sampling).tokens
    assert generate(target, PromptLookup(), REPEATED, max_new_tokens=16, sampling=sampling).tokens == plain
    assert not {3, 8} & {token for row in plain for token in row}


def test_a_round_reads_no_embedding_of_a_missing_draft(target):
    """Where nothing is found the embedding gets token 0, never -1, which would read memory in front of the table."""
    seen = []
    handle = target.embed.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    result = generate(target, PromptLookup(24, 24), PROMPTS[:3], max_new_tokens=4, page_size=4)
    handle.remove()
    assert result.stats.histogram == [9, 0, 0, 0]
    assert all(int(tokens.min()) >= 0 for tokens in seen)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: PromptLookup(0), r"`max_ngram` must be an int in \[1, 64\], got 0"),
        (lambda t: PromptLookup(65), r"`max_ngram` must be an int in \[1, 64\], got 65"),
        (lambda t: PromptLookup(2.0), r"`max_ngram` must be an int in \[1, 64\], got 2.0"),
        (lambda t: PromptLookup(3, 4), r"`min_ngram` must be an int in \[1, 3\], got 4"),
        (lambda t: PromptLookup(otherwise=t), "`otherwise` must be a .*Draft or None, got 'CausalLM'"),
        (
            lambda t: Generator(t, PromptLookup(), SpeculationConfig(3, 2)),
            "`config.topk` must be 1 with a PromptLookup.*, got 2",
        ),
        (
            lambda t: generate(t, PromptLookup(9, 9), [[1, 2, 3]], max_new_tokens=6),
            "`draft.min_ngram` must be below max_seq_len=9.*, got 9",
        ),
        (lambda t: Generator(t, PromptLookup), "`draft` must be a .*: drafts without a model are `PromptLookup"),
        (lambda t: Generator(t, "prompt-lookup"), "`draft` must be a .*, got str: drafts without a model are `PromptLookup"),
        (
            lambda t: SpeculativeRound(t, make_draft("mtp", t), PagedKVCache(t.config, 1, 4), None, None, SpeculationConfig()),
            "`draft_cache` must be the draft model's PagedKVCache, got None",
        ),
        (
            lambda t: SpeculativeRound(t, None, PagedKVCache(t.config, 1, 4), None, None, SpeculationConfig()),
            "`draft` must be a draft model or a PromptLookup, got None",
        ),
    ],
)
def test_mistakes_are_named(target, make, message):
    with pytest.raises(ValueError, match=message):
        make(target)
