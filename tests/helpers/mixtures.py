"""Calls of `moe_experts` in the forms of models, and what is exact for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from spec_ops.ops.reference import moe as reference


class Form(NamedTuple):
    """What the op takes after its tensors, and whether there are biases."""

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    biases: bool = False


FORMS = {
    "Qwen3-MoE": Form(),
    "gpt-oss": Form(interleaved=True, transposed=True, limit=1.5, alpha=1.702, beta=1.0, biases=True),
    "DeepSeek-V4": Form(limit=1.0),
    "Nemotron-H": Form("relu2", gated=False, biases=True),
    "gelu, transposed": Form("gelu", transposed=True, biases=True),
    "gelu_tanh, interleaved": Form("gelu_tanh", interleaved=True, beta=0.5),
    "relu, plain and transposed": Form("relu", gated=False, transposed=True),
}


def routing_ids(kind: str, tokens: int, experts: int, k: int, g: torch.Generator) -> torch.Tensor:
    """`[tokens, k]`: every token the same experts, any, or some of them far more often than others."""
    if kind == "identical":
        return torch.randperm(experts, generator=g)[:k].expand(tokens, k).contiguous()
    odds = torch.ones(experts) if kind == "uniform" else 1 / torch.arange(1, experts + 1)
    return torch.multinomial(odds.expand(tokens, experts), k, generator=g) if tokens else torch.zeros(0, k, dtype=torch.int64)


def call(
    form: Form, tokens: int, k: int, experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32,
    routing: str = "uniform", dropped: float = 0.0, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """The op's arguments. Results are about 1 in size. A share of the ids is no expert's, and has NaN for a weight."""
    g = torch.Generator().manual_seed(seed + 1000 * tokens + experts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    rows = inner * (2 if form.gated else 1)
    gate_up, down = normal(experts, rows, hidden) * hidden**-0.5, normal(experts, hidden, inner) * inner**-0.5
    if form.transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (normal(experts, rows).to(dtype), normal(experts, hidden).to(dtype)) if form.biases else (None, None)
    ids, weights = routing_ids(routing, tokens, experts, k, g), torch.rand(tokens, k, generator=g) / k
    gone = torch.rand(ids.shape, generator=g) < dropped
    ids = torch.where(gone, torch.where(torch.rand(ids.shape, generator=g) < 0.5, -1, experts + 3), ids)
    weights = weights.masked_fill(gone, float("nan"))
    return normal(tokens, hidden).to(dtype), ids, weights, gate_up.to(dtype), down.to(dtype), *biases, *form[:-1]


def exact(args: tuple[Any, ...]) -> torch.Tensor:
    """The result in float64; ids of no expert are dropped, as on CUDA."""
    x, ids, weights, gate_up, down, *rest = args
    ids = torch.where(ids < gate_up.shape[0], ids, -1)
    wide = [t.double() if isinstance(t, torch.Tensor) else t for t in (x, weights, gate_up, down, *rest)]
    return reference.moe_experts(wide[0], ids, *wide[1:])
