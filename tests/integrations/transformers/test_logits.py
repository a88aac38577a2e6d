"""All that changes logits, in one call: what `generate` makes of each position's logits, a round is given to make of them.

With `--seeds 1000` as many random calls, with `--seeds 1000-1999` others; seed `n` alone:
`python -m tests.integrations.transformers.test_logits n`.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as theirs

from spec_ops.decoding import SamplingParams
from spec_ops.integrations.transformers import TransformersGenerator, logits, steps
from spec_ops.integrations.transformers import processors as change
from spec_ops.integrations.transformers.custom import FunctionOfHistory, read_processors
from spec_ops.integrations.transformers.logits import Call, Listed, plan_logits
from spec_ops.integrations.transformers.settings import resolve_settings
from tests.helpers.tiny_transformers import EOS, VOCAB, make_model
from tests.integrations.transformers.test_processors import AS_IN_5_23

NEW = 6


def unchanged(scores: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A caller's function, with which everything runs as steps."""
    return scores


class Case:
    """A random prompt with random settings. `str` describes them for messages."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.sampled = rng.random() < 0.5
        self.prompt = [rng.randrange(3, 9) for _ in range(rng.choice([1, 2, 5, 9]))]
        self.settings: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": [EOS, self.token()]}
        some = [*self._changes(), *(self._filters() if self.sampled else [])]
        for setting in rng.sample(some, rng.choice([1, 2, 4, len(some)])):
            self.settings |= setting
        if self.sampled:
            self.settings |= {"do_sample": True, "temperature": rng.choice([0.7, 1.0, 1.5]), "top_k": rng.choice([0, 5, 50])}
        self.processors = rng.sample(self._processors(), rng.choice([0, 0, 1, 3]))

    def __str__(self) -> str:
        return f"prompt {self.prompt}, {self.settings}, {self.processors}"

    def token(self) -> int:
        return self.rng.randrange(3, VOCAB)

    def tokens(self) -> list[int]:
        return [self.token() for _ in range(self.rng.randint(1, 30))]

    def words(self) -> list[list[int]]:
        """Words that a short text of few tokens completes now and then."""
        return [[*self.rng.sample(self.prompt, self.rng.randint(0, min(2, len(self.prompt)))), self.token()] for _ in range(30)]

    def _changes(self) -> list[dict[str, Any]]:
        rng, length = self.rng, len(self.prompt)
        words = {tuple(word): rng.gauss(0, 4) for word in self.words()}
        return [
            {"sequence_bias": rng.choice([words, [[list(word), bias] for word, bias in words.items()]])},
            {"repetition_penalty": rng.choice([0.8, 1.5])},
            {"encoder_repetition_penalty": rng.choice([0.8, 1.5])},
            {"no_repeat_ngram_size": rng.choice([1, 2, 3])},
            {"encoder_no_repeat_ngram_size": rng.choice([1, 2])},
            {"bad_words_ids": [*self.words(), [EOS]]},
            {"min_length": length + rng.randint(0, NEW)},
            {"min_new_tokens": rng.randint(0, NEW)},
            {"forced_bos_token_id": self.token()},
            {"forced_eos_token_id": rng.choice([EOS, [EOS, self.token()]])},
            {"remove_invalid_values": True},
            {"exponential_decay_length_penalty": (rng.randint(0, 3), rng.choice([1.2, 2.0]))},
            {"suppress_tokens": [*self.tokens(), VOCAB + 3]},
            {"begin_suppress_tokens": self.tokens()},
            {"renormalize_logits": True},
        ]

    def _filters(self) -> list[dict[str, Any]]:
        rng = self.rng
        return [
            {"top_p": rng.choice([0.5, 0.95])},
            {"min_p": rng.choice([0.02, 0.3])},
            {"top_h": rng.choice([0.3, 0.8])},
            {"typical_p": rng.choice([0.3, 0.9])},
            {"epsilon_cutoff": 0.02},
            {"eta_cutoff": 0.05},
        ]

    def _processors(self) -> list[Any]:
        rng, length, ends = self.rng, len(self.prompt), [EOS, self.token()]
        return [
            theirs.RepetitionPenaltyLogitsProcessor(1.4, prompt_ignore_length=rng.choice([None, 1, length])),
            theirs.NoRepeatNGramLogitsProcessor(2),
            theirs.SequenceBiasLogitsProcessor({(self.token(),): 3.0, (self.prompt[-1], self.token()): 9.0}),
            theirs.NoBadWordsLogitsProcessor(self.words(), EOS),
            theirs.MinLengthLogitsProcessor(length + 3, ends),
            theirs.MinNewTokensLengthLogitsProcessor(length - 1, 3, ends),
            theirs.ForcedBOSTokenLogitsProcessor(self.token()),
            theirs.ForcedEOSTokenLogitsProcessor(length + 3, self.token()),
            theirs.InfNanRemoveLogitsProcessor(),
            theirs.ExponentialDecayLengthPenalty((1, 1.5), ends, rng.randint(0, length)),
            theirs.SuppressTokensLogitsProcessor(self.tokens()),
            theirs.SuppressTokensAtBeginLogitsProcessor(self.tokens(), length + rng.randint(0, 1)),
            theirs.LogitNormalization(),
            theirs.TemperatureLogitsWarper(0.8),
            theirs.TopKLogitsWarper(40),
            theirs.TopPLogitsWarper(0.99, min_tokens_to_keep=3),
            theirs.MinPLogitsWarper(0.001),
            theirs.TopHLogitsWarper(0.9),
            theirs.TypicalLogitsWarper(0.97),
            theirs.EpsilonLogitsWarper(1e-4),
            theirs.EtaLogitsWarper(1e-4, filter_value=-1e4),
            scaled,
        ]

    def plan(self, processors: list[Any]) -> tuple[SamplingParams, list[steps.Step]]:
        """What the integration gives a round."""
        model = make_model("llama", "eager", 1)
        settings = resolve_settings(model.generation_config, self.settings, vocab_size=VOCAB)
        ends = tuple(settings.stop_tokens)
        call = Call(VOCAB, ends, ends, len(self.prompt), (NEW,), (NEW,))
        given = read_processors(processors, call, torch.device("cpu"))
        return plan_logits(settings.logits, settings.sampling, given, call)


def scaled(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A caller's processor."""
    scores = 0.9 * scores
    scores[:, 7] = -torch.inf
    return scores


