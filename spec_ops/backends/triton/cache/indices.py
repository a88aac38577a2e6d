"""Page tables and CSR kv-indices, one launch each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, num_sms

BLOCK = 1024
LENS_BLOCK = 256


@triton.jit(do_not_specialize=["max_pages", "table_stride"])
def page_table_kernel(
    req_to_token, req_pool_indices, seq_lens, table, row_stride, token_stride, req_stride, lens_stride, table_stride,
    max_pages, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(request, block)`: `BLOCK` entries of the request's row."""
    await_predecessors(PDL)
    request = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(seq_lens + request * lens_stride)
    start = req_to_token + tl.load(req_pool_indices + request * req_stride).to(tl.int64) * row_stride
    first = page.to(tl.int64) * PAGE_SIZE
    slot = tl.load(start + first * token_stride, mask=first < length, other=0)
    tl.store(table + request * table_stride + page, slot // PAGE_SIZE, mask=page < max_pages)


def page_table(req_to_token, req_pool_indices, seq_lens, page_size: int, max_pages: int) -> torch.Tensor:
    table = seq_lens.new_empty(seq_lens.shape[0], max_pages, dtype=torch.int32)
    page_table_out(req_to_token, req_pool_indices, seq_lens, page_size, table)
    return table


def page_table_out(req_to_token, req_pool_indices, seq_lens, page_size: int, out: torch.Tensor) -> None:
    bs, max_pages = seq_lens.shape[0], out.shape[1]
    if bs:
        block = min(triton.next_power_of_2(max_pages), BLOCK)
        with device_guard(out):
            launch(
                page_table_kernel, (bs, triton.cdiv(max_pages, block)),
                req_to_token, req_pool_indices, seq_lens, out,
                *req_to_token.stride(), req_pool_indices.stride(0), seq_lens.stride(0), out.stride(0), max_pages,
                PAGE_SIZE=page_size, BLOCK=block, num_warps=4,
            )  # fmt: skip


@triton.jit(do_not_specialize=["bs", "capacity", "first_step", "num_steps"])
def kv_indices_kernel(
    req_to_token, req_pool_indices, seq_lens, indptr, indices, row_stride, token_stride, req_stride, lens_stride,
    bs, capacity, first_step, num_steps,
    TOPK: tl.constexpr, PAGE_SIZE: tl.constexpr, LENS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(request and branch, split, row)`: its share of one segment, then of the zeros after the last segment.

    Row `r` is draft step `first_step + r`, whose segments hold `step + 1` drafted tokens after the prefix.
    """
    await_predecessors(PDL)
    segment = tl.program_id(0)
    request, branch = segment // TOPK, segment % TOPK
    row = tl.program_id(2)
    drafted = first_step + row + 1
    indptr += row.to(tl.int64) * (bs * TOPK + 1)
    indices += row.to(tl.int64) * capacity

    before = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    for first in range(0, bs, LENS_BLOCK):
        other = first + tl.arange(0, LENS_BLOCK)
        lens = tl.load(seq_lens + other.to(tl.int64) * lens_stride, mask=other < bs, other=0).to(tl.int64)
        lens = tl.where(other < bs, lens + drafted, 0)
        total += tl.sum(lens)
        before += tl.sum(tl.where(other < request, lens, 0))
    prefix = tl.load(seq_lens + request.to(tl.int64) * lens_stride).to(tl.int64)
    length = prefix + drafted
    total *= TOPK
    start = before * TOPK + branch * length
    if tl.program_id(1) == 0:
        tl.store(indptr + segment, start.to(tl.int32))
        if segment == 0:
            tl.store(indptr + bs * TOPK, total.to(tl.int32))

    # Where the branch's own tokens begin, less the prefix that its segment holds before them. (With pages of 1 this is
    # `branch * num_steps`, with one branch 0, as those layouts ask for.)
    pages = (prefix % PAGE_SIZE + num_steps + PAGE_SIZE - 1) // PAGE_SIZE
    shift = branch * pages * PAGE_SIZE
    tokens = req_to_token + tl.load(req_pool_indices + request.to(tl.int64) * req_stride).to(tl.int64) * row_stride
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        offset = first + tl.arange(0, BLOCK).to(tl.int64)
        column = tl.where(offset < prefix, offset, offset + shift)
        slot = tl.load(tokens + column * token_stride, mask=offset < length)
        tl.store(indices + start + offset, slot, mask=(offset < length) & (start + offset < capacity))

    share = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    for first in range(total + share * BLOCK, capacity, tl.num_programs(0) * tl.num_programs(1) * BLOCK):
        entry = first + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(indices + entry, tl.zeros([BLOCK], tl.int32), mask=entry < capacity)


def _kv_indices(
    req_to_token,
    req_pool_indices,
    seq_lens,
    first_step: int,
    rows: int,
    num_steps: int,
    topk: int,
    page_size: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    bs = seq_lens.shape[0]
    if bs == 0:
        return seq_lens.new_zeros(rows, 1, dtype=torch.int32), seq_lens.new_zeros(rows, capacity, dtype=torch.int32)
    indptr = seq_lens.new_empty(rows, bs * topk + 1, dtype=torch.int32)
    indices = seq_lens.new_empty(rows, capacity, dtype=torch.int32)
    # Enough programs for every multiprocessor to have two, and none without a block of a full segment.
    splits = min(triton.cdiv(2 * num_sms(seq_lens.device), bs * topk * rows), triton.cdiv(req_to_token.shape[1], BLOCK))
    with device_guard(indptr):
        launch(
            kv_indices_kernel, (bs * topk, splits, rows),
            req_to_token, req_pool_indices, seq_lens, indptr, indices,
            *req_to_token.stride(), req_pool_indices.stride(0), seq_lens.stride(0), bs, capacity, first_step, num_steps,
            TOPK=topk, PAGE_SIZE=page_size, LENS_BLOCK=LENS_BLOCK, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return indptr, indices


def kv_indices(req_to_token, req_pool_indices, seq_lens, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    # A step before the first: segments of the prefix alone.
    indptr, indices = _kv_indices(req_to_token, req_pool_indices, seq_lens, -1, 1, 0, 1, 1, capacity)
    return indptr[0], indices[0]


def draft_kv_indices(
    req_to_token, req_pool_indices, seq_lens, step: int, num_steps: int, topk: int, page_size: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    indptr, indices = _kv_indices(req_to_token, req_pool_indices, seq_lens, step, 1, num_steps, topk, page_size, capacity)
    return indptr[0], indices[0]


def draft_kv_indices_steps(
    req_to_token, req_pool_indices, seq_lens, num_steps: int, topk: int, page_size: int, capacity: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _kv_indices(req_to_token, req_pool_indices, seq_lens, 0, rows, num_steps, topk, page_size, capacity)


def ahead() -> Iterator[Variant]:
    inputs = {"req_to_token": "*i32:16", "req_pool_indices": "*i64:16", "seq_lens": "*i32:16", "row_stride": "i64:16"}
    ones = {"token_stride": 1, "req_stride": 1, "lens_stride": 1}
    yield Variant(
        "page_table, pages of 64",
        page_table_kernel,
        inputs | {"table": "*i32:16", "table_stride": "i32", "max_pages": "i32"},
        ones | {"PAGE_SIZE": 64, "BLOCK": BLOCK},
    )
    for topk, page_size in ((1, 1), (8, 64)):
        yield Variant(
            f"kv_indices, top-k {topk}, pages of {page_size}",
            kv_indices_kernel,
            inputs
            | {"indptr": "*i32:16", "indices": "*i32:16"}
            | dict.fromkeys(("bs", "capacity", "first_step", "num_steps"), "i32"),
            ones | {"TOPK": topk, "PAGE_SIZE": page_size, "LENS_BLOCK": LENS_BLOCK, "BLOCK": BLOCK},
        )
