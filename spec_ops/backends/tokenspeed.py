"""tokenspeed_mla's CuTe DSL decode for absorbed MLA on sm_100 and sm_103: draft decode, verify and draft extend of chains.

Stateless and capturable. Its first call of each (batch size, heads, queries, page size, dtype) compiles a kernel: run a step
once, or `spec_ops.backends.warm_up`, before a capture. https://github.com/lightseekorg/tokenspeed
"""

from __future__ import annotations

import torch

from spec_ops.backends.call import AttentionCall, AttentionMeta
from spec_ops.backends.registry import Backend, register_backend

# Partial results: batch x splits x rows is about half the multiprocessors, times 128 x 513 floats; the package checks the size.
WORKSPACE_BYTES = 64 << 20


def _constraint(meta: AttentionMeta, arch: int | None) -> str | None:
    if meta.num_heads > 128:
        return f"supports at most 128 heads, not {meta.num_heads}"
    if (widths := (meta.v_head_dim, meta.head_dim - meta.v_head_dim)) != (512, 64):
        return f"supports MLA of (kv_lora_rank, rope) (512, 64), not {widths}"
    if meta.kv_dtype == torch.float8_e4m3fn and meta.dtype != torch.bfloat16:
        return f"writes bfloat16 from an fp8 cache, not {meta.dtype}"
    return None


register_backend(
    Backend(
        name="tokenspeed",
        kernels={f"mla_{step}": f"{__name__}:decode" for step in ("draft_decode", "target_verify", "draft_extend")},
        capabilities=(100, 103),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16, torch.float8_e4m3fn}),
        page_sizes=frozenset({2, 4, 8, 16, 32, 64, 128}),  # a tile of 128 keys holds whole pages; TMA refuses pages of 1
        max_q_len=64,
        constraint=_constraint,
        requires=("tokenspeed_mla", "tokenspeed"),
        rank=10,
    )
)


def decode(call: AttentionCall) -> torch.Tensor:
    """Causal; its `window_left` keeps the whole block of queries visible, which is not ours, so windows are not declared."""
    from tokenspeed_mla import tokenspeed_mla_decode

    from spec_ops.backends.padding import clear, prepare, queries_for
    from spec_ops.backends.workspace import workspace

    assert call.tree_mask is None, "tokenspeed_mla takes no mask"
    q, rank, page_size = call.q, call.v_head_dim, call.page_size
    out = call.new_result()
    if out.numel() == 0:
        return out
    ready = prepare(call, width_multiple=128 // page_size)
    tokenspeed_mla_decode(
        query=queries_for(call.k_cache, q),
        kv_cache=call.k_cache,
        workspace_buffer=workspace("tokenspeed", q.device, WORKSPACE_BYTES).view(torch.int8),
        kv_lora_rank=rank,
        qk_rope_head_dim=q.shape[-1] - rank,
        block_tables=ready.block_tables,
        seq_lens=ready.seq_lens,
        max_seq_len=ready.block_tables.shape[1] * page_size,
        softmax_scale=call.scale * call.k_scale,
        output_scale=call.k_scale,
        out=out,
        is_var_seq=True,
        causal_mask=True,
        enable_pdl=True,
    )
    return clear(out, ready.hidden)
