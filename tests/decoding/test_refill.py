"""More prompts than rows: each row takes the next prompt when its own has ended. Tokens are those of one prompt at a time."""

from __future__ import annotations

import functools
import random
import sys
from unittest import mock

import pytest
import torch

from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig, admission, batch
from spec_ops.decoding.batch import COMPILED_PREFILL_ROUNDS, PREFILL_ROUNDS, Batch
from spec_ops.decoding.pages import PagePool
from spec_ops.decoding.random import row_seeds
from tests.decoding.test_generate import VOCAB, config_id, make_draft, make_target

DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(VOCAB) for _ in range(DRAW.choice([1, 2, 5, 9, 17, 40]))] for _ in range(10)]
LIMITS = [DRAW.choice([1, 2, 7, 13, 20]) for _ in PROMPTS]
SIZES = {"max_seq_len": 60, "page_size": 4}
PARAMS = [
    SamplingParams(0.0),
    SamplingParams(0.9, seed=3),
    SamplingParams(0.7, top_k=9, top_p=0.9, min_p=0.01, seed=4),
    SamplingParams(0.0, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(1.1, presence_penalty=0.7, logit_bias={5: 2.0}, suppress_tokens=[1], bad_words_ids=[[2, 3], [4]], seed=5),
]
MIXED = [PARAMS[i % len(PARAMS)] for i in range(len(PROMPTS))]
STOPS = [7, 11]


class LateReader:
    """Reads the output one round late, as on a GPU."""

    seconds = None

    def __init__(self, state, *, at_once, timed):
        assert not at_once
        self.state, self.previous = state, None

    def begin(self):
        pass

    def read(self):
        previous, self.previous = self.previous, self.state.output.clone()
        return previous

    def drain(self):
        previous, self.previous = self.previous, None
        return previous


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(sys.modules[Generator.__module__], "OutputReader", LateReader)


@pytest.fixture(scope="module")
def target():
    return make_target(False)


@functools.cache
def singly(target, kind, config):
    """Each prompt in a call of its own, which draws as row `i` of a call does."""
    draft = None if kind is None else make_draft(kind, target)
    generator = Generator(target, draft, config, max_batch_size=1, **SIZES)
    found = []
    for i, (prompt, limit, sampling) in enumerate(zip(PROMPTS, LIMITS, MIXED, strict=True)):
        with mock.patch.object(admission, "row_seeds", lambda seeds, _, i=i: row_seeds(seeds, [i])):
            call = generator.generate([prompt], max_new_tokens=limit, sampling=sampling, stop_tokens=STOPS)
        found.append(call.tokens[0])
    return found


@pytest.mark.parametrize(
    ("kind", "config"),
    [(None, None), ("eagle3", SpeculationConfig(3)), ("mtp", SpeculationConfig(3, 2, 5)), ("standalone", SpeculationConfig(2))],
    ids=lambda value: config_id(value) if isinstance(value, SpeculationConfig) else str(value),
)
def test_tokens_are_those_of_one_prompt_at_a_time(target, kind, config, late):
    draft = None if kind is None else make_draft(kind, target)
    expected = singly(target, kind, config)
    generator = Generator(target, draft, config, max_batch_size=3, **SIZES)
    for _ in range(2):  # what a call leaves behind does not matter to the next
        assert generator.generate(PROMPTS, max_new_tokens=LIMITS, sampling=MIXED, stop_tokens=STOPS).tokens == expected
    assert len(generator.buckets.rounds) == 1


def test_rows_do_not_wait_for_one_another(target):
    """One long request and many short ones: as many rounds as the long one takes."""
    limits = [33] + [3] * 8
    result = Generator(target, max_batch_size=2, **SIZES).generate(PROMPTS[:9], max_new_tokens=limits)
    assert [len(tokens) for tokens in result.tokens] == limits
    assert result.stats.rounds == 32
    assert result.stats.request_rounds == 32 + 8 * 2


def test_all_free_rows_are_filled_before_a_round(target, monkeypatch):
    """Also where each prompt needs a forward of its own, and waiting would pay."""
    monkeypatch.setattr(batch, "PREFILL_ROUNDS", 100)
    generator = Generator(target, max_batch_size=3, prefill_chunk_size=1, **SIZES)
    result = generator.generate([[1, 2], [3], [4, 5, 6]] * 3, max_new_tokens=5)
    assert (result.stats.rounds, result.stats.request_rounds) == (12, 36)


@pytest.mark.parametrize("compiled", [False, True])
def test_free_rows_know_what_a_prefill_costs(target, compiled, monkeypatch):
    class Stop(Exception):
        pass

    def seen(*args, **kwargs):
        assert Batch(*args, **kwargs)._prefill_rounds == (COMPILED_PREFILL_ROUNDS if compiled else PREFILL_ROUNDS)
        raise Stop

    monkeypatch.setattr(sys.modules[Generator.__module__], "Batch", seen)
    with pytest.raises(Stop):
        Generator(target, compile=compiled, **SIZES).generate([[1]], max_new_tokens=2)


@pytest.mark.slow
def test_requests_wait_for_pages(target, late):
    """A pool that holds hardly more than the longest request: fewer run at a time, with the same tokens."""
    draft = make_draft("eagle3", target)
    expected = Generator(target, draft, max_batch_size=4, **SIZES).generate(PROMPTS, max_new_tokens=LIMITS).tokens
    needed = PagePool(0, 4, SpeculationConfig().reserve).needed
    most = max(needed(len(prompt) + limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True))
    for pages in (most, most + 5):
        generator = Generator(target, draft, max_batch_size=4, num_pages=pages, **SIZES)
        assert generator.target_cache.num_pages == generator.draft_cache.num_pages == pages
        assert generator.generate(PROMPTS, max_new_tokens=LIMITS).tokens == expected
    with pytest.raises(
        ValueError, match=rf"`prompts\[\d+\]` plus `max_new_tokens` must fit .* num_pages={most - 1} pages of 4"
    ):
        Generator(target, draft, num_pages=most - 1, **SIZES).generate(PROMPTS, max_new_tokens=LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [(None, 7), ("eagle3", 1), ("eagle3", 40), ("standalone", 7)])
def test_long_prompts_run_in_pieces(target, kind, size, monkeypatch):
    draft = None if kind is None else make_draft(kind, target)
    expected = Generator(target, draft, max_batch_size=3, **SIZES).generate(PROMPTS, max_new_tokens=LIMITS)
    generator = Generator(target, draft, max_batch_size=3, prefill_chunk_size=size, **SIZES)
    widths = []
    forward = target.forward

    def watched(tokens, positions, attention):
        if attention.step == "extend":
            widths.append(tokens.numel())
        return forward(tokens, positions, attention)

    monkeypatch.setattr(target, "forward", watched)
    result = generator.generate(PROMPTS, max_new_tokens=LIMITS)
    assert result.tokens == expected.tokens
    assert result.stats.histograms == expected.stats.histograms  # the draft saw the same features
    assert max(widths) <= size
    assert sum(widths) == sum(map(len, PROMPTS))
    assert size < 40 or len(widths) < len(PROMPTS)  # short ones together


def test_hooks_see_every_token_once_and_in_order(target, late):
    seen: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}

    def stop_when(request, tokens, count):
        assert tokens[: len(tokens) - count] == seen[request]
        return max(0, 4 - (len(tokens) - count)) if request % 3 == 1 and len(tokens) >= 4 else None

    generator = Generator(target, make_draft("self", target), max_batch_size=3, **SIZES)
    full = generator.generate(PROMPTS, max_new_tokens=LIMITS).tokens
    result = generator.generate(
        PROMPTS, max_new_tokens=LIMITS, stop_when=stop_when, on_tokens=lambda i, new: seen[i].extend(new)
    )
    assert result.tokens == [tokens[:4] if i % 3 == 1 else tokens for i, tokens in enumerate(full)]
    assert [seen[i] for i in range(len(PROMPTS))] == result.tokens


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt], ids=["an error", "Ctrl-C"])
def test_a_callback_that_raises_leaves_the_generator_usable(target, late, error):
    generator = Generator(target, make_draft("mtp", target), max_batch_size=3, num_pages=60, **SIZES)
    expected = generator.generate(PROMPTS, max_new_tokens=LIMITS).tokens

    def fail(request, new):
        if request == 6:
            raise error(request)

    for _ in range(4):  # pages that were held are free again
        with pytest.raises(error):
            generator.generate(PROMPTS, max_new_tokens=LIMITS, on_tokens=fail, sampling=SamplingParams(1.0))
    assert generator.generate(PROMPTS, max_new_tokens=LIMITS).tokens == expected


