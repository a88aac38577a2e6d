"""Our Triton kernels: one module per family, each with the functions that launch its kernels and `ahead()`, the variants of
them that are compiled without a GPU (`runtime/ahead.py`).

Importing this package registers the attention backends and imports no triton; its modules do, when an op first runs on CUDA.
"""

from __future__ import annotations

import torch

from spec_ops.backends.call import APPENDS, RAGGED, STEPS, AttentionMeta
from spec_ops.backends.registry import Backend, register_backend

_FP8 = torch.float8_e4m3fn
MAX_Q_LEN = 64


def _constraint(meta: AttentionMeta, arch: int | None) -> str | None:
    if meta.kv_dtype == torch.float32 != meta.dtype:
        return f"does not support float32 caches with queries in {meta.dtype}"  # keys would be rounded
    if meta.kv_dtype == _FP8 and arch is not None and arch < 89:
        return f"needs sm_89 for fp8 caches, not sm_{arch}"
    if meta.step in APPENDS:
        return None
    if meta.step.startswith("mla_"):
        # Values are the first power of two of a cache row, so that keys and values are loaded once.
        widths = (meta.v_head_dim, meta.head_dim - meta.v_head_dim)
        if widths not in ((512, 64), (256, 64)):
            return f"supports MLA of (kv_lora_rank, rope) (512, 64) or (256, 64), not {widths}"
    elif max(meta.head_dim, meta.v_head_dim) > 256:
        return f"supports head_dim up to 256, not {max(meta.head_dim, meta.v_head_dim)}"
    elif meta.head_dim < 16:
        return f"supports head_dim from 16, not {meta.head_dim}"  # products are of at least 16
    if meta.step not in RAGGED and meta.q_len > MAX_Q_LEN:
        return f"supports at most {MAX_Q_LEN} queries per request, not {meta.q_len}"
    return None


def _same_dtype(meta: AttentionMeta, arch: int | None) -> str | None:
    if meta.kv_dtype != meta.dtype:
        return f"needs caches in the dtype of queries, {meta.dtype}, not {meta.kv_dtype}"
    return _constraint(meta, arch)


register_backend(
    Backend(
        name="triton",
        kernels=dict.fromkeys(STEPS, "spec_ops.backends.triton.attention.launcher:attention")
        | {op: f"spec_ops.backends.triton.cache.append:{op}" for op in APPENDS},
        capabilities=(80, 121),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16, _FP8}),
        rank=100,
        tree_mask=True,
        window=True,
        sinks=True,
        softcap=True,
        constraint=_constraint,
    )
)

register_backend(
    Backend(
        name="triton-deterministic",
        kernels=dict.fromkeys(STEPS, "spec_ops.backends.triton.attention.deterministic.launcher:attention"),
        capabilities=(80, 121),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, _FP8}),
        rank=110,
        tree_mask=True,
        window=True,
        sinks=True,
        softcap=True,
        constraint=_constraint,
        by_name="is slower, for results that do not depend on the batch (`deterministic=True`)",
        deterministic=True,
        tree_paths=True,
    )
)

# A name of its own, since bits are not those of `triton-deterministic`, and all calls on a cache must go to one kernel: it is
# for caches of which it can run every call.
register_backend(
    Backend(
        name="triton-mla-pieces",
        kernels={step: "spec_ops.backends.triton.attention.hopper.mla_invariant:attention" for step in STEPS if "mla" in step},
        capabilities=(90, 90),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
        rank=105,
        head_dims=frozenset({576}),
        tree_mask=True,
        sinks=True,
        constraint=_same_dtype,
        by_name="is slower, for results that do not depend on the batch (`invariant=True`)",
        deterministic=True,
        whole_caches=True,
        tree_paths=True,
    )
)
