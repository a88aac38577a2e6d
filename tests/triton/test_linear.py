"""`skinny_mm` in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spec_ops.backends.triton import linear
from spec_ops.backends.triton.launch import num_sms
from spec_ops.ops.reference import linear as reference


def check(x, weight, bias, config=None):
    """float16, since the interpreter truncates to bfloat16; rounded once, and summed in float32 in another order."""
    got = linear.skinny_mm(x, weight, bias, config)
    want = reference.skinny_mm(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want.double(), rtol=2**-10, atol=1e-4)


def tensors(m: int, n: int, k: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(m + n + k)
    return [torch.randn(shape, generator=g).half() for shape in ((m, k), (n, k), (n,))]


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 768), (4, 50, 1088), (9, 33, 832), (16, 20, 1024)])
def test_like_float64(m, n, k, splits):
    """Rows and columns that no block divides, k that `BLOCK_K` does not divide, shares of k of other lengths."""
    x, weight, bias = tensors(m, n, k)
    config = replace(linear.choose(m, n, k, 1, 90), splits=splits)
    check(x, weight, bias, config)
    check(x, weight, None, config)


@pytest.mark.parametrize("m", [2, 8, 11])
def test_what_is_chosen(m):
    assert linear.choose(m, 40, 1088, num_sms(torch.device("cpu")), 90).splits == 2
    check(*tensors(m, 40, 1088))
    check(*tensors(m, 200, 192))


def test_strided_inputs():
    x, weight, bias = tensors(5, 64, 256)
    check(x[:, 64:128], weight[:, 128:192], bias)
    check(x[:, 3:67], weight[:, :64], torch.stack([bias, bias], 1)[:, 0])  # copied: TMA reads from multiples of 16 bytes
    check(x.t().contiguous().t(), weight, None)


def test_no_rows():
    x, weight, _ = tensors(0, 64, 128)
    assert linear.skinny_mm(x, weight, None).shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, weight: (torch.cat([x] * 5), weight), "`x` must have at most 16 rows, got 20"),
        (lambda x, weight: (x[:, :100], weight[:, :100]), "multiple of 64, got 100"),
        (lambda x, weight: (x[:, :0], weight[:, :0]), "multiple of 64, got 0"),
        (
            lambda x, weight: (x[:, :64], weight[:, 4:68]),
            "`weight` must have contiguous rows that start at multiples of 16 bytes",
        ),
        (lambda x, weight: (x, weight.t().contiguous().t()), r"`weight` .* got strides \(1, 64\)"),
    ],
)
def test_bad_input(change, message):
    x, weight, _ = tensors(4, 64, 128)
    with pytest.raises(ValueError, match=message):
        linear.skinny_mm(*change(x, weight), None)
