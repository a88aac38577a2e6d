"""Reference acceptance: walk the tree level by level, all requests at once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_ops.ops.reference.sampling import ALL_MASKED, draw, kept_weights, sample_tokens

RESIDUAL_ONE = 1 << 60  # a probability of 1 in the integers that residuals are summed in


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


def _walk_target_only(candidates, weights, totals, uniforms, parents, path_len, threshold_single, threshold_acc):
    """Per level `(node, going)` before it; then the node where the walk ended, and the children `[bs, D]` it rejected there.

    `weights [bs, D]`: of each node's token after its parent, of the parent's total `[bs, D]`.
    """
    node = candidates.new_zeros(candidates.shape[0])
    going = torch.ones_like(node, dtype=torch.bool)
    nodes, alive = [node], [going]
    for _ in range(path_len - 1):
        child = (parents == node[:, None]) & (candidates >= 0)
        weight = torch.where(child, weights, 0)
        p, running = weight / totals, weight.cumsum(1) / totals
        coin = uniforms.gather(1, node[:, None])
        take = child & (weight > 0) & ((coin < running / threshold_acc) | (p >= threshold_single))
        going = going & take.any(1)
        node = torch.where(going, take.to(torch.int8).argmax(1), node)
        nodes.append(node)
        alive.append(going)
    # A walk that stopped because the path is full has rejected nothing; its node's children are no candidates.
    rejected = (parents == node[:, None]) & (candidates >= 0) & ~going[:, None]
    return nodes, alive, node, rejected


def _in_every_row(candidates):
    """`[bs, D, D]`: all tokens of a tree beside each of its rows."""
    return candidates[:, None].expand(-1, candidates.shape[1], -1)


def _after_parents(values, parents):
    """`[bs, D]`: of `values [bs, D, D]` (rows, tokens) each token's in the row of its parent."""
    return values.gather(1, parents.clamp(min=0)[:, None])[:, 0]


def _without(weights, tokens, dropped):
    """`weights [bs, V]`, 0 at those of `tokens [bs, D]` that are `dropped`."""
    marks = torch.zeros_like(weights).scatter_add(1, tokens.clamp(min=0), dropped.to(weights.dtype))
    return torch.where(marks > 0, 0, weights)


def _walk_rejection(p, q, offered, uniforms):
    """How many drafts are accepted; `p`, `q` and `offered [bs, D - 1]` are those of the drafted tokens."""
    return (offered & (p > 0) & (uniforms * q < p)).long().cumprod(1).sum(1)


def _chain_path(accepted, path_len):
    place = torch.arange(path_len, device=accepted.device)
    return list(place.expand(len(accepted), -1).unbind(1)), list((place <= accepted[:, None]).unbind(1))


def _path(candidates, nodes, alive, final):
    # tokens[j] is what came after node j on the path: the next accepted draft, or the final token at the end.
    following = [candidates.gather(1, n[:, None])[:, 0] for n in nodes[1:]] + [final]
    ended = [*alive[1:], torch.zeros_like(alive[0])]
    tokens = [torch.where(more, token, final) for token, more in zip(following, ended, strict=True)]
    return _result(tokens, nodes, alive)


def _check_ids(op: str, arg: str, ids, low: int, vocab: int) -> None:
    """On the CPU, ids outside of `[low, vocab)` raise before anything is computed."""
    if ids.device.type == "cpu" and ids.numel() and (int(ids.min()) < low or int(ids.max()) >= vocab):
        raise IndexError(f"{op}: `{arg}` must hold ids in [{low}, {vocab - 1}], got {int(ids.min())} to {int(ids.max())}")


def _check_support(op: str, arg: str, support, vocab: int) -> None:
    _check_ids(op, arg, support[..., 0], 0, vocab)
    _check_ids(op, arg, support[..., 1], ALL_MASKED, vocab)


def _without_root_token(candidates):
    """The root's own token is never looked at, and padding may hold -1, which no gather takes."""
    return torch.cat([torch.zeros_like(candidates[:, :1]), candidates[:, 1:]], 1).long()


def accept_sampled(
    candidates, target_probs, uniforms, final_uniforms, parents, draft_probs, draft_to_target, path_len: int,
    threshold_single: float, threshold_acc: float,
):  # fmt: skip
    candidates = _without_root_token(candidates)
    bs, _, vocab = target_probs.shape
    row = torch.arange(bs, device=candidates.device)
    if draft_probs is not None:
        if draft_to_target is not None:
            full = draft_probs.new_zeros(*draft_probs.shape[:2], vocab)
            draft_probs = full.index_copy(2, draft_to_target, draft_probs)
        drafted = candidates[:, 1:]
        token, offered = drafted.clamp(min=0)[..., None], drafted >= 0
        p, q = target_probs[:, :-1].gather(2, token)[..., 0], draft_probs.gather(2, token)[..., 0]
        last = _walk_rejection(p, q, offered, uniforms[:, :-1])
        nodes, alive = _chain_path(last, path_len)
        # After full acceptance, or where no draft was given, nothing was rejected: subtract a zero distribution.
        draft_probs = torch.where(offered[..., None], draft_probs, 0.0)
        rejected = torch.cat([draft_probs, torch.zeros_like(target_probs[:, :1])], 1)[row, last]
        residual = (target_probs[row, last] - rejected).clamp(min=0)
    else:
        parents = _chain_parents(candidates) if parents is None else parents
        p = _after_parents(target_probs.gather(2, _in_every_row(candidates).clamp(min=0)), parents)
        nodes, alive, last, rejected = _walk_target_only(
            candidates, p, torch.ones_like(p), uniforms, parents, path_len, threshold_single, threshold_acc
        )
        residual = _without(target_probs[row, last], candidates, rejected)
    # Rounding may leave no residual although the draft was rejected; the target itself is then the distribution.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs[row, last])
    return _path(candidates, nodes, alive, sample_tokens(residual, final_uniforms))


