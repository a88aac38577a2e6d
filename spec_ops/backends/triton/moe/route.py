"""The router in one launch: scores, groups, top-k and weights of a token in one program.

A program is one warp, so that `k` rounds of a maximum need no barrier. Maxima are those of integers, which a warp has an
instruction for (`redux.sync`); a float's takes five shuffles, one after the other.
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
NO_KEY = tl.constexpr(-(2**31))  # of a place that is taken, or is none


@triton.jit
def _key(value):
    """An integer for each number, in the same order; -0 is 0. More than `NO_KEY`."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The number that `key` stands for."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(key, place, SIZE: tl.constexpr):
    """The first of the places with the largest `key`."""
    return tl.min(tl.where(key == tl.max(key, 0), place, SIZE), 0)


@triton.jit
def _group_value(key, member, place, BIAS: tl.constexpr, SIZE: tl.constexpr):
    """How good the group of the places `member` is: its best two with a bias, its best one without."""
    members = tl.where(member, key, NO_KEY)
    value = _number(tl.max(members, 0))
    if BIAS:
        others = tl.where(place == _best(members, place, SIZE), NO_KEY, members)
        value += _number(tl.max(others, 0))
    return tl.where(value == value, value, NEG_INF)  # inf - inf


@triton.jit
def _scores(value, live, top, total, SIGMOID: tl.constexpr, PLAIN: tl.constexpr):
    """Of logits `value`, whose maximum is `top`; `total`: of all their powers."""
    if PLAIN:
        return value
    elif SIGMOID:
        return tl.math.div_rn(1.0, 1.0 + tl.exp(-value))
    else:
        return tl.math.div_rn(tl.where(live, tl.exp(value - top), 0.0), total)


@triton.jit
def _logits(logits, at, live):
    value = tl.load(logits + at, mask=live, other=NEG_INF).to(tl.float32)
    return tl.where(value == value, value, NEG_INF)


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
    logits += token * row_stride
    value = _logits(logits, place.to(tl.int64) * stride, live)
    top = 0.0
    total = 1.0
    if not PLAIN and not SIGMOID:
        top = tl.max(value, 0)
        total = tl.sum(tl.where(live, tl.exp(value - top), 0.0), 0)
    choice = value
    if bias is not None:
        choice = _scores(value, live, top, total, SIGMOID, PLAIN)
        choice += tl.load(bias + place * bias_stride, mask=live, other=0.0)
        choice = tl.where(choice == choice, choice, NEG_INF)
    key = tl.where(live, _key(choice), NO_KEY)
    if GROUPS > TOP_GROUPS:
        group = tl.arange(0, GROUPS_PAD)
        values = tl.full([GROUPS_PAD], NO_KEY, tl.int32)
        width = experts // GROUPS
        for g in tl.static_range(GROUPS):
            value_of_g = _group_value(key, place // width == g, place, bias is not None, SIZE)
            values = tl.where(group == g, _key(value_of_g), values)
        available = place < 0
        for _ in tl.static_range(TOP_GROUPS):
            g = _best(values, group, GROUPS_PAD)
            values = tl.where(group == g, NO_KEY, values)
            available = available | (place // width == g)
        key = tl.where(available, key, NO_KEY)
    slot = tl.arange(0, K_PAD)
    chosen = tl.zeros([K_PAD], tl.int32)
    for i in tl.static_range(K):
        expert = _best(key, place, SIZE)
        key = tl.where(place == expert, NO_KEY, key)
        chosen = tl.where(slot == i, expert, chosen)
    # Read again: their scores would be as many sums of a warp.
    there = slot < K
    value = _logits(logits, chosen.to(tl.int64) * stride, there)
    weight = tl.where(there, _scores(value, there, top, total, SIGMOID, PLAIN), 0.0)
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
