"""Drafting inside a round: a chain, or a tree of top-k branches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from spec_ops import ops
from spec_ops.decoding.config import SpeculationConfig
from spec_ops.decoding.random import uniforms
from spec_ops.decoding.state import RoundState
from spec_ops.models.drafts import Draft
from spec_ops.models.paged import PagedAttention, PagedKVCache

# The counters of a round's uniforms are `committed_lens * COUNTERS` plus one of these. Committed lengths grow every round, so
# no uniform is used twice.
COUNTERS = 256
ACCEPT_COUNTER, DRAFT_COUNTER, FINAL_COUNTER = 0, 64, 255


class Drafted(NamedTuple):
    """Tokens to verify.

    Attributes:
        candidates: `[bs, D]` int64, target ids, root first; -1 where nothing was drafted.
        positions: `[bs, D]`, their positions for RoPE: the depth in a tree.
        tree_mask: `[bs, D]` int64, a tree's bit masks; None for chains.
        parents: `[bs, D]`, each node's parent; None for chains.
        logits: `[bs, D - 1, Vd]`, what each draft was sampled from; None unless a model's chain is sampled.
        support: `[bs, D - 1, 3]` int64, of `logits`.
    """

    candidates: torch.Tensor
    positions: torch.Tensor
    tree_mask: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    support: torch.Tensor | None = None


class HeldDrafts(nn.Module):
    """A `Drafted` in static buffers, from the end of one round to the next. The first `hold` makes them: it runs eagerly."""

    def hold(self, drafted: Drafted) -> None:
        for name, value in drafted._asdict().items():
            if not hasattr(self, name):
                buffer = None if value is None else torch.empty_like(value, memory_format=torch.contiguous_format)
                if buffer is not None:
                    torch._dynamo.mark_static_address(buffer)
                self.register_buffer(name, buffer, persistent=False)
            if value is not None:
                getattr(self, name).copy_(value)

    def read(self) -> Drafted:
        return Drafted(*(getattr(self, name) for name in Drafted._fields))


def first_drafts(draft: Draft, state: RoundState, hidden: torch.Tensor, topk: int, sampled: bool) -> None:
    """Store the first drafts of the next round. `hidden [bs, hidden]` is the draft's for the newest token."""
    state.draft_hidden.copy_(hidden)
    if topk > 1:
        scores, tokens = torch.log_softmax(draft.logits(hidden).float(), -1).topk(topk)
        state.draft_scores.copy_(scores)
        state.draft_tokens.copy_(draft.to_target(tokens))
    else:
        first = _next_draft(draft, state, hidden, 0, sampled)
        state.draft_tokens.copy_(first.tokens[:, None])
        if first.logits is not None and first.support is not None:
            state.draft_logits.copy_(first.logits)
            state.draft_support.copy_(first.support)


class _Next(NamedTuple):
    """Draft tokens (target ids, `[bs]`), and unless they are greedy the logits `[bs, Vd]` that they were drawn from, in the
    dtype that the state keeps, with their support `[bs, 3]`."""

    tokens: torch.Tensor
    logits: torch.Tensor | None = None
    support: torch.Tensor | None = None


def _next_draft(draft: Draft, state: RoundState, hidden: torch.Tensor, step: int, sampled: bool) -> _Next:
    if not sampled:
        return _Next(draft.to_target(draft.argmax(hidden)))
    coins = uniforms(state.seeds, state.committed_lens.long() * COUNTERS + DRAFT_COUNTER + step)
    logits = draft.logits(hidden).to(state.draft_logits.dtype)
    tokens, support = ops.sample_logits(logits, coins, state.temperature, state.top_k, state.top_p, state.min_p)
    # -1 where nothing can be drawn. Any token will do there: to acceptance, a draft of such a support is none.
    return _Next(draft.to_target(tokens.clamp(min=0)), logits, support)


