"""The attention steps, batch-invariant: what the `triton-deterministic` backend declares. `deterministic.py` says how."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from spec_ops.backends.triton.attention import tuning
from spec_ops.backends.triton.attention.deterministic.kernels import (
    deterministic_attention_kernel,
    deterministic_combine_kernel,
    deterministic_extend_kernel,
)
from spec_ops.backends.triton.attention.launcher import (
    kernel_arch,
    kernel_keys,
    packed,
    softmax_arguments,
    unit_rows,
    window_within,
)
from spec_ops.backends.triton.runtime.launch import device_guard, launch, num_sms

CHUNK = 512  # keys
TILE_ROWS = 64  # the least that Hopper's and Blackwell's large products take: fewer would leave longer queries to small ones
PARTIAL_BYTES = 1 << 28  # most memory of a call for partial results; requests that find no place in it are not split
COMBINE_WARPS = 4


def choose(arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int) -> tuning.Config:
    """The one tile shape of a model: nothing here may depend on the number of queries, requests or keys."""
    config = tuning.choose(arch, shared_kv, head_dim, v_dim, kv_bytes, TILE_ROWS)
    if not shared_kv and 90 <= arch < 120 and 64 < head_dim <= 128:
        # Each chunk refills its pipeline; meanwhile a second program on the multiprocessor computes.
        return replace(config, num_warps=4, num_stages=3, programs=2)
    return config


def _uniform(
    q, k_cache, v_cache, v_dim, shared_kv, block_tables, seq_lens, tree_mask, mask_len, scale, window_left, sinks, softcap,
    k_scale, v_scale, config,
):  # fmt: skip
    bs, q_len, heads, head_dim = q.shape
    out = q.new_empty(bs, q_len, heads, v_dim)
    if out.numel() == 0:
        return out
    q = unit_rows(q)
    tree_mask = None if tree_mask is None else unit_rows(tree_mask)
    mask_len = 0 if tree_mask is None else mask_len
    seq_lens, sinks = seq_lens.contiguous(), packed(sinks)
    window_left = window_within(window_left, block_tables, k_cache.shape[1])
    block_tables = unit_rows(block_tables)
    kv_heads = 1 if shared_kv else k_cache.shape[2]
    group = heads // kv_heads
    rows = q_len * group
    config = config or choose(kernel_arch(q.device), shared_kv, head_dim, v_dim, k_cache.element_size())
    keys = kernel_keys(q, k_cache, v_cache, v_dim, shared_kv, config)
    row_blocks = triton.cdiv(rows, config.block_m)
    tiles = kv_heads * row_blocks
    # As many chunks as a table's width allows: lengths are on the device.
    most = max(1, triton.cdiv(block_tables.shape[1] * k_cache.shape[1], CHUNK))
    if window_left >= 0:
        most = min(most, (max(mask_len, q_len) + window_left) // CHUNK + 2)
    programs = num_sms(q.device) * config.programs
    ranges = max(1, programs // tiles)
    chunk_rows = kv_heads * rows
    capacity = min(bs * most, PARTIAL_BYTES // (4 * chunk_rows * (keys.block_dv + 2))) if most > 1 else 0
    numbers = capacity * chunk_rows * keys.block_dv
    partial = torch.empty(numbers + 2 * capacity * chunk_rows, dtype=torch.float32, device=q.device)
    partials = partial, partial[numbers:]
    softmax = softmax_arguments(scale, k_scale, v_scale, softcap)
    common = {
        "GROUP": group, "KV_HEADS": kv_heads, "MASK_LEN": mask_len, "WINDOW": window_left, "HAS_SINKS": sinks is not None,
        "BS": max(2, triton.next_power_of_2(bs)), "CHUNK": CHUNK, "enable_fp_fusion": False,
    }  # fmt: skip
    with device_guard(q):
        launch(
            deterministic_attention_kernel, (min(programs, bs * most * tiles),),
            q, *keys.tensors, out, block_tables, seq_lens, tree_mask, sinks, *partials, *softmax,
            bs, q_len, row_blocks, ranges, capacity, *q.stride()[:3], *keys.strides, block_tables.stride(0),
            0 if tree_mask is None else tree_mask.stride(0),
            HAS_SOFTCAP=softcap > 0, HOLES=mask_len > q_len, **keys.constants, num_warps=config.num_warps, **common,
        )  # fmt: skip
        if capacity > 0:
            rows_each = max(1, 128 * COMBINE_WARPS // keys.block_dv)  # four numbers a thread
            launch(
                deterministic_combine_kernel, (triton.cdiv(rows, rows_each), kv_heads, bs), out, seq_lens, sinks, *partials,
                softmax[1], bs, q_len, ranges, capacity,
                DV=v_dim, BLOCK_DV=keys.block_dv, ROWS=rows_each, AHEAD=4, num_warps=COMBINE_WARPS, **common,
            )  # fmt: skip
    return out


def _ragged(
    q, k_cache, v_cache, v_dim, shared_kv, block_tables, seq_lens, q_indptr, max_q_len, scale, window_left, sinks, softcap,
    k_scale, v_scale, config,
):  # fmt: skip
    total_q, heads, head_dim = q.shape
    out = q.new_zeros(total_q, heads, v_dim)  # padded rows stay as they are
    bs = seq_lens.shape[0]
    if out.numel() == 0 or bs == 0:
        return out
    q = unit_rows(q)
    kv_heads = 1 if shared_kv else k_cache.shape[2]
    group = heads // kv_heads
    config = config or choose(kernel_arch(q.device), shared_kv, head_dim, v_dim, k_cache.element_size())
    keys = kernel_keys(q, k_cache, v_cache, v_dim, shared_kv, config)
    window_left = window_within(window_left, block_tables, k_cache.shape[1])
    block_tables, sinks = unit_rows(block_tables), packed(sinks)
    with device_guard(q):
        launch(
            deterministic_extend_kernel, (triton.cdiv(max_q_len * group, config.block_m), kv_heads, bs),
            q, *keys.tensors, out, block_tables, seq_lens.contiguous(), q_indptr.contiguous(), sinks,
            *softmax_arguments(scale, k_scale, v_scale, softcap), *q.stride()[:2], *keys.strides, block_tables.stride(0),
            GROUP=group, KV_HEADS=kv_heads, WINDOW=window_left, HAS_SINKS=sinks is not None, HAS_SOFTCAP=softcap > 0,
            CHUNK=CHUNK, **keys.constants, num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def mha(
    q, k_cache, v_cache, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale, window_left,
    sinks, softcap, k_scale, v_scale, max_seq_len, config=None,
):  # fmt: skip
    """mha_draft_decode, mha_target_verify, mha_draft_extend."""
    return _uniform(
        q, k_cache, v_cache, v_cache.shape[-1], False, block_tables, seq_lens, tree_mask, mask_len, scale, window_left, sinks,
        softcap, k_scale, v_scale, config,
    )  # fmt: skip


def mla(
    q, kv_cache, kv_lora_rank, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
    window_left, sinks, softcap, kv_scale, max_seq_len, config=None,
):  # fmt: skip
    """mla_draft_decode, mla_target_verify, mla_draft_extend."""
    return _uniform(
        q, kv_cache, kv_cache, kv_lora_rank, True, block_tables, seq_lens, tree_mask, mask_len, scale, window_left, sinks,
        softcap, kv_scale, kv_scale, config,
    )  # fmt: skip


def mha_extend(
    q, k_cache, v_cache, block_tables, seq_lens, q_indptr, max_q_len, kv_indptr, kv_indices, seq_lens_cpu, scale, window_left,
    sinks, softcap, k_scale, v_scale, max_seq_len, config=None,
):  # fmt: skip
    return _ragged(
        q, k_cache, v_cache, v_cache.shape[-1], False, block_tables, seq_lens, q_indptr, max_q_len, scale, window_left, sinks,
        softcap, k_scale, v_scale, config,
    )  # fmt: skip


def mla_extend(
    q, kv_cache, kv_lora_rank, block_tables, seq_lens, q_indptr, max_q_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
    window_left, sinks, softcap, kv_scale, max_seq_len, config=None,
):  # fmt: skip
    return _ragged(
        q, kv_cache, kv_cache, kv_lora_rank, True, block_tables, seq_lens, q_indptr, max_q_len, scale, window_left, sinks,
        softcap, kv_scale, kv_scale, config,
    )  # fmt: skip
