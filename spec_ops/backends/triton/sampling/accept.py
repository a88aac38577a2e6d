"""Acceptance and sampling, one program per request: the walk, then one pass over the vocabulary for the last token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch

VOCAB_BLOCK = 8192  # of a row that one program streams: 8 warps with 128 bytes a thread in flight, twice


@triton.jit(do_not_specialize=["path_len"])
def accept_greedy_kernel(
    candidates, target_tokens, parents, tokens, path, lens,
    candidate_row_stride, candidate_stride, target_row_stride, target_stride, parent_row_stride, parent_stride, path_len,
    NODES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_predecessors(PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    live = node < NODES
    candidates += request * candidate_row_stride
    target_tokens += request * target_row_stride
    tokens += request * path_len
    path += request * path_len
    target = tl.load(target_tokens + node.to(tl.int64) * target_stride, mask=live, other=0).to(tl.int64)
    if parents is None:
        following = node + 1
        drafted = tl.load(candidates + following.to(tl.int64) * candidate_stride, mask=following < NODES, other=0).to(tl.int64)
        wrong = (drafted != target) | (following >= NODES)
        last = tl.min(tl.where(wrong & live, node, NODES), 0)
        tl.store(tokens + node, tl.where(node <= last, target, -1), mask=live)
        tl.store(path + node, tl.where(node <= last, node, -1).to(tl.int64), mask=live)
        tl.store(lens + request, last + 1)
    else:
        drafted = tl.load(candidates + node.to(tl.int64) * candidate_stride, mask=live, other=0).to(tl.int64)
        parent_at = parents + request * parent_row_stride + node.to(tl.int64) * parent_stride
        parent = tl.load(parent_at, mask=live, other=-2)
        current = tl.zeros([], tl.int32)
        accepted = tl.zeros([], tl.int32)
        going = current == 0
        for step in range(path_len):
            token = tl.sum(tl.where(node == current, target, 0), 0)
            tl.store(tokens + step, tl.where(going, token, -1))
            tl.store(path + step, tl.where(going, current, -1).to(tl.int64))
            accepted += going.to(tl.int32)
            child = tl.min(tl.where((parent == current) & (drafted == token), node, BLOCK), 0)
            going = going & (child < BLOCK)
            current = tl.where(going, child, current)
        tl.store(lens + request, accepted)


def _accepted(candidates, path_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = candidates.new_empty(candidates.shape[0], path_len, dtype=torch.int64)
    return tokens, torch.empty_like(tokens), candidates.new_empty(candidates.shape[0], dtype=torch.int32)


def _strides(tensor: torch.Tensor | None, rank: int) -> tuple[int, ...]:
    return (0,) * rank if tensor is None else tensor.stride()


def accept_greedy(candidates, target_tokens, parents, path_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bs, nodes = candidates.shape
    outputs = _accepted(candidates, path_len)
    if bs:
        block = triton.next_power_of_2(nodes)
        with device_guard(candidates):
            launch(
                accept_greedy_kernel, (bs,),
                candidates, target_tokens, parents, *outputs,
                *candidates.stride(), *target_tokens.stride(), *_strides(parents, 2), path_len,
                NODES=nodes, BLOCK=block, num_warps=min(max(block // 128, 1), 8), early=True,
            )  # fmt: skip
    return outputs


@triton.jit
def _next_dropped(dropped, low, none):
    return tl.min(tl.where(dropped >= low, dropped, none), 0)


@triton.jit
def _load_block(probs, stride, rejected, rejected_stride, subtract, start, vocab, BLOCK: tl.constexpr):
    """Probabilities of `BLOCK` tokens, and what is taken from them where `subtract` (nothing where `rejected` is None)."""
    ids = (start + tl.arange(0, BLOCK)).to(tl.int64)
    given = tl.load(probs + ids * stride, mask=ids < vocab, other=0.0)
    taken = given
    if rejected is not None:
        taken = tl.load(rejected + ids * rejected_stride, mask=(ids < vocab) & subtract, other=0.0)
    return given, taken


@triton.jit
def _weigh(given, taken, rejected, dropped, following, start, vocab, BLOCK: tl.constexpr):
    """The block's weights, and the first token after it of `dropped`: those that weigh nothing, or None; `following` is the
    first of them from `start` on."""
    weights = given
    if rejected is not None:
        weights = tl.where(taken > given, 0.0, given - taken)  # a NaN stays one, unlike in tl.maximum
    if dropped is not None:
        ids = start + tl.arange(0, BLOCK)
        while following < min(start + BLOCK, vocab):
            weights = tl.where(ids == following, 0.0, weights)
            following = _next_dropped(dropped, following + 1, vocab)
    return weights, following


@triton.jit
def _block_sums(
    probs, stride, rejected, rejected_stride, subtract, dropped, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    block = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.float64)
    following = vocab
    if dropped is not None:
        following = _next_dropped(dropped, 0, vocab)
    given, taken = _load_block(probs, stride, rejected, rejected_stride, subtract, 0, vocab, BLOCK)
    for start in range(0, vocab, BLOCK):
        # The next block is on its way while this one is summed: a program has a multiprocessor's bandwidth for itself.
        coming, coming_taken = _load_block(probs, stride, rejected, rejected_stride, subtract, start + BLOCK, vocab, BLOCK)
        weights, following = _weigh(given, taken, rejected, dropped, following, start, vocab, BLOCK)
        sums = tl.where(block == start // BLOCK, tl.sum(weights.to(tl.float64), 0), sums)
        given, taken = coming, coming_taken
    return sums


@triton.jit
def _draw(
    uniform, probs, stride, rejected, rejected_stride, subtract, dropped, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Inverse CDF in float64: the first token whose cumulative weight exceeds `uniform * total`; -1 where the total is zero,
    NaN or infinite."""
    block = tl.arange(0, BLOCKS)
    sums = _block_sums(probs, stride, rejected, rejected_stride, subtract, dropped, vocab, BLOCK, BLOCKS)
    if rejected is not None or dropped is not None:  # noqa: SIM102  decided while compiling, unlike what follows
        # Rounding may leave nothing although a draft was rejected, and a draft's NaN no distribution: the target itself is then
        # the distribution.
        if (tl.sum(sums, 0) > 0) == 0:
            if rejected is not None:
                subtract = subtract & False
            if dropped is not None:
                dropped = tl.full(dropped.shape, -1, dropped.dtype)
            sums = _block_sums(probs, stride, rejected, rejected_stride, subtract, dropped, vocab, BLOCK, BLOCKS)
    total = tl.sum(sums, 0)
    level = uniform.to(tl.float64) * total
    chosen = tl.sum((tl.cumsum(sums, 0) <= level).to(tl.int32), 0)
    chosen = tl.minimum(chosen, tl.max(tl.where(sums > 0, block, 0), 0))
    start = chosen * BLOCK
    following = vocab
    if dropped is not None:
        following = _next_dropped(dropped, start, vocab)
    given, taken = _load_block(probs, stride, rejected, rejected_stride, subtract, start, vocab, BLOCK)
    weights, _ = _weigh(given, taken, rejected, dropped, following, start, vocab, BLOCK)
    cumulative = tl.sum(tl.where(block < chosen, sums, 0.0), 0) + tl.cumsum(weights.to(tl.float64), 0)
    at = tl.arange(0, BLOCK)
    first = tl.min(tl.where((cumulative > level) & (weights > 0), at, BLOCK), 0)
    # Partial sums of another order may end a rounding below the block's: the last token with a weight is then meant.
    last = tl.max(tl.where(weights > 0, at, 0), 0)
    token = start + tl.where(first < BLOCK, first, last)
    return tl.where((total > 0) & (total < float("inf")), token, -1).to(tl.int64)


