"""Scratch memory and semaphores that kernels of other packages keep between launches.

Owned here rather than by an op's schema: a buffer declared as mutated would be copied by functionalization, and a buffer that
is allocated and zeroed per call costs a launch. One per use, device and stream; zeroed once, since the kernels leave their
semaphores at zero; never moved, and freed by `release_workspaces` alone, since CUDA graphs hold its address.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from spec_ops.backends.capture import capture_of_current_stream, relax_this_thread

_Buffers = TypeVar("_Buffers", bound=dict)
LOCK = threading.RLock()  # of all that is kept: two threads must not make a buffer twice, and get one each
_buffers: dict[tuple[str, torch.device, int], torch.Tensor] = {}
_kept: list[dict[Any, Any]] = [_buffers]


def kept(buffers: _Buffers) -> _Buffers:
    """`buffers` itself, which `release_workspaces` will empty: of tensors, or of what holds some."""
    _kept.append(buffers)
    return buffers


def release_workspaces() -> None:
    """Free the memory that kernels, ours included, keep between launches; later calls make it anew.

    For a process that goes on without this package, or that accounts for its memory. CUDA graphs recorded before must not be
    replayed after: they hold the old addresses.
    """
    with LOCK:
        held = [buffer for buffers in _kept for buffer in buffers.values() if isinstance(buffer, torch.Tensor)]
        for device in {buffer.device for buffer in held if buffer.is_cuda}:
            torch.cuda.synchronize(device)  # launches on other streams than the one that allocated may still use it
        for buffers in _kept:
            buffers.clear()


def workspace(use: str, device: torch.device, num_bytes: int) -> torch.Tensor:
    """`[num_bytes]` uint8, the same at every call with this `use` on the current stream of `device`; zero at the first.

    Graphs that were captured on one stream share a buffer: do not replay two of them at the same time.

    Raises:
        ValueError: `use` has a smaller buffer already. RuntimeError: the first call comes inside a CUDA graph capture.
    """
    device = indexed(device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (use, device, stream)
    found = _buffers.get(key)
    if found is None:
        with LOCK:
            found = _buffers.get(key)
            if found is None:
                if device.type == "cuda" and capture_of_current_stream(device.index):
                    raise RuntimeError(
                        f"workspace {use!r}: its first use on a stream must come before a CUDA graph capture: call the same "
                        "step once, or `spec_ops.backends.warm_up`, on that stream"
                    )
                found = _buffers[key] = zeros_outside_graph_pools(device, num_bytes)
    if found.numel() < num_bytes:
        raise ValueError(f"workspace {use!r}: `num_bytes` must be at most {found.numel()}, got {num_bytes}")
    return found[:num_bytes]


def indexed(device: torch.device) -> torch.device:
    """`device` with its index: `cuda` alone is the current one of whichever thread asks."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def zeros_outside_graph_pools(device: torch.device, num_bytes: int) -> torch.Tensor:
    """`[num_bytes]` uint8 zeros from the ordinary memory pool, in place when this returns.

    On a thread of its own: while torch's CUDA graph trees warm a function up, they serve the calling *thread* from the graph's
    pool (`_cuda_beginAllocateCurrentThreadToPool`), and later restore that pool to a state that does not know this buffer.
    """
    device = indexed(device)

    def allocate() -> torch.Tensor:
        if device.type != "cuda":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        relax_this_thread()
        # On the legacy default stream, which is this new thread's current one. torch's own streams do not synchronize with
        # it; a capture on a stream that another library made without `cudaStreamNonBlocking` would be invalidated.
        made = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).synchronize()
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate).result()
