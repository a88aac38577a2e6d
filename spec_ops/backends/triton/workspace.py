"""Arrival counters of the split kernels, one set per kernel, device and stream: each kernel leaves its own in another state."""

from __future__ import annotations

import torch

from spec_ops.backends.workspace import kept, zeros_outside_graph_pools

COUNTERS = 1 << 15  # tiles of one launch
STREAMS = 128  # per device; torch has 65 of its own

_slabs: dict[tuple[int, str], torch.Tensor] = kept({})
_parts: dict[tuple[int, int], int] = {}


def arrival_counters(device: torch.device, tiles: int, kernel: str = "split_kv") -> torch.Tensor:
    """Zeroed int32 counters for `tiles` tiles, for launches of `kernel` on the current stream.

    One slab per kernel and device is zeroed at the first call; a stream that comes later, even one that is being captured,
    gets a part of it without an allocation.

    Raises:
        ValueError: more tiles than counters. RuntimeError: the first call on this device happens inside a CUDA graph capture,
            or there are more streams than parts.
    """
    if tiles > COUNTERS:
        raise ValueError(f"triton attention: batch size x KV heads x row blocks must be at most {COUNTERS}, got {tiles}")
    if device.type != "cuda":  # Triton's interpreter
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    slab = _slabs.get((index, kernel))
    if slab is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("triton attention: its first call on a device must come before a CUDA graph capture")
        raw = zeros_outside_graph_pools(device, STREAMS * COUNTERS * 4)
        slab = _slabs[index, kernel] = raw.view(torch.int32).view(STREAMS, COUNTERS)
    stream = torch.cuda.current_stream(device).cuda_stream
    part = _parts.setdefault((index, stream), sum(1 for used, _ in _parts if used == index))
    if part >= STREAMS:
        raise RuntimeError(f"triton attention: more than {STREAMS} streams on device {index}")
    return slab[part]
