"""Prompt lookup: drafts that are read off the text itself."""

from __future__ import annotations

from dataclasses import dataclass

from spec_ops._numbers import integer, shown
from spec_ops.models.drafts import Draft
from spec_ops.ops.lookup import MAX_NGRAM


@dataclass(frozen=True)
class PromptLookup:
    """Drafts without a model: what followed where the last tokens of a request occurred before, in its prompt or output.

    It takes the place of a draft in `Generator`, `generate` and `SpeculativeRound`, for chains.

    It pays where texts quote themselves: editing, summarizing, answers about documents. It needs no training and no memory, and
    finding a draft takes about as long as one small kernel. `spec_ops.lookup_drafts` says which place is taken.

    Attributes:
        max_ngram: most last tokens that are compared, 1 to 64 (`max_matching_ngram_size` of transformers, `prompt_lookup_max`
            of vLLM).
        min_ngram: fewest that must have occurred before, 1 to `max_ngram` (`prompt_lookup_min` of vLLM).
        otherwise: the model that drafts for requests in which they have not; None: nothing is drafted there. It runs in every
            round, for all requests. Its drafts are the likeliest tokens, in sampled rounds too.

    Raises:
        ValueError: naming the attribute.
    """

    max_ngram: int = 8
    min_ngram: int = 1
    otherwise: Draft | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_ngram", integer("PromptLookup", "max_ngram", self.max_ngram, 1, MAX_NGRAM))
        object.__setattr__(self, "min_ngram", integer("PromptLookup", "min_ngram", self.min_ngram, 1, self.max_ngram))
        if self.otherwise is not None and not isinstance(self.otherwise, Draft):
            wanted = f"a {Draft.__module__}.{Draft.__qualname__} or None"
            raise ValueError(f"PromptLookup: `otherwise` must be {wanted}, got {shown(type(self.otherwise).__name__)}")
