"""What all kernels of products ask of the rows and the weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from spec_ops.backends.weight_format import columns_of

CHUNK = 64  # of k: what one row of shared memory holds (128 bytes)


class Weight(NamedTuple):
    """A weight as an op gets it: `backends/weight_format.py`."""

    data: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None


def check_operands(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises a ValueError, as `run` does, for another k than the weight's or one that is no multiple of 64, or a weight that
    TMA cannot read."""
    k = x.shape[1]
    if k != columns_of(weight):
        raise ValueError(f"{name}: `x` must have the {columns_of(weight)} columns of `weight`, got {k}")
    if k == 0 or k % CHUNK:
        raise ValueError(f"{name}: the columns of `x` must be a multiple of {CHUNK}, got {k}")
    if not _tma_reads(weight):
        raise ValueError(
            f"{name}: `weight` must have contiguous rows that start at multiples of 16 bytes, got strides "
            f"{tuple(weight.stride())} at address {weight.data_ptr():#x}"
        )


def readable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy that TMA can read."""
    return x if _tma_reads(x) else x.clone(memory_format=torch.contiguous_format)


def _tma_reads(rows: torch.Tensor) -> bool:
    """Whether a tensor descriptor can read `rows [n, k]`: unit columns, rows and start at multiples of 16 bytes."""
    aligned = rows.stride(0) * rows.element_size() % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] and aligned


def scale_arguments(
    scale: torch.Tensor | None, zero: torch.Tensor | None, tensor_scale: torch.Tensor | None
) -> tuple[Any, ...]:  # fmt: skip
    """`scale`, `zero`, `tensor_scale` and the strides of the first two, as the kernel takes them."""
    if scale is None:
        return None, None, None, None, None
    if zero is not None and zero.stride() != scale.stride():
        scale, zero = scale.contiguous(), zero.contiguous()
    strides = 0 if scale.shape[0] == 1 else scale.stride(0), 0 if scale.shape[1] == 1 else scale.stride(1)
    return scale, zero, tensor_scale, *strides
