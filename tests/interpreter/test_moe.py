"""Mixtures of experts in Triton's interpreter, against the reference: routers in every form, products in every layout.

float16, since the interpreter truncates to bfloat16.
"""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.moe import grouped, route
from spec_ops.backends.triton.runtime.launch import recorded
from spec_ops.ops.reference import moe as reference
from tests.helpers.mixtures import FORMS, call, exact
from tests.interpreter.cases import sampled


def check_close(got: torch.Tensor, args: tuple, rounding: float) -> None:
    want = exact(args)
    assert got.dtype == args[0].dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("seed", range(12))
def test_routers(seed):
    args = sampled("route_experts", seed, None)
    ids, weights = route.route_experts(*args)
    wanted, wanted_weights = reference.route_experts(*args)
    assert torch.equal(ids, wanted), args
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-6, atol=1e-7)
    assert ids.is_contiguous()
    assert weights.is_contiguous()


def test_routers_with_ties_and_nan():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0], [nan, -1.0, nan, -inf, 0.0, nan], [0.0] * 6])
    for args in (("softmax", 1, 1), ("sigmoid", 3, 2), ("softmax", 2, 1)):
        for bias in (None, torch.zeros(6)):
            got = route.route_experts(logits, bias, 3, *args, True, 1.0)
            want = reference.route_experts(logits, bias, 3, *args, True, 1.0)
            assert torch.equal(got[0], want[0])
            torch.testing.assert_close(got[1], want[1], equal_nan=True)


@pytest.mark.parametrize("name", FORMS)
def test_grouped_products(name):
    """Odd sizes, dropped ids, several tiles of an expert."""
    for args in (
        call(FORMS[name], 5, 3, 7, 40, 27, dropped=0.3),
        call(FORMS[name], 40, 2, 3, 33, 20, torch.float16, routing="zipf"),
    ):
        check_close(grouped.grouped_experts(*args), args, 2e-3 if args[0].dtype == torch.float16 else 2e-6)


def test_grouped_products_of_many_rows():
    """Tiles of 64 and 128 rows."""
    for tokens in (70, 300):
        args = call(FORMS["Qwen3-MoE"], tokens, 2, 2, 24, 16, torch.float16, routing="identical")
        assert grouped.choose(2 * tokens, 2, torch.float16).block_m == (64 if tokens == 70 else 128)
        check_close(grouped.grouped_experts(*args), args, 2e-3)


def test_grouped_products_in_chunks(monkeypatch):
    """64 tokens at a time, the last ones fewer."""
    args = call(FORMS["gpt-oss"], 150, 2, 4, 24, 16, dropped=0.2)
    monkeypatch.setattr(grouped, "TEMPORARY", 1)
    with recorded() as launches:
        grouped.grouped_experts(*args)
    assert [launch.arguments["out"].shape[0] for launch in launches[2::3]] == [64, 64, 22]
    check_close(grouped.grouped_experts(*args), args, 2e-6)


@pytest.mark.parametrize("seed", range(12))
def test_grouped_products_in_every_layout(seed):
    """opcheck's samples: strided tensors, no tokens, no experts of a token."""
    args = sampled("moe_experts", seed, None)
    if args[0].dtype == torch.bfloat16:
        args = tuple(a.half() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in args)
    check_close(grouped.grouped_experts(*args), args, 4e-3 if args[0].dtype == torch.float16 else 1e-5)


def test_chunks_hold_at_least_64_tokens():
    random.seed(0)
    for _ in range(20):
        k, hidden, inner = random.randint(1, 16), random.randint(1, 8192), random.randint(1, 8192)
        tokens = grouped.chunk_tokens(k, hidden, inner, torch.bfloat16)
        assert tokens == 64 or tokens * k * (4 * hidden + 2 * inner) <= grouped.TEMPORARY
