"""Rounding rows to float8 as `StoredTensor` and torchao write it, and what `round_rows` is called with for the same numbers."""

from __future__ import annotations

from typing import Any

import torch

from spec_ops.models.stored_tensor import Inputs

FP8 = torch.float8_e4m3fn
MEASURED = 0.0107
# How rows are rounded, and whether with one step that was measured before.
KINDS = {
    "rows": (Inputs("float8", float32_scales=True), False),
    "groups": (Inputs("float8", 128, float32_scales=True), False),
    "rows, steps of 16 bits": (Inputs("float8"), False),
    "groups, steps of 16 bits": (Inputs("float8", 128), False),
    "measured": (Inputs("float8"), True),
    "measured, float32": (Inputs("float8", float32_scales=True), True),
}


def measured(kind: str, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor | None:
    return torch.tensor([MEASURED], device=device).to(dtype) if KINDS[kind][1] else None


def how(kind: str, k: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, ...]:
    """The arguments of `round_rows` after the rows, `k` columns of `dtype`."""
    inputs, _ = KINDS[kind]
    of = torch.float32 if inputs.float32_scales else dtype
    least, zero = (torch.finfo(of).tiny, 0.0) if inputs.float32_scales else (0.0, torch.finfo(of).eps)
    return (inputs.group or k, of, of, least, zero, measured(kind, dtype, device))


def times_steps(numbers: torch.Tensor, steps: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """What `Inputs.rounded` returns, of numbers and steps of its own."""
    of = torch.float32 if KINDS[kind][0].float32_scales else dtype
    steps = steps if steps.numel() == 1 else steps.repeat_interleave(numbers.shape[1] // steps.shape[1], 1)
    return (numbers.to(of) * steps.to(of)).to(dtype)


def rows(m: int, k: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Of sizes that differ from row to row."""
    g = torch.Generator().manual_seed(m + k + seed)
    return (torch.randn(m, k, generator=g) * (torch.rand(m, 1, generator=g) * 4 + 0.1)).to(dtype).to(device)
