"""What drafts for the rounds of a batch bucket: a model with a KV cache of its own, or the text itself."""

from __future__ import annotations

import torch
from torch import nn

from spec_ops import ops
from spec_ops.decoding.config import SpeculationConfig
from spec_ops.decoding.draft import Drafted, draft_chain, draft_tree, first_drafts
from spec_ops.decoding.lookup import PromptLookup
from spec_ops.decoding.prefill import PromptPiece
from spec_ops.decoding.state import RoundState
from spec_ops.models.drafts import Draft
from spec_ops.models.paged import PagedAttention, PagedKVCache
from spec_ops.models.target import Target, TargetOutput


class Drafter(nn.Module):
    """What a round and the prefill before it need of whatever drafts.

    Attributes:
        target_to_draft: `[V]` int64: the place of each of the target's tokens in a reduced vocabulary that `Drafted.logits` is
            about, -1 for none; None for a whole one.
        same_on_ranks: whether ranks that share a target draft the same tokens without asking one another: what they decide by
            was exchanged, or is integers.
    """

    target_to_draft: torch.Tensor | None
    same_on_ranks = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("target_to_draft", None, persistent=False)

    def prefill(self, piece: PromptPiece, output: TargetOutput) -> None:
        """Read a piece of prompts, after the target. With the last one, where each prompt's first new token is the state's
        `last_token`, draft the first tokens.

        Args:
            piece: which tokens.
            output: of the target, for them.
        """

    def forward(self) -> Drafted:
        """The tokens to verify."""
        raise NotImplementedError

    def first(self) -> torch.Tensor:
        """The first token that `forward` would draft, `[bs]` int64; -1 for none. Cheap: no forward of a model."""
        raise NotImplementedError

    def extend(self, output: TargetOutput, accepted: ops.Accepted, committed, count, active) -> None:
        """Read what a round has verified.

        Args:
            output: of the target, for the verified tokens.
            accepted: the accepted path.
            committed: `[bs]` int32, committed lengths before this round.
            count: `[bs]` int32, how many tokens the round emitted.
            active: `[bs]` bool, requests that were not finished before this round.
        """


class ModelDrafter(Drafter):
    """A draft model: chains, or trees.

    Args:
        draft: the model.
        cache: its paged KV; a request has the same page ids as in the target's.
        state: buffers of the batch bucket.
        config: draft steps, and shape of the tree.
        sampled: draw chains from the draft's distribution; else take the likeliest tokens.
        backend: of every attention op.
    """

    def __init__(
        self, draft: Draft, cache: PagedKVCache, state: RoundState, config: SpeculationConfig, *, sampled: bool, backend: str
    ) -> None:
        super().__init__()
        self.draft, self.cache, self.state, self.config = draft, cache, state, config
        self.sampled, self.backend = sampled, backend
        self.target_to_draft = draft.target_to_draft()
        self.same_on_ranks = draft.ranks is not None and config.topk == 1 and not sampled

    def prefill(self, piece, output) -> None:
        offset, state = self.draft.token_offset, self.state
        # Offset 0: features at `p` beside token `p + 1`. Offset 1: token `p` itself, and the new one too.
        more = int(piece.last and offset == 1)
        positions, attention, last = piece.extend(self.cache, more)
        tokens, features = piece.tokens(1 - offset, more), self.draft.encode(output)
        if piece.last:
            tokens[last] = state.last_token[piece.rows]
        if more:
            features = torch.cat([row for feature in features.split(piece.counts) for row in (feature, feature[-1:])])
        hidden = self.draft(tokens, features, positions, attention)
        if piece.last:
            carried = hidden.new_zeros(state.batch_size, hidden.shape[-1])
            carried[piece.rows] = hidden[last]
            first_drafts(self.draft, state, carried, self.config.topk, self.sampled)

    def forward(self) -> Drafted:
        if self.config.topk == 1:
            return draft_chain(self.draft, self.cache, self.state, self.config, self.sampled, self.backend)
        return draft_tree(self.draft, self.cache, self.state, self.config, self.backend)

    def first(self) -> torch.Tensor:
        return self.state.draft_tokens[:, 0]

    def extend(self, output, accepted, committed, count, active) -> None:
        """Run the draft over the accepted path with the target's features. The row of the last accepted token drafts the first
        tokens of the next round. Rows past the accepted length write slots that later steps overwrite before they are read."""
        state, length = self.state, accepted.path.shape[1]
        encoded = self.draft.encode(output)
        node = accepted.path.clamp(min=0)
        features = encoded.gather(1, node[:, :, None].expand(-1, -1, encoded.shape[-1]))
        first = committed + self.draft.token_offset
        positions = first[:, None] + torch.arange(length, device=first.device)
        attention = PagedAttention(
            self.cache,
            "draft_extend",
            state.block_tables,
            torch.where(active, first + length, 0),
            state.slots(positions, self.cache.page_size, active[:, None]),
            backend=self.backend,
        )
        hidden = self.draft(accepted.tokens.clamp(min=0), features, positions, attention)
        row = (count - 1).clamp(min=0).long()[:, None, None].expand(-1, 1, hidden.shape[-1])
        first_drafts(self.draft, state, hidden.gather(1, row)[:, 0], self.config.topk, self.sampled)


