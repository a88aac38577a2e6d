"""Triton as on a machine with a GPU: which binary a launch looks for, without one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from spec_ops.backends.triton.runtime import launch as runtime


class _Driver:
    """What a launch asks of a driver up to the moment at which the GPU begins."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> None:
        """Loads C code that is compiled in Triton 3.6."""


@contextlib.contextmanager
def pretended_gpu(arch: int = 90) -> Iterator[None]:
    """Inside, Triton compiles for a GPU of `arch`, and forgets at the end what it compiled."""
    known = _caches()
    for caches in known:
        caches.clear()
    runtime._has_pdl.cache_clear()
    before = driver._active
    driver.set_active(_Driver(arch))
    try:
        with mock.patch.object(torch.cuda, "device", contextlib.nullcontext):
            yield
    finally:
        driver._active = before
        runtime._has_pdl.cache_clear()
        for caches in _caches():
            caches.clear()


def _caches() -> list[dict]:
    """Of the kernels in our modules. To look through all objects takes longer with every test before."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("spec_ops", "tests", "__main__")]
    return [f.device_caches for module in modules for f in vars(module).values() if isinstance(f, triton.JITFunction)]


@contextlib.contextmanager
def choosing_for(target: runtime.Target) -> Iterator[None]:
    """Inside, launchers choose for `target`, and launch."""
    runtime._recording.target = target
    try:
        yield
    finally:
        runtime._recording.target = None


@contextlib.contextmanager
def keys() -> Iterator[list[tuple[str, str]]]:
    """Kernel and key of each binary that Triton looks for inside and does not find, in order. None is compiled."""
    found: list[tuple[str, str]] = []

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found.append((fn.name, key))
        return True

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = note
        yield found
