"""Steps of a round against the logits processors of transformers that they stand for: random rows of different lengths
together, each row alone by the class, bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from transformers.generation import logits_process as theirs

from spec_ops.integrations.transformers import processors as ours
from spec_ops.integrations.transformers.steps import Pipeline, Rows, Step

VOCAB, ROOM = 13, 24
Make = Callable[[random.Random], tuple[Step, Callable[[int], theirs.LogitsProcessor]]]


def random_scores(rng: random.Random, rows: int, vocab: int = VOCAB) -> torch.Tensor:
    """`[rows, vocab]` float32 with ties; some rows have logits of minus infinity, some have no other."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    scores = torch.randn(rows, vocab, generator=generator) * rng.choice([0.3, 3.0, 30.0])
    scores = torch.where(torch.rand(rows, 1, generator=generator) < 0.3, scores.round(), scores)
    hidden = torch.rand(rows, vocab, generator=generator) < rng.choice([0.0, 0.2, 0.9])
    return scores.masked_fill(hidden & (torch.rand(rows, 1, generator=generator) < 0.5), -torch.inf)


def random_rows(rng: random.Random, count: int) -> Rows:
    """Histories of few distinct tokens, so that sequences recur. After a row comes one more token that recurs."""
    tokens = rng.choice([2, 3, VOCAB])
    lengths = [rng.choice([1, 2, 3, rng.randint(1, ROOM), ROOM]) for _ in range(count)]
    history = torch.tensor([[rng.randrange(tokens) for _ in range(ROOM)] for _ in range(count)])
    prompts = [rng.choice([1, length, rng.randint(1, length)]) for length in lengths]
    return Rows(history, torch.tensor(lengths), torch.tensor(prompts))


def _prompt(rows: Rows, row: int) -> torch.Tensor:
    return rows.history[row : row + 1, : rows.prompt_lens[row]]


def _words(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.choice([0, 1, 2, rng.randrange(VOCAB)]) for _ in range(rng.choice([1, 1, 2, 2, 3, 5]))] for _ in range(count)]


def _repetition(rng):
    penalty = rng.choice([0.7, 1.3, 2.0])
    return ours.RepetitionPenalty(penalty), lambda rows, row: theirs.RepetitionPenaltyLogitsProcessor(penalty)


def _repetition_of_output(rng):
    penalty = rng.choice([0.7, 1.3])
    return ours.RepetitionPenalty(penalty, 0), lambda rows, row: theirs.RepetitionPenaltyLogitsProcessor(
        penalty, prompt_ignore_length=int(rows.prompt_lens[row])
    )


def _repetition_of_prompt(rng):
    penalty = rng.choice([0.7, 1.3])
    return ours.RepetitionPenalty(
        1 / penalty, prompt_only=True
    ), lambda rows, row: theirs.EncoderRepetitionPenaltyLogitsProcessor(penalty, _prompt(rows, row))


def _ngrams(rng):
    size = rng.choice([1, 2, 3, 4, 7])
    return ours.NoRepeatNGram(size), lambda rows, row: theirs.NoRepeatNGramLogitsProcessor(size)


def _ngrams_of_prompt(rng):
    size = rng.choice([1, 2, 3])
    return ours.NoRepeatNGram(size, prompt_only=True), lambda rows, row: theirs.EncoderNoRepeatNGramLogitsProcessor(
        size, _prompt(rows, row)
    )


def _sequence_bias(rng):
    biases = {tuple(word): rng.choice([-2.5, 0.1, rng.gauss(0, 3), -math.inf]) for word in _words(rng, rng.randint(1, 40))}
    return ours.SequenceBias(biases, VOCAB), lambda rows, row: theirs.SequenceBiasLogitsProcessor(dict(biases))


def _bad_words(rng):
    words = _words(rng, rng.randint(1, 12))
    return ours.NoBadWords(words, VOCAB), lambda rows, row: theirs.NoBadWordsLogitsProcessor(words)


def _min_new_tokens(rng):
    count, ends = rng.randint(1, 9), [rng.randrange(VOCAB), -1]
    return ours.Suppress(ends, VOCAB, end=count), lambda rows, row: theirs.MinNewTokensLengthLogitsProcessor(
        int(rows.prompt_lens[row]), count, ends
    )


def _suppress(rng):
    tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))] + [VOCAB + 3]
    return ours.Suppress(tokens, VOCAB), lambda rows, row: theirs.SuppressTokensLogitsProcessor(tokens)


def _begin_suppress(rng):
    tokens, begin = [rng.randrange(VOCAB), -1], rng.randint(0, 2)
    return ours.Suppress(tokens, VOCAB, begin, begin + 1), lambda rows, row: theirs.SuppressTokensAtBeginLogitsProcessor(
        tokens, int(rows.prompt_lens[row]) + begin
    )


