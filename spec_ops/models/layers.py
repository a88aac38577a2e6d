"""Transformer building blocks shared by targets and drafts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spec_ops.models.config import MixtureConfig, ModelConfig
from spec_ops.ops.moe import moe_experts, route_experts

Rope = tuple[torch.Tensor, torch.Tensor]


def rope_tables(positions: torch.Tensor, config: ModelConfig) -> Rope:
    """The angles of RoPE: `cos, sin [n, r]` float32 for `n` integer `positions [...]` and `2 * r` rotary dimensions.

    They are computed once for all layers, and flat, because Inductor computes a pointwise value again for every reshape of it.
    """
    half = (config.qk_rope_head_dim if config.is_mla else config.head_dim) // 2
    frequency = config.rope_theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    if config.rope_scaling is not None:
        factor, low, high, context = config.rope_scaling
        rotations = context * frequency / (2 * math.pi)  # full rotations within the original context
        kept = ((rotations - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = positions.flatten()[:, None].to(torch.float32) * frequency
    return angle.cos(), angle.sin()


def rotary(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """RoPE in the half-split ("NeoX") layout, computed in float32.

    Args:
        x: `[..., heads, dim]`.
        rope: from `rope_tables`, for all tokens of `x`, or for one row of them that all rows of the batch share.
    """
    half, tokens = x.shape[-1] // 2, x.shape[:-2]
    if rope[0].shape[0] != math.prod(tokens):
        tokens = tokens[1:]
    cos, sin = (table.view(*tokens, 1, half) for table in rope)
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _pack_in_state(module: nn.Module, packed: str, parts: tuple[str, ...], sizes: list[int]) -> None:
    """Let state dicts hold the rows of the linear layer `module.packed` as `parts`, as checkpoints do. One layer is one matrix
    product instead of several. A weight that `quantize` has stored stays whole, under the layer's own name."""

    def split(module, state, prefix, metadata) -> None:
        if is_traceable_wrapper_subclass(state[f"{prefix}{packed}.weight"]):
            return
        weight = state.pop(f"{prefix}{packed}.weight")
        state.update({f"{prefix}{name}.weight": rows for name, rows in zip(parts, weight.split(sizes), strict=True)})

    def merge(state, prefix, *_rest) -> None:
        names = [f"{prefix}{name}.weight" for name in parts]
        if all(name in state for name in names):
            state[f"{prefix}{packed}.weight"] = torch.cat([state.pop(name) for name in names])

    module._register_state_dict_hook(split)
    module._register_load_state_dict_pre_hook(merge)


def _window_left(config: ModelConfig, layer: int) -> int:
    window = config.window(layer)
    return -1 if window is None else window - 1


class DividedHead(nn.Linear):
    """An LM head whose vocabulary is divided among processes. A call gives all logits; `argmax` needs less of the others."""

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens `[...]` int64 for `hidden [..., in_features]`, the lowest id among equal ones."""
        raise NotImplementedError


def likeliest(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens `[...]` int64 of an LM head for `hidden [..., in_features]`."""
    return head.argmax(hidden) if isinstance(head, DividedHead) else head(hidden).argmax(-1)


class GQA(nn.Module):
    """Grouped-query attention.

    Args:
        config: sizes.
        layer: index in the cache.
        input_size: default the hidden size; twice that in an EAGLE-3 head.
    """

    def __init__(self, config: ModelConfig, layer: int, input_size: int | None = None) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        size = config.hidden_size if input_size is None else input_size
        self.sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv_proj = nn.Linear(size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        # Always float32, as the ops read it, so that no launch converts it.
        sinks = nn.Parameter(torch.zeros(config.num_heads, dtype=torch.float32)) if config.attention_sinks else None
        self.register_parameter("sinks", sinks)
        _pack_in_state(self, "qkv_proj", ("q_proj", "k_proj", "v_proj"), self.sizes)

    def forward(self, x: torch.Tensor, rope: Rope, attention) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in self.qkv_proj(x).split(self.sizes, -1))
        softmax = {} if self.sinks is None else {"sinks": self.sinks.float()}
        out = attention.mha(self.layer, q, k, v, rope=rope, window_left=_window_left(self.config, self.layer), **softmax)
        return self.o_proj(out.flatten(-2))


