"""Counter-based uniforms: a pure function of (seed, counter), so a run repeats whatever the batch, device or compiler.

SplitMix64 (Steele et al., OOPSLA 2014) in int64 arithmetic, which wraps. A generator with hidden state would either break CUDA
graphs' replay or tie a request's tokens to its neighbours in the batch.
"""

from __future__ import annotations

import torch


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right: torch's `>>` keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def uniforms(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Float32 uniforms in [0, 1) with 24 random bits.

    Args:
        seeds, counters: int64, broadcast together. Seeds are hashed first, so neighbouring seeds give unrelated streams.
    """
    return _shift(_mix(_mix(seeds * _GAMMA + 1) + counters * _GAMMA), 40).to(torch.float32) * 2.0**-24


def row_seeds(seed: int, rows: range) -> torch.Tensor:
    """`[len(rows)]` int64 on the CPU: the seeds of these rows of a batch.

    Hashed: with seeds of `seed + row`, row 1 of one run would be row 0 of the next seed's.
    """
    numbers = torch.arange(rows.start, rows.stop, device="cpu")
    return _mix(_mix(torch.tensor(seed, device="cpu") * _GAMMA + 1) + (numbers + 1) * _GAMMA)
