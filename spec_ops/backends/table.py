"""Which backend takes which attention call on an architecture, as rows: what `python -m spec_ops backends` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from spec_ops.backends.call import RAGGED, STEPS, AttentionMeta
from spec_ops.backends.registry import BackendError, select_backend

# Llama-3.1-8B and DeepSeek-V3, whose shapes kernels are tuned for: heads, KV heads, head_dim, v_head_dim.
_SHAPES = {"mha": (32, 8, 128, 128), "mla": (128, 1, 576, 512)}
_TREE_TOKENS, _CHAIN_TOKENS, _PREFILL = 16, 4, 4096


class Choice(NamedTuple):
    """One kind of call, the backend chosen for it (None: nobody can), and why not each other one that has a kernel for the
    step."""

    step: str
    kind: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    chosen: str | None
    reasons: dict[str, str]


def calls(page_size: int = 64) -> Iterator[tuple[str, AttentionMeta]]:
    """`("chain", facts)`, `("tree", facts)` or `("ragged", facts)` of every step, on bfloat16 with bfloat16 and fp8 caches."""
    for step in STEPS:
        heads, kv_heads, head_dim, v_head_dim = _SHAPES[step[:3]]
        ragged = step in RAGGED
        for kind in ("ragged",) if ragged else ("chain", "tree"):
            if kind == "tree" and step.endswith("_draft_extend"):
                continue  # after acceptance only a path is left
            draft = step.endswith("_draft_decode")
            q_len = (
                _PREFILL if ragged else (4 if draft else _TREE_TOKENS) if kind == "tree" else (1 if draft else _CHAIN_TOKENS)
            )
            for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
                yield (
                    kind,
                    AttentionMeta(
                        step=step, dtype=torch.bfloat16, kv_dtype=kv_dtype, num_heads=heads, num_kv_heads=kv_heads,
                        head_dim=head_dim, v_head_dim=v_head_dim, page_size=page_size, q_len=q_len, tree_mask=kind == "tree",
                        window=False, sinks=False, softcap=False,
                    ),
                )  # fmt: skip


def choices(arch: int | None, missing: frozenset[str] = frozenset(), page_size: int = 64) -> list[Choice]:
    """What `select_backend` answers for each of `calls`; arguments as there."""
    rows = []
    for kind, meta in calls(page_size):
        try:
            selection = select_backend(meta, arch, missing=missing)
            others = {name: why for name, why in selection.reasons.items() if not why.startswith("has no kernel")}
            rows.append(Choice(meta.step, kind, meta.dtype, meta.kv_dtype, selection.backend.name, others))
        except BackendError as error:
            rows.append(Choice(meta.step, kind, meta.dtype, meta.kv_dtype, None, {"": str(error)}))
    return rows
