"""Which kernels compute a mixture of experts."""

from __future__ import annotations

import torch

from spec_ops.backends.expert_format import inner_of
from spec_ops.backends.triton.moe.few import few_experts, supports
from spec_ops.backends.triton.moe.grouped import grouped_experts
from spec_ops.backends.triton.runtime.launch import arch_of


def moe_experts(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, activation: str, gated: bool, interleaved: bool,
    transposed: bool, limit: float | None, alpha: float, beta: float, gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None, invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See `spec_ops.ops.moe`; raises as `grouped_experts` does. `invariant`: a launch for each token, so that neither the tile
    nor the sharing of a sum depends on the others.

    Raises:
        ValueError: weights of float8 before sm_89, which cannot convert them.
    """
    if gate_up.dtype == torch.float8_e4m3fn and (arch := arch_of(x.device)) < 89:
        raise ValueError(f"moe_experts: `gate_up` of float8_e4m3fn needs sm_89 or newer, got sm_{arch}")
    if invariant:
        out = x.new_empty(x.shape)
        for i in range(x.shape[0]):
            out[i : i + 1] = moe_experts(
                x[i : i + 1].clone(), topk_ids[i : i + 1], topk_weights[i : i + 1], gate_up, down, gate_up_bias, down_bias,
                activation, gated, interleaved, transposed, limit, alpha, beta, gate_up_scale, down_scale,
            )  # fmt: skip
        return out
    inner = down.shape[1] if transposed else inner_of(down)
    run = few_experts if supports(x, topk_ids, gate_up, down, inner) else grouped_experts
    return run(
        x, topk_ids, topk_weights, gate_up, down, gate_up_bias, down_bias, activation, gated, interleaved, transposed, limit,
        alpha, beta, gate_up_scale, down_scale,
    )  # fmt: skip
