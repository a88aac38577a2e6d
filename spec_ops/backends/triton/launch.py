"""What every launch needs: the device to launch on, and its size."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

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


class Launch(NamedTuple):
    """What a launch would have been given: `arguments` by the kernel's parameter names, the rest are compile options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


_recorded: list[Launch] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """`kernel[grid](*args, **kwargs)`, or a note of it inside `recorded`."""
    if _recorded is None:
        kernel[grid](*args, **kwargs)
        return
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | {n: kwargs.pop(n) for n in kernel.arg_names if n in kwargs}
    _recorded.append(Launch(kernel, arguments, kwargs))


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, launches are noted in the list and nothing runs: what is compiled ahead is then what would be launched."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None
