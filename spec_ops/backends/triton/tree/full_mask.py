"""SGLang's FULL_MASK to words, one program per request: where its rows begin is a sum of lengths on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch

LENS_BLOCK = 256


@triton.jit(do_not_specialize=["lens_stride"])
def full_mask_words_kernel(
    mask, prefix_lens, words, lens_stride, NODES: tl.constexpr, BLOCK: tl.constexpr, LENS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program `request`: its `NODES` x `NODES` last cells, a word a row."""
    await_predecessors(PDL)
    request = tl.program_id(0)
    before = tl.zeros([], tl.int64)
    for first in range(0, request, LENS_BLOCK):
        other = first + tl.arange(0, LENS_BLOCK)
        lens = tl.load(prefix_lens + other.to(tl.int64) * lens_stride, mask=other < request, other=0)
        before += tl.sum(lens.to(tl.int64))
    length = tl.load(prefix_lens + request.to(tl.int64) * lens_stride).to(tl.int64)
    node = tl.arange(0, BLOCK)
    cells = mask + NODES * (before + request.to(tl.int64) * NODES) + length
    at = node[:, None] * (length + NODES) + node[None, :]
    live = (node < NODES)[:, None] & (node < NODES)[None, :]
    seen = tl.load(cells + at, mask=live, other=0).to(tl.int64) != 0
    word = tl.sum(tl.where(seen, tl.full([1, 1], 1, tl.int64) << node[None, :].to(tl.int64), 0), 1)
    tl.store(words + request.to(tl.int64) * NODES + node, word, mask=node < NODES)


def full_mask_words(mask: torch.Tensor, prefix_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    bs = prefix_lens.shape[0]
    words = prefix_lens.new_empty(bs, num_tokens, dtype=torch.int64)
    if bs:
        with device_guard(words):
            launch(
                full_mask_words_kernel, (bs,), mask.view(torch.uint8), prefix_lens, words, prefix_lens.stride(0),
                NODES=num_tokens, BLOCK=triton.next_power_of_2(num_tokens), LENS_BLOCK=LENS_BLOCK, num_warps=4,
            )  # fmt: skip
    return words


def ahead() -> Iterator[Variant]:
    for nodes in (64, 8):
        yield Variant(
            f"full_mask_words of {nodes} nodes",
            full_mask_words_kernel,
            {"mask": "*u8:16", "prefix_lens": "*i64:16", "words": "*i64:16", "lens_stride": "i32"},
            {"NODES": nodes, "BLOCK": nodes, "LENS_BLOCK": LENS_BLOCK},
        )
