"""Reference page tables and kv-indices: each output entry computes which request and token it names."""

from __future__ import annotations

import torch


def _check_lengths(op: str, req_to_token, req_pool_indices, seq_lens, width: int) -> None:
    """Value checks that need no sync, hence on CPU only."""
    if seq_lens.device.type != "cpu" or seq_lens.numel() == 0:
        return
    rows = req_to_token.shape[0]
    if int(req_pool_indices.min()) < 0 or int(req_pool_indices.max()) >= rows:
        raise IndexError(f"{op}: `req_pool_indices` must lie in [0, {rows}), got {req_pool_indices.tolist()}")
    if int(seq_lens.min()) < 0 or int(seq_lens.max()) > width:
        raise IndexError(f"{op}: `seq_lens` must lie in [0, {width}], got {seq_lens.tolist()}")


def page_table(req_to_token, req_pool_indices, seq_lens, page_size: int, max_pages: int):
    _check_lengths("page_table", req_to_token, req_pool_indices, seq_lens, min(max_pages * page_size, req_to_token.shape[1]))
    first = torch.arange(max_pages, device=seq_lens.device) * page_size
    pages = req_to_token[req_pool_indices.long()[:, None], first] // page_size
    return torch.where(first < seq_lens[:, None], pages, 0).to(torch.int32)


def page_table_out(req_to_token, req_pool_indices, seq_lens, page_size: int, out) -> None:
    out[: seq_lens.shape[0]] = page_table(req_to_token, req_pool_indices, seq_lens, page_size, out.shape[1])


def _segments(lens: torch.Tensor, capacity: int):
    """CSR of segments with the given lengths: `(indptr, segment of each entry, offset in it, in use)`."""
    indptr = torch.zeros(lens.shape[0] + 1, dtype=torch.int64, device=lens.device)
    torch.cumsum(lens, 0, out=indptr[1:])
    entry = torch.arange(capacity, device=lens.device)
    segment = torch.searchsorted(indptr[1:].contiguous(), entry, right=True).clamp(max=max(lens.shape[0] - 1, 0))
    return indptr, segment, entry - indptr[segment], entry < indptr[-1]


def _check_capacity(op: str, indptr: torch.Tensor, capacity: int) -> None:
    if indptr.device.type == "cpu" and int(indptr[-1]) > capacity:
        raise IndexError(f"{op}: `capacity` must hold {int(indptr[-1])} indices, got {capacity}")


def _empty(seq_lens, segments: int, capacity: int):
    return seq_lens.new_zeros(segments + 1, dtype=torch.int32), seq_lens.new_zeros(capacity, dtype=torch.int32)


def kv_indices(req_to_token, req_pool_indices, seq_lens, capacity: int):
    if seq_lens.shape[0] == 0:
        return _empty(seq_lens, 0, capacity)
    _check_lengths("kv_indices", req_to_token, req_pool_indices, seq_lens, req_to_token.shape[1])
    indptr, segment, offset, used = _segments(seq_lens.long(), capacity)
    _check_capacity("kv_indices", indptr, capacity)
    slots = req_to_token[req_pool_indices.long()[segment], torch.where(used, offset, 0)]
    return indptr.to(torch.int32), torch.where(used, slots, 0).to(torch.int32)


def _draft_step(
    op: str, req_to_token, req_pool_indices, seq_lens, step: int, num_steps: int, topk: int, page_size: int, capacity: int
):
    if seq_lens.shape[0] == 0:
        return _empty(seq_lens, 0, capacity)
    _check_lengths(op, req_to_token, req_pool_indices, seq_lens, req_to_token.shape[1])
    prefix = seq_lens.long()
    indptr, segment, offset, used = _segments((prefix + step + 1).repeat_interleave(topk), capacity)
    _check_capacity(op, indptr, capacity)
    request, branch = segment // topk, segment % topk
    length = prefix[request]
    if page_size == 1 or topk == 1:
        start = length + branch * num_steps
    else:
        tail = length % page_size
        pages = (tail + num_steps + page_size - 1) // page_size
        start = length - tail + branch * pages * page_size + tail
    column = torch.where(offset < length, offset, start + offset - length)
    column = torch.where(used, column, 0)
    if column.device.type == "cpu" and column.numel() and int(column.max()) >= req_to_token.shape[1]:
        raise IndexError(
            f"{op}: `req_to_token` must be at least {int(column.max()) + 1} tokens wide for these drafts, "
            f"got {req_to_token.shape[1]}"
        )
    slots = req_to_token[req_pool_indices.long()[request], column]
    return indptr.to(torch.int32), torch.where(used, slots, 0).to(torch.int32)


def draft_kv_indices(
    req_to_token, req_pool_indices, seq_lens, step: int, num_steps: int, topk: int, page_size: int, capacity: int
):
    return _draft_step("draft_kv_indices", req_to_token, req_pool_indices, seq_lens, step, num_steps, topk, page_size, capacity)


def draft_kv_indices_steps(
    req_to_token, req_pool_indices, seq_lens, num_steps: int, topk: int, page_size: int, capacity: int, rows: int
):
    # The last step first: it is the longest, so an error names what all of them need.
    steps = [
        _draft_step(
            "draft_kv_indices_steps", req_to_token, req_pool_indices, seq_lens, step, num_steps, topk, page_size, capacity
        )
        for step in reversed(range(rows))
    ][::-1]
    return torch.stack([indptr for indptr, _ in steps]), torch.stack([indices for _, indices in steps])
