"""Rows of bfloat16 as sums of two rows of float8, so that the tensor cores multiply them by a weight of float8 as it is stored.

bfloat16 has 8 significant bits and e4m3 has 4. The nearest number of 4 bits leaves a rest of at most 4 bits, which is a number
of e4m3 too. A row is scaled by a power of 2 so that its greatest magnitude lies between 128 and 256. The sum is exact for
magnitudes of 1/4 and more, and off by at most 2^-9 for smaller ones, which is at most 2^-16 of the greatest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant, variant_of
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, recorded

PARTS = 2


@triton.jit
def _rounded(value):
    """float32 values rounded to 4 significant bits, ties to even. Not by a conversion to float8 and back: ptxas 12.8 then reads
    a register that holds something else (docs/notebook/launches.md)."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def store_parts(value, factor, parts, scale, row, rests, K, k):
    """Writes the nearest numbers to columns `k` of `parts [.., K]` at `row`, the rests at `rests + row`, and `scale` times
    `factor`, float32. `value`: float32, 0 beyond `K`.

    A row that is not finite gets an infinite scale, so that its results are not finite either, as in bfloat16."""
    exponent = tl.max((value.to(tl.int32, bitcast=True) >> 23) & 0xFF, 0)
    finite = exponent < 255
    exponent = tl.maximum(exponent, 8)  # so that the scale is no subnormal number
    value *= ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    first = _rounded(value)
    tl.store(parts + row * K + k, first.to(tl.float8e4nv), mask=k < K)
    tl.store(parts + (rests + row) * K + k, (value - first).to(tl.float8e4nv), mask=k < K)
    down = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    tl.store(scale + row, tl.where(finite, down, float("inf")) * factor)


@triton.jit
def row_parts_kernel(x, parts, scale, x_row, rests, K, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """Program `row`: see `store_parts`."""
    await_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    value = tl.load(x + row * x_row + k, mask=k < K, other=0.0).to(tl.float32)
    store_parts(value, 1.0, parts, scale, row, rests, K, k)


def row_parts(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of `x [m, k]` bfloat16 with contiguous columns, k at most `hopper_tiles.PARTS_MOST_COLUMNS`.

    Returns:
        `[2 * rows, k]` float8_e4m3fn, whose second half has the rests, and the scale of both, `[m, 1]` float32. `rows` is m or
        more; in either half, rows from m on are not written.
    """
    m, k = x.shape
    parts = torch.empty(PARTS * rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    with device_guard(x):
        launch(
            row_parts_kernel, (m,), x, parts, scale, x.stride(0), rows, k, BLOCK_K=block,
            num_warps=min(max(block // 1024, 1), 16), early=True,
        )  # fmt: skip
    return parts, scale


def ahead() -> Iterator[Variant]:
    for k in (4096, 14336):
        with recorded() as launches:
            row_parts(torch.empty(128, k, dtype=torch.bfloat16, device="meta"), 128)
        yield variant_of(f"row_parts, {k} columns", launches[0], archs=(90,))
