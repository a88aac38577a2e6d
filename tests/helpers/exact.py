"""Oracles of the sampling tests. Exact cases use probabilities in 64ths and uniforms in 128ths, of which float32 holds every
sum, product and quotient exactly."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import torch
from hypothesis import settings

# Derandomized: the examples are a fixed function of the test, so a run repeats exactly. No deadline: first calls are slow.
FUZZ = settings(max_examples=60, deadline=None, derandomize=True)
ALMOST_ONE = 1 - 2.0**-24  # the largest float32 below 1, and the largest value torch.rand returns


def below(x: float) -> float:
    """The next float32 below `x`."""
    return float(np.nextafter(np.float32(x), np.float32(-1)))


def dyadic_row(rng: random.Random, vocab: int) -> list[Fraction]:
    cuts = sorted(rng.randrange(65) for _ in range(vocab - 1)) if rng.random() < 0.8 else [rng.choice([0, 64])] * (vocab - 1)
    return [Fraction(b - a, 64) for a, b in zip([0, *cuts], [*cuts, 64], strict=True)]


def invert_cdf(weights: list[Fraction], uniform: Fraction) -> int:
    running, level = Fraction(0), uniform * sum(weights)
    for token, weight in enumerate(weights):
        running += weight
        if running > level:
            return token
    raise AssertionError("the weights are all zero")


def uniform_rows(rng: random.Random, *shape: int):
    if not shape:
        return Fraction(rng.choice([0, 127, *range(128)]), 128)
    return [uniform_rows(rng, *shape[1:]) for _ in range(shape[0])]


def float_tensor(rows, device: str) -> torch.Tensor:
    return torch.from_numpy(np.array(rows).astype(np.float32)).to(device)


def filtered_probs(logits, temperature: float, top_k: int | None = None, top_p: float | None = None, min_p: float = 0.0):
    """`(probs, margin)` in float64, ties to the lower id; margin: how close a partial sum comes to `top_p`."""
    logits = np.asarray(logits, dtype=np.float64)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return np.eye(len(logits))[order[0]], math.inf
    weights = np.exp((logits - logits.max()) / temperature)
    probs = weights / weights.sum()
    if top_k is not None and top_k >= 1:
        probs[order[top_k:]] = 0
        probs /= probs.sum()
    margin = math.inf
    if top_p is not None and top_p < 1:  # 1 keeps all, rounding or not
        total, kept = 0.0, []
        for i in order:
            kept.append(i)
            total += probs[i]
            margin = min(margin, abs(total - top_p))
            if total >= top_p:
                break
        probs = np.where(np.isin(np.arange(len(probs)), kept), probs, 0)
        probs /= probs.sum()
    probs = np.where(probs >= min_p * probs.max(), probs, 0)
    probs /= probs.sum()
    return probs, margin
