"""GQA decode, verify, draft extend and ragged extend through `trtllm_batch_decode_with_kv_cache` and its context sibling.

All take device tensors only, launch without a sync and can be captured. The caches' layout is always stated: the two entry
points' defaults differ (HND and NHD). `bmm1_scale` is the whole factor of the logits, softmax scale included; nothing divides
by `sqrt(head_dim)`. https://docs.flashinfer.ai/api/attention.html
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.flashinfer.provider import accepts, counters, scratch
from spec_ops.backends.padding import clear, prepare, queries_for


def trtllm(
    call: AttentionCall,
    *,
    skip_softmax_threshold_scale_factor: float | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: float = 1.0,
) -> torch.Tensor:
    """trtllm-gen, chains only: its decode accepts `mask` and drops it, so the declaration has no `tree_mask`.
    Keyword arguments: see `options.py`."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    assert call.tree_mask is None, "trtllm-gen ignores masks"
    q = call.q
    q_len, heads, dim = q.shape[1:]
    out = call.new_result(out_dtype)
    if out.numel() == 0:
        return out
    ready = prepare(call)
    trtllm_batch_decode_with_kv_cache(
        query=queries_for(call.k_cache, q).view(-1, heads, dim),
        kv_cache=(call.k_cache, call.v_cache),
        workspace_buffer=scratch("trtllm-gen", q.device),
        block_tables=ready.block_tables,
        seq_lens=ready.seq_lens,
        max_seq_len=ready.block_tables.shape[1] * call.page_size,
        bmm1_scale=call.scale * call.k_scale,
        bmm2_scale=call.v_scale / out_scale,
        window_left=call.window_left,
        out=out.view(-1, heads, dim),
        sinks=None if call.sinks is None else call.sinks.float().contiguous(),
        kv_layout="NHD",
        backend="trtllm-gen",
        q_len_per_req=q_len,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        **counters(trtllm_batch_decode_with_kv_cache, q.device, len(q), heads),
    )
    return clear(out, ready.hidden)


def xqa(call: AttentionCall, *, out_dtype: torch.dtype | None = None, out_scale: float = 1.0) -> torch.Tensor:
    """XQA: causal chains and trees by its own bit mask over the last positions, one row per query and one column per row.

    A tree's draft step asks `q_len` queries about `mask_len` positions: rows of zeros stand for the positions before them.
    `out_dtype`, `out_scale`: `options.py`. Its `o_scale` only undoes itself, as the factor of the values holds the scale.
    """
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    q_len, heads, dim = q.shape[1:]
    if k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"flashinfer-xqa: `v_cache` must have the strides of `k_cache` {k_cache.stride()}, got {v_cache.stride()}: "
            "XQA walks both with those of the keys"
        )
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    if q_len > 1 and (fp8 or call.window_left >= 0) and not accepts(xqa_batch_decode_with_kv_cache, "q_cu_seq_lens"):
        what = "an fp8 cache" if fp8 else "`window_left`"
        raise RuntimeError(f"flashinfer-xqa: {what} with several queries per request needs flashinfer-python 0.7 or newer")
    out = call.new_result(out_dtype)
    if out.numel() == 0:
        return out
    span = q_len if call.tree_mask is None else call.mask_len
    ready = prepare(call, masked=span > 1)
    rows = q.contiguous() if span == q_len else F.pad(q, (0, 0, 0, 0, span - q_len, 0))
    result = out if span == q_len else torch.empty_like(rows, dtype=out.dtype)
    trtllm_batch_decode_with_kv_cache(
        query=rows.view(-1, heads, dim),
        kv_cache=(k_cache, v_cache),
        workspace_buffer=scratch("xqa", q.device),
        block_tables=ready.block_tables,
        seq_lens=ready.seq_lens,
        max_seq_len=ready.block_tables.shape[1] * call.page_size,
        bmm1_scale=call.scale * call.k_scale,
        bmm2_scale=call.v_scale / out_scale,
        window_left=call.window_left,
        out=result.view(-1, heads, dim),
        sinks=None if call.sinks is None else call.sinks.float().contiguous(),
        kv_layout="NHD",
        backend="xqa",
        q_len_per_req=span,
        mask=ready.mask,
    )
    if result is not out:
        out.copy_(result[:, span - q_len :])
    return clear(out, ready.hidden)


def trtllm_extend(
    call: AttentionCall,
    *,
    skip_softmax_threshold_scale_factor: float | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: float = 1.0,
) -> torch.Tensor:
    """trtllm-gen's ragged causal prefill over the paged cache."""
    from flashinfer.prefill import trtllm_batch_context_with_kv_cache

    q, seq_lens, q_indptr = call.q, call.seq_lens, call.q_indptr
    assert q_indptr is not None
    # Zeros, since rows at or past q_indptr[-1] are written by nobody.
    out = torch.zeros(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    bs = seq_lens.shape[0]
    if out.numel() == 0 or bs == 0:
        return out
    ready = prepare(call)
    kv_lens = torch.maximum(ready.seq_lens, q_indptr[1:] - q_indptr[:-1])
    trtllm_batch_context_with_kv_cache(
        query=queries_for(call.k_cache, q),
        kv_cache=(call.k_cache, call.v_cache),
        workspace_buffer=scratch("trtllm-gen", q.device),
        block_tables=ready.block_tables,
        seq_lens=kv_lens,
        max_q_len=call.max_q_len,
        max_kv_len=ready.block_tables.shape[1] * call.page_size,
        bmm1_scale=call.scale * call.k_scale,
        bmm2_scale=call.v_scale / out_scale,
        batch_size=bs,
        cum_seq_lens_q=q_indptr,
        cum_seq_lens_kv=F.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        window_left=call.window_left,
        out=out,
        kv_layout="NHD",
        sinks=None if call.sinks is None else call.sinks.float().contiguous(),
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        **counters(trtllm_batch_context_with_kv_cache, q.device, bs, q.shape[1]),
    )
    return clear_ragged(out, seq_lens, q_indptr)


def clear_ragged(out: torch.Tensor, seq_lens: torch.Tensor, q_indptr: torch.Tensor) -> torch.Tensor:
    """`out [total_q, ...]` with zeros, in place, in the rows of requests that have fewer keys than queries: those are
    padding."""
    row = torch.arange(out.shape[0], device=out.device, dtype=q_indptr.dtype)
    request = torch.searchsorted(q_indptr[1:].contiguous(), row, right=True).clamp(max=seq_lens.shape[0] - 1)
    short = (seq_lens < q_indptr[1:] - q_indptr[:-1])[request]
    bits = out.view(torch.uint8) if out.dtype == torch.float8_e4m3fn else out  # masked_fill_ has no float8 kernel
    bits.masked_fill_(short[:, None, None], 0)
    return out
