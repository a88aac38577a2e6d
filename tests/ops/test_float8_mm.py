"""`float8_mm` on a CPU, and what it refuses anywhere; `tests/gpu/test_hopper_float8.py` has its kernel."""

from __future__ import annotations

import pytest
import torch

from spec_ops.ops.linear import float8_mm_op

F8, BF16 = torch.float8_e4m3fn, torch.bfloat16
M, N, K = 5, 300, 384


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)) + 0.5


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(F8)


def spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What multiplies each number: entry `[i, j]` is that of its row, its block of 128, or all."""
    i, j = torch.arange(rows), torch.arange(columns)
    i = i if scale.shape[0] == rows else i // 128
    j = j // 128 if scale.shape[1] > 1 else torch.zeros_like(j)
    return scale.double()[i][:, j]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("of_weight", [(1, 1), (N, 1), (3, 3)])
@pytest.mark.parametrize("of_rows", [(1, 1), (M, 1), (M, 3)])
def test_against_float64(of_rows, of_weight, dtype):
    x, weight, bias = numbers(M, K), numbers(N, K), rand(N)
    x_scale, scale = rand(*of_rows[::-1]).t(), rand(*of_weight, seed=1)
    given = [t.double() * (s.double() if s.numel() == 1 else spread(s, *t.shape)) for t, s in ((x, x_scale), (weight, scale))]
    for b in (None, bias, bias.to(BF16)):
        want = given[0] @ given[1].t() + (0 if b is None else b.double())
        got = float8_mm_op(x, x_scale, weight, scale, b, dtype)
        assert got.dtype == dtype
        assert got.is_contiguous()
        # Half a step of the dtype, and sums in float32 of numbers of about 1: 2^-24 of each of 384.
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps / 2, atol=2e-4)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_scales_of_16_bits(dtype):
    x, weight, x_scale, scale = numbers(M, K), numbers(N, K), rand(M, 3).to(dtype), rand(3, 3).to(dtype)
    got = float8_mm_op(x, x_scale, weight, scale, None, torch.float32)
    assert torch.equal(got, float8_mm_op(x, x_scale.float(), weight, scale.float(), None, torch.float32))


@pytest.mark.parametrize(("m", "n"), [(0, N), (M, 0), (1, 1)])
def test_small(m, n):
    x_scale = rand(m, 3)
    got = float8_mm_op(numbers(m, K), x_scale, numbers(n, K), rand(1, 1), None, BF16)
    assert got.shape == (m, n)


ROWS, WEIGHT = numbers(M, K), numbers(N, K)
ONE = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"x": ROWS.bfloat16()}, TypeError, "`x` must be of torch.float8_e4m3fn, got torch.bfloat16"),
        ({"weight": WEIGHT.to(torch.float8_e5m2)}, TypeError, "`weight` must be of torch.float8_e4m3fn, got torch.float8_e5m2"),
        ({"x": ROWS[0]}, ValueError, r"`x` must have two dimensions, got shape \(384,\)"),
        ({"dtype": torch.float64}, TypeError, "`dtype` must be one of torch.bfloat16, torch.float16, torch.float32, got "),
        ({"x_scale": ONE.double()}, TypeError, "`x_scale` must be of float32, bfloat16 or float16, got torch.float64"),
        ({"scale": ONE.double()}, TypeError, "`scale` must be of float32, bfloat16 or float16, got torch.float64"),
        ({"x": ROWS[:, :256]}, ValueError, r"`x` must have the 384 columns of `weight`, got shape \(5, 256\)"),
        ({"x_scale": torch.ones(5, 2)}, ValueError, r"`x_scale` must be \[1, 1\], \[5, 1\] or \[5, 3\], got shape \(5, 2\)"),
        ({"x_scale": torch.ones(5)}, ValueError, r"`x_scale` must be .*, got shape \(5,\)"),
        ({"x_scale": torch.ones(1, 3)}, ValueError, r"`x_scale` must be .*, got shape \(1, 3\)"),
        ({"scale": torch.ones(300, 3)}, ValueError, r"`scale` must be \[1, 1\], \[300, 1\], or \[3, 3\] for .* \(300, 3\)"),
        ({"scale": torch.ones(2, 3)}, ValueError, r"`scale` of a weight 300 x 384 of float8 must be .*, got shape \(2, 3\)"),
        ({"bias": torch.ones(5)}, ValueError, r"`bias` must have shape \(300,\), got \(5,\)"),
        (
            {"x": ROWS[:, :320], "weight": WEIGHT[:, :320], "x_scale": torch.ones(5, 3)},
            ValueError,
            r"`x_scale` must be \[1, 1\], \[5, 1\], got shape \(5, 3\)",
        ),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    """While it is traced, too."""
    given = {"x": ROWS, "x_scale": ONE, "weight": WEIGHT, "scale": ONE, "bias": None, "dtype": BF16, **call}
    for device in ("cpu", "meta"):
        with pytest.raises(error, match=f"^float8_mm: {message}"):
            float8_mm_op(*(a.to(device) if isinstance(a, torch.Tensor) else a for a in given.values()))
