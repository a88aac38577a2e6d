"""Reference attention: gather pages, build a visibility mask, softmax in float32."""

from __future__ import annotations

import torch

from spec_ops.backends.call import AttentionCall

MAX_LOGITS = 2**24  # elements held at once: a long prefill would otherwise take memory quadratic in its length


def _check_lengths(
    op: str, block_tables: torch.Tensor, seq_lens: torch.Tensor, page_size: int, max_seq_len: int | None
) -> None:
    """Value checks that need no sync, hence on CPU only; so is `_check_pages`."""
    if seq_lens.device.type != "cpu" or seq_lens.numel() == 0:
        return
    width = block_tables.shape[1] * page_size
    low, high = int(seq_lens.min()), int(seq_lens.max())
    if low < 0 or high > width:
        raise IndexError(f"{op}: `seq_lens` must lie in [0, {width}] (width of `block_tables`), got [{low}, {high}]")
    if max_seq_len is not None and high > max_seq_len:
        raise IndexError(f"{op}: `max_seq_len` must bound every entry of `seq_lens`, got {max_seq_len} for {high}")


def _check_pages(op: str, block_tables: torch.Tensor, visible: torch.Tensor, num_pages: int, page_size: int) -> None:
    """Pages of keys that some query sees; `visible [bs, q_len, length]`."""
    if block_tables.device.type != "cpu" or visible.numel() == 0:
        return
    seen = visible.any(1)
    count = -(-seen.shape[1] // page_size)
    seen = torch.nn.functional.pad(seen, (0, count * page_size - seen.shape[1])).unflatten(1, (count, page_size)).any(-1)
    pages = block_tables[:, :count][seen]
    if pages.numel() and (int(pages.min()) < 0 or int(pages.max()) >= num_pages):
        raise IndexError(
            f"{op}: `block_tables` must hold page ids in [0, {num_pages}), got [{int(pages.min())}, {int(pages.max())}]"
        )


def _gather(cache: torch.Tensor, block_tables: torch.Tensor, length: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """`[bs, length, ...]` rows of the paged `cache` in `dtype`. Page ids of keys that nobody sees may be anything."""
    pages = -(-length // cache.shape[1])
    rows = cache[block_tables[:, :pages].clamp(0, cache.shape[0] - 1).long()].flatten(1, 2)[:, :length].to(dtype)
    return rows if scale == 1.0 else rows * scale


def _kv_length(block_tables: torch.Tensor, seq_lens: torch.Tensor, page_size: int, max_seq_len: int | None) -> int:
    """How many KV positions to look at: the static bound, or on CPU the true maximum."""
    length = block_tables.shape[1] * page_size
    if max_seq_len is not None:
        length = min(length, int(max_seq_len))
    if seq_lens.device.type == "cpu" and seq_lens.numel():
        length = min(length, max(int(seq_lens.max()), 1))
    return length


def _visible_causal(seq_lens, q_lens, q_len: int, length: int, window_left: int) -> torch.Tensor:
    """`[bs, q_len, length]`: causal, aligned to the end; query rows at or past `q_lens[b]` see nothing."""
    kv = torch.arange(length, device=seq_lens.device)
    row = torch.arange(q_len, device=seq_lens.device)
    position = (seq_lens - q_lens)[:, None] + row  # of each query
    visible = (kv <= position[..., None]) & (row < q_lens[:, None])[..., None]
    if window_left >= 0:
        visible &= position[..., None] - kv <= window_left
    return visible


def _visible_tree(seq_lens, tree_mask, mask_len: int, length: int, window_left: int) -> torch.Tensor:
    """`[bs, q_len, length]` from bit masks over the last `mask_len` positions; windows follow depth."""
    device = seq_lens.device
    kv = torch.arange(length, device=device)
    prefix = seq_lens - mask_len
    bit = kv - prefix[:, None]  # [bs, length]: draft position of each key, negative in the prefix
    bits = (tree_mask[..., None] >> torch.arange(mask_len, device=device)) & 1  # [bs, q_len, mask_len]
    column = bit.clamp(0, mask_len - 1)[:, None].expand(-1, tree_mask.shape[1], -1)
    in_draft = (bit >= 0)[:, None]
    visible = torch.where(in_draft, bits.gather(2, column) == 1, True) & (kv < seq_lens[:, None])[:, None]
    if window_left >= 0:
        ancestors = bits.cumsum(-1) - bits  # ancestors of the query before each draft position = that key's depth
        depth = torch.where(in_draft, ancestors.gather(2, column), bit[:, None])  # relative to the prefix's end
        own = (bits.sum(-1, keepdim=True) - 1).clamp(min=0)  # depth of the query
        visible &= own - depth <= window_left
    return visible


def _attend(q, k, v, visible, scale: float, softcap: float, sinks) -> torch.Tensor:
    """Softmax attention of `q [bs, q_len, Hq, D]` over `k`, `v [bs, length, Hkv, D]` with `visible [bs, q_len, length]`."""
    bs, q_len, heads, dim = q.shape
    kv_heads = k.shape[2]
    if k.shape[1] == 0:  # tables without pages: nothing to see, and nothing to reduce over
        return q.new_zeros(bs, q_len, heads, v.shape[-1])
    rows = max(1, MAX_LOGITS // (bs * heads * k.shape[1]))
    if rows < q_len:
        parts = zip(q.split(rows, 1), visible.split(rows, 1), strict=True)
        return torch.cat([_attend(part, k, v, seen, scale, softcap, sinks) for part, seen in parts], 1)
    # A masked key's probability is 0, but 0 * NaN is NaN: values that no query sees must not reach the product.
    v = torch.where(visible.any(1)[..., None, None], v, 0.0)
    grouped = q.to(k.dtype).reshape(bs, q_len, kv_heads, heads // kv_heads, dim)
    logits = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    seen = visible[:, None, None]
    logits = logits.masked_fill(~seen, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(k.dtype).reshape(kv_heads, -1, 1, 1)
        top = torch.maximum(top, sink)
    top = torch.where(top.isinf(), 0.0, top)  # a row that sees nothing
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    weights = torch.where(total > 0, weights / total, 0.0)
    out = torch.einsum("bhgqk,bkhd->bqhgd", weights, v)
    # einsum returns a permuted view where it can; the fake promises contiguous strides.
    return out.reshape(bs, q_len, heads, v.shape[-1]).contiguous()


def _ragged_rows(op: str, q_indptr, total: int, max_q_len: int):
    """Index maps between ragged rows and `[bs, max_q_len]`: `(rows, q_lens, request_of_row, offset_of_row, in_use)`."""
    q_lens = q_indptr[1:] - q_indptr[:-1]
    if q_indptr.device.type == "cpu":
        if int(q_indptr[0]) != 0 or (q_lens < 0).any() or int(q_indptr[-1]) > total:
            raise IndexError(f"{op}: `q_indptr` must rise from 0 to at most {total}, got {q_indptr.tolist()}")
        if q_lens.numel() and int(q_lens.max()) > max_q_len:
            raise IndexError(f"{op}: `max_q_len` must bound every query count, got {max_q_len} for {int(q_lens.max())}")
    rows = q_indptr[:-1, None] + torch.arange(max_q_len, device=q_indptr.device)
    row = torch.arange(total, device=q_indptr.device, dtype=q_indptr.dtype)
    request = torch.searchsorted(q_indptr[1:].contiguous(), row, right=True).clamp(max=max(q_lens.shape[0] - 1, 0))
    offset = (row - q_indptr[request]).clamp(0, max_q_len - 1)
    return rows.clamp(0, max(total - 1, 0)).long(), q_lens, request, offset.long(), row < q_indptr[-1]


def query_visibility(call: AttentionCall) -> tuple[torch.Tensor, list[tuple[int | None, int]]]:
    """What each query of a call on the CPU sees, `[bs, q_len, length]`, and of each row of the queries, in the order of memory,
    the request (None: of no request) and the place there."""
    _check_lengths(call.step, call.block_tables, call.seq_lens, call.page_size, call.max_seq_len)
    length = _kv_length(call.block_tables, call.seq_lens, call.page_size, call.max_seq_len)
    rows: list[tuple[int | None, int]]
    if call.is_ragged:
        _, q_lens, request, offset, in_use = _ragged_rows(call.step, call.q_indptr, call.q.shape[0], call.max_q_len)
        places = zip(request.tolist(), offset.tolist(), in_use.tolist(), strict=True)
        rows = [(b if used else None, i) for b, i, used in places]
    else:
        q_lens = torch.full_like(call.seq_lens, call.q_len)
        rows = [(b, i) for b in range(call.seq_lens.shape[0]) for i in range(call.q_len)]
    if call.tree_mask is not None:
        visible = _visible_tree(call.seq_lens, call.tree_mask, call.mask_len, length, call.window_left)
    else:
        visible = _visible_causal(call.seq_lens, q_lens, call.q_len, length, call.window_left)
    _check_pages(call.step, call.block_tables, visible, call.k_cache.shape[0], call.page_size)
    return visible, rows


def attention(call: AttentionCall) -> torch.Tensor:
    """Every attention step, as its op's contract says (`spec_ops/ops/attention.py`)."""
    q, page_size = call.q, call.page_size
    if q.numel() == 0 or (call.is_ragged and call.seq_lens.shape[0] == 0):
        return q.new_zeros(*q.shape[:-1], call.v_head_dim)
    _check_lengths(call.step, call.block_tables, call.seq_lens, page_size, call.max_seq_len)
    # Ragged queries are padded to `[bs, max_q_len]`, and their results put back into rows.
    if call.is_ragged:
        rows, q_lens, request, offset, in_use = _ragged_rows(call.step, call.q_indptr, q.shape[0], call.max_q_len)
    length = _kv_length(call.block_tables, call.seq_lens, page_size, call.max_seq_len)
    if call.tree_mask is not None:
        visible = _visible_tree(call.seq_lens, call.tree_mask, call.mask_len, length, call.window_left)
    else:
        counts = q_lens if call.is_ragged else torch.full_like(call.seq_lens, call.q_len)
        visible = _visible_causal(call.seq_lens, counts, call.q_len, length, call.window_left)
    _check_pages(call.step, call.block_tables, visible, call.k_cache.shape[0], page_size)
    k = _gather(call.k_cache, call.block_tables, length, call.k_scale, torch.float32)
    if call.is_mla:
        k = k[:, :, None]
        v = k[..., : call.kv_lora_rank]
    else:
        v = _gather(call.v_cache, call.block_tables, length, call.v_scale, torch.float32)
    out = _attend(q[rows] if call.is_ragged else q, k, v, visible, call.scale, call.softcap, call.sinks)
    if call.is_ragged:
        out = torch.where(in_use[:, None, None], out[request, offset], 0.0)
    return out.to(q.dtype)
