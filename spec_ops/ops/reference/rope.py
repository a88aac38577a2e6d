"""Reference RoPE followed by the reference append."""

from __future__ import annotations

import torch

from spec_ops.ops.reference.kv_cache import append_kv, check_slots


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x [n, heads, dim]` by angles `[n, r]`, in float32; dimensions from `2 * r` on pass through."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., 2 * half :]], -1).contiguous()


def normalize(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm of each head of `x [..., dim]`, float32; `x` itself without a weight."""
    if weight is None:
        return x
    exact = x.float()
    return exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rope_append_kv(
    q, k, v, cos, sin, k_cache, v_cache, slots, k_scale: float, v_scale: float, q_norm=None, k_norm=None, norm_eps: float = 0.0
) -> torch.Tensor:
    check_slots("rope_append_kv", "slots", slots, k_cache)
    keys = rotate(normalize(k, k_norm, norm_eps), cos, sin).to(k.dtype)
    append_kv(k_cache, v_cache, keys, v, slots, k_scale, v_scale)
    return rotate(normalize(q, q_norm, norm_eps), cos, sin).to(q.dtype)
