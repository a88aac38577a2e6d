"""Random arguments of `generate`, each in one of the forms that users have them in: the same tensor as from transformers, or an
error from both.

With `--seeds 1000` as many, with `--seeds 1000-1999` others; seed `n` alone:
`python -m tests.integrations.transformers.test_argument_fuzz n`.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator
from tests.helpers.random_transformers import RandomModel

FAMILIES = ("llama", "qwen2", "mistral", "gpt_neox")
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "int64": lambda ids: ids,
    "int32": lambda ids: ids.int(),
    "uint8": lambda ids: ids.to(torch.uint8),
    "strided": lambda ids: torch.stack([ids, ids], -1)[..., 0],
    "numpy": lambda ids: ids.numpy(),
    "numpy int32 by columns": lambda ids: np.asfortranarray(ids.numpy().astype(np.int32)),
    "numpy big-endian": lambda ids: ids.numpy().astype(">i8"),
    "numpy reversed": lambda ids: ids.numpy()[:, ::-1].copy()[:, ::-1],
    "list": lambda ids: ids.tolist(),
}


class Case:
    """One random call. `str` describes it for messages."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.model = RandomModel(rng, rng.choice(FAMILIES), rng.randint(30, 60))
        vocab, longest = self.model.vocab, rng.choice([1, 1, 2, 5, 9])
        # Without padding tokens: one inside a prompt is a hole in the mask that both infer, and is refused here.
        rows = [[rng.randrange(1, vocab - 1) for _ in range(rng.randint(1, longest))] for _ in range(rng.choice([1, 1, 2, 3]))]
        self.length = max(map(len, rows))
        pad = rng.choice([None, 0, 0, vocab - 1])
        missing = [self.length - len(row) for row in rows]
        self.ids = torch.tensor([[pad or 0] * count + row for count, row in zip(missing, rows, strict=True)])
        mask = torch.tensor([[0] * count + [1] * len(row) for count, row in zip(missing, rows, strict=True)])
        # Without a mask both infer one from the padding token.
        self.mask = mask if pad is None or rng.random() < 0.7 else None
        self.form, self.mask_form = rng.choice(list(FORMS)), rng.choice(["int64", "numpy", "list"])
        self.config = SpeculationConfig(rng.randint(1, 3), rng.choice([1, 1, 2]))
        self.drafts = rng.random() < 0.5
        self.arguments = self._arguments(rng, rows, pad)

    def _arguments(self, rng: random.Random, rows: list[list[int]], pad: int | None) -> dict[str, Any]:
        vocab, some = self.model.vocab, lambda: rng.randrange(self.model.vocab)
        ends = [None, some(), [some(), some()], rows[0][-1], [rows[0][0]], torch.tensor([some()]), -1, [vocab + 3, some()]]
        arguments: dict[str, Any] = {"eos_token_id": rng.choice(ends), "pad_token_id": pad}
        if pad is None and arguments["eos_token_id"] is None and len(rows) > 1:
            arguments["pad_token_id"] = 0
        limit = rng.choice([-1, 0, 1, 1, 2, 7, np.int64(3)])
        if rng.random() < 0.3:
            limit = None
            arguments["max_length"] = rng.choice([self.length - 1, self.length, self.length + 1, np.int64(self.length + 4)])
        arguments["max_new_tokens"] = limit
        extras: list[dict[str, Any]] = [
            {"stopping_criteria": [transformers.MaxLengthCriteria(self.length + rng.choice([-1, 0, 1, 3]))]},
            {"stopping_criteria": transformers.StoppingCriteriaList([transformers.EosTokenCriteria(some())])},
            {"stopping_criteria": rng.choice([None, []])},
            {"use_cache": rng.random() < 0.5},
            {"num_return_sequences": rng.choice([1, 2])},
            {"do_sample": True, "top_k": 1, "num_return_sequences": rng.choice([1, 2])},
            {"do_sample": True, "top_k": rng.choice([0, 5000, None]), "top_p": 1e-6},
            {"min_length": 0, "max_time": 100},
            {"generation_config": transformers.GenerationConfig(max_new_tokens=rng.choice([2, 5]), top_k=rng.choice([3, 50]))},
        ]
        for extra in rng.sample(extras, rng.choice([0, 0, 1, 2])):
            arguments |= extra
        return arguments

    def __str__(self) -> str:
        masked = "no mask" if self.mask is None else f"mask as {self.mask_form}"
        return f"{self.model.family}, ids {self.ids.tolist()} as {self.form}, {masked}, {self.config}, {self.arguments}"

    def theirs(self) -> torch.Tensor:
        mask = {} if self.mask is None else {"attention_mask": self.mask}
        return self.model.eager.generate(self.ids, **mask, **self.arguments)

    def ours(self) -> torch.Tensor:
        draft = self.model.copy(layers=1) if self.drafts else None
        with TransformersGenerator(self.model.copy(), draft, self.config, max_seq_len=64, page_size=4) as generator:
            mask = None if self.mask is None else FORMS[self.mask_form](self.mask)
            out = generator.generate(FORMS[self.form](self.ids), mask, **self.arguments)
            assert isinstance(out, torch.Tensor)
            return out


def run(seed: int) -> str:
    """What came of a case: "equal" or "refused".

    Raises:
        AssertionError: with the case in words.
    """
    case = Case(seed)
    results: list[torch.Tensor | Exception] = []
    for call in (case.theirs, case.ours):
        try:
            results.append(call())
        except ValueError as error:
            results.append(error)
    want, got = results
    if isinstance(want, Exception) or isinstance(got, Exception):
        assert isinstance(want, Exception), f"seed {seed}: {got!r}, where transformers gives {want}: {case}"
        assert isinstance(got, Exception), f"seed {seed}: {got}, where transformers raises {want!r}: {case}"
        return "refused"
    assert got.dtype == want.dtype, f"seed {seed}: {case}"
    assert torch.equal(got, want), f"seed {seed}: {got.tolist()} for {want.tolist()}: {case}"
    return "equal"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:generate. `eos_token_id` holds:UserWarning", "ignore::UserWarning:transformers")
def test_arguments_mean_what_they_mean_to_transformers(seeds: Callable[[int], range]):
    tried = seeds(24)
    total = Counter(run(seed) for seed in tried)
    assert min(total["equal"], total["refused"]) > len(tried) // 4, f"the cases prove little: {dict(total)}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(Case(int(sys.argv[1])))
    print(run(int(sys.argv[1])))
