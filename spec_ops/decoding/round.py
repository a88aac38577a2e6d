"""One round of decoding as an `nn.Module` whose `forward` takes no arguments: draft, verify, accept, extend.

All state lives in static buffers and nothing is read back to the host, so that
`torch.compile(round, mode="reduce-overhead", fullgraph=True)` turns a round into one CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from spec_ops import ops
from spec_ops.decoding.config import SpeculationConfig
from spec_ops.decoding.draft import (
    ACCEPT_COUNTER,
    COUNTERS,
    FINAL_COUNTER,
    Drafted,
    HeldDrafts,
)
from spec_ops.decoding.drafter import Drafter, agreed, agreed_first, make_drafter
from spec_ops.decoding.logits import LogitsChanges, masked_end, masked_tokens
from spec_ops.decoding.lookup import PromptLookup
from spec_ops.decoding.random import uniforms
from spec_ops.decoding.state import ALL_MASKED, RoundState
from spec_ops.models.drafts import Draft
from spec_ops.models.paged import PagedAttention, PagedKVCache
from spec_ops.models.target import Target, TargetOutput


def final_uniforms(state: RoundState) -> torch.Tensor:
    """The uniforms that draw a round's last tokens, `[bs]` float32."""
    return uniforms(state.seeds, state.committed_lens.long() * COUNTERS + FINAL_COUNTER)


class SpeculativeRound(nn.Module):
    """Draft `S` steps, verify `D` tokens with one target forward, accept, extend the draft's cache.

    Args:
        target: the model whose output is wanted.
        draft: the model that drafts, or a `PromptLookup`.
        target_cache, draft_cache: their paged KV; a request has the same page ids in both. None for a draft without a model.
        state: buffers of the batch bucket; after a call `state.output` holds what it emitted.
        config: draft steps, and shape of the tree.
        sampled: sample with the state's `temperature`, `top_k`, `top_p` and `min_p` (rows of temperature 0 stay greedy); else
            decode greedily.
        changes: what is done to the target's logits first; None for nothing.
        backend: of every attention op.
        drafts: where the tokens to verify are held. The round then drafts at its end, for the next one, so that the host sees
            drafts before they are verified; before the first round they must be held already. None: it drafts first.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | PromptLookup,
        target_cache: PagedKVCache,
        draft_cache: PagedKVCache | None,
        state: RoundState,
        config: SpeculationConfig,
        *,
        sampled: bool = False,
        changes: LogitsChanges | None = None,
        backend: str = "auto",
        drafts: HeldDrafts | None = None,
    ) -> None:
        super().__init__()
        self.target, self.target_cache = target, target_cache
        self.drafter = make_drafter(draft, draft_cache, state, config, sampled=sampled, backend=backend)
        self.state, self.config = state, config
        self.sampled, self.changes, self.backend = sampled, changes, backend
        self.drafts = drafts

    @torch.no_grad()  # otherwise the state would carry every earlier round's autograd graph
    def forward(self) -> None:
        """Run the round: read and advance `state`, write both caches."""
        config, state = self.config, self.state
        drafted = agreed(self.target, self.drafter) if self.drafts is None else self.drafts.read()
        output = self.verify(drafted)
        accepted = self.accept(drafted, output.hidden)
        if config.topk > 1:
            self.compact(accepted)
        committed, active = state.committed_lens.clone(), ~state.finished
        count = state.commit(accepted.tokens, accepted.lens)
        if self.changes is not None:
            self.changes.update(accepted.tokens, count)
        self.drafter.extend(output, accepted, committed, count, active)
        if self.drafts is not None:
            self.drafts.hold(agreed(self.target, self.drafter))

    def verify(self, drafted: Drafted) -> TargetOutput:
        """Run the target over all drafted tokens, whose KV goes to slots `[committed, committed + D)`."""
        state, tokens = self.state, self.config.num_tokens
        active = ~state.finished
        slot_positions = state.committed_lens[:, None] + torch.arange(tokens, device=active.device)
        attention = PagedAttention(
            self.target_cache,
            "target_verify",
            state.block_tables,
            torch.where(active, state.committed_lens + tokens, 0),
            state.slots(slot_positions, self.target_cache.page_size, active[:, None]),
            tree_mask=drafted.tree_mask,
            backend=self.backend,
        )
        return self.target(drafted.candidates.clamp(min=0), drafted.positions, attention)  # -1: nothing was drafted

    def accept(self, drafted: Drafted, hidden: torch.Tensor) -> ops.Accepted:
        """The path through the `drafted` tokens that the target's logits for `hidden [bs, D, hidden]` accept."""
        if self.changes is None and not self.sampled:
            # Ranks that share a target exchange these tokens; the rest is arithmetic of integers.
            return self._accept_greedy(drafted, self.target.argmax(hidden))
        logits = self.target.logits(hidden)
        if self.changes is not None:
            logits = self.changes(logits, drafted)
        if self.sampled:
            accepted = self._accept_sampled(drafted, logits)
        else:
            accepted = self._accept_greedy(drafted, masked_tokens(logits, logits.argmax(-1)))
        return ops.Accepted(*self.target.ranks.agree(*accepted)) if self.target.ranks is not None else accepted

    def _accept_greedy(self, drafted: Drafted, tokens: torch.Tensor) -> ops.Accepted:
        return ops.accept_greedy(drafted.candidates, tokens, drafted.parents, self.config.path_len)

    def _accept_sampled(self, drafted: Drafted, logits: torch.Tensor) -> ops.Accepted:
        config, state = self.config, self.state
        support = ops.sampling_support(logits, state.temperature, state.top_k, state.top_p, state.min_p)
        node = torch.arange(config.num_tokens, device=logits.device)
        counters = (state.committed_lens.long() * COUNTERS + ACCEPT_COUNTER)[:, None] + node
        accepted = ops.accept_sampled_logits(
            drafted.candidates,
            logits,
            support,
            uniforms(state.seeds[:, None], counters),
            final_uniforms(state),
            state.temperature,
            parents=drafted.parents,
            draft_logits=drafted.logits,
            draft_support=drafted.support,
            target_to_draft=self.drafter.target_to_draft if drafted.logits is not None else None,
            path_len=config.path_len,
            threshold_single=config.threshold_single,
            threshold_acc=config.threshold_acc,
            block=config.verifies_blocks and drafted.logits is not None,
        )
        if self.changes is not None:
            accepted = accepted._replace(tokens=masked_end(support, *accepted))
        return accepted

    def compact(self, accepted: ops.Accepted) -> None:
        """Move the KV rows of the accepted path of a tree to consecutive slots of the target's cache."""
        state, page_size = self.state, self.target_cache.page_size
        place = torch.arange(accepted.path.shape[1], device=accepted.path.device)
        keep = (accepted.path != place) & (accepted.path >= 0) & ~state.finished[:, None]
        start = state.committed_lens[:, None]
        source = state.slots(start + accepted.path, page_size, keep)
        ops.move_kv(self.target_cache.tensors(), source.flatten(), state.slots(start + place, page_size, keep).flatten())


