"""Ragged causal extend (prefill) over the paged cache: one program per (request, KV head, block of query rows)."""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.attention.tile import attend, denominator, first_pages, times
from spec_ops.backends.triton.runtime.launch import await_predecessors


# Of a mixed batch, tables and lengths begin anywhere.
@triton.jit(
    do_not_specialize=["bs", "total_q", "row_blocks", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "q_indptr"],
)
def ragged_attention_kernel(
    q, k_cache, k_rest, v_cache, out, block_tables, seq_lens, q_indptr, sinks,
    qk_scale, v_scale, softcap,
    bs, total_q, row_blocks,
    q_stride_q, q_stride_h,
    k_stride_page, k_stride_token, k_stride_h,
    v_stride_page, v_stride_token, v_stride_h,
    table_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SHARED_KV: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CLEAR: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`q [total_q, KV_HEADS * GROUP, D]`; arguments as `split_kv_attention_kernel`. Rows past `q_indptr[-1]` belong to
    "request" `bs`, and become zeros.
    """
    await_predecessors(PDL)
    # The last rows of a request see the most keys: they start first.
    block = row_blocks - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    b = tl.program_id(2)
    if b == bs:
        # Padding has any length, so its programs share it.
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        dv = tl.arange(0, BLOCK_DV)
        zero = tl.zeros([BLOCK_M, BLOCK_DV], out.dtype.element_ty)
        padding = tl.load(q_indptr + bs)
        while block * BLOCK_M < (total_q - padding) * GROUP:
            row = block * BLOCK_M + tl.arange(0, BLOCK_M)
            o = out + ((padding + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP) * DV
            mask = (row < (total_q - padding) * GROUP)[:, None] & (dv < DV)[None, :]
            tl.store(o[:, None] + dv[None, :], zero, mask=mask)
            block += row_blocks
    else:
        first_row = tl.load(q_indptr + b)
        q_len = tl.load(q_indptr + b + 1) - first_row
        seq_len = tl.load(seq_lens + b)
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        query = row // GROUP
        head = kv_head * GROUP + row % GROUP
        in_use = query < q_len
        if block * BLOCK_M < q_len * GROUP:
            d0 = tl.arange(0, D0)
            dv = tl.arange(0, BLOCK_DV)
            before = seq_len - q_len  # position of query 0
            low = before + block * BLOCK_M // GROUP
            high = before + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
            first_key = 0
            if WINDOW >= 0:
                first_key = tl.maximum(low - WINDOW, 0) // BLOCK_N * BLOCK_N
            last_key = tl.maximum(high + 1, first_key)
            table = block_tables + b.to(tl.int64) * table_stride
            page = first_pages(table, first_key, last_key, seq_len, PAGE, BLOCK_N)
            q_row = q + (first_row + query).to(tl.int64) * q_stride_q + times(head, q_stride_h, WIDE)
            q0 = tl.load(q_row[:, None] + d0[None, :], mask=in_use[:, None], other=0.0)
            q1 = q0
            if D1 > 0:
                d1 = D0 + tl.arange(0, D1)
                q1 = tl.load(q_row[:, None] + d1[None, :], mask=in_use[:, None] & (d1 < D)[None, :], other=0.0)
            m, l, acc = attend(
                q0, q1, k_cache, k_rest, v_cache, table, page, kv_head, first_key, last_key, seq_len, low + 1,
                before + query, query.to(tl.int64), low - WINDOW, 0, qk_scale, softcap,
                k_stride_page, k_stride_token, k_stride_h, v_stride_page, v_stride_token, v_stride_h,
                D, D0, D1, DV, BLOCK_DV, PAGE, 0, WINDOW, HAS_SOFTCAP, SHARED_KV, TMA, BLOCK_M, BLOCK_N, STAGES,
                CLEAR, False, WIDE, "",
            )  # fmt: skip
            result = acc * (denominator(m, l, sinks, head, in_use, HAS_SINKS) * v_scale)[:, None]
            o = out + ((first_row + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * DV
            mask = in_use[:, None] & (dv < DV)[None, :]
            tl.store(o[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=mask)
