"""Which kernels compute a mixture of experts."""

from __future__ import annotations

import torch

from spec_ops.backends.triton.moe.few import few_experts, supports
from spec_ops.backends.triton.moe.grouped import grouped_experts


def moe_experts(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, activation: str, gated: bool, interleaved: bool,
    transposed: bool, limit: float | None, alpha: float, beta: float,
) -> torch.Tensor:  # fmt: skip
    """See `spec_ops.ops.moe`; raises as `grouped_experts` does."""
    run = few_experts if supports(x, topk_ids, gate_up, down, down.shape[1 if transposed else 2]) else grouped_experts
    return run(
        x, topk_ids, topk_weights, gate_up, down, gate_up_bias, down_bias, activation, gated, interleaved, transposed, limit,
        alpha, beta,
    )  # fmt: skip
