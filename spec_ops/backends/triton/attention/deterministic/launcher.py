"""The attention steps, batch-invariant: what the `triton-deterministic` backend declares. `kernels.py` says how."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention import tuning
from spec_ops.backends.triton.attention.deterministic.chunks import most_chunks
from spec_ops.backends.triton.attention.deterministic.kernels import (
    deterministic_attention_kernel,
    deterministic_combine_kernel,
    deterministic_extend_kernel,
)
from spec_ops.backends.triton.attention.launcher import MAX_GRID, Policy, run
from spec_ops.backends.triton.attention.operands import Operands
from spec_ops.backends.triton.runtime.launch import arch_of, launch, num_sms

CHUNK = 512  # keys of a unit: `chunks.py`
TILE_ROWS = 64  # the least that Hopper's and Blackwell's large products take
# Warps, stages and programs of tiles of 16 rows, by head_dim. On Hopper their products have the bits of those of 64 rows, from
# another instruction; of other head_dims and architectures nobody knows.
FEW_ROWS = {64: (1, 4, 4), 128: (2, 3, 2)}
READ = 8  # partial results of a row that are on their way at once when they are merged
PARTIAL_BYTES = 1 << 28  # most memory of a call for partial results; requests that find no place in it are not split


def choose(arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int, rows: int = TILE_ROWS) -> tuning.Config:
    """The tile shape of a model; of few rows another one, where that has the same bits. Nothing else here may depend on the
    number of queries, requests or keys."""
    config = tuning.choose(arch, shared_kv, head_dim, v_dim, kv_bytes, TILE_ROWS)
    large = 90 <= arch < 120  # 64 rows are one product, of four warps; elsewhere Triton divides rows and columns as it likes
    if not shared_kv and large and 64 < head_dim <= 128:
        # Each chunk refills its pipeline; meanwhile a second program on the multiprocessor computes.
        config = replace(config, num_warps=4, num_stages=3, programs=2)
    if shared_kv or kv_bytes == 1 or 100 <= arch < 120:  # MLA has no registers for pairs, and tensor memory gives whole rows
        return replace(config, ordered="" if large and config.num_warps <= 4 else "product")
    config = replace(config, ordered="pairs")
    if arch == 90 and rows <= 16 and head_dim == v_dim and head_dim in FEW_ROWS:
        warps, stages, programs = FEW_ROWS[head_dim]
        config = replace(config, block_m=16, num_warps=warps, num_stages=stages, programs=programs)
        config = tuning.fitted(config, arch, shared_kv, head_dim, v_dim, kv_bytes)
    return config


def choose_float32(arch: int, shared_kv: bool, head_dim: int, v_dim: int) -> tuning.Config:
    """`choose` for queries in float32, whose products are multiply-adds of single threads. They keep operands in registers, so
    tiles are small: on sm_90 no loop over keys of up to 128 numbers spills."""
    width = max(head_dim, v_dim)
    small = shared_kv and arch not in tuning.SHARED  # 99 KiB of shared memory, and MLA's keys of 32 tokens are 72
    return tuning.Config(
        block_m=16 if width > 128 else 32, block_n=16 if small else 32, num_warps=8 if width > 64 else 4, num_stages=2,
        programs=1, tma=False, ordered="product",
    )  # fmt: skip


def _queries_of_a_tile(o: Operands) -> int:
    """The most whose rows are in one tile, as a power of two; not by their number, which compiles nothing new."""
    rows, group = o.config.block_m, o.group
    aligned = rows % group == 0 or group % rows == 0
    queries = max(rows // group, 1) if aligned else (rows - 2) // group + 2
    return triton.next_power_of_2(max(min(queries, o.mask_len), 1))


def places_of(bs: int) -> int:
    """Of vectors with a number for each request. Not 32: Triton reduces vectors of a warp's width by `redux.sync`, and with the
    ptxas of Triton 3.6 (12.8.93) the attention kernel then took wrong requests and wrote out of bounds on sm_90. The schedule
    alone (`divide`, `find`) is compiled correctly, and so are other widths."""
    places = max(2, triton.next_power_of_2(bs))
    return 64 if places == 32 else places


def _launch_chunks(o: Operands) -> None:
    config, keys = o.config, o.keys
    bs, q_len = o.q.shape[:2]
    row_blocks = triton.cdiv(o.rows, config.block_m)
    tiles = o.kv_heads * row_blocks
    # As many chunks as a table's width allows: lengths are on the device.
    most = max(1, most_chunks(triton.cdiv(o.block_tables.shape[1] * keys.constants["PAGE"], CHUNK)))
    if o.window >= 0:
        most = min(most, (max(o.mask_len, q_len) + o.window) // CHUNK + 2)
    programs = num_sms(o.q.device) * config.programs
    ranges = max(1, programs // tiles)
    chunk_rows = o.kv_heads * o.rows
    capacity = min(bs * most, PARTIAL_BYTES // (4 * chunk_rows * (keys.block_dv + 2))) if most > 1 else 0
    numbers = capacity * chunk_rows * keys.block_dv
    partial = torch.empty(numbers + 2 * capacity * chunk_rows, dtype=torch.float32, device=o.q.device)
    partials = partial, partial[numbers:]
    common = {
        "GROUP": o.group, "KV_HEADS": o.kv_heads, "MASK_LEN": o.mask_len, "WINDOW": o.window, "HAS_SINKS": o.sinks is not None,
        "BS": places_of(bs), "CHUNK": CHUNK, "enable_fp_fusion": False,
    }  # fmt: skip
    launch(
        deterministic_attention_kernel, (min(programs, bs * most * tiles),),
        o.q, *keys.tensors, *(keys.caches if o.mask_len else (None, None)), o.out, o.block_tables, o.seq_lens, o.tree_mask,
        o.sinks, *partials, *o.softmax,
        bs, q_len, row_blocks, ranges, capacity, *o.q.stride()[:3], *keys.strides, o.block_tables.stride(0), o.mask_stride,
        HAS_SOFTCAP=o.has_softcap, QUERIES=_queries_of_a_tile(o), ORDERED=config.ordered, **keys.constants,
        num_warps=config.num_warps, early=config.full and keys.tma, **common,
    )  # fmt: skip
    if capacity > 0:
        # Four numbers a thread. Where rows are few, as many programs as there may be: one has little on its way.
        few = chunk_rows * bs <= 16 * num_sms(o.q.device)
        warps = max(1 if few else 4, keys.block_dv // 128)
        rows_each = max(1, 128 * warps // keys.block_dv)
        launch(
            deterministic_combine_kernel, (triton.cdiv(o.rows, rows_each), o.kv_heads, bs), o.out, o.seq_lens, o.sinks,
            *partials, o.softmax[1], bs, q_len, ranges, capacity,
            DV=keys.constants["DV"], BLOCK_DV=keys.block_dv, ROWS=rows_each, READ=READ, num_warps=warps, early=True,
            **common,
        )  # fmt: skip


def _launch_extend(o: Operands) -> None:
    launch(
        deterministic_extend_kernel, (triton.cdiv(o.rows, o.config.block_m), o.kv_heads, o.seq_lens.shape[0]),
        o.q, *o.keys.tensors, o.out, o.block_tables, o.seq_lens, o.q_indptr, o.sinks,
        *o.softmax, *o.q.stride()[:2], *o.keys.strides, o.block_tables.stride(0),
        GROUP=o.group, KV_HEADS=o.kv_heads, WINDOW=o.window, HAS_SINKS=o.sinks is not None, HAS_SOFTCAP=o.has_softcap,
        CHUNK=CHUNK, ORDERED=o.config.ordered, **o.keys.constants, num_warps=o.config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


DETERMINISTIC = Policy(
    "triton-deterministic",
    choose=lambda *shape: choose(*shape[:6]),  # not by window
    choose_ragged=lambda *shape: choose(*shape[:5]),
    uniform=_launch_chunks,
    ragged=_launch_extend,
    clears_padding=False,
    max_requests=(MAX_GRID, MAX_GRID),
)


def attention(call: AttentionCall, config: tuning.Config | None = None) -> torch.Tensor:
    """Every attention step; `config` to compile one."""
    if config is None and call.q.dtype == torch.float32:
        config = choose_float32(arch_of(call.q.device), call.is_mla, call.q.shape[-1], call.v_head_dim)
    return run(call, DETERMINISTIC, config)
