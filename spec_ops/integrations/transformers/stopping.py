"""What ends a row besides end tokens and limits: stop strings, time, and stopping criteria of transformers.

Criteria that read a GPU's tensors would wait for the round that is under way, were they on its stream. They run on a stream of
their own, so that the host handles one round's tokens while the device computes the next. A criterion must therefore not read
GPU tensors that a callback writes: nothing orders the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from spec_ops.decoding.batch import StopWhen
from spec_ops.integrations.transformers.prompts import Prompts
from spec_ops.integrations.transformers.settings import GenerationSettings, end_tokens

Criterion = StoppingCriteria | Callable[..., Any]


def replace_settings(
    settings: GenerationSettings, criteria: Sequence[Criterion], length: int, vocab_size: int
) -> tuple[GenerationSettings, list[Criterion]]:
    """Let criteria take the place of settings: as in `generate`, a criterion of the kind that a setting makes comes first.

    Args:
        settings: of the call.
        criteria: of the call.
        length: of the input, padding included.
        vocab_size: of the target.

    Returns:
        The settings without those that were replaced, and the criteria that are left to be called.

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
            # It is asked after every token, so that there is always one.
            settings = replace(settings, max_new_tokens=max(1, criterion.max_length - length))
        elif type(criterion) is EosTokenCriteria:
            settings = replace(settings, stop_tokens=end_tokens(criterion.eos_token_id, vocab_size, "stopping_criteria"))
        else:
            if type(criterion) is MaxTimeCriteria:
                settings = replace(settings, max_time=None)
            elif type(criterion) is StopStringCriteria:
                settings = replace(settings, stop_strings=[])
            left.append(criterion)
    return settings, left


def stop_when(settings: GenerationSettings, criteria: Sequence[Criterion], tokenizer: Any, prompts: Prompts) -> StopWhen | None:
    """The `stop_when` of `Generator.generate` for `settings` and `criteria`; None if there is nothing to ask.

    The time of `max_time` begins with this call.
    """
    hooks: list[StopWhen] = []
    if settings.stop_strings:
        if tokenizer is None:
            raise ValueError("generate: `stop_strings` needs `tokenizer`, got None")
        # Without padding: a string may begin in the prompt.
        strings = StoppingCriteriaList([StopStringCriteria(tokenizer, settings.stop_strings)])
        hooks.append(_after_each_token(strings, prompts.rows, torch.device("cpu")))
    if criteria:
        # With padding and on the device of the returned sequences: criteria may count from the input's length, and compare with
        # tensors of their own.
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
    side = _SideStream(device)

    def hook(request: int, tokens: list[int], count: int) -> int | None:
        with side.current():
            text = torch.tensor([rows[request] + tokens], device=device)
            for new in range(1, count + 1):
                if bool(torch.as_tensor(criteria(text[:, : text.shape[1] - count + new], None)).all()):
                    return new
        return None

    return hook


class _SideStream:
    """A CUDA stream of its own, which sees everything that the current stream was given before. On the CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current stream. What the body leaves unread is done before the caller's stream goes on."""
        if self.stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self.stream.device)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:  # also of a criterion that raised: its kernels may still read what the caller then frees
            outer.wait_stream(self.stream)


def _out_of_time(seconds: float) -> StopWhen:
    start = time.monotonic()
    return lambda _request, _tokens, count: count if time.monotonic() - start > seconds else None
