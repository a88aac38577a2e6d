"""How tokens are chosen from the target's logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spec_ops._numbers import integer, is_integer, is_number, number, shown

_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_ZERO_TO_ONE = "a number in (0, 1]"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen from the target's logits. Names and meaning are those of vLLM and transformers.

    First the logits change, in this order, with temperature 0 too: `logit_bias`, `repetition_penalty`, `frequency_penalty` and
    `presence_penalty`, then what is forbidden. They are then divided by the temperature and cut by top-k, top-p and min-p.
    A drafted token counts as one of the output for those that follow it.

    Attributes:
        temperature: finite, at least 0; 0 decodes greedily.
        top_k: keep this many of the most likely tokens; 0 keeps all.
        top_p: in (0, 1]; keep the most likely tokens until their probabilities sum up to this; 1 keeps all.
        seed: in [-2**62, 2**62); a run repeats with it. Row `i` of a batch draws from a hash of the seed and `i`, whatever its
            neighbours and its batch bucket are. With None each run draws a seed from torch's default CPU generator, which
            `torch.manual_seed` sets; `GenerationResult.seed` tells which.
        min_p: in [0, 1]; keep tokens at least this probable, relative to the most likely one; 0 keeps all.
        repetition_penalty: above 0; a logit of a token of the prompt or the output is divided by it if positive, multiplied
            if negative (CTRL, arXiv:1909.05858). 1 is off.
        presence_penalty: in [-2, 2]; subtracted from the logits of the output's tokens. 0 is off.
        frequency_penalty: in [-2, 2]; subtracted from them once per occurrence. 0 is off.
        logit_bias: finite numbers that are added to the logits of token ids.
        min_new_tokens: at least 0; before as many tokens no stop token can be chosen.
        bad_words_ids: sequences of token ids that the text never completes: their last token is forbidden where prompt and
            output end with the ones before it.
        suppress_tokens: ids that are never chosen.

    Raises:
        ValueError: naming the attribute.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    min_new_tokens: int = 0
    bad_words_ids: Sequence[Sequence[int]] = ()
    suppress_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        def real(name: str, wanted: str, fits: Callable[[float], bool]) -> float:
            return number("SamplingParams", name, getattr(self, name), wanted, fits)

        checked: dict[str, Any] = {
            "temperature": real("temperature", "a finite number of at least 0", lambda t: math.isfinite(t) and t >= 0),
            "top_k": integer("SamplingParams", "top_k", self.top_k, 0, 2**31 - 1),
            "top_p": real("top_p", _ZERO_TO_ONE, lambda p: 0 < p <= 1),
            "min_p": real("min_p", "a number in [0, 1]", lambda p: 0 <= p <= 1),
            "repetition_penalty": real("repetition_penalty", "a finite number above 0", lambda r: _SMALLEST <= r <= _LARGEST),
            "min_new_tokens": integer("SamplingParams", "min_new_tokens", self.min_new_tokens, 0, 2**31 - 1),
            "suppress_tokens": _ids("suppress_tokens", self.suppress_tokens, "a list of token ids, () for none"),
            "bad_words_ids": _words(self.bad_words_ids),
            "logit_bias": _bias(self.logit_bias),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            checked[name] = real(name, "a number in [-2, 2]", lambda penalty: -2 <= penalty <= 2)
        if self.seed is not None:
            checked["seed"] = integer("SamplingParams", "seed", self.seed, -(2**62), 2**62 - 1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def drawn_seed(self) -> int:
        """The seed, or one from torch's default CPU generator."""
        return int(torch.randint(-(2**62), 2**62, (), device="cpu")) if self.seed is None else self.seed

    def check_ids(self, vocab_size: int, name: str = "sampling") -> None:
        """Raise a ValueError for token ids of `vocab_size` and above; `name` is what the caller calls these parameters."""
        for attribute, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("bad_words_ids", [token for word in self.bad_words_ids for token in word]),
            ("suppress_tokens", self.suppress_tokens),
        ):
            wrong = [token for token in ids if token >= vocab_size]
            if wrong:
                raise ValueError(f"generate: `{name}.{attribute}` must hold token ids in [0, {vocab_size}), got {shown(wrong)}")


def _ids(name: str, values: Any, wanted: str) -> tuple[int, ...]:
    if isinstance(values, (torch.Tensor, np.ndarray)) and values.ndim == 1:
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping, torch.Tensor, np.ndarray)):
        raise ValueError(f"SamplingParams: `{name}` must be {wanted}, got {shown(values)}")
    values = list(values)
    if wrong := [token for token in values if not is_integer(token) or token < 0]:
        raise ValueError(f"SamplingParams: `{name}` must be {wanted}, got {shown(wrong)}")
    return tuple(map(int, values))


def _words(values: Any) -> tuple[tuple[int, ...], ...]:
    wanted = "a list of non-empty lists of token ids, () for none"
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise ValueError(f"SamplingParams: `bad_words_ids` must be {wanted}, got {shown(values)}")
    words = tuple(_ids("bad_words_ids", word, wanted) for word in values)
    if not all(words):
        raise ValueError(f"SamplingParams: `bad_words_ids` must be {wanted}, got an empty one")
    return words


def _bias(values: Any) -> dict[int, float] | None:
    wanted = "a dict of token ids to finite numbers (ids that must never come go into `suppress_tokens`), or None"
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise ValueError(f"SamplingParams: `logit_bias` must be {wanted}, got {shown(values)}")
    for token, bias in values.items():
        if not is_integer(token) or token < 0 or not is_number(bias) or not abs(bias) <= _LARGEST:
            raise ValueError(f"SamplingParams: `logit_bias` must be {wanted}, got {shown(token)}: {shown(bias)}")
    return {int(token): float(bias) for token, bias in values.items()}
