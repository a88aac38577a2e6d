"""Arrival counters of the split kernels, one set per kernel and stream, and one per kernel and CUDA graph: launches that run at
the same time must not count together, and each kernel leaves its own counters in another state.

A graph is replayed on any stream, so counters of the stream that it was captured on would not do.
"""

from __future__ import annotations

import torch

from spec_ops.backends.capture import capture_of_current_stream
from spec_ops.backends.workspace import LOCK, indexed, kept, zeros_outside_graph_pools

SLAB = 1 << 22  # counters that are allocated at once: 16 MiB
LEAST = 1 << 10  # counters of a set: a slab has room for 4096 of them

_Key = tuple[str, int, int, int]  # kernel, device, stream, capture
_sets: dict[_Key, torch.Tensor] = kept({})
_slabs: dict[int, torch.Tensor] = kept({})  # by address: graphs hold sets that others have taken the place of
_room: dict[int, torch.Tensor] = kept({})  # by device: what is left of its last slab


def arrival_counters(device: torch.device, count: int, kernel: str = "split_kv") -> torch.Tensor:
    """At least `count` int32 counters for launches of `kernel` on the current stream, zero at the first.

    A set is a part of a slab, which is zeroed once. A CUDA graph keeps its set for good (nothing tells when a graph is gone):
    4 KiB for each kernel in it, four bytes a tile if it has more than 1024. `release_workspaces` frees all.

    Raises:
        RuntimeError: the first call on this device happens inside a CUDA graph capture.
    """
    if device.type != "cuda":  # Triton's interpreter
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = indexed(device).index
    key = (kernel, index, torch._C._cuda_getCurrentRawStream(index), capture_of_current_stream(index))
    found = _sets.get(key)
    return found if found is not None and found.numel() >= count else _new_set(key, count)


def _new_set(key: _Key, count: int) -> torch.Tensor:
    """A larger set takes the place of one that is too small: launches before it, and graphs, keep theirs."""
    _, index, _, capture = key
    count = max(LEAST, 1 << (count - 1).bit_length())
    with LOCK:
        found = _sets.get(key)
        if found is not None and found.numel() >= count:
            return found
        room = _room.get(index)
        if room is None and capture:
            raise RuntimeError(
                f"triton: the first call of a kernel whose programs count arrivals ({key[0]}) must come before a CUDA graph "
                "capture on each device"
            )
        if room is None or room.numel() < count:
            slab = zeros_outside_graph_pools(torch.device("cuda", index), 4 * max(SLAB, count))
            _slabs[slab.data_ptr()] = slab
            room = slab.view(torch.int32)
        _sets[key], _room[index] = room[:count], room[count:]
        return _sets[key]
