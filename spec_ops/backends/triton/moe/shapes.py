"""Calls of `moe_experts` as models make them, on the meta device: what kernels are compiled for ahead of time."""

from __future__ import annotations

from typing import Any

import torch

GPT_OSS = {"interleaved": True, "transposed": True, "biases": True, "limit": 7.0, "alpha": 1.702, "beta": 1.0}
MXFP4 = {**GPT_OSS, "transposed": False, "bits": 4}  # as gpt-oss is published
FLOAT8 = {"bits": 8}  # in blocks of 128 x 128
INT4 = {"bits": 4, "group": 32}  # as Kimi-K2 is published


def meta_call(
    tokens: int, experts: int, k: int, hidden: int, inner: int, *, interleaved: bool = False, transposed: bool = False,
    biases: bool = False, limit: float | None = None, alpha: float = 1.0, beta: float = 0.0,
    dtype: torch.dtype = torch.bfloat16, bits: int = 16, group: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of the op. `group`: columns that share a scale in int4; 0: 4 bits are those of MXFP4."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    routing = empty(tokens, k, dtype=torch.int64), empty(tokens, k)
    first, second = (experts, 2 * inner, hidden), (experts, hidden, inner)
    if transposed:
        first, second = (experts, hidden, 2 * inner), (experts, inner, hidden)
    scales: list[torch.Tensor | None] = [None, None]
    stacks = [empty(*first), empty(*second)]
    if bits == 8:
        stacks = [empty(*shape, dtype=torch.float8_e4m3fn) for shape in (first, second)]
        scales = [empty(e, -(-n // 128), -(-c // 128), dtype=torch.float32) for e, n, c in (first, second)]
    elif bits == 4:
        stacks = [empty(e, n, c // 2, dtype=torch.uint8) for e, n, c in (first, second)]
        scales = [empty(e, n, c // 32, dtype=torch.uint8) for e, n, c in (first, second)]
        if group:
            scales = [empty(e, n, c // group) for e, n, c in (first, second)]
    bias = (empty(experts, 2 * inner), empty(experts, hidden)) if biases else (None, None)
    form = ("silu", True, interleaved, transposed, limit, alpha, beta)
    return empty(tokens, hidden), *routing, *stacks, *bias, *form, *scales
