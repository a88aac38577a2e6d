"""What every launch needs: the device to launch on, and its size."""

from __future__ import annotations

import contextlib
import functools

import torch

INTERPRETER_SMS = 4  # on CPU, for Triton's interpreter: small, so that loops over work take more than one turn


def device_guard(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Makes the tensor's device current: Triton launches on the current one, whatever its arguments are on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; `INTERPRETER_SMS` for a CPU."""
    return _num_sms(device.index) if device.type == "cuda" else INTERPRETER_SMS


@functools.cache
def _num_sms(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
