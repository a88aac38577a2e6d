"""fa2 and fa3 through FlashInfer's planned wrappers: GQA and absorbed MLA, uniform and ragged queries.

Every call plans on the host: it needs the lengths there (a sync, unless `seq_lens_cpu` is given), lists the live pages and
copies the plan to the device. So these backends are declared `host_plan`, used by name only, and run outside CUDA graphs.
https://docs.flashinfer.ai/api/attention.html#flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from spec_ops.backends.flashinfer.gqa import clear_ragged
from spec_ops.backends.flashinfer.provider import scratch
from spec_ops.backends.workspace import LOCK, kept


class _Pages(NamedTuple):
    """What a plan needs of the cache: `lens`, `indptr`, `last_page_len` on the host, the pages' `indices` on the device."""

    lens: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _live_pages(block_tables, seq_lens, seq_lens_cpu, q_lens: torch.Tensor, page_size: int) -> _Pages:
    """Requests shorter than their queries are padding; the kernels demand as many keys, so those get page 0."""
    true = (seq_lens.cpu() if seq_lens_cpu is None else seq_lens_cpu).to(torch.int32)
    lens = torch.maximum(true, q_lens.clamp(min=1))
    pages = (lens + page_size - 1) // page_size
    row, column = (torch.arange(int(pages.max())) < pages[:, None]).nonzero(as_tuple=True)
    live = column * page_size < torch.where(true >= q_lens, true, 0)[row]
    device = block_tables.device
    column = column.clamp(max=max(block_tables.shape[1] - 1, 0))
    found = block_tables[row.to(device), column.to(device)]
    indices = torch.where(live.to(device), found, 0)
    return _Pages(lens, _indptr(pages), indices, (lens - 1) % page_size + 1)


_wrappers: dict[tuple[str, str, torch.device, int], Any] = kept({})  # each holds buffers of its own, on the host too


def _wrapper(kind: str, kernel: str, device: torch.device) -> Any:
    if kind == "mha":
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=scratch(kernel, device), kv_layout="NHD", backend=kernel
        )
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    return BatchMLAPagedAttentionWrapper(float_workspace_buffer=scratch(kernel, device), backend=kernel)


class _Noting(threading.local):
    """While this thread's `prepare` plans a call: where its run is noted. Such a call has a wrapper of its own, which no later
    plan changes."""

    runs: list[Callable[[], Any]] | None = None


_noting = _Noting()


def _run(wrapper: Any, **arguments: Any) -> None:
    if _noting.runs is not None:
        _noting.runs.append(functools.partial(wrapper.run, **arguments))
    wrapper.run(**arguments)


def prepare(op: str, arguments: tuple) -> Callable[[], torch.Tensor]:
    """Plan a call of a uniform step once (`arguments` of the op, the backend's name last). What is returned runs the kernel
    alone, as long as lengths and tables stay what they are: for benchmarks, which state times without planning."""
    kernel = arguments[-1].removeprefix("flashinfer-")
    _noting.runs = []
    try:
        out = globals()[f"{kernel}_{op[:3]}"](*arguments[:-1])
        (run,) = _noting.runs
    finally:
        _noting.runs = None

    def call() -> torch.Tensor:
        run()
        return out

    return call


