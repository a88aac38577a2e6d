"""Reference acceptance: walk the tree level by level, all requests at once."""

from __future__ import annotations

import torch


def _chain_parents(candidates: torch.Tensor) -> torch.Tensor:
    nodes = torch.arange(candidates.shape[1], device=candidates.device) - 1
    return nodes.expand(candidates.shape[0], -1)


def _result(tokens: list[torch.Tensor], nodes: list[torch.Tensor], alive: list[torch.Tensor]):
    kept = torch.stack(alive, 1)
    return (
        torch.where(kept, torch.stack(tokens, 1), -1),
        torch.where(kept, torch.stack(nodes, 1), -1),
        kept.sum(1).to(torch.int32),
    )


def accept_greedy(candidates, target_tokens, parents, path_len: int):
    parents = _chain_parents(candidates) if parents is None else parents
    candidates, target_tokens = candidates.long(), target_tokens.long()
    node = candidates.new_zeros(candidates.shape[0])
    going = torch.ones_like(node, dtype=torch.bool)
    tokens, nodes, alive = [], [], []
    for _ in range(path_len):
        token = target_tokens.gather(1, node[:, None])[:, 0]
        tokens.append(token)
        nodes.append(node)
        alive.append(going)
        match = (parents == node[:, None]) & (candidates == token[:, None])
        going = going & match.any(1)
        node = torch.where(going, match.to(torch.int8).argmax(1), node)
    return _result(tokens, nodes, alive)


def sample_tokens(probs, uniforms):
    vocab = probs.shape[-1]
    cumulative = probs.double().cumsum(-1)
    index = (cumulative <= uniforms.double()[..., None] * cumulative[..., -1:]).sum(-1)
    # Rounding may leave the target at the very end; the last token that can be drawn is the last positive one.
    ids = torch.arange(vocab, device=probs.device)
    token = torch.minimum(index, torch.where(probs > 0, ids, 0).amax(-1))
    total = cumulative[..., -1]
    return torch.where((total > 0) & (total < torch.inf), token, -1)


def _walk_target_only(candidates, target_probs, uniforms, parents, path_len, threshold_single, threshold_acc):
    """Per level: `(node, going)` before it, and finally the children rejected at the node where the walk ended."""
    node = candidates.new_zeros(candidates.shape[0])
    going = torch.ones_like(node, dtype=torch.bool)
    nodes, alive = [node], [going]
    for _ in range(path_len - 1):
        probs = target_probs.gather(1, node[:, None, None].expand(-1, 1, target_probs.shape[2]))[:, 0]
        child = (parents == node[:, None]) & (candidates >= 0)
        p = torch.where(child, probs.gather(1, candidates.clamp(min=0)), 0.0)
        coin = uniforms.gather(1, node[:, None])
        take = child & (p > 0) & ((coin < p.cumsum(1) / threshold_acc) | (p >= threshold_single))
        going = going & take.any(1)
        node = torch.where(going, take.to(torch.int8).argmax(1), node)
        nodes.append(node)
        alive.append(going)
    return nodes, alive, node


def _walk_rejection(candidates, target_probs, uniforms, draft_probs, path_len):
    bs = candidates.shape[0]
    drafted = candidates[:, 1:]
    token = drafted.clamp(min=0)[..., None]
    p = target_probs[:, :-1].gather(2, token)[..., 0]
    q = draft_probs.gather(2, token)[..., 0]
    accepted = ((drafted >= 0) & (p > 0) & (uniforms[:, :-1] * q < p)).long().cumprod(1)
    alive = torch.cat([accepted.new_ones(bs, 1), accepted], 1).bool()
    nodes = [torch.full((bs,), i, device=candidates.device) for i in range(path_len)]
    return nodes, list(alive.unbind(1)), accepted.sum(1)


def accept_sampled(
    candidates, target_probs, uniforms, final_uniforms, parents, draft_probs, draft_to_target, path_len: int,
    threshold_single: float, threshold_acc: float,
):  # fmt: skip
    # The root's own token is never looked at, and padding may hold -1, which no gather takes.
    candidates = torch.cat([torch.zeros_like(candidates[:, :1]), candidates[:, 1:]], 1).long()
    bs, _, vocab = target_probs.shape
    row = torch.arange(bs, device=candidates.device)
    if draft_probs is not None:
        if draft_to_target is not None:
            full = draft_probs.new_zeros(*draft_probs.shape[:2], vocab)
            draft_probs = full.index_copy(2, draft_to_target, draft_probs)
        nodes, alive, last = _walk_rejection(candidates, target_probs, uniforms, draft_probs, path_len)
        # After full acceptance, or where no draft was given, nothing was rejected: subtract a zero distribution.
        draft_probs = torch.where(candidates[:, 1:, None] >= 0, draft_probs, 0.0)
        rejected = torch.cat([draft_probs, torch.zeros_like(target_probs[:, :1])], 1)[row, last]
        residual = (target_probs[row, last] - rejected).clamp(min=0)
    else:
        parents = _chain_parents(candidates) if parents is None else parents
        nodes, alive, last = _walk_target_only(
            candidates, target_probs, uniforms, parents, path_len, threshold_single, threshold_acc
        )
        child = ((parents == last[:, None]) & (candidates >= 0)).to(target_probs.dtype)
        # A walk that stopped because the path is full has rejected nothing; its node's children are no candidates.
        child = child * (~alive[-1])[:, None] if path_len > 1 else child * 0
        rejected = torch.zeros(bs, vocab, device=candidates.device).scatter_add(1, candidates.clamp(min=0), child)
        residual = torch.where(rejected > 0, 0.0, target_probs[row, last])
    # Rounding may leave no residual although the draft was rejected; the target itself is then the distribution.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs[row, last])
    final = sample_tokens(residual, final_uniforms)

    # tokens[j] is what came after node j on the path: the next accepted draft, or the final token at the end.
    following = [candidates.gather(1, n[:, None])[:, 0] for n in nodes[1:]] + [final]
    ended = [*alive[1:], torch.zeros_like(alive[0])]
    tokens = [torch.where(more, token, final) for token, more in zip(following, ended, strict=True)]
    return _result(tokens, nodes, alive)


def sampling_probs(logits, temperature, top_k, top_p):
    shape = logits.shape
    logits = (logits if logits.dim() == 3 else logits[:, None]).float()
    hot = temperature[:, None, None]
    greedy = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Shifted before the division: a tiny temperature must not overflow to inf - inf.
    probs = torch.softmax((logits - logits.amax(-1, keepdim=True)) / torch.where(hot > 0, hot, 1.0), -1)
    if top_k is not None or top_p is not None:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        if top_k is not None:
            limit = torch.where(top_k >= 1, top_k, shape[-1])[:, None, None]
            ordered = torch.where(torch.arange(shape[-1], device=logits.device) < limit, ordered, 0.0)
            ordered = ordered / ordered.sum(-1, keepdim=True)
        if top_p is not None:
            before = ordered.double().cumsum(-1) - ordered
            before[..., 0] = -1.0  # at least one token
            limit = torch.where(top_p < 1, top_p, torch.inf)  # 1 keeps all: a rounded sum may reach it before the tail
            ordered = torch.where(before < limit[:, None, None], ordered, 0.0)
            ordered = ordered / ordered.sum(-1, keepdim=True)
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
    return torch.where(hot > 0, probs, greedy).reshape(shape)