class _Rows(NamedTuple):
    """Rows of logits with their supports, as distributions over the target's tokens."""

    logits: torch.Tensor  # [bs, n, V]
    support: torch.Tensor  # [bs, n, 3]
    temperature: torch.Tensor  # [bs]
    ids: torch.Tensor | None = None  # the target's tokens in a reduced vocabulary, -1 for those it lacks

    def weights(self, node):
        """Of all tokens, in the rows `node [bs]`: `[bs, V]` int64."""
        row = torch.arange(len(node), device=node.device)
        weights = kept_weights(self.logits[row, node], self.support[row, node], self.temperature[:, None])
        return weights if self.ids is None else torch.where(self.ids >= 0, weights[:, self.ids.clamp(min=0)], 0)

    def weights_of(self, tokens):
        """Of the tokens `[bs, n, m]` in each row, int64."""
        ids = tokens if self.ids is None else torch.where(tokens >= 0, self.ids[tokens.clamp(min=0)], -1)
        return kept_weights(self.logits, self.support, self.temperature[:, None, None], ids)

    @property
    def totals(self):
        """`[bs, n]` float64, 1 for rows that are no distribution: their weights are 0."""
        return self.support[..., 2].clamp(min=1).double()

    def probs(self, node):
        return self.weights(node) / self.totals.gather(1, node[:, None])


def _residual(target: _Rows, draft: _Rows, node, scale):
    """Integers `[bs, V]` proportional to `max(scale * p - q, 0)` at the nodes `[bs]`."""
    gap = (scale[:, None] * target.probs(node) - draft.probs(node)).clamp(min=0)
    return (gap * RESIDUAL_ONE).to(torch.int64)


def _block_verification(target: _Rows, draft: _Rows, p, q, offered, uniforms):
    """Algorithm 2 of arXiv:2403.10444.

    Returns:
        How many drafts are accepted `[bs]`; how many were offered, until the first that was not or that came after no
        distribution of the target; and the factor of `p` in the residual, float64.
    """
    bs, steps = p.shape
    length = (offered & (target.support[:, :-1, 2] > 0)).long().cumprod(1).sum(1)
    scale = p.new_ones(bs)
    accepted, factor = torch.zeros_like(length), scale
    for step in range(steps):
        scale = scale * p[:, step]
        scale = torch.where(scale > 0, (scale / q[:, step]).clamp(max=1), 0.0)
        count = step + 1
        chance = scale
        if count < steps:
            left = _residual(target, draft, torch.full_like(length, count), scale).sum(1).double()
            chance = torch.where(length == count, scale, left / (left + (1 - scale) * RESIDUAL_ONE))
        # No residual and no deficit: 0 / 0 is NaN, and no acceptance. A later draft is then accepted for sure.
        taken = (uniforms[:, step] < chance) & (length >= count)
        accepted, factor = torch.where(taken, count, accepted), torch.where(taken, scale, factor)
    return accepted, length, factor


def accept_sampled_logits(
    candidates, target_logits, target_support, uniforms, final_uniforms, temperature, parents, draft_logits, draft_support,
    target_to_draft, path_len: int, threshold_single: float, threshold_acc: float, block: bool,
):  # fmt: skip
    op, vocab = "accept_sampled_logits", target_logits.shape[2]
    _check_ids(op, "candidates", candidates[:, 1:], -1, vocab)
    _check_support(op, "target_support", target_support, vocab)
    if draft_logits is not None:
        _check_support(op, "draft_support", draft_support, draft_logits.shape[2])
    if target_to_draft is not None:
        _check_ids(op, "target_to_draft", target_to_draft, -1, draft_logits.shape[2])
    candidates, uniforms = _without_root_token(candidates), uniforms.double()
    target = _Rows(target_logits, target_support, temperature)
    steps = candidates.shape[1] - 1
    if draft_logits is not None and steps:
        drafted = candidates[:, 1:, None]
        draft = _Rows(draft_logits, draft_support, temperature, target_to_draft)
        p = target.weights_of(candidates.roll(-1, 1)[..., None])[:, :-1, 0] / target.totals[:, :-1]
        q = draft.weights_of(drafted)[..., 0] / draft.totals
        offered = (drafted[..., 0] >= 0) & (draft_support[..., 2] > 0)
        if block:
            last, length, factor = _block_verification(target, draft, p, q, offered, uniforms)
            rejected = last < length
        else:
            last, factor = _walk_rejection(p, q, offered, uniforms[:, :-1]), p.new_ones(len(p))
            rejected = (last < steps) & offered.gather(1, last.clamp(max=steps - 1)[:, None])[:, 0]
        nodes, alive = _chain_path(last, path_len)
        residual = _residual(target, draft, last.clamp(max=steps - 1), factor)
        residual = torch.where(rejected[:, None], residual, 0)
    else:
        parents = _chain_parents(candidates) if parents is None else parents
        # Sums of 64 weights are exact in float64.
        weights = _after_parents(target.weights_of(_in_every_row(candidates)), parents).double()
        totals = target.totals.gather(1, parents.clamp(min=0))
        nodes, alive, last, rejected = _walk_target_only(
            candidates, weights, totals, uniforms, parents, path_len, threshold_single, threshold_acc
        )
        residual = _without(target.weights(last), candidates, rejected)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target.weights(last))
    return _path(candidates, nodes, alive, draw(residual, final_uniforms))
