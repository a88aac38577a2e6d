"""Cache writes, one launch each: rows appended to paged caches, and rows moved within them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import ARCHS, FP8_ARCHS, ArgType, Variant
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, num_sms
from spec_ops.backends.triton.runtime.repeat import repeated

E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def stored(values, scale, dtype: tl.constexpr):
    """`values` as the cache holds them: e4m3 is scaled and clamped (it has no infinity), other types are copied."""
    if dtype == tl.float8e4nv:
        # div_rn: `/` is an approximate division, which can tip a tie between two e4m3 values.
        scaled = tl.math.div_rn(values.to(tl.float32), scale)
        values = tl.clamp(scaled, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return values.to(dtype)


@triton.jit
def slot_start(cache, slot, page_stride, slot_stride, PAGE_SIZE: tl.constexpr):
    """Pools have more than 2^31 elements: page and offset are multiplied as int64."""
    return cache + (slot // PAGE_SIZE).to(tl.int64) * page_stride + (slot % PAGE_SIZE).to(tl.int64) * slot_stride


@triton.jit
def _load_heads(rows, row, row_stride, head_stride, dim_stride, at, HEADS: tl.constexpr, DIM: tl.constexpr):
    head, dim = (at // DIM).to(tl.int64), (at % DIM).to(tl.int64)
    return tl.load(rows + row * row_stride + head * head_stride + dim * dim_stride, mask=at < HEADS * DIM)


@triton.jit
def _store_heads(start, head_stride, at, values, scale, HEADS: tl.constexpr, DIM: tl.constexpr):
    values = stored(values, scale, start.dtype.element_ty)
    tl.store(start + (at // DIM).to(tl.int64) * head_stride + at % DIM, values, mask=at < HEADS * DIM)


@triton.jit
def append_kv_kernel(
    k_cache, v_cache, k, v, slots,
    k_page_stride, k_slot_stride, k_head_stride, v_page_stride, v_slot_stride, v_head_stride,
    k_row_stride, k_row_head_stride, k_row_dim_stride, v_row_stride, v_row_head_stride, v_row_dim_stride, slots_stride,
    k_scale, v_scale,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program `(row, block)`: `BLOCK` elements of a row's keys, and as many of its values."""
    await_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row * slots_stride)
    # Before the slot is known, so that the three loads wait together.
    keys = _load_heads(k, row, k_row_stride, k_row_head_stride, k_row_dim_stride, at, HEADS, K_DIM)
    values = _load_heads(v, row, v_row_stride, v_row_head_stride, v_row_dim_stride, at, HEADS, V_DIM)
    if slot >= 0:
        start = slot_start(k_cache, slot, k_page_stride, k_slot_stride, PAGE_SIZE)
        _store_heads(start, k_head_stride, at, keys, k_scale, HEADS, K_DIM)
        start = slot_start(v_cache, slot, v_page_stride, v_slot_stride, PAGE_SIZE)
        _store_heads(start, v_head_stride, at, values, v_scale, HEADS, V_DIM)


def append_kv(k_cache, v_cache, k, v, slots, k_scale: float, v_scale: float) -> None:
    _, page_size, heads, k_dim = k_cache.shape
    v_dim = v_cache.shape[3]
    width = heads * max(k_dim, v_dim)
    if slots.shape[0] == 0 or width == 0:
        return
    block = min(triton.next_power_of_2(width), 2048)

    def start() -> None:
        launch(
            append_kv_kernel, (slots.shape[0], triton.cdiv(width, block)),
            k_cache, v_cache, k, v, slots,
            *k_cache.stride()[:3], *v_cache.stride()[:3], *k.stride(), *v.stride(), slots.stride(0), k_scale, v_scale,
            HEADS=heads, K_DIM=k_dim, V_DIM=v_dim, PAGE_SIZE=page_size, BLOCK=block, num_warps=4, early=True,
        )  # fmt: skip

    with device_guard(k_cache):
        repeated((append_kv, k_scale, v_scale), (k_cache, v_cache, k, v, slots), k_cache.device, start)


