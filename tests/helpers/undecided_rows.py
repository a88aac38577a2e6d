"""Rows of bfloat16 logits that counts of values do not decide (`triton/sampling/counted.py`)."""

from __future__ import annotations

import math

import torch

HOT = 100.0  # temperature of row 7


def undecided_rows(logits: torch.Tensor) -> torch.Tensor:
    """`logits [n, vocab]`, n at least 9, with other rows 0 to 8: for top-p 0.5 at temperature 1, but `HOT` of row 7.

    There a bin of several values matters: the largest, the smallest, which weigh differently beside a small top, and what a
    high temperature leaves of a mask.
    """
    logits, ids = logits.clone(), torch.arange(logits.shape[-1])
    some = 2 * len(ids) // 3
    logits[0, 7] = math.nan
    logits.view(torch.int16)[1, 7] = 0xFFC0 - 0x10000  # a NaN with a sign, which no conversion keeps
    logits[2, 9] = math.inf
    logits[3] = -math.inf
    logits[4, 11] = 300.0
    logits[5] = torch.where(ids % 16 == 0, 2.0, 0.0)  # the boundary lies among zeros
    logits[6] = torch.linspace(-(2.0**-26), 2.0**-26, len(ids))
    logits[7, ::2] = -400.0
    logits[8] = torch.where(ids < some, 2.0**-8, -(2.0**-8))
    logits[8, some : some + 10], logits[8, 7] = 0.0, 2.0**-7
    return logits
