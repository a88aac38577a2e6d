"""A mixture between the parts of RMS norms, in Triton's interpreter: against float64, and next to norms of their own kernels.

float16, since the interpreter truncates to bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.moe import experts, few
from spec_ops.backends.triton.runtime.launch import recorded
from spec_ops.ops.reference import moe as reference
from tests.helpers.mixtures import FORMS, PUBLISHED, call, exact, stored_call

EPS = 1e-5


def tensors(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Squares of rows that are larger than the call's by a power of 2, the residual, the weight of the norm after it."""
    (tokens, hidden), g = args[0].shape, torch.Generator().manual_seed(args[0].shape[0])
    padded = torch.nn.functional.pad(args[0].float(), (0, -hidden % 16))
    squares = padded.unflatten(1, (-1, 16)).square().sum(2) * 4.0 ** torch.arange(tokens)[:, None].remainder(3)
    return squares, torch.randn(tokens, hidden, generator=g).half(), (torch.rand(hidden, generator=g) + 0.5).half()


def scaled(args: tuple[Any, ...], squares: torch.Tensor) -> tuple[Any, ...]:
    """The call in float64 whose rows are divided by the root of their mean squares."""
    x = args[0].double()
    return x * torch.rsqrt(squares.double().sum(1, keepdim=True) / x.shape[1] + EPS), *args[1:]


# Every number of tokens with two of the three forms.
SIZES = {"Qwen3-MoE": [1, 16, 64], "gpt-oss": [1, 7, 23, 64], "Nemotron-H": [7, 16, 23]}


@pytest.mark.parametrize(("name", "tokens"), [(name, tokens) for name, sizes in SIZES.items() for tokens in sizes])
def test_like_float64(name, tokens):
    """Columns that neither blocks nor sums divide, tokens without experts; 64 rows read their sums after the product."""
    hidden, inner = (136, 72) if tokens in (1, 23) else (1088, 64) if tokens == 64 else (320, 128)
    args = call(FORMS[name], tokens, 3, 9, hidden, inner, torch.float16, routing="zipf", dropped=0.2)
    squares, residual, weight = tensors(args)
    want = exact(scaled(args, squares))
    got = experts.scaled_moe_experts(*args, None, None, squares, EPS)
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)
    y, z, sums = experts.add_moe_experts(*args, None, None, squares, EPS, residual, weight)
    assert torch.equal(y, got + residual)
    assert torch.equal(z, (y.float() * weight.float()).half())
    padded = torch.nn.functional.pad(y.float(), (0, -hidden % 16))
    torch.testing.assert_close(sums, padded.unflatten(1, (-1, 16)).square().sum(2), rtol=1e-5, atol=1e-6)
    alone = experts.add_moe_experts(*args, None, None, None, 0.0, residual, weight)[0]
    assert torch.equal(alone, experts.moe_experts(*args) + residual)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_shares_of_the_inner_dimension(splits):
    args = call(FORMS["Qwen3-MoE"], 5, 2, 3, 40, 200, torch.float16)
    squares, residual, weight = tensors(args)
    first, second = few.choose(few.Sizes(5, 2, 3, 40, 200, True, False, False), 4, 90)
    norms = few.Norms(squares, EPS, residual, weight)
    got = few.few_between_norms(*args, norms=norms, configs=(first, replace(second, splits=splits)))
    want = reference.add_moe_experts(*args, None, None, squares, EPS, residual, weight)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(("tokens", "hidden"), [(3, 320), (13, 2112), (20, 1920), (40, 128)])
def test_numbers_of_mxfp4_that_are_scaled(tokens, hidden):
    """With sums of squares that registers hold, or that are read piece by piece; with more than 16 tokens the residual is read
    last."""
    args = stored_call(PUBLISHED, "MXFP4", tokens, 2, 3, hidden, 64, torch.float16)
    squares, residual, weight = tensors(args)
    configs = few.choose(few.Sizes(tokens, 2, 3, hidden, 64, True, True, False, 4, True), 4, 90)
    norms = few.Norms(squares, EPS, residual, weight)
    want = exact(scaled(args, squares))
    alone = few.few_between_norms(*args, norms=few.Norms(squares, EPS), configs=configs)[0]
    torch.testing.assert_close(alone.double(), want, rtol=2e-3, atol=2e-3)
    y, z, sums = few.few_between_norms(*args, norms=norms, configs=configs)
    assert torch.equal(y, alone + residual)
    assert torch.equal(z, (y.float() * weight.float()).half())
    torch.testing.assert_close(sums, y.float().unflatten(1, (-1, 16)).square().sum(2), rtol=1e-5, atol=1e-6)


def test_the_error_is_that_of_norms_of_their_own_kernels():
    args = call(FORMS["Qwen3-MoE"], 16, 3, 9, 320, 128, torch.float16)
    squares = args[0].float().unflatten(1, (-1, 16)).square().sum(2)
    want = exact(scaled(args, squares))
    apart = experts.moe_experts((scaled(args, squares)[0]).half(), *args[1:])
    fused = experts.scaled_moe_experts(*args, None, None, squares, EPS)
    errors = [(got.double() - want).square().mean().sqrt() for got in (fused, apart)]
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("tokens", [3, 65])
def test_any_call_is_taken(tokens):
    """More tokens, and columns that tensor memory access does not read: by the grouped kernels, which know no norms."""
    args = call(FORMS["gpt-oss"], tokens, 2, 4, 64 if tokens == 65 else 60, 64, torch.float16)
    squares, residual, weight = tensors(args)
    with recorded() as launches:
        experts.moe_experts(*args)
    assert launches[1].kernel.__name__ == "grouped_gate_up_kernel"
    for sums in (squares, None):
        got = experts.add_moe_experts(*args, None, None, sums, EPS, residual, weight)
        want = reference.add_moe_experts(*args, None, None, sums, EPS, residual, weight)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=4e-3, atol=4e-3)
    got = experts.scaled_moe_experts(*args, None, None, squares, EPS)
    torch.testing.assert_close(got.double(), exact(scaled(args, squares)), rtol=4e-3, atol=4e-3)
