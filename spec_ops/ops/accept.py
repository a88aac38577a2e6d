"""Acceptance of drafted tokens by the target, and the sampling it rests on.

Both ops return `Accepted`. Randomness comes in as uniforms, so a run repeats exactly. Distributions are float32 after
temperature, top-k and top-p (`sampling_probs`): the distribution a draft was sampled from must be the very one passed here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_ops.ops._library import define_op
from spec_ops.ops._validate import FLOAT_DTYPES, INDEX_DTYPES, Checker
from spec_ops.ops.reference import accept as reference


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
sampling_probs_op = define_op(
    "sampling_probs(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p) -> Tensor",
    reference.sampling_probs,
    lambda logits, temperature, top_k, top_p: logits.new_empty(logits.shape, dtype=torch.float32),
    cuda="spec_ops.backends.triton.sampling.probabilities:sampling_probs",
)
sample_tokens_op = define_op(
    "sample_tokens(Tensor probs, Tensor uniforms) -> Tensor",
    reference.sample_tokens,
    lambda probs, uniforms: probs.new_empty(probs.shape[:-1], dtype=torch.int64),
    cuda="spec_ops.backends.triton.sampling.accept:sample_tokens",
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


def accept_greedy(
    candidates: torch.Tensor,
    target_tokens: torch.Tensor,
    parents: torch.Tensor | None = None,
    path_len: int | None = None,
) -> Accepted:
    """Accept the longest drafted path that equals the target's argmax.

    Args:
        candidates: `[bs, D]` int32/int64, root first; the root's own token is not looked at.
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
    for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        check.number(name, value, low=0.0)
        if value > 1:
            check.fail(name, "at most 1", value)
        if draft_probs is not None and value != 1:
            check.fail(name, "1 together with `draft_probs`", value)
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


def sampling_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Distribution to sample from: softmax(logits / temperature), then top-k, then top-p, renormalized after each.

    Args:
        logits: `[bs, V]` or `[bs, n, V]`, float32/bfloat16/float16.
        temperature: `[bs]` float32; 0 gives a one-hot row at the (first) maximum.
        top_k: `[bs]` int32/int64; below 1 keeps all. Ties at the boundary go to the lower token id.
        top_p: `[bs]` float32; keeps the smallest set of most likely tokens whose probability reaches it, at least one; ties
            go to the lower token id, 1 keeps all.

    Returns:
        float32, shape of `logits`.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: SGLang `top_k_renorm_prob` then `top_p_renorm_prob`.
    """
    check = Checker("sampling_probs")
    check.tensor("logits", logits, rank=(2, 3), dtypes=FLOAT_DTYPES)
    bs, device = logits.shape[0], logits.device
    check.tensor("temperature", temperature, shape=(bs,), dtypes=(torch.float32,), device=device)
    check.optional_tensor("top_k", top_k, shape=(bs,), dtypes=INDEX_DTYPES, device=device)
    check.optional_tensor("top_p", top_p, shape=(bs,), dtypes=(torch.float32,), device=device)
    return sampling_probs_op(logits, temperature, top_k, top_p)


def sample_tokens(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds `uniform * total`.

    Args:
        probs: `[..., V]` float32, non-negative, not necessarily normalized. uniforms: `[...]` float32 in [0, 1).

    Returns:
        `[...]` int64; never a token of probability 0. -1 for a row that is no distribution: its sum is 0, NaN or infinite.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: FlashInfer `sampling_from_probs`, with the uniforms as an argument.
    """
    check = Checker("sample_tokens")
    check.tensor("probs", probs, dtypes=(torch.float32,))
    if probs.dim() < 1 or probs.shape[-1] < 1:
        check.fail("probs", "of rank 1 or more with a non-empty vocabulary", f"shape {tuple(probs.shape)}")
    check.tensor("uniforms", uniforms, shape=tuple(probs.shape[:-1]), dtypes=(torch.float32,), device=probs.device)
    return sample_tokens_op(probs, uniforms)
