"""`skinny_mm` in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spec_ops.backends.triton.linear import skinny_mm as linear
from spec_ops.backends.triton.linear import tiles
from spec_ops.backends.triton.runtime.launch import num_sms
from spec_ops.ops.reference import linear as reference


def check(x, weight, bias, config=None):
    """float16, since the interpreter truncates to bfloat16; rounded once, and summed in float32 in another order."""
    got = linear.skinny_mm(x, weight, bias, config=config)
    want = reference.skinny_mm(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want.double(), rtol=2**-10, atol=1e-4)


def tensors(m: int, n: int, k: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(m + n + k)
    return [torch.randn(shape, generator=g).half() for shape in ((m, k), (n, k), (n,))]


SIZES = [(1, 16, 768), (4, 50, 1088), (9, 33, 832), (16, 20, 1024)]
SIZES += [(17, 65, 832), (31, 50, 1088), (32, 129, 768), (33, 131, 832), (64, 100, 704)]


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_like_float64(m, n, k, splits):
    """Rows and columns that no block divides, k that `BLOCK_K` does not divide, shares of k of other lengths."""
    x, weight, bias = tensors(m, n, k)
    config = replace(tiles.choose(m, n, k, 1, 90), splits=splits)
    check(x, weight, bias, config)
    check(x, weight, None, config)


@pytest.mark.parametrize(("m", "splits"), [(2, 2), (8, 2), (11, 2), (17, 4), (40, 2)])
def test_what_is_chosen(m, splits):
    assert tiles.choose(m, 40, 1088, num_sms(torch.device("cpu")), 90).splits == splits
    check(*tensors(m, 40, 1088))
    check(*tensors(m, 200, 192))


@pytest.mark.parametrize("tile", [tiles.Tile(32, 32, 128, 2, 2), tiles.Tile(32, 128, 128, 8, 1)])
def test_other_tiles(tile):
    check(*tensors(18, 133, 832), tiles.fitted(tile, 133, 832, 4, 90))


@pytest.mark.parametrize("m", [5, 20])
def test_strided_inputs(m):
    x, weight, bias = tensors(m, 64, 256)
    check(x[:, 64:128], weight[:, 128:192], bias)
    check(x[:, 3:67], weight[:, :64], torch.stack([bias, bias], 1)[:, 0])  # copied: TMA reads from multiples of 16 bytes
    check(x.t().contiguous().t(), weight, None)


def test_no_rows():
    x, weight, _ = tensors(0, 64, 128)
    assert linear.skinny_mm(x, weight, None).shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, weight: (torch.cat([x] * 17), weight), "`x` must have at most 64 rows, got 68"),
        (lambda x, weight: (x[:, :100], weight[:, :100]), "multiple of 64, got 100"),
        (lambda x, weight: (x[:, :0], weight[:, :0]), "multiple of 64, got 0"),
        (
            lambda x, weight: (x[:, :64], weight[:, 4:68]),
            "`weight` must have contiguous rows that start at multiples of 16 bytes",
        ),
        # Only the pages that are touched exist.
        (
            lambda x, weight: (torch.cat([x] * 16), torch.empty(2**25, 128, dtype=x.dtype)),
            r"rows times `weight` rows must be less than 2\^31, got 64 times 33554432",
        ),
        (lambda x, weight: (x, weight.t().contiguous().t()), r"`weight` .* got strides \(1, 64\)"),
    ],
)
def test_bad_input(change, message):
    x, weight, _ = tensors(4, 64, 128)
    with pytest.raises(ValueError, match=message):
        linear.skinny_mm(*change(x, weight), None)