def run(seed: int) -> str:
    """What came of a case: "equal", or why it proves nothing.

    Raises:
        AssertionError: with the case in words.
    """
    case = Case(seed)
    model = make_model("llama", "eager", 1)
    torch.manual_seed(seed)
    ids = torch.tensor([case.prompt])
    returned = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "pad_token_id": 0}
    given = theirs.LogitsProcessorList(case.processors)
    try:
        out = model.generate(ids, **case.settings, **returned, logits_processor=given)
    except (RuntimeError, ValueError):  # of `torch.multinomial` or `torch.distributions`: no probabilities are left
        return "nothing to sample"
    sampling, made = case.plan([*case.processors, unchanged])
    pipeline, prompt = steps.Pipeline(made, torch.device("cpu")), torch.tensor([len(case.prompt)])
    for new, (raw, want) in enumerate(zip(out.logits, out.scores, strict=True)):
        length = len(case.prompt) + new
        history = torch.cat([out.sequences[:, :length], torch.full((1, 3), 5)], 1)
        got = pipeline(raw.float(), history, torch.tensor([length]), prompt)
        if case.sampled:
            got, want = filtered(got, sampling, case.settings).softmax(-1), want.softmax(-1)
        elif case.settings.get("renormalize_logits"):
            got = got.log_softmax(-1)
        assert torch.equal(got.isnan(), want.isnan()), f"seed {seed}, token {new}: {case}"
        difference = (got.nan_to_num() - want.nan_to_num()).abs().max()
        # Log-probabilities are rounded; all else is equal.
        assert difference == 0 or (case.settings.get("renormalize_logits") and difference < 1e-6), (
            f"seed {seed}, token {new}: {difference}: {case}"
        )
    return "equal"


