"""To which numbers layers round their rows, beside weights of 8 and 4 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_ops.backends.weight_format import E2M1_MAX, e2m1, packed_e2m1

_LEAST_SCALE = 0.125  # of e4m3, where one would be 0, as in compressed-tensors
_RANGES = {"float8": (-448.0, 448.0), "int8": (-128.0, 127.0)}


class Inputs(NamedTuple):
    """To which numbers a layer rounds its rows, as checkpoints of 8-bit and 4-bit activations ask for; they keep their dtype.

    A product of few rows of float8 with a weight of float8 takes the numbers and the scales themselves where a kernel can
    (`lower_skinny_mm`).

    Attributes:
        kind: `"float8"` or `"int8"`, symmetric; `"nvfp4"`.
        group: columns of a row that share a scale; 0: all of them. 16 for `"nvfp4"`.
        float32_scales: whether scales of 8 bits are float32, as DeepSeek's `act_quant` has them; else of the rows' dtype, as
            compressed-tensors has them.
    """

    kind: str
    group: int = 0
    float32_scales: bool = False

    def rounded(self, rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """`rows [..., k]`, with the scale `[1]` or one from the greatest magnitude of each group. `"nvfp4"` has both: groups'
        scales times `scale` are numbers of e4m3."""
        if self.kind == "nvfp4" and scale is not None:
            return self._float4(rows, scale)
        low, high = _RANGES[self.kind]
        values = rows.unflatten(-1, (-1, self.group)) if self.group else rows
        values = values.float() if self.float32_scales else values
        if scale is None:
            steps = values.abs().amax(-1, keepdim=True) / ((high - low) / 2)
            least, zero = self._small(steps.dtype)
            steps = torch.where(steps == 0, zero, steps) if zero else steps.clamp_min(least)
        else:
            steps = scale.to(values.dtype)
        numbers = (values / steps).clamp(low, high)
        numbers = numbers.round() if self.kind == "int8" else numbers.to(torch.float8_e4m3fn).to(values.dtype)
        return (numbers * steps).to(rows.dtype).view(rows.shape)

    def _small(self, dtype: torch.dtype) -> tuple[float, float]:
        """The least step, and what stands in for one of 0: rows of zeros stay zeros."""
        limits = torch.finfo(dtype)
        return (limits.tiny, 0.0) if self.float32_scales else (0.0, limits.eps)

    def rounding(self, dtype: torch.dtype, k: int) -> tuple[int, torch.dtype, torch.dtype, float, float]:
        """What `spec_ops.ops.rounding.round_rows_op` takes after rows `[m, k]` of `dtype`, for `"float8"`: numbers times steps
        are what `rounded` returns on a GPU, bit for bit."""
        of = torch.float32 if self.float32_scales else dtype
        return (self.group or k, of, of, *self._small(of))

    def _float4(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        values = rows.unflatten(-1, (-1, self.group))
        stored = (scale * (values.abs().amax(-1, keepdim=True) / E2M1_MAX)).clamp(max=_RANGES["float8"][1])
        stored = stored.to(torch.float8_e4m3fn).to(torch.float32)
        steps = torch.where(stored == 0, _LEAST_SCALE, stored) / scale
        numbers = e2m1(packed_e2m1((values / steps).reshape(-1, rows.shape[-1]))).view(values.shape)
        return (numbers * steps).to(rows.dtype).view(rows.shape)