@triton.jit
def sample_tokens_kernel(
    probs, uniforms, tokens, row_stride, stride, uniform_stride, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    uniform = tl.load(uniforms + row * uniform_stride)
    token = _draw(uniform, probs + row * row_stride, stride, None, 0, None, None, vocab, BLOCK, BLOCKS)
    tl.store(tokens + row, token)


def _vocab_blocks(vocab: int) -> dict[str, Any]:
    block = min(triton.next_power_of_2(vocab), VOCAB_BLOCK)
    blocks = triton.next_power_of_2(triton.cdiv(vocab, block))
    return {"BLOCK": block, "BLOCKS": blocks, "num_warps": min(max(block // 1024, 1), 8)}


def sample_tokens(probs, uniforms) -> torch.Tensor:
    tokens = probs.new_empty(probs.shape[:-1], dtype=torch.int64)
    if tokens.numel():
        vocab = probs.shape[-1]
        rows, flat = probs.reshape(-1, vocab), uniforms.reshape(-1)
        with device_guard(probs):
            launch(
                sample_tokens_kernel, (flat.shape[0],),
                rows, flat, tokens, *rows.stride(), flat.stride(0), vocab, **_vocab_blocks(vocab)
            )  # fmt: skip
    return tokens


@triton.jit
def _draft_ids(drafted, draft_to_target, map_stride, draft_vocab, NODE_BLOCK: tl.constexpr):
    """Ids in the draft's vocabulary of target ids; -1 for tokens it does not have."""
    BLOCK: tl.constexpr = 16384 // NODE_BLOCK
    found = tl.full([NODE_BLOCK], -1, tl.int32)
    for first in range(0, draft_vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        targets = tl.load(draft_to_target + ids.to(tl.int64) * map_stride, mask=ids < draft_vocab, other=-1)
        found = tl.maximum(found, tl.max(tl.where(targets[:, None] == drafted[None, :], ids[:, None], -1), 0))
    return found


@triton.jit
def _spread(row, probs, stride, draft_to_target, map_stride, draft_vocab, vocab, BLOCK: tl.constexpr):
    """Writes a distribution over the draft's vocabulary into `row`, over the target's."""
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        tl.store(row + ids, tl.zeros([BLOCK], tl.float32), mask=ids < vocab)
    tl.debug_barrier()
    for first in range(0, draft_vocab, BLOCK):
        ids = (first + tl.arange(0, BLOCK)).to(tl.int64)
        values = tl.load(probs + ids * stride, mask=ids < draft_vocab)
        tl.store(row + tl.load(draft_to_target + ids * map_stride, mask=ids < draft_vocab), values, mask=ids < draft_vocab)
    tl.debug_barrier()


@triton.jit
def accept_sampled_chain_kernel(
    candidates, target_probs, uniforms, final_uniforms, draft_probs, draft_to_target, spread, tokens, path, lens,
    candidate_row_stride, candidate_stride, target_row_stride, target_node_stride, target_stride,
    uniform_row_stride, uniform_stride, final_stride, draft_row_stride, draft_node_stride, draft_stride, map_stride,
    vocab, draft_vocab, NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program `request`: rejection sampling. `spread`: a row of the target's vocabulary for each request, where the draft's
    is another."""
    await_predecessors(PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODE_BLOCK)
    inner = node < NODES - 1
    target_probs += request * target_row_stride
    draft_probs += request * draft_row_stride
    drafted_at = candidates + request * candidate_row_stride + (node.to(tl.int64) + 1) * candidate_stride
    drafted = tl.load(drafted_at, mask=inner, other=-1).to(tl.int64)
    inner = drafted >= 0  # -1: no draft was given there
    uniform = tl.load(uniforms + request * uniform_row_stride + node.to(tl.int64) * uniform_stride, mask=inner, other=0.0)
    final_uniform = tl.load(final_uniforms + request * final_stride)
    p = tl.load(target_probs + node.to(tl.int64) * target_node_stride + drafted * target_stride, mask=inner, other=0.0)
    draft_ids = drafted
    if draft_to_target is not None:
        draft_ids = _draft_ids(drafted, draft_to_target, map_stride, draft_vocab, NODE_BLOCK).to(tl.int64)
    has_id = inner & (draft_ids >= 0)
    q = tl.load(draft_probs + node.to(tl.int64) * draft_node_stride + draft_ids * draft_stride, mask=has_id, other=0.0)
    accepted = inner & (p > 0) & (uniform * q < p)
    last = tl.min(tl.where(accepted, NODES, node), 0)  # the first whose child is not accepted; the last node has none
    subtract = tl.max(tl.where(node == last, drafted, -1), 0) >= 0  # a draft was given there, and is rejected

    rejected, rejected_stride = draft_probs + last.to(tl.int64) * draft_node_stride, draft_stride
    if draft_to_target is not None:
        row = spread + request * vocab
        if subtract:
            _spread(row, rejected, draft_stride, draft_to_target, map_stride, draft_vocab, vocab, BLOCK)
        rejected, rejected_stride = row, 1
    probs = target_probs + last.to(tl.int64) * target_node_stride
    final = _draw(final_uniform, probs, target_stride, rejected, rejected_stride, subtract, None, vocab, BLOCK, BLOCKS)

    at = request * NODES + node
    token = tl.where(node < last, drafted, tl.where(node == last, final, -1))
    tl.store(tokens + at, token, mask=node < NODES)
    tl.store(path + at, tl.where(node <= last, node, -1).to(tl.int64), mask=node < NODES)
    tl.store(lens + request, last + 1)


@triton.jit(do_not_specialize=["path_len", "final_stride"])  # a batch of one has any stride
def accept_sampled_tree_kernel(
    candidates, target_probs, uniforms, final_uniforms, parents, tokens, path, lens,
    candidate_row_stride, candidate_stride, target_row_stride, target_node_stride, target_stride,
    uniform_row_stride, uniform_stride, final_stride, parent_row_stride, parent_stride, vocab, path_len,
    threshold_single, threshold_acc,
    NODES: tl.constexpr, NODE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `request`: target-only sampling on a tree, or on a chain where `parents` is None."""
    await_predecessors(PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODE_BLOCK)
    drafted = (node > 0) & (node < NODES)
    target_probs += request * target_row_stride
    uniforms += request * uniform_row_stride
    tokens += request * path_len
    path += request * path_len
    candidate_at = candidates + request * candidate_row_stride + node.to(tl.int64) * candidate_stride
    candidate = tl.load(candidate_at, mask=drafted, other=-1).to(tl.int64)
    final_uniform = tl.load(final_uniforms + request * final_stride)
    drafted = drafted & (candidate >= 0)  # -1: no draft was given there
    parent = node - 1
    if parents is not None:
        parent_at = parents + request * parent_row_stride + node.to(tl.int64) * parent_stride
        parent = tl.load(parent_at, mask=drafted, other=-1).to(tl.int32)

    current = tl.zeros([], tl.int32)
    accepted = tl.full([], 1, tl.int32)
    going = current == 0
    tl.store(path, tl.zeros([], tl.int64))
    for step in range(1, path_len):
        probs = target_probs + current.to(tl.int64) * target_node_stride
        child = drafted & (parent == current)
        p = tl.load(probs + candidate * target_stride, mask=child, other=0.0)
        coin = tl.load(uniforms + current.to(tl.int64) * uniform_stride)
        # In float64 and rounded: as torch sums on CPU, and the same in any order of adding.
        running = tl.math.div_rn(tl.cumsum(p.to(tl.float64), 0).to(tl.float32), threshold_acc)
        take = child & (p > 0) & ((coin < running) | (p >= threshold_single))
        taken = tl.min(tl.where(take, node, NODE_BLOCK), 0)
        going = going & (taken < NODE_BLOCK)
        current = tl.where(going, taken, current)
        accepted += going.to(tl.int32)
        token = tl.load(candidates + request * candidate_row_stride + current.to(tl.int64) * candidate_stride).to(tl.int64)
        tl.store(tokens + step - 1, tl.where(going, token, -1))
        tl.store(path + step, tl.where(going, current, -1).to(tl.int64))

    # A walk that stopped because the path is full has rejected nothing: its node's children are no candidates.
    dropped = tl.where(drafted & (parent == current) & (going == 0), candidate, -1).to(tl.int32)
    probs = target_probs + current.to(tl.int64) * target_node_stride
    final = _draw(final_uniform, probs, target_stride, None, 0, None, dropped, vocab, BLOCK, BLOCKS)
    tl.store(tokens + path_len - 1, tl.full([], -1, tl.int64))
    tl.debug_barrier()  # the last token takes the place of a -1
    tl.store(tokens + accepted - 1, final)
    tl.store(lens + request, accepted)


def accept_sampled(
    candidates, target_probs, uniforms, final_uniforms, parents, draft_probs, draft_to_target, path_len: int,
    threshold_single: float, threshold_acc: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    bs, nodes = candidates.shape
    vocab = target_probs.shape[2]
    outputs = _accepted(candidates, path_len)
    if not bs:
        return outputs
    strides = (*candidates.stride(), *target_probs.stride(), *uniforms.stride(), final_uniforms.stride(0))
    sizes = {"NODES": nodes, "NODE_BLOCK": triton.next_power_of_2(nodes), **_vocab_blocks(vocab)}
    with device_guard(candidates):
        if draft_probs is None:
            launch(
                accept_sampled_tree_kernel, (bs,),
                candidates, target_probs, uniforms, final_uniforms, parents, *outputs, *strides, *_strides(parents, 2),
                vocab, path_len, threshold_single, threshold_acc, **sizes,
            )  # fmt: skip
        else:
            # Only with a reduced vocabulary: what was rejected has to lie in the order of the target's ids.
            spread = None if draft_to_target is None else target_probs.new_empty(bs, vocab)
            launch(
                accept_sampled_chain_kernel, (bs,),
                candidates, target_probs, uniforms, final_uniforms, draft_probs, draft_to_target, spread, *outputs,
                *strides, *draft_probs.stride(), *_strides(draft_to_target, 1), vocab, draft_probs.shape[2], **sizes,
            )  # fmt: skip
    return outputs


def ahead() -> Iterator[Variant]:
    outputs = {"tokens": "*i64:16", "path": "*i64:16", "lens": "*i32:16"}
    ones = {"candidate_stride": 1}
    for nodes, tree in ((64, True), (4, False)):
        yield Variant(
            f"accept_greedy, {'tree' if tree else 'chain'} of {nodes}",
            accept_greedy_kernel,
            {"candidates": "*i64:16", "target_tokens": "*i64:16", "candidate_row_stride": "i32", "target_row_stride": "i32"}
            | {"parent_row_stride": "i32", "path_len": "i32"}
            | outputs
            | ({"parents": "*i64:16"} if tree else {"parent_stride": "i32"}),
            ones | {"target_stride": 1, "NODES": nodes, "BLOCK": nodes} | ({"parent_stride": 1} if tree else {"parents": None}),
            num_warps=1,
        )
    vocab = 131072
    sizes = _vocab_blocks(vocab)
    num_warps = sizes.pop("num_warps")
    yield Variant(
        "sample_tokens",
        sample_tokens_kernel,
        {"probs": "*fp32:16", "uniforms": "*fp32:16", "tokens": "*i64:16", "row_stride": "i32:16", "vocab": "i32:16"},
        {"stride": 1, "uniform_stride": 1} | sizes,
        num_warps=num_warps,
    )
    inputs = {"candidates": "*i64:16", "target_probs": "*fp32:16", "uniforms": "*fp32:16", "final_uniforms": "*fp32:16"}
    inputs |= {"candidate_row_stride": "i32", "target_row_stride": "i32:16", "target_node_stride": "i32:16"}
    inputs |= {"uniform_row_stride": "i32", "vocab": "i32:16"} | outputs
    ones |= {"target_stride": 1, "uniform_stride": 1, "final_stride": 1}
    yield Variant(
        "accept_sampled, tree of 64",
        accept_sampled_tree_kernel,
        inputs
        | {"parents": "*i64:16", "parent_row_stride": "i32", "path_len": "i32"}
        | {"threshold_single": "fp32", "threshold_acc": "fp32"},
        ones | {"parent_stride": 1, "NODES": 64, "NODE_BLOCK": 64} | sizes,
        num_warps=num_warps,
    )
    for mapped in (True, False):
        yield Variant(
            f"accept_sampled, chain of 4{', reduced vocabulary' if mapped else ''}",
            accept_sampled_chain_kernel,
            inputs
            | {"draft_probs": "*fp32:16", "draft_row_stride": "i32:16", "draft_node_stride": "i32:16", "draft_vocab": "i32:16"}
            | ({"draft_to_target": "*i64:16", "spread": "*fp32:16"} if mapped else {"map_stride": "i32"}),
            ones
            | {"draft_stride": 1, "NODES": 4, "NODE_BLOCK": 4}
            | ({"map_stride": 1} if mapped else {"draft_to_target": None, "spread": None})
            | sizes,
            num_warps=num_warps,
        )
