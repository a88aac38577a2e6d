"""Rows rounded to float8 (`linear/rounding.py`), in Triton's interpreter: the numbers and steps of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spec_ops.backends.triton.linear import rounding
from spec_ops.ops.reference import rounding as reference
from tests.helpers.roundings import FP8, KINDS, how, rows

F32 = torch.float32
DTYPES = (torch.float16, torch.bfloat16)
# Rows that no tile divides, of more groups than a program has, and so many that one has more groups.
SIZES = ((1, 128), (3, 100), (5, 640), (2, 2304), (18, 256))


@pytest.fixture(autouse=True)
def conversions_round(monkeypatch):
    """The interpreter cuts bits off where a GPU rounds, and loses subnormal numbers of bfloat16."""
    from triton.language import core
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    rounded = {core.float8e4nv: (FP8, torch.uint8, np.uint8), core.bfloat16: (torch.bfloat16, torch.uint16, np.uint16)}

    def convert_rounded(given, source, to, mode):
        if source == core.bfloat16 and to == core.float32:
            return given.astype(np.uint32) << 16
        if source != core.float32 or to not in rounded:
            return convert(given, source, to, mode)
        dtype, bits, made = rounded[to]
        values = torch.from_numpy(np.ascontiguousarray(given))
        return values.to(dtype).view(bits).numpy().astype(made).reshape(given.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert_rounded)


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], part: float = 0.0) -> None:
    for ours, other in zip(got, want, strict=True):
        assert ours.dtype == other.dtype
        assert ours.shape == other.shape
        assert ours.stride() == other.stride() or ours.numel() < 2
        ours, other = ours.float(), other.float()
        assert torch.equal(ours.isnan(), other.isnan())
        assert int(((ours != other) & ~ours.isnan()).sum()) <= part * ours.numel()
        torch.testing.assert_close(ours, other, rtol=0.13, atol=2**-8, equal_nan=True)


def kinds_of(k: int) -> list[str]:
    return [kind for kind in KINDS if k % (KINDS[kind][0].group or 1) == 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), SIZES)
def test_bits_of_the_reference(m, k, dtype):
    for kind in kinds_of(k):
        x = torch.cat([rows(m, k, dtype), rows(m, 8, dtype)], 1)[:, :k]
        x[-1, :128] = 0
        same(rounding.round_rows(x, *how(kind, k, dtype)), reference.round_rows(x, *how(kind, k, dtype)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_and_small_and_large_numbers(kind):
    x = rows(7, 512, torch.bfloat16)
    x[0], x[1, :128], x[2], x[3, 5], x[4, 130] = 0, 0, 1e-39, float("nan"), float("inf")
    x[5, :3] = torch.tensor([1e38, -3e38, 2e38])
    same(rounding.round_rows(x, *how(kind, 512, x.dtype)), reference.round_rows(x, *how(kind, 512, x.dtype)))


@pytest.mark.parametrize("least", [0.0, 0.01])
@pytest.mark.parametrize("dtypes", [(F32, F32), (torch.float16, F32), (F32, torch.float16)])
def test_other_roundings(dtypes, least):
    """The dtypes of steps and quotients apart; a least step and one in place of 0."""
    x = rows(4, 256, torch.float16)
    x[0], x[1, :128] = 0, 0
    for columns in (128, 256):
        args = (x, columns, *dtypes, least, 0.25)
        same(rounding.round_rows(*args), reference.round_rows(*args))


def test_a_given_step_is_rounded_to_its_dtype():
    x, step = rows(4, 256, torch.float16), torch.tensor([0.01073])
    for dtype in (torch.float16, F32):
        args = (x, 256, dtype, F32, 0.0, 0.0, step)
        same(rounding.round_rows(*args), reference.round_rows(*args))
        assert rounding.round_rows(*args)[1].item() == step.to(dtype).item()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("m", "k"), SIZES)
def test_after_an_activation(m, k, activation):
    """Halves of one product and two products; but for activations whose last bit decides."""
    both = rows(m, 2 * k, torch.float16)
    for gate, up in (both.chunk(2, 1), [half.contiguous() for half in both.chunk(2, 1)]):
        for kind in kinds_of(k):
            args = (gate, up, activation, *how(kind, k, torch.float16))
            same(rounding.gated_round_rows(*args), reference.gated_round_rows(*args), 5e-3)


@pytest.mark.parametrize("roundings", [0, 1, 2])
@pytest.mark.parametrize(("m", "k"), SIZES)
def test_after_a_norm(m, k, roundings):
    x, residual = rows(m, 2 * k, torch.float16).chunk(2, 1)
    weight = (torch.rand(k) + 0.5).half()
    for kind in kinds_of(k):
        called = (weight, 1e-3, roundings, *how(kind, k, torch.float16))
        total, *got = rounding.add_norm_round_rows(x, residual, *called)
        assert torch.equal(total, x + residual)
        _, *want = reference.add_norm_round_rows(x, residual, *called)
        same(tuple(got[:1]), tuple(want[:1]), 0.02)
        # The sum of squares has another order: a greatest magnitude of 16 bits may be the next one, one of float32 mostly is.
        torch.testing.assert_close(got[1], want[1], rtol=1e-6 if roundings == 0 else 2**-10, atol=0)
        assert roundings == 0 or int((got[1] != want[1]).sum()) <= 1 + 0.1 * got[1].numel()
        alone = rounding.norm_round_rows(total, *called)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(alone, got, strict=True))


def test_what_no_kernel_takes():
    x = rows(2, 256, torch.float16)
    f32 = (torch.float32, torch.float32, 0.0, 0.0)
    with pytest.raises(TypeError, match=r"round_rows: rows must be of torch.bfloat16 or .* on CUDA, got torch.float32"):
        rounding.round_rows(x.float(), 256, *f32)
    with pytest.raises(ValueError, match="`columns` must be 128 or the 256 of a row on CUDA, got 64"):
        rounding.round_rows(x, 64, *f32)
    with pytest.raises(ValueError, match=r"gated_round_rows: `up` must have contiguous columns, got strides \(1, 2\)"):
        rounding.gated_round_rows(x, x.t().contiguous().t(), "silu", 256, *f32)
    long = torch.zeros(1, 32896, dtype=torch.float16)
    with pytest.raises(ValueError, match="norm_round_rows: rows must have at most 32768 columns, got 32896"):
        rounding.norm_round_rows(long, long[0], 1e-5, 1, 128, *f32)
    assert rounding.round_rows(long, 128, *f32)[1].shape == (1, 257)


def test_no_rows():
    for kind in KINDS:
        args = (torch.empty(0, 256, dtype=torch.float16), *how(kind, 256, torch.float16))
        same(rounding.round_rows(*args), reference.round_rows(*args))
