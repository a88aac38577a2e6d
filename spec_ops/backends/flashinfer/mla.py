"""Absorbed MLA decode, verify and draft extend through `trtllm_batch_decode_with_kv_cache_mla`: trtllm-gen and CuTe DSL.

Both are causal only and take no tree mask. The kernel is always named: FlashInfer's own "auto" raises on sm_90 and tunes
between the two at run time on sm_100. https://docs.flashinfer.ai/api/attention.html
"""

from __future__ import annotations

import torch

from spec_ops.backends.flashinfer.provider import counters, scratch
from spec_ops.backends.padding import clear, prepare, queries_for

KEY_TILE = 128  # tokens: CuTe DSL reads whole tiles of the page table, as trtllm-gen did before 0.7
NOPE_DIM = {512: 128, 256: 64}  # of the supported models by kv_lora_rank; only checked, absorbed shapes do not show it


def _decode(
    kernel: str, tree_mask, q, kv_cache, kv_lora_rank, block_tables, seq_lens, scale, kv_scale, skip_factor=None
) -> torch.Tensor:
    from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

    assert tree_mask is None, f"{kernel} takes no mask"
    q_len, page_size = q.shape[1], kv_cache.shape[1]
    out = torch.empty(*q.shape[:-1], kv_lora_rank, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    ready = prepare(block_tables, seq_lens, q_len, page_size, width_multiple=KEY_TILE // page_size)
    own = {}
    if kernel == "trtllm-gen":
        own = counters(trtllm_batch_decode_with_kv_cache_mla, q.device, len(q), q.shape[2])
    trtllm_batch_decode_with_kv_cache_mla(
        query=queries_for(kv_cache, q),
        kv_cache=kv_cache,
        workspace_buffer=scratch(kernel, q.device).view(torch.int8),  # cute-dsl takes nothing else in FlashInfer 0.6
        qk_nope_head_dim=NOPE_DIM[kv_lora_rank],
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=q.shape[-1] - kv_lora_rank,
        block_tables=ready.block_tables,
        seq_lens=ready.seq_lens,
        max_seq_len=ready.block_tables.shape[1] * page_size,
        out=out,
        bmm1_scale=scale * kv_scale,
        bmm2_scale=kv_scale,
        skip_softmax_threshold_scale_factor=skip_factor,
        backend=kernel,
        **own,
    )
    return clear(out, ready.hidden)


def trtllm(
    q, kv_cache, kv_lora_rank, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
    window_left, sinks, softcap, kv_scale, max_seq_len, *, skip_softmax_threshold_scale_factor=None,
):  # fmt: skip
    skip_factor = skip_softmax_threshold_scale_factor
    return _decode("trtllm-gen", tree_mask, q, kv_cache, kv_lora_rank, block_tables, seq_lens, scale, kv_scale, skip_factor)


def cute_dsl(
    q, kv_cache, kv_lora_rank, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
    window_left, sinks, softcap, kv_scale, max_seq_len,
):  # fmt: skip
    """Its scratch holds partial results from the first byte on, so it is not shared with a kernel that keeps semaphores
    there."""
    return _decode("cute-dsl", tree_mask, q, kv_cache, kv_lora_rank, block_tables, seq_lens, scale, kv_scale)
