"""Drafting without a model: the tokens that followed the last time that the text was the same (prompt lookup)."""

from __future__ import annotations

import torch

from spec_ops.ops._library import define_op
from spec_ops.ops._validate import INDEX_DTYPES, Checker
from spec_ops.ops.reference import lookup as reference
from spec_ops.ops.tree import MAX_TREE_TOKENS

MAX_NGRAM = 64

lookup_drafts_op = define_op(
    "lookup_drafts(Tensor tokens, Tensor lens, int num_steps, int max_ngram, int min_ngram) -> Tensor",
    reference.lookup_drafts,
    lambda tokens, lens, num_steps, max_ngram, min_ngram: tokens.new_empty(tokens.shape[0], num_steps, dtype=torch.int64),
    cuda="spec_ops.backends.triton.drafting.lookup:lookup_drafts",
    invariant=True,
)


def lookup_drafts(
    tokens: torch.Tensor, lens: torch.Tensor, num_steps: int, max_ngram: int = 8, min_ngram: int = 1
) -> torch.Tensor:
    """The next tokens of each text, if it goes on as it did where its last tokens occurred before.

    Of all earlier places that end with the text's last `n` tokens the one with the largest `n` is taken, `max_ngram` at most,
    and of several the last. What followed there is the draft. A place so near the end that fewer than `num_steps` tokens follow
    is a text that repeats itself: the draft repeats those tokens.

    Args:
        tokens: `[bs, L]` int32/int64, the texts. What stands after their length is not looked at.
        lens: `[bs]` int32/int64, their lengths, at most `L`.
        num_steps: tokens to draft `S`, 1 to 63.
        max_ngram: most last tokens that are compared, 1 to 64. Shorter texts are compared whole.
        min_ngram: fewest that must be the same, 1 to `max_ngram`.

    Returns:
        `[bs, S]` int64; -1 for a text without such a place. No place is found in a text of one token or none.

    Raises:
        TypeError, ValueError: naming the argument; on CPU also for lengths out of range.

    Source: prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding), transformers
    `PromptLookupCandidateGenerator` and vLLM `NgramProposer`, which take the first of several places and draft no further than
    the end of the text.
    """
    check = Checker("lookup_drafts")
    check.tensor("tokens", tokens, rank=2, dtypes=INDEX_DTYPES)
    check.tensor("lens", lens, shape=(tokens.shape[0],), dtypes=INDEX_DTYPES, device=tokens.device)
    check.integer("num_steps", num_steps, 1, MAX_TREE_TOKENS - 1)
    check.integer("max_ngram", max_ngram, 1, MAX_NGRAM)
    check.integer("min_ngram", min_ngram, 1, max_ngram)
    return lookup_drafts_op(tokens, lens, num_steps, max_ngram, min_ngram)
