"""Worlds of processes for tests, each of which runs many cases."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forked


def start(size: int, module: str, folder: Path) -> list[BaseProcess]:
    """Processes that run every function `case_*` of `module` with a `TensorParallel`, and write what it returns to `folder`."""
    return [forked.start(main, rank, size, module, folder, output=folder / str(rank)) for rank in range(size)]


def finish(processes: list[BaseProcess], folder: Path, timeout: float) -> list[str]:
    """What each printed. Those that are still running at the end are killed."""
    forked.finish(processes, timeout)
    return [(folder / f"{rank}.{name}").read_text() for rank in range(len(processes)) for name in ("out", "err")]


def run(size: int, module: str, factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank, what its cases returned, by name. The first of pytest-xdist's workers that asks runs them, the others wait:
    side by side they would take twice as long."""
    base = factory.getbasetemp()
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    found = session / f"world of {size} {module}.json"
    with found.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_text(json.dumps(_run(size, module, factory.mktemp("world"))))
        return json.loads(found.read_text())


def _run(size: int, module: str, folder: Path) -> list[dict[str, Any]]:
    processes = start(size, module, folder)
    printed = finish(processes, folder, 300)
    if any(process.exitcode for process in processes):
        raise RuntimeError("\n".join(printed))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def main(rank: int, size: int, module: str, folder: Path) -> None:
    import torch.distributed as dist

    from spec_ops.parallel import TensorParallel

    os.environ |= {"WORLD_SIZE": str(size), "RANK": str(rank)}
    # A file instead of a port: two test runs on a machine do not meet.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    ranks, results = TensorParallel(), {}
    for name, case in list(vars(importlib.import_module(module)).items()):  # Dynamo adds names of its own
        if name.startswith("case_"):
            try:
                results[name] = case(ranks)
            except Exception:  # the others go on; the test of this case shows it
                results[name] = {"error": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