class PlainRound(nn.Module):
    """One token per request by plain decoding, with the ops and state of a `SpeculativeRound`; the baseline of speculation.

    Args:
        target: the model.
        cache: its paged KV.
        state: buffers of the batch bucket; after a call `state.output` holds what it emitted.
        sampled, changes: as for `SpeculativeRound`.
        backend: of every attention op.
        drafter: what drafts in other rounds of this state. It reads the new tokens, and its first draft, which nobody verifies,
            goes to `state.output`: whether it was right says if drafts would pay. None: there are no other rounds.
    """

    def __init__(
        self,
        target: Target,
        cache: PagedKVCache,
        state: RoundState,
        *,
        sampled: bool = False,
        changes: LogitsChanges | None = None,
        backend: str = "auto",
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__()
        self.target, self.target_cache, self.state = target, cache, state
        self.sampled, self.changes, self.backend = sampled, changes, backend
        self.drafter = drafter

    @torch.no_grad()
    def forward(self) -> None:
        """Run the round: read and advance `state`, write the cache."""
        state = self.state
        active = ~state.finished
        position = state.committed_lens[:, None]
        attention = PagedAttention(
            self.target_cache,
            "draft_decode",
            state.block_tables,
            torch.where(active, state.committed_lens + 1, 0),
            state.slots(position, self.target_cache.page_size, active[:, None]),
            backend=self.backend,
        )
        drafted = None if self.drafter is None else agreed_first(self.target, self.drafter).clone()
        output = self.target(state.last_token[:, None], position, attention)
        committed = state.committed_lens.clone()
        emitted = commit_next(self.target, output.hidden[:, 0], state, self.sampled, self.changes)
        if self.drafter is not None and drafted is not None:
            state.output[:, 1].copy_(drafted)
            one = torch.ones_like(committed)
            accepted = ops.Accepted(emitted.tokens, torch.zeros_like(emitted.tokens), one)
            self.drafter.extend(output, accepted, committed, emitted.lens, active)


class Emitted(NamedTuple):
    """The tokens `[bs, 1]` int64 that a plain round chose, and how many of them each request gained, `[bs]` int32."""

    tokens: torch.Tensor
    lens: torch.Tensor


def commit_next(
    target: Target, hidden: torch.Tensor, state: RoundState, sampled: bool, changes: LogitsChanges | None
) -> Emitted:
    """Emit the target's own next tokens for `hidden [bs, hidden]`."""
    if changes is None and not sampled:
        tokens = target.argmax(hidden)
    else:
        logits = target.logits(hidden)
        if changes is not None:
            logits = changes(logits[:, None])[:, 0]
        if not sampled:
            tokens = masked_tokens(logits, logits.argmax(-1))
        else:
            coins = final_uniforms(state)
            tokens, support = ops.sample_logits(logits, coins, state.temperature, state.top_k, state.top_p, state.min_p)
            if changes is not None:
                tokens = torch.where(support[:, 1] == ALL_MASKED, ALL_MASKED, tokens)
        if target.ranks is not None:
            (tokens,) = target.ranks.agree(tokens)
    count = state.commit(tokens[:, None], torch.ones_like(state.committed_lens))
    if changes is not None:
        changes.update(tokens[:, None], count)
    return Emitted(tokens[:, None], count)
