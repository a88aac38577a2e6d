"""The weights that `benchmarks.skinny_mm` measures."""

from __future__ import annotations

import pytest
import torch

from benchmarks import skinny_mm
from spec_ops.backends.weight_format import dequantized, weight_format


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tensor", ("float8", 200, 256)),
        ("row", ("float8", 1, 256)),
        ("block", ("float8", 128, 128)),
        ("int4", ("int4", 1, 128)),
        ("nvfp4", ("nvfp4", 1, 16)),
        ("mxfp4", ("mxfp4", 1, 32)),
    ],
)
def test_weights_are_of_a_format_and_near_what_they_store(kind, expected):
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    parts = skinny_mm.stored(weight, kind)
    assert weight_format("op", *parts) == expected
    lost = (dequantized(*parts) - weight).square().mean().sqrt()
    assert 0 < lost < (0.12 if "4" in kind else 0.03)
