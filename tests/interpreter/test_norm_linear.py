"""An RMS norm divided among two products, in Triton's interpreter: against float64, and next to a norm of its own kernel.

float16, since the interpreter truncates to bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spec_ops.backends.squares import SUM_COLUMNS, sums_of
from spec_ops.backends.triton.linear import norm as norm_linear
from spec_ops.backends.triton.linear import skinny_mm as linear
from spec_ops.backends.triton.linear import tiles
from spec_ops.ops.reference import linear as reference

EPS = 1e-5
K0 = 512  # of the product in front
# Rows, n, k of the product after the norm, and shares of k.
SIZES = [(1, 50, 1088, 2), (4, 33, 832, 1), (9, 101, 1024, 2), (16, 20, 2112, 1), (32, 77, 1088, 1), (64, 70, 640, 2)]


def tensors(m: int, n: int, k: int) -> list[torch.Tensor]:
    """x and weight of the product before the norm, residual, the norm's weight, weight of the product after it."""
    g = torch.Generator().manual_seed(m + n + k)
    x, w0, r, w1 = (torch.randn(shape, generator=g) for shape in ((m, K0), (k, K0), (m, k), (n, k)))
    return [t.half() for t in (x, w0 * 0.05, r * 3, torch.rand(k, generator=g) + 0.5, w1 * 0.05)]


def rms_norm(y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """In float32 or float64, rounded once."""
    exact = y if y.dtype == torch.float64 else y.float()
    return (exact * torch.rsqrt(exact.square().mean(-1, True) + EPS) * g.to(exact.dtype)).to(y.dtype)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got.double() - exact).square().mean().sqrt().item()


def front(x, w0, r, g, splits: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The product in front of the norm: its sum is the one that is rounded twice, bit for bit."""
    config = replace(tiles.choose(x.shape[0], w0.shape[0], K0, 4, 90), splits=splits)
    y, z, squares = norm_linear.add_skinny_mm(x, w0, r, g, config=config)
    assert torch.equal(y, linear.skinny_mm(x, w0, None, config=config) + r)
    assert torch.equal(z, (y.float() * g.float()).half())
    assert squares.shape == (x.shape[0], sums_of(w0.shape[0]))
    padded = torch.nn.functional.pad(y.float(), (0, -y.shape[1] % SUM_COLUMNS))
    torch.testing.assert_close(squares, padded.unflatten(1, (-1, SUM_COLUMNS)).square().sum(2), rtol=1e-5, atol=0)
    return y, z, squares


def scale(squares: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.rsqrt(squares.double().sum(1, keepdim=True) / columns + EPS)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate.double()) * up.double()


@pytest.mark.parametrize(("m", "n", "k", "splits"), SIZES)
def test_like_float64(m, n, k, splits):
    """Rows, columns and sums that no block divides; shares of k. Rounded once."""
    x, w0, r, g, w1 = tensors(m, n, k)
    _, z, squares = front(x, w0, r, g, splits)
    config = replace(tiles.choose(m, n, k, 4, 90), splits=splits)
    got = norm_linear.scaled_skinny_mm(z, w1, None, squares, EPS, config=config)
    assert got.shape == (m, n)
    assert got.dtype == x.dtype
    exact = (z.double() @ w1.double().t()) * scale(squares, k)
    torch.testing.assert_close(got.double(), exact, rtol=2**-10, atol=1e-5)


def test_error_is_that_of_a_norm_alone():
    """Over an octave of scales, since how large a rounding is depends on where a value lies between powers of two."""
    x, w0, r, g, w1 = tensors(16, 256, 640)
    x, r = (t * 2 ** (torch.arange(16) / 16)[:, None] for t in (x, r))
    y, z, squares = front(x.half(), w0, r.half(), g)
    h, exact = rms_norm(y, g), rms_norm(y.double(), g.double()) @ w1.double().t()
    fused = norm_linear.scaled_skinny_mm(z, w1, None, squares, EPS)
    alone = linear.skinny_mm(h, w1, None)
    assert error(fused, exact) <= 1.05 * error(alone, exact)
    fused = norm_linear.scaled_silu_mul(*linear.skinny_mm(z, w1, None).chunk(2, 1), squares, 640, EPS)
    exact = silu_mul(*exact.chunk(2, 1))
    assert error(fused, exact) <= 1.05 * error(silu_mul(*alone.chunk(2, 1)).half(), exact)


@pytest.mark.parametrize("columns", [40, 100])
def test_columns_that_sums_do_not_divide(columns):
    """The last sum of a row has fewer."""
    x, w0, r, g, _ = tensors(5, 50, 1088)
    front(x, w0[:columns], r[:, :columns].contiguous(), g[:columns])


@pytest.mark.parametrize("m", [3, 20])
def test_bias_and_layouts(m):
    x, w0, r, g, w1 = tensors(m, 64, 640)
    _, z, squares = front(x, w0, r.t().contiguous().t(), torch.stack([g, g], 1)[:, 0])
    bias = w1[:, 0]
    spread = torch.stack([squares, squares], 2)[..., 0]
    got = norm_linear.scaled_skinny_mm(z, w1, bias, spread, EPS)
    want = reference.scaled_skinny_mm(z, w1, bias, squares, EPS)
    torch.testing.assert_close(got, want, rtol=2**-10, atol=2**-10)
    plain = norm_linear.scaled_skinny_mm(z, w1, None, squares, EPS)
    assert not torch.equal(got, plain)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("m", "n"), [(1, 90), (4, 1024), (33, 1100)])
def test_silu(m, n, apart):
    """Halves of one product, and two products; more columns than a program has."""
    g = torch.Generator().manual_seed(m + n)
    both, squares = torch.randn(m, 2 * n, generator=g).half(), torch.rand(m, 40, generator=g) * 32
    gate, up = (half.contiguous() if apart else half for half in both.chunk(2, 1))
    got = norm_linear.scaled_silu_mul(gate, up, squares, 640, EPS)
    assert got.is_contiguous()
    rstd = scale(squares, 640)
    torch.testing.assert_close(got.double(), silu_mul(gate * rstd, up * rstd), rtol=2**-10, atol=1e-5)


def test_no_rows():
    x, w0, r, g, w1 = tensors(1, 64, 640)
    y, z, squares = norm_linear.add_skinny_mm(x[:0], w0, r[:0], g)
    assert [t.shape for t in (y, z, squares)] == [(0, 640), (0, 640), (0, 40)]
    assert norm_linear.scaled_skinny_mm(z, w1, None, squares, EPS).shape == (0, 64)
    assert norm_linear.scaled_silu_mul(z[:, :32], z[:, 32:64], squares, 640, EPS).shape == (0, 32)


def test_bad_input():
    x, w0, r, g, w1 = tensors(1, 64, 640)
    _, z, squares = norm_linear.add_skinny_mm(x, w0, r, g)
    with pytest.raises(ValueError, match="add_skinny_mm: the columns of `x` must be a multiple of 64, got 100"):
        norm_linear.add_skinny_mm(x[:, :100], w0[:, :100], r, g)
    with pytest.raises(ValueError, match="scaled_skinny_mm: `x` must have at most 64 rows, got 65"):
        norm_linear.scaled_skinny_mm(z.expand(65, -1), w1, None, squares.expand(65, -1), EPS)
    both = z.view(320, 2)
    with pytest.raises(ValueError, match=r"scaled_silu_mul: `up` must have contiguous columns, got strides \(1, 2\)"):
        norm_linear.scaled_silu_mul(both.view(2, 320), both.t(), squares, 640, EPS)