@pytest.mark.parametrize("name", ["num_pages", "prefill_chunk_size"])
@pytest.mark.parametrize("value", [0, 2.0, True, "8"])
def test_sizes_are_checked(target, name, value):
    with pytest.raises(ValueError, match=f"Generator: `{name}` must be an int .*, got {value!r}"):
        Generator(target, **{name: value})


def test_pages_are_handed_out_once():
    pool = PagePool(10, page_size=4, reserve=3)
    assert [pool.needed(n) for n in (1, 2, 5, 6)] == [1, 2, 2, 3]
    first, second = pool.take(4), pool.take(6)
    assert sorted(first + second) == list(range(10))
    assert pool.free == 0
    pool.give_back(first)
    assert sorted(pool.take(4)) == sorted(first)


def test_a_state_of_some_rows_leaves_the_others_alone(target):
    generator = Generator(target, make_draft("eagle3", target), max_batch_size=4, **SIZES)
    generator.generate(PROMPTS[:4], max_new_tokens=8)
    state = generator.buckets.state(4)
    state.finished[:2] = False
    rows = torch.tensor([False, False, True, True])
    names = ("last_token", "committed_lens", "draft_tokens", "draft_hidden")
    before = {name: buffer.clone() for name, buffer in state.named_buffers()}
    with torch.no_grad(), state.only(rows):
        assert state.finished.tolist() == [True] * 4
        state.finished.fill_(False)
        for name in names:
            state.get_buffer(name).zero_()
    assert state.finished.tolist() == [False] * 4
    for name in names:
        assert torch.equal(state.get_buffer(name)[:2], before[name][:2])
        assert not state.get_buffer(name)[2:].any()
