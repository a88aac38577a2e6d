"""What torch does not tell of graph captures: which one records a stream, what memory it may use, how to allocate beside one.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_ACTIVE, _RELAXED = 1, 2  # of CUstreamCaptureStatus, of CUstreamCaptureMode


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # torch has loaded it


def _call(function: str, *args: Any) -> None:
    error = getattr(_driver(), function)(*args)
    if error != 0:
        raise RuntimeError(f"{function}: CUDA error {error}")


def capture_of_current_stream(index: int) -> int:
    """The id of the capture that records the current stream of CUDA device `index`; 0 if none does.

    No two captures of a process have one id. Outside of captures the driver is not asked: this is on the path of every call.
    """
    if index == torch.cuda.current_device():
        capturing = torch.cuda.is_current_stream_capturing()
    else:
        with torch.cuda.device(index):  # torch answers for the current device alone
            capturing = torch.cuda.is_current_stream_capturing()
    if not capturing:
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))
    _call("cuStreamGetCaptureInfo_v2", stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    if status.value != _ACTIVE:  # 2: the capture was invalidated, by a call that a capture forbids
        raise RuntimeError(
            f"cuStreamGetCaptureInfo_v2: the current stream of cuda:{index} is being captured, but its capture's status is "
            f"{status.value}, not {_ACTIVE} (active): an earlier call has ended or invalidated it"
        )
    return number.value


@functools.lru_cache(maxsize=64)  # captures that are under way, by their ids
def pool_of_capture(index: int, capture: int) -> tuple[int, int] | int:
    """The pool that torch serves the capture with this id, of the current stream of CUDA device `index`, from; `capture` itself
    if it has none.

    Graphs of one pool must not be replayed at the same time, since each one's intermediate results lie in it.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#sharing-memory-across-captures

    It has none if it was begun by something else than torch, or another allocator than torch's own serves it.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return capture
    probe = torch.empty(1, dtype=torch.uint8, device=torch.device("cuda", index))
    place = probe.data_ptr()
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        if segment["device"] == index and 0 <= place - segment["address"] < segment["total_size"]:
            return segment["segment_pool_id"] if any(segment["segment_pool_id"]) else capture
    return capture


def pools_in_use() -> set[tuple[int, tuple[int, int]]]:
    """Of each device, its index with the id of each pool of torch's that holds memory.

    A pool that a capture was served from holds some until its graphs and their results are gone. It is then given back by
    `cudaFree`, which waits for what runs on the device.
    """
    return {(segment["device"], segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot(include_traces=False)}


def current_context() -> int:
    """The handle of the current CUDA context, a green one where a part of the GPU is set apart; 0 if there is none."""
    if not torch.cuda.is_initialized():
        return 0
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value or 0


def relax_this_thread() -> None:
    """Lets the calling thread allocate while others capture: in CUDA's usual mode that fails, and ends their captures."""
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))