class MLA(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in the absorbed form: the cache holds one latent row per
    token, `W_UK` is folded into the query and `W_UV` into the output."""

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

    def forward(self, x: torch.Tensor, rope: Rope, attention) -> torch.Tensor:
        config = self.config
        nope, rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        q = self.q_proj(x).unflatten(-1, (config.num_heads, nope + rope_dim))
        q_rope = rotary(q[..., nope:], rope)
        q_latent = torch.einsum("...hn,hnr->...hr", q[..., :nope], self.w_uk)
        c_kv, k_rope = self.kv_a_proj(x).split([config.kv_lora_rank, rope_dim], -1)
        k_rope = rotary(k_rope[..., None, :], rope)[..., 0, :]
        out = attention.mla(
            self.layer,
            torch.cat([q_latent, q_rope], -1),
            self.kv_a_norm(c_kv),
            k_rope,
            scale=(nope + rope_dim) ** -0.5,
            window_left=_window_left(config, self.layer),
        )
        return self.o_proj(torch.einsum("...hr,hrv->...hv", out, self.w_uv).flatten(-2))


class MLP(nn.Module):
    """A SwiGLU MLP.

    Args:
        config: sizes.
        inner: its width; default that of `config`.
    """

    def __init__(self, config: ModelConfig, inner: int | None = None) -> None:
        super().__init__()
        inner = config.intermediate_size if inner is None else inner
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)
        _pack_in_state(self, "gate_up_proj", ("gate_proj", "up_proj"), [inner] * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Mixture(nn.Module):
    """A router, experts, and where the configuration has one an expert that every token goes to.

    Attributes:
        first_expert: the first of the `local_experts` that are here, a 0-dim int64 buffer; None where all are.
        gate_up_scale, down_scale: of experts in 8 or 4 bits (`quantize`), as `moe_experts` takes them; None in 16.
    """

    first_expert: torch.Tensor | None
    gate_up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None
    correction_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def __init__(self, config: ModelConfig, mixture: MixtureConfig) -> None:
        super().__init__()
        self.mixture = mixture
        count, hidden, inner = mixture.num_experts, config.hidden_size, mixture.intermediate_size
        self.router = nn.Linear(hidden, count, bias=mixture.biases)
        # A buffer, so that all ranks compile one and the same graph.
        first = torch.zeros((), dtype=torch.int64, device="cpu") if mixture.local_experts else None
        self.register_buffer("first_expert", first, persistent=False)
        held = mixture.local_experts or count
        # Always float32, as the op reads it.
        bias = nn.Parameter(torch.zeros(count, dtype=torch.float32)) if mixture.correction_bias else None
        self.register_parameter("correction_bias", bias)
        self.gate_up_proj = nn.Parameter(torch.empty(held, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(held, hidden, inner))
        nn.init.normal_(self.gate_up_proj, std=hidden**-0.5)
        nn.init.normal_(self.down_proj, std=inner**-0.5)
        for name, width in (("gate_up_bias", 2 * inner), ("down_bias", hidden)):
            self.register_parameter(name, nn.Parameter(torch.zeros(held, width)) if mixture.biases else None)
        for name in ("gate_up_scale", "down_scale"):
            self.register_parameter(name, None)
        self.shared = MLP(config, mixture.shared_intermediate_size) if mixture.shared_intermediate_size else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixture, rows = self.mixture, x.reshape(-1, x.shape[-1])
        ids, weights = route_experts(
            self.router(rows),
            mixture.experts_per_token,
            scoring=mixture.scoring,
            bias=None if self.correction_bias is None else self.correction_bias.float(),
            groups=mixture.groups,
            top_groups=mixture.top_groups,
            renormalize=mixture.renormalize,
            scale=mixture.scale,
        )
        if self.first_expert is not None:
            here = ids - self.first_expert
            ids = torch.where((here >= 0) & (here < mixture.local_experts), here, -1)
        out = moe_experts(
            rows,
            ids,
            weights,
            self.gate_up_proj,
            self.down_proj,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            limit=mixture.limit,
            alpha=mixture.alpha,
            beta=mixture.beta,
            gate_up_scale=self.gate_up_scale,
            down_scale=self.down_scale,
        ).view(x.shape)
        return out if self.shared is None else out + self.shared(x)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, or mixture of experts, with residuals."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = MLA(config, layer) if config.is_mla else GQA(config, layer)
        self.post_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        mixture = config.mixture if config.is_mixture(layer) else None
        self.mlp = MLP(config) if mixture is None else Mixture(config, mixture)

    def forward(self, x: torch.Tensor, rope: Rope, attention) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), rope, attention)
        return x + self.mlp(self.post_norm(x))
