"""Worlds of processes for tests: each imports torch once and runs many cases.

`python -m tests.parallel.world FILE.json` is one rank of it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.helpers.paths import ROOT


def start(size: int, module: str, folder: Path, **environment: str) -> list[subprocess.Popen]:
    """Processes that run every function `case_*` of `module` with a `TensorParallel`, and write what it returns to `folder`."""
    common = {**os.environ, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", "tests.parallel.world", module, str(folder)]
    return [
        subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(size)
    ]


def finish(processes: list[subprocess.Popen], timeout: float) -> list[str]:
    """What each printed. Those that are still running at the end are killed."""
    try:
        return [process.communicate(timeout=timeout)[0].decode() for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def run(size: int, module: str, folder: Path) -> list[dict[str, Any]]:
    """Of each rank, what its cases returned, by name."""
    processes = start(size, module, folder)
    printed = finish(processes, 300)
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(printed))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def main(module: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from spec_ops.parallel import TensorParallel

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A file instead of a port: two test runs on a machine do not meet.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    ranks, results = TensorParallel(), {}
    for name, case in vars(importlib.import_module(module)).items():
        if name.startswith("case_"):
            try:
                results[name] = case(ranks)
            except Exception:  # the others go on; the test of this case shows it
                results[name] = {"error": traceback.format_exc()}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
