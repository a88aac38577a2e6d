"""One attention call as one value: `AttentionCall`, what a kernel computes with, and `AttentionMeta`, the facts that select its
backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

STEPS = tuple(
    f"{kind}_{step}" for kind in ("mha", "mla") for step in ("draft_decode", "target_verify", "draft_extend", "extend")
)
RAGGED = ("mha_extend", "mla_extend")
# Used by name only: "auto" is the op's own kernel, one launch that casts and drops rows.
APPENDS = ("append_kv", "append_mla_kv")
OPTIONAL_INPUTS = frozenset({"kv_indptr", "kv_indices", "seq_lens_cpu", "max_seq_len"})
FP8_DTYPES = (torch.float8_e4m3fn,)  # of caches


@dataclass(frozen=True)
class AttentionMeta:
    """Facts of one attention call, or of one append (a query per row, no queries' heads): all that selection may depend on.

    `q_len` is the number of queries per request, of a ragged call (`mha_extend`, `mla_extend`) the bound `max_q_len`. While
    compiling, sizes may be symbols: `known_while_compiling` says whether that matters.
    """

    step: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    q_len: int
    tree_mask: bool
    window: bool
    sinks: bool
    softcap: bool


@dataclass(slots=True, eq=False)
class AttentionCall:
    """A call of one of the attention ops, as its kernel takes it: tensors and numbers under the names of the ops' arguments.

    Attributes:
        step: the op, `"mha_target_verify"` for example.
        q: `[bs, q_len, num_heads, head_dim]`, of a ragged step `[total_q, num_heads, head_dim]`.
        k_cache, v_cache: `[num_pages, page_size, num_kv_heads, dim]`. Of MLA both are its one cache,
            `[num_pages, page_size, dim]`: keys are the rows, values the first `kv_lora_rank` numbers of them.
        kv_lora_rank: of MLA, else None.
        tree_mask, mask_len: None and 0 for causal queries, as always in a ragged step.
        q_indptr, max_q_len: of a ragged step, else None and 0.
        k_scale, v_scale: of MLA both are the one scale of the cache.
        kv_indptr, kv_indices, seq_lens_cpu, max_seq_len: None if not given, or removed since the backend does not read them.
        backend: what the op was told, a name or `"auto"`.
        out: where the caller wants the result, contiguous; None: in new memory.
        Others as in the ops.
    """

    step: str
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    kv_lora_rank: int | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    tree_mask: torch.Tensor | None = None
    mask_len: int = 0
    q_indptr: torch.Tensor | None = None
    max_q_len: int = 0
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    scale: float = 1.0
    window_left: int = -1
    sinks: torch.Tensor | None = None
    softcap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    max_seq_len: int | None = None
    backend: str = "auto"
    out: torch.Tensor | None = None

    @classmethod
    def of(cls, step: str, args: Sequence[Any]) -> AttentionCall:
        """The call of op `step` with `args` in the order of its schema; nothing of them is looked at."""
        if step.startswith("mla_"):
            (q, k_cache, rank, tables, lens, queries, span, indptr, indices, lens_cpu, scale, window, sinks, softcap,
             k_scale, max_seq_len, backend) = args  # fmt: skip
            v_cache, v_scale = k_cache, k_scale
        else:
            (q, k_cache, v_cache, tables, lens, queries, span, indptr, indices, lens_cpu, scale, window, sinks, softcap,
             k_scale, v_scale, max_seq_len, backend) = args  # fmt: skip
            rank = None
        tree_mask, mask_len, q_indptr, max_q_len = (None, 0, queries, span) if step in RAGGED else (queries, span, None, 0)
        return cls(
            step, q, k_cache, v_cache, rank, tables, lens, tree_mask, mask_len, q_indptr, max_q_len, indptr, indices, lens_cpu,
            scale, window, sinks, softcap, k_scale, v_scale, max_seq_len, backend,
        )  # fmt: skip

    def new_result(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Where a kernel writes: the caller's `out`, or new memory, contiguous, in `dtype` (default that of `q`)."""
        if self.out is not None:
            return self.out
        return self.q.new_empty(*self.q.shape[:-1], self.v_head_dim, dtype=dtype or self.q.dtype)

    @property
    def is_ragged(self) -> bool:
        return self.step in RAGGED

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[2] if self.kv_lora_rank is None else 1

    @property
    def v_head_dim(self) -> int:
        """Width of a row of the result."""
        return self.v_cache.shape[-1] if self.kv_lora_rank is None else self.kv_lora_rank

    @property
    def q_len(self) -> int:
        """Queries per request, of a ragged step the most of them."""
        return self.max_q_len if self.step in RAGGED else self.q.shape[1]

    def facts(self) -> tuple:
        """The fields of `AttentionMeta`, in its order: what an eager call is looked up by."""
        shape, cache, rank, step = self.q.shape, self.k_cache.shape, self.kv_lora_rank, self.step
        kv_heads, v_dim = (cache[2], self.v_cache.shape[-1]) if rank is None else (1, rank)
        return (
            step, self.q.dtype, self.k_cache.dtype, shape[-2], kv_heads, shape[-1], v_dim, cache[1],
            self.max_q_len if step in RAGGED else shape[1],
            self.tree_mask is not None, self.window_left >= 0, self.sinks is not None, self.softcap > 0,
        )  # fmt: skip

    def meta(self) -> AttentionMeta:
        """What selection may depend on; sizes stay what they are here, symbols too."""
        return AttentionMeta(*self.facts())
