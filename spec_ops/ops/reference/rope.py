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


def rope_append_kv(q, k, v, cos, sin, k_cache, v_cache, slots, k_scale: float, v_scale: float) -> torch.Tensor:
    check_slots("rope_append_kv", "slots", slots, k_cache)
    append_kv(k_cache, v_cache, rotate(k, cos, sin), v, slots, k_scale, v_scale)
    return rotate(q, cos, sin)
