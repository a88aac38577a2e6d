"""When free rows are filled: what rounds and prefills take together, counted with requests of given lengths and no model."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from spec_ops.decoding.arguments import Requests
from spec_ops.decoding.batch import COMPILED_PREFILL_ROUNDS, Batch
from spec_ops.decoding.pages import PagePool
from spec_ops.decoding.stats import GenerationResult, GenerationStats

CHUNK = 1000


def run(limits, rows, pages=10**6, compiled=True, chunk=CHUNK, prompt=1):
    """Rounds, and how many requests began at once in each prefill. Requests end at their limits."""
    requests = Requests([[1] * prompt for _ in limits], list(limits), [])
    result = GenerationResult([[] for _ in limits], GenerationStats.of(len(limits), 1), None)
    state = SimpleNamespace(batch_size=rows, finished=torch.zeros(rows, dtype=torch.bool))
    batch = Batch(requests, state, PagePool(pages, 4, 0), result, None, None, tqdm(disable=True), compiled=compiled)  # type: ignore[arg-type]

    def output():
        """As a tensor would be read: a token of each request, its number, and whether it was the last."""
        given = [[0, 0, 0]] * rows
        for row, member in batch.members.items():
            given[row] = [1, 1, int(len(result.tokens[member.request]) + 1 == limits[member.request])]
        return SimpleNamespace(tolist=lambda: given)

    begun = []
    while True:
        if batch.should_admit():
            while batch.has_room():
                admitted = batch.admit(chunk)
                begun.append(len(admitted))
                batch.emit_first(output(), admitted)  # type: ignore[arg-type]
        elif batch.members:
            batch.emit(output())  # type: ignore[arg-type]
        else:
            break
    assert [len(tokens) for tokens in result.tokens] == list(limits)
    return result.stats.rounds, begun


def heavy_tailed(seed, count, mean):
    draw = random.Random(seed)
    return [min(max(2, int(mean / 3 * draw.paretovariate(1.5))), 20 * mean) for _ in range(count)]


@pytest.fixture
def at_once(monkeypatch):
    """`run` with rows that are filled as soon as they are free."""

    def call(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "should_admit", Batch.has_room)
            return run(*args, **options)

    return call


@pytest.mark.parametrize("rows", [2, 4, 16, 32])
@pytest.mark.parametrize("mean", [5, 20, 200])
def test_waiting_pays(rows, mean, at_once):
    """Rounds and prefills take hardly longer together than where no row waits, or than where all do; mostly less."""
    cost = COMPILED_PREFILL_ROUNDS
    waiting, never, always = 0, 0, 0
    for seed in range(4):
        limits = heavy_tailed(seed, 16 * rows, mean)
        rounds, begun = run(limits, rows)
        waiting += rounds + cost * len(begun)
        rounds, begun = at_once(limits, rows)
        never += rounds + cost * len(begun)
        groups = [limits[i : i + rows] for i in range(0, len(limits), rows)]
        always += sum(max(group) - 1 + cost for group in groups)
    assert waiting <= 1.02 * never
    assert waiting < always * (1.05 if mean == 5 else 1)  # so short that most end in a group's first rounds
    if rows >= 16 and mean <= 20:  # where a prefill of its own for each request is dear
        assert waiting < 0.85 * never


def test_equal_requests_go_in_groups():
    """They end together, so that nobody waits."""
    rounds, begun = run([9] * 32, 8)
    assert (rounds, begun) == (32, [8] * 4)


def test_the_last_requests_do_not_wait():
    """Nobody would be filled together with them."""
    rounds, begun = run([3, 50, 50, 50, 50], 4)
    assert rounds == 2 + 49  # the fifth begins after two rounds
    assert begun == [4, 1]


def test_waiting_ends():
    """One row becomes free, and the others never do: what it misses is bounded by what a prefill takes from all."""
    limits = [500, 500, 500, *[40] * 9]
    rounds, _ = run(limits, 4)
    assert rounds == 499
    rounds, begun = run([500, 500, 500, 2, *[400] * 2], 4)
    assert begun[:2] == [4, 1]
    assert rounds <= 4 * COMPILED_PREFILL_ROUNDS + 1 + 2 * 399


@pytest.mark.parametrize("chunk", [3, 8])
def test_all_free_rows_are_filled(chunk):
    """Prompts that do not fit one forward run in several, without a round between them."""
    rounds, begun = run([9] * 16, 8, chunk=chunk, prompt=3)
    assert rounds == 16
    assert begun == [chunk // 3] * (16 // (chunk // 3))


def test_pages_that_are_short():
    """Nobody waits for rows where pages are short, and all of them begin at some time."""
    rounds, begun = run([8, 30, 8, 8, 30, 8], 4, pages=16)
    assert sum(begun) == 6
    assert rounds <= 7 + 29 + 29


def test_uncompiled_rounds_wait_less(at_once):
    limits = heavy_tailed(0, 256, 20)
    counts = [run(limits, 16, compiled=compiled)[0] for compiled in (False, True)]
    assert at_once(limits, 16)[0] < counts[0] < counts[1]
