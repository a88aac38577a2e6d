"""RoPE and the KV append that follows it, as one op: one launch instead of three, and keys pass through memory once. Where a
model normalizes its heads before RoPE, the op does that too.

Source: FlashInfer `rope_quantize_fp8_append_paged_kv_cache`, TensorRT-LLM's fused QKV preprocessing. RoPE: arXiv:2104.09864.
"""

from __future__ import annotations

import torch

from spec_ops.backends.call import FP8_DTYPES
from spec_ops.ops._library import define_op, fakes_check
from spec_ops.ops._passed import Passed
from spec_ops.ops._validate import FLOAT_DTYPES, INDEX_DTYPES, Checker
from spec_ops.ops.kv_cache import check_cache, check_layout, check_place
from spec_ops.ops.reference import rope as reference


def _check_tensors(q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm) -> None:
    check = Checker("rope_append_kv")
    check.tensor("q", q, rank=3, dtypes=FLOAT_DTYPES)
    n, _, dim = q.shape
    check_cache(check, "k_cache", k_cache, 4)
    check_cache(check, "v_cache", v_cache, 4)
    check.tensor("k_cache", k_cache, shape=(None, None, None, dim), dtypes=(q.dtype, *FP8_DTYPES), device=q.device)
    check.tensor("v_cache", v_cache, shape=(*k_cache.shape[:3], None), dtypes=(k_cache.dtype,), device=q.device)
    if v_cache is k_cache:
        check.fail("v_cache", "another tensor than `k_cache`", "the same one")
    check_layout(check, k, k_cache)
    check.tensor("k", k, shape=(n, *k_cache.shape[2:]), dtypes=(q.dtype,), device=q.device)
    check.tensor("v", v, shape=(n, *v_cache.shape[2:]), dtypes=(q.dtype,), device=q.device)
    check.tensor("cos", cos, shape=(n, None), dtypes=(torch.float32,), device=q.device)
    if not 0 < 2 * cos.shape[1] <= dim:
        check.fail("cos", f"of 1 to {dim // 2} columns (half of `q`'s last dimension)", f"shape {tuple(cos.shape)}")
    check.tensor("sin", sin, shape=(n, cos.shape[1]), dtypes=(torch.float32,), device=q.device)
    check.tensor("slots", slots, shape=(n,), dtypes=INDEX_DTYPES, device=q.device)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check.tensor(name, weight, shape=(dim,), dtypes=FLOAT_DTYPES, device=q.device)


def _rope_append_kv_fake(
    q, k, v, cos, sin, k_cache, v_cache, slots, _k_scale, _v_scale, q_norm=None, k_norm=None, _norm_eps=0.0
):
    _check_tensors(q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm)
    check_place("rope_append_kv", k_cache=k_cache, v_cache=v_cache)
    return q.new_empty(q.shape)


rope_append_kv_op = define_op(
    "rope_append_kv(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slots, float k_scale, float v_scale, Tensor? q_norm=None, Tensor? k_norm=None, float norm_eps=0.0) -> Tensor",
    reference.rope_append_kv,
    _rope_append_kv_fake,
    cuda="spec_ops.backends.triton.cache.rope_append:rope_append_kv",
    invariant=True,
)


def _factors(
    q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, k_scale, v_scale, norm_eps
) -> tuple[float, float, float]:
    """Check a call; returns the factors of its caches, and what is added to the mean square of a head."""
    if not fakes_check():
        _check_tensors(q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm)
    check = Checker("rope_append_kv")
    if not isinstance(norm_eps, (int, float)) or not 0 <= norm_eps < float("inf"):
        check.fail("norm_eps", "a finite number of at least 0", repr(norm_eps))
    k_factor = check.scale("k_scale", k_scale, "k_cache", k_cache.dtype)
    return k_factor, check.scale("v_scale", v_scale, "v_cache", v_cache.dtype), float(norm_eps)


_passed = Passed(_factors)


def rope_append_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into paged caches in place, and return the rotated queries.

    The half-split ("NeoX", Hugging Face) layout: dimension `i` of the first `r = cos.shape[-1]` rotates with dimension `i + r`;
    dimensions from `2 * r` on pass through unrotated. Arithmetic in float32, rounded once.

    Args:
        q: `[n, num_q_heads, head_dim]` float32, bfloat16 or float16, any strides (a slice of a fused projection is fine).
        k, v: `[n, num_kv_heads, head_dim]` and `[n, num_kv_heads, v_head_dim]`, dtype of `q`.
        cos, sin: `[n, r]` float32, of each token's position; `2 * r <= head_dim`.
        k_cache, v_cache, slots, k_scale, v_scale: as in `append_kv`; unless they are fp8, caches have the dtype of `q`.
        q_norm, k_norm: `[head_dim]` float32, bfloat16 or float16, the weights of RMS norms of each head of `q` and `k` before
            they are rotated (Qwen3's); None for no norm.
        norm_eps: added to the mean square of a head, at least 0.

    Returns:
        `[n, num_q_heads, head_dim]`, contiguous, dtype of `q`: every row is rotated, also where its slot is negative.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written. IndexError on CPU for a slot past the end.
    """
    factors = _factors if fakes_check() else _passed
    k_factor, v_factor, eps = factors(q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, k_scale, v_scale, norm_eps)
    return rope_append_kv_op(q, k, v, cos, sin, k_cache, v_cache, slots, k_factor, v_factor, q_norm, k_norm, eps)
