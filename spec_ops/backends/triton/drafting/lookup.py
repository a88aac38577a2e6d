"""Prompt lookup. A text is cut into parts, one program each; the program that ends last joins the parts, and drafts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.arrival import arrive
from spec_ops.backends.triton.runtime.counters import arrival_counters
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch

BLOCK = 1024  # places that a program looks at together
PART = 8 * BLOCK  # of a text; one multiprocessor reads as many tokens in about a microsecond


@triton.jit
def lookup_drafts_kernel(
    tokens, lens, drafts, found, counters, row_stride, stride, lens_stride, width, max_ngram, min_ngram,
    STEPS: tl.constexpr, STEPS_BLOCK: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(request, part)`. The best place of a part is a key: the n-gram's length, then the place. `found
    [bs, PARTS]` int64 and `counters`: what the programs of a request exchange, None if there is one."""
    await_predecessors(PDL)
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tokens += request * row_stride
    length = tl.minimum(tl.load(lens + request * lens_stride).to(tl.int32), width)
    last = length - 1
    best = tl.full([], -1, tl.int64)
    for start in range(part * PART, tl.minimum((part + 1) * PART, last), BLOCK):
        place = start + tl.arange(0, BLOCK)
        same = place < last
        count = tl.zeros([BLOCK], tl.int32)
        back = tl.zeros([], tl.int32)
        while (back < max_ngram) & (tl.max(same.to(tl.int32), 0) > 0):
            # A place that is still the same is at least `back - 1` and before `last`, so the text has this token.
            wanted = tl.load(tokens + (last - back).to(tl.int64) * stride)
            same = same & (place >= back)
            token = tl.load(tokens + (place - back).to(tl.int64) * stride, mask=same, other=-1)
            same = same & (token == wanted)
            count += same.to(tl.int32)
            back += 1
        best = tl.maximum(best, tl.max((count.to(tl.int64) << 32) + place, 0))
    complete = part == PARTS - 1
    if PARTS > 1:
        tl.store(found + request * PARTS + part, best)
        complete = (arrive(counters + request, PARTS) & 0xFFFF) == PARTS - 1
        if complete:
            other = tl.arange(0, PARTS_BLOCK)
            best = tl.max(tl.load(found + request * PARTS + other, mask=other < PARTS, other=-1), 0)
    if complete:
        matched = (best >> 32) >= min_ngram
        first = (best & 0xFFFFFFFF).to(tl.int32) + 1
        step = tl.arange(0, STEPS_BLOCK)
        source = first + step % tl.maximum(length - first, 1)
        token = tl.load(tokens + source.to(tl.int64) * stride, mask=matched & (step < STEPS), other=-1).to(tl.int64)
        tl.store(drafts + request * STEPS + step, token, mask=step < STEPS)


def lookup_drafts(tokens, lens, num_steps: int, max_ngram: int, min_ngram: int) -> torch.Tensor:
    bs, width = tokens.shape
    drafts = tokens.new_empty(bs, num_steps, dtype=torch.int64)
    if bs:
        parts = max(triton.cdiv(width, PART), 1)
        found = counters = None
        if parts > 1:
            found = tokens.new_empty(bs, parts, dtype=torch.int64)
            counters = arrival_counters(tokens.device, bs, "lookup_drafts")
        with device_guard(tokens):
            launch(
                lookup_drafts_kernel, (bs, parts),
                tokens, lens, drafts, found, counters, *tokens.stride(), lens.stride(0), width, max_ngram, min_ngram,
                STEPS=num_steps, STEPS_BLOCK=triton.next_power_of_2(num_steps), PARTS=parts,
                PARTS_BLOCK=triton.next_power_of_2(parts), PART=PART, BLOCK=BLOCK, num_warps=8, early=True,
            )  # fmt: skip
    return drafts


def ahead() -> Iterator[Variant]:
    for parts, steps in ((1, 3), (17, 8)):
        shared = {"found": "*i64:16", "counters": "*i32:16"} if parts > 1 else {}
        yield Variant(
            f"lookup_drafts of {steps} tokens, {parts} parts",
            lookup_drafts_kernel,
            {"tokens": "*i64:16", "lens": "*i32:16", "drafts": "*i64:16", **shared}
            | dict.fromkeys(("row_stride", "width", "max_ngram"), "i32"),
            {"stride": 1, "lens_stride": 1, "min_ngram": 1, "STEPS": steps, "STEPS_BLOCK": triton.next_power_of_2(steps)}
            | {"PARTS": parts, "PARTS_BLOCK": triton.next_power_of_2(parts), "PART": PART, "BLOCK": BLOCK}
            | ({} if parts > 1 else {"found": None, "counters": None}),
            num_warps=8,
        )
