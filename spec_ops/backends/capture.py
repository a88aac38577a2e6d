"""What CUDA knows of graph captures and torch does not tell: which one records a stream, and how to allocate beside one.

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