def filtered(scores: torch.Tensor, sampling: SamplingParams, settings: dict[str, Any]) -> torch.Tensor:
    """What the round itself does, by the classes of transformers."""
    scores = scores / sampling.temperature
    if sampling.top_k:
        scores = theirs.TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = theirs.TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = theirs.MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores


@AS_IN_5_23
def test_a_round_is_given_what_generate_does_to_logits(seeds: Callable[[int], range]):
    tried = seeds(40)
    total = Counter(run(seed) for seed in tried)
    assert total["equal"] > len(tried) * 3 // 4, f"the cases prove little: {dict(total)}"


IN_ROUND = {
    "repetition_penalty": 1.3,
    "sequence_bias": {(5,): 2.0, (6,): -1.0},
    "bad_words_ids": [[7, 8], [EOS], [9]],
    "min_length": 12,
    "suppress_tokens": (4, VOCAB + 1),
}


def plan(given: Listed = (), stops: tuple[int, ...] = (EOS,), **settings: Any) -> tuple[SamplingParams, list[steps.Step]]:
    """For an input of 9 tokens."""
    config = make_model("llama", "eager", 1).generation_config
    read = resolve_settings(config, {"eos_token_id": EOS, **settings}, vocab_size=VOCAB)
    return plan_logits(read.logits, read.sampling, list(given), Call(VOCAB, (EOS,), stops, 9, (NEW,), (NEW,)))


def test_what_rounds_have_is_left_to_them():
    params, made = plan(**IN_ROUND)
    assert not made
    assert params == SamplingParams(
        repetition_penalty=1.3,
        logit_bias={5: 2.0, 6: -1.0},
        bad_words_ids=((7, 8), (9,)),
        min_new_tokens=3,
        suppress_tokens=(4,),
    )
    assert plan(min_length=30, min_new_tokens=0)[0].min_new_tokens == 0  # it comes first, as in `generate`
    assert plan(do_sample=True, top_k=4, top_p=0.5, temperature=0.7) == (SamplingParams(0.7, 4, 0.5), [])


@pytest.mark.parametrize(
    "more",
    [
        {"no_repeat_ngram_size": 2},
        {"sequence_bias": {(5, 6): 1.0}},
        {"sequence_bias": {(5,): float("-inf")}},
        {"remove_invalid_values": True},
        {"given": [(None, FunctionOfHistory(unchanged))]},
        {"stops": (3,)},  # a stopping criterion's, which `min_length` does not mask
    ],
    ids=str,
)
def test_all_changes_run_as_steps_where_one_does(more):
    """Some do not commute."""
    params, made = plan(**{**IN_ROUND, **more})
    assert params == SamplingParams()
    assert {change.SequenceBias, change.RepetitionPenalty, change.NoBadWords, change.Suppress} <= {type(s) for s in made}


