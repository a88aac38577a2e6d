"""A weight of 8 or 4 bits as a tensor of 16 or 32 bits, in one launch: for products of more rows than kernels read as stored.

The bits are those of `weight_format.dequantized`, rounded once: products and sums of float32, which are not fused into one
operation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spec_ops.backends.registry import BackendError
from spec_ops.backends.triton.linear.operands import scale_arguments
from spec_ops.backends.triton.linear.quantized import joined
from spec_ops.backends.triton.runtime.ahead import ARCHS, FP8_ARCHS, Variant, variant_of
from spec_ops.backends.triton.runtime.launch import arch_of, await_predecessors, device_guard, launch, recorded
from spec_ops.backends.weight_format import E2M1_UNIT, columns_of, weight_format

BLOCK_N, BLOCK_K = 64, 128  # of what a program writes
UNFUSED = {"enable_fp_fusion": False}
_UNIT = tl.constexpr(E2M1_UNIT)


@triton.jit
def _half(bits, FLOAT4: tl.constexpr):
    """The number in the last 4 bits, float32."""
    bits = bits.to(tl.int16)
    if FLOAT4:
        return (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.float16, bitcast=True).to(tl.float32) * _UNIT
    else:
        return (((bits & 15) ^ 8) - 8).to(tl.float32)


@triton.jit
def _of_groups(factors, WHOLE: tl.constexpr):
    """`factors [n, 1]` of a tile's columns, or `[n, groups]`, as they broadcast to its numbers."""
    return factors if WHOLE else tl.expand_dims(factors, 2)


@triton.jit
def dequantize_kernel(
    weight, row_stride, scale, zero, tensor_scale, scale_row, scale_column, out, N, K,
    BITS: tl.constexpr, FLOAT4: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `rows, columns`. `ROWS`, `COLUMNS`: how many share a scale, whose strides are 0 where all do; `WHOLE`: a tile's
    columns do; where they do not, rows have scales of their own. `out [N, K]`, contiguous."""
    await_predecessors(PDL)
    n = tl.expand_dims(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), 1)
    first = tl.program_id(1) * BLOCK_K
    k = first + tl.expand_dims(tl.arange(0, BLOCK_K), 0)
    live = (n < N) & (k < K)
    if BITS == 4:
        byte = first // 2 + tl.expand_dims(tl.arange(0, BLOCK_K // 2), 0)
        stored = tl.load(weight + n.to(tl.int64) * row_stride + byte, mask=(n < N) & (2 * byte < K))
        value = joined(_half(stored, FLOAT4), _half(stored >> 4, FLOAT4))
    else:
        value = tl.load(weight + n.to(tl.int64) * row_stride + k, mask=live).to(tl.float32)
    if WHOLE:
        at, there = (n // ROWS).to(tl.int64) * scale_row + (first // COLUMNS) * scale_column, n < N
    else:
        GROUPS: tl.constexpr = BLOCK_K // COLUMNS
        group = first // COLUMNS + tl.expand_dims(tl.arange(0, GROUPS), 0)
        at, there = n.to(tl.int64) * scale_row + group * scale_column, (n < N) & (group * COLUMNS < K)
        # One load for all columns of a group: with one for each column, NVFP4 took three times as long.
        value = tl.reshape(value, [BLOCK_N, GROUPS, COLUMNS])
    factor = _of_groups(tl.load(scale + at, mask=there), WHOLE)
    if scale.dtype.element_ty == tl.uint8:
        value *= tl.maximum(factor.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
    else:
        value *= factor.to(tl.float32)
    if tensor_scale is not None:
        value *= tl.load(tensor_scale)
    if zero is not None:
        value += _of_groups(tl.load(zero + at, mask=there), WHOLE).to(tl.float32)
    value = tl.reshape(value, [BLOCK_N, BLOCK_K])
    tl.store(out + n.to(tl.int64) * K + k, value.to(out.dtype.element_ty), mask=live)


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, tensor_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`spec_ops.ops.linear.dequantize_op`.

    Raises:
        TypeError, ValueError: as `weight_format`, and a `weight` whose columns are not contiguous.
        BackendError: float8, or scales of float8, on a GPU before sm_89.
    """
    stored = weight_format("dequantize", weight, scale, zero, tensor_scale)
    n, k = weight.shape[0], columns_of(weight)
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        raise ValueError(f"dequantize: `weight` must have contiguous columns, got strides {tuple(weight.stride())}")
    if (arch := arch_of(weight.device)) < min(FP8_ARCHS) and torch.float8_e4m3fn in (weight.dtype, scale.dtype):
        raise BackendError(f"dequantize: float8 needs a GPU of sm_{min(FP8_ARCHS)} or newer, got sm_{arch}")
    out = weight.new_empty(n, k, dtype=dtype)
    if not out.numel():
        return out
    scale, zero, tensor_scale, scale_row, scale_column = scale_arguments(scale, zero, tensor_scale)
    with device_guard(weight):
        launch(
            dequantize_kernel, (triton.cdiv(n, BLOCK_N), triton.cdiv(k, BLOCK_K)), weight, weight.stride(0), scale, zero,
            tensor_scale, scale_row, scale_column, out, n, k, BITS=stored.bits, FLOAT4=stored.float4,
            ROWS=1 if stored.rows == n else stored.rows, COLUMNS=1 if stored.columns == k else stored.columns,
            WHOLE=stored.columns == k or stored.columns % BLOCK_K == 0, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
            **UNFUSED,
        )  # fmt: skip
    return out


def ahead() -> Iterator[Variant]:
    n, k = 4096, 4096
    stored = {
        "float8": (torch.float8_e4m3fn, k, (n, 1), torch.float32, None),
        "float8 in blocks": (torch.float8_e4m3fn, k, (n // 128, k // 128), torch.float32, None),
        "int8": (torch.int8, k, (n, 1), torch.bfloat16, None),
        "int4": (torch.uint8, k // 2, (n, k // 128), torch.bfloat16, "zero"),
        "int4, groups of 32": (torch.uint8, k // 2, (n, k // 32), torch.bfloat16, None),
        "NVFP4": (torch.uint8, k // 2, (n, k // 16), torch.float8_e4m3fn, "tensor"),
        "MXFP4": (torch.uint8, k // 2, (n, k // 32), torch.uint8, None),
    }
    for name, (dtype, width, shape, scale_dtype, more) in stored.items():
        weight, scale = torch.empty(n, width, dtype=dtype, device="meta"), torch.empty(shape, dtype=scale_dtype, device="meta")
        with recorded() as launches:
            dequantize(
                weight, scale, scale if more == "zero" else None,
                torch.empty(1, device="meta") if more == "tensor" else None, torch.bfloat16,
            )  # fmt: skip
        archs = FP8_ARCHS if torch.float8_e4m3fn in (dtype, scale_dtype) else ARCHS
        yield variant_of(f"dequantize, {name}", launches[0], archs=archs, hot=False, options=UNFUSED)