def _wrapper_for(kind: str, kernel: str, device: torch.device) -> Any:
    """One per kind, device and stream."""
    if _noting.runs is not None:
        return _wrapper(kind, kernel, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (kind, kernel, device, stream)
    with LOCK:
        if key not in _wrappers:
            _wrappers[key] = _wrapper(kind, kernel, device)
        return _wrappers[key]


def _mha(
    kernel: str, q, caches, pages: _Pages, q_indptr, custom_mask, scale, window_left, softcap, k_scale, v_scale
) -> torch.Tensor:
    """Rows `q [total, heads, dim]` by `q_indptr` (host)."""
    k_cache, v_cache = caches
    wrapper = _wrapper_for("mha", kernel, q.device)
    wrapper.plan(
        qo_indptr=q_indptr,
        paged_kv_indptr=pages.indptr,
        paged_kv_indices=pages.indices,
        paged_kv_last_page_len=pages.last_page_len,
        num_qo_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim_qk=q.shape[2],
        page_size=k_cache.shape[1],
        custom_mask=custom_mask,
        causal=custom_mask is None,
        sm_scale=scale,
        window_left=window_left,
        logits_soft_cap=softcap,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    scales = {"k_scale": k_scale, "v_scale": v_scale} if fp8 else {}
    out = torch.zeros_like(q)  # padding rows of a ragged call are written by nobody
    used = int(q_indptr[-1])
    _run(wrapper, q=q[:used], paged_kv_cache=(k_cache, v_cache), out=out[:used], **scales)
    return out


def _mla(kernel: str, q, kv_cache, kv_lora_rank: int, pages: _Pages, q_indptr, scale) -> torch.Tensor:
    wrapper = _wrapper_for("mla", kernel, q.device)
    wrapper.plan(
        qo_indptr=q_indptr,
        kv_indptr=pages.indptr,
        kv_indices=pages.indices,
        kv_len_arr=pages.lens,
        num_heads=q.shape[1],
        head_dim_ckv=kv_lora_rank,
        head_dim_kpe=q.shape[2] - kv_lora_rank,
        page_size=kv_cache.shape[1],
        causal=True,
        sm_scale=scale,
        q_data_type=q.dtype,
        kv_data_type=kv_cache.dtype,
    )
    out = q.new_zeros(*q.shape[:-1], kv_lora_rank)
    used = q[: int(q_indptr[-1])]
    _run(
        wrapper,
        q_nope=used[..., :kv_lora_rank],
        q_pe=used[..., kv_lora_rank:],
        ckv_cache=kv_cache[..., :kv_lora_rank],
        kpe_cache=kv_cache[..., kv_lora_rank:],
        out=out[: used.shape[0]],
    )
    return out


def _uniform(q, width: int, block_tables, seq_lens, seq_lens_cpu, page_size: int, attend: Callable) -> torch.Tensor:
    """`attend(rows, pages, q_indptr)` over `q [bs, q_len, ...]` as rows; requests shorter than `q_len` give zeros."""
    bs, q_len = q.shape[:2]
    if q.numel() == 0:
        return q.new_zeros(*q.shape[:-1], width)
    q_lens = torch.full((bs,), q_len, dtype=torch.int32)
    pages = _live_pages(block_tables, seq_lens, seq_lens_cpu, q_lens, page_size)
    return attend(q.flatten(0, 1).contiguous(), pages, _indptr(q_lens)).unflatten(0, (bs, q_len))


def _ragged(q, width: int, block_tables, seq_lens, q_indptr, seq_lens_cpu, page_size: int, attend: Callable) -> torch.Tensor:
    if q.numel() == 0 or seq_lens.shape[0] == 0:
        return q.new_zeros(*q.shape[:-1], width)
    on_host = q_indptr.cpu()
    pages = _live_pages(block_tables, seq_lens, seq_lens_cpu, on_host[1:] - on_host[:-1], page_size)
    return clear_ragged(attend(q.contiguous(), pages, on_host), seq_lens, q_indptr)


def _visible(seq_lens, tree_mask, mask_len: int, length: int, window_left: int) -> torch.Tensor:
    """`[bs, q_len, length]` bool: what each query of a tree sees of the first `length` positions, windows by depth."""
    device = seq_lens.device
    slot = torch.arange(mask_len, device=device)
    path = (tree_mask[..., None] >> slot) & 1  # [bs, q_len, mask_len]: the query itself and its ancestors
    prefix = (seq_lens - mask_len)[:, None]
    position = torch.arange(length, device=device)
    seen = (position < prefix)[:, None].expand(-1, tree_mask.shape[1], -1)
    drafts = path == 1
    if window_left >= 0:
        own_depth = (path.sum(-1, keepdim=True) - 1).clamp(min=0)
        seen = seen & (position >= prefix[..., None] + own_depth - window_left)
        drafts = drafts & (own_depth - (path.cumsum(-1) - path) <= window_left)
    place = prefix + slot  # of each draft position; before the start of a request that is shorter than its drafts there is none
    place = torch.where((place >= 0) & (place < length), place, length)[:, None].expand_as(path)
    in_drafts = torch.zeros(*path.shape[:2], length + 1, dtype=torch.bool, device=device).scatter_(2, place, drafts)
    return seen | in_drafts[..., :length]


def _tree(seq_lens, tree_mask, mask_len: int, pages: _Pages, window_left: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's flat mask (`q_len * kv_len` per request), and `[bs, q_len]` bool: the query sees nothing."""
    visible = _visible(seq_lens, tree_mask, mask_len, int(pages.lens.max()), window_left)
    flat = torch.cat([visible[b, :, :length].flatten() for b, length in enumerate(pages.lens.tolist())])
    return flat, ~visible.any(-1)


def _mha_uniform(
    kernel, q, k_cache, v_cache, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
    window_left, sinks, softcap, k_scale, v_scale, max_seq_len,
):  # fmt: skip
    hidden = seq_lens[:, None] < q.shape[1]

    def attend(rows, pages, q_indptr):
        nonlocal hidden
        custom, window = None, window_left
        if tree_mask is not None:
            custom, hidden = _tree(seq_lens, tree_mask, mask_len, pages, window_left)
            window = -1  # by depth, hence in the mask
        return _mha(kernel, rows, (k_cache, v_cache), pages, q_indptr, custom, scale, window, softcap, k_scale, v_scale)

    out = _uniform(q, v_cache.shape[-1], block_tables, seq_lens, seq_lens_cpu, k_cache.shape[1], attend)
    return out.masked_fill_(hidden[..., None, None], 0.0)


def _mha_ragged(
    kernel, q, k_cache, v_cache, block_tables, seq_lens, q_indptr, max_q_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
    window_left, sinks, softcap, k_scale, v_scale, max_seq_len,
):  # fmt: skip
    def attend(rows, pages, on_host):
        return _mha(kernel, rows, (k_cache, v_cache), pages, on_host, None, scale, window_left, softcap, k_scale, v_scale)

    return _ragged(q, v_cache.shape[-1], block_tables, seq_lens, q_indptr, seq_lens_cpu, k_cache.shape[1], attend)


def _mla_uniform(
    kernel, q, kv_cache, kv_lora_rank, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
    *_unsupported,
):  # fmt: skip
    def attend(rows, pages, q_indptr):
        return _mla(kernel, rows, kv_cache, kv_lora_rank, pages, q_indptr, scale)

    out = _uniform(q, kv_lora_rank, block_tables, seq_lens, seq_lens_cpu, kv_cache.shape[1], attend)
    return out.masked_fill_((seq_lens < q.shape[1])[:, None, None, None], 0.0)


def _mla_ragged(
    kernel, q, kv_cache, kv_lora_rank, block_tables, seq_lens, q_indptr, max_q_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
    *_unsupported,
):  # fmt: skip
    def attend(rows, pages, on_host):
        return _mla(kernel, rows, kv_cache, kv_lora_rank, pages, on_host, scale)

    return _ragged(q, kv_lora_rank, block_tables, seq_lens, q_indptr, seq_lens_cpu, kv_cache.shape[1], attend)


fa2_mha = functools.partial(_mha_uniform, "fa2")
fa2_mha_extend = functools.partial(_mha_ragged, "fa2")
fa2_mla = functools.partial(_mla_uniform, "fa2")
fa2_mla_extend = functools.partial(_mla_ragged, "fa2")
fa3_mha = functools.partial(_mha_uniform, "fa3")
fa3_mha_extend = functools.partial(_mha_ragged, "fa3")
fa3_mla = functools.partial(_mla_uniform, "fa3")
fa3_mla_extend = functools.partial(_mla_ragged, "fa3")
