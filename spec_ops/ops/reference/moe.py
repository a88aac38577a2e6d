"""Reference mixtures: a choice by a stable sort, and a loop over the experts that are touched."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from spec_ops.backends.expert_format import ExpertFormat, dequantized_expert, expert_format
from spec_ops.ops._pieces import in_pieces
from spec_ops.ops.reference.collectives import add_to
from spec_ops.ops.reference.invariant import row_sum
from spec_ops.ops.reference.linear import rstd


def route_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, k: int, scoring: str, groups: int, top_groups: int, renormalize: bool,
    scale: float, dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    lowest = -torch.inf
    exact = logits.float()
    exact = torch.where(exact.isnan(), lowest, exact)
    scores = exact
    if scoring != "none":
        scores = exact.softmax(-1) if scoring == "softmax" else in_pieces(torch.sigmoid, exact)
    choice = exact if bias is None else scores + bias
    choice = torch.where(choice.isnan(), lowest, choice)
    # A group or an expert that does not count is worse than a score of -inf: two keys, sorted by the second one first.
    left_out = torch.zeros_like(choice, dtype=torch.bool)
    if groups > top_groups:
        grouped = choice.unflatten(1, (groups, -1))
        value = grouped.amax(-1) if bias is None else grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        value = torch.where(value.isnan(), lowest, value)
        best = value.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
        kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, best, True)
        left_out = ~kept.repeat_interleave(grouped.shape[2], 1)
    order = choice.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(1, left_out.gather(1, order).to(torch.int8).sort(dim=-1, stable=True).indices)
    ids = order[:, :k].contiguous()
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (row_sum(weights)[:, None] + 1e-20)
    return ids, (weights * scale).to(dtype)


def _check_ids(ids: torch.Tensor, experts: int) -> None:
    if ids.device.type == "cpu" and ids.numel() and int(ids.max()) >= experts:
        raise IndexError(f"moe_experts: `topk_ids` must be below {experts} (the experts of `gate_up`), got {int(ids.max())}")


def _activated(values: torch.Tensor, activation: str, alpha: float) -> torch.Tensor:
    if activation == "silu":
        return values * torch.sigmoid(alpha * values)
    if activation.startswith("gelu"):
        return F.gelu(values, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.relu(values) ** (2 if activation == "relu2" else 1)


def moe_experts(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, activation: str, gated: bool, interleaved: bool,
    transposed: bool, limit: float | None, alpha: float, beta: float, gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None, invariant: bool = False, *, rstd: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`rstd [T, 1]`: what the rows' first products are multiplied with."""
    if invariant:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for i in range(x.shape[0]):
            out[i] = moe_experts(
                x[i : i + 1].clone(), topk_ids[i : i + 1], topk_weights[i : i + 1], gate_up, down, gate_up_bias, down_bias,
                activation, gated, interleaved, transposed, limit, alpha, beta, gate_up_scale, down_scale,
            )[0]  # fmt: skip
        return out
    _check_ids(topk_ids, gate_up.shape[0])
    dtype = torch.promote_types(x.dtype, torch.float32)
    gate_up_format = expert_format("moe_experts", "gate_up", gate_up, gate_up_scale, 2 if gated and not interleaved else 1)
    down_format = expert_format("moe_experts", "down", down, down_scale)

    def weight(expert: int, stack: torch.Tensor, scale: torch.Tensor | None, stored: ExpertFormat) -> torch.Tensor:
        if scale is not None:
            return dequantized_expert(stack[expert], scale[expert], stored).to(dtype)
        return stack[expert].to(dtype).t() if transposed else stack[expert].to(dtype)

    made = x.new_zeros(*topk_ids.shape, x.shape[1], dtype=dtype)
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        first = weight(expert, gate_up, gate_up_scale, gate_up_format)
        second = weight(expert, down, down_scale, down_format)
        rows = F.linear(x[token].to(dtype), first)
        if rstd is not None:
            rows = rows * rstd[token].to(dtype)
        if gate_up_bias is not None:
            rows = rows + gate_up_bias[expert].to(dtype)
        if gated:
            gate, up = (rows[:, ::2], rows[:, 1::2]) if interleaved else rows.chunk(2, -1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            rows = _activated(gate, activation, alpha) * (up + beta)
        else:
            rows = _activated(rows, activation, alpha)
        made[token, slot] = F.linear(rows, second, None if down_bias is None else down_bias[expert].to(dtype))
    weights = torch.where(topk_ids >= 0, topk_weights.to(dtype), 0.0)
    return (made * weights[..., None]).sum(1).to(x.dtype)


def scaled_moe_experts(x: torch.Tensor, *args: Any) -> torch.Tensor:
    *rest, squares, eps = args
    return moe_experts(x, *rest, rstd=rstd(squares, x.shape[1], eps))


def add_moe_experts(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *rest, squares, eps, residual, norm_weight = args
    made = moe_experts(x, *rest) if squares is None else scaled_moe_experts(x, *rest, squares, eps)
    return add_to(made, residual, norm_weight)
