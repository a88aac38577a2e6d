"""What kernels of other packages need before and after a call so that our ops' contract holds, for padded rows above all.

Our contract lets `seq_lens[b]` be 0 and page ids past a request's length be anything, and wants exact zeros from a query that
sees nothing. Those kernels subtract the number of queries from the length without a check, follow every page id up to the
length, and divide by an empty softmax. One launch before the call makes safe copies, one after it clears rows; neither syncs.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spec_ops.backends.call import AttentionCall

_BLOCK = 1024


class Prepared(NamedTuple):
    """Inputs that are safe to hand on.

    Attributes:
        block_tables: `[bs, width]` int32, contiguous, 0 past a request's length.
        seq_lens: `[bs]` int32, at least `span`.
        mask: `[bs, span, 2 or 4]` uint16, bit `j` of a row (lowest first): it sees position `j` of the last `span`; None if not
            asked.
        hidden: `[bs, q_len]` bool: the query sees nothing.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    mask: torch.Tensor | None
    hidden: torch.Tensor


@triton.jit
def prepare_kernel(
    tables, lens, words, safe_tables, safe_lens, mask, hidden,
    width, safe_width, table_stride,
    Q_LEN: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    HAS_WORDS: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lens + request)
    # Without a mask a request shorter than its queries cannot be expressed, so its rows are all padding.
    used = length if HAS_MASK else tl.where(length >= SPAN, length, 0)
    for start in range(0, safe_width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        live = (column < width) & (column.to(tl.int64) * PAGE < used)
        page = tl.load(tables + request * table_stride + column, mask=live, other=0)
        tl.store(safe_tables + request * safe_width + column, page, mask=column < safe_width)
    tl.store(safe_lens + request, tl.maximum(length, SPAN))
    row = tl.arange(0, ROWS)
    query = row - (SPAN - Q_LEN)  # rows before the queries stand for draft positions that nobody asks about
    asked = (query >= 0) & (row < SPAN)
    if HAS_MASK:
        if HAS_WORDS:
            word = tl.load(words + request * Q_LEN + query, mask=asked, other=0).to(tl.uint64, bitcast=True)
        else:
            full = tl.full((ROWS,), 0xFFFFFFFFFFFFFFFF, tl.uint64)
            word = full >> (63 - tl.minimum(row, 63)).to(tl.uint64)
        # In a request shorter than the span, draft positions before its start do not exist: bit 0 is its first key.
        shift = tl.minimum(tl.maximum(SPAN - length, 0), 64)
        word = tl.where(shift < 64, word >> tl.minimum(shift, 63).to(tl.uint64), 0)
        tl.store(mask + request * SPAN + row, word, mask=row < SPAN)  # an int32 mask takes the low half
        tl.store(hidden + request * Q_LEN + query, (length <= SPAN) & (word == 0), mask=asked)
    else:
        tl.store(hidden + request * Q_LEN + query, asked & (length < SPAN), mask=asked)


@triton.jit
def clear_kernel(out, hidden, row_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(hidden + row) != 0:
        for start in range(0, row_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            zero = tl.full((BLOCK,), 0.0, out.dtype.element_ty)
            tl.store(out + row * row_size + column, zero, mask=column < row_size)


def prepare(call: AttentionCall, *, width_multiple: int = 1, masked: bool = False) -> Prepared:
    """Safe tables and lengths for `call`, in one launch; of a ragged one, for one query per request.

    Args:
        call: a tree spans `mask_len` positions, a chain `q_len`.
        width_multiple: round the tables' width up to a multiple of this.
        masked: make `mask`, causal without `tree_mask`. Otherwise requests shorter than the span are hidden as a whole.
    """
    block_tables, seq_lens, tree_mask, page_size = call.block_tables, call.seq_lens, call.tree_mask, call.page_size
    q_len = 1 if call.is_ragged else call.q_len
    bs, width = block_tables.shape
    span = call.mask_len if tree_mask is not None else q_len
    reachable = max(width, triton.cdiv(span, page_size))  # a padded request is given `span` keys
    safe_width = triton.cdiv(reachable, width_multiple) * width_multiple
    device = seq_lens.device
    safe_tables = torch.empty(bs, safe_width, dtype=torch.int32, device=device)
    safe_lens = torch.empty(bs, dtype=torch.int32, device=device)
    hidden = torch.empty(bs, q_len, dtype=torch.bool, device=device)
    mask = torch.empty(bs, span, dtype=torch.int32 if span <= 32 else torch.int64, device=device) if masked else None
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    words = tree_mask.contiguous() if tree_mask is not None else None
    with on_device(device):
        prepare_kernel[(bs,)](
            block_tables, seq_lens.contiguous(), words, safe_tables, safe_lens, mask, hidden,
            width, safe_width, block_tables.stride(0),
            Q_LEN=q_len, SPAN=span, ROWS=triton.next_power_of_2(span), PAGE=page_size,
            HAS_WORDS=words is not None, HAS_MASK=masked, BLOCK=_BLOCK,
        )  # fmt: skip
    return Prepared(safe_tables, safe_lens, None if mask is None else _as_uint16(mask), hidden)


def clear(out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """`out [bs, q_len, ...]` (contiguous) with zeros in the rows of `hidden [bs, q_len]`, in place."""
    bits = out.view(torch.uint8) if out.itemsize == 1 else out
    with on_device(out.device):
        clear_kernel[(hidden.numel(),)](bits, hidden, out.numel() // hidden.numel(), BLOCK=_BLOCK)
    return out


def queries_for(cache: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`q`, contiguous, in the cache's dtype: Blackwell's kernels multiply like with like, so an fp8 cache takes e4m3 queries
    (scale 1, as SGLang and vLLM do). Clamped first: not every release of torch saturates in the cast, others give NaN."""
    if cache.dtype != torch.float8_e4m3fn:
        return q.contiguous()
    limit = torch.finfo(cache.dtype).max
    return q.clamp(-limit, limit).to(cache.dtype).contiguous()


def _as_uint16(words: torch.Tensor) -> torch.Tensor:
    """`[bs, span]` int32 or int64 as `[bs, span, 2 or 4]` uint16 (little endian, as every CUDA host and device is)."""
    return words.view(torch.uint16).unflatten(-1, (words.shape[1], -1))


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, whatever its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