def _forced_end(rng):
    tokens, at = [rng.randrange(VOCAB), rng.randrange(VOCAB)], rng.randint(0, 3)
    return ours.Force(tokens, VOCAB, at), lambda rows, row: theirs.ForcedEOSTokenLogitsProcessor(
        int(rows.prompt_lens[row]) + at + 1, tokens
    )


def _decay(rng):
    start, factor, ends = rng.randint(0, 4), rng.choice([1.5, 0.5, 1.01, 2]), [rng.randrange(VOCAB), rng.randrange(VOCAB)]
    return ours.ExponentialDecay(start, factor, ends, VOCAB, ROOM), lambda rows, row: theirs.ExponentialDecayLengthPenalty(
        (start, factor), ends, int(rows.prompt_lens[row])
    )


def _invalid(rng):
    return ours.RemoveInvalid(), lambda rows, row: theirs.InfNanRemoveLogitsProcessor()


def _normalize(rng):
    return ours.Normalize(), lambda rows, row: theirs.LogitNormalization()


# Their older classes leave out a sequence one token longer than the text, add biases in another order, and make NaN of an end
# token's -inf.
AS_IN_5_23 = pytest.mark.skipif(
    not hasattr(theirs.SequenceBiasLogitsProcessor({(1,): 1.0}), "multi_token_biases"),
    reason="this transformers has another result than 5.23",
)
CASES = [value for name, value in globals().items() if name.startswith("_") and getattr(value, "__code__", None)]
CASES = [case for case in CASES if case.__code__.co_varnames[:1] == ("rng",) and case is not _words]
CASES = [pytest.param(case, marks=AS_IN_5_23 if case in (_sequence_bias, _bad_words, _decay) else ()) for case in CASES]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bits are equal; a log-softmax of nothing is NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def expected(make, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Each row by itself, without padding, as transformers' class computes it."""
    out = [
        make(rows, row)(rows.history[row : row + 1, :length].clone(), scores[row : row + 1].clone())
        for row, length in enumerate(rows.lengths.tolist())
    ]
    return torch.cat(out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_a_step_computes_what_its_class_computes(case, seeds):
    changed = 0
    for seed in seeds(40):
        rng = random.Random(seed)
        step, make = case(rng)
        rows, scores = random_rows(rng, 6), random_scores(rng, 6)
        if case is _invalid:
            scores[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
        got, want = step(scores.clone(), rows), expected(make, scores, rows)
        assert same(got, want), f"seed {seed}: {got} for {want}"
        changed += not torch.equal(want, scores)
    assert changed > 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_what_is_behind_a_row_is_never_read(case):
    for seed in range(10):
        rng = random.Random(seed)
        step, _ = case(rng)
        rows, scores = random_rows(rng, 6), random_scores(rng, 6)
        garbage = torch.where(rows.position < rows.lengths[:, None], rows.history, 2**62)
        assert same(step(scores, rows._replace(history=garbage)), step(scores, rows))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_other_numbers_go_into_the_same_pipeline(case):
    """What a compiled round relies on: the key says whether buffers can take other numbers, and `load` takes all of them."""
    made: dict[object, Pipeline] = {}
    reused = 0
    for seed in range(30):
        rng = random.Random(seed)
        step, make = case(rng)
        rows, scores = random_rows(rng, 4), random_scores(rng, 4)
        reused += step.key in made
        pipeline = made.setdefault(step.key, Pipeline([case(random.Random(seed))[0]], torch.device("cpu")))
        addresses = [buffer.data_ptr() for buffer in pipeline.buffers()]
        pipeline.load([step])
        assert [buffer.data_ptr() for buffer in pipeline.buffers()] == addresses
        got = pipeline(scores.clone(), rows.history, rows.lengths, rows.prompt_lens)
        assert same(got, expected(make, scores, rows))
    assert reused > 10


def test_a_step_is_traced_without_a_break_and_once_for_all_numbers():
    """All steps in one graph, with other numbers too: Dynamo's `fullgraph`, with nothing read on the host."""
    rows, scores = random_rows(random.Random(1), 4), random_scores(random.Random(2), 4)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    def steps(start: int) -> list[Step]:
        words = [[start], [1, start], [0, 1, 2]]
        return [
            ours.SequenceBias({tuple(word): 0.5 * start for word in words}, VOCAB),
            ours.RepetitionPenalty(1.0 + start / 10),
            ours.NoRepeatNGram(start + 1),
            ours.NoBadWords(words, VOCAB),
            ours.Suppress([start], VOCAB, end=start),
            ours.Force([start], VOCAB, start),
            ours.RemoveInvalid(),
            ours.ExponentialDecay(start, 1.0 + start, [start], VOCAB, ROOM),
        ]

    pipeline = Pipeline(steps(1), torch.device("cpu"))
    compiled = torch.compile(pipeline, backend=backend, fullgraph=True, dynamic=False)
    for start in (1, 2, 3):
        pipeline.load(steps(start))
        want = scores
        for step in steps(start):
            want = step(want, rows)
        assert torch.equal(compiled(scores, *rows), want)
    assert len(graphs) == 1
