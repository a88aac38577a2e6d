"""Experts' weights of 8 and 4 bits inside a kernel: their scales, their numbers, and products with them.

A number of 8 bits is exact in 16, and its scale multiplies the sum of a block (`linear/quantized.py`). MXFP4 has a scale for
every 32 numbers, and int4 has one for 32 or more. Where warps take chunks of k a product is of so many, and its sum is scaled;
elsewhere numbers are scaled before the product. That is exact with MXFP4's powers of 2 in bfloat16, and rounds an int4 weight
once, as dequantizing it would.

With rows of bfloat16 all numbers of MXFP4 are scaled, two at a time as in `linear/float4.py` (`SCALED`): a product is one over
a whole chunk. Rows of float16 are left with sums: it has no room for most powers of 2, so that numbers of small weights, which
their sums are not, would be 0. (Those are 0 with more than 8 tokens, where numbers of any rows are scaled.)

Formats: `backends/expert_format.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from spec_ops.backends.expert_format import ExpertFormat, expert_format
from spec_ops.backends.triton.linear.float4 import load_float4_scales, opaque, scaled_numbers
from spec_ops.backends.triton.linear.float4_words import word_numbers
from spec_ops.backends.triton.linear.quantized import numbers


@triton.jit
def e8m0(byte):
    """2^(byte - 127), float32."""
    return tl.maximum(byte.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def fp4_numbers(block, dtype: tl.constexpr):
    """What bytes `[.., stored]` hold, as `[.., stored, 2]` of `dtype`.

    Exponent and mantissa of e2m1 are put where those of a wider format meet, which is the number times a power of 2 also where
    it is subnormal.
    """
    NARROW: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    BITS: tl.constexpr = 6 if dtype == tl.bfloat16 else 9  # of the mantissa, less one
    UNIT: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
    bits = block.to(tl.int16)
    low = ((bits & 7) << BITS) | ((bits & 8) << 12)
    high = ((bits & 0x70) << (BITS - 4)) | ((bits & 0x80) << 8)
    unit = tl.full([1] * len(block.shape), UNIT, NARROW)
    return tl.join((low.to(NARROW, bitcast=True) * unit).to(dtype), (high.to(NARROW, bitcast=True) * unit).to(dtype))


@triton.jit
def int4_numbers(block, dtype: tl.constexpr):
    """What bytes `[.., stored]` hold, -8 to 7, as `[.., stored, 2]` of `dtype`. Number plus 8 become the last bits of 1024 in
    float16, or of 128 in bfloat16, whose units these are."""
    NARROW: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    BASE: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    OFFSET: tl.constexpr = 136 if dtype == tl.bfloat16 else 1032
    bits = block.to(tl.int16)
    low = (((bits & 15) ^ 8) | BASE).to(NARROW, bitcast=True) - OFFSET
    high = ((((bits >> 4) & 15) ^ 8) | BASE).to(NARROW, bitcast=True) - OFFSET
    return tl.join(low.to(dtype), high.to(dtype))


@triton.jit
def numbers_of_4_bits(block, dtype: tl.constexpr, INT4: tl.constexpr):
    """What bytes `[.., stored]` hold, as `[.., stored, 2]` of `dtype`."""
    if INT4:
        return int4_numbers(block, dtype)
    else:
        return fp4_numbers(block, dtype)


@triton.jit
def scaled_4_bits(block, scale, dtype: tl.constexpr, INT4: tl.constexpr):
    """The weights `[rows, k]` of bytes `[rows, k / 2]` and scales `[1, rows, k / 32]`. float16 has no room for most scales of
    MXFP4: a weight beyond its range is infinite or 0."""
    GROUPS: tl.constexpr = block.numel // 16
    if INT4 and scale.dtype != dtype:  # which would round the scale too
        wide = int4_numbers(tl.reshape(block, [GROUPS, 16]), tl.float32) * tl.reshape(scale, [GROUPS, 1, 1])
        wide = wide.to(dtype)
    else:
        wide = numbers_of_4_bits(tl.reshape(block, [GROUPS, 16]), dtype, INT4) * tl.reshape(scale, [GROUPS, 1, 1]).to(dtype)
    return tl.reshape(wide, [block.shape[0], 2 * block.shape[1]])


@triton.jit
def block_scales(
    scale, expert, expert_stride, row_stride, column_stride, n, N, block, inner, live, PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr, BITS: tl.constexpr, INT4: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SCALED: tl.constexpr = False,
):  # fmt: skip
    """The scales `[PARTS, n, each]` of an expert's rows `n` for block number `block` of k, of which a product takes `PARTS`
    equal ones: one for each in 8 bits, one for every 32 numbers in 4. 0 beyond the weight, and everywhere unless `live`.
    float32, but those of int4 have their own dtype, and those of `SCALED` are as stored."""
    if SCALED:
        # Even strides (`scales_numbers`), which the compiler is told: scales that come one by one have a layout that Triton 3.7
        # carries on to the numbers, and these through shared memory.
        at = scale + expert.to(tl.int64) * (expert_stride // 2 * 2)
        return load_float4_scales(
            at, row_stride // 2 * 2, 1, n, block * PARTS, tl.where(live, N, 0), inner, BLOCK_K // PARTS, PARTS, 32, 64
        )
    else:
        EACH: tl.constexpr = BLOCK_K // PARTS // 32 if BITS == 4 else 1
        k = block * BLOCK_K + tl.arange(0, PARTS * EACH) * (BLOCK_K // (PARTS * EACH))
        k = tl.reshape(k, [PARTS, 1, EACH])
        row = n[None, :, None]
        at = scale + expert.to(tl.int64) * expert_stride + row // ROWS * row_stride + k // COLUMNS * column_stride
        found = tl.load(at, mask=(row < N) & (k < inner) & live, other=0)
        if INT4:
            return found
        else:
            return e8m0(found) if BITS == 4 else found.to(tl.float32)


@triton.jit
def added(
    acc, columns, rows, scales, BITS: tl.constexpr, INT4: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr = True
):  # fmt: skip
    """`acc` and the product of `columns [.., n, stored]` with `rows [.., k, m]`; `scales`: of `block_scales`. `SCALED`:
    numbers of MXFP4 are; chunks of them are words, `EXACT` as in `word_numbers`."""
    if SCALED and len(acc.shape) == 3:
        return tl.dot(word_numbers(columns, scales, rows.dtype, EXACT), rows, acc)
    elif SCALED:
        wide = tl.reshape(scaled_numbers(tl.expand_dims(columns, 0), scales, rows.dtype), [acc.shape[0], rows.shape[0]])
        # A product in place has ptxas begin no instruction before the last one has ended.
        return acc + tl.dot(wide, rows) * opaque(1.0)
    elif BITS == 16:
        return tl.dot(columns, rows, acc)
    elif BITS == 8:
        made = tl.dot(numbers(columns, rows.dtype, 8), rows)
        return acc + made * (scales if len(acc.shape) == 3 else tl.reshape(scales, [acc.shape[0], 1]))
    elif len(acc.shape) == 3:
        # Products of the 32 numbers that share a scale: scaled numbers would change their layout through shared memory.
        P: tl.constexpr = acc.shape[0]
        N: tl.constexpr = acc.shape[1]
        EACH: tl.constexpr = P // columns.shape[0]
        bytes = tl.permute(tl.reshape(columns, [columns.shape[0], N, EACH, 16]), (0, 2, 1, 3))
        wide = tl.reshape(numbers_of_4_bits(tl.reshape(bytes, [P, N, 16]), rows.dtype, INT4), [P, N, 32])
        made = tl.dot(wide, tl.reshape(rows, [P, 32, rows.shape[2]]))
        return acc + made * tl.reshape(tl.permute(scales, (0, 2, 1)), [P, N, 1])
    else:
        return tl.dot(scaled_4_bits(columns, scales, rows.dtype, INT4), rows, acc)


def formats(
    gate_up: torch.Tensor, gate_up_scale: torch.Tensor | None, down: torch.Tensor, down_scale: torch.Tensor | None, gated: bool,
    interleaved: bool,
) -> tuple[ExpertFormat, ExpertFormat]:  # fmt: skip
    """Of both stacks of a call; raises as `expert_format` does."""
    parts = 2 if gated and not interleaved else 1
    first = expert_format("moe_experts", "gate_up", gate_up, gate_up_scale, parts)
    return first, expert_format("moe_experts", "down", down, down_scale)


def scales_numbers(stored: tuple[ExpertFormat, ...], columns: tuple[int, ...], scales: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether numbers of stacks of so many columns may be scaled: MXFP4, whose scales can be read two at a time."""
    return all(
        form.bits == 4 and not form.int4 and k % 64 == 0 and scale is not None
        and scale.stride(2) == 1 and not any(offset % 2 for offset in (*scale.stride()[:2], scale.data_ptr()))
        for form, k, scale in zip(stored, columns, scales, strict=True)
    )  # fmt: skip


def scale_arguments(scale: torch.Tensor | None, stored: ExpertFormat) -> tuple[Any, ...]:
    """`scale`, its strides, and where those of the up projection begin, as kernels take them."""
    if scale is None:
        return None, None, None, None, None
    expert, row, column = scale.stride()
    row, column = 0 if scale.shape[1] == 1 else row, 0 if scale.shape[2] == 1 else column
    return scale, expert, row, column, scale.shape[1] // 2 * row if stored.parts == 2 else 0


def scale_constants(stored: ExpertFormat) -> dict[str, Any]:
    if stored.bits == 16:
        return {"BITS": 16, "INT4": False, "SCALE_ROWS": 1, "SCALE_COLUMNS": 1}
    return {"BITS": stored.bits, "INT4": stored.int4, "SCALE_ROWS": stored.rows, "SCALE_COLUMNS": stored.columns}
