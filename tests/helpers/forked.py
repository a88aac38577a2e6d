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
def _forking() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded"])
    return context


def start(function: Callable, *args: Any, output: Path) -> BaseProcess:
    """A process that runs `function(*args)` and writes what it prints to `output` with `.out` and `.err` appended."""
    process = _forking().Process(target=_redirected, args=(output, function, args))
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


def run_code(code: str, folder: Path, timeout: float = 300) -> CompletedProcess[str]:
    """`python -c CODE` in `folder`, which gets a file of it: Dynamo and Triton read the sources of what they compile."""
    path = folder / "code_of_test.py"
    path.write_text(code, encoding="utf-8")
    return run_script(path, folder=folder, timeout=timeout)


def _script(path: str, args: tuple[str, ...], folder: str) -> None:
    os.chdir(folder)
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
