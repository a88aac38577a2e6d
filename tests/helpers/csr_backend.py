"""A backend that reads CSR token slots and nothing else of the page tables: the kind of kernel kv-indices are made for."""

from __future__ import annotations

import torch

from spec_ops.backends import Backend

STEPS = ("draft_decode", "target_verify", "draft_extend")


def _attend(q, keys, values, scale: float, causal_from: int):
    """Dense attention of one request: query `j` sees keys up to `causal_from + j`."""
    group = q.shape[1] // keys.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)) * scale
    place = torch.arange(keys.shape[0])
    logits.masked_fill_(place > causal_from + torch.arange(q.shape[0])[:, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), values.repeat_interleave(group, 1))


def mha(q, k_cache, v_cache, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, *rest):
    out = torch.empty(*q.shape[:-1], v_cache.shape[-1])
    for b in range(q.shape[0]):
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        assert len(slots) == seq_lens[b]
        keys, values = (cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache))
        out[b] = _attend(q[b], keys, values, rest[1], len(slots) - q.shape[1])
    return out


def mla(q, kv_cache, rank, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, *rest):
    keys = kv_cache[:, :, None]
    return mha(q, keys, keys[..., :rank], block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, *rest)


CSR = Backend(
    name="csr",
    kernels={f"{kind}_{step}": f"tests.helpers.csr_backend:{kind}" for kind in ("mha", "mla") for step in STEPS},
    capabilities=None,
    dtypes=frozenset({torch.float32}),
    kv_dtypes=frozenset({torch.float32}),
    rank=1,
    reads=frozenset({"kv_indptr", "kv_indices"}),
)
