"""`logits_processor`: which processors become steps, which run as they are, and which are refused by name."""

from __future__ import annotations

import inspect
import math
import random

import pytest
import torch
import transformers
from transformers.generation import logits_process as theirs

from spec_ops.integrations.transformers import TransformersGenerator, speculative_generate
from spec_ops.integrations.transformers import processors as change
from spec_ops.integrations.transformers.custom import FunctionOfHistory, FunctionOfScores, read_processors
from spec_ops.integrations.transformers.logits import Call
from tests.helpers.tiny_transformers import VOCAB, batch, eager_model, eager_tokens, make_model

LENGTH = 9
CALL = Call(VOCAB, (2,), (2,), LENGTH, (20,), (20,))
HINT = r"write it as a function of \(logits, history, lengths\)"


def read(*processors):
    return [step for _, step in read_processors(list(processors), CALL, torch.device("cpu"))]


class Greeting(transformers.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if input_ids.shape[1] > 3 else -scores


class Counting(transformers.LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + self.calls


class Rows:
    """Biases of three rows."""

    def __init__(self):
        self.bias = torch.arange(3.0)[:, None]

    def __call__(self, input_ids, scores):
        return scores + self.bias


def last_token(input_ids, scores):
    return scores.scatter(1, input_ids[:, -1:], -math.inf)


def centred(input_ids, scores):
    return scores - scores.mean()


def in_place(input_ids, scores):
    scores[:, 5] = -math.inf
    return scores


def kept(input_ids, scores):
    return scores.masked_fill(scores < 0, -math.inf).half()


def of_rows() -> theirs.LogitsProcessor:
    """What a later transformers than 5.17 makes of a padded batch."""
    processor = theirs.RepetitionPenaltyLogitsProcessor(1.2)
    processor.prompt_ignore_length = torch.tensor([1, 2])
    return processor


READS = f"is not supported, because it reads `input_ids`: {HINT}"
SHAPE = rf"float32 \[3, {VOCAB}\]"
PROMPT = torch.zeros(2, 3, dtype=torch.long)
REFUSED = [
    (Greeting(), READS),
    (last_token, READS),
    (lambda input_ids, scores: scores if len(input_ids) else -scores, READS),
    (lambda input_ids, scores: scores if input_ids == 3 else -scores, READS),
    (lambda input_ids, scores: scores + torch.bincount(input_ids.flatten()), READS),
    (lambda input_ids, scores: torch.where(torch.isin(input_ids, 3), scores, scores), READS),
    (transformers.WatermarkLogitsProcessor(VOCAB, "cpu"), READS),
    (theirs.PrefixConstrainedLogitsProcessor(lambda batch, ids: [1], 1), READS),
    (theirs.EncoderNoRepeatNGramLogitsProcessor(2, PROMPT), READS),
    (theirs.EncoderRepetitionPenaltyLogitsProcessor(1.3, PROMPT), rf"cannot be called with scores of shape \[1, {VOCAB}\]: "),
    (Counting(), "is not supported, because it gives another result for the same scores"),
    (centred, f"is not supported, because what a row gets depends on the other rows: {HINT}"),
    (Rows(), rf"must return scores as it gets them, float32 \[1, {VOCAB}\], got torch.float32 of shape \[3, {VOCAB}\]"),
    (kept, f"must return scores as it gets them, {SHAPE}, got torch.float16"),
    (lambda input_ids, scores: None, f"must return scores as it gets them, {SHAPE}, got NoneType"),
    (lambda input_ids, scores: scores[:, 200], rf"cannot be called with scores of shape \[3, {VOCAB}\]: IndexError"),
    (lambda scores: scores, r"must be a function of \(input_ids, scores\), or of \(logits, history, lengths\)"),
    (of_rows(), "is not supported, because its `prompt_ignore_length` is a tensor"),
    (theirs.SequenceBiasLogitsProcessor({(VOCAB,): 1.0}), rf"must hold token ids in \[0, {VOCAB}\), got \[{VOCAB}\]"),
    (theirs.SequenceBiasLogitsProcessor({(3,): math.nan}), "must have numbers as biases, got nan"),
    (theirs.NoBadWordsLogitsProcessor([[3, VOCAB + 1]], None), "must hold token ids in"),
    (theirs.ForcedBOSTokenLogitsProcessor(-1), rf"must hold token ids in \[0, {VOCAB}\), got \[-1\]"),
]


@pytest.mark.parametrize(("processor", "message"), REFUSED)
def test_what_a_round_would_call_wrongly_is_refused(processor, message):
    name = getattr(processor, "__name__", type(processor).__name__)
    with pytest.raises(ValueError, match=rf"^generate: `logits_processor\[0\]` \({name}\) {message}"):
        read(processor)


@pytest.mark.parametrize("value", [transformers.TopKLogitsWarper(3), "text", [3], {"a": 1}])
def test_what_is_no_list_of_processors(value):
    with pytest.raises(ValueError, match=r"^generate: `logits_processor` must be a LogitsProcessorList, got"):
        speculative_generate(make_model("llama"), None, *batch(), max_new_tokens=2, logits_processor=value)


def test_what_becomes_of_a_processor():
    steps = read(
        in_place,
        theirs.NoRepeatNGramLogitsProcessor(2),
        theirs.TopKLogitsWarper(4),
        theirs.TopPLogitsWarper(0.4, min_tokens_to_keep=2),
        lambda logits, history, lengths: logits,
        in_place,
    )
    names = ["FunctionOfScores", "NoRepeatNGram", "TopK", "FunctionOfScores", "FunctionOfHistory"]
    assert [type(step).__name__ for step in steps] == names
    assert isinstance(steps[0], FunctionOfScores)
    assert type(steps[4]) is FunctionOfHistory
    assert isinstance(steps[1], change.NoRepeatNGram)


def test_every_processor_of_transformers_is_a_step_or_reads_what_rounds_do_not_have():
    """A class that a later transformers adds is called without `input_ids`, or refused: nothing has to be known about it."""
    from spec_ops.integrations.transformers.custom import _KNOWN

    classes = {c for _, c in inspect.getmembers(theirs, inspect.isclass) if issubclass(c, theirs.LogitsProcessor)}
    assert _KNOWN.keys() <= classes
    unknown = {c.__name__ for c in classes - _KNOWN.keys() - {theirs.LogitsProcessor}}
    of_text = ("Encoder", "ClassifierFree", "Unbatched", "Watermark", "SynthID", "Prefix")
    of_speech = ("Whisper", "Alternating", "Bark", "Dia")
    assert {name for name in unknown if not name.startswith((*of_text, *of_speech))} == set()


class OutputOnly(torch.nn.Module):
    """Forbids the tokens of the output."""

    def forward(self, logits, history, lengths, prompt_lens):
        position = torch.arange(history.shape[1])
        output = (position >= prompt_lens[:, None]) & (position < lengths[:, None])
        return logits.scatter_add(1, history, torch.where(output, -math.inf, 0.0))


def test_a_function_may_ask_for_the_prompts_lengths():
    with TransformersGenerator(make_model("llama"), make_model("llama", layers=1), max_seq_len=40) as generator:
        out = generator.generate(*batch(), max_new_tokens=20, eos_token_id=None, logits_processor=[OutputOnly()])
    assert [len(set(row)) for row in out[:, 9:].tolist()] == [20, 20, 20]
    assert [len(set(row)) for row in eager_tokens("llama")] != [20, 20, 20]


def test_a_callers_processor_does_not_change_its_argument_in_a_round():
    """In float32 the model's logits and the scores may be one tensor."""
    scores = torch.randn(2, VOCAB)
    before = scores.clone()
    read(in_place)[0](scores, None)
    assert torch.equal(scores, before)


def test_processors_of_a_call_are_those_of_generate():
    """With settings of the same kinds, whose places they take."""
    ids, mask = batch()
    rng = random.Random(1)
    processors = transformers.LogitsProcessorList(
        [
            theirs.NoRepeatNGramLogitsProcessor(1),
            in_place,
            theirs.RepetitionPenaltyLogitsProcessor(1.5),
            theirs.SuppressTokensLogitsProcessor(rng.sample(range(VOCAB), 60)),
            theirs.SuppressTokensAtBeginLogitsProcessor(rng.sample(range(VOCAB), 60), 9),
        ]
    )
    settings = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 9, "suppress_tokens": [eager_tokens("llama")[0][0]]}
    arguments = {"max_new_tokens": 10, "eos_token_id": None, "logits_processor": processors, **settings}
    with TransformersGenerator(make_model("llama"), make_model("llama", layers=1), max_seq_len=40) as generator:
        ours = generator.generate(ids, mask, **arguments)
        free = generator.generate(ids, mask, max_new_tokens=10, eos_token_id=None)  # another round, unchanged
    for row, keep, got in zip(ids, mask.bool(), ours, strict=True):
        processors[-1].set_begin_index(int(keep.sum()))
        alone = eager_model("llama").generate(row[keep][None], do_sample=False, pad_token_id=0, **arguments)
        assert torch.equal(got[9:], alone[0, int(keep.sum()) :])
    assert free[:, 9:].tolist() == [row[:10] for row in eager_tokens("llama")]


def test_a_generator_keeps_few_functions():
    """And finds the rounds of the last ones again."""
    with TransformersGenerator(make_model("llama", layers=1), max_seq_len=40) as generator:
        for _ in range(12):
            processors = [lambda logits, history, lengths: logits]
            generator.generate([[5]], max_new_tokens=2, eos_token_id=None, logits_processor=processors)
        assert len(generator._pipelines) == 8
        rounds = dict(generator.generator.buckets.rounds)
        generator.generate([[5]], max_new_tokens=2, eos_token_id=None, logits_processor=processors)
        assert generator.generator.buckets.rounds == rounds
