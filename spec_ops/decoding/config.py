"""How much is drafted, and how."""

from __future__ import annotations

from dataclasses import dataclass

from spec_ops.decoding.arguments import integer
from spec_ops.ops.tree import MAX_TREE_TOKENS


@dataclass(frozen=True)
class SpeculationConfig:
    """Shape of a round.

    Attributes:
        num_steps: draft steps `S`; the longest accepted path is `S` drafts and one target token.
        topk: tree width `K`; 1 drafts a chain.
        num_draft_tokens: tokens verified per request `D`, root included; a chain has `S + 1`. Default for a tree:
            `min(2 * K * S, candidates + 1, 64)`, where the draft yields `K + (S - 1) * K * K` candidates.
        threshold_single, threshold_acc: lossy acceptance of sampled trees, see `accept_sampled`; 1 is lossless.
    """

    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int | None = None
    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_steps", "topk", *(("num_draft_tokens",) if self.num_draft_tokens is not None else ())):
            object.__setattr__(self, name, integer("SpeculationConfig", name, getattr(self, name), 1))
        if (self.num_steps - 1) * self.topk > MAX_TREE_TOKENS:
            raise ValueError(
                f"SpeculationConfig: (`num_steps` - 1) * `topk` must be at most {MAX_TREE_TOKENS}, "
                f"got {(self.num_steps - 1) * self.topk}"
            )
        for name, value in (("threshold_single", self.threshold_single), ("threshold_acc", self.threshold_acc)):
            if not 0 < value <= 1 or (self.topk == 1 and value != 1):
                expected = "in (0, 1]" if self.topk > 1 else "1 for a chain"
                raise ValueError(f"SpeculationConfig: `{name}` must be {expected}, got {value}")
        low, high = 2, min(self.num_candidates + 1, MAX_TREE_TOKENS)
        if self.topk == 1:
            low = high = self.num_steps + 1
            if high > MAX_TREE_TOKENS:
                raise ValueError(f"SpeculationConfig: `num_steps` must be at most {MAX_TREE_TOKENS - 1}, got {self.num_steps}")
        if self.num_draft_tokens is not None and not low <= self.num_draft_tokens <= high:
            reason = f"a chain of {self.num_steps} steps verifies its drafts and the root"
            if self.topk > 1:
                reason = (
                    f"{self.num_steps} steps of width {self.topk} draft {self.num_candidates} candidates, verified with the "
                    f"root; {MAX_TREE_TOKENS} tokens at most"
                )
            raise ValueError(
                f"SpeculationConfig: `num_draft_tokens` must be in [{low}, {high}], got {self.num_draft_tokens}: {reason}"
            )

    @property
    def num_candidates(self) -> int:
        return self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def num_tokens(self) -> int:
        """Tokens verified per request, root included (`D`)."""
        if self.topk == 1:
            return self.num_steps + 1
        return self.num_draft_tokens or min(2 * self.topk * self.num_steps, self.num_candidates + 1, MAX_TREE_TOKENS)

    @property
    def path_len(self) -> int:
        """Most tokens a round can emit per request (`P`); a tree of few tokens cannot hold a path of all steps."""
        return min(self.num_steps + 1, self.num_tokens)

    @property
    def reserve(self) -> int:
        """KV slots a round may write past `committed_lens`, for any draft."""
        return max(self.num_tokens, self.path_len, (self.num_steps - 1) * self.topk) + 1
