"""The attention steps on Triton kernels: what the `triton` backend declares, and `run`, the launcher of all of them.

A call's shapes, layouts, windows and limits are the same for every family of kernels; a `Policy` says what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention import tuning
from spec_ops.backends.triton.attention.operands import Operands, operands, result_of, window_within
from spec_ops.backends.triton.attention.ragged import ragged_attention_kernel
from spec_ops.backends.triton.attention.split_kv import split_kv_attention_kernel
from spec_ops.backends.triton.runtime.cooperative import resident_or_none
from spec_ops.backends.triton.runtime.launch import arch_of, device_guard, launch, num_sms, on_gpu
from spec_ops.backends.triton.runtime.repeat import counted, empty, repeated

MAX_GRID = 65_535  # CUDA's limit of a grid's third dimension, which counts requests


class Policy(NamedTuple):
    """A family of kernels.

    Attributes:
        backend: its name.
        choose, choose_ragged: the block shape for a call; take what `tuning.choose` does.
        uniform, ragged: launch the kernels of a call.
        clears_padding: the ragged kernel writes the rows past `q_indptr[-1]`; otherwise they are zeros before.
        max_requests: of a uniform and of a ragged call; None where a grid does not limit them.
        special: serves a call that other kernels are faster for, or says None.
    """

    backend: str
    choose: Callable[..., tuning.Config]
    choose_ragged: Callable[..., tuning.Config]
    uniform: Callable[[Operands], None]
    ragged: Callable[[Operands], None]
    clears_padding: bool
    max_requests: tuple[int | None, int | None]
    special: Callable[[AttentionCall], torch.Tensor | None] = lambda call: None


def run(call: AttentionCall, policy: Policy, config: tuning.Config | None = None) -> torch.Tensor:
    """The result of `call`; `config` in place of the policy's choice.

    Raises:
        ValueError: more requests than a grid holds.
    """
    q, bs, ragged = call.q, call.seq_lens.shape[0], call.is_ragged
    most = policy.max_requests[ragged]
    if most is not None and bs > most:
        raise ValueError(
            f"{call.step}: `seq_lens` must hold at most {most} requests, got {bs}: a grid of the backend "
            f"{policy.backend} has no room for more; split the batch"
        )
    window = window_within(call.window_left, call.block_tables, call.page_size)
    if config is None and not ragged and (served := policy.special(call)) is not None:
        return served
    zeros = ragged and not policy.clears_padding
    out = result_of(call)
    if zeros:
        out.zero_()
    if out.numel() == 0 or (zeros and bs == 0):
        return out
    o = operands(call, out, window, policy.choose_ragged if ragged else policy.choose, config)
    with device_guard(q):
        (policy.ragged if ragged else policy.uniform)(o)
    return out


def _aligned_ranges(bs: int, ranges: int) -> int:
    """A few ranges less, if that makes requests of equal length end where ranges end."""
    aligned = ranges // bs * bs if bs <= ranges else triton.cdiv(bs, triton.cdiv(bs, ranges))
    return aligned if aligned >= 0.9 * ranges else ranges


def _launch_split(o: Operands) -> None:
    config, keys = o.config, o.keys
    bs, q_len = o.q.shape[:2]
    sms = num_sms(o.q.device)
    row_blocks = triton.cdiv(o.rows, config.block_m)
    tiles = o.kv_heads * row_blocks
    ranges = _aligned_ranges(bs, max(1, sms * config.programs // tiles))
    # Two unfinished tiles a program: accumulators, then maxima and sums.
    slots = ranges * tiles * 2 * config.block_m
    partial = empty((slots * (keys.block_dv + 2),), torch.float32, o.q.device)

    def start(cooperative: bool) -> bool:
        launch(
            split_kv_attention_kernel, (ranges * tiles,), o.q, *keys.tensors, o.out, o.block_tables, o.seq_lens, o.tree_mask,
            o.sinks, partial, partial[slots * keys.block_dv :], counted(o.q.device, ranges * tiles, "split_kv"),
            *o.softmax, bs, ranges,
            *o.q.stride()[:3], *keys.strides, o.block_tables.stride(0), o.mask_stride,
            Q_LEN=q_len, GROUP=o.group, KV_HEADS=o.kv_heads, ROW_BLOCKS=row_blocks, MASK_LEN=o.mask_len,
            WINDOW=o.window, HAS_SINKS=o.sinks is not None, HAS_SOFTCAP=o.has_softcap,
            BS=max(2, triton.next_power_of_2(bs)), MIN_BLOCKS=config.min_blocks, COOPERATIVE=cooperative,
            BOXES=keys.tma and keys.constants["PAGE"] < config.block_n,
            WARPS=config.num_warps, TILE=triton.next_power_of_2(min(o.rows, config.block_m)) * keys.block_dv,
            maxnreg=config.max_registers, early=config.full, **keys.constants, num_warps=config.num_warps,
            launch_cooperative_grid=cooperative,
        )  # fmt: skip
        return True

    # More programs than are resident at once cannot wait for one another.
    cooperative = config.cooperative and on_gpu(o.q) and ranges * tiles <= sms * config.programs
    grid = ("split", ranges * tiles, config)
    if not cooperative or resident_or_none(grid, lambda: start(True)) is None:
        start(False)


def _launch_ragged(o: Operands) -> None:
    bs, row_blocks = o.seq_lens.shape[0], triton.cdiv(o.rows, o.config.block_m)
    launch(
        ragged_attention_kernel, (row_blocks, o.kv_heads, bs + 1),
        o.q, *o.keys.tensors, o.out, o.block_tables, o.seq_lens, o.q_indptr, o.sinks,
        *o.softmax, bs, o.q.shape[0], row_blocks,
        *o.q.stride()[:2], *o.keys.strides, o.block_tables.stride(0),
        GROUP=o.group, KV_HEADS=o.kv_heads, WINDOW=o.window, HAS_SINKS=o.sinks is not None, HAS_SOFTCAP=o.has_softcap,
        **o.keys.constants, num_warps=o.config.num_warps,
    )  # fmt: skip


def _on_hopper(call: AttentionCall) -> torch.Tensor | None:
    """The result of the Gluon kernel for sm_90 that serves the call; None if there is none, or a part of the GPU is too small
    for it. Its programs wait for one another; those of the kernels here need not."""
    q = call.q
    if not on_gpu(q) or arch_of(q.device) != 90:
        return None
    # Imported here: Gluon is not there on other platforms.
    if call.is_mla:
        from spec_ops.backends.triton.attention.hopper import mla, mla_few

        if not mla.supports(call):
            return None
        kernel: Callable[[AttentionCall], torch.Tensor] = mla_few.mla if mla_few.preferred(q) else mla.mla
    else:
        from spec_ops.backends.triton.attention.hopper import gqa

        if not gqa.supports(90, call):
            return None
        kernel = gqa.mha
    with device_guard(q):
        return resident_or_none((kernel.__module__, q.shape, call.num_kv_heads), lambda: kernel(call))


SPLIT = Policy(
    "triton",
    choose=tuning.choose,
    choose_ragged=lambda *shape: tuning.choose_ragged(*shape[:6]),  # of any window and pages
    uniform=_launch_split,
    ragged=_launch_ragged,
    clears_padding=True,
    max_requests=(None, MAX_GRID - 1),  # padded rows are one more
    special=_on_hopper,
)


def attention(call: AttentionCall, config: tuning.Config | None = None) -> torch.Tensor:
    """Every attention step; `config` to measure or compile one."""
    if config is not None:
        return run(call, SPLIT, config)
    numbers = (call.mask_len, call.max_q_len, call.scale, call.window_left, call.softcap, call.k_scale, call.v_scale)
    given = (
        call.q, call.k_cache, None if call.is_mla else call.v_cache, call.block_tables, call.seq_lens, call.tree_mask,
        call.q_indptr, call.sinks, call.out,
    )  # fmt: skip
    return repeated((attention, call.step, call.kv_lora_rank, numbers), given, call.q.device, lambda: run(call, SPLIT))
