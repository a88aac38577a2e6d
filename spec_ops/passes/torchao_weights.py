"""torchao's NVFP4 weights in a compiled graph: the same numbers, with scales in the order that `weight_format` knows.

`NVFP4WeightOnlyConfig` stores the scales as Blackwell's tensor cores want them, in tiles of 128 x 4 whose rows are dealt out to
32 lines. They are put into rows once, and again when the weight has other scales; the numbers stay where they are. A graph of
few rows then dequantizes what `lower_skinny_mm` recognizes. Weights with an activation format keep torchao's own products.

Source: torchao's `to_blocked`; https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from spec_ops.backends.weight_format import FLOAT4_GROUPS, dequantized

_MODULE = "torchao.prototype.mx_formats.nvfp4_tensor"
_GROUP = FLOAT4_GROUPS["nvfp4"]
_TILE_ROWS, _TILE_COLUMNS, _LINES = 128, 4, 32
IN_ROWS = "scale_in_rows"  # which no weight has: sizes of an input go by its source, and tiles have others
_NAMES = ("qdata", IN_ROWS, "per_tensor_scale")
_ROWS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of a weight's scales: their version, and the scales in rows


def parts_of(weight: Any) -> tuple[str, ...] | None:
    """The names of the tensors that `dequantized_weight` takes of `weight`, `IN_ROWS` for the scales; None if that is not for
    it."""
    kind = getattr(sys.modules.get(_MODULE), "NVFP4Tensor", None)  # who has one has imported its module
    if kind is None or type(weight) is not kind or weight.act_quant_kwargs is not None or weight.dim() != 2:
        return None
    (n, k), data, scale, whole = weight.shape, weight.qdata, weight.scale, weight.per_tensor_scale
    sizes = (-(-n // _TILE_ROWS) * _LINES, -(-k // (_TILE_COLUMNS * _GROUP)) * 16) if weight.is_swizzled_scales else None
    known = (
        (data.dtype, tuple(data.shape), data.is_contiguous()) == (torch.uint8, (n, k // 2), True)
        and weight.block_size == _GROUP
        and (scale.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, sizes or (n, k // _GROUP))
        and scale.is_contiguous()
        and not scale.is_inference()  # which has no version
        and (whole is None or (whole.dtype, whole.numel()) == (torch.float32, 1))
    )
    return _NAMES[: 2 + (whole is not None)] if known else None


def dequantized_weight(data: torch.Tensor, scale: torch.Tensor, *tensor_scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """The weight `[n, k]` that torchao computes of such parts, of the dtype that is named."""
    return dequantized(data, scale, None, *tensor_scale).to(getattr(torch, dtype))


class ScalesInRows:
    """Gives a weight's scales `[n, k / 16]` at each call of a graph: the same tensor while the weight has the same scales."""

    def __init__(self) -> None:
        self._of: torch.Tensor | None = None
        self._version = -1
        self._rows: torch.Tensor | None = None

    def __call__(self, weight: Any) -> torch.Tensor:
        scale: torch.Tensor = weight.scale
        if not weight.is_swizzled_scales:
            return scale
        if self._rows is None or self._of is not scale or self._version != scale._version:
            if (known := _ROWS.get(scale)) is None or known[0] != scale._version:
                _ROWS[scale] = known = scale._version, in_rows(weight)
            self._of, (self._version, self._rows) = scale, known
        return self._rows


def in_rows(weight: Any) -> torch.Tensor:
    """The scales `[n, k / 16]` of a weight of torchao's, as they are or out of tiles."""
    (n, k), scale = weight.shape, weight.scale
    if not weight.is_swizzled_scales:
        return scale
    tiles = scale.view(-(-n // _TILE_ROWS), -1, _LINES, _TILE_ROWS // _LINES, _TILE_COLUMNS)
    rows = tiles.permute(0, 3, 2, 1, 4).flatten(0, 2).flatten(1)
    return rows[:n, : k // _GROUP].contiguous()
