"""Temperature, top-k and top-p in one launch without a sort: one program per row.

Both thresholds are found by bisection over the float32 keys of the logits: how many tokens, or how much weight, lies at or
above a key. As soon as few enough are left they are gathered: most of the 32 steps look at thousands of tokens and not at the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch
from spec_ops.backends.triton.tree.build import descending_key

BLOCK = 4096
GATHERED = 8192  # tokens that are few enough


@triton.jit
def _key(logits):
    return descending_key(logits.to(tl.float32)).to(tl.int64)


@triton.jit
def _weight(logits, top, temperature):
    # Shifted before the division: a tiny temperature must not overflow to inf - inf.
    return tl.exp(tl.math.div_rn(logits.to(tl.float32) - top, temperature))


@triton.jit
def _first_maximum(logits, stride, vocab, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(logits + ids.to(tl.int64) * stride, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        where = tl.where(value > best, ids, where)
        best = tl.maximum(value, best)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, where, vocab), 0)


@triton.jit
def _tally(source, stride, size, low, top, temperature, BLOCK: tl.constexpr):
    """Of the keys from `low` on: how many, and their weight."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(source + ids.to(tl.int64) * stride, mask=ids < size, other=float("-inf"))
        above = (ids < size) & (_key(value) >= low)
        count += above.to(tl.int32)
        weight += tl.where(above, _weight(value, top, temperature), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _gather(logits, stride, vocab, low, out, BLOCK: tl.constexpr):
    """The logits of keys from `low` on, in any order."""
    base = tl.zeros([], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(logits + ids.to(tl.int64) * stride, mask=ids < vocab, other=float("-inf"))
        above = (ids < vocab) & (_key(value) >= low)
        place = base + tl.cumsum(above.to(tl.int32), 0) - 1
        tl.store(out + place, value.to(tl.float32), mask=above)
        base += tl.sum(above.to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def _search(
    logits, stride, vocab, out, gathered, low, high, top, temperature, least_count, least_weight,
    BLOCK: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """The largest key in `[low, high)` that at least so many tokens, of at least so much weight, reach; `low` if none does.

    `gathered`: how many logits `out` holds, all those from `low` on; 0 before they are few enough.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        if gathered > 0:
            count, weight = _tally(out, 1, gathered, middle, top, temperature, BLOCK)
        else:
            count, weight = _tally(logits, stride, vocab, middle, top, temperature, BLOCK)
        if (count >= least_count) & (weight >= least_weight):
            low = middle
            if (gathered == 0) & (count <= GATHERED):
                _gather(logits, stride, vocab, low, out, BLOCK)
                gathered = count
        else:
            high = middle
    return low, gathered


@triton.jit
def _tally_known(logits, stride, vocab, out, gathered, low, top, temperature, BLOCK: tl.constexpr):
    if gathered > 0:
        count, weight = _tally(out, 1, gathered, low, top, temperature, BLOCK)
    else:
        count, weight = _tally(logits, stride, vocab, low, top, temperature, BLOCK)
    return count, weight


@triton.jit
def sampling_probs_kernel(
    logits, temperatures, top_k, top_p, probs, row_stride, inner_stride, stride, temperature_stride, k_stride, p_stride,
    inner, vocab, BLOCK: tl.constexpr, GATHERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(request, inner row)`. Its row of `probs` holds the gathered logits until the last pass."""
    await_predecessors(PDL)
    request = tl.program_id(0).to(tl.int64)
    logits += request * row_stride + tl.program_id(1).to(tl.int64) * inner_stride
    out = probs + (request * inner + tl.program_id(1)) * vocab
    temperature = tl.load(temperatures + request * temperature_stride)
    top, first = _first_maximum(logits, stride, vocab, BLOCK)
    if temperature > 0:
        # Kept are the keys above `low`, and of those equal to it the first `ties`.
        low = tl.zeros([], tl.int64)
        ties = tl.zeros([], tl.int32)
        gathered = tl.zeros([], tl.int32)
        _, total = _tally(logits, stride, vocab, low, top, temperature, BLOCK)
        high = _key(top) + 1
        if top_k is not None:
            k = tl.load(top_k + request * k_stride)
            if (k >= 1) & (k < vocab):
                low, gathered = _search(
                    logits, stride, vocab, out, gathered, low, high, top, temperature, k, 0.0, BLOCK, GATHERED
                )
                reach, reach_weight = _tally_known(logits, stride, vocab, out, gathered, low, top, temperature, BLOCK)
                above, weight = _tally_known(logits, stride, vocab, out, gathered, low + 1, top, temperature, BLOCK)
                ties = (k - above).to(tl.int32)
                total = weight + ties * ((reach_weight - weight) / (reach - above))
        if top_p is not None:
            p = tl.load(top_p + request * p_stride)
            if p < 1:
                most = low
                limit = tl.maximum(p.to(tl.float64), 1e-300) * total  # at least one token
                low, gathered = _search(
                    logits, stride, vocab, out, gathered, low, high, top, temperature, 0, limit, BLOCK, GATHERED
                )
                reach, reach_weight = _tally_known(logits, stride, vocab, out, gathered, low, top, temperature, BLOCK)
                above, weight = _tally_known(logits, stride, vocab, out, gathered, low + 1, top, temperature, BLOCK)
                each = (reach_weight - weight) / (reach - above)
                room = tl.where((low == most) & (most > 0), ties, reach - above)
                ties = tl.minimum(tl.math.ceil((limit - weight) / each).to(tl.int32), room)
                total = weight + ties * each
        tl.debug_barrier()  # the gathered logits are read; now their place is written
        before = tl.zeros([], tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            value = tl.load(logits + ids.to(tl.int64) * stride, mask=ids < vocab, other=float("-inf"))
            prob = (_weight(value, top, temperature).to(tl.float64) / total).to(tl.float32)
            if top_k is not None or top_p is not None:
                key = _key(value)
                tie = (key == low) & (ids < vocab)
                rank = before + tl.cumsum(tie.to(tl.int32), 0)
                prob = tl.where((key > low) | (tie & (rank <= ties)), prob, 0.0)
                before += tl.sum(tie.to(tl.int32), 0)
            tl.store(out + ids, prob, mask=ids < vocab)
    else:
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            tl.store(out + ids, (ids == first).to(tl.float32), mask=ids < vocab)


def sampling_probs(logits, temperature, top_k, top_p) -> torch.Tensor:
    probs = logits.new_empty(logits.shape, dtype=torch.float32)
    if probs.numel():
        rows = logits if logits.dim() == 3 else logits[:, None]
        bs, inner, vocab = rows.shape
        block = min(triton.next_power_of_2(vocab), BLOCK)
        with device_guard(logits):
            launch(
                sampling_probs_kernel, (bs, inner),
                rows, temperature, top_k, top_p, probs, *rows.stride(), temperature.stride(0),
                0 if top_k is None else top_k.stride(0), 0 if top_p is None else top_p.stride(0), inner, vocab,
                BLOCK=block, GATHERED=min(GATHERED, vocab), num_warps=min(max(block // 256, 1), 16),
            )  # fmt: skip
    return probs


def ahead() -> Iterator[Variant]:
    for filters in (True, False):
        yield Variant(
            f"sampling_probs{' with top-k and top-p' if filters else ''}",
            sampling_probs_kernel,
            {"logits": "*bf16:16", "temperatures": "*fp32:16", "probs": "*fp32:16", "row_stride": "i32:16"}
            | {"inner_stride": "i32:16", "vocab": "i32:16", "inner": "i32"}
            | ({"top_k": "*i32:16", "top_p": "*fp32:16"} if filters else {"k_stride": "i32", "p_stride": "i32"}),
            {"stride": 1, "temperature_stride": 1, "BLOCK": BLOCK, "GATHERED": GATHERED}
            | ({"k_stride": 1, "p_stride": 1} if filters else {"top_k": None, "top_p": None}),
            num_warps=16,
        )
