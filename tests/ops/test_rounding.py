"""Rows rounded to float8: the reference on a CPU, against how `StoredTensor` rounds them, and what the ops refuse anywhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spec_ops.ops.rounding import (
    add_norm_round_rows_op,
    gated_round_rows_op,
    norm_round_rows_op,
    round_rows_op,
)
from tests.helpers.roundings import FP8, KINDS, how, measured, rows, times_steps

M, K = 5, 384
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(got: tuple[torch.Tensor, torch.Tensor], want: torch.Tensor, kind: str) -> None:
    """As a CPU rounds, which divides by 448 where a GPU multiplies: a step may have another last bit, and a number in the
    middle between two may go either way."""
    numbers, steps = got
    inputs, given = KINDS[kind]
    assert numbers.dtype == FP8
    assert numbers.is_contiguous()
    assert steps.dtype == torch.float32
    assert steps.shape == ((1, 1) if given else (want.shape[0], want.shape[1] // (inputs.group or want.shape[1])))
    assert steps.t().is_contiguous()
    restored = times_steps(numbers, steps, kind, want.dtype)
    assert ((restored - want).abs() > 2**-6 * want.abs()).double().mean() < 0.02
    torch.testing.assert_close(restored, want, rtol=0.13, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_as_stored_tensors_round(kind, dtype):
    x = rows(M, K, dtype)
    x[1], x[2, 128:256] = 0, 0
    check(round_rows_op(x, *how(kind, K, dtype)), KINDS[kind][0].rounded(x, measured(kind, dtype)), kind)


def norm(x: torch.Tensor, weight: torch.Tensor, roundings: int) -> torch.Tensor:
    wide = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-5)
    return wide.to(x.dtype) * weight if roundings == 2 else (wide * weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_after_activations_and_norms(kind, dtype):
    inputs, scale = KINDS[kind][0], measured(kind, dtype)
    x, y = rows(M, K, dtype, 1), rows(M, K, dtype, 2)
    weight = (torch.rand(K, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    called = how(kind, K, dtype)
    for name, fn in (("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", lambda v: F.gelu(v, approximate="tanh"))):
        check(gated_round_rows_op(x, y, name, *called), inputs.rounded(fn(x) * y, scale), kind)
    for roundings in (1, 2):
        want = inputs.rounded(norm(x + y, weight, roundings), scale)
        total, *got = add_norm_round_rows_op(x, y, weight, 1e-5, roundings, *called)
        assert torch.equal(total, x + y)
        check(tuple(got), want, kind)
        check(norm_round_rows_op(total, weight, 1e-5, roundings, *called), want, kind)


def test_a_norm_that_is_not_rounded_before():
    """Its steps are those of float32, as close as that is; rounded to 16 bits they would be a 256th off."""
    x, weight = rows(M, K, torch.bfloat16), rows(1, K, torch.bfloat16)[0]
    exact = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5) * weight.double()
    want = exact.abs().amax(1, keepdim=True) / 448
    steps = norm_round_rows_op(x, weight, 1e-5, 0, *how("rows", K, x.dtype))[1]
    torch.testing.assert_close(steps.double(), want, rtol=1e-6, atol=0)
    assert not torch.allclose(norm_round_rows_op(x, weight, 1e-5, 1, *how("rows", K, x.dtype))[1].double(), want, rtol=1e-5)


F32 = torch.float32
X = torch.randn(3, 256).bfloat16()


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((X[0], 256, F32, F32, 0.0, 0.0), ValueError, r"round_rows: rows must have two dimensions, got shape \(256,\)"),
        ((X, 100, F32, F32, 0.0, 0.0), ValueError, "round_rows: `columns` must divide the 256 of a row, got 100"),
        ((X, 0, F32, F32, 0.0, 0.0), ValueError, "round_rows: `columns` must divide the 256 of a row, got 0"),
        ((X, 256, torch.half, F32, 0.0, 0.0), TypeError, r"`step_dtype` must be torch.float32 or .*, got torch.float16"),
        ((X, 256, F32, torch.half, 0.0, 0.0), TypeError, r"`quotient_dtype` must be torch.float32 or .*, got torch.float16"),
        ((X, 256, F32, F32, 0.0, 0.0, torch.ones(2)), ValueError, r"`step` must be one number, got shape \(2,\)"),
    ],
)
def test_bad_input(args, error, message):
    with pytest.raises(error, match=message):
        round_rows_op(*args)
    with pytest.raises(error, match=message):
        round_rows_op(*(arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args))
