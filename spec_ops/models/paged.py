"""Paged KV storage, and the one object through which models attend.

A model never knows which step it runs: it hands queries, keys and values to `attention.mha(...)` or `attention.mla(...)`.
`PagedAttention` appends to the cache and calls the step's op; a training script passes a dense object with the same methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spec_ops import ops
from spec_ops.models.config import CacheSizes
from spec_ops.models.layers import Rope

_MHA: dict[str, Callable[..., torch.Tensor]] = {
    "draft_decode": ops.mha_draft_decode,
    "target_verify": ops.mha_target_verify,
    "draft_extend": ops.mha_draft_extend,
    "extend": ops.mha_extend,
}
_MLA: dict[str, Callable[..., torch.Tensor]] = {
    "draft_decode": ops.mla_draft_decode,
    "target_verify": ops.mla_target_verify,
    "draft_extend": ops.mla_draft_extend,
    "extend": ops.mla_extend,
}


class PagedKVCache(nn.Module):
    """KV caches of all layers of one model: per layer `k`/`v [num_pages, page_size, num_kv_heads, head_dim]`, or for MLA one
    `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, as `config.kv_rows` says.

    Buffers have static addresses, so that CUDA graphs may mutate them. `scale` is the dequantization scale of an fp8 cache.
    """

    def __init__(
        self,
        config: CacheSizes,
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.kv_rows, self.num_layers = config.kv_rows, len(config.kv_rows)
        self.num_pages, self.page_size = num_pages, page_size
        self.scale = scale if dtype == torch.float8_e4m3fn else None
        for layer, rows in enumerate(config.kv_rows):
            for name, row in zip(self._names(layer), rows, strict=True):
                cache = torch.zeros(num_pages, page_size, *row, dtype=dtype, device=device)
                torch._dynamo.mark_static_address(cache)
                self.register_buffer(f"{name}{layer}", cache, persistent=False)

    def _names(self, index: int) -> tuple[str, ...]:
        return ("kv",) if len(self.kv_rows[index]) == 1 else ("k", "v")

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """`(k, v)` of a layer, or `(kv,)` for MLA."""
        return tuple(getattr(self, f"{name}{index}") for name in self._names(index))

    def tensors(self) -> list[torch.Tensor]:
        """Every cache tensor, for `move_kv`."""
        return [cache for index in range(self.num_layers) for cache in self.layer(index)]


@dataclass
class PagedAttention:
    """One attention step over `cache`.

    Attributes:
        step: `"draft_decode"`, `"target_verify"`, `"draft_extend"` (uniform: model inputs are `[bs, q_len]`) or `"extend"`
            (ragged: `[total_q]`).
        slots: shape of the model's token input; negative drops the row.
        Others: as in the attention ops.
    """

    cache: PagedKVCache
    step: str
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    tree_mask: torch.Tensor | None = None
    mask_len: int | None = None
    q_indptr: torch.Tensor | None = None
    max_q_len: int | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    max_seq_len: int | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        self.flat_slots = self.slots.flatten()  # once for all layers, as `rope_tables` says why

    def _queries(self) -> dict[str, Any]:
        common = {
            "kv_indptr": self.kv_indptr,
            "kv_indices": self.kv_indices,
            "seq_lens_cpu": self.seq_lens_cpu,
            "max_seq_len": self.max_seq_len,
            "backend": self.backend,
        }
        if self.step == "extend":
            return {"q_indptr": self.q_indptr, "max_q_len": self.max_q_len, **common}
        return {"tree_mask": self.tree_mask, "mask_len": self.mask_len, **common}

    def mha(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, rope: Rope | None = None, **softmax: Any
    ) -> torch.Tensor:
        """Append `k`, `v` `[..., num_kv_heads, head_dim]`, attend with `q [..., num_heads, head_dim]`.

        `rope`: `cos, sin [n, r]` to rotate `q` and `k` by before. `softmax`: the op's `scale`, `window_left`, `sinks`,
        `softcap`.
        """
        k_cache, v_cache = self.cache.layer(layer)
        scales: dict[str, Any] = {"k_scale": self.cache.scale, "v_scale": self.cache.scale}
        q_rows, k_rows, v_rows = (x.flatten(0, -3) for x in (q, k, v))
        if rope is None:
            ops.append_kv(k_cache, v_cache, k_rows, v_rows, self.flat_slots, **scales)
        else:
            cos, sin = rope
            rows = ops.rope_append_kv(q_rows, k_rows, v_rows, cos, sin, k_cache, v_cache, self.flat_slots, **scales)
            q = rows.view(q.shape)
        step = {**softmax, **self._queries(), **scales}
        return _MHA[self.step](q, k_cache, v_cache, self.block_tables, self.seq_lens, **step)

    def mla(self, layer: int, q: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor, **softmax: Any) -> torch.Tensor:
        """Append `c_kv [..., kv_lora_rank]`, `k_rope [..., rope]`; attend with absorbed `q [..., num_heads, lora + rope]`.

        `softmax`: the op's `scale` (required), `window_left`, `sinks`, `softcap`.
        """
        (kv_cache,) = self.cache.layer(layer)
        rank, kv_scale = c_kv.shape[-1], self.cache.scale
        ops.append_mla_kv(kv_cache, c_kv.flatten(0, -2), k_rope.flatten(0, -2), self.flat_slots, kv_scale=kv_scale)
        step = {**softmax, **self._queries(), "kv_scale": kv_scale}
        return _MLA[self.step](q, kv_cache, rank, self.block_tables, self.seq_lens, **step)
