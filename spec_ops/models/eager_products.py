"""Products with stored weights in eager mode on a GPU: of prompts, and in programs that are not compiled.

In a compiled graph passes choose how a weight is read, so a trace has the dequantization written out. Here:

- rows and weights of float8 are multiplied as they are: up to 128 rows by `float8_mm` on Hopper, others by `torch._scaled_mm`
  where it is known to be right;
- any other weight is dequantized by one kernel, and cuBLAS multiplies.

`torch._scaled_mm` accumulates in float32 (`use_fast_accum=False`). With scales of 128 x 128 it is cuBLAS's, of CUDA 12.9 and
for Hopper, which wants rows in fours, and whose results are wrong without a word if k is no multiple of 512
(`docs/notebook/products.md`, "Rows and weights of 8 bits on Hopper").
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from spec_ops.backends.float8_rows import MAX_COLUMNS, in_blocks
from spec_ops.backends.registry import device_arch
from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.backends.weight_format import BLOCK, dequantized, weight_format
from spec_ops.models.inputs import Inputs
from spec_ops.ops.linear import dequantize_op, float8_mm_op
from spec_ops.ops.rounding import round_rows_op

FLOAT8_ARCH = 89  # least, for kernels and the library
_ROWS_IN_BLOCKS, _COLUMNS_IN_BLOCKS = 4, 512  # what m and k must be multiples of for the library, with scales of blocks
_CUDA_OF_BLOCKS = (12, 9)
_PLAIN = (torch.Tensor, nn.Parameter)


def is_eager(*tensors: torch.Tensor | None) -> bool:
    """Whether ops may be called on `tensors`, which lie on a GPU: nothing traces or watches them (a dispatch mode makes results
    batch-invariant, for one), and nobody asks for derivatives."""
    if torch.compiler.is_compiling() or _transformed():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    if not all(type(tensor) in _PLAIN and tensor.is_cuda for tensor in given) or torch.version.hip is not None:
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    return _get_current_dispatch_mode() is None


def eager_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    inputs: Inputs | None,
    input_scale: torch.Tensor | None,
    order: torch.Tensor | None,
) -> torch.Tensor:
    """`F.linear` of `input [..., k]`; all tensors are as in `StoredTensor`, and such that `is_eager`."""
    float8 = inputs is not None and inputs.kind == "float8" and order is None and weight.dtype == torch.float8_e4m3fn
    if inputs is not None and float8 and not _cast(input):
        out = _float8_product(input, weight, scale, bias, inputs, input_scale)
        if out is not None:
            return out
    rows = input if inputs is None else inputs.rounded(input, input_scale)
    rows = rows if order is None else rows.index_select(-1, order)
    return F.linear(rows, _dequantized(weight, scale, zero, tensor_scale, input.dtype), bias)


def _transformed() -> bool:
    """Whether a function transform of `torch.func` is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _cast(input: torch.Tensor) -> bool:
    """Whether autocast has `F.linear` compute in another dtype."""
    kind = input.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != input.dtype


def _dequantized(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    arch = device_arch(weight.device)
    float8 = torch.float8_e4m3fn in (weight.dtype, scale.dtype)
    if arch is None or (float8 and arch < FLOAT8_ARCH) or weight.stride(1) != 1 or dtype == torch.float64:
        return dequantized(weight, scale, zero, tensor_scale).to(dtype)
    return dequantize_op(weight, scale, zero, tensor_scale, dtype)


def _float8_product(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: Inputs,
    input_scale: torch.Tensor | None,
) -> torch.Tensor | None:
    """Rows and weight as they are; None if neither kernel nor library takes them."""
    n, k = weight.shape
    arch, m = device_arch(input.device), input.numel() // k if k else 0
    if not m or not rows_fit(input.dtype, k, inputs, input_scale is None) or arch is None or arch < FLOAT8_ARCH:
        return None
    if weight.stride(1) != 1 or weight.stride(0) < k or weight.stride(0) % 16 or weight.data_ptr() % 16:
        return None
    rows = input.reshape(m, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    how = inputs.rounding(input.dtype, k)
    of_weight = weight_format("linear", weight, scale, None)
    blocks = in_blocks(of_weight, scale)
    if not (blocks or of_weight.columns == k):
        return None
    if hopper_tiles.float8_mm_refusal(m, n, k, input.dtype, arch) is None:
        numbers, steps = round_rows_op(rows, *how, input_scale)
        out = float8_mm_op(numbers, steps, weight, scale, bias, input.dtype)
        return out.view(*input.shape[:-1], n)
    in_groups = input_scale is None and inputs.group not in (0, k)
    if not library_serves(n, k, in_groups, blocks, input.dtype, arch, torch.version.cuda):
        return None
    short = -m % _ROWS_IN_BLOCKS if blocks else 0
    numbers, steps = round_rows_op(F.pad(rows, (0, 0, 0, short)) if short else rows, *how, input_scale)
    wide = scale.float().contiguous()  # it may be a part of a larger weight's
    if not blocks and (steps.numel() > 1 or wide.numel() > 1):
        steps, wide = steps.expand(m, 1).contiguous(), wide.expand(n, 1).contiguous()
    out = torch._scaled_mm(numbers, weight.t(), steps, wide.t(), out_dtype=input.dtype, use_fast_accum=False)[:m]
    out = out if bias is None else out + bias.to(out.dtype)
    return out.view(*input.shape[:-1], n)


def rows_fit(dtype: torch.dtype, k: int, inputs: Inputs, dynamic: bool) -> bool:
    """Whether rows of `k` columns are rounded by our kernel; `dynamic`: each with steps of its own."""
    if dtype not in (torch.bfloat16, torch.float16) or k % BLOCK or inputs.group not in (0, BLOCK, k):
        return False
    return not dynamic or inputs.group == BLOCK or k <= MAX_COLUMNS


def library_serves(n: int, k: int, in_groups: bool, blocks: bool, dtype: torch.dtype, arch: int, cuda: str | None) -> bool:
    """Whether `torch._scaled_mm` multiplies rows of float8, with steps for 128 columns each if `in_groups`, and a weight
    `[n, k]` with scales of `blocks` of 128 x 128, or of its rows or all of it.

    Args:
        cuda: the release that torch was built for, "12.9".
    """
    if n % 16 or in_groups != blocks or cuda is None:
        return False
    if not blocks:
        return dtype == torch.bfloat16
    release = tuple(int(part) for part in cuda.split(".")[:2])
    return arch == hopper_tiles.ARCH and release >= _CUDA_OF_BLOCKS and n % BLOCK == 0 and k % _COLUMNS_IN_BLOCKS == 0
