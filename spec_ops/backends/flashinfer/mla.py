"""Absorbed MLA decode, verify and draft extend through `trtllm_batch_decode_with_kv_cache_mla`: trtllm-gen and CuTe DSL.

Both are causal only and take no tree mask. The kernel is always named: FlashInfer's own "auto" raises on sm_90 and tunes
between the two at run time on sm_100. https://docs.flashinfer.ai/api/attention.html
"""

from __future__ import annotations

import torch

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.flashinfer.provider import counters, scratch
from spec_ops.backends.padding import clear, prepare, queries_for

KEY_TILE = 128  # tokens: CuTe DSL reads whole tiles of the page table, as trtllm-gen did before 0.7
NOPE_DIM = {512: 128, 256: 64}  # of the supported models by kv_lora_rank; only checked, absorbed shapes do not show it


def _decode(kernel: str, call: AttentionCall, skip_factor: float | None = None) -> torch.Tensor:
    from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

    assert call.tree_mask is None, f"{kernel} takes no mask"
    q, rank, page_size = call.q, call.v_head_dim, call.page_size
    out = call.new_result()
    if out.numel() == 0:
        return out
    ready = prepare(call, width_multiple=KEY_TILE // page_size)
    own = {}
    if kernel == "trtllm-gen":
        own = counters(trtllm_batch_decode_with_kv_cache_mla, q.device, len(q), q.shape[2])
    trtllm_batch_decode_with_kv_cache_mla(
        query=queries_for(call.k_cache, q),
        kv_cache=call.k_cache,
        workspace_buffer=scratch(kernel, q.device).view(torch.int8),  # cute-dsl takes nothing else in FlashInfer 0.6
        qk_nope_head_dim=NOPE_DIM[rank],
        kv_lora_rank=rank,
        qk_rope_head_dim=q.shape[-1] - rank,
        block_tables=ready.block_tables,
        seq_lens=ready.seq_lens,
        max_seq_len=ready.block_tables.shape[1] * page_size,
        out=out,
        bmm1_scale=call.scale * call.k_scale,
        bmm2_scale=call.k_scale,
        skip_softmax_threshold_scale_factor=skip_factor,
        backend=kernel,
        **own,
    )
    return clear(out, ready.hidden)


def trtllm(call: AttentionCall, *, skip_softmax_threshold_scale_factor: float | None = None) -> torch.Tensor:
    return _decode("trtllm-gen", call, skip_softmax_threshold_scale_factor)


def cute_dsl(call: AttentionCall) -> torch.Tensor:
    """Its scratch holds partial results from the first byte on, so it is not shared with a kernel that keeps semaphores
    there."""
    return _decode("cute-dsl", call)
