"""Argument checks of the attention steps, shared by their wrappers."""

from __future__ import annotations

import math

import torch

from spec_ops.backends import attention_backend
from spec_ops.ops._validate import FLOAT_DTYPES, FP8_DTYPES, INDEX_DTYPES, Checker

MAX_TREE_TOKENS = 64
MAX_PAGE_SIZE = 128


def check_common(
    check: Checker, q, cache, cache_arg, num_heads, block_tables, seq_lens, optional, window_left, sinks, softcap, backend,
    deterministic,
) -> str:  # fmt: skip
    """Checks shared by all eight wrappers: tables, lengths, optional metadata, softmax options; the backend to select by."""
    device = q.device
    if cache.shape[0] < 1:
        check.fail(cache_arg, "of at least one page", f"shape {tuple(cache.shape)}")
    if not 1 <= cache.shape[1] <= MAX_PAGE_SIZE:
        check.fail(cache_arg, f"of page size (dimension 1) in [1, {MAX_PAGE_SIZE}]", cache.shape[1])
    if cache.stride(-1) != 1:
        check.fail(cache_arg, "contiguous in its last dimension", f"strides {cache.stride()}")
    check.tensor("seq_lens", seq_lens, rank=1, dtypes=(torch.int32,), device=device)
    bs = seq_lens.shape[0]
    check.tensor("block_tables", block_tables, shape=(bs, None), dtypes=(torch.int32,), device=device)
    kv_indptr, kv_indices, seq_lens_cpu, max_seq_len = optional
    check.optional_tensor("kv_indptr", kv_indptr, rank=1, dtypes=(torch.int32,), device=device)
    check.optional_tensor("kv_indices", kv_indices, rank=1, dtypes=INDEX_DTYPES, device=device)
    if (kv_indptr is None) != (kv_indices is None):
        check.fail("kv_indptr", "given together with `kv_indices`", "only one of the two")
    check.optional_tensor("seq_lens_cpu", seq_lens_cpu, shape=(bs,), dtypes=INDEX_DTYPES, device=torch.device("cpu"))
    if max_seq_len is not None:
        check.integer("max_seq_len", max_seq_len, 1)
    check.integer("window_left", window_left, -1)
    check.optional_tensor("sinks", sinks, shape=(num_heads,), dtypes=(torch.float32,), device=device)
    check.number("softcap", softcap, low=0.0, inclusive=True)
    return attention_backend(check, backend, deterministic)


def check_uniform(check: Checker, q, seq_lens, tree_mask, mask_len) -> int:
    """`q [bs, q_len, heads, dim]` with an optional tree mask; returns the mask length (0: causal)."""
    bs, q_len = q.shape[:2]
    if seq_lens.shape[0] != bs:
        check.fail("seq_lens", f"of shape [{bs}], as `q` holds {bs} requests", f"shape {tuple(seq_lens.shape)}")
    if tree_mask is None:
        if mask_len is not None:
            check.fail("mask_len", "None, since no `tree_mask` is given", mask_len)
        return 0
    check.tensor("tree_mask", tree_mask, shape=(bs, q_len), dtypes=(torch.int64,), device=q.device)
    mask_len = q_len if mask_len is None else mask_len
    check.integer("mask_len", mask_len, 1, MAX_TREE_TOKENS)
    if q_len > mask_len:
        check.fail("mask_len", f"at least the number of queries ({q_len})", mask_len)
    return int(mask_len)


def check_ragged(check: Checker, q, q_indptr, seq_lens, max_q_len) -> None:
    check.tensor("q_indptr", q_indptr, shape=(seq_lens.shape[0] + 1,), dtypes=(torch.int32,), device=q.device)
    check.integer("max_q_len", max_q_len, 1)


def check_mha(check: Checker, q, k_cache, v_cache, rank, scale, k_scale, v_scale) -> tuple[float, float, float]:
    check.tensor("q", q, rank=rank, dtypes=FLOAT_DTYPES)
    heads, dim = q.shape[-2:]
    check.tensor("k_cache", k_cache, shape=(None, None, None, dim), dtypes=(q.dtype, *FP8_DTYPES), device=q.device)
    check.tensor("v_cache", v_cache, shape=(*k_cache.shape[:3], None), dtypes=(k_cache.dtype,), device=q.device)
    if v_cache.stride(-1) != 1:
        check.fail("v_cache", "contiguous in its last dimension", f"strides {v_cache.stride()}")
    if k_cache.shape[2] < 1 or heads % k_cache.shape[2] != 0:
        check.fail("q", f"of a head count divisible by the {k_cache.shape[2]} KV heads", f"{heads} heads")
    if scale is None:
        scale = 1.0 / math.sqrt(dim)
    check.number("scale", scale, low=0.0)
    return (
        float(scale),
        check.scale("k_scale", k_scale, "k_cache", k_cache.dtype),
        check.scale("v_scale", v_scale, "v_cache", v_cache.dtype),
    )


def check_mla(check: Checker, q, kv_cache, kv_lora_rank, rank, scale, kv_scale) -> tuple[float, float]:
    check.tensor("q", q, rank=rank, dtypes=FLOAT_DTYPES)
    check.tensor("kv_cache", kv_cache, shape=(None, None, q.shape[-1]), dtypes=(q.dtype, *FP8_DTYPES), device=q.device)
    check.integer("kv_lora_rank", kv_lora_rank, 1, q.shape[-1])
    check.number("scale", scale, low=0.0)
    return float(scale), check.scale("kv_scale", kv_scale, "kv_cache", kv_cache.dtype)
