"""Reference cache writes: scatters that drop negative slots, on GPUs without a host sync."""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


def check_slots(op: str, arg: str, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """On CPU an out-of-range slot raises before anything is written."""
    capacity = cache.shape[0] * cache.shape[1]
    if slots.device.type == "cpu" and slots.numel() and int(slots.max()) >= capacity:
        raise IndexError(f"{op}: `{arg}` must be below {capacity} (the cache's slots), got {int(slots.max())}")


def _write_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> None:
    """`cache[slots[i]] = rows[i]` where `valid[i]`."""
    if slots.device.type == "cpu":  # nothing waits for a look at the values
        if not valid.all():
            slots, rows = slots[valid], rows[valid]
    else:
        slots, rows = repeated(cache, slots, rows, valid)
    page_size, slots = cache.shape[1], slots.long()
    index = (slots // page_size, slots % page_size)
    if cache.dtype == torch.float8_e4m3fn:  # index_put has no fp8 kernel; the bytes are what is moved
        cache.view(torch.uint8).index_put_(index, rows.to(cache.dtype).view(torch.uint8))
    else:
        cache.index_put_(index, rows.to(cache.dtype))


def repeated(
    cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and rows as many as there were, of which all may be written: a scatter that needs no sync and no spare slot.

    Invalid rows repeat the first valid write (equal values at one address: no race), or, when none is valid, rewrite slot 0
    with what it holds.
    """
    page_size = cache.shape[1]
    first = valid.to(torch.int32).argmax(0, keepdim=True)  # of shape [1]: indexing with a 0-dim tensor would sync
    any_valid = valid.any()
    target = torch.where(any_valid, slots[first], 0)
    keep = valid.reshape(-1, *([1] * (rows.dim() - 1)))
    value = torch.where(any_valid, rows[first], cache[target // page_size, target % page_size].to(rows.dtype))
    return torch.where(valid, slots, target), torch.where(keep, rows, value)


def _quantize(values: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float8_e4m3fn:
        return values
    # e4m3fn has no infinity: an unclamped overflow would become NaN.
    return (values.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(dtype).float()


def append_kv(k_cache, v_cache, k, v, slots, k_scale: float, v_scale: float) -> None:
    if slots.numel() == 0:
        return
    check_slots("append_kv", "slots", slots, k_cache)
    valid = slots >= 0
    _write_rows(k_cache, slots, _quantize(k, k_scale, k_cache.dtype), valid)
    _write_rows(v_cache, slots, _quantize(v, v_scale, v_cache.dtype), valid)


def append_mla_kv(kv_cache, c_kv, k_rope, slots, kv_scale: float) -> None:
    if slots.numel() == 0:
        return
    check_slots("append_mla_kv", "slots", slots, kv_cache)
    _write_rows(kv_cache, slots, _quantize(torch.cat([c_kv, k_rope], -1), kv_scale, kv_cache.dtype), slots >= 0)


def move_kv(caches, src_slots, dst_slots) -> None:
    if src_slots.numel() == 0:
        return
    for cache in caches:
        check_slots("move_kv", "src_slots", src_slots, cache)
        check_slots("move_kv", "dst_slots", dst_slots, cache)
        valid = (src_slots >= 0) & (dst_slots >= 0)
        source = torch.where(valid, src_slots, 0).long()
        page_size = cache.shape[1]
        stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
        rows = stored[source // page_size, source % page_size]
        _write_rows(stored, dst_slots, rows, valid)
