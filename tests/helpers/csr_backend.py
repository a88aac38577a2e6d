"""A backend that reads CSR token slots and nothing else of the page tables: the kind of kernel kv-indices are made for."""

from __future__ import annotations

import torch

from spec_ops.backends import AttentionCall, Backend

STEPS = ("draft_decode", "target_verify", "draft_extend")


def _attend(q, keys, values, scale: float, causal_from: int):
    """Dense attention of one request: query `j` sees keys up to `causal_from + j`."""
    group = q.shape[1] // keys.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)) * scale
    place = torch.arange(keys.shape[0])
    logits.masked_fill_(place > causal_from + torch.arange(q.shape[0])[:, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), values.repeat_interleave(group, 1))


def attention(call: AttentionCall) -> torch.Tensor:
    q, caches = call.q, (call.k_cache, call.v_cache)
    if call.is_mla:
        keys = call.k_cache[:, :, None]
        caches = keys, keys[..., : call.kv_lora_rank]
    out = torch.empty(*q.shape[:-1], call.v_head_dim)
    for b in range(q.shape[0]):
        slots = call.kv_indices[call.kv_indptr[b] : call.kv_indptr[b + 1]].long()
        assert len(slots) == call.seq_lens[b]
        keys, values = (cache.flatten(0, 1)[slots] for cache in caches)
        out[b] = _attend(q[b], keys, values, call.scale, len(slots) - q.shape[1])
    return out


CSR = Backend(
    name="csr",
    kernels={f"{kind}_{step}": "tests.helpers.csr_backend:attention" for kind in ("mha", "mla") for step in STEPS},
    capabilities=None,
    dtypes=frozenset({torch.float32}),
    kv_dtypes=frozenset({torch.float32}),
    rank=1,
    reads=frozenset({"kv_indptr", "kv_indices"}),
)
