"""What a repeated call takes for a binary. `tests/interpreter/test_repeat.py` repeats calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.runtime._async_compile import FutureKernel

from spec_ops.backends.triton.runtime import repeat

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no binaries")


@triton.jit
def nothing_kernel(x, WIDE: triton.language.constexpr):
    pass


class Binary:
    """As `CompiledKernel`: `binary[grid](*arguments)` launches it."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launches.append((grid, *arguments))


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    repeat._plans.clear()
    yield
    repeat._plans.clear()


def twice(binary: object) -> tuple[int, torch.Tensor]:
    """How often a launcher is asked that Triton gives `binary`, in two calls, and what the second call is given."""
    asked = []

    def run(x: torch.Tensor) -> None:
        asked.append(x)
        repeat.launched(nothing_kernel, binary, (3, 2), (x,), {"WIDE": True, "num_warps": 8})

    for _ in range(2):
        x = torch.zeros(4)
        repeat.repeated("nothing", (x,), x.device, lambda x=x: run(x))
    return len(asked), x


def test_a_binary_is_launched() -> None:
    binary = Binary()
    asked, x = twice(binary)
    assert asked == 1
    ((grid, given, wide),) = binary.launches
    assert grid == (3, 2, 1)
    assert given is x
    assert wide is True


def test_a_binary_that_is_promised() -> None:
    """Inside of an `AsyncCompileMode` Triton 3.7 returns what has a binary once it is compiled, and is no binary itself."""
    binary, future = Binary(), Future[Binary]()
    future.set_result(binary)
    asked, _ = twice(FutureKernel(lambda _: None, future))
    assert asked == 1
    assert len(binary.launches) == 1


def test_without_a_binary_nothing_was_launched() -> None:
    """As a hook of Triton's can decide. The kernel's own launch would have other options: the call's are not noted."""
    assert twice(None)[0] == 2
