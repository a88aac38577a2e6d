"""Rows of bfloat16 as sums of two of float8, so that the tensor cores multiply them with a weight of float8 as it lies.

bfloat16 has 8 significant bits and e4m3 has 4: the number nearest in e4m3 leaves a rest of 4 bits, which e4m3 has too. A row is
scaled by a power of 2 so that its largest number lies between 128 and 256. The sum is exact for numbers from 1/4 on, and below
that off by at most 2^-10: a 2^17th of the largest.
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
def row_parts_kernel(x, parts, scale, x_row, M, K, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """Program `row`. `parts [2 * M, K]`: the nearest numbers of all rows, then what they leave; `scale [M]` float32.

    A row that is not finite has an infinite scale: it gives no finite result, as in bfloat16."""
    await_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    value = tl.load(x + row * x_row + k, mask=k < K, other=0.0).to(tl.float32)
    exponent = tl.max((value.to(tl.int32, bitcast=True) >> 23) & 0xFF, 0)
    finite = exponent < 255
    exponent = tl.maximum(exponent, 8)  # so that the scale is no subnormal number
    up = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    value = value * up
    first = value.to(tl.float8e4nv)
    rest = (value - first.to(tl.float32)).to(tl.float8e4nv)
    tl.store(parts + row * K + k, first, mask=k < K)
    tl.store(parts + (M + row) * K + k, rest, mask=k < K)
    tl.store(scale + row, tl.where(finite, down, float("inf")))


def row_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts of `x [m, k]` bfloat16, k at most `hopper_tiles.PARTS_MOST_COLUMNS`, unit columns: those of all rows, then the rests, `[2 * m, k]`
    float8_e4m3fn, and the scale of both, `[m, 1]` float32."""
    m, k = x.shape
    parts = torch.empty(PARTS * m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    with device_guard(x):
        launch(
            row_parts_kernel, (m,), x, parts, scale, x.stride(0), m, k, BLOCK_K=block, num_warps=min(max(block // 1024, 1), 16),
            early=True,
        )  # fmt: skip
    return parts, scale


def ahead() -> Iterator[Variant]:
    for k in (4096, 14336):
        with recorded() as launches:
            row_parts(torch.empty(128, k, dtype=torch.bfloat16, device="meta"))
        yield variant_of(f"row_parts, {k} columns", launches[0], archs=(90,))
