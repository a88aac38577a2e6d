"""RoPE of queries and keys, norms of their heads before it, and the append of keys and values, in one launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.cache.append import slot_start, stored
from spec_ops.backends.triton.runtime.ahead import ARCHS, FP8_ARCHS, Variant
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch
from spec_ops.backends.triton.runtime.repeat import empty, repeated

HEADS_BLOCK = 8


@triton.jit
def _turned(
    x, row_stride, head_stride, dim_stride, weight, eps, row, head, here, i, rest, c, s, DIM: tl.constexpr, HALF: tl.constexpr
):
    """Heads of a row in float32, normalized if there is a weight: both halves after rotation, `[heads, half]` each, and the
    dimensions that do not rotate, `[heads, rest]` (anything if there are none)."""
    there = here & (i < HALF)[None, :]
    at = x + row * row_stride + head.to(tl.int64)[:, None] * head_stride
    first_at = at + i.to(tl.int64)[None, :] * dim_stride
    first = tl.load(first_at, mask=there, other=0.0).to(tl.float32)
    second = tl.load(first_at + tl.full([], HALF, tl.int64) * dim_stride, mask=there, other=0.0).to(tl.float32)
    kept = first
    if 2 * HALF < DIM:
        rest_at = at + rest.to(tl.int64)[None, :] * dim_stride
        kept = tl.load(rest_at, mask=here & (rest < DIM)[None, :], other=0.0).to(tl.float32)
    if weight is not None:
        # `abs` changes no value: it keeps the products from fusing with the sum's first step between threads, after which
        # copies of a head's sum may differ in the last bit (triton#7264).
        squares = tl.sum(tl.abs(first * first + second * second), 1)
        if 2 * HALF < DIM:
            squares += tl.sum(tl.abs(kept * kept), 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        first = first * scale * tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
        second = second * scale * tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
        if 2 * HALF < DIM:
            kept = kept * scale * tl.load(weight + rest, mask=rest < DIM, other=0.0).to(tl.float32)[None, :]
    return first * c - second * s, second * c + first * s, kept


@triton.jit
def rope_append_kv_kernel(
    q, k, v, cos, sin, q_norm, k_norm, q_out, k_cache, v_cache, slots,
    q_row_stride, q_head_stride, q_dim_stride, k_row_stride, k_head_stride, k_dim_stride,
    v_row_stride, v_head_stride, v_dim_stride, cos_stride, sin_stride, slots_stride,
    k_page_stride, k_slot_stride, k_cache_head_stride, v_page_stride, v_slot_stride, v_cache_head_stride,
    k_scale, v_scale, norm_eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(row, block)`: `BLOCK_HEADS` heads of a row's queries, or, after those, of its keys and values."""
    await_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    i = tl.arange(0, BLOCK_HALF)
    c = tl.load(cos + row * cos_stride + i, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sin + row * sin_stride + i, mask=i < HALF, other=0.0)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    if block < q_blocks:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        here = (head < HEADS)[:, None]
        first, second, kept = _turned(
            q, q_row_stride, q_head_stride, q_dim_stride, q_norm, norm_eps, row, head, here, i, rest, c, s, DIM, HALF
        )
        there = here & (i < HALF)[None, :]
        to = q_out + (row * HEADS + head)[:, None] * DIM
        tl.store(to + i[None, :], first.to(q_out.dtype.element_ty), mask=there)
        tl.store(to + HALF + i[None, :], second.to(q_out.dtype.element_ty), mask=there)
        if 2 * HALF < DIM:
            tl.store(to + rest[None, :], kept.to(q_out.dtype.element_ty), mask=here & (rest < DIM)[None, :])
    else:
        head = (block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        slot = tl.load(slots + row * slots_stride)
        here = (head < KV_HEADS)[:, None]
        first, second, kept = _turned(
            k, k_row_stride, k_head_stride, k_dim_stride, k_norm, norm_eps, row, head, here, i, rest, c, s, DIM, HALF
        )
        there = here & (i < HALF)[None, :]
        dim = tl.arange(0, BLOCK_V)
        v_there = here & (dim < V_DIM)[None, :]
        v_at = v + row * v_row_stride + head.to(tl.int64)[:, None] * v_head_stride + dim.to(tl.int64)[None, :] * v_dim_stride
        values = tl.load(v_at, mask=v_there)
        if slot >= 0:
            element: tl.constexpr = k_cache.dtype.element_ty
            # The rotated key is rounded to the model's dtype before it is quantized, as without this op.
            to = slot_start(k_cache, slot, k_page_stride, k_slot_stride, PAGE_SIZE)
            to = to + head.to(tl.int64)[:, None] * k_cache_head_stride
            tl.store(to + i[None, :], stored(first.to(k.dtype.element_ty), k_scale, element), mask=there)
            tl.store(to + HALF + i[None, :], stored(second.to(k.dtype.element_ty), k_scale, element), mask=there)
            if 2 * HALF < DIM:
                k_rest = here & (rest < DIM)[None, :]
                tl.store(to + rest[None, :], stored(kept.to(k.dtype.element_ty), k_scale, element), mask=k_rest)
            v_to = slot_start(v_cache, slot, v_page_stride, v_slot_stride, PAGE_SIZE)
            v_to = v_to + head.to(tl.int64)[:, None] * v_cache_head_stride
            tl.store(v_to + dim[None, :], stored(values, v_scale, element), mask=v_there)


def rope_append_kv(
    q, k, v, cos, sin, k_cache, v_cache, slots, k_scale: float, v_scale: float, q_norm=None, k_norm=None, norm_eps: float = 0.0
) -> torch.Tensor:
    tensors = (q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm)
    with device_guard(q):
        return repeated(
            (rope_append_kv, k_scale, v_scale, norm_eps),
            tensors,
            q.device,
            lambda: _rope_append_kv(*tensors, k_scale, v_scale, norm_eps),
        )


def _rope_append_kv(q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, k_scale, v_scale, norm_eps) -> torch.Tensor:
    n, heads, dim = q.shape
    kv_heads, v_dim = v.shape[1:]
    out = empty(tuple(q.shape), q.dtype, q.device)
    if n == 0:
        return out
    half = cos.shape[1]
    cos, sin = (x if x.stride(1) == 1 else x.contiguous() for x in (cos, sin))
    q_weight, k_weight = (None if weight is None else weight.contiguous() for weight in (q_norm, k_norm))
    launch(
        rope_append_kv_kernel, (n, triton.cdiv(heads, HEADS_BLOCK) + triton.cdiv(kv_heads, HEADS_BLOCK)),
        q, k, v, cos, sin, q_weight, k_weight, out, k_cache, v_cache, slots,
        *q.stride(), *k.stride(), *v.stride(), cos.stride(0), sin.stride(0), slots.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], k_scale, v_scale, norm_eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, V_DIM=v_dim, HALF=half, PAGE_SIZE=k_cache.shape[1],
        BLOCK_HEADS=HEADS_BLOCK, BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(dim - 2 * half, 1)), BLOCK_V=triton.next_power_of_2(max(v_dim, 1)),
        num_warps=4, early=True,
    )  # fmt: skip
    return out


