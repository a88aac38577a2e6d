"""Runs each case of `python -m benchmarks round` in a process of its own: compiling side by side, measuring one at a time.

A process per case makes a cold compilation cold, gives all its memory back, and survives the failure of another. A compilation
takes a processor for a minute and the device for moments, so as many cases as fit into the device's memory compile at once;
nobody is measured before all of those have compiled and recorded.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kernels.measure import Note
from benchmarks.round.measure import RoundCase

WORKER = (sys.executable, "-m", "benchmarks.round.worker")
Result = dict[str, Any] | Note
# Of the memory, what the estimates of cases side by side may add up to: a compilation takes more than a round. Six that were to
# take 138 of 150 GB stood still for eight minutes (H200).
SHARED = 0.85


def fitting(cases: Sequence[RoundCase], memory: float) -> tuple[list[RoundCase], list[Note]]:
    """The cases without the contexts for which the device is too small, and a note for each of those."""
    kept, notes = [], []
    for case in cases:
        contexts = list(case.contexts)
        while contexts and (need := replace(case, contexts=tuple(contexts)).memory_bytes()) > memory:
            longest = max(contexts)
            contexts.remove(longest)
            reason = f"context {longest} needs about {need / 1e9:.0f} GB, the device has {memory / 1e9:.0f}"
            notes.append(Note(case.backend, str(case), reason, failed=False))
        if contexts:
            kept.append(replace(case, contexts=tuple(contexts)))
    return kept, notes


def groups(cases: Sequence[RoundCase], jobs: int, memory: float) -> list[list[RoundCase]]:
    """Cases that fit side by side: at most `jobs`, in `memory` bytes; each into the first group with room, the large first."""
    found: list[tuple[float, list[RoundCase]]] = []
    for need, case in sorted(((case.memory_bytes(), case) for case in cases), key=lambda pair: -pair[0]):
        for index, (used, group) in enumerate(found):
            if len(group) < jobs and used + need <= memory:
                found[index] = (used + need, [*group, case])
                break
        else:
            found.append((need, [case]))
    return [group for _, group in found]


class _Worker:
    """A process that compiles one case, or one for each of its ranks; errors of any kind become a note."""

    def __init__(self, case: RoundCase, cache: Path, threads: int, command: Sequence[str]) -> None:
        self.case = case
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `stop`
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
        common = os.environ | caches | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        self.processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                stderr=self.log,
                text=True,
                env=common | place,
            )
            for rank, place in enumerate(_places(case.processes))
        ]
        self.process = self.processes[0]  # which answers for all
        self.note: Note | None = None
        self._send(case.to_json())

    def _send(self, line: str) -> None:
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            except BrokenPipeError:  # it is gone; reading says why
                pass

    def _receive(self) -> dict[str, Any] | None:
        """The next answer; None, and a note, if it is an error or none comes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"died: {self._tail()}", "failed": True}
        if "error" in answer:
            self.note = Note(self.case.backend, str(self.case), answer["error"], answer["failed"])
            return None
        return answer

    def _tail(self) -> str:
        """The exit code and the end of the log; of a process that ran into its limit, where it was."""
        code = self.process.wait()
        self.log.seek(0)
        lines = self.log.read().strip().splitlines()
        threads = [i for i, line in enumerate(lines) if "(most recent call first)" in line]
        if any(line.startswith("Timeout (") for line in lines) and threads:
            lines = ["took too long", *lines[threads[-1] + 1 :][:4]]  # the main thread is the last
        return f"exit code {code}; " + " | ".join(line.strip() for line in lines[-5:])

    def compiled(self) -> float | None:
        """Waits for the compilation: its seconds, None if there was none or it failed."""
        answer = self._receive()
        return None if answer is None else answer["compile_s"]

    def rows(self) -> Iterator[dict[str, Any]]:
        self._send("measure")
        while (answer := self._receive()) is not None and "row" in answer:
            yield answer["row"]

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                pipe.close()
        self.log.close()


def _places(size: int) -> list[dict[str, str]]:
    """The environment of each rank of a case, as torchrun sets it; nothing for one process."""
    if size == 1:
        return [{}]
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = str(found.getsockname()[1])
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def run(
    cases: Sequence[RoundCase],
    *,
    jobs: int,
    memory: float,
    warm: bool,
    limit: float,
    tell: Callable[[str], None] = lambda _: None,
    command: Sequence[str] = WORKER,
) -> Iterator[tuple[RoundCase, list[Result]]]:
    """Each case with its rows and notes, group by group.

    Args:
        jobs: cases that compile at once. memory: bytes of the device that they may share.
        warm: compile every case again in a second process that finds what the first left in the cache directories.
        limit: seconds in which a case must have compiled; past them it becomes a note.
        tell: what happens now, for a progress display.
        command: of the worker process; `limit` follows.

    `compile_cold_s` of a row is the first call in a fresh process with empty cache directories, `compile_warm_s` in the second
    process, None without `warm`. Both are measured with `jobs` processes side by side on the machine's processors.
    """
    threads = max(1, (os.cpu_count() or 1) // jobs)
    for group in groups(cases, jobs, SHARED * memory):
        # Inductor's compile workers may outlive the process that has them, and write while the folder is cleared.
        with tempfile.TemporaryDirectory(prefix="spec_ops_round_", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
            caches = [Path(folder) / str(index) for index in range(len(group))]

            def start(threads: int = threads) -> list[_Worker]:
                workers = []
                for case, cache in zip(group, caches, strict=True):  # noqa: B023  used before the next group
                    workers.append(_Worker(case, cache, threads, [*command, str(limit)]))
                    stack.callback(workers[-1].stop)
                return workers

            tell(f"compiling {len(group)} side by side: {'; '.join(map(str, group))}")
            workers = start()
            cold = []
            for worker in workers:
                cold.append(seconds := worker.compiled())
                if seconds is not None:
                    tell(f"compiled in {seconds:.0f} s: {worker.case}")
                elif worker.note:
                    tell(f"not compiled: {worker.case}: {worker.note.reason}")
            measured: list[list[Result]] = []
            for worker in workers:
                tell(f"measuring {worker.case}")
                found: list[Result] = [] if worker.note else list(worker.rows())
                measured.append([*found, worker.note] if worker.note else found)
                worker.stop()
            second_time: list[float | None] = [None] * len(group)
            if warm:
                tell(f"compiling {len(group)} again")
                again = start()
                second_time = [worker.compiled() for worker in again]
            for case, results, first, second in zip(group, measured, cold, second_time, strict=True):
                times = {"compile_cold_s": _tenths(first), "compile_warm_s": _tenths(second)}
                yield case, [r if isinstance(r, Note) else r | times for r in results]


def _tenths(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
