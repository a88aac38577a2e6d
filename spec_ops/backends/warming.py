"""Everything that happens at a kernel's first call, before it is captured."""

from __future__ import annotations

import torch

from spec_ops.backends.call import RAGGED, AttentionCall, AttentionMeta
from spec_ops.backends.registry import run_attention


def warm_up(
    meta: AttentionMeta, *, batch_size: int = 1, max_pages: int = 1, backend: str = "auto", device: torch.device | str = "cuda"
) -> None:
    """Run the kernel of one attention call once, over zeros, on the current stream.

    Loads (and where needed compiles) it, and allocates what it keeps between calls. `torch.compile` does so by itself before it
    records a CUDA graph; a graph captured by hand needs it for each step it holds, on the stream that will capture.

    Args:
        meta: the call's facts. batch_size, max_pages: requests, and width of `block_tables`, as in the calls to come: some
            kernels are specialized by them. backend, device: as in the ops.

    Raises:
        BackendError: no backend, or not the named one, can run it.
    """
    ragged = meta.step in RAGGED
    rows = [batch_size * meta.q_len] if ragged else [batch_size, meta.q_len]

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    pages = -(-meta.q_len // meta.page_size)
    if mla := meta.step.startswith("mla_"):
        keys = values = zeros(pages, meta.page_size, meta.head_dim, dtype=meta.kv_dtype)
    else:
        keys, values = (
            zeros(pages, meta.page_size, meta.num_kv_heads, width, dtype=meta.kv_dtype)
            for width in (meta.head_dim, meta.v_head_dim)
        )
    call = AttentionCall(
        meta.step,
        zeros(*rows, meta.num_heads, meta.head_dim, dtype=meta.dtype),
        keys,
        values,
        meta.v_head_dim if mla else None,
        zeros(batch_size, max(max_pages, pages), dtype=torch.int32),
        torch.full((batch_size,), meta.q_len, dtype=torch.int32, device=device),
        window_left=0 if meta.window else -1,
        sinks=zeros(meta.num_heads, dtype=torch.float32) if meta.sinks else None,
        softcap=1.0 if meta.softcap else 0.0,
        backend=backend,
    )
    if ragged:
        call.q_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * meta.q_len
        call.max_q_len = meta.q_len
    elif meta.tree_mask:
        call.tree_mask, call.mask_len = zeros(batch_size, meta.q_len, dtype=torch.int64) + 1, meta.q_len
    run_attention(call)
