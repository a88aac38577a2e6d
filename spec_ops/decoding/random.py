"""Counter-based uniforms: a pure function of seed and counter, so that a run repeats whatever the batch, device or compiler.

SplitMix64 (Steele et al., OOPSLA 2014) in int64 arithmetic, which wraps around. A generator with hidden state could not be
replayed by a CUDA graph, or would let a request's tokens depend on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right; torch's `>>` keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def uniforms(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Uniforms in [0, 1) with 24 random bits, float32.

    Args:
        seeds: int64. They are hashed first, so that neighbouring seeds give unrelated streams.
        counters: int64, broadcast with `seeds`.
    """
    return _shift(_mix(_mix(seeds * _GAMMA + 1) + counters * _GAMMA), 40).to(torch.float32) * 2.0**-24


def row_seeds(seeds: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
    """What these rows of a batch draw from, `[len(rows)]` int64 on the CPU, for the seed of each.

    They are hashed, because with `seed + row` the second row of one seed would equal the first row of the next seed.
    """
    numbers = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return _mix(_mix(torch.tensor(seeds, device="cpu") * _GAMMA + 1) + (numbers + 1) * _GAMMA)
