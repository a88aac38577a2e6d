"""Batch-invariant attention in plain PyTorch: one query at a time, over the keys that it sees and nothing else.

So a node of a tree has the bits of the same path as a chain: slots, pages and other queries do not enter its arithmetic. On the
CPU alone, since how many keys a query sees is read on the host.
"""

from __future__ import annotations

import torch

from spec_ops.backends.call import AttentionCall
from spec_ops.ops.reference.attention import query_visibility


def attention(call: AttentionCall) -> torch.Tensor:
    """Every attention step, as its op's contract says (`spec_ops/ops/attention.py`)."""
    q = call.q
    out = call.new_result()
    out.zero_()
    if q.numel() == 0 or call.seq_lens.shape[0] == 0:
        return out
    visible, rows = query_visibility(call)
    slots = call.block_tables.long()[:, :, None] * call.page_size + torch.arange(call.page_size)
    slots = slots.flatten(1)
    k_rows, v_rows = call.k_cache.flatten(0, 1), call.v_cache.flatten(0, 1)
    flat = q.reshape(-1, *q.shape[-2:])
    result = out.reshape(-1, *out.shape[-2:])
    for row, (request, place) in enumerate(rows):
        if request is None:
            continue
        seen = visible[request, place].nonzero()[:, 0]
        if seen.numel() == 0:
            continue
        at = slots[request, seen]
        k = _scaled(k_rows[at], call.k_scale)
        if call.is_mla:
            k = k[:, None]
            v = k[..., : call.kv_lora_rank]
        else:
            v = _scaled(v_rows[at], call.v_scale)
        result[row] = _attend(flat[row], k, v, call.scale, call.softcap, call.sinks).to(out.dtype)
    return out


def _scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    exact = rows.to(torch.float32)
    return exact if scale == 1.0 else exact * scale


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One query `[Hq, D]` over the keys `k [n, Hkv, D]` and values `v [n, Hkv, Dv]`."""
    heads, kv_heads = q.shape[0], k.shape[1]
    grouped = q.float().reshape(kv_heads, heads // kv_heads, -1)
    logits = (grouped @ k.permute(1, 2, 0).contiguous()) * scale  # [Hkv, G, n]
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().reshape(kv_heads, -1, 1)
        top = torch.maximum(top, sink)
    top = torch.where(top.isinf(), 0.0, top)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    weights = torch.where(total > 0, weights / total, 0.0)
    return (weights @ v.transpose(0, 1).contiguous()).reshape(heads, -1)
