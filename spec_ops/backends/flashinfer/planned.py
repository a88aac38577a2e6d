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

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.capture import capture_of_current_stream
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


class _Wrapper:
    """A wrapper of FlashInfer's, and the lock that holds a plan and its run together.

    A plan lies in the wrapper's buffers. A second thread on the same stream would change it before the first one's run.
    """

    def __init__(self, kind: str, kernel: str, device: torch.device) -> None:
        self.lock = threading.Lock()
        buffer = scratch(kernel, device)
        if kind == "mha":
            from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

            self.planner: Any = BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer=buffer, kv_layout="NHD", backend=kernel
            )
        else:
            from flashinfer.mla import BatchMLAPagedAttentionWrapper

            self.planner = BatchMLAPagedAttentionWrapper(float_workspace_buffer=buffer, backend=kernel)


_wrappers: dict[tuple[str, str, torch.device, int], _Wrapper] = kept({})  # each holds buffers of its own, on the host too


def _wrapper_for(kind: str, kernel: str, device: torch.device) -> _Wrapper:
    """One per kind, device and stream: no graph holds its calls."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (kind, kernel, device, stream)
    with LOCK:
        if key not in _wrappers:
            _wrappers[key] = _Wrapper(kind, kernel, device)
        return _wrappers[key]


class Planned(NamedTuple):
    """A call that is planned.

    Attributes:
        run: launches the kernel, which writes `out`; as often as lengths and tables stay what they were, and until the wrapper
            plans another call.
        finish: clears the rows of `out` that no kernel writes, and gives the op's result.
    """

    run: Callable[[], Any]
    finish: Callable[[], torch.Tensor]


def plan(call: AttentionCall, kernel: str) -> Planned:
    """Plan `call`, one of at least one query, in a wrapper of its own for `kernel` (`"fa2"` or `"fa3"`): to run it more than
    once."""
    return _plan(call, _Wrapper(call.step[:3], kernel, call.q.device).planner)


def _attend(kernel: str, call: AttentionCall) -> torch.Tensor:
    if call.q.numel() == 0 or call.seq_lens.shape[0] == 0:
        return call.q.new_zeros(*call.q.shape[:-1], call.v_head_dim)
    if call.q.is_cuda and capture_of_current_stream(call.q.device.index):
        raise RuntimeError(
            f"flashinfer-{kernel}: must be called outside of CUDA graph captures, and {call.step} was called in one: it plans "
            "on the host, so a replay would use the lengths of the capture; name another `backend`"
        )
    wrapper = _wrapper_for(call.step[:3], kernel, call.q.device)
    with wrapper.lock:
        planned = _plan(call, wrapper.planner)
        planned.run()
    return planned.finish()


def _plan(call: AttentionCall, planner: Any) -> Planned:
    q, seq_lens = call.q, call.seq_lens
    out = q.new_zeros(*q.shape[:-1], call.v_head_dim)  # padding rows of a ragged call are written by nobody
    if call.is_ragged:
        assert call.q_indptr is not None
        q_indptr = call.q_indptr.cpu()
        q_lens = q_indptr[1:] - q_indptr[:-1]
    else:
        q_lens = torch.full((q.shape[0],), q.shape[1], dtype=torch.int32)
        q_indptr = _indptr(q_lens)
    pages = _live_pages(call.block_tables, seq_lens, call.seq_lens_cpu, q_lens, call.page_size)
    mask, hidden = None, None
    if call.tree_mask is not None:
        mask, hidden = _tree(call, pages)
    used = int(q_indptr[-1])
    rows = (q if call.is_ragged else q.flatten(0, 1)).contiguous()[:used]
    results = (out if call.is_ragged else out.flatten(0, 1))[:used]
    run = (_plan_mla if call.is_mla else _plan_mha)(planner, call, rows, results, pages, q_indptr, mask)

    def finish() -> torch.Tensor:
        if call.q_indptr is not None:
            return clear_ragged(out, seq_lens, call.q_indptr)
        nothing = seq_lens[:, None] < call.q_len if hidden is None else hidden
        return out.masked_fill_(nothing[..., None, None], 0.0)

    return Planned(run, finish)


def _plan_mha(planner, call: AttentionCall, rows, results, pages: _Pages, q_indptr, mask) -> Callable[[], Any]:
    """`rows`, `results [total, heads, dim]` by `q_indptr` (host)."""
    planner.plan(
        qo_indptr=q_indptr,
        paged_kv_indptr=pages.indptr,
        paged_kv_indices=pages.indices,
        paged_kv_last_page_len=pages.last_page_len,
        num_qo_heads=rows.shape[1],
        num_kv_heads=call.num_kv_heads,
        head_dim_qk=rows.shape[2],
        page_size=call.page_size,
        custom_mask=mask,
        causal=mask is None,
        sm_scale=call.scale,
        window_left=call.window_left if mask is None else -1,  # by depth, hence in the mask
        logits_soft_cap=call.softcap,
        q_data_type=rows.dtype,
        kv_data_type=call.k_cache.dtype,
    )
    fp8 = call.k_cache.dtype == torch.float8_e4m3fn
    scales = {"k_scale": call.k_scale, "v_scale": call.v_scale} if fp8 else {}
    return functools.partial(planner.run, q=rows, paged_kv_cache=(call.k_cache, call.v_cache), out=results, **scales)


def _plan_mla(planner, call: AttentionCall, rows, results, pages: _Pages, q_indptr, mask) -> Callable[[], Any]:
    assert mask is None, "the MLA kernels take no mask"
    rank, cache = call.v_head_dim, call.k_cache
    planner.plan(
        qo_indptr=q_indptr,
        kv_indptr=pages.indptr,
        kv_indices=pages.indices,
        kv_len_arr=pages.lens,
        num_heads=rows.shape[1],
        head_dim_ckv=rank,
        head_dim_kpe=rows.shape[2] - rank,
        page_size=call.page_size,
        causal=True,
        sm_scale=call.scale,
        q_data_type=rows.dtype,
        kv_data_type=cache.dtype,
    )
    return functools.partial(
        planner.run,
        q_nope=rows[..., :rank],
        q_pe=rows[..., rank:],
        ckv_cache=cache[..., :rank],
        kpe_cache=cache[..., rank:],
        out=results,
    )


def _tree(call: AttentionCall, pages: _Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's flat mask (`q_len * kv_len` per request), and `[bs, q_len]` bool: the query sees nothing."""
    visible = _visible(call.seq_lens, call.tree_mask, call.mask_len, int(pages.lens.max()), call.window_left)
    flat = torch.cat([visible[b, :, :length].flatten() for b, length in enumerate(pages.lens.tolist())])
    return flat, ~visible.any(-1)


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


fa2 = functools.partial(_attend, "fa2")
fa3 = functools.partial(_attend, "fa3")
