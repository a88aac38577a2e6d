"""Rows of bfloat16 in two parts of float8, in Triton's interpreter; `tests/gpu/test_hopper_float8.py` multiplies them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.linear.row_parts import row_parts


def parted(x: torch.Tensor, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The nearest numbers, the rests and the scale, in float64."""
    parts, scale = row_parts(x, rows)
    assert parts.shape == (2 * rows, x.shape[1])
    m = x.shape[0]
    return parts[:m].double(), parts[rows : rows + m].double(), scale.double()


@pytest.mark.parametrize("k", [128, 250, 1280])
def test_the_sum_is_the_row(k):
    x = torch.randn(9, k + 6, generator=torch.Generator().manual_seed(k)).bfloat16()[:, 6:]
    x *= torch.logspace(-30, 30, 9)[:, None].bfloat16()
    first, rest, scale = parted(x)
    largest = (x.double() / scale).abs().amax(1)
    assert ((largest >= 128) & (largest < 256)).all()
    assert (scale.log2() == scale.log2().round()).all()
    off = ((first + rest) * scale - x.double()).abs()
    assert (off <= 2.0**-9 * scale).all()
    assert (off[(x.double() / scale).abs() >= 0.25] == 0).all()


def test_every_number_of_bfloat16():
    """Of a row's upper ten octaves: exact, and its nearest number is the nearest."""
    bits = torch.arange(2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    numbers = numbers[(numbers.float() >= 0.25) & (numbers.float() < 256)]
    x = torch.stack([numbers, -numbers])
    first, rest, scale = parted(x)
    assert torch.equal((first + rest) * scale, x.double())
    assert (rest.abs() <= first.abs() / 16).all()


def test_rows_that_are_not_finite_and_rows_of_nothing():
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 3], x[1, 4], x[2] = float("inf"), float("nan"), 0
    first, rest, scale = parted(x)
    assert scale[:2].isinf().all()
    assert scale[2:].isfinite().all()
    assert not ((first + rest)[:2].sum(1, keepdim=True) * scale[:2]).isfinite().any()
    assert not (first + rest)[2].any()
    assert (first + rest)[3:].isfinite().all()
