"""How tokens are chosen from the target's logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from spec_ops._numbers import integer, number


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen from the target's logits: divided by the temperature, then top-k, then top-p.

    Attributes:
        temperature: finite, at least 0; 0 decodes greedily.
        top_k: keep this many of the most likely tokens; 0 keeps all.
        top_p: in (0, 1]; keep the most likely tokens until their probabilities sum up to this; 1 keeps all.
        seed: in [-2**62, 2**62); a run repeats with it. Row `i` of a batch draws from a hash of the seed and `i`, whatever its
            neighbours and its batch bucket are. With None each run draws a seed from torch's default CPU generator, which
            `torch.manual_seed` sets; `GenerationResult.seed` tells which.

    Raises:
        ValueError: naming the attribute.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        checked = {
            "temperature": number("SamplingParams", "temperature", self.temperature, "a finite number of at least 0", _is_warm),
            "top_k": integer("SamplingParams", "top_k", self.top_k, 0, 2**31 - 1),
            "top_p": number("SamplingParams", "top_p", self.top_p, "a number in (0, 1]", lambda value: 0 < value <= 1),
        }
        if self.seed is not None:
            checked["seed"] = integer("SamplingParams", "seed", self.seed, -(2**62), 2**62 - 1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def drawn_seed(self) -> int:
        """The seed, or one from torch's default CPU generator."""
        return int(torch.randint(-(2**62), 2**62, (), device="cpu")) if self.seed is None else self.seed


def _is_warm(temperature: float) -> bool:
    return math.isfinite(temperature) and temperature >= 0
