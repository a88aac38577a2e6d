"""The likeliest tokens of a row. A row is cut into parts, one program each; the program that ends last joins what they found.

A token is one int64, its logit above and its id below (`sampling/weights.py`), so that `k` rounds of a maximum find the `k`
largest in order, and equal logits by ascending id.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant, variant_of
from spec_ops.backends.triton.runtime.arrival import arrive
from spec_ops.backends.triton.runtime.counters import arrival_counters
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, recorded
from spec_ops.backends.triton.sampling.weights import key_logit, logit_key, place_id, token_place

PART = 2048  # logits of a program
NEG_INF = tl.constexpr(float("-inf"))
NO_TOKEN = tl.constexpr(-(2**63))  # below the place of every token
NAN_KEY = tl.constexpr(0x7FFFFFFF)  # stands for a NaN, above the key of infinity


@triton.jit
def _largest(places, K: tl.constexpr, K_PAD: tl.constexpr):
    """The `K` largest of `places [n]`, in descending order, and `NO_TOKEN` up to `K_PAD`."""
    slot = tl.arange(0, K_PAD)
    found = tl.full([K_PAD], NO_TOKEN, tl.int64)
    for i in tl.static_range(K):
        best = tl.max(places, 0)
        found = tl.where(slot == i, best, found)
        places = tl.where(places == best, NO_TOKEN, places)
    return found


@triton.jit
def _powers(value, live, top):
    """`exp(value - top)` where `live`, else 0; `top` may be -inf if nothing above it is live."""
    return tl.where(live & (value != NEG_INF), tl.exp(value - top), 0.0)


@triton.jit
def topk_logits_kernel(
    logits, values, ids, places, sums, counters, row_stride, stride, vocab,
    K: tl.constexpr, K_PAD: tl.constexpr, LOG: tl.constexpr, PLAIN: tl.constexpr, PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(row, part)`. `places [rows, PARTS, K_PAD]` int64, `sums [rows, PARTS]` float32 (of `exp(logit - largest of the
    part)`) and `counters`: what the programs of a row exchange, None if there is one.

    `K_PAD`, `PARTS_PAD`, `PART`: powers of 2; the first two hold `K` and `PARTS`. `LOG`: scores are log-probabilities. `PLAIN`:
    they are logits.
    """
    await_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    live = token < vocab
    value = tl.load(logits + row * row_stride + token.to(tl.int64) * stride, mask=live, other=NEG_INF).to(tl.float32)
    key = tl.where(value == value, logit_key(value, 0), NAN_KEY)
    found = _largest(tl.where(live, token_place(key, token), NO_TOKEN), K, K_PAD)
    slot = tl.arange(0, K_PAD)
    top = key_logit((tl.max(found, 0) >> 32).to(tl.int32), 0)
    total = 1.0
    if not PLAIN:
        total = tl.sum(_powers(value, live, top), 0)
    complete = part == PARTS - 1
    if PARTS > 1:
        tl.store(places + (row * PARTS + part) * K_PAD + slot, found)
        if not PLAIN:
            tl.store(sums + row * PARTS + part, total)
        complete = (arrive(counters + row, PARTS) & 0xFFFF) == PARTS - 1
        if complete:
            other = tl.arange(0, PARTS_PAD * K_PAD)
            inside = other < PARTS * K_PAD
            theirs = tl.load(places + row * PARTS * K_PAD + other, mask=inside, other=NO_TOKEN, cache_modifier=".cg")
            found = _largest(theirs, K, K_PAD)
            top = key_logit((tl.max(found, 0) >> 32).to(tl.int32), 0)
            if not PLAIN:
                each = tl.arange(0, PARTS_PAD)
                there = each < PARTS
                best = tl.load(places + (row * PARTS + each) * K_PAD, mask=there, other=NO_TOKEN, cache_modifier=".cg")
                theirs_top = key_logit((best >> 32).to(tl.int32), 0)
                part_sums = tl.load(sums + row * PARTS + each, mask=there, other=0.0, cache_modifier=".cg")
                # `abs` changes no value: it keeps the product from fusing with the sum's first step between threads, after
                # which copies of the sum differ in the last bit, and equal logits in their scores (triton-lang/triton#7264).
                total = tl.sum(tl.abs(part_sums * _powers(theirs_top, there, top)), 0)
    if complete:
        score = key_logit((found >> 32).to(tl.int32), 0)
        if PLAIN:
            own = logits + row * row_stride + place_id(found) * stride  # of zeros, whose key is that of 0.0 for -0.0 too
            score = tl.load(own, mask=(slot < K) & (score == 0.0), other=score).to(tl.float32)
        else:
            score -= top
            if LOG:
                score -= tl.log(total)
            else:
                score = tl.math.div_rn(tl.exp(score), total)
        tl.store(values + row * K + slot, score, mask=slot < K)
        tl.store(ids + row * K + slot, place_id(found), mask=slot < K)


def topk_logits(logits: torch.Tensor, k: int, scores: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See `spec_ops.ops.topk`."""
    vocab = logits.shape[-1]
    values = logits.new_empty(*logits.shape[:-1], k, dtype=dtype)
    ids = logits.new_empty(*logits.shape[:-1], k, dtype=torch.int64)
    flat = logits.reshape(-1, vocab)
    rows, parts, k_pad = flat.shape[0], triton.cdiv(vocab, PART), triton.next_power_of_2(k)
    if not rows:
        return values, ids
    places = sums = counters = None
    if parts > 1:
        places = logits.new_empty(rows, parts, k_pad, dtype=torch.int64)
        sums = logits.new_empty(rows, parts, dtype=torch.float32)
        counters = arrival_counters(logits.device, rows, "topk_logits")
    part = min(PART, triton.next_power_of_2(vocab))
    with device_guard(logits):
        launch(
            topk_logits_kernel, (rows, parts),
            flat, values, ids, places, sums, counters, *flat.stride(), vocab,
            K=k, K_PAD=k_pad, LOG=scores == "log_softmax", PLAIN=scores == "none", PARTS=parts,
            PARTS_PAD=triton.next_power_of_2(parts), PART=part, num_warps=min(max(part // 256, 1), 8), early=True,
        )  # fmt: skip
    return values, ids


def ahead() -> Iterator[Variant]:
    for rows, vocab, k, scores in ((4, 32000, 4, "log_softmax"), (8, 128256, 8, "softmax"), (2, 16, 4, "none")):
        logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device="meta")
        with recorded() as launches:
            topk_logits(logits, k, scores, torch.float32)
        yield variant_of(f"topk_logits, {k} of {vocab}", launches[0])
