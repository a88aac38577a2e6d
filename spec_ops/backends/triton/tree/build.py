"""Draft trees, one program per request: choosing the best candidates without a sort, and building the tree from them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch


@triton.jit
def descending_key(scores):
    """uint32 above 0 that orders float32 as a descending sort does: NaN first, and the zeros alike."""
    scores = tl.where(scores == 0, 0.0, scores)
    bits = scores.to(tl.uint32, bitcast=True)
    bits = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(scores != scores, 0xFFFFFFFF, bits).to(tl.uint32)


@triton.jit
def select_draft_tokens_kernel(
    scores, tokens, draft_tokens, selected, score_row_stride, score_stride, token_row_stride, token_stride, total,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `request`: the threshold that `COUNT` candidates reach is found bit by bit, and they leave in their order."""
    await_predecessors(PDL)
    request = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    live = candidate < total
    score = tl.load(scores + request * score_row_stride + candidate.to(tl.int64) * score_stride, mask=live, other=0.0)
    token = tl.load(tokens + request * token_row_stride + candidate.to(tl.int64) * token_stride, mask=live, other=0)
    key = tl.where(live, descending_key(score), 0)

    threshold = tl.zeros([], tl.uint32)  # the largest that COUNT keys reach, which is the COUNT-th largest key
    for bit in tl.static_range(31, -1, -1):
        higher = threshold | (1 << bit)
        threshold = tl.where(tl.sum((key >= higher).to(tl.int32)) >= COUNT, higher, threshold)
    above = key > threshold
    tie = key == threshold
    # Of equal scores the lower candidates: as many as the better ones leave room for.
    room = COUNT - tl.sum(above.to(tl.int32))
    chosen = above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))
    place = request * COUNT + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(selected + place, candidate.to(tl.int64), mask=chosen)
    tl.store(draft_tokens + place, token.to(tl.int64), mask=chosen)


def select_draft_tokens(scores, tokens, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    bs, total = scores.shape
    draft_tokens = tokens.new_empty(bs, num_tokens, dtype=torch.int64)
    selected = torch.empty_like(draft_tokens)
    if bs:
        block = triton.next_power_of_2(total)
        with device_guard(scores):
            launch(
                select_draft_tokens_kernel, (bs,),
                scores, tokens, draft_tokens, selected, *scores.stride(), *tokens.stride(), total,
                COUNT=num_tokens, BLOCK=block, num_warps=min(max(block // 256, 1), 32), early=True,
            )  # fmt: skip
    return draft_tokens, selected


@triton.jit
def build_tree_kernel(
    parent_list, selected_index, seq_lens, parents, positions, tree_mask, first_child, next_sibling,
    list_row_stride, list_stride, index_row_stride, index_stride, lens_stride, list_width,
    TOPK: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `request`: node `i` is candidate `selected_index[i - 1]`, node 0 the root."""
    await_predecessors(PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    drafted = (node > 0) & (node < NODES)
    length = tl.load(seq_lens + request * lens_stride).to(tl.int64)
    index_at = selected_index + request * index_row_stride + (node.to(tl.int64) - 1) * index_stride
    index = tl.load(index_at, mask=drafted, other=-1).to(tl.int32)
    slot = index // TOPK  # of the parent; 0 is the root
    known = drafted & (slot > 0) & (slot < list_width)
    candidate_at = parent_list + request * list_row_stride + slot.to(tl.int64) * list_stride
    candidate = tl.load(candidate_at, mask=known, other=-2).to(tl.int32)
    match = (candidate[:, None] == index[None, :]) & known[:, None]  # neither -1 nor -2 is a candidate
    parent = tl.min(tl.where(match, node[None, :], BLOCK), 1)
    parent = tl.where(parent == BLOCK, 0, parent)
    parent = tl.where(drafted, parent, -1)

    # Ancestors by pointer doubling: after round r a node knows 2^r of them, itself included.
    seen = tl.full([BLOCK], 1, tl.int64) << node.to(tl.int64)
    depth = (parent >= 0).to(tl.int32)
    next_up = parent
    for _ in tl.static_range(ROUNDS):
        up = tl.where(next_up >= 0, next_up, 0)
        above, steps, further = tl.gather(seen, up, 0), tl.gather(depth, up, 0), tl.gather(next_up, up, 0)
        seen |= tl.where(next_up >= 0, above, 0)
        depth += tl.where(next_up >= 0, steps, 0)
        next_up = tl.where(next_up >= 0, further, -1)

    is_child = (parent[None, :] == node[:, None]) & (node < NODES)[None, :]
    first = tl.min(tl.where(is_child, node[None, :], BLOCK), 1)
    is_later = (parent[None, :] == parent[:, None]) & (node[None, :] > node[:, None]) & (node < NODES)[None, :]
    following = tl.min(tl.where(is_later, node[None, :], BLOCK), 1)
    at = request * NODES + node
    tl.store(parents + at, parent.to(tl.int64), mask=node < NODES)
    tl.store(positions + at, length + depth, mask=node < NODES)
    tl.store(tree_mask + at, seen, mask=node < NODES)
    tl.store(first_child + at, tl.where(first < BLOCK, first, -1).to(tl.int64), mask=node < NODES)
    tl.store(next_sibling + at, tl.where(following < BLOCK, following, -1).to(tl.int64), mask=node < NODES)


def build_tree(parent_list, selected_index, seq_lens, topk: int) -> tuple[torch.Tensor, ...]:
    bs, drafts = selected_index.shape
    outputs = tuple(selected_index.new_empty(bs, drafts + 1) for _ in range(5))
    if bs:
        block = triton.next_power_of_2(drafts + 1)
        with device_guard(selected_index):
            launch(
                build_tree_kernel, (bs,),
                parent_list, selected_index, seq_lens, *outputs,
                *parent_list.stride(), *selected_index.stride(), seq_lens.stride(0), parent_list.shape[1],
                TOPK=topk, NODES=drafts + 1, BLOCK=block, ROUNDS=block.bit_length() - 1, num_warps=4 if block > 32 else 1,
                early=True,
            )  # fmt: skip
    return outputs


def ahead() -> Iterator[Variant]:
    for total in (520, 24):
        block = triton.next_power_of_2(total)
        yield Variant(
            f"select_draft_tokens of {total} candidates",
            select_draft_tokens_kernel,
            {"scores": "*fp32:16", "tokens": "*i64:16", "draft_tokens": "*i64:16", "selected": "*i64:16"}
            | {"score_row_stride": "i32", "token_row_stride": "i32", "total": "i32"},
            {"score_stride": 1, "token_stride": 1, "COUNT": min(total, 63), "BLOCK": block},
            num_warps=max(block // 256, 1),
        )
    for nodes in (64, 8):
        yield Variant(
            f"build_tree of {nodes} nodes",
            build_tree_kernel,
            dict.fromkeys(
                ("parent_list", "selected_index", "parents", "positions", "tree_mask", "first_child", "next_sibling"), "*i64:16"
            )
            | {"seq_lens": "*i32:16", "list_row_stride": "i32", "index_row_stride": "i32", "list_width": "i32"},
            {"list_stride": 1, "index_stride": 1, "lens_stride": 1, "TOPK": 8, "NODES": nodes, "BLOCK": nodes}
            | {"ROUNDS": nodes.bit_length() - 1},
            num_warps=4 if nodes > 32 else 1,
        )
