"""Which backend takes which attention call on an architecture: rows, and what `python -m spec_ops backends` prints of them."""

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


def compact(rows: list[Choice]) -> list[str]:
    """A table with a line for each step and kind of queries, and a column for each cache dtype; one line if all are alike."""
    chosen = {row.chosen or "none" for row in rows}
    if len(chosen) == 1:
        return [f"every call: {chosen.pop()}"]
    caches = list(dict.fromkeys(row.kv_dtype for row in rows))
    cells: dict[tuple[str, str], dict[torch.dtype, str]] = {}
    for row in rows:
        cells.setdefault((row.step, row.kind), {})[row.kv_dtype] = row.chosen or "none"
    lines = [["step", "queries", *(f"{_short(cache)} cache" for cache in caches)]]
    lines += [[*call, *(names[cache] for cache in caches)] for call, names in cells.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def reasons(rows: list[Choice]) -> list[str]:
    """Why a backend was not chosen, each reason once, with the calls that it is said of."""
    said: dict[str, dict[str, dict[str, list[str]]]] = {}
    for row in rows:
        for name, why in row.reasons.items():
            calls = said.setdefault(name or "any backend", {}).setdefault(why, {})
            calls.setdefault(f"{row.step} {row.kind}", []).append(_short(row.kv_dtype))
    every = len({row.kv_dtype for row in rows})
    lines = []
    for name, found in said.items():
        lines.append(f"not {name}")
        for why, calls in found.items():
            named = [call if len(caches) == every else f"{call} {' '.join(caches)}" for call, caches in calls.items()]
            lines.append(f"  {why}" + (f": {', '.join(named)}" if len(found) > 1 else ""))
    return lines


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}.get(dtype, str(dtype).removeprefix("torch."))