def ahead() -> Iterator[Variant]:
    strides = [f"{t}_{s}_stride" for t in "qkv" for s in ("row", "head")]
    strides += [f"{t}_{s}_stride" for t in "kv" for s in ("page", "slot", "cache_head")] + ["cos_stride", "sin_stride"]
    for cache, half, norm in (("bf16", 64, False), ("fp8e4nv", 64, False), ("bf16", 32, False), ("bf16", 64, True)):
        part = "" if half == 64 else ", half of each head rotated"
        weights = ("q_norm", "k_norm")
        yield Variant(
            f"rope_append_kv, {cache} cache{part}{', with norms' if norm else ''}",
            rope_append_kv_kernel,
            dict.fromkeys(("q", "k", "v", "q_out", *(weights if norm else ())), "*bf16:16")
            | dict.fromkeys(("cos", "sin"), "*fp32:16")
            | dict.fromkeys(("k_cache", "v_cache"), f"*{cache}:16")
            | {"slots": "*i64:16", "k_scale": "fp32", "v_scale": "fp32", "norm_eps": "fp32"}
            | dict.fromkeys(strides, "i64:16"),
            dict.fromkeys(("q_dim_stride", "k_dim_stride", "v_dim_stride", "slots_stride"), 1)
            | dict.fromkeys(() if norm else weights)
            | {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "V_DIM": 128, "HALF": half, "PAGE_SIZE": 64}
            | {"BLOCK_HEADS": HEADS_BLOCK, "BLOCK_HALF": half, "BLOCK_V": 128}
            | {"BLOCK_REST": triton.next_power_of_2(max(128 - 2 * half, 1))},
            archs=ARCHS if cache == "bf16" else FP8_ARCHS,
        )