@triton.jit
def append_mla_kv_kernel(
    cache, c_kv, k_rope, slots, page_stride, slot_stride, c_row_stride, c_dim_stride, r_row_stride, r_dim_stride, slots_stride,
    scale, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, RANK_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program `row`: its latent, then its rotary key."""
    await_predecessors(PDL)
    row = tl.program_id(0).to(tl.int64)
    c_dim, r_dim = tl.arange(0, RANK_BLOCK), tl.arange(0, ROPE_BLOCK)
    slot = tl.load(slots + row * slots_stride)
    latent = tl.load(c_kv + row * c_row_stride + c_dim.to(tl.int64) * c_dim_stride, mask=c_dim < RANK)
    rotary = tl.load(k_rope + row * r_row_stride + r_dim.to(tl.int64) * r_dim_stride, mask=r_dim < ROPE)
    if slot >= 0:
        start = slot_start(cache, slot, page_stride, slot_stride, PAGE_SIZE)
        tl.store(start + c_dim, stored(latent, scale, cache.dtype.element_ty), mask=c_dim < RANK)
        tl.store(start + RANK + r_dim, stored(rotary, scale, cache.dtype.element_ty), mask=r_dim < ROPE)


def append_mla_kv(kv_cache, c_kv, k_rope, slots, kv_scale: float) -> None:
    if slots.shape[0] == 0:
        return
    rank, rope = c_kv.shape[1], k_rope.shape[1]

    def start() -> None:
        launch(
            append_mla_kv_kernel, (slots.shape[0],),
            kv_cache, c_kv, k_rope, slots,
            *kv_cache.stride()[:2], *c_kv.stride(), *k_rope.stride(), slots.stride(0), kv_scale,
            RANK=rank, ROPE=rope, PAGE_SIZE=kv_cache.shape[1],
            RANK_BLOCK=triton.next_power_of_2(max(rank, 1)), ROPE_BLOCK=triton.next_power_of_2(max(rope, 1)), num_warps=2,
            early=True,
        )  # fmt: skip

    with device_guard(kv_cache):
        repeated((append_mla_kv, kv_scale), (kv_cache, c_kv, k_rope, slots), kv_cache.device, start)


# Rows that one block holds in registers: bytes of each row, and warps. At least a sector (32 bytes), so that what is fetched is
# used; for few rows wide enough to keep every thread busy.
MOVE_TILES = {16: (256, 4), 64: (128, 4), 256: (64, 8), 1024: (32, 16), 4096: (32, 32)}
SELECT_RUN = tl.constexpr(16)


@triton.jit
def _pick(items, index):
    """`items[index]` of a tuple of pointers: runs of selects, each after a branch, since one long chain takes a microsecond."""
    picked = items[0]
    for start in tl.static_range(0, len(items), SELECT_RUN):
        if (index >= start) & (index < start + SELECT_RUN):
            for i in tl.static_range(start, min(start + SELECT_RUN, len(items))):
                picked = tl.where(index == i, items[i], picked)
    return picked


@triton.jit
def _move_columns(
    cache, src, dst, src_stride, dst_stride, n, stage, block,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, OUTER: tl.constexpr,
    OUTER_STRIDE: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of columns of every row, all rows read before one is written. No other program touches these columns."""
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    offset = (column // INNER).to(tl.int64) * OUTER_STRIDE + column % INNER
    row = tl.arange(0, ROWS)
    if stage is None:
        source = tl.load(src + row.to(tl.int64) * src_stride, mask=row < n, other=-1)
        target = tl.load(dst + row.to(tl.int64) * dst_stride, mask=row < n, other=-1)
        live = ((source >= 0) & (target >= 0))[:, None] & (column < OUTER * INNER)[None, :]
        start = slot_start(cache, source, PAGE_STRIDE, SLOT_STRIDE, PAGE_SIZE)
        values = tl.load(start[:, None] + offset[None, :], mask=live)
        tl.debug_barrier()
        start = slot_start(cache, target, PAGE_STRIDE, SLOT_STRIDE, PAGE_SIZE)
        tl.store(start[:, None] + offset[None, :], values, mask=live)
    else:
        place = stage.to(tl.pointer_type(cache.dtype.element_ty), bitcast=True) + tl.program_id(0).to(tl.int64) * n * COLUMNS
        for writing in tl.static_range(2):
            for first in range(0, n, ROWS):
                at = first + row
                source = tl.load(src + at.to(tl.int64) * src_stride, mask=at < n, other=-1)
                target = tl.load(dst + at.to(tl.int64) * dst_stride, mask=at < n, other=-1)
                live = ((source >= 0) & (target >= 0))[:, None] & (column < OUTER * INNER)[None, :]
                slot = target if writing else source
                stored = slot_start(cache, slot, PAGE_STRIDE, SLOT_STRIDE, PAGE_SIZE)[:, None] + offset[None, :]
                staged = place + at.to(tl.int64)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
                if writing:
                    tl.store(stored, tl.load(staged, mask=live), mask=live)
                else:
                    tl.store(staged, tl.load(stored, mask=live), mask=live)
            tl.debug_barrier()


@triton.jit(do_not_specialize=["n", "total"])
def move_kv_kernel(
    groups, src, dst, src_stride, dst_stride, n, total, stage, GEOMETRY: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """Work item: one block of columns of one cache. `groups` holds the caches of each geometry."""
    await_predecessors(PDL)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        first = 0
        for g in tl.static_range(len(GEOMETRY)):
            # No name for GEOMETRY[g][0]: Triton 3.6 allows no constexpr to be assigned again in an unrolled loop.
            item = work - first
            if (item >= 0) & (item < GEOMETRY[g][0] * len(groups[g])):
                cache = _pick(groups[g], item // GEOMETRY[g][0])
                _move_columns(
                    cache, src, dst, src_stride, dst_stride, n, stage, item % GEOMETRY[g][0],
                    GEOMETRY[g][1], GEOMETRY[g][2], GEOMETRY[g][3], GEOMETRY[g][4],
                    GEOMETRY[g][5], GEOMETRY[g][6], GEOMETRY[g][7], ROWS,
                )  # fmt: skip
            first += GEOMETRY[g][0] * len(groups[g])


def _as_runs(cache: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[int, int, int]]]:
    """The cache, its rows being `outer` runs of `inner` contiguous elements: `(cache, (outer, outer_stride, inner))`; several
    parts of it where its row is more scattered than that."""
    runs: list[list[int]] = []  # [size, stride], innermost first
    for size, stride in zip(reversed(cache.shape[2:]), reversed(cache.stride()[2:]), strict=True):
        if runs and (size == 1 or stride == runs[-1][0] * runs[-1][1]):
            runs[-1][0] *= size
        else:
            runs.append([size, stride])
    if len(runs) > 2:
        for part in cache.unbind(2):
            yield from _as_runs(part)
    else:
        outer, stride = runs[1] if len(runs) == 2 else (1, 0)
        yield cache, (outer, stride, runs[0][0])


def move_kv(caches: Sequence[torch.Tensor], src_slots, dst_slots) -> None:
    n = src_slots.shape[0]
    if n == 0:
        return
    tile = next((rows for rows in MOVE_TILES if n <= rows), max(MOVE_TILES))
    row_bytes, num_warps = MOVE_TILES[tile]
    groups: dict[tuple, list[torch.Tensor]] = {}
    total = 0
    for cache in caches:
        for part, (outer, outer_stride, inner) in _as_runs(cache):
            if width := outer * inner:
                columns = min(row_bytes // part.element_size(), triton.next_power_of_2(width))
                blocks = triton.cdiv(width, columns)
                geometry = (blocks, part.shape[1], *part.stride()[:2], outer, outer_stride, inner, columns)
                groups.setdefault((part.dtype, geometry), []).append(part)
                total += blocks
    if not total:
        return
    grid, stage = total, None
    if n > tile:  # more rows than registers hold: they pass through memory, and fewer programs keep that small
        grid = min(total, num_sms(src_slots.device))
        stage = torch.empty(grid * n * row_bytes, dtype=torch.uint8, device=src_slots.device)
    with device_guard(src_slots):
        launch(
            move_kv_kernel, (grid,),
            tuple(map(tuple, groups.values())), src_slots, dst_slots, src_slots.stride(0), dst_slots.stride(0), n, total, stage,
            GEOMETRY=tuple(geometry for _, geometry in groups), ROWS=tile, num_warps=num_warps,
        )  # fmt: skip


def ahead() -> Iterator[Variant]:
    index = "*i64:16"
    for cache, value, archs in (("bf16", "bf16", ARCHS), ("fp8e4nv", "bf16", FP8_ARCHS)):
        yield Variant(
            f"append_kv {cache}, 8 heads of 128",
            append_kv_kernel,
            {"k_cache": f"*{cache}:16", "v_cache": f"*{cache}:16", "k": f"*{value}:16", "v": f"*{value}:16", "slots": index}
            | {f"{x}_{s}_stride": "i64:16" for x in "kv" for s in ("page", "slot", "head", "row", "row_head")}
            | {"k_scale": "fp32", "v_scale": "fp32"},
            {"k_row_dim_stride": 1, "v_row_dim_stride": 1, "slots_stride": 1}
            | {"HEADS": 8, "K_DIM": 128, "V_DIM": 128, "PAGE_SIZE": 64, "BLOCK": 1024},
            archs=archs,
        )
        yield Variant(
            f"append_mla_kv {cache}, 512 + 64",
            append_mla_kv_kernel,
            {"cache": f"*{cache}:16", "c_kv": f"*{value}:16", "k_rope": f"*{value}:16", "slots": index, "scale": "fp32"}
            | {f"{name}_stride": "i64:16" for name in ("page", "slot", "c_row", "r_row")},
            {"c_dim_stride": 1, "r_dim_stride": 1, "slots_stride": 1}
            | {"RANK": 512, "ROPE": 64, "PAGE_SIZE": 64, "RANK_BLOCK": 512, "ROPE_BLOCK": 64},
            num_warps=2,
            archs=archs,
        )
    for tile, (row_bytes, num_warps) in MOVE_TILES.items():
        for stage in (None, "*u8:16"):
            if stage is None or tile == max(MOVE_TILES):
                columns = row_bytes // 2
                signature: dict[str, ArgType] = {"groups": (("*bf16:16",) * 64,), "src": index, "dst": index}
                signature |= {"n": "i32", "total": "i32"} | ({"stage": stage} if stage else {})
                constexprs: dict[str, Any] = {"src_stride": 1, "dst_stride": 1, "ROWS": tile}
                constexprs["GEOMETRY"] = ((1024 // columns, 64, 64 * 1024, 1024, 1, 0, 1024, columns),)
                constexprs |= {} if stage else {"stage": None}
                name = f"move_kv of {tile} rows, 64 caches{', staged' if stage else ''}"
                yield Variant(name, move_kv_kernel, signature, constexprs, num_warps=num_warps)
