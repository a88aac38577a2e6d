"""The plain PyTorch backend: every step, dtype and feature, on every device. It defines correctness, not speed."""

import torch

from spec_ops.backends.call import APPENDS, STEPS
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
