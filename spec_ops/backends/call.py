"""What an attention call is: the names of the steps, and the facts of a call that a backend is chosen by."""

from __future__ import annotations

from dataclasses import dataclass

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
