"""A CUDA context for every thread that launches.

A thread that has called nothing of the CUDA runtime on a device has none there. Triton makes TMA descriptors, which need one,
before it makes one, and then makes that of the first device, whichever is current.
"""

from __future__ import annotations

import threading

import torch


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.devices: set[int] = set()


_contexts = _Contexts()


def make_context(index: int | None = None) -> None:
    """Give this thread a CUDA context of the current device. A thread that captures a graph has it.

    Args:
        index: the current device, where that is known: it need not be asked for.
    """
    if index in _contexts.devices or not torch.cuda.is_initialized():
        return
    device = torch.cuda.current_device()
    if device not in _contexts.devices:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.mem_get_info()  # any call of the runtime does; torch skips `cudaSetDevice` for the current device
        _contexts.devices.add(device)
