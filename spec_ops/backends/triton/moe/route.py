"""The router in one launch: scores, groups, top-k and weights of a token in one program.

A program is one warp, so that `k` rounds of a maximum need no barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant, variant_of
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, recorded

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _best(choice, place, available, SIZE: tl.constexpr):
    """The first of the `available` places with the largest `choice`."""
    top = tl.max(tl.where(available, choice, NEG_INF), 0)
    return tl.min(tl.where(available & (choice == top), place, SIZE), 0)


@triton.jit
def _group_value(choice, member, place, BIAS: tl.constexpr, SIZE: tl.constexpr):
    """How good the group of the places `member` is: its best two with a bias, its best one without."""
    best = tl.max(tl.where(member, choice, NEG_INF), 0)
    if BIAS:
        first = tl.min(tl.where(member & (choice == best), place, SIZE), 0)
        best += tl.max(tl.where(member & (place != first), choice, NEG_INF), 0)
    return tl.where(best == best, best, NEG_INF)  # inf - inf


@triton.jit
def route_experts_kernel(
    logits, bias, ids, weights, row_stride, stride, bias_stride, experts, scale,
    K: tl.constexpr, K_PAD: tl.constexpr, SIGMOID: tl.constexpr, PLAIN: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `token`. `SIZE`, `K_PAD`, `GROUPS_PAD`: powers of 2 that hold the experts, `K` and the groups."""
    await_predecessors(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    live = place < experts
    value = tl.load(logits + token * row_stride + place.to(tl.int64) * stride, mask=live, other=NEG_INF).to(tl.float32)
    value = tl.where(value == value, value, NEG_INF)
    if PLAIN:
        scores = value
    elif SIGMOID:
        scores = tl.math.div_rn(1.0, 1.0 + tl.exp(-value))
    else:
        powers = tl.where(live, tl.exp(value - tl.max(value, 0)), 0.0)
        scores = tl.math.div_rn(powers, tl.sum(powers, 0))
    choice = value
    if bias is not None:
        choice = scores + tl.load(bias + place * bias_stride, mask=live, other=0.0)
        choice = tl.where(choice == choice, choice, NEG_INF)
    available = live
    if GROUPS > TOP_GROUPS:
        group = tl.arange(0, GROUPS_PAD)
        values = tl.full([GROUPS_PAD], NEG_INF, tl.float32)
        width = experts // GROUPS
        for g in tl.static_range(GROUPS):
            values = tl.where(group == g, _group_value(choice, place // width == g, place, bias is not None, SIZE), values)
        left = group < GROUPS
        available = place < 0
        for _ in tl.static_range(TOP_GROUPS):
            g = _best(values, group, left, GROUPS_PAD)
            left = left & (group != g)
            available = available | ((place // width == g) & live)
    slot = tl.arange(0, K_PAD)
    chosen = tl.zeros([K_PAD], tl.int32)
    weight = tl.zeros([K_PAD], tl.float32)
    for i in tl.static_range(K):
        expert = _best(choice, place, available, SIZE)
        available = available & (place != expert)
        chosen = tl.where(slot == i, expert, chosen)
        weight = tl.where(slot == i, tl.sum(tl.where(place == expert, scores, 0.0), 0), weight)
    if RENORMALIZE:
        weight = tl.math.div_rn(weight, tl.sum(weight, 0) + 1e-20)
    tl.store(ids + token * K + slot, chosen.to(tl.int64), mask=slot < K)
    tl.store(weights + token * K + slot, weight * scale, mask=slot < K)


def route_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, k: int, scoring: str, groups: int, top_groups: int, renormalize: bool,
    scale: float, dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `spec_ops.ops.moe`."""
    tokens, experts = logits.shape
    ids = logits.new_empty(tokens, k, dtype=torch.int64)
    weights = logits.new_empty(tokens, k, dtype=dtype)
    if tokens:
        with device_guard(logits):
            launch(
                route_experts_kernel, (tokens,),
                logits, bias, ids, weights, *logits.stride(), 0 if bias is None else bias.stride(0), experts, scale,
                **_constants(experts, k, scoring, groups, top_groups, renormalize), num_warps=1, early=True,
            )  # fmt: skip
    return ids, weights


def _constants(experts: int, k: int, scoring: str, groups: int, top_groups: int, renormalize: bool) -> dict[str, Any]:
    return {
        "K": k, "K_PAD": triton.next_power_of_2(k), "SIGMOID": scoring == "sigmoid",
        "PLAIN": scoring == "none", "GROUPS": groups, "GROUPS_PAD": triton.next_power_of_2(groups), "TOP_GROUPS": top_groups,
        "RENORMALIZE": renormalize, "SIZE": triton.next_power_of_2(experts),
    }  # fmt: skip


def ahead() -> Iterator[Variant]:
    routers = {
        "Mixtral": (8, 2, "softmax", 1, 1),
        "Qwen3-MoE": (128, 8, "softmax", 1, 1),
        "DeepSeek-V3": (256, 8, "sigmoid", 8, 4),
        "Llama 4": (128, 1, "none", 1, 1),
    }
    for name, (experts, k, scoring, groups, top_groups) in routers.items():
        sigmoid = scoring == "sigmoid"
        logits = torch.empty(8, experts, dtype=torch.float32 if sigmoid else torch.bfloat16, device="meta")
        bias = torch.empty(experts, device="meta") if sigmoid else None
        with recorded() as launches:
            route_experts(logits, bias, k, scoring, groups, top_groups, True, 1.0)
        yield variant_of(f"route_experts, {name}", launches[0])
