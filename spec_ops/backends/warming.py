"""Everything that happens at a kernel's first call, before it is captured."""

from __future__ import annotations

import torch

from spec_ops.backends.call import RAGGED, AttentionMeta
from spec_ops.backends.registry import run_attention


def warm_up(
    meta: AttentionMeta, *, batch_size: int = 1, max_pages: int = 1, backend: str = "auto", device: torch.device | str = "cuda"
) -> None:
    """Run the kernel of one attention call once, over zeros, on the current stream.

    Loads (and where needed compiles) it, and allocates what it keeps between calls. `torch.compile` does so by itself before it
    records a CUDA graph; a graph captured by hand needs it for each step it holds, on the stream that will capture.

    Args:
        meta: the call's facts. batch_size, max_pages: requests, and width of `block_tables`, as in the calls to come: some
            kernels
            are specialized by them. backend, device: as in the ops.

    Raises:
        BackendError: no backend, or not the named one, can run it.
    """
    mha, ragged = meta.step.startswith("mha_"), meta.step in RAGGED
    rows = [batch_size * meta.q_len] if ragged else [batch_size, meta.q_len]

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    q = zeros(*rows, meta.num_heads, meta.head_dim, dtype=meta.dtype)
    pages = -(-meta.q_len // meta.page_size)
    if mha:
        kv = [zeros(pages, meta.page_size, meta.num_kv_heads, d, dtype=meta.kv_dtype) for d in (meta.head_dim, meta.v_head_dim)]
        cache: tuple = (*kv,)
    else:
        cache = (zeros(pages, meta.page_size, meta.head_dim, dtype=meta.kv_dtype), meta.v_head_dim)
    tables = zeros(batch_size, max(max_pages, pages), dtype=torch.int32)
    lens = torch.full((batch_size,), meta.q_len, dtype=torch.int32, device=device)
    queries: tuple[torch.Tensor | None, int] = (None, 0)
    if ragged:
        queries = (torch.arange(batch_size + 1, dtype=torch.int32, device=device) * meta.q_len, meta.q_len)
    elif meta.tree_mask:
        queries = (zeros(batch_size, meta.q_len, dtype=torch.int64) + 1, meta.q_len)
    sinks = zeros(meta.num_heads, dtype=torch.float32) if meta.sinks else None
    softmax = (1.0, 0 if meta.window else -1, sinks, 1.0 if meta.softcap else 0.0)
    scales = (1.0, 1.0) if mha else (1.0,)
    run_attention(meta.step, (q, *cache, tables, lens, *queries, None, None, None, *softmax, *scales, None, backend))
