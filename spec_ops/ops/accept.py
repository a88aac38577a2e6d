"""Acceptance of drafted tokens by the target.

All ops return `Accepted`. Randomness comes in as uniforms, so a run repeats exactly. The distribution that a draft was sampled
from must be the very one passed here: its logits with their support (`sample_logits`), or float32 after temperature, top-k,
top-p and min-p (`sampling_probs`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_ops.ops._library import define_op
from spec_ops.ops._validate import FLOAT_DTYPES, INDEX_DTYPES, Checker
from spec_ops.ops.reference import accept as reference
from spec_ops.ops.sampling import check_vocab


class Accepted(NamedTuple):
    """What a verification accepted; `P` is the longest possible path, root included.

    Attributes:
        tokens: `[bs, P]` int64: accepted draft tokens in order, then the target's own next token; -1 past `lens`.
        path: `[bs, P]` int64: node of the tree whose target output yielded each token (so `path[:, 0]` is the root, 0, and
            the accepted KV rows are `path[:, :lens]`); -1 past `lens`.
        lens: `[bs]` int32 in [1, P]: accepted drafts + 1.
    """

    tokens: torch.Tensor
    path: torch.Tensor
    lens: torch.Tensor


def _accepted_fake(candidates, path_len):
    shape = (candidates.shape[0], path_len)
    return (
        candidates.new_empty(shape, dtype=torch.int64),
        candidates.new_empty(shape, dtype=torch.int64),
        candidates.new_empty(candidates.shape[0], dtype=torch.int32),
    )


accept_greedy_op = define_op(
    "accept_greedy(Tensor candidates, Tensor target_tokens, Tensor? parents, int path_len) -> (Tensor, Tensor, Tensor)",
    reference.accept_greedy,
    lambda candidates, target_tokens, parents, path_len: _accepted_fake(candidates, path_len),
    cuda="spec_ops.backends.triton.sampling.accept:accept_greedy",
    invariant=True,
)
accept_sampled_op = define_op(
    "accept_sampled(Tensor candidates, Tensor target_probs, Tensor uniforms, Tensor final_uniforms, Tensor? parents, "
    "Tensor? draft_probs, Tensor? draft_to_target, int path_len, float threshold_single, float threshold_acc) "
    "-> (Tensor, Tensor, Tensor)",
    reference.accept_sampled,
    lambda candidates, target_probs, u, final_u, parents, draft_probs, draft_to_target, path_len, single, acc: _accepted_fake(
        candidates, path_len
    ),
    cuda="spec_ops.backends.triton.sampling.accept:accept_sampled",
)
accept_sampled_logits_op = define_op(
    "accept_sampled_logits(Tensor candidates, Tensor target_logits, Tensor target_support, Tensor uniforms, "
    "Tensor final_uniforms, Tensor temperature, Tensor? parents, Tensor? draft_logits, Tensor? draft_support, "
    "Tensor? target_to_draft, int path_len, float threshold_single, float threshold_acc, bool block) "
    "-> (Tensor, Tensor, Tensor)",
    reference.accept_sampled_logits,
    lambda candidates, logits, support, u, final_u, t, parents, dl, ds, ids, path_len, single, acc, block: _accepted_fake(
        candidates, path_len
    ),
    cuda="spec_ops.backends.triton.sampling.accept_logits:accept_sampled_logits",
    invariant=True,
)


def _check_tree(check: Checker, candidates, parents, path_len) -> int:
    check.tensor("candidates", candidates, rank=2, dtypes=INDEX_DTYPES)
    if candidates.shape[1] < 1:
        check.fail("candidates", "of at least one token per request (the root)", f"shape {tuple(candidates.shape)}")
    check.optional_tensor("parents", parents, shape=tuple(candidates.shape), dtypes=(torch.int64,), device=candidates.device)
    tokens = int(candidates.shape[1])
    if path_len is None:
        return tokens
    check.integer("path_len", path_len, 1, tokens)
    if parents is None and path_len != tokens:
        check.fail("path_len", f"{tokens} for a chain", path_len)
    return path_len


def _check_thresholds(check: Checker, single, acc, lossless: str | None) -> None:
    for name, value in (("threshold_single", single), ("threshold_acc", acc)):
        check.number(name, value, low=0.0)
        if value > 1:
            check.fail(name, "at most 1", value)
        if lossless is not None and value != 1:
            check.fail(name, f"1 together with `{lossless}`", value)


def accept_greedy(
    candidates: torch.Tensor,
    target_tokens: torch.Tensor,
    parents: torch.Tensor | None = None,
    path_len: int | None = None,
) -> Accepted:
    """Accept the longest drafted path that equals the target's argmax.

    Args:
        candidates: `[bs, D]` int32/int64, root first; the root's own token is not looked at. -1 stands for no draft.
        target_tokens: `[bs, D]` int32/int64, the target's argmax after each node.
        parents: `[bs, D]` int64 from `build_tree`; None for a chain.
        path_len: `P`, longest path, root included (draft steps + 1); default `D`.

    Returns:
        `Accepted`. On duplicate siblings the lowest node wins.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: SGLang `verify_tree_greedy`.
    """
    check = Checker("accept_greedy")
    path_len = _check_tree(check, candidates, parents, path_len)
    check.tensor("target_tokens", target_tokens, shape=tuple(candidates.shape), dtypes=INDEX_DTYPES, device=candidates.device)
    return Accepted(*accept_greedy_op(candidates, target_tokens, parents, path_len))


def accept_sampled(
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    path_len: int | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> Accepted:
    """Accept drafted tokens so that the output keeps the target's distribution.

    Chain with `draft_probs` (rejection sampling, arXiv:2211.17192): draft `x` is accepted if `u * q(x) < p(x)`; at the first
    rejection the next token is drawn from `max(p - q, 0)`, after full acceptance from `p`. Lossless.

    Without `draft_probs`, chain or tree (target-only sampling, SGLang `tree_speculative_sampling_target_only`): at each node
    one uniform is compared with the running sum of its children's target probabilities; if no child is taken, the next token
    is drawn from the target without its children. Lossless for thresholds of 1 and siblings that differ. Lower thresholds
    accept more and are lossy: a child is also taken when its own probability reaches `threshold_single`, or when the
    uniform is below the running sum over `threshold_acc`.

    Args:
        candidates: `[bs, D]` int32/int64, root first; the root's own token is not looked at. -1 stands for no draft: it is
            neither accepted nor rejected.
        target_probs: `[bs, D, V]` float32, each row summing to 1 (one-hot rows give greedy acceptance).
        uniforms: `[bs, D]` float32 in [0, 1): entry `i` decides among the children of node `i`.
        final_uniforms: `[bs]` float32 in [0, 1), for the last token.
        parents: `[bs, D]` int64 from `build_tree`; None for a chain.
        draft_probs: `[bs, D - 1, Vd]` float32, the distribution each draft was sampled from; chains only.
        draft_to_target: `[Vd]` int64, target id of each id of a reduced draft vocabulary; None if `Vd == V`.
        path_len: as in `accept_greedy`.
        threshold_single, threshold_acc: in (0, 1]; must be 1 with `draft_probs`.

    Returns:
        `Accepted`. Where rounding leaves no residual after a rejection, the last token is drawn from the target itself; where
        that is no distribution either (its sum is 0, NaN or infinite), the last token is -1.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: SGLang `chain_speculative_sampling_triton` and `tree_speculative_sampling_target_only`.
    """
    check = Checker("accept_sampled")
    path_len = _check_tree(check, candidates, parents, path_len)
    bs, tokens = candidates.shape
    device = candidates.device
    check.tensor("target_probs", target_probs, shape=(bs, tokens, None), dtypes=(torch.float32,), device=device)
    check.tensor("uniforms", uniforms, shape=(bs, tokens), dtypes=(torch.float32,), device=device)
    check.tensor("final_uniforms", final_uniforms, shape=(bs,), dtypes=(torch.float32,), device=device)
    _check_thresholds(check, threshold_single, threshold_acc, "draft_probs" if draft_probs is not None else None)
    if draft_probs is None:
        if draft_to_target is not None:
            check.fail("draft_to_target", "None without `draft_probs`", "a tensor")
    else:
        if parents is not None:
            check.fail("draft_probs", "None for a tree (`parents` given)", "a tensor")
        vocab = target_probs.shape[2]
        draft_vocab = None if draft_to_target is not None else vocab
        check.tensor("draft_probs", draft_probs, shape=(bs, tokens - 1, draft_vocab), dtypes=(torch.float32,), device=device)
        check.optional_tensor(
            "draft_to_target", draft_to_target, shape=(draft_probs.shape[2],), dtypes=(torch.int64,), device=device
        )
    return Accepted(
        *accept_sampled_op(
            candidates, target_probs, uniforms, final_uniforms, parents, draft_probs, draft_to_target, path_len,
            float(threshold_single), float(threshold_acc),
        )
    )  # fmt: skip


def accept_sampled_logits(
    candidates: torch.Tensor,
    target_logits: torch.Tensor,
    target_support: torch.Tensor,
    uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
    temperature: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
    draft_logits: torch.Tensor | None = None,
    draft_support: torch.Tensor | None = None,
    target_to_draft: torch.Tensor | None = None,
    path_len: int | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    block: bool = False,
) -> Accepted:
    """`accept_sampled` for distributions that come as logits with their supports (see `ops/sampling.py`).

    A probability is `float64(weight) / float64(total)`. In a chain with `draft_logits` the draft `x` is accepted if
    `u * q(x) < p(x)`, in float64. The residual is summed and drawn from as integers, `trunc(2**60 * max(p - q, 0))`, the target
    itself and the target without rejected children as their weights. So a result depends neither on how many programs share a
    row nor on the batch.

    With `block`, whole chains are verified at once (block verification, arXiv:2403.10444, Algorithm 2): lossless as well, and
    the expected number of accepted drafts is never smaller. With `a(0) = 1` and `a(i) = min(a(i-1) * p(x_i) / q(x_i), 1)`, each
    in that order, the first `i` drafts are accepted for the largest `i` with `u_i < h(i)`, where
    `h(i) = s / (s + 1 - a(i))`, `s` being the sum of `max(a(i) * p - q, 0)` over the vocabulary after draft `i` (in integers as
    above), and `h(i) = a(i)` for the last draft. The next token is drawn from `max(a(i) * p - q, 0)`, after the last draft from
    `p`. `s = 0` beside `a(i) = 1` counts as `h(i) = 0`: a later draft is accepted for sure.

    Args:
        candidates: `[bs, D]` int32/int64, root first; the root's own token is not looked at. -1 stands for no draft: it is
            neither accepted nor rejected, and ends a block.
        target_logits: `[bs, D, V]` float32/bfloat16/float16.
        target_support: `[bs, D, 3]` int64, from `sampling_support` of these logits.
        uniforms: `[bs, D]` float32 in [0, 1): entry `i` decides among the children of node `i`.
        final_uniforms: `[bs]` float32 in [0, 1), for the last token.
        temperature: `[bs]` float32, that of both supports.
        parents: `[bs, D]` int64 from `build_tree`; None for a chain.
        draft_logits: `[bs, D - 1, Vd]` float32/bfloat16/float16, what each draft was sampled from; chains only.
        draft_support: `[bs, D - 1, 3]` int64, from `sample_logits`; with `draft_logits`. A draft whose row is no distribution
            (`total` 0) counts as none.
        target_to_draft: `[V]` int64, the id of each of the target's tokens in a reduced draft vocabulary, -1 for none; None if
            `Vd == V`.
        path_len: as in `accept_greedy`.
        threshold_single, threshold_acc: as in `accept_sampled`.
        block: verify blocks instead of tokens; needs `draft_logits`.

    Returns:
        `Accepted`. Where rounding leaves no residual after a rejection, the last token is drawn from the target itself; where
        that is no distribution either (`total` 0), the last token is -1. A block ends before a draft that comes after no
        distribution.

    Raises:
        TypeError, ValueError: naming the argument.
        IndexError: on the CPU, naming the argument: ids out of range.

    Source: SGLang `chain_speculative_sampling_triton` and `tree_speculative_sampling_target_only`; arXiv:2403.10444.
    """
    check = Checker("accept_sampled_logits")
    path_len = _check_tree(check, candidates, parents, path_len)
    bs, tokens = candidates.shape
    device = candidates.device
    check.tensor("target_logits", target_logits, shape=(bs, tokens, None), dtypes=FLOAT_DTYPES, device=device)
    check_vocab(check, "target_logits", target_logits)
    check.tensor("target_support", target_support, shape=(bs, tokens, 3), dtypes=(torch.int64,), device=device)
    check.tensor("uniforms", uniforms, shape=(bs, tokens), dtypes=(torch.float32,), device=device)
    check.tensor("final_uniforms", final_uniforms, shape=(bs,), dtypes=(torch.float32,), device=device)
    check.tensor("temperature", temperature, shape=(bs,), dtypes=(torch.float32,), device=device)
    _check_thresholds(check, threshold_single, threshold_acc, "draft_logits" if draft_logits is not None else None)
    if not isinstance(block, bool):
        check.fail("block", "a bool", type(block).__name__, TypeError)
    if draft_logits is None:
        for name, value in (("draft_support", draft_support), ("target_to_draft", target_to_draft)):
            if value is not None:
                check.fail(name, "None without `draft_logits`", "a tensor")
        if block:
            check.fail("block", "False without `draft_logits`", block)
    else:
        if parents is not None:
            check.fail("draft_logits", "None for a tree (`parents` given)", "a tensor")
        vocab = target_logits.shape[2]
        draft_vocab = None if target_to_draft is not None else vocab
        check.tensor("draft_logits", draft_logits, shape=(bs, tokens - 1, draft_vocab), dtypes=FLOAT_DTYPES, device=device)
        check_vocab(check, "draft_logits", draft_logits)
        check.tensor("draft_support", draft_support, shape=(bs, tokens - 1, 3), dtypes=(torch.int64,), device=device)
        check.optional_tensor("target_to_draft", target_to_draft, shape=(vocab,), dtypes=(torch.int64,), device=device)
    return Accepted(
        *accept_sampled_logits_op(
            candidates, target_logits, target_support, uniforms, final_uniforms, temperature, parents, draft_logits,
            draft_support, target_to_draft, path_len, float(threshold_single), float(threshold_acc), block,
        )
    )  # fmt: skip
