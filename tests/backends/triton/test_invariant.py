"""What decides the order of additions in the batch-invariant kernels, read from their compiled code; no GPU is needed."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.linear import invariant
from spec_ops.backends.triton.runtime import ahead

VARIANTS = {variant.name: variant for variant in invariant.ahead() if 90 in variant.archs}


@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_code(name):
    """No float is added by an atomic instruction, in any order that comes, and no multiplication was fused with an addition."""
    ptx = ahead.compiled(VARIANTS[name], 90).asm["ptx"]
    assert not re.findall(r"\b(?:atom|red)\.\S*\.(?:f|bf)\d+", ptx)
    assert "fma.rn" not in ptx


def test_tiles_of_a_weight_share_their_splits():
    by_weight: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for variant in VARIANTS.values():
        if found := re.search(r"(\d+) x (\d+) x (\d+)", variant.name):
            _, n, k = map(int, found.groups())
            blocks = k // variant.constexprs["BLOCK_K"]
            ends = [i * blocks // variant.constexprs["SPLITS"] * variant.constexprs["BLOCK_K"] for i in range(1, 5)]
            by_weight.setdefault((n, k), set()).add((variant.constexprs["SPLITS"], *ends))
    assert len(by_weight) == 2
    assert all(len(orders) == 1 for orders in by_weight.values())
