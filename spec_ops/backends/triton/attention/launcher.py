"""The attention steps on Triton kernels: what the `triton` backend declares."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_ops.backends.registry import device_arch
from spec_ops.backends.triton.attention import tuning
from spec_ops.backends.triton.attention.ragged import ragged_attention_kernel
from spec_ops.backends.triton.attention.split_kv import split_kv_attention_kernel
from spec_ops.backends.triton.runtime.counters import arrival_counters
from spec_ops.backends.triton.runtime.launch import device_guard, launch, num_sms, too_large_a_grid

LOG2E = 1.4426950408889634


class _Keys(NamedTuple):
    """The caches as kernels take them: pointers, or tensor descriptors of `[tokens, heads * dim]` (`tma`)."""

    tensors: tuple
    strides: tuple[int, ...]
    constants: dict[str, Any]
    block_dv: int
    tma: bool


def kernel_keys(q, k_cache, v_cache, v_dim: int, shared_kv: bool, config: tuning.Config) -> _Keys:
    head_dim = k_cache.shape[-1]
    d0, d1 = tuning.head_parts(head_dim)
    block_dv = tuning.value_width(v_dim)
    # `mma.sync`, up to 32 rows, takes e4m3 as pairs (`attend.py`); a product is at least 16 long and wide.
    per = 1
    if config.block_m < 64 and min(d0, d1 or d0, block_dv) >= 32 and all(map(_holds_pairs, (k_cache, v_cache))):
        per = 2
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
    # Descriptors cannot mask a head's padding (the next head's numbers would stand there), and hold whole blocks of one page.
    tma = (
        config.tma
        and d0 + d1 == head_dim
        and block_dv == v_dim
        and all(_is_token_rows(cache, config.block_n) for cache in (k_cache, v_cache))
    )
    tensors = (k_cache, None, v_cache)
    if tma:
        k_rest = _descriptor(k_cache, config.block_n, d1 // per) if d1 else None
        tensors = (
            _descriptor(k_cache, config.block_n, d0 // per),
            k_rest,
            None if shared_kv else _descriptor(v_cache, config.block_n, v_dim // per),
        )
    constants = {
        "D": head_dim, "D0": d0, "D1": d1, "DV": v_dim, "BLOCK_DV": block_dv, "PAGE": k_cache.shape[1], "SHARED_KV": shared_kv,
        "TMA": tma, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.num_stages,
        "CLEAR": config.clear,
        "WIDE": _is_wide(q, 1, q.dim() - 2) or (not tma and (_is_wide(k_cache, 1) or _is_wide(v_cache, 1))),
    }  # fmt: skip
    strides = (*_page_token_head(k_cache), *_page_token_head(v_cache))
    return _Keys(tensors, strides, constants, block_dv, tma)


def _holds_pairs(cache: torch.Tensor) -> bool:
    """Whether `cache` is e4m3, and its rows can be read as 16-bit numbers."""
    if cache.dtype != torch.float8_e4m3fn:
        return False
    *strides, last = cache.stride()
    return last == 1 and all(n % 2 == 0 for n in (cache.shape[-1], *strides, cache.storage_offset(), cache.data_ptr()))


def _page_token_head(cache: torch.Tensor) -> tuple[int, int, int]:
    return cache.stride(0), cache.stride(1), cache.stride(2) if cache.dim() == 4 else 0


def _is_wide(x: torch.Tensor, *dims: int) -> bool:
    """Whether one of the dimensions reaches over 2^31 elements or more."""
    return any((x.shape[dim] - 1) * x.stride(dim) >= 2**31 for dim in dims)


def _is_token_rows(cache: torch.Tensor, block_n: int) -> bool:
    """Whether a descriptor can read `cache` as `[tokens, row]`: rows at one distance, 16-byte steps, whole blocks in a page."""
    stride = cache.stride(1)
    return (
        cache.shape[1] % block_n == 0
        and stride >= math.prod(cache.shape[2:])
        and cache.stride(0) == cache.shape[1] * stride
        and (cache.dim() == 3 or cache.stride(2) == cache.shape[3])
        and stride * cache.element_size() % 16 == 0
        and cache.data_ptr() % 16 == 0
    )


def _descriptor(cache: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    shape = [cache.shape[0] * cache.shape[1], math.prod(cache.shape[2:])]
    return TensorDescriptor(cache, shape, [cache.stride(1), 1], [rows, columns])


def softmax_arguments(scale: float, k_scale: float, v_scale: float, softcap: float) -> tuple[float, float, float]:
    """`qk_scale, v_scale, softcap` of the kernels, which work in base 2."""
    if softcap > 0:
        return scale * k_scale / softcap, v_scale, softcap * LOG2E
    return scale * k_scale * LOG2E, v_scale, 0.0


@functools.cache
def kernel_arch(device: torch.device) -> int:
    """Compute capability (90 for sm_90); Triton's interpreter stands in for sm_90."""
    return device_arch(device) or 90


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def packed(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def window_within(window_left: int, block_tables: torch.Tensor, page_size: int) -> int:
    """`window_left`, or -1 if it hides no key that the tables have room for: kernels subtract it from positions, in int32."""
    return window_left if window_left < block_tables.shape[1] * page_size else -1


def _aligned_ranges(bs: int, ranges: int) -> int:
    """A few ranges less, if that makes requests of equal length end where ranges end."""
    aligned = ranges // bs * bs if bs <= ranges else triton.cdiv(bs, triton.cdiv(bs, ranges))
    return aligned if aligned >= 0.9 * ranges else ranges


def _uniform(
    q, k_cache, v_cache, v_dim, shared_kv, block_tables, seq_lens, tree_mask, mask_len, scale, window_left, sinks, softcap,
    k_scale, v_scale, config,
):  # fmt: skip
    bs, q_len, heads, head_dim = q.shape
    out = q.new_empty(bs, q_len, heads, v_dim)
    if out.numel() == 0:
        return out
    q = unit_rows(q)
    if tree_mask is not None:
        tree_mask = tree_mask.contiguous() if _is_wide(tree_mask, 0) else unit_rows(tree_mask)
    seq_lens, sinks = seq_lens.contiguous(), packed(sinks)
    block_tables = unit_rows(block_tables)
    kv_heads = 1 if shared_kv else k_cache.shape[2]
    group = heads // kv_heads
    rows = q_len * group
    sms = num_sms(q.device)
    arch, item = kernel_arch(q.device), k_cache.element_size()
    config = config or tuning.choose(arch, shared_kv, head_dim, v_dim, item, rows, window_left)
    keys = kernel_keys(q, k_cache, v_cache, v_dim, shared_kv, config)
    row_blocks = triton.cdiv(rows, config.block_m)
    tiles = kv_heads * row_blocks
    ranges = _aligned_ranges(bs, max(1, sms * config.programs // tiles))
    # Two unfinished tiles a program: accumulators, then maxima and sums.
    slots = ranges * tiles * 2 * config.block_m
    partial = torch.empty(slots * (keys.block_dv + 2), dtype=torch.float32, device=q.device)
    cooperative = config.cooperative and q.is_cuda and ranges * tiles <= sms * config.programs  # else not all resident at once

    def start(cooperative: bool) -> None:
        launch(
            split_kv_attention_kernel, (ranges * tiles,), q, *keys.tensors, out, block_tables, seq_lens, tree_mask, sinks,
            partial, partial[slots * keys.block_dv :], arrival_counters(q.device, ranges * tiles),
            *softmax_arguments(scale, k_scale, v_scale, softcap), bs, ranges,
            *q.stride()[:3], *keys.strides, block_tables.stride(0), 0 if tree_mask is None else tree_mask.stride(0),
            Q_LEN=q_len, GROUP=group, KV_HEADS=kv_heads, ROW_BLOCKS=row_blocks, MASK_LEN=0 if tree_mask is None else mask_len,
            WINDOW=window_left, HAS_SINKS=sinks is not None, HAS_SOFTCAP=softcap > 0,
            BS=max(2, triton.next_power_of_2(bs)), MIN_BLOCKS=config.min_blocks, COOPERATIVE=cooperative,
            WARPS=config.num_warps, TILE=triton.next_power_of_2(min(rows, config.block_m)) * keys.block_dv,
            maxnreg=config.max_registers, early=config.full and keys.tma, **keys.constants, num_warps=config.num_warps,
            launch_cooperative_grid=cooperative,
        )  # fmt: skip

    with device_guard(q):
        try:
            start(cooperative)
        except RuntimeError as error:
            if not (cooperative and too_large_a_grid(error)):
                raise
            start(False)
    return out


def _ragged(
    q, k_cache, v_cache, v_dim, shared_kv, block_tables, seq_lens, q_indptr, max_q_len, scale, window_left, sinks, softcap,
    k_scale, v_scale, config,
):  # fmt: skip
    total_q, heads, head_dim = q.shape
    out = q.new_empty(total_q, heads, v_dim)
    if out.numel() == 0:
        return out
    q = unit_rows(q)
    seq_lens, q_indptr, sinks = seq_lens.contiguous(), q_indptr.contiguous(), packed(sinks)
    window_left = window_within(window_left, block_tables, k_cache.shape[1])
    block_tables = unit_rows(block_tables)
    kv_heads = 1 if shared_kv else k_cache.shape[2]
    group = heads // kv_heads
    config = config or tuning.choose_ragged(
        kernel_arch(q.device), shared_kv, head_dim, v_dim, k_cache.element_size(), max_q_len * group
    )
    keys = kernel_keys(q, k_cache, v_cache, v_dim, shared_kv, config)
    bs, row_blocks = seq_lens.shape[0], triton.cdiv(max_q_len * group, config.block_m)
    with device_guard(q):
        launch(
            ragged_attention_kernel, (row_blocks, kv_heads, bs + 1),
            q, *keys.tensors, out, block_tables, seq_lens, q_indptr, sinks,
            *softmax_arguments(scale, k_scale, v_scale, softcap), bs, total_q, row_blocks,
            *q.stride()[:2], *keys.strides, block_tables.stride(0),
            GROUP=group, KV_HEADS=kv_heads, WINDOW=window_left, HAS_SINKS=sinks is not None, HAS_SOFTCAP=softcap > 0,
            **keys.constants, num_warps=config.num_warps,
        )  # fmt: skip
    return out


def mha(
    q, k_cache, v_cache, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale, window_left,
    sinks, softcap, k_scale, v_scale, max_seq_len, config=None,
):  # fmt: skip
    """mha_draft_decode, mha_target_verify, mha_draft_extend."""
    window_left = window_within(window_left, block_tables, k_cache.shape[1])
    if config is None and q.is_cuda and kernel_arch(q.device) == 90:
        from spec_ops.backends.triton.attention.hopper import gqa as gqa_hopper  # Gluon: not on other platforms

        if gqa_hopper.supports(kernel_arch(q.device), q, k_cache, v_cache, window_left, softcap):
            try:
                with device_guard(q):
                    return gqa_hopper.mha(
                        q, k_cache, v_cache, unit_rows(block_tables), seq_lens.contiguous(), tree_mask, mask_len, kv_indptr,
                        kv_indices, seq_lens_cpu, scale, window_left, sinks, softcap, k_scale, v_scale, max_seq_len,
                    )  # fmt: skip
            except RuntimeError as error:
                if not too_large_a_grid(error):  # its programs wait for one another; those below need not
                    raise
    return _uniform(
        q, k_cache, v_cache, v_cache.shape[-1], False, block_tables, seq_lens, tree_mask, mask_len, scale, window_left, sinks,
        softcap, k_scale, v_scale, config,
    )  # fmt: skip


def mla(
    q, kv_cache, kv_lora_rank, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
    window_left, sinks, softcap, kv_scale, max_seq_len, config=None,
):  # fmt: skip
    """mla_draft_decode, mla_target_verify, mla_draft_extend."""
    window_left = window_within(window_left, block_tables, kv_cache.shape[1])
    if config is None and q.is_cuda and kernel_arch(q.device) == 90:
        from spec_ops.backends.triton.attention.hopper import mla as mla_hopper  # Gluon: not on other platforms
        from spec_ops.backends.triton.attention.hopper import mla_few as mla_hopper_few  # Gluon: not on other platforms

        if mla_hopper.supports(q, kv_cache, kv_lora_rank, window_left, softcap):
            kernel = mla_hopper_few if mla_hopper_few.preferred(q) else mla_hopper
            try:
                with device_guard(q):
                    return kernel.mla(
                        q, kv_cache, kv_lora_rank, unit_rows(block_tables), seq_lens.contiguous(), tree_mask, mask_len,
                        kv_indptr, kv_indices, seq_lens_cpu, scale, window_left, sinks, softcap, kv_scale, max_seq_len,
                    )  # fmt: skip
            except RuntimeError as error:
                if not too_large_a_grid(error):  # its programs wait for one another; those below need not
                    raise
    return _uniform(
        q, kv_cache, kv_cache, kv_lora_rank, True, block_tables, seq_lens, tree_mask, mask_len, scale, window_left, sinks,
        softcap, kv_scale, kv_scale, config,
    )  # fmt: skip


def mha_extend(
    q, k_cache, v_cache, block_tables, seq_lens, q_indptr, max_q_len, kv_indptr, kv_indices, seq_lens_cpu, scale, window_left,
    sinks, softcap, k_scale, v_scale, max_seq_len, config=None,
):  # fmt: skip
    return _ragged(
        q, k_cache, v_cache, v_cache.shape[-1], False, block_tables, seq_lens, q_indptr, max_q_len, scale, window_left, sinks,
        softcap, k_scale, v_scale, config,
    )  # fmt: skip


def mla_extend(
    q, kv_cache, kv_lora_rank, block_tables, seq_lens, q_indptr, max_q_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
    window_left, sinks, softcap, kv_scale, max_seq_len, config=None,
):  # fmt: skip
    return _ragged(
        q, kv_cache, kv_cache, kv_lora_rank, True, block_tables, seq_lens, q_indptr, max_q_len, scale, window_left, sinks,
        softcap, kv_scale, kv_scale, config,
    )  # fmt: skip
