"""Sampling from logits: temperature, top-k, top-p and min-p, and the draw.

A truncated softmax over a row of logits is fully described by three integers, its *support*. With `T` the row's temperature:

* `top`: the id of the (first) largest logit;
* `last`: the id of the least likely token that is kept; -1 if nothing is cut. Kept is `x` if `logit[x] > logit[last]`, or if
  both are equal and `x <= last`: ties at the boundary go to the lower ids;
* `total`: the sum of the weights of all kept tokens, where `weight(x) = trunc(2**44 * exp((logit[x] - logit[top]) / T))`, the
  exponential and its argument in float32.

So the probability of a kept token is `weight(x) / total`, and no distribution over the vocabulary has to be written and read
again. Sums of integers are exact: they depend neither on the order of adding nor on how many programs share a row. Tokens that
are 2**44 times less likely than the first weigh nothing; a uniform of 24 bits could not draw them either.

`accept_sampled_logits` takes logits with their supports. `sampling_probs`, `sample_tokens` and `accept_sampled` are for those
who need the distribution itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_ops.ops._library import define_op
from spec_ops.ops._validate import FLOAT_DTYPES, INDEX_DTYPES, Checker
from spec_ops.ops.reference import sampling as reference

ALL_MASKED = reference.ALL_MASKED
MAX_VOCAB = 2**19 - 1  # so many weights of at most 2**44 fit an int64


class Sampled(NamedTuple):
    """Tokens drawn from logits.

    Attributes:
        tokens: `[bs]` or `[bs, n]` int64; -1 for a row that is no distribution.
        support: `[bs, 3]` or `[bs, n, 3]` int64, as `sampling_support` returns it.
    """

    tokens: torch.Tensor
    support: torch.Tensor


def _support_fake(logits, *_):
    return logits.new_empty((*logits.shape[:-1], 3), dtype=torch.int64)


sampling_support_op = define_op(
    "sampling_support(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p) -> Tensor",
    reference.sampling_support,
    _support_fake,
    cuda="spec_ops.backends.triton.sampling.support:sampling_support",
    invariant=True,
)
sample_logits_op = define_op(
    "sample_logits(Tensor logits, Tensor uniforms, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p) "
    "-> (Tensor, Tensor)",
    reference.sample_logits,
    lambda logits, *_: (logits.new_empty(logits.shape[:-1], dtype=torch.int64), _support_fake(logits)),
    cuda="spec_ops.backends.triton.sampling.support:sample_logits",
    invariant=True,
)
sampling_probs_op = define_op(
    "sampling_probs(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p) -> Tensor",
    reference.sampling_probs,
    lambda logits, *_: logits.new_empty(logits.shape, dtype=torch.float32),
    cuda="spec_ops.backends.triton.sampling.probabilities:sampling_probs",
)
sample_tokens_op = define_op(
    "sample_tokens(Tensor probs, Tensor uniforms) -> Tensor",
    reference.sample_tokens,
    lambda probs, uniforms: probs.new_empty(probs.shape[:-1], dtype=torch.int64),
    cuda="spec_ops.backends.triton.sampling.accept:sample_tokens",
)


def _check_logits(check: Checker, logits, temperature, top_k, top_p, min_p) -> None:
    check.tensor("logits", logits, rank=(2, 3), dtypes=FLOAT_DTYPES)
    check_vocab(check, "logits", logits)
    rows = {"shape": (logits.shape[0],), "device": logits.device}
    check.tensor("temperature", temperature, dtypes=(torch.float32,), **rows)
    check.optional_tensor("top_k", top_k, dtypes=INDEX_DTYPES, **rows)
    check.optional_tensor("top_p", top_p, dtypes=(torch.float32,), **rows)
    check.optional_tensor("min_p", min_p, dtypes=(torch.float32,), **rows)


def check_vocab(check: Checker, arg: str, logits: torch.Tensor) -> None:
    """Refuse an empty vocabulary, and one whose weights an int64 does not sum."""
    if not 1 <= logits.shape[-1] <= MAX_VOCAB:
        check.fail(arg, f"over a vocabulary of 1 to {MAX_VOCAB} tokens", f"shape {tuple(logits.shape)}")


def sampling_support(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution to sample from, as three integers a row: temperature, then top-k, then top-p, then min-p.

    Args:
        logits: `[bs, V]` or `[bs, n, V]`, float32/bfloat16/float16; `V` is at most 2**19 - 1. -inf masks a token.
        temperature: `[bs]` float32; 0 keeps the (first) largest logit alone.
        top_k: `[bs]` int32/int64; keeps so many of the most likely tokens, below 1 all. Ties at the boundary go to the lower
            token id, here and below.
        top_p: `[bs]` float32; keeps the smallest set of the most likely tokens left whose probability reaches it, at least one;
            the probabilities are those after top-k, and sum to 1. 1 keeps all.
        min_p: `[bs]` float32; keeps the tokens at least this many times as likely as the most likely one, and that one always.
            0 keeps all.

    Returns:
        `[bs, 3]` or `[bs, n, 3]` int64: `top`, `last` and `total` of each row. `last` is -1 where no setting can cut (`top_k`
        below 1 or at least `V`, `top_p` 1, `min_p` 0), otherwise the least likely kept token, even if all are kept. At
        temperature 0: `(top, top, 2**44)`. A row that is no distribution (a NaN, or a largest logit that is infinite) has
        `(0, -1, 0)` at any temperature, `(0, -2, 0)` if every token is masked.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: thresholds of FlashInfer's `top_k_renorm_probs` and `top_p_renorm_probs`, min-p of arXiv:2407.01082.
    """
    check = Checker("sampling_support")
    _check_logits(check, logits, temperature, top_k, top_p, min_p)
    return sampling_support_op(logits, temperature, top_k, top_p, min_p)


def sample_logits(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> Sampled:
    """Draw a token from each row of logits: the first kept token whose running weight exceeds `floor(u * total)`.

    Args:
        logits, temperature, top_k, top_p, min_p: as for `sampling_support`.
        uniforms: `[bs]` or `[bs, n]` float32 in [0, 1), of which 24 bits count.

    Returns:
        `Sampled`; never a token that is cut or masked.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: FlashInfer `top_k_top_p_sampling_from_logits`, with the uniforms as an argument.
    """
    check = Checker("sample_logits")
    _check_logits(check, logits, temperature, top_k, top_p, min_p)
    check.tensor("uniforms", uniforms, shape=tuple(logits.shape[:-1]), dtypes=(torch.float32,), device=logits.device)
    return Sampled(*sample_logits_op(logits, uniforms, temperature, top_k, top_p, min_p))


def sampling_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution of `sampling_support`: softmax(logits / temperature) over the tokens that are kept.

    Args:
        logits, temperature, top_k, top_p, min_p: as for `sampling_support`.

    Returns:
        float32, shape of `logits`. A one-hot row at temperature 0.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: SGLang `top_k_renorm_prob` then `top_p_renorm_prob`.
    """
    check = Checker("sampling_probs")
    _check_logits(check, logits, temperature, top_k, top_p, min_p)
    return sampling_probs_op(logits, temperature, top_k, top_p, min_p)


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