class LookupDrafter(Drafter):
    """Prompt lookup in the state's history.

    Args:
        lookup: which places are taken.
        state: buffers of the batch bucket.
        config: how many tokens are drafted.
        otherwise: drafts the chains of requests in which nothing is found, without a distribution; None: nothing is drafted.
    """

    def __init__(
        self, lookup: PromptLookup, state: RoundState, config: SpeculationConfig, otherwise: ModelDrafter | None = None
    ) -> None:
        super().__init__()
        self.lookup, self.state, self.config, self.otherwise = lookup, state, config, otherwise
        self.same_on_ranks = otherwise is None or otherwise.same_on_ranks

    def prefill(self, piece, output) -> None:
        if self.otherwise is not None:
            self.otherwise.prefill(piece, output)

    def forward(self) -> Drafted:
        state, lookup = self.state, self.lookup
        lens = state.committed_lens + 1
        found = ops.lookup_drafts(state.tokens, lens, self.config.num_steps, lookup.max_ngram, lookup.min_ngram)
        candidates = torch.cat([state.last_token[:, None], found], 1)
        if self.otherwise is not None:
            drafted = self.otherwise()
            return drafted._replace(candidates=torch.where(candidates >= 0, candidates, drafted.candidates))
        positions = state.committed_lens[:, None] + torch.arange(self.config.num_tokens, device=candidates.device)
        return Drafted(candidates, positions)

    def first(self) -> torch.Tensor:
        state, lookup = self.state, self.lookup
        found = ops.lookup_drafts(state.tokens, state.committed_lens + 1, 1, lookup.max_ngram, lookup.min_ngram)[:, 0]
        return found if self.otherwise is None else torch.where(found >= 0, found, self.otherwise.first())

    def extend(self, output, accepted, committed, count, active) -> None:
        if self.otherwise is not None:
            self.otherwise.extend(output, accepted, committed, count, active)


def agreed(target: Target, drafter: Drafter) -> Drafted:
    """The tokens to verify, the same ones on all ranks that share the target."""
    drafted = drafter()
    if target.ranks is None or drafter.same_on_ranks:
        return drafted
    decided = {name: getattr(drafted, name) for name in ("candidates", "positions", "tree_mask", "parents")}
    decided = {name: value for name, value in decided.items() if value is not None}
    return drafted._replace(**dict(zip(decided, target.ranks.agree(*decided.values()), strict=True)))


def agreed_first(target: Target, drafter: Drafter) -> torch.Tensor:
    """The first token to verify, `[bs]` int64, the same one on all ranks that share the target."""
    first = drafter.first()
    return first if target.ranks is None or drafter.same_on_ranks else target.ranks.agree(first)[0]


def draft_model(draft: Draft | PromptLookup | None) -> Draft | None:
    """The model among what drafts, which needs a cache."""
    return draft.otherwise if isinstance(draft, PromptLookup) else draft


def make_drafter(
    draft: Draft | PromptLookup,
    cache: PagedKVCache | None,
    state: RoundState,
    config: SpeculationConfig,
    *,
    sampled: bool,
    backend: str,
) -> Drafter:
    """The drafter for `draft`; `cache` belongs to its model, if it has one."""
    lookup = draft if isinstance(draft, PromptLookup) else None
    # Where rows may be drafted either way, none has a distribution: target-only acceptance is lossless for any draft.
    sampled = sampled and lookup is None
    drafter = None
    if (model := draft_model(draft)) is not None:
        if cache is None:
            raise ValueError("SpeculativeRound: `draft_cache` must be the draft model's PagedKVCache, got None")
        drafter = ModelDrafter(model, cache, state, config, sampled=sampled, backend=backend)
    if lookup is not None:
        return LookupDrafter(lookup, state, config, drafter)
    if drafter is None:
        raise ValueError("SpeculativeRound: `draft` must be a draft model or a PromptLookup, got None")
    return drafter
