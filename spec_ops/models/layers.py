"""Transformer building blocks shared by targets and drafts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from spec_ops.models.config import ModelConfig


def rotary(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE in the half-split ("NeoX") layout. `x [..., heads, dim]`, `positions [...]` integers. Angles are float32."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None, None].to(torch.float32) * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _window_left(config: ModelConfig) -> int:
    return -1 if config.sliding_window is None else config.sliding_window - 1


class GQA(nn.Module):
    """Grouped-query attention; `input_size` is twice the hidden size in an EAGLE-3 head."""

    def __init__(self, config: ModelConfig, layer: int, input_size: int | None = None) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        size = config.hidden_size if input_size is None else input_size
        self.q_proj = nn.Linear(size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention) -> torch.Tensor:
        dim, theta = self.config.head_dim, self.config.rope_theta
        q = rotary(self.q_proj(x).unflatten(-1, (-1, dim)), positions, theta)
        k = rotary(self.k_proj(x).unflatten(-1, (-1, dim)), positions, theta)
        v = self.v_proj(x).unflatten(-1, (-1, dim))
        out = attention.mha(self.layer, q, k, v, window_left=_window_left(self.config))
        return self.o_proj(out.flatten(-2))


class MLA(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in the absorbed form: one latent row per token is cached,
    `W_UK` is folded into the query and `W_UV` into the output."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads, nope, rope = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        hidden, rank = config.hidden_size, config.kv_lora_rank
        if config.q_lora_rank is None:
            self.q_proj: nn.Module = nn.Linear(hidden, heads * (nope + rope), bias=False)
        else:
            self.q_proj = nn.Sequential(
                nn.Linear(hidden, config.q_lora_rank, bias=False),
                nn.RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps),
                nn.Linear(config.q_lora_rank, heads * (nope + rope), bias=False),
            )
        self.kv_a_proj = nn.Linear(hidden, rank + rope, bias=False)
        self.kv_a_norm = nn.RMSNorm(rank, eps=config.rms_norm_eps)
        self.w_uk = nn.Parameter(torch.empty(heads, nope, rank))
        self.w_uv = nn.Parameter(torch.empty(heads, rank, config.v_head_dim))
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=False)
        nn.init.normal_(self.w_uk, std=nope**-0.5)
        nn.init.normal_(self.w_uv, std=rank**-0.5)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention) -> torch.Tensor:
        config = self.config
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        q = self.q_proj(x).unflatten(-1, (config.num_heads, nope + rope))
        q_rope = rotary(q[..., nope:], positions, config.rope_theta)
        q_latent = torch.einsum("...hn,hnr->...hr", q[..., :nope], self.w_uk)
        c_kv, k_rope = self.kv_a_proj(x).split([config.kv_lora_rank, rope], -1)
        k_rope = rotary(k_rope[..., None, :], positions, config.rope_theta)[..., 0, :]
        out = attention.mla(
            self.layer,
            torch.cat([q_latent, q_rope], -1),
            self.kv_a_norm(c_kv),
            k_rope,
            scale=(nope + rope) ** -0.5,
            window_left=_window_left(config),
        )
        return self.o_proj(torch.einsum("...hr,hrv->...hv", out, self.w_uv).flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = MLA(config, layer) if config.is_mla else GQA(config, layer)
        self.post_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), positions, attention)
        return x + self.mlp(self.post_norm(x))