def draft_chain(
    draft: Draft, cache: PagedKVCache, state: RoundState, config: SpeculationConfig, sampled: bool, backend: str
) -> Drafted:
    """Draft `S` tokens one after the other. The first one was drafted by the previous round's draft extend."""
    active = ~state.finished
    hidden = state.draft_hidden
    drafts = [_Next(state.draft_tokens[:, 0], state.draft_logits, state.draft_support)]
    for step in range(config.num_steps - 1):
        position = state.committed_lens + draft.token_offset + step
        attention = PagedAttention(
            cache,
            "draft_decode",
            state.block_tables,
            torch.where(active, position + 1, 0),
            state.slots(position[:, None], cache.page_size, active[:, None]),
            backend=backend,
        )
        hidden = draft(drafts[-1].tokens[:, None], hidden[:, None], position[:, None], attention)[:, 0]
        drafts.append(_next_draft(draft, state, hidden, step + 1, sampled))
    tokens, logits, supports = zip(*drafts, strict=True)
    candidates = torch.stack([state.last_token, *tokens], 1)
    positions = state.committed_lens[:, None] + torch.arange(config.num_tokens, device=candidates.device)
    if not sampled:
        return Drafted(candidates, positions)
    return Drafted(candidates, positions, logits=torch.stack(logits, 1), support=torch.stack(supports, 1))


def draft_tree(draft: Draft, cache: PagedKVCache, state: RoundState, config: SpeculationConfig, backend: str) -> Drafted:
    """Draft a dynamic tree (EAGLE-2, arXiv:2406.16858): `K` branches a step, then the best `D - 1` of all candidates.

    Step `i` writes its `K` branches to slots `committed + i * K + t`. A bit mask over these slots shows each branch its
    ancestors only, so that nothing of the prefix is copied per branch.
    """
    topk, active = config.topk, ~state.finished
    bs, device = state.draft_tokens.shape[0], state.draft_tokens.device
    branch = torch.arange(topk, device=device)
    tokens, scores = state.draft_tokens, state.draft_scores
    hidden = state.draft_hidden[:, None].expand(-1, topk, -1)
    mask = (torch.ones_like(branch) << branch).expand(bs, -1)
    all_tokens, all_scores = [tokens], [scores]
    parent_list = [torch.arange(-1, topk, device=device).expand(bs, -1)]
    for step in range(config.num_steps - 1):
        depth = state.committed_lens + draft.token_offset + step
        first = state.committed_lens + draft.token_offset + step * topk
        attention = PagedAttention(
            cache,
            "draft_decode",
            state.block_tables,
            torch.where(active, first + topk, 0),
            state.slots(first[:, None] + branch, cache.page_size, active[:, None]),
            tree_mask=mask,
            mask_len=(step + 1) * topk,
            backend=backend,
        )
        hidden = draft(tokens, hidden, depth[:, None].expand(-1, topk), attention)
        log_probs, ids = torch.log_softmax(draft.logits(hidden).float(), -1).topk(topk)
        candidate_scores = (scores[:, :, None] + log_probs).flatten(1)
        candidate_tokens = draft.to_target(ids).flatten(1)
        all_tokens.append(candidate_tokens)
        all_scores.append(candidate_scores)
        if step == config.num_steps - 2:
            break
        scores, chosen = candidate_scores.topk(topk)
        parent = chosen // topk
        tokens = candidate_tokens.gather(1, chosen)
        hidden = hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[-1]))
        mask = mask.gather(1, parent) | (torch.ones_like(branch) << (branch + (step + 1) * topk))
        parent_list.append(chosen + topk + step * topk * topk)
    drafted, selected = ops.select_draft_tokens(torch.cat(all_scores, 1), torch.cat(all_tokens, 1), config.num_tokens - 1)
    tree = ops.build_tree(torch.cat(parent_list, 1), selected, state.committed_lens, topk)
    candidates = torch.cat([state.last_token[:, None], drafted], 1)
    return Drafted(candidates, tree.positions, tree.tree_mask, tree.parents)
