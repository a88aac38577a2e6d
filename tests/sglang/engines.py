"""Real SGLang engines on a CPU, for the tests beside this file, in an environment of their own: `make test-sglang`.

Engines are processes (`serve.py`); their own Triton kernels run in the interpreter, kernels that SGLang has for GPUs alone in
the plug-in `stubs/cpu_engine.py`. With `GRAPHS`, SGLang's runners of CUDA graphs capture and replay too, by
`stubs/cpu_graphs.py`. A few start as a user's engine does (`fresh`), the others as forks of a process that has imported SGLang
(`warm.py`): 3 to 5 seconds in place of 30.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

TIMEOUT = 1200  # seconds, of an engine on a busy machine
MARKS = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="make test-sglang installs SGLang"),
    pytest.mark.timeout(2 * TIMEOUT),
]
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NEWEST = os.environ.get("SGLANG_NEWEST")  # a folder with SGLang's newest tested release, unpacked
NEEDS_NEWEST = pytest.mark.skipif(NEWEST is None, reason="SGLANG_NEWEST is not set")
RELEASES = pytest.mark.parametrize("release", [None, pytest.param(NEWEST, marks=NEEDS_NEWEST)], ids=["installed", "newest"])
EAGLE3 = {
    "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}  # fmt: skip
EAGLE = EAGLE3 | {"speculative_algorithm": "EAGLE"}
NEXTN = EAGLE3 | {"speculative_algorithm": "NEXTN"}  # of the target's own folder
DRAFTS = {"EAGLE3": "draft", "EAGLE": "first_draft"}  # folders beside the target's
BRANCHES = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
TREE = EAGLE3 | BRANCHES
# Batches of 1 to 8 requests run as 3 or 8, so that rows of padding are replayed too.
GRAPHS = {"disable_cuda_graph": False, "cuda_graph_backend_prefill": "disabled", "cuda_graph_bs_decode": [3, 8]}


def environment(first: str | None = None) -> dict[str, str]:
    """Of an engine. `first`: a folder before all others on Python's path."""
    newest = str(HERE / "stubs_newest") if first is not None and first == NEWEST else None
    path = os.pathsep.join(p for p in (first, newest, str(ROOT), str(HERE / "stubs")) if p)
    return {
        **os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def run(*command: str, first: str | None = None, timeout: int = TIMEOUT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(first),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Warm:
    """Runs `serve.py` as forks of one process."""

    def __init__(self, first: str | None = None) -> None:
        self._first = first
        self._process: subprocess.Popen[str] | None = None

    def run(self, *arguments: str, graphs: bool, timeout: int) -> subprocess.CompletedProcess:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.sglang.warm"], cwd=ROOT, env=environment(self._first), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = {name: f"{folder}/{name}" for name in ("stdout", "stderr")}
            late = threading.Timer(timeout, self.close)
            late.start()
            try:
                print(json.dumps({"arguments": arguments, "graphs": graphs, **files}), file=process.stdin, flush=True)
                status = process.stdout.readline()
            finally:
                late.cancel()
            assert status, f"no engine, or none within {timeout} s"
            found = {name: Path(file).read_text() for name, file in files.items()}
        return subprocess.CompletedProcess(arguments, int(status), **found)

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


WARM = {first: Warm(first) for first in (None, NEWEST)}


def serve(
    models: Path,
    work: dict[str, Any] | None = None,
    *,
    fresh: bool = False,
    first: str | None = None,
    timeout: int = TIMEOUT,
    **options: Any,
) -> dict[str, Any]:
    """Texts (`tokens`) of the model in `models/target`, how many `rounds` of drafts each took, each round's tokens with the
    `drafts` of all requests, and how many CPU `graphs` were recorded.

    Args:
        work: of `serve.py`, in place of its own.
        fresh: in a process that nothing was imported in before.
        first: `NEWEST` for that release.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(work or {}, file)
        file.flush()
        done = start(models, options, file.name, fresh=fresh, first=first, timeout=timeout)
    drafts = [line for line in done.stdout.splitlines() if line.startswith("VERIFIED ")]
    return result(done) | {"drafts": drafts, "graphs": done.stdout.count("CPU graph of")}


def result(done: subprocess.CompletedProcess) -> Any:
    """What a process printed as its result."""
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    return json.loads(results[0].removeprefix("RESULT "))


def start(
    models: Path,
    options: dict[str, Any],
    *work: str,
    fresh: bool = False,
    first: str | None = None,
    timeout: int = TIMEOUT,
) -> subprocess.CompletedProcess:
    if (draft := DRAFTS.get(options.get("speculative_algorithm", ""))) is not None:
        options = options | {"speculative_draft_model_path": str(models / draft)}
    arguments = (str(models), json.dumps(options), *work)
    graphs = not options.get("disable_cuda_graph", True)
    if fresh:
        assert not graphs
        return run("-m", "tests.sglang.serve", *arguments, first=first, timeout=timeout)
    return WARM[first].run(*arguments, graphs=graphs, timeout=timeout)


def accepted(found: dict[str, Any]) -> int:
    """Drafts that were accepted, of all requests that ran together: a text's first token takes no round."""
    return sum(len(tokens) - 1 - rounds for tokens, rounds in zip(found["tokens"], found["rounds"], strict=False))
