"""Reference for rows that are rounded to float8: after a gated activation, after an RMS norm, or as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from spec_ops.backends.float8_rows import FLOAT8_MAX, rounding_shape
from spec_ops.ops.reference import invariant

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def round_rows(
    x: torch.Tensor,
    columns: int,
    step_dtype: torch.dtype,
    quotient_dtype: torch.dtype,
    least: float,
    zero: float,
    step: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    groups, rows = rounding_shape("round_rows", x, columns, step_dtype, quotient_dtype, step)
    return _rounded(x.float(), groups, rows, columns, step_dtype, quotient_dtype, least, zero, step)


def _rounded(
    x: torch.Tensor, groups: int, rows: int, columns: int, step_dtype: torch.dtype, quotient_dtype: torch.dtype, least: float,
    zero: float, step: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    values = x.unflatten(1, (x.shape[1] // columns, columns))
    if step is None:
        # torch divides by a number on a GPU as it is done here.
        inverse = torch.ones((), device=x.device) / FLOAT8_MAX
        steps = (values.abs().amax(2, keepdim=True) * inverse).to(step_dtype).float().clamp_min(least)
        steps = torch.where(steps == 0, zero, steps)
    else:
        steps = step.to(step_dtype).float().reshape(1, 1, 1)
    quotients = (values / steps).to(quotient_dtype).float().clamp(-FLOAT8_MAX, FLOAT8_MAX)
    numbers = quotients.to(torch.float8_e4m3fn).view(x.shape).contiguous()
    return numbers, steps.reshape(rows, groups).t().clone(memory_format=torch.contiguous_format).t()


def gated_round_rows(
    gate: torch.Tensor, up: torch.Tensor, activation: str, *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    activated = ACTIVATIONS[activation](gate.float()).to(gate.dtype)
    return round_rows(activated * up, *how)


def norm_round_rows(
    x: torch.Tensor, weight: torch.Tensor, eps: float, roundings: int, columns: int, step_dtype: torch.dtype,
    quotient_dtype: torch.dtype, least: float, zero: float, step: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    groups, rows = rounding_shape("norm_round_rows", x, columns, step_dtype, quotient_dtype, step)
    if roundings:
        out = invariant.rms_norm(x, weight, eps, roundings == 2).float()
    else:
        out = invariant.rms_norm(x.float(), weight.float(), eps, False)
    return _rounded(out, groups, rows, columns, step_dtype, quotient_dtype, least, zero, step)


def add_norm_round_rows(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, roundings: int, *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = (x + residual).contiguous()
    return total, *norm_round_rows(total, weight, eps, roundings, *how)
