"""The plain PyTorch backends, which define correctness, not speed: `reference`, for every step, dtype, feature and device, and
`reference-deterministic`, which is batch-invariant, for the CPU."""

from __future__ import annotations

import torch

from spec_ops.backends.call import APPENDS, STEPS, AttentionMeta
from spec_ops.backends.registry import Backend, register_backend

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})

register_backend(
    Backend(
        name="reference",
        kernels=dict.fromkeys(STEPS, "spec_ops.ops.reference.attention:attention")
        | {op: f"spec_ops.ops.reference.kv_cache:{op}" for op in APPENDS},
        capabilities=None,
        dtypes=_FLOATS,
        kv_dtypes=_FLOATS | {torch.float8_e4m3fn},
        rank=1000,
        tree_mask=True,
        window=True,
        sinks=True,
        softcap=True,
        reads=frozenset({"max_seq_len"}),
    )
)


def _on_the_cpu(meta: AttentionMeta, arch: int | None) -> str | None:
    return None if arch is None else "reads lengths on the host, one query at a time: it is for the CPU"


register_backend(
    Backend(
        name="reference-deterministic",
        kernels=dict.fromkeys(STEPS, "spec_ops.ops.reference.deterministic:attention"),
        capabilities=None,
        dtypes=_FLOATS,
        kv_dtypes=_FLOATS | {torch.float8_e4m3fn},
        rank=1010,
        tree_mask=True,
        window=True,
        sinks=True,
        softcap=True,
        reads=frozenset({"max_seq_len"}),
        by_name="is slower, for results that do not depend on the batch (`deterministic=True`)",
        deterministic=True,
        tree_paths=True,
        constraint=_on_the_cpu,
    )
)
