"""Paged KV storage, and the object through which models attend.

A model does not know which step it runs: it hands queries, keys and values to `attention.mha(...)` or `attention.mla(...)`.
`PagedAttention` appends to the cache and calls the step's op. A training script can pass a dense object with these methods.
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


def refuse_autocast(where: str, device: torch.device) -> None:
    """Raise a RuntimeError under autocast: it computes in another dtype than that of the weights and caches."""
    if torch.is_autocast_enabled(device.type):
        raise RuntimeError(
            f"{where}: autocast is enabled for {device.type}, which gives keys and values another dtype than the caches have; "
            f"leave it (`torch.autocast({device.type!r}, enabled=False)`) and convert the models instead: `model.to(dtype)`"
        )


DEFAULT_PAGE_SIZE = 64  # tokens: what the fast kernels take; below it MLA on Hopper is several times slower


class PagedKVCache(nn.Module):
    """The KV caches of all layers of a model, as buffers with static addresses, so that CUDA graphs may mutate them.

    A layer has `k` and `v`, both `[num_pages, page_size, num_kv_heads, head_dim]`, or for MLA one
    `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`.

    Args:
        config: its `kv_rows` give the shapes.
        num_pages, page_size: pages, and tokens per page.
        dtype: `torch.float8_e4m3fn` quantizes.
        device: of all caches.
        scale: dequantization scale of an fp8 cache.
        backend: of the attention over it, where a step names none.
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
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.kv_rows, self.num_layers = config.kv_rows, len(config.kv_rows)
        self.num_pages, self.page_size, self.backend = num_pages, page_size, backend
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
    """One attention step of all layers over a cache.

    Attributes:
        cache: what is appended to and attended.
        step: `"draft_decode"`, `"target_verify"` or `"draft_extend"`, with model inputs `[bs, q_len]`; or ragged, `"extend"`,
            with `[total_q]`.
        block_tables: `[bs, max_pages]` int32.
        seq_lens: `[bs]` int32, the KV length attended, this step's own tokens included.
        slots: where each token's KV goes, of the shape of the model's token input; a negative slot drops the row.
        tree_mask: `[bs, q_len]` int64, a draft tree's bit masks; None for causal queries.
        mask_len: the last so many KV positions are those of the masks; default `q_len`.
        q_indptr: `[bs + 1]` int32, where the queries of each request begin in a ragged step.
        max_q_len: most queries of a request in a ragged step.
        kv_indptr: `[bs + 1]` int32, for kernels that read CSR indices.
        kv_indices: int32, the same.
        seq_lens_cpu: `seq_lens` on the host, for kernels that plan there.
        max_seq_len: a bound of `seq_lens`.
        backend: of the op; `"auto"`: that of the cache.
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
        self.flat_slots = self.slots.flatten()  # once for all layers; `rope_tables` says why
        if self.backend == "auto":
            self.backend = self.cache.backend

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
        """Append keys and values to a layer's cache, and attend.

        Args:
            layer: index in the cache.
            q: `[..., num_heads, head_dim]`.
            k, v: `[..., num_kv_heads, head_dim]`.
            rope: `cos, sin [n, r]`, to rotate `q` and `k` by first.
            softmax: the op's `scale`, `window_left`, `sinks`, `softcap`.

        Returns:
            `[..., num_heads, v_head_dim]`.
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
        """Append latent rows to a layer's cache, and attend in the absorbed form.

        Args:
            layer: index in the cache.
            q: `[..., num_heads, kv_lora_rank + rope]`.
            c_kv: `[..., kv_lora_rank]`.
            k_rope: `[..., rope]`.
            softmax: the op's `scale` (required), `window_left`, `sinks`, `softcap`.

        Returns:
            `[..., num_heads, kv_lora_rank]`.
        """
        (kv_cache,) = self.cache.layer(layer)
        rank, kv_scale = c_kv.shape[-1], self.cache.scale
        ops.append_mla_kv(kv_cache, c_kv.flatten(0, -2), k_rope.flatten(0, -2), self.flat_slots, kv_scale=kv_scale)
        step = {**softmax, **self._queries(), "kv_scale": kv_scale}
        return _MLA[self.step](q, kv_cache, rank, self.block_tables, self.seq_lens, **step)
