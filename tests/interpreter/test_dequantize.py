"""Weights of 8 and 4 bits dequantized in one launch (`linear/dequantize.py`), in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from spec_ops.backends.triton.linear.dequantize import dequantize
from spec_ops.ops.reference import linear as reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
N, K = 200, 384  # which no tile divides


def parts(kind: str, n: int = N, k: int = K) -> tuple[torch.Tensor | None, ...]:
    """A weight, its scale, its zero points and its tensor's scale: every bit pattern that numbers may have."""
    g = torch.Generator().manual_seed(n + k)
    stored, _, columns = kind.partition(" ")
    of_bytes = torch.randint(0, 256, (n, k), generator=g).to(torch.uint8)
    if stored == "float8":
        weight = torch.where(of_bytes & 127 == 127, 0, of_bytes).view(torch.float8_e4m3fn)  # but NaN
    else:
        weight = of_bytes.view(torch.int8) if stored == "int8" else of_bytes[:, : k // 2].contiguous()
    if columns == "block":
        shape = (-(-n // 128), -(-k // 128))
    else:
        shape = {"all": (1, 1), "row": (n, 1)}.get(columns) or (n, k // int(columns))
    scale, zero = (torch.rand(shape[::-1], generator=g).t() + 0.5 for _ in range(2))  # in columns
    if stored == "mxfp4":
        return weight, torch.randint(0, 160, shape, generator=g).to(torch.uint8), None, None
    if stored == "nvfp4":
        return weight, scale.to(torch.float8_e4m3fn), None, torch.tensor([0.37])
    return weight, scale, zero.contiguous() if stored == "int4z" else None, None


@pytest.mark.parametrize(
    "kind",
    [
        "float8 all", "float8 row", "float8 block", "float8 64", "int8 row", "int8 32", "int8 block", "int4 128", "int4z 32",
        "int4z 128", "nvfp4 16", "mxfp4 32",
    ],
)  # fmt: skip
def test_bits_of_the_reference(kind):
    given = parts(kind)
    exact = reference.dequantize(*given, torch.float32)
    got = dequantize(*given, torch.float32)
    assert got.is_contiguous()
    assert torch.equal(got, exact)
    for dtype in (torch.float16, torch.bfloat16):
        got = dequantize(*given, dtype)
        assert got.dtype == dtype
        # The interpreter cuts bits off where a GPU rounds.
        near = (got.float() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).tiny
        assert bool((near | (exact.abs() > torch.finfo(dtype).max)).all())


def test_rows_farther_apart_and_no_rows():
    weight, scale, *_ = parts("float8 row")
    wide = torch.zeros(N, K + 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide.view(torch.uint8)[:, :K] = weight.view(torch.uint8)
    want = reference.dequantize(weight, scale, None, None, torch.float32)
    assert torch.equal(dequantize(wide[:, :K], scale, None, None, torch.float32), want)
    assert dequantize(weight[:0], scale[:0], None, None, torch.float16).shape == (0, K)


def test_bad_input():
    weight, scale, *_ = parts("float8 row")
    with pytest.raises(ValueError, match="dequantize: `scale` of a weight 200 x 384 of float8 must be"):
        dequantize(weight, scale[:7], None, None, torch.float16)
    with pytest.raises(ValueError, match=r"dequantize: `weight` must have contiguous columns, got strides \(1, 200\)"):
        dequantize(weight.view(K, N).t(), scale, None, None, torch.float16)
