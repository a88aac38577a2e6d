"""Calls of `moe_experts` as models make them, on the meta device: what kernels are compiled for ahead of time."""

from __future__ import annotations

from typing import Any

import torch

GPT_OSS = {"interleaved": True, "transposed": True, "biases": True, "limit": 7.0, "alpha": 1.702, "beta": 1.0}


def meta_call(
    tokens: int, experts: int, k: int, hidden: int, inner: int, *, interleaved: bool = False, transposed: bool = False,
    biases: bool = False, limit: float | None = None, alpha: float = 1.0, beta: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of the op."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    routing = empty(tokens, k, dtype=torch.int64), empty(tokens, k)
    first, second = (experts, 2 * inner, hidden), (experts, hidden, inner)
    if transposed:
        first, second = (experts, hidden, 2 * inner), (experts, inner, hidden)
    bias = (empty(experts, 2 * inner), empty(experts, hidden)) if biases else (None, None)
    form = ("silu", True, interleaved, transposed, limit, alpha, beta)
    return empty(tokens, hidden), *routing, empty(*first), empty(*second), *bias, *form
