"""What a user passes to a generator, checked and made plain: counts, token ids, prompts with their limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spec_ops.decoding.state import MAX_STOP_TOKENS
from spec_ops.models.target import PositionLimit


def is_integer(value: Any) -> bool:
    """An int of Python or numpy; no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def integer(where: str, name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int.

    Raises:
        ValueError: no integer (a float, bool or tensor), or not in `[low, high]`.
    """
    wanted = f"an int of at least {low}" if high is None else f"an int in [{low}, {high}]"
    if not is_integer(value) or value < low or (high is not None and value > high):
        raise ValueError(f"{where}: `{name}` must be {wanted}, got {_shown(value)}")
    return int(value)


@dataclass(frozen=True)
class Requests:
    """Checked arguments of one call. `limits[i]`: most new tokens of `prompts[i]`."""

    prompts: list[list[int]]
    limits: list[int]
    stop_tokens: list[int]

    def check_positions(self, limit: PositionLimit | None) -> None:
        """Raise a ValueError where a prompt and its new tokens, the last of which is never run, need positions past `limit`."""
        for i, (prompt, new) in enumerate(zip(self.prompts, self.limits, strict=True)):
            if limit is not None and len(prompt) + new - 1 > limit.count:
                raise ValueError(
                    f"generate: `prompts[{i}]` plus `max_new_tokens` must be at most {limit.count + 1} tokens: the target has "
                    f"{limit.count} positions; {limit.reason}; got {len(prompt)} + {new}"
                )


def check_requests(prompts: Any, max_new_tokens: Any, stop_tokens: Any, vocab: int, max_seq_len: int) -> Requests:
    """The arguments of `Generator.generate`, as lists of ints.

    Raises:
        ValueError: naming the argument.
    """
    rows = _rows(prompts)
    tokens = [_tokens(f"prompts[{i}]", row, vocab) for i, row in enumerate(rows)]
    if is_integer(max_new_tokens):
        given = [max_new_tokens] * len(tokens)
    else:
        given = _entries("max_new_tokens", max_new_tokens, "an int, or a list with one for each prompt")
        if len(given) != len(tokens):
            raise ValueError(f"generate: `max_new_tokens` must have one entry per prompt ({len(tokens)}), got {len(given)}")
    limits = [integer("generate", "max_new_tokens", limit, 1) for limit in given]
    for i, (prompt, limit) in enumerate(zip(tokens, limits, strict=True)):
        if len(prompt) + limit > max_seq_len:
            raise ValueError(
                f"generate: `prompts[{i}]` plus `max_new_tokens` must fit max_seq_len={max_seq_len}, "
                f"got {len(prompt)} + {limit}"
            )
    stops = _entries("stop_tokens", stop_tokens, "a list of token ids, () for none")
    if len(stops) > MAX_STOP_TOKENS:
        raise ValueError(f"generate: `stop_tokens` must hold at most {MAX_STOP_TOKENS} ids, got {len(stops)}")
    for token in stops:
        if not is_integer(token) or not 0 <= token < vocab:
            raise ValueError(f"generate: `stop_tokens` must hold token ids in [0, {vocab}), got {_shown(token)}")
    return Requests(tokens, limits, [int(token) for token in stops])


def _rows(prompts: Any) -> list[Any]:
    wanted = "generate: `prompts` must be a list of token id lists, one for each prompt"
    if isinstance(prompts, str):
        raise ValueError(f"{wanted}, got the text {_shown(prompts)}: encode it first, `[tokenizer.encode(text)]`")
    if isinstance(prompts, Mapping):
        raise ValueError(f"{wanted}, got a mapping with keys {list(prompts)}: pass its `input_ids`, without their padding")
    rows = _entries("prompts", prompts, "a list of token id lists, one for each prompt")
    if rows and is_integer(rows[0]):
        raise ValueError(f"{wanted}, got one flat list of ids: pass `[prompt]` for a single prompt")
    return rows


def _tokens(name: str, prompt: Any, vocab: int) -> list[int]:
    wanted = f"generate: `{name}` must hold token ids in [0, {vocab}), at least one"
    if isinstance(prompt, str):
        raise ValueError(f"{wanted}, got the text {_shown(prompt)}: encode it first, `tokenizer.encode(text)`")
    tokens = _entries(name, prompt, f"a list of token ids in [0, {vocab}), at least one")
    wrong = [token for token in tokens if not is_integer(token) or not 0 <= token < vocab]
    if wrong or not tokens:
        raise ValueError(f"{wanted}, got {_shown(wrong)}")
    return [int(token) for token in tokens]


def _entries(name: str, values: Any, wanted: str) -> list[Any]:
    """The entries of an iterable; rows of a matrix stay tensors or arrays."""
    if isinstance(values, (torch.Tensor, np.ndarray)):
        if values.ndim > 0:
            return values.tolist() if values.ndim == 1 else list(values)
    elif isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)):
        return list(values)
    raise ValueError(f"generate: `{name}` must be {wanted}, got {_shown(values)}")


def _shown(value: Any) -> str:
    """`value` for a message, cut to a line."""
    text = repr(value[:8] if isinstance(value, list) else value)
    return text if len(text) <= 80 else text[:77] + "..."
