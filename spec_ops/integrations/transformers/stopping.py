"""What ends a row besides end tokens and limits: stop strings, time, and stopping criteria of transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria

from spec_ops.decoding.generate import StopWhen
from spec_ops.integrations.transformers.prompts import Prompts
from spec_ops.integrations.transformers.settings import GenerationSettings, token_ids

Criterion = StoppingCriteria | Callable[..., Any]


def replace_settings(settings: GenerationSettings, criteria: Sequence[Criterion]) -> tuple[GenerationSettings, list[Criterion]]:
    """As in `generate`, a criterion given stands for the one that a setting would make. Returns the settings without these, and
    the criteria that are left to be called.

    Raises:
        ValueError: a criterion that needs scores.
    """
    if not isinstance(criteria, (list, tuple)) or not all(callable(criterion) for criterion in criteria):
        raise ValueError(f"generate: `stopping_criteria` must be a StoppingCriteriaList, got {criteria!r}")
    left: list[Criterion] = []
    for criterion in criteria:
        if type(criterion) is ConfidenceCriteria:
            raise ValueError("generate: `stopping_criteria` must not read scores: not supported, because rounds keep none")
        if type(criterion) is MaxLengthCriteria:
            settings = replace(settings, max_new_tokens=None, max_length=criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            settings = replace(settings, stop_tokens=token_ids(criterion.eos_token_id))
        else:
            if type(criterion) is MaxTimeCriteria:
                settings = replace(settings, max_time=None)
            elif type(criterion) is StopStringCriteria:
                settings = replace(settings, stop_strings=[])
            left.append(criterion)
    return settings, left


def stop_when(settings: GenerationSettings, criteria: Sequence[Criterion], tokenizer: Any, prompts: Prompts) -> StopWhen | None:
    """`Generator.generate`'s hook for `settings` and `criteria`, None if nothing asks for one. Time runs from this call on."""
    hooks: list[StopWhen] = []
    if settings.stop_strings:
        if tokenizer is None:
            raise ValueError("generate: `stop_strings` needs `tokenizer`, got None")
        # Without padding: a string may begin in the prompt.
        strings = StoppingCriteriaList([StopStringCriteria(tokenizer, settings.stop_strings)])
        hooks.append(_after_each_token(strings, prompts.rows, torch.device("cpu")))
    if criteria:
        # With padding, as the returned sequences have it, and on their device: criteria may count from the input's length, and
        # compare with tensors of their own.
        hooks.append(_after_each_token(StoppingCriteriaList(criteria), prompts.ids.tolist(), prompts.ids.device))
    if settings.max_time is not None:
        hooks.append(_out_of_time(settings.max_time))
    if not hooks:
        return None

    def first(request: int, tokens: list[int], count: int) -> int | None:
        return min((kept for hook in hooks if (kept := hook(request, tokens, count)) is not None), default=None)

    return first


def _after_each_token(criteria: StoppingCriteriaList, rows: list[list[int]], device: torch.device) -> StopWhen:
    """Call `criteria` as `generate` would, for one row at a time: on `[1, length]` after every new token, without scores."""

    def hook(request: int, tokens: list[int], count: int) -> int | None:
        text = torch.tensor([rows[request] + tokens], device=device)
        for new in range(1, count + 1):
            if bool(torch.as_tensor(criteria(text[:, : text.shape[1] - count + new], None)).all()):
                return new
        return None

    return hook


def _out_of_time(seconds: float) -> StopWhen:
    start = time.monotonic()
    return lambda _request, _tokens, count: count if time.monotonic() - start > seconds else None
