"""Functions that compute rows and append them, for tests of `lower_kv_append`, and their inputs.

Angles are quarter turns and values are integers that every cache dtype holds, none of them 0, so each result is exact in any
arithmetic, its sign included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import spec_ops

FP8 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, PAGES, PAGE_SIZE = 4, 2, 8, 3, 4
RANK, ROPE = 16, 8


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As models write it: `x [n, heads, 2 * r]`, angles `[n, r]`, in float32."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As transformers writes it: angles of whole heads, in the model's dtype."""
    cos, sin = (torch.cat((table, table), -1)[:, None].to(x.dtype) for table in (cos, sin))
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def partial(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half of each head is rotated."""
    rotated, r = x.shape[-1] // 2, x.shape[-1] // 4
    return torch.cat([rotary(x[..., :rotated], cos[:, :r], sin[:, :r]), x[..., rotated:]], -1)


def gqa(rope: Callable = rotary, scale: float | None = None, **append: Any) -> Callable:
    """`(qkv, cos, sin, slots, caches...) -> rotated queries`, one append for each pair of caches."""
    scales = {} if scale is None else {"k_scale": scale, "v_scale": 2 * scale}

    def fn(qkv, cos, sin, slots, *caches):
        out = []
        for k_cache, v_cache in zip(caches[::2], caches[1::2], strict=True):
            q, k, v = (x.unflatten(-1, (-1, DIM)) for x in qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1))
            spec_ops.append_kv(k_cache, v_cache, rope(k, cos, sin), v, slots, **scales, **append)
            out.append(rope(q, cos, sin))
            qkv = qkv * 2
        return torch.stack(out)

    return fn


def mla(scale: float | None = None) -> Callable:
    """`(ckv, cos, sin, slots, cache) -> latent`: the latent doubled, the rotary part rotated, both appended."""

    def fn(ckv, cos, sin, slots, cache):
        latent, rope = ckv.split([RANK, ROPE], -1)
        latent = latent * 2
        spec_ops.append_mla_kv(cache, latent, rotary(rope[:, None], cos, sin)[:, 0], slots, kv_scale=scale)
        return latent

    return fn


def inputs(
    kind: str = "gqa", n: int = 5, dtype: torch.dtype = torch.bfloat16, slots: list[int] | None = None, layers: int = 1
) -> list[torch.Tensor]:
    """For `gqa()` or `mla()`; caches are filled, so that a write to a wrong place shows."""
    g = torch.Generator().manual_seed(n)
    width = (HEADS + 2 * KV_HEADS) * DIM if kind == "gqa" else RANK + ROPE
    rows = torch.randint(1, 8, (n, width), generator=g) * (2 * torch.randint(2, (n, width), generator=g) - 1)
    rows = rows.to(torch.bfloat16 if dtype == FP8 else dtype)
    turns = torch.randint(4, (n, DIM // 2), generator=g)
    cos, sin = (torch.tensor(table, dtype=torch.float32)[turns] for table in ([1, 0, -1, 0], [0, 1, 0, -1]))
    places = torch.tensor(slots if slots is not None else torch.randperm(PAGES * PAGE_SIZE, generator=g)[:n].tolist())
    shape = (PAGES, PAGE_SIZE, KV_HEADS, DIM) if kind == "gqa" else (PAGES, PAGE_SIZE, RANK + ROPE)
    caches = [torch.full(shape, 0.5 + i).to(dtype) for i in range(2 * layers if kind == "gqa" else layers)]
    return [rows, cos, sin, places, *caches]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)
