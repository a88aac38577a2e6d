"""Sampling filters as steps against the classes of transformers: ties, infinities, every row of a batch, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.generation import logits_process as theirs

from spec_ops.integrations.transformers import warpers as ours
from spec_ops.integrations.transformers.steps import Pipeline, Truncation
from tests.integrations.transformers.test_processors import random_rows, random_scores

ROWS = 8


def _temperature(rng, vocab):
    temperature = rng.choice([0.3, 1.7])
    return ours.Temperature(temperature), theirs.TemperatureLogitsWarper(temperature)


def _top_k(rng, vocab):
    top_k = rng.choice([1, 2, 5, vocab, vocab + 5])
    return ours.TopK(top_k, vocab), theirs.TopKLogitsWarper(top_k)


def _top_p(rng, vocab):
    top_p = rng.choice([1e-6, 0.3, 0.9, 0.999])
    return ours.TopP(top_p), theirs.TopPLogitsWarper(top_p)


def _min_p(rng, vocab):
    min_p = rng.choice([0.0, 0.05, 0.5, 1.0])
    return ours.MinP(min_p), theirs.MinPLogitsWarper(min_p)


def _top_h(rng, vocab):
    top_h = rng.choice([0.1, 0.5, 0.9, 1.0])
    return ours.TopH(top_h, vocab), theirs.TopHLogitsWarper(top_h)


def _typical(rng, vocab):
    mass = rng.choice([0.05, 0.2, 0.9, 0.999])
    return ours.Typical(mass), theirs.TypicalLogitsWarper(mass)


def _epsilon(rng, vocab):
    epsilon = rng.choice([3e-4, 0.02, 0.9])
    return ours.Epsilon(epsilon), theirs.EpsilonLogitsWarper(epsilon)


def _eta(rng, vocab):
    epsilon = rng.choice([3e-4, 0.02, 0.9])
    return ours.Eta(epsilon), theirs.EtaLogitsWarper(epsilon)


CASES = [_temperature, _top_k, _top_p, _min_p, _top_h, _typical, _epsilon, _eta]
NAMES = [case.__name__[1:] for case in CASES]


def scored(rng: random.Random, vocab: int) -> torch.Tensor:
    """Scores of which every row has a finite one: transformers' filters are given no others."""
    scores = random_scores(rng, ROWS, vocab)
    return torch.where((scores == -torch.inf).all(-1, keepdim=True), 0.0, scores)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_filter_cuts_what_its_class_cuts(case, seeds):
    cut = 0
    for seed in seeds(60):
        rng = random.Random(seed)
        vocab = rng.choice([1, 5, 40, 300])
        step, warper = case(rng, vocab)
        scores, rows = scored(rng, vocab), random_rows(rng, ROWS)
        got, want = step(scores.clone(), rows), warper(rows.history, scores.clone())
        assert torch.equal(got, want), f"seed {seed}: {got} for {want}"
        cut += not torch.equal(want, scores)
    assert cut > 10


def test_filters_one_after_the_other_give_the_probabilities_of_generate(seeds):
    """With a temperature, in the order of `generate`; logits that are left are the model's own."""
    for seed in seeds(60):
        rng = random.Random(seed)
        vocab, temperature = rng.choice([5, 40, 300]), rng.choice([0.5, 1.0, 1.5])
        chosen = [case(rng, vocab) for case in CASES[1:] if rng.random() < 0.6]
        steps, warpers = [step for step, _ in chosen], [warper for _, warper in chosen]
        scores, rows = scored(rng, vocab), random_rows(rng, ROWS)
        got = Truncation(temperature, steps)(scores, rows)
        want = theirs.LogitsProcessorList([theirs.TemperatureLogitsWarper(temperature), *warpers])(rows.history, scores)
        assert torch.equal((got / temperature).softmax(-1), want.softmax(-1)), f"seed {seed}"
        assert torch.equal(got, torch.where(got == -torch.inf, got, scores))


def test_filters_are_traced_once_for_all_numbers():
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    def steps(x: float) -> list:
        filters = [ours.TopK(int(10 * x), 40), ours.TopP(x), ours.MinP(x / 9), ours.Typical(x), ours.Epsilon(x / 99)]
        return [Truncation(x + 0.1, [ours.TopH(x, 40), *filters, ours.Eta(x / 99)])]

    scores, rows = scored(random.Random(3), 40), random_rows(random.Random(1), ROWS)
    pipeline = Pipeline(steps(0.9), torch.device("cpu"))
    compiled = torch.compile(pipeline, backend=backend, fullgraph=True, dynamic=False)
    for x in (0.9, 0.5, 0.3):
        pipeline.load(steps(x))
        assert [step.key for step in steps(x)] == [step.key for step in pipeline.steps]
        assert torch.equal(compiled(scores, *rows), steps(x)[0](scores, rows))
    assert len(graphs) == 1
