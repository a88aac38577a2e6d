"""Rows whose every token is masked, wrong parameters, and functions of the logits that cannot be used: named errors."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig, generate
from spec_ops.models import StandaloneDraft
from tests.decoding.test_generate import PROMPTS, VOCAB, BrokenAfter, make_draft, make_target, model_config

OPTIONS = {"max_batch_size": 4, "max_seq_len": 64, "page_size": 4}
SHAPES = [None, SpeculationConfig(3), SpeculationConfig(3, 2)]
P = SamplingParams


@pytest.fixture(scope="module")
def target():
    return make_target(False)


def nothing_once(length: int):
    """Masks every token of texts of `length` tokens."""

    def processor(logits, history, lengths):
        return torch.where((lengths == length)[:, None], -math.inf, logits)

    return processor


@pytest.mark.parametrize("config", SHAPES, ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_masked_ends_in_an_error(target, config, temperature):
    generator = Generator(target, make_draft("self", target) if config else None, config, **OPTIONS)
    for new in range(5):  # at every place of a round, and in the prefill
        seen: dict[int, list[int]] = {0: [], 1: []}
        with pytest.raises(RuntimeError, match=rf"every token is masked for `prompts\[1\]` after {new} new tokens"):
            generator.generate(
                [PROMPTS[0], PROMPTS[6]], max_new_tokens=10, sampling=P(temperature, seed=1),
                logits_processor=nothing_once(len(PROMPTS[6]) + new), on_tokens=lambda i, t, seen=seen: seen[i].extend(t),
            )  # fmt: skip
        assert len(seen[1]) <= new
        assert all(0 <= token < VOCAB for tokens in seen.values() for token in tokens)
    free = generator.generate(PROMPTS[:2], max_new_tokens=4, sampling=P(temperature, seed=1)).tokens
    assert [len(tokens) for tokens in free] == [4, 4]


@pytest.mark.parametrize("config", SHAPES, ids=["plain", "chain", "tree"])
def test_all_tokens_suppressed(target, config):
    draft, params = make_draft("eagle3", target) if config else None, [P(), P(), P(suppress_tokens=range(VOCAB))]
    with pytest.raises(RuntimeError, match=r"every token is masked for `prompts\[2\]` after 0 new tokens.*`suppress_tokens`"):
        generate(target, draft, PROMPTS[:3], config, sampling=params, max_new_tokens=4, **OPTIONS)


@pytest.mark.parametrize("config", SHAPES, ids=["plain", "chain", "tree"])
def test_a_nan_is_not_called_masked(config):
    torch.manual_seed(1)
    target = BrokenAfter(model_config(False, 1))
    draft = StandaloneDraft(make_target(False)) if config else None
    with pytest.raises(RuntimeError, match=r"nothing can be sampled for `prompts\[0\]`.*NaN"):
        generate(target, draft, [[1, 2, 3]], config, sampling=P(1.0, seed=1, suppress_tokens=[4]), max_new_tokens=20)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sampling": [P()]}, r"`sampling` must be a SamplingParams, or a list with one per prompt \(2\), got 1"),
        ({"sampling": [P()] * 3}, "`sampling` .*, got 3"),
        ({"sampling": [P(), {"temperature": 1}]}, r"`sampling\[1\]` must be a SamplingParams, got dict"),
        ({"sampling": [P(), None]}, r"`sampling\[1\]` must be a SamplingParams, got NoneType"),
        ({"sampling": "greedy"}, "`sampling` .*, got str"),
        ({"sampling": P(logit_bias={VOCAB: 1.0})}, r"`sampling.logit_bias` must hold token ids in \[0, 97\), got \[97\]"),
        ({"sampling": [P(), P(suppress_tokens=[VOCAB])]}, r"`sampling\[1\].suppress_tokens` must hold token ids"),
        ({"sampling": [P(bad_words_ids=[[1, 999]]), P()]}, r"`sampling\[0\].bad_words_ids` .*, got \[999\]"),
        ({"logits_processor": 3}, "`logits_processor` must be a function, got 3"),
        ({"logits_processor": [lambda *inputs: inputs[0]]}, "`logits_processor` must be a function"),
        (
            {"logits_processor": lambda logits, history, lengths: logits[:, :-1]},
            r"`logits_processor` must return float32 logits of shape \(2, 97\) on cpu, got float32 of shape \(2, 96\) on cpu",
        ),
        ({"logits_processor": lambda logits, history, lengths: logits.double()}, "`logits_processor` .*, got float64"),
        ({"logits_processor": lambda logits, history, lengths: None}, "`logits_processor` .*, got NoneType"),
        ({"logits_processor": lambda logits: logits}, "`logits_processor` raised TypeError: .*3 were given"),
        ({"logits_processor": lambda logits, history, lengths: logits + history}, "`logits_processor` raised RuntimeError: "),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_before_anything_runs(target, monkeypatch, kwargs, message):
    monkeypatch.setattr(type(target), "forward", None)
    with pytest.raises(ValueError, match=f"generate: {message}"):
        Generator(target, **OPTIONS).generate(PROMPTS[:2], max_new_tokens=4, **kwargs)


def counting(logits, history, lengths):
    return logits if int(lengths.sum()) > 0 else logits * 2


def printing(logits, history, lengths):
    import spec_ops

    torch._dynamo.graph_break()
    return logits if spec_ops is not None else -logits


@pytest.mark.parametrize("processor", [counting, printing, functools.partial(counting)])
def test_a_function_that_cannot_be_traced_is_named_before_anything_runs(target, monkeypatch, processor):
    monkeypatch.setattr(type(target), "forward", None)
    generator = Generator(target, compile=True, **OPTIONS)
    with pytest.raises(
        ValueError, match=r"`logits_processor` cannot be traced into the round, which `compile=True` needs: \w+"
    ):
        generator.generate(PROMPTS[:2], max_new_tokens=4, logits_processor=processor)
    assert not generator.buckets.rounds


def test_a_function_that_cannot_be_traced_runs_eagerly(target):
    generator = Generator(target, **OPTIONS)
    expected = generator.generate(PROMPTS[:2], max_new_tokens=4).tokens
    assert generator.generate(PROMPTS[:2], max_new_tokens=4, logits_processor=counting).tokens == expected


def test_only_the_last_functions_rounds_are_kept(target):
    generator = Generator(target, **OPTIONS)
    kept, rounds = nothing_once(63), set()
    for _ in range(10):
        generator.generate(PROMPTS[:2], max_new_tokens=2, logits_processor=nothing_once(63))
        generator.generate(PROMPTS[:2], max_new_tokens=2, logits_processor=kept)
        rounds |= {step for key, step in generator.buckets.rounds.items() if key[-1].processor is kept}
    assert len(generator.buckets.rounds) == len(generator.buckets.made_changes) == len(generator.buckets.processors) == 8
    assert len(rounds) == 1


def test_a_bound_method_is_the_same_function_every_time(target):
    class Rules:
        def forbid(self, logits, history, lengths):
            return logits

    generator, first, second = Generator(target, **OPTIONS), Rules(), Rules()
    for rules in (first, second, first, second):
        generator.generate(PROMPTS[:2], max_new_tokens=2, logits_processor=rules.forbid)
    assert len(generator.buckets.rounds) == len(generator.buckets.processors) == 2