def test_a_filter_of_transformers_alone_takes_the_others_along():
    """Their order matters. The temperature stays: drafts are drawn with it too."""
    params, made = plan(do_sample=True, temperature=0.7, top_k=4, top_p=0.5, min_p=0.1, typical_p=0.9, repetition_penalty=1.3)
    assert params == SamplingParams(0.7, repetition_penalty=1.3)
    assert [type(step) for step in made] == [steps.Truncation]
    assert [type(step).__name__ for step in made[0].filters] == ["TopK", "TopP", "MinP", "Typical"]
    assert plan(typical_p=0.9, epsilon_cutoff=0.1, min_p=0.1, repetition_penalty=1.3)[1] == []  # of greedy decoding


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ({"repetition_penalty": 0}, "a finite number above 0, got 0"),
        ({"repetition_penalty": "high"}, "a finite number above 0, got 'high'"),
        ({"encoder_repetition_penalty": float("nan")}, "a finite number above 0, got nan"),
        ({"no_repeat_ngram_size": 1.5}, r"an int in \[0, .*\], got 1.5"),
        ({"min_length": -1}, r"an int in \[0, .*\], got -1"),
        ({"min_new_tokens": "3"}, r"an int in \[0, .*\], got '3'"),
        ({"bad_words_ids": [3, 4]}, "a list of non-empty token id lists, got 3"),
        ({"bad_words_ids": [[]]}, "a list of non-empty token id lists, got an empty one"),
        ({"bad_words_ids": "bad"}, "a list of non-empty token id lists, got 'bad'"),
        ({"bad_words_ids": [[VOCAB]]}, rf"token ids in \[0, {VOCAB}\), got \[{VOCAB}\]"),
        ({"sequence_bias": {(3, -1): 1.0}}, rf"token ids in \[0, {VOCAB}\), got \[-1\]"),
        ({"sequence_bias": {(): 1.0}}, "a dict of token id tuples to biases, .*, got an empty sequence"),
        ({"sequence_bias": {3: 1.0}}, "a dict of token id tuples to biases, .*, got 3"),
        ({"sequence_bias": [[[3], "x"]]}, r"numbers as biases, got 'x' for \[3\]"),
        ({"sequence_bias": {(3,): float("nan")}}, r"numbers as biases, got nan for \(3,\)"),
        ({"suppress_tokens": [2.0]}, r"a list of token ids, got \[2.0\]"),
        ({"begin_suppress_tokens": 3}, "a list of token ids, got 3"),
        ({"forced_bos_token_id": [3, 4]}, r"one token id, got \[3, 4\]"),
        ({"forced_eos_token_id": VOCAB}, rf"token ids in \[0, {VOCAB}\), got \[{VOCAB}\]"),
        ({"forced_eos_token_id": "end"}, "a token id or a list of them, got 'end'"),
        ({"exponential_decay_length_penalty": (3,)}, r"an int \(tokens before it begins\) and a finite number .*, got \(3,\)"),
        ({"exponential_decay_length_penalty": 3}, "an int .*, got 3"),
        ({"remove_invalid_values": 1}, "True or False, got 1"),
        ({"do_sample": True, "typical_p": 0.0}, r"a number in \(0, 1\], got 0.0"),
        ({"do_sample": True, "top_h": 2}, r"a number in \(0, 1\], got 2"),
        ({"do_sample": True, "epsilon_cutoff": -1}, r"a number in \[0, 1\], got -1"),
        ({"do_sample": True, "eta_cutoff": "no"}, r"a number in \[0, 1\], got 'no'"),
        ({"do_sample": True, "min_p": 2}, r"a number in \[0, 1\], got 2"),
    ],
    ids=str,
)
def test_wrong_values_are_named(setting, wanted):
    name = list(setting)[-1]
    with pytest.raises(ValueError, match=rf"^(generate|SamplingParams): `{name}` must (be|hold|have) {wanted}"):
        plan(**setting)


def test_combinations_without_a_meaning_are_named():
    ends = {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": None}
    with pytest.raises(ValueError, match=r"^generate: `exponential_decay_length_penalty` needs `eos_token_id`, got none"):
        plan(**ends)
    with TransformersGenerator(make_model("llama", layers=1), max_seq_len=40) as generator:
        arguments = {"max_new_tokens": [2, 3], "forced_eos_token_id": 5}
        with pytest.raises(ValueError, match=r"^generate: `forced_eos_token_id` needs one `max_new_tokens` .*, got \[2, 3\]"):
            generator.generate([[5], [6]], **arguments)


def test_every_value_that_means_off_is_off():
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "typical_p": 1.0, "epsilon_cutoff": 1.0}
    for field in dataclasses.fields(logits.LogitsSettings):
        for value in (None, *([neutral[field.name]] if field.name in neutral else [])):
            assert plan(do_sample=True, top_k=0, **{field.name: value}) == (SamplingParams(1.0), [])
    for name in ("sequence_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id"):
        assert plan(**{name: []}) == (SamplingParams(), [])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(Case(int(sys.argv[1])))
    print(run(int(sys.argv[1])))
