"""Supports and draws in Python numbers: a sort of floats, and sums of integers."""

from __future__ import annotations

import math

import numpy as np
import torch

ONE = 2**44  # weight of the most likely token
NOTHING = [0, -1, 0]  # support of a row that is no distribution
MASKED = [0, -2, 0]  # of one whose every token is masked


def weights_of(row: torch.Tensor, temperature: float) -> list[int]:
    """Of one row of logits, before truncation. The exponential is torch's, whose last bit is no part of the contract."""
    values = row.float().numpy()
    if temperature == 0:
        return [ONE * (x == int(values.argmax())) for x in range(len(values))]
    with np.errstate(over="ignore", invalid="ignore"):
        argument = (values - values.max()) / np.float32(temperature)
    argument = np.where(values == -np.inf, np.float32(-np.inf), argument)
    return [int(math.ldexp(w, 44)) for w in torch.from_numpy(argument).exp().tolist()]


def is_distribution(row: torch.Tensor) -> bool:
    values = row.tolist()
    return not any(map(math.isnan, values)) and math.isfinite(max(values))


def support_of(row: torch.Tensor, temperature: float, top_k=None, top_p=None, min_p=None) -> list[int]:
    row = row.float()
    if not is_distribution(row):
        return MASKED if row.max() == -math.inf else NOTHING
    order = sorted(range(len(row)), key=lambda x: (-float(row[x]), x))
    if temperature == 0:
        return [order[0], order[0], ONE]
    weights, kept, cut = weights_of(row, temperature), order, False
    if top_k is not None and 1 <= top_k < len(row):
        kept, cut = kept[:top_k], True
    if top_p is not None and top_p < 1:
        wanted = max(1, math.ceil(float(top_p) * float(sum(weights[x] for x in kept))))
        count, running = 0, 0
        while running < wanted:
            running += weights[kept[count]]
            count += 1
        kept, cut = kept[:count], True
    if min_p is not None and min_p > 0:
        least = math.ceil(float(min_p) * ONE)
        kept, cut = [kept[0], *(x for x in kept[1:] if weights[x] >= least)], True
    return [order[0], kept[-1] if cut else -1, sum(weights[x] for x in kept)]


def kept_weights_of(row: torch.Tensor, temperature: float, support: list[int]) -> list[int]:
    """Of all tokens, 0 for those that the support cuts."""
    row, last = row.float(), support[1]
    if not support[2]:
        return [0] * len(row)
    kept = [last < 0 or row[x] > row[last] or (row[x] == row[last] and x <= last) for x in range(len(row))]
    return [weight if keep else 0 for weight, keep in zip(weights_of(row, temperature), kept, strict=True)]


def token_of(row: torch.Tensor, temperature: float, support: list[int], uniform: float) -> int:
    if not support[2]:
        return -1
    level, running = support[2] * int(uniform * 2**24) >> 24, 0
    for x, weight in enumerate(kept_weights_of(row, temperature, support)):
        running += weight
        if running > level:
            return x
    raise AssertionError("the kept weights sum to less than the total")
