"""What every launch needs: the device to launch on, its size, and how a kernel follows the one before it.

From sm_90 on a kernel may be launched while the one before it still runs (programmatic dependent launch), and waits for it
itself, which takes most of a launch out of the time between two kernels. All kernels wait; not all are launched early:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from spec_ops.backends.registry import device_arch
from spec_ops.backends.triton.runtime import background, repeat
from spec_ops.backends.triton.runtime.contexts import make_context

INTERPRETER_SMS = 4  # on CPU, for Triton's interpreter: small, so that loops over work take more than one iteration


@triton.jit
def await_predecessors(PDL: tl.constexpr):
    """What every kernel does before it reads or writes: after it, what earlier ones wrote is there, and what they read may be
    written.

    Then the next kernel may come as soon as a multiprocessor has room. It waits here for this one's end, as this one did, so at
    most two kernels are on the GPU, and all programs of the first have begun: those that wait for one another all have.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def device_guard(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Makes the tensor's device current: Triton launches on the current one, whatever its arguments are on."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


class Target(NamedTuple):
    """The GPU that launchers choose for inside `recorded`, wherever their tensors are: 90 for sm_90, and its
    multiprocessors."""

    arch: int
    sms: int

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """A CUDA device of this machine."""
        return cls(arch_of(device), num_sms(device))


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device, or of the target of `recorded`; `INTERPRETER_SMS` for a CPU."""
    if device.type == "cuda":
        return _num_sms(device.index)
    target = _recording.target
    return INTERPRETER_SMS if target is None else target.sms


def arch_of(device: torch.device) -> int:
    """Compute capability (90 for sm_90) of a CUDA device, or of the target of `recorded`; Triton's interpreter stands in for
    sm_90."""
    target = _recording.target
    return device_arch(device) or (90 if target is None else target.arch)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on a GPU, or stands for one that is: inside `recorded` with a target."""
    return tensor.is_cuda or _recording.target is not None


@functools.cache
def _num_sms(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


class Launch(NamedTuple):
    """What a launch would have been given: `arguments` by the kernel's parameter names, `options` of compiling, `early`."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    early: bool


class _Recording(threading.local):
    launches: list[Launch] | None = None
    target: Target | None = None


_recording = _Recording()  # of this thread: what others launch meanwhile has to run


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, early: bool = False, **kwargs: Any) -> None:
    """`kernel[grid](*args, **kwargs)` on the current device, or a note of it inside `recorded`.

    Args:
        early: it may be launched while the kernel before it still runs, where that one lets it. Its programs then go where
            there is room first. So not where they share the machine's bandwidth, and a multiprocessor has room for more of them
            than its share: 1.4 times the time was measured.
    """
    if _recording.launches is None:
        make_context()
        if background.pending:
            background.wait_for(kernel)
        named = kwargs | pdl_arguments(kernel, early)
        repeat.launched(kernel, kernel[grid](*args, **named), grid, args, named)
        return
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | {n: kwargs.pop(n) for n in kernel.arg_names if n in kwargs}
    _recording.launches.append(Launch(kernel, arguments, kwargs, early))


def pdl_arguments(kernel: Any, early: bool) -> dict[str, bool]:
    """The parameter `PDL` of every kernel here, for `await_predecessors`, and the launch option of an `early` launch."""
    if isinstance(kernel, triton.JITFunction) and _has_pdl(driver.active.get_current_device()):
        return {"PDL": True, "launch_pdl": early}
    return {"PDL": False}


def knows_pdl(arch: int) -> bool:
    """Whether a GPU has the instructions of programmatic dependent launch; assemblers refuse them for others."""
    return arch >= 90


@functools.cache
def _has_pdl(device: int) -> bool:
    target = driver.active.get_current_target()
    return target.backend == "cuda" and knows_pdl(target.arch)


@contextlib.contextmanager
def recorded(target: Target | None = None) -> Iterator[list[Launch]]:
    """Inside, this thread's launches are noted in the list and nothing runs: what is compiled ahead is then what would be
    launched.

    Args:
        target: the GPU that launchers choose for, whose tensors those of the meta device stand for. Without one they take such
            tensors for a CPU's, and choose as for Triton's interpreter.
    """
    launches: list[Launch] = []
    _recording.launches, _recording.target = launches, target
    repeat.pause(True)
    try:
        yield launches
    finally:
        _recording.launches = _recording.target = None
        repeat.pause(False)


def compile_in_background(recorded_launches: Iterable[Launch], device: torch.device) -> int:
    """Start to compile what `recorded_launches` would launch on `device`, a CUDA device. Returns how many binaries that are
    neither compiled in this process nor being compiled.

    Triton makes the key under which a launch looks its binary up, and it makes it of the same values here.
    """
    started = 0
    with torch.cuda.device(device):
        for kernel, arguments, options, early in recorded_launches:
            if isinstance(kernel, triton.JITFunction):
                started += background.start(kernel, arguments | options | pdl_arguments(kernel, early))
    return started
