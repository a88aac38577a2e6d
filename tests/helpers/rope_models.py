"""Attention layers as models write them, for tests of `fuse_rope_append`: ways to rotate, and what is no rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import spec_ops

HEADS, KV_HEADS, DIM, PAGES, PAGE_SIZE = 4, 2, 8, 6, 4
BS, QUERIES = 2, 3
QKV = (HEADS + 2 * KV_HEADS) * DIM

Tables = dict[str, tuple[torch.Tensor, torch.Tensor]]
Rotate = Callable[[torch.Tensor, Tables], torch.Tensor]


def tables(positions: torch.Tensor, dtype: torch.dtype) -> Tables:
    """Cosines and sines of tokens `[bs, q]`, made once for all layers: `half [bs, q, r]` in float32; in the model's dtype, as
    transformers makes them, `whole [bs, 1, q, 2 * r]`, and `part` of half as many dimensions."""
    angle = positions[..., None].float() * 2.0 ** -torch.arange(DIM // 2, device=positions.device)

    def doubled(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.cat((angle, angle), -1)
        return (whole.cos() * 1.0).to(dtype).unsqueeze(1), (whole.sin() * 1.0).to(dtype).unsqueeze(1)

    two = torch.cat((angle, 2 * angle), -1).unsqueeze(1)
    return {
        "half": (angle.cos(), angle.sin()),
        "whole": doubled(angle),
        "part": doubled(angle[..., : DIM // 4]),
        "two frequencies": (two.cos(), two.sin()),
    }


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def transformers_rope(x: torch.Tensor, t: Tables) -> torch.Tensor:
    """`x [bs, q, heads, dim]`; transformers puts heads before tokens."""
    cos, sin = t["whole"]
    x = x.transpose(1, 2)
    return (x * cos + rotate_half(x) * sin).transpose(1, 2)


def partial(x: torch.Tensor, t: Tables) -> torch.Tensor:
    """Half of each head stays as it is (Phi, GLM, StableLM)."""
    cos, sin = t["part"]
    x = x.transpose(1, 2)
    turned, kept = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat([turned * cos + rotate_half(turned) * sin, kept], -1).transpose(1, 2)


def chunks(x: torch.Tensor, t: Tables) -> torch.Tensor:
    """gpt-oss: tables of half a head."""
    cos, sin = (table.to(x.dtype).unsqueeze(1) for table in t["half"])
    first, second = torch.chunk(x.transpose(1, 2), 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).transpose(1, 2)


def in_float32(x: torch.Tensor, t: Tables) -> torch.Tensor:
    """Tokens before heads, tokens flat, arithmetic in float32."""
    cos, sin = (table.view(-1, 1, DIM // 2) for table in t["half"])
    first, second = x.flatten(0, 1).float().split(DIM // 2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype).view(x.shape)


def interleaved(x: torch.Tensor, t: Tables) -> torch.Tensor:
    """GPT-J's layout: neighbours rotate into each other."""
    cos, sin = (table[..., None, :] for table in t["half"])
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def backwards(x: torch.Tensor, t: Tables) -> torch.Tensor:
    cos, sin = t["whole"]
    x = x.transpose(1, 2)
    return (x * cos - rotate_half(x) * sin).transpose(1, 2)


def two_frequencies(x: torch.Tensor, t: Tables) -> torch.Tensor:
    """The halves of a head turn by different angles: no rotation."""
    cos, sin = t["two frequencies"]
    x = x.transpose(1, 2)
    return (x * cos + rotate_half(x) * sin).transpose(1, 2)


def by_head(x: torch.Tensor, t: Tables) -> torch.Tensor:
    """Each head has angles of its own."""
    heads = torch.arange(1.0, 1.0 + x.shape[2])[None, :, None, None]
    cos, sin = t["whole"]
    x = x.transpose(1, 2)
    return (x * (cos * heads) + rotate_half(x) * (sin * heads)).transpose(1, 2)


def scaled(x: torch.Tensor, t: Tables) -> torch.Tensor:
    """Rotated, then multiplied."""
    return transformers_rope(x, t) * 0.5


def doubled_first(x: torch.Tensor, t: Tables) -> torch.Tensor:
    """What rotates is computed by pointwise work."""
    return transformers_rope(x * 2, t)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """As transformers writes it."""
    exact = x.float()
    return weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def builtin_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return F.rms_norm(x, (DIM,), weight, eps)


def layers(
    rope: Rotate = transformers_rope,
    *,
    q_rope: Rotate | None = None,
    prepare: Callable[..., tuple[torch.Tensor, torch.Tensor]] = lambda q, k, *_: (q, k),
    after: Callable[..., Any] = lambda out, *_: out,
    count: int = 2,
    attend: bool = True,
    scale: float | None = None,
) -> Callable:
    """`(x, weight, positions, slots, table, lens, q_norm, k_norm, caches...)`: `count` layers of projection, RoPE, append and
    attention."""
    scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}

    def fn(x, weight, positions, slots, table, lens, q_norm, k_norm, *caches):
        rest, t = [], tables(positions, x.dtype)
        for k_cache, v_cache in zip(caches[::2][:count], caches[1::2][:count], strict=True):
            sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
            q, k, v = (
                (x @ weight)[..., start : start + n] for start, n in zip((0, sizes[0], sum(sizes[:2])), sizes, strict=True)
            )
            q, k, v = (part.view(*x.shape[:-1], -1, DIM) for part in (q, k, v))
            q, k = prepare(q, k, q_norm, k_norm)
            q, k = (q_rope or rope)(q, t), rope(k, t)
            spec_ops.append_kv(k_cache, v_cache, k.flatten(0, 1), v.flatten(0, 1), slots, **scales)
            if attend:
                out = spec_ops.mha_target_verify(q, k_cache, v_cache, table, lens, **scales)
                x = x + out.flatten(-2)[..., : x.shape[-1]]
            rest.append(after(x, q, k, v))
        return x, rest

    return fn


def inputs(dtype: torch.dtype = torch.float32, cache: torch.dtype | None = None, count: int = 2) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    width = 16
    lens = torch.tensor([QUERIES, 7], dtype=torch.int32)
    positions = lens[:, None].long() - QUERIES + torch.arange(QUERIES)
    table = torch.tensor([[1, 0], [4, 2]], dtype=torch.int32)
    slots = (table.long().gather(1, positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE).flatten()
    caches = [torch.randn(PAGES, PAGE_SIZE, KV_HEADS, DIM, generator=g).to(cache or dtype) for _ in range(2 * count)]
    x, weight = torch.randn(BS, QUERIES, width, generator=g), torch.randn(width, QKV, generator=g) / 4
    norms = [torch.rand(DIM, generator=g) + 0.5 for _ in range(2)]
    return [x.to(dtype), weight.to(dtype), positions, slots, table, lens, *(n.to(dtype) for n in norms), *caches]
