"""Which kernels compute a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from spec_ops.backends.expert_format import inner_of
from spec_ops.backends.squares import SUM_COLUMNS, sums_of
from spec_ops.backends.triton.moe.few import Norms, few_between_norms, supports
from spec_ops.backends.triton.moe.grouped import grouped_experts
from spec_ops.backends.triton.moe.hopper_mxfp4 import hopper_experts
from spec_ops.backends.triton.moe.hopper_mxfp4 import supports as hopper_supports
from spec_ops.backends.triton.runtime.launch import arch_of


def moe_experts(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, activation: str, gated: bool, interleaved: bool,
    transposed: bool, limit: float | None, alpha: float, beta: float, gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None, invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See `spec_ops.ops.moe`; raises as `grouped_experts` does, which takes any number of tokens if `invariant`: `few_experts`
    divides its sums by which experts the others go to.

    Raises:
        ValueError: weights of float8 before sm_89, which cannot convert them.
    """
    if gate_up.dtype == torch.float8_e4m3fn and (arch := arch_of(x.device)) < 89:
        raise ValueError(f"moe_experts: `gate_up` of float8_e4m3fn needs sm_89 or newer, got sm_{arch}")
    args = (
        x, topk_ids, topk_weights, gate_up, down, gate_up_bias, down_bias, activation, gated, interleaved, transposed, limit,
        alpha, beta, gate_up_scale, down_scale,
    )  # fmt: skip
    if invariant:
        return grouped_experts(*args, invariant=True)
    made = _between_norms(args, Norms())
    return grouped_experts(*args) if made is None else made[0]


def _between_norms(call: tuple[Any, ...], norms: Norms) -> tuple[torch.Tensor, ...] | None:
    """By kernels that compute what is around a mixture too, where one of them takes the call."""
    x, ids, _, gate_up, down, _, _, _, gated, interleaved, transposed, _, _, _, gate_up_scale, down_scale = call
    if hopper_supports(x, ids, gate_up, down, gate_up_scale, down_scale, gated, interleaved):
        return hopper_experts(*call, norms=norms)
    if supports(x, ids, gate_up, down, down.shape[1] if transposed else inner_of(down)):
        return few_between_norms(*call, norms=norms)
    return None


def scaled_moe_experts(*args: Any) -> torch.Tensor:
    """See `spec_ops.ops.moe`; raises as `moe_experts` does."""
    *call, squares, eps = args
    made = _between_norms(tuple(call), Norms(squares, eps))
    return moe_experts(_normalized(call[0], squares, eps), *call[1:]) if made is None else made[0]


def add_moe_experts(*args: Any) -> tuple[torch.Tensor, ...]:
    """See `spec_ops.ops.moe`; raises as `moe_experts` does."""
    *call, squares, eps, residual, norm_weight = args
    made = _between_norms(tuple(call), Norms(squares, eps, residual, norm_weight))
    if made is not None:
        return made
    x = call[0] if squares is None else _normalized(call[0], squares, eps)
    y = (moe_experts(x, *call[1:]).float() + residual.float()).to(x.dtype)
    padded = torch.nn.functional.pad(y.float(), (0, -y.shape[1] % SUM_COLUMNS))
    z = (y.float() * norm_weight.float()).to(x.dtype)
    return y, z, padded.view(-1, sums_of(y.shape[1]), SUM_COLUMNS).square().sum(-1)


def _normalized(x: torch.Tensor, squares: torch.Tensor, eps: float) -> torch.Tensor:
    """For kernels that do not scale: rounded once more."""
    return (x.float() * torch.rsqrt(squares.sum(1, keepdim=True) / x.shape[1] + eps)).to(x.dtype)
