"""What `generate` does to logits before a token is chosen, as one traceable function: the `logits_processor` of a round.

A `Step` is what one logits processor of transformers computes, on rows of any lengths. Its numbers are in buffers, so that
a compiled round takes another call's numbers without being traced again: a `Pipeline` is reused for steps of the same kinds and
shapes, which `key` tells.

Lengths count as in `generate`: steps get the tokens emitted so far. Contents are a row's own: padding is no token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn


class Rows(NamedTuple):
    """What was said before each row of logits.

    Attributes:
        history: `[rows, L]` int64, prompt and output without padding, valid up to `lengths`.
        lengths: `[rows]` int64.
        prompt_lens: `[rows]` int64, how many of them are the prompt.
    """

    history: torch.Tensor
    lengths: torch.Tensor
    prompt_lens: torch.Tensor

    @property
    def new(self) -> torch.Tensor:
        """`[rows]` int64, tokens emitted so far."""
        return self.lengths - self.prompt_lens

    @property
    def position(self) -> torch.Tensor:
        """`[1, L]` int64, of each token of `history`."""
        return torch.arange(self.history.shape[1], device=self.history.device)[None]

    def newest(self, count: int) -> torch.Tensor:
        """`[rows, count]` int64: the last tokens, newest first, and -1 before the first one."""
        place = self.lengths[:, None] - 1 - torch.arange(count, device=self.history.device)
        return torch.where(place >= 0, self.history.gather(1, place.clamp(0, self.history.shape[1] - 1)), -1)

    def occurring(self, counted: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """`[rows, vocab_size]` bool: the tokens of `history` where `counted [rows, L]` is true."""
        seen = torch.zeros(len(self.history), vocab_size + 1, dtype=torch.bool, device=self.history.device)
        return seen.scatter(1, torch.where(counted, self.history, vocab_size).clamp(0, vocab_size), True)[:, :vocab_size]


class Step(nn.Module):
    """One change of logits.

    Args:
        values: its numbers and tables, which become buffers.
    """

    def __init__(self, **values: torch.Tensor | float) -> None:
        super().__init__()
        for name, value in values.items():
            value = value if isinstance(value, torch.Tensor) else scalar(value)
            self.register_buffer(name, value, persistent=False)

    @property
    def key(self) -> Hashable:
        """Steps of equal keys differ by the contents of their buffers alone."""
        return type(self), *((name, tuple(buffer.shape), buffer.dtype) for name, buffer in self.named_buffers())

    def load(self, other: Step) -> None:
        """Take the numbers of `other`, whose key is the same."""
        for mine, theirs in zip(self.buffers(), other.buffers(), strict=True):
            mine.copy_(theirs)

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        """`scores [rows, V]` float32 after the step."""
        raise NotImplementedError


def scalar(value: float) -> torch.Tensor:
    """An int64 or float32 scalar on the CPU."""
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float32, device="cpu")


class Truncation(Step):
    """Cuts off what a row of sampling filters cuts off the logits divided by a temperature. What is left keeps its logit: the
    round divides by the temperature itself, for drafts too.

    Args:
        temperature: above 0.
        filters: in order.
    """

    temperature: torch.Tensor

    def __init__(self, temperature: float, filters: Sequence[Step]) -> None:
        super().__init__(temperature=float(temperature))
        self.filters = nn.ModuleList(filters)

    @property
    def key(self) -> Hashable:
        return type(self), *(step.key for step in self._steps)

    @property
    def _steps(self) -> list[Any]:
        return list(self.filters)

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        filtered = scores / self.temperature
        for step in self.filters:
            filtered = step(filtered, rows)
        return scores.masked_fill(filtered == -torch.inf, -torch.inf)


class Pipeline(nn.Module):
    """Steps one after the other, as the `logits_processor` of `spec_ops.decoding.Generator.generate`.

    Args:
        steps: on the CPU; the pipeline takes them over.
        device: of the target.
    """

    def __init__(self, steps: Sequence[Step], device: torch.device) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self.to(device)
        for buffer in self.buffers():
            torch._dynamo.mark_static_address(buffer)

    def load(self, steps: Sequence[Step]) -> None:
        """Take the numbers of `steps`, which have the same keys."""
        for mine, theirs in zip(self.steps, steps, strict=True):
            cast(Step, mine).load(theirs)

    def forward(
        self, logits: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor, prompt_lens: torch.Tensor
    ) -> torch.Tensor:
        """`logits [rows, V]` float32 after all steps; see `Rows` for the others."""
        rows = Rows(history, lengths, prompt_lens)
        for step in self.steps:
            logits = step(logits, rows)
        return logits
