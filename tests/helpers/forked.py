"""Processes of their own without the seconds that imports take: forked from one that has imported torch."""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.helpers.paths import ROOT


@functools.cache
def context() -> Any:
    """For `multiprocessing`."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.helpers.preloaded"])
    return made


def start(function: Callable, *args: Any, output: Path) -> BaseProcess:
    """A process that runs `function(*args)` and writes what it prints to `output` with `.out` and `.err` appended."""
    process = context().Process(target=_redirected, args=(output, function, args))
    process.start()
    return process


def _redirected(output: Path, function: Callable, args: tuple) -> None:
    for number, name in ((1, "out"), (2, "err")):
        with open(f"{output}.{name}", "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False) for number in (1, 2))
    function(*args)


def finish(processes: list[BaseProcess], timeout: float) -> None:
    """Those that are still running at the end are killed."""
    end = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(end - time.monotonic(), 0))
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_script(path: Path, *args: str, folder: Path = ROOT, timeout: float = 300) -> CompletedProcess[str]:
    """`python PATH ARGS` in `folder`."""
    with tempfile.TemporaryDirectory() as printed_to:
        output = Path(printed_to) / "printed"
        process = start(_script, str(path), args, str(folder), output=output)
        finish([process], timeout)
        printed = [Path(f"{output}.{name}").read_text(encoding="utf-8") for name in ("out", "err")]
        assert process.exitcode is not None
        return CompletedProcess([str(path), *args], process.exitcode, *printed)


def run_ranks(path: Path, *args: str, size: int, timeout: float = 300) -> CompletedProcess[str]:
    """What `torchrun --nproc-per-node SIZE PATH ARGS` runs: the first exit code that is not 0, and what all printed."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(size)]
        processes = [start(_rank, rank, size, folder, str(path), args, output=outputs[rank]) for rank in range(size)]
        finish(processes, timeout)
        printed = [
            "".join(Path(f"{output}.{name}").read_text(encoding="utf-8") for output in outputs) for name in ("out", "err")
        ]
        return CompletedProcess([str(path), *args], next((p.exitcode for p in processes if p.exitcode), 0), *printed)


def run_code(code: str, folder: Path, timeout: float = 300) -> CompletedProcess[str]:
    """`python -c CODE` in `folder`, which gets a file of it: Dynamo and Triton read the sources of what they compile."""
    path = folder / "code_of_test.py"
    path.write_text(code, encoding="utf-8")
    return run_script(path, folder=folder, timeout=timeout)


def _rank(rank: int, size: int, folder: str, path: str, args: tuple[str, ...]) -> None:
    import torch.distributed as dist

    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    # A file instead of a port: two test runs on a machine do not meet.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    _script(path, args, str(ROOT))


def _script(path: str, args: tuple[str, ...], folder: str) -> None:
    os.chdir(folder)
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
