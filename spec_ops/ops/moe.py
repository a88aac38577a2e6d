"""Mixtures of experts: which experts a token goes to, and what they make of it.

Routers of transformers, vLLM and SGLang give `topk_ids` and `topk_weights`; the weights of all experts are one stack, as
transformers stores them. A few tokens meet many experts, so what counts is that an expert's weights are read once.
"""

from __future__ import annotations

import torch

from spec_ops.backends.expert_format import expert_format
from spec_ops.backends.squares import sums_of
from spec_ops.ops._library import define_op
from spec_ops.ops._validate import FLOAT_DTYPES, INDEX_DTYPES, Checker
from spec_ops.ops.reference import moe as reference

__all__ = ["moe_experts", "route_experts"]

MAX_TOP_K = 32
MAX_EXPERTS = 1024
SCORINGS = ("softmax", "sigmoid", "none")
_STORED = (torch.float8_e4m3fn, torch.uint8)  # in 8 and 4 bits
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def _route_experts_fake(logits, bias, k, scoring, groups, top_groups, renormalize, scale, dtype=torch.float32):
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=dtype)


route_experts_op = define_op(
    "route_experts(Tensor logits, Tensor? bias, int k, str scoring, int groups, int top_groups, bool renormalize, float scale, "
    "ScalarType dtype=float) -> (Tensor topk_ids, Tensor topk_weights)",
    reference.route_experts,
    _route_experts_fake,
    cuda="spec_ops.backends.triton.moe.route:route_experts",
    invariant=True,
)
_EXPERTS = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, "
    "str activation, bool gated, bool interleaved, bool transposed, float? limit, float alpha, float beta"
)
moe_experts_op = define_op(
    f"moe_experts({_EXPERTS}, Tensor? gate_up_scale=None, Tensor? down_scale=None, bool invariant=False) -> Tensor",
    reference.moe_experts,
    lambda x, *_rest, **_scales: x.new_empty(x.shape),
    cuda="spec_ops.backends.triton.moe.experts:moe_experts",
    invariant="invariant",  # otherwise which experts others go to decides how sums are divided
)

# A mixture between the two parts of an RMS norm, and before one (`linear.py`). They have no public wrappers: `fuse_norm_linear`
# puts them in place of `moe_experts`.


def _scaled_moe_experts_fake(x, *_rest):
    return x.new_empty(x.shape)


# `moe_experts` of the rows `x * rsqrt(sum(squares) / H + eps)`, which are not rounded: the first product is scaled.
scaled_moe_experts_op = define_op(
    f"scaled_moe_experts({_EXPERTS}, Tensor? gate_up_scale, Tensor? down_scale, Tensor squares, float eps) -> Tensor",
    reference.scaled_moe_experts,
    _scaled_moe_experts_fake,
    cuda="spec_ops.backends.triton.moe.experts:scaled_moe_experts",
)


def _add_moe_experts_fake(x, *_rest):
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[0], sums_of(x.shape[1]), dtype=torch.float32)


# `y = moe_experts(...) + residual [T, H]`, rounded as the mixture and as the sum, `z` and `squares` as `add_skinny_mm` gives
# them. With `squares` the mixture is that of `scaled_moe_experts`. Residual and norm's weight `[H]` have the dtype of x.
add_moe_experts_op = define_op(
    f"add_moe_experts({_EXPERTS}, Tensor? gate_up_scale, Tensor? down_scale, Tensor? squares, float eps, Tensor residual, "
    "Tensor norm_weight) -> (Tensor y, Tensor z, Tensor sums)",
    reference.add_moe_experts,
    _add_moe_experts_fake,
    cuda="spec_ops.backends.triton.moe.experts:add_moe_experts",
)


