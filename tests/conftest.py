"""Shared fixtures: every device the machine has, seeds of fuzzing tests, and GPU tests that are left out elsewhere."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
from collections.abc import Callable, Generator
from typing import Any

# Inductor otherwise starts a pool of compiling processes for each pytest worker, though all cores are busy already.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Before NumPy is imported, and for processes that tests start: threads of OpenBLAS and OpenMP spin while they wait for a core
# that another worker has, and a product of microseconds takes milliseconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Dynamo otherwise collects garbage after each compilation, a tenth of a second where there is much of it.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import pytest
import torch
from hypothesis import settings

# Workers share the GPUs: the first device of each is another one. All of them see all devices.
worker, visible = os.environ.get("PYTEST_XDIST_WORKER"), "CUDA_VISIBLE_DEVICES"
if worker and visible not in os.environ and (gpus := torch.cuda.device_count()) > 1:
    first = int(worker.removeprefix("gw"))
    os.environ[visible] = ",".join(str((first + i) % gpus) for i in range(gpus))

# Test tensors are tiny: a thread pool costs more than it saves, and xdist workers would fight over the cores.
torch.set_num_threads(1)

# pytest puts handlers on every logger that does not propagate. If the one of a trace has any, torch prints whole graphs for it.
if "TORCH_TRACE" not in os.environ:
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True

# Dynamo flushes the processor's caches to time a graph's guards, for its log alone. It imports the function from here.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# A run repeats exactly; deadlines would measure the machine.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds",
        type=read_seeds,
        metavar="N|FIRST-LAST",
        help="random programs and prompts that each fuzzing test tries: seeds 0 to N - 1, or those from FIRST to LAST",
    )
    parser.addoption("--all-families", action="store_true", help="try every model family of transformers, not a share of them")
    parser.addoption(
        "--all-variants", action="store_true", help="compile every variant of the Triton kernels, not a share of them"
    )


def read_seeds(text: str) -> range:
    """The value of `--seeds`."""
    if (parts := re.fullmatch(r"(\d+)(?:-(\d+))?", text)) is not None:
        first, last = parts.groups()
        found = range(int(first)) if last is None else range(int(first), int(last) + 1)
        if found:
            return found
    raise argparse.ArgumentTypeError(f"must be N, at least 1, or FIRST-LAST, got {text!r}")


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> Callable[[int], range]:
    """The seeds that a fuzzing test tries: `seeds(default)` without `--seeds`."""

    def chosen(default: int) -> range:
        given = request.config.getoption("--seeds")
        return range(default) if given is None else given

    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage is collected neither while tests are, nor later among the million objects of torch and of pytest; and seldom: a
    trace makes many objects, of which few are garbage before its end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        gc.enable()


LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU the thousands of tests that need one are left out, once they are imported: to report each takes longer."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)
    if (told := getattr(config, "workeroutput", None)) is not None:
        told["left out"] = len(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All of pytest-xdist's workers collect the same."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"left out, for they need a CUDA device: {count}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Give back what PyTorch keeps of a test's memory: several workers share the GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


# Session scope: hypothesis refuses function-scoped fixtures, which it would not reset between examples.
@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
