"""How tokens are chosen, and the seeds of a batch."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

from spec_ops.decoding.arguments import integer


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep this many of the most likely tokens; 0 is off.
        top_p: keep the most likely tokens whose probability reaches this; 1 is off.
        seed: repeats a run, in [-2**62, 2**62). Row `i` of a batch draws from a hash of the seed and `i`, whatever its
            neighbours, the bucket and the group it runs in. None: each run draws a seed from torch's default CPU generator, so
            `torch.manual_seed` governs it; `GenerationResult.seed` says which it was.

    Raises:
        ValueError: naming the attribute.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise ValueError(f"SamplingParams: `{name}` must be a number, got {value!r}")
            object.__setattr__(self, name, float(value))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"SamplingParams: `temperature` must be finite and at least 0, got {self.temperature}")
        object.__setattr__(self, "top_k", integer("SamplingParams", "top_k", self.top_k, 0, 2**31 - 1))
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams: `top_p` must be in (0, 1], got {self.top_p}")
        if self.seed is not None:
            object.__setattr__(self, "seed", integer("SamplingParams", "seed", self.seed, -(2**62), 2**62 - 1))

    def drawn_seed(self) -> int:
        """The seed, or one from torch's default CPU generator."""
        return int(torch.randint(-(2**62), 2**62, (), device="cpu")) if self.seed is None else self.seed
