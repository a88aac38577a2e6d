"""Where running sums of a list reach an amount, in Triton's interpreter, against a loop."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

import triton
import triton.language as tl

from spec_ops.backends.triton.sampling.reach import first_reaching
from spec_ops.backends.triton.sampling.shared import MANY_WORDS
from spec_ops.backends.triton.sampling.weights import BEYOND

N = 256


@triton.jit
def reaching_kernel(words, order, amounts, there, limit, out, N: tl.constexpr):
    i = tl.arange(0, N)
    ordered = tl.load(order + i)
    listed = tl.load(there + i) != 0
    tl.store(out, first_reaching(words, ordered, (ordered >> 4).to(tl.int32), tl.load(amounts + i), listed, tl.load(limit)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("listed", [0, 1, 7, N])
def test_the_first_that_reaches_an_amount(listed):
    """And an order beyond all, where all together do not reach it: that must end too."""
    generator = torch.Generator().manual_seed(listed)
    order = torch.randperm(4096, generator=generator)[:N]
    amounts = torch.randint(1, 1 << 44, (N,), generator=generator)
    there = torch.zeros(N, dtype=torch.int32)
    there[torch.randperm(N, generator=generator)[:listed]] = 1
    kept = sorted((int(order[i]), int(amounts[i])) for i in range(N) if there[i])
    total = sum(amount for _, amount in kept)
    for limit in {1, total // 2 + 1, total, total + 1}:
        words, out = torch.zeros(int(MANY_WORDS), dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        reaching_kernel[(1,)](words, order, amounts, there, torch.tensor([limit]), out, N)
        sums = [(key, sum(amount for _, amount in kept[: n + 1])) for n, (key, _) in enumerate(kept)]
        assert int(out) == next((key for key, running in sums if running >= limit), int(BEYOND))
