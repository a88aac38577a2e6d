"""`append_kv` and `append_mla_kv` through FlashInfer's page appends.

Theirs finds a row's place through a request, its pages and a position, writes every row it is given, and casts nothing. So each
row is a request of one page here, and a row whose slot is negative repeats the first one that is written, or, where none is,
writes slot 0 as it stands: equal values at one address. That takes a launch of ours which copies the rows, so `"auto"`, our own
append in one launch, is never slower. https://docs.flashinfer.ai/api/page.html
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_ops.backends.padding import on_device

_BLOCK = 1024


@triton.jit(do_not_specialize=["n"])
def redirect_kernel(
    slots, first, second, first_spare, second_spare, first_rows, second_rows, places, n,
    slots_stride, first_stride, second_stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`places [4, n + 1]`: pages, positions, requests' starts and lengths of their last pages."""
    row = tl.program_id(0)
    source = row
    if tl.load(slots + row * slots_stride) < 0:
        source = n + 0
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            slot = tl.load(slots + at * slots_stride, mask=at < n, other=-1)
            source = tl.minimum(source, tl.min(tl.where(slot >= 0, at, n)))
    found = source < n
    slot = tl.load(slots + source * slots_stride, mask=found, other=0)
    tl.store(places + row, (slot // PAGE).to(tl.int32))
    tl.store(places + (n + 1) + row, (slot % PAGE).to(tl.int32))
    tl.store(places + 2 * (n + 1) + row, row)
    tl.store(places + 2 * (n + 1) + n, n)
    tl.store(places + 3 * (n + 1) + row, (slot % PAGE).to(tl.int32) + 1)
    from_row, to_row = source.to(tl.int64), row.to(tl.int64)
    for start in range(0, FIRST, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(first + from_row * first_stride + column, mask=(column < FIRST) & found, other=0.0)
        spare = tl.load(first_spare + column, mask=(column < FIRST) & (found == 0), other=0.0)
        tl.store(first_rows + to_row * FIRST + column, tl.where(found, value, spare), mask=column < FIRST)
    for start in range(0, SECOND, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(second + from_row * second_stride + column, mask=(column < SECOND) & found, other=0.0)
        spare = tl.load(second_spare + column, mask=(column < SECOND) & (found == 0), other=0.0)
        tl.store(second_rows + to_row * SECOND + column, tl.where(found, value, spare), mask=column < SECOND)


def _redirect(slots, rows: list[torch.Tensor], spares: list[torch.Tensor], page_size: int) -> tuple[list[torch.Tensor], dict]:
    """`rows` `[n, ...]` as they are to be written, and where: the arguments that both appends share. `spares`: slot 0."""
    n = slots.shape[0]
    places = torch.empty(4, n + 1, dtype=torch.int32, device=slots.device)
    written = [torch.empty(row.shape, dtype=row.dtype, device=row.device) for row in rows]
    dense = [row.flatten(1) for row in rows]
    dense = [row if row.stride(1) == 1 else row.contiguous() for row in dense]
    with on_device(slots.device):
        redirect_kernel[(n,)](
            slots, *dense, *(spare.contiguous() for spare in spares), *written, places, n,
            slots.stride(0), *(row.stride(0) for row in dense), *(row.shape[1] for row in dense), PAGE=page_size, BLOCK=_BLOCK,
        )  # fmt: skip
    pages, positions, indptr, last = places
    return written, {
        "batch_indices": indptr[:n],
        "positions": positions[:n],
        "kv_indices": pages[:n],
        "kv_indptr": indptr,
        "kv_last_page_len": last[:n],
    }


def _check_rows(cache: torch.Tensor, name: str) -> None:
    if cache.data_ptr() % 16 or any(stride * cache.itemsize % 16 for stride in cache.stride()[:-1]):
        raise ValueError(f"flashinfer-page: rows of `{name}` must start at multiples of 16 bytes, got strides {cache.stride()}")


def append_kv(k_cache, v_cache, k, v, slots, k_scale: float, v_scale: float) -> None:
    from flashinfer.page import append_paged_kv_cache

    if k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"flashinfer-page: `v_cache` must have the strides of `k_cache` {k_cache.stride()}, got {v_cache.stride()}"
        )
    _check_rows(k_cache, "k_cache")
    _check_rows(v_cache, "v_cache")
    if slots.shape[0] == 0:
        return
    (keys, values), places = _redirect(slots, [k, v], [k_cache[0, 0], v_cache[0, 0]], k_cache.shape[1])
    append_paged_kv_cache(append_key=keys, append_value=values, paged_kv_cache=(k_cache, v_cache), kv_layout="NHD", **places)


def append_mla_kv(kv_cache, c_kv, k_rope, slots, kv_scale: float) -> None:
    from flashinfer.page import append_paged_mla_kv_cache

    _check_rows(kv_cache, "kv_cache")
    if slots.shape[0] == 0:
        return
    rank = c_kv.shape[1]
    latent, rope = kv_cache[..., :rank], kv_cache[..., rank:]
    (c_rows, r_rows), places = _redirect(slots, [c_kv, k_rope], [latent[0, 0], rope[0, 0]], kv_cache.shape[1])
    append_paged_mla_kv_cache(append_ckv=c_rows, append_kpe=r_rows, ckv_cache=latent, kpe_cache=rope, **places)