def route_experts(
    logits: torch.Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` experts of each token and their weights, in one launch.

    Scores are the softmax or the sigmoid of the logits, or the logits themselves. Experts are chosen by score plus `bias`,
    which has no part in the weights; without a bias by logit, which is the same order. Of `groups` equal groups of experts
    only the `top_groups` best count: a group is as good as its two best experts together with a bias, and as its best one
    without.

    | model | arguments |
    |---|---|
    | Mixtral, Qwen3-MoE, gpt-oss | the defaults |
    | Qwen2-MoE, OLMoE | `renormalize=False` |
    | DeepSeek-V3, GLM-4 | `scoring="sigmoid"`, `bias`, `groups`, `top_groups`, `scale` |
    | the largest logits, in descending order | `scoring="none"`, `renormalize=False` |

    Args:
        logits: `[T, E]` float32, bfloat16 or float16, E up to 1024.
        k: experts a token, at most 32 and at most the experts of `top_groups` groups.
        scoring: `"softmax"`, `"sigmoid"` or `"none"`.
        bias: `[E]` float32, added to the scores for the choice alone.
        groups: in how many equal groups the experts lie.
        top_groups: of how many groups a token's experts may come.
        renormalize: divide a token's weights by their sum.
        scale: what weights are multiplied with.
        dtype: to which weights are rounded at the end: float32, bfloat16 or float16.

    Returns:
        `topk_ids [T, k]` int64, best first, ties to the lower id; NaN counts as the lowest logit. `topk_weights [T, k]`
        `dtype`.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: the routers of transformers' Mixtral, gpt-oss and DeepSeek-V3 (arXiv:2412.19437, 2.1.2); vLLM `grouped_topk`.
    """
    check = Checker("route_experts")
    check.tensor("logits", logits, rank=2, dtypes=FLOAT_DTYPES)
    experts = logits.shape[1]
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail("logits", f"of 1 to {MAX_EXPERTS} experts", f"shape {tuple(logits.shape)}")
    check.optional_tensor("bias", bias, shape=(experts,), dtypes=(torch.float32,), device=logits.device)
    if scoring not in SCORINGS:
        check.fail("scoring", "one of " + ", ".join(map(repr, SCORINGS)), repr(scoring))
    check.integer("groups", groups, 1)
    if experts % groups:
        check.fail("groups", f"a divisor of {experts} (the experts of `logits`)", groups)
    if bias is not None and groups > 1 and experts // groups < 2:
        check.fail("groups", "of at least two experts each, with a `bias`", f"{groups} groups of one expert")
    check.integer("top_groups", top_groups, 1, groups)
    check.integer("k", k, 1, min(MAX_TOP_K, experts // groups * top_groups))
    if not isinstance(renormalize, bool):
        check.fail("renormalize", "a bool", type(renormalize).__name__, TypeError)
    check.number("scale", scale, low=0.0)
    if not isinstance(dtype, torch.dtype):
        check.fail("dtype", "a torch.dtype", type(dtype).__name__, TypeError)
    if dtype not in FLOAT_DTYPES:
        check.fail("dtype", "float32, bfloat16 or float16", dtype)
    return route_experts_op(logits, bias, k, scoring, groups, top_groups, renormalize, float(scale), dtype)


def moe_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it.

    Expert `e` computes `down[e] (act(g) * (u + beta)) + down_bias[e]` of `g, u = gate_up[e] x + gate_up_bias[e]`, without a
    gate `down[e] act(u) + down_bias[e]`. Sums are float32 and in the same order at every call; no copy of weights is made, and
    no sync with the host.

    gpt-oss: `interleaved=True, transposed=True, alpha=1.702, beta=1.0, limit=7.0`, and both biases; as published, in MXFP4,
    not `transposed`.

    Weights of 8 and 4 bits are read as they are stored, and rows keep their dtype: float8_e4m3fn with a scale for each block of
    128 x 128, each row or each expert; MXFP4, two numbers in a uint8 with a power of 2 for every 32; and int4 without zero
    points, in groups of 32, 64, 128 or 256 columns (`backends/expert_format.py`). Gate and up projection are blocked each by
    itself unless they are interleaved.

    Args:
        x: `[T, H]` float32, bfloat16 or float16.
        topk_ids: `[T, k]` int32 or int64, each in [0, E); a negative one is no expert (padding, an expert of another rank).
        topk_weights: `[T, k]` float32, bfloat16 or float16.
        gate_up: `[E, 2 * I, H]`, dtype of `x`: the rows of the gate, then those of the up projection. Without a gate
            `[E, I, H]`. Weights must be finite: rows of other experts are multiplied with zeros. Or float8_e4m3fn of that
            shape, or uint8 `[E, 2 * I, H / 2]`.
        down: `[E, H, I]`, dtype of `x`; float8_e4m3fn or uint8 `[E, H, I / 2]` if `gate_up` is.
        gate_up_bias: `[E, 2 * I]` (`[E, I]`), dtype of `x`, in the order of the rows of `gate_up`.
        down_bias: `[E, H]`, dtype of `x`.
        activation: `"silu"`, `"gelu"`, `"gelu_tanh"`, `"relu"`, or `"relu2"` (its square).
        gated: whether there is a gate.
        interleaved: the gate's rows are the even ones, those of the up projection the odd ones.
        transposed: `gate_up` is `[E, H, 2 * I]` and `down [E, I, H]`.
        limit: the gate is clamped to at most this, the up projection to its absolute value; None for no limit.
        alpha: SiLU is `g * sigmoid(alpha * g)`; only with `activation="silu"`.
        beta: added to the up projection.
        gate_up_scale: of a `gate_up` of float8 `[E, 2 * ceil(I / 128), ceil(H / 128)]` (`[E, 2 * I, 1]`, `[E, 2, 1]`,
            `[E, 1, 1]`), floating-point; of uint8 `[E, 2 * I, H / 32]` uint8 (e8m0), or `[E, 2 * I, H / group]`
            floating-point for int4.
        down_scale: alike, `[E, ceil(H / 128), ceil(I / 128)]` (`[E, H, 1]`, `[E, 1, 1]`), `[E, H, I / 32]` or
            `[E, H, I / group]`.

    Returns:
        `[T, H]`, contiguous, dtype of `x`; zeros for a token without experts.

    Raises:
        TypeError, ValueError: naming the argument; on CUDA float8 before sm_89. IndexError on CPU for an id of E or more; on
            CUDA it is no expert.

    Source: transformers' `ExpertsInterface`; vLLM `fused_experts`; gpt-oss's clamped SwiGLU as FlashInfer's `swiglu_alpha`,
    `swiglu_beta` and `swiglu_limit`.
    """
    check = Checker("moe_experts")
    check.tensor("x", x, rank=2, dtypes=FLOAT_DTYPES)
    for name, flag in (("gated", gated), ("interleaved", interleaved), ("transposed", transposed)):
        if not isinstance(flag, bool):
            check.fail(name, "a bool", type(flag).__name__, TypeError)
    tokens, hidden = x.shape
    device = x.device
    check.tensor("topk_ids", topk_ids, shape=(tokens, None), dtypes=INDEX_DTYPES, device=device)
    check.tensor("topk_weights", topk_weights, shape=tuple(topk_ids.shape), dtypes=FLOAT_DTYPES, device=device)
    kinds = (x.dtype, *_STORED)
    check.tensor("gate_up", gate_up, rank=3, dtypes=kinds, device=device)
    packed = 2 if gate_up.dtype == torch.uint8 else 1
    check.tensor("gate_up", gate_up, shape=(None, hidden, None) if transposed else (None, None, hidden // packed))
    experts, rows = gate_up.shape[0], gate_up.shape[2 if transposed else 1]
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail("gate_up", f"of 1 to {MAX_EXPERTS} experts", f"shape {tuple(gate_up.shape)}")
    if gated and rows % 2:
        check.fail("gate_up", "of an even number of rows, a gate's and an up projection's", f"shape {tuple(gate_up.shape)}")
    inner = rows // 2 if gated else rows
    shape = (experts, inner, hidden) if transposed else (experts, hidden, inner // packed)
    check.tensor("down", down, shape=shape, dtypes=(gate_up.dtype,), device=device)
    if transposed and gate_up.dtype in _STORED:
        check.fail("transposed", f"False with a `gate_up` of {gate_up.dtype}", "True")
    for name, scale in (("gate_up_scale", gate_up_scale), ("down_scale", down_scale)):
        check.optional_tensor(name, scale, rank=3, device=device)
    expert_format("moe_experts", "gate_up", gate_up, gate_up_scale, 2 if gated and not interleaved else 1)
    expert_format("moe_experts", "down", down, down_scale)
    check.optional_tensor("gate_up_bias", gate_up_bias, shape=(experts, rows), dtypes=(x.dtype,), device=device)
    check.optional_tensor("down_bias", down_bias, shape=(experts, hidden), dtypes=(x.dtype,), device=device)
    if activation not in ACTIVATIONS:
        check.fail("activation", "one of " + ", ".join(map(repr, ACTIVATIONS)), repr(activation))
    if interleaved and not gated:
        check.fail("interleaved", "False without a gate", "True")
    if limit is not None:
        check.number("limit", limit, low=0.0)
        if not gated:
            check.fail("limit", "None without a gate", limit)
    check.number("alpha", alpha, low=0.0)
    if alpha != 1 and activation != "silu":
        check.fail("alpha", f"1 with `activation={activation!r}`", alpha)
    check.number("beta", beta, low=0.0, inclusive=True)
    if beta and not gated:
        check.fail("beta", "0 without a gate", beta)
    return moe_experts_op(
        x, topk_ids, topk_weights, gate_up, down, gate_up_bias, down_bias, activation, gated, interleaved, transposed,
        None if limit is None else float(limit), float(alpha), float(beta), gate_up_scale, down_scale,
    )  # fmt: skip
