"""How the grouped kernels get their numbers, read from Triton's intermediate code; no GPU is needed."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.moe import grouped
from spec_ops.backends.triton.runtime import ahead

PRODUCTS = {v.name: v for v in grouped.ahead() if "sum" not in v.name}
VARIANTS = {name: v for name, v in PRODUCTS.items() if "MXFP4" in name}
ADJACENT = {name: v for name, v in PRODUCTS.items() if v.constexprs["ADJACENT"]}


@pytest.mark.parametrize("name", [n for n in VARIANTS if "down" in n and ("66" in n or "invariant" in n)] + [
    "grouped_gate_up_kernel, gpt-oss in MXFP4, 128 tokens", "grouped_gate_up_kernel, gpt-oss in MXFP4, 1024 tokens",
])  # fmt: skip
def test_bytes_come_some_iterations_ahead(name):
    """Several at a time, since no single byte is copied asynchronously."""
    made = ahead.lowered(VARIANTS[name], 90, "ttgir").ttgir
    sizes = re.findall(r"async_copy_global_to_local .*contiguity = (\d+) .*ptr<i8>", made)
    assert sizes
    assert min(map(int, sizes)) >= 8


@pytest.mark.parametrize("tokens", [66, 512])
def test_scaled_numbers_stay_in_registers(tokens):
    """The weight is on the left, and the products are those of a warpgroup."""
    made = ahead.lowered(VARIANTS[f"grouped_down_kernel, gpt-oss in MXFP4, {tokens} tokens"], 90, "ttgir").ttgir
    products = re.findall(r"(?:warp_group_dot|tt\.dot) .*: (.*?) \*", made)
    assert products
    assert all(re.match(r"tensor<64x64xbf16, #ttg.dot_op<\{opIdx = 0", left) for left in products)


def test_models_whose_rows_lie_side_by_side():
    assert {name for name in ADJACENT if "kernel, gpt-oss," in name} == set(ADJACENT) != set()
    assert len(ADJACENT) == len([name for name in PRODUCTS if "gpt-oss" in name and "MXFP4" not in name])


@pytest.mark.parametrize("name", [n for n in ADJACENT if "1024" not in n])
def test_rows_that_lie_side_by_side_come_16_bytes_at_a_time(name):
    """Those of both operands, and no tile of numbers comes any other way; gates and up projections are one product."""
    made = ahead.lowered(ADJACENT[name], 90, "ttgir").ttgir
    copies = re.findall(r"async_copy_global_to_local .*contiguity = (\d+) .*tensor<(\d+x\d+)x!tt\.ptr<(\w+)>", made)
    assert len({shape for _, shape, _ in copies}) >= (1 if "down" in name else 2)
    assert all(int(count) * int(dtype.strip("bf")) == 128 for count, _, dtype in copies)
    assert not re.search(r"tt\.load .*tensor<\d+x\d+x!tt\.ptr", made)
    assert len(re.findall(r"(?:warp_group_dot|tt\.dot) ", made)) == 1
