"""An attention call as our kernels take it: layouts that they read, sizes, descriptors, the block shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention import tuning
from spec_ops.backends.triton.runtime.launch import arch_of
from spec_ops.backends.triton.runtime.repeat import empty

LOG2E = 1.4426950408889634


class Keys(NamedTuple):
    """The caches as kernels take them: pointers, or tensor descriptors of `[tokens, heads * dim]` (`tma`).

    `caches`: keys and values as pointers in any case; the strides are theirs.
    """

    tensors: tuple
    caches: tuple[torch.Tensor, torch.Tensor]
    strides: tuple[int, ...]
    constants: dict[str, Any]
    block_dv: int
    tma: bool


def kernel_keys(q, k_cache, v_cache, v_dim: int, shared_kv: bool, config: tuning.Config) -> Keys:
    head_dim = k_cache.shape[-1]
    d0, d1 = tuning.head_parts(head_dim)
    block_dv = tuning.value_width(v_dim)
    # `mma.sync`, up to 32 rows, takes e4m3 as pairs (`tile.py`); a product is at least 16 long and wide.
    per = 1
    if config.block_m < 64 and min(d0, d1 or d0, block_dv) >= 32 and all(map(_holds_pairs, (k_cache, v_cache))):
        per = 2
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
    # A descriptor holds a block of one page, or with `boxes` a page of one block; a product is at least 16 long.
    page = k_cache.shape[1]
    boxes = config.boxes and page >= 16 and config.block_n % page == 0 and per == 1 and not d1 and not shared_kv
    rows = page if boxes else config.block_n
    tma = config.tma and _are_token_rows(k_cache, v_cache, head_dim, v_dim, rows)
    tensors = (k_cache, None, v_cache)
    if tma:
        k_rest = _descriptor(k_cache, rows, d1 // per) if d1 else None
        tensors = (
            _descriptor(k_cache, rows, d0 // per),
            k_rest,
            None if shared_kv else _descriptor(v_cache, rows, v_dim // per),
        )
    constants = {
        "D": head_dim, "D0": d0, "D1": d1, "DV": v_dim, "BLOCK_DV": block_dv, "PAGE": page, "SHARED_KV": shared_kv,
        "TMA": tma, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.num_stages,
        "CLEAR": config.clear,
        "WIDE": is_wide(q, 1, q.dim() - 2) or (not tma and (is_wide(k_cache, 1) or is_wide(v_cache, 1))),
    }  # fmt: skip
    strides = (*_page_token_head(k_cache), *_page_token_head(v_cache))
    return Keys(tensors, (k_cache, v_cache), strides, constants, block_dv, tma)


def _holds_pairs(cache: torch.Tensor) -> bool:
    """Whether `cache` is e4m3, and its rows can be read as 16-bit numbers."""
    if cache.dtype != torch.float8_e4m3fn:
        return False
    *strides, last = cache.stride()
    return last == 1 and all(n % 2 == 0 for n in (cache.shape[-1], *strides, cache.storage_offset(), cache.data_ptr()))


def _page_token_head(cache: torch.Tensor) -> tuple[int, int, int]:
    return cache.stride(0), cache.stride(1), cache.stride(2) if cache.dim() == 4 else 0


def is_wide(x: torch.Tensor, *dims: int) -> bool:
    """Whether one of the dimensions reaches over 2^31 elements or more."""
    return any((x.shape[dim] - 1) * x.stride(dim) >= 2**31 for dim in dims)


def _are_token_rows(k_cache: torch.Tensor, v_cache: torch.Tensor, head_dim: int, v_dim: int, block_n: int) -> bool:
    """Whether descriptors of `block_n` tokens can read the caches. They cannot mask a head's padding: the next head's numbers
    would stand there."""
    whole = sum(tuning.head_parts(head_dim)) == head_dim and tuning.value_width(v_dim) == v_dim
    return whole and all(_is_token_rows(cache, block_n) for cache in (k_cache, v_cache))


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


def result_of(call: AttentionCall) -> torch.Tensor:
    """`AttentionCall.new_result`, of a call that may be `repeated`."""
    return empty((*call.q.shape[:-1], call.v_head_dim), call.q.dtype, call.q.device) if call.out is None else call.out


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def packed(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def window_within(window_left: int, block_tables: torch.Tensor, page_size: int) -> int:
    """`window_left`, or -1 if it hides no key that the tables have room for: kernels subtract it from positions, in int32."""
    return window_left if window_left < block_tables.shape[1] * page_size else -1


class Operands(NamedTuple):
    """What all launches of a call are made of.

    Attributes:
        out: `[..., num_heads, v_head_dim]`, contiguous, to be written.
        q, block_tables, seq_lens, tree_mask, q_indptr, sinks: as in the call, in layouts that kernels read.
        mask_len: 0 without a `tree_mask`. window: -1 for none. softmax: `softmax_arguments`.
        kv_heads, group: query heads are `kv_heads * group`.
        rows: of queries per (request, KV head), the most of them if ragged.
    """

    out: torch.Tensor
    q: torch.Tensor
    keys: Keys
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    tree_mask: torch.Tensor | None
    mask_len: int
    q_indptr: torch.Tensor | None
    sinks: torch.Tensor | None
    softmax: tuple[float, float, float]
    window: int
    has_softcap: bool
    kv_heads: int
    group: int
    rows: int
    config: tuning.Config

    @property
    def mask_stride(self) -> int:
        return 0 if self.tree_mask is None else self.tree_mask.stride(0)


def operands(
    call: AttentionCall, out: torch.Tensor, window: int, choose: Callable[..., tuning.Config], config: tuning.Config | None
) -> Operands:
    """Of a call whose result goes into `out`; `choose` gets what `tuning.choose` does, unless there is a `config`."""
    q, k_cache, tree_mask, sinks, q_indptr = call.q, call.k_cache, call.tree_mask, call.sinks, call.q_indptr
    q = unit_rows(q)
    if tree_mask is not None:
        tree_mask = tree_mask.contiguous() if is_wide(tree_mask, 0) else unit_rows(tree_mask)
    heads, head_dim = q.shape[-2:]
    v_dim, shared_kv = out.shape[-1], call.kv_lora_rank is not None
    kv_heads = 1 if shared_kv else k_cache.shape[2]
    group = heads // kv_heads
    rows = (q.shape[1] if q_indptr is None else call.max_q_len) * group
    if config is None:
        page = k_cache.shape[1]
        if tuning.head_parts(head_dim)[1] or not _are_token_rows(k_cache, call.v_cache, head_dim, v_dim, page):
            page = 0
        config = choose(arch_of(q.device), shared_kv, head_dim, v_dim, k_cache.element_size(), rows, window, page)
    keys = kernel_keys(q, k_cache, call.v_cache, v_dim, shared_kv, config)
    if config.full and not keys.tma:  # it was said of descriptors; of pointers it was compared with binaries of sm_90
        by_pointers, sizes = replace(config, tma=False), (shared_kv, head_dim, v_dim, k_cache.element_size())
        full = config.tma and arch_of(q.device) == 90 and tuning.fills(by_pointers, 90, *sizes)
        config = replace(config, full=full)
    return Operands(
        out,
        q,
        keys,
        unit_rows(call.block_tables),
        call.seq_lens.contiguous(),
        tree_mask,
        0 if tree_mask is None else call.mask_len,
        packed(q_indptr),
        packed(sinks),
        softmax_arguments(call.scale, call.k_scale, call.v_scale, call.softcap),
        window,
        call.softcap > 0,
        kv_heads,
        group,
        rows,
        config,
    )
