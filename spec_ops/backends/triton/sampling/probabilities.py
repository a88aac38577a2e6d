"""The distribution itself: the support of every row, then one pass that writes probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch
from spec_ops.backends.triton.sampling.support import support_of_rows
from spec_ops.backends.triton.sampling.weights import KEY_SHIFT, logit_key, relative, support_of, token_place

BLOCK = 4096


@triton.jit
def sampling_probs_kernel(
    logits, temperatures, support, probs, row_stride, inner_stride, stride, temperature_stride, inner, vocab, blocks,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(row, block of tokens)`. The top of a row that is no distribution is its first NaN or infinity."""
    await_predecessors(PDL)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    request = row // inner
    logits += request * row_stride + (row % inner) * inner_stride
    temperature = tl.load(temperatures + request * temperature_stride)
    top, scale, least, total = support_of(logits, stride, support + row * 3, temperature, SHIFT)
    ids = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + ids.to(tl.int64) * stride, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    # Not the truncated weights: a token far down the tail has a probability too.
    prob = (relative(value, top, scale).to(tl.float64) * (17592186044416.0 / total.to(tl.float64))).to(tl.float32)
    prob = tl.where(token_place(logit_key(value, SHIFT), ids) >= least, prob, 0.0)
    if total == 0:
        prob = tl.where((temperature > 0) == 0, (ids == tl.load(support + row * 3)).to(tl.float32), float("nan"))
    tl.store(probs + row * vocab + ids, prob, mask=ids < vocab)


def sampling_probs(logits, temperature, top_k, top_p, min_p) -> torch.Tensor:
    probs = logits.new_empty(logits.shape, dtype=torch.float32)
    if probs.numel():
        support, _ = support_of_rows(logits, None, temperature, top_k, top_p, min_p, any_top=True)
        rows = logits if logits.dim() == 3 else logits[:, None]
        bs, inner, vocab = rows.shape
        block = min(triton.next_power_of_2(vocab), BLOCK)
        blocks = triton.cdiv(vocab, block)
        with device_guard(logits):
            launch(
                sampling_probs_kernel, (bs * inner * blocks,),
                rows, temperature, support, probs, *rows.stride(), temperature.stride(0), inner, vocab, blocks,
                BLOCK=block, SHIFT=KEY_SHIFT[logits.dtype], num_warps=min(max(block // 512, 1), 8),
            )  # fmt: skip
    return probs


def ahead() -> Iterator[Variant]:
    yield Variant(
        "sampling_probs",
        sampling_probs_kernel,
        {"logits": "*bf16:16", "temperatures": "*fp32:16", "support": "*i64:16", "probs": "*fp32:16", "row_stride": "i32:16"}
        | {"inner_stride": "i32:16", "vocab": "i32:16", "inner": "i32", "blocks": "i32"},
        {"stride": 1, "temperature_stride": 1, "BLOCK": BLOCK, "SHIFT": 16},
        num_warps=8,
    )
