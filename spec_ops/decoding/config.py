"""How many tokens a round drafts, and in which shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spec_ops._numbers import integer, number, shown
from spec_ops.ops.tree import MAX_TREE_TOKENS

AUTO_LENGTHS = (0, 1, 3, 5, 7)
MAX_LENGTHS = 8  # each is compiled, and keeps its CUDA graphs


@dataclass(frozen=True)
class SpeculationConfig:
    """Shape of a round.

    Attributes:
        num_steps: draft steps `S`. A round emits at most `S` accepted drafts and one token of the target. With
            `lengths` it is the longest of them.
        lengths: chain lengths, 2 to 8 in order, from which a generator chooses each round's; 0 is a round that drafts nothing.
            None: every round drafts `num_steps`.
        draft_cost: with `lengths`, what each draft step adds to the time of a round, as a share of the time of a round without
            drafts. None: a generator measures its rounds.
        topk: width `K` of the draft tree; 1 drafts a chain.
        num_draft_tokens: tokens verified per request `D`, the root included. A chain has `S + 1`. Default for a tree:
            `min(2 * K * S, candidates + 1, 64)`, where the draft steps yield `K + (S - 1) * K * K` candidates.
        threshold_single: in (0, 1]; below 1, a sampled tree also accepts a token whose own probability reaches it. 1 keeps the
            target's distribution, and is the only value for a chain.
        threshold_acc: in (0, 1]; below 1, a sampled tree accepts a token when the uniform is below the running sum of
            probabilities divided by it (see `accept_sampled`). 1 keeps the target's distribution.
        block_verification: verify a model's sampled chain as a block (arXiv:2403.10444): lossless as token by token, and the
            expected number of accepted drafts is never smaller. None: for chains. It makes no difference to trees, greedy
            rounds and prompt lookup.

    Raises:
        ValueError: naming the attribute.
    """

    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int | None = None
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    block_verification: bool | None = None
    lengths: Sequence[int] | None = None
    draft_cost: float | None = None

    def __post_init__(self) -> None:
        self._read_lengths()
        for name in ("num_steps", "topk", *(("num_draft_tokens",) if self.num_draft_tokens is not None else ())):
            object.__setattr__(self, name, integer("SpeculationConfig", name, getattr(self, name), 1))
        if (self.num_steps - 1) * self.topk > MAX_TREE_TOKENS:
            raise ValueError(
                f"SpeculationConfig: (`num_steps` - 1) * `topk` must be at most {MAX_TREE_TOKENS}, "
                f"got {(self.num_steps - 1) * self.topk}"
            )
        wanted = "a number in (0, 1]" if self.topk > 1 else "1 for a chain"
        for name in ("threshold_single", "threshold_acc"):
            value = number("SpeculationConfig", name, getattr(self, name), wanted, self._is_threshold)
            object.__setattr__(self, name, value)
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

        chain = self.topk == 1
        allowed = (None, False, True) if chain else (None, False)
        if not any(self.block_verification is value for value in allowed):
            wanted = "True, False or None" if chain else "False or None for a tree"
            raise ValueError(f"SpeculationConfig: `block_verification` must be {wanted}, got {shown(self.block_verification)}")

    def _read_lengths(self) -> None:
        lengths, fail = self.lengths, "SpeculationConfig: `lengths` must be"
        if lengths is not None:
            if not isinstance(lengths, (list, tuple)) or not 1 < len(lengths) <= MAX_LENGTHS:
                raise ValueError(f"{fail} a list of 2 to {MAX_LENGTHS} chain lengths, got {shown(lengths)}")
            lengths = tuple(integer("SpeculationConfig", f"lengths[{i}]", n, 0) for i, n in enumerate(lengths))
            if sorted(set(lengths)) != list(lengths):
                raise ValueError(f"{fail} different and in order, got {list(lengths)}")
            if lengths[-1] >= MAX_TREE_TOKENS:
                raise ValueError(f"{fail} at most {MAX_TREE_TOKENS - 1}, got {list(lengths)}")
            if self.topk != 1:
                raise ValueError(f"{fail} None for a tree, got {list(lengths)}")
            if self.num_steps not in (type(self).num_steps, lengths[-1]):
                wanted = f"the longest of `lengths` {list(lengths)}"
                raise ValueError(f"SpeculationConfig: `num_steps` must be {wanted}, got {shown(self.num_steps)}")
            object.__setattr__(self, "lengths", lengths)
            object.__setattr__(self, "num_steps", lengths[-1])
        if self.draft_cost is not None:
            wanted = "None or a number in (0, 10]" if lengths is not None else "None without `lengths`"
            cost = number(
                "SpeculationConfig", "draft_cost", self.draft_cost, wanted, lambda c: lengths is not None and 0 < c <= 10
            )
            object.__setattr__(self, "draft_cost", cost)

    @classmethod
    def auto(cls, **settings: Any) -> SpeculationConfig:
        """Chains whose length a generator chooses for each round, from 0, 1, 3, 5 and 7. `settings` are other attributes."""
        return cls(**{"lengths": AUTO_LENGTHS, **settings})

    def of_length(self, num_steps: int) -> SpeculationConfig:
        """The configuration whose every round drafts `num_steps`, at least 1."""
        return replace(self, num_steps=num_steps, num_draft_tokens=None, lengths=None, draft_cost=None)

    def _is_threshold(self, value: float) -> bool:
        return 0 < value <= 1 and (self.topk > 1 or value == 1)

    @property
    def verifies_blocks(self) -> bool:
        """Whether sampled rounds use block verification."""
        return self.topk == 1 and self.block_verification is not False

    @property
    def num_candidates(self) -> int:
        """Tokens that a tree's draft steps yield, of which the best are verified."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def num_tokens(self) -> int:
        """Tokens verified per request, root included (`D`)."""
        if self.topk == 1:
            return self.num_steps + 1
        return self.num_draft_tokens or min(2 * self.topk * self.num_steps, self.num_candidates + 1, MAX_TREE_TOKENS)

    @property
    def path_len(self) -> int:
        """Most tokens that a round can emit per request (`P`). A small tree may be too small for a path through all steps."""
        return min(self.num_steps + 1, self.num_tokens)

    @property
    def reserve(self) -> int:
        """Most KV slots past `committed_lens` that a round writes, whatever the draft."""
        return max(self.num_tokens, self.path_len, (self.num_steps - 1) * self.topk) + 1
