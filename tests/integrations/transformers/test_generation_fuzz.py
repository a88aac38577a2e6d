"""Random models, prompts and settings: greedy tokens are those of `generate`, sampled ones repeat with their seed.

With `--seeds 1000` as many, with `--seeds 1000-1999` others; seed `n` alone:
`python -m tests.integrations.transformers.test_generation_fuzz n`.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import SpeculativeOutput, TransformersGenerator
from tests.helpers.random_transformers import FAMILIES, RandomModel

# Seeds that once found something.
FOUND: tuple[int, ...] = ()
# Float32 on another order of sums. Logits of these models spread over about 10.
NEAR_TIE = 1e-4


@dataclass
class Case:
    """One random problem, and how it is put to us."""

    model: RandomModel
    drafts: str
    config: SpeculationConfig
    rows: list[list[int]]
    limits: list[int]
    ends: list[int]
    side: str
    options: dict[str, int]

    def __str__(self) -> str:
        lens = [len(row) for row in self.rows]
        return (
            f"{self.model.family} of {self.model.layers} layers, draft {self.drafts}, {self.config.num_steps} steps of width "
            f"{self.config.topk}, prompts of {lens} padded {self.side}, limits {self.limits}, ends {self.ends}, {self.options}"
        )

    def padded(self, side: str) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, self.rows))
        fill = [[0] * (longest - len(row)) for row in self.rows]  # 0 is a token as well: the mask tells
        left = side == "left"
        ids = [f + row if left else row + f for f, row in zip(fill, self.rows, strict=True)]
        mask = [f + [1] * len(row) if left else [1] * len(row) + f for f, row in zip(fill, self.rows, strict=True)]
        return torch.tensor(ids), torch.tensor(mask)


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    model = RandomModel(rng, list(FAMILIES)[seed % len(FAMILIES)], rng.randint(30, 90))
    steps, topk = rng.randint(1, 4), rng.choice([1, 1, 2, 3])
    config = SpeculationConfig(steps, topk)
    if topk > 1:
        config = SpeculationConfig(steps, topk, rng.randint(2, config.num_tokens))
    rows = [[rng.randrange(model.vocab) for _ in range(rng.randint(1, 14))] for _ in range(rng.randint(1, 5))]
    limits = [rng.randint(1, 14) for _ in rows]
    room = {"max_batch_size": rng.randint(1, 6), "page_size": rng.choice([1, 2, 3, 4, 8, 16])}
    room["max_seq_len"] = max(len(row) + limit for row, limit in zip(rows, limits, strict=True)) + rng.choice([0, 0, 5])
    return Case(
        model,
        rng.choice(["none", "cut", "cut", "random"]),
        config,
        rows,
        limits,
        sorted({rng.randrange(model.vocab) for _ in range(rng.choice([0, 2, 4]))}),
        rng.choice(["left", "right", "list"]),
        room,
    )


def run(seed: int) -> Counter[str]:
    """Check one case; returns what was seen.

    Raises:
        AssertionError: with the case in words.
    """
    case = random_case(seed)
    draft = None
    if case.drafts == "cut":
        draft = case.model.copy(layers=max(1, case.model.layers - 1))
    elif case.drafts == "random":
        rng = random.Random(-seed - 1)
        draft = RandomModel(rng, rng.choice(list(FAMILIES)), case.model.vocab).copy()
    generator = TransformersGenerator(case.model.copy(), draft, case.config, **case.options)
    given = (case.rows,) if case.side == "list" else case.padded(case.side)

    def ours(**arguments) -> SpeculativeOutput:
        return generator.generate(
            *given, max_new_tokens=case.limits, eos_token_id=case.ends, return_dict_in_generate=True, **arguments
        )

    result = ours()
    ties = sum(_compare(case, i, row, want) for i, (row, want) in enumerate(zip(result.tokens, _want(case), strict=True)))
    sampling = {"do_sample": True, "temperature": 1.3, "top_p": 0.95}
    torch.manual_seed(seed)
    sampled = ours(**sampling)
    assert ours(**sampling, seed=sampled.seed).tokens == sampled.tokens, f"sampling does not repeat: {case}"
    for row, limit in zip(sampled.tokens, case.limits, strict=True):
        ended = [i for i, token in enumerate(row) if token in case.ends]
        assert len(row) == (ended[0] + 1 if ended else limit), f"a sampled row of another length: {case}"
    return Counter(
        prompts=len(case.rows),
        tokens=result.stats.new_tokens,
        near_ties=ties,
        accepted=result.stats.new_tokens - result.stats.requests - result.stats.request_rounds,
        ended_early=sum(len(row) < limit for row, limit in zip(result.tokens, case.limits, strict=True)),
    )


def _want(case: Case) -> list[list[int]]:
    """The tokens of `generate`: each row up to its end token or its own limit."""
    ids, mask = case.padded("left")
    out = case.model.eager.generate(
        ids, attention_mask=mask, max_new_tokens=max(case.limits), do_sample=False, eos_token_id=None, pad_token_id=None
    )
    rows = [row[:limit] for row, limit in zip(out[:, ids.shape[1] :].tolist(), case.limits, strict=True)]
    firsts = [min((row.index(end) for end in case.ends if end in row), default=len(row)) for row in rows]
    return [row[: first + 1] for row, first in zip(rows, firsts, strict=True)]


def _compare(case: Case, index: int, got: list[int], want: list[int]) -> bool:
    """Whether the rows part at a near tie.

    Raises:
        AssertionError: they part elsewhere.
    """
    if got == want:
        return False
    first = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
    assert first is not None, f"row {index}: {got} and {want} of different lengths: {case}"
    with torch.no_grad():
        logits = case.model.eager(torch.tensor([case.rows[index] + want[:first]])).logits[0, -1]
    gap = float(logits[want[first]] - logits[got[first]])
    assert abs(gap) < NEAR_TIE, f"row {index}: {got} for {want}, logits {gap} apart: {case}"
    return True


@pytest.mark.slow
def test_greedy_tokens_are_those_of_generate_and_sampling_repeats(seeds: Callable[[int], range]):
    total: Counter[str] = Counter()
    for seed in sorted({*FOUND, *seeds(len(FAMILIES))}):
        total += run(seed)
    print(dict(total))
    assert total["near_ties"] <= total["prompts"] // 100
    assert total["accepted"] > 0
    assert total["ended_early"] > 0


if __name__ == "__main__":
    print(random_case(int(sys.argv[1])))
    print(dict(run(int(sys.argv[1]))))
