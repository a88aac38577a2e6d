"""Scratch memory and semaphores that kernels of other packages keep between launches.

Owned here rather than by an op's schema: a buffer declared as mutated would be copied by functionalization, and a buffer that
is allocated and zeroed per call costs a launch. Zeroed once, since the kernels leave their semaphores at zero; never moved,
since CUDA graphs hold its address.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

from spec_ops.backends.capture import capture_of_current_stream, pool_of_capture, pools_in_use, relax_this_thread

_Buffers = TypeVar("_Buffers", bound=dict)
LOCK = threading.RLock()  # of all that is kept: two threads must not make a buffer twice, and get one each


class _Key(NamedTuple):
    """Who shares a buffer: launches that never run at the same time.

    Attributes:
        stream: of the launches; of a capture too, whose branches on several streams run at the same time.
        pool: of the CUDA graph that holds the launches (`pool_of_capture`); None outside of captures. A graph is replayed on
            any stream, at the same time as what was launched on the stream that it was captured on.
    """

    use: str
    device: torch.device
    stream: int
    pool: tuple[int, int] | int | None


_buffers: dict[_Key, torch.Tensor] = {}
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
    """`[num_bytes]` uint8, zero at the first call; the same at every call with this `use` on the current stream of `device`.

    While that stream is captured, the same for all graphs that share a memory pool: others may be replayed at the same time.
    A graph's buffer is freed when another graph needs a new one and the pool is gone, or by `release_workspaces`.

    Raises:
        ValueError: `use` has a smaller buffer already.
    """
    key = _key(use, indexed(device))
    found = _buffers.get(key)
    if found is None:
        with LOCK:
            found = _buffers.get(key)
            if found is None:
                if key.pool is not None:
                    _free_those_of_gone_pools()
                found = _buffers[key] = zeros_outside_graph_pools(key.device, num_bytes)
    if found.numel() < num_bytes:
        raise ValueError(f"workspace {use!r}: `num_bytes` must be at most {found.numel()}, got {num_bytes}")
    return found[:num_bytes]


def _key(use: str, device: torch.device) -> _Key:
    if device.type != "cuda":
        return _Key(use, device, 0, None)
    capture = capture_of_current_stream(device.index)
    pool = pool_of_capture(device.index, capture) if capture else None
    return _Key(use, device, torch._C._cuda_getCurrentRawStream(device.index), pool)


def _free_those_of_gone_pools() -> None:
    """A process may capture any number of graphs, one after the other, each with a pool of its own."""
    in_use = pools_in_use()  # under the lock: of a buffer that another thread has just made, the pool is among them
    for key in list(_buffers):
        if isinstance(key.pool, tuple) and (key.device.index, key.pool) not in in_use:
            del _buffers[key]


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
