"""An engine in a process group of its own: rows of JSON from its output, its log, and its end in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

MARK = "ROW "  # before each row; the workers, which import nothing of this repository, have it too
Row = dict[str, Any]


def rows_of(
    python: str,
    worker: Path,
    job: dict[str, Any],
    seconds: float,
    log_file: Path | None = None,
    *,
    results: int,
    is_result: Callable[[Row], bool],
    limit: str,
    environment: Mapping[str, str] | None = None,
) -> Generator[Row]:
    """The rows that `worker` prints for `job`, as they come; what the engine says besides goes to `log_file`.

    Args:
        python: interpreter of the engine's environment.
        worker: a file that takes the path of a file with `job` as JSON.
        results: how many rows for which `is_result` holds must come.
        limit: the options that set `seconds`, for the message.

    Raises:
        RuntimeError: there is no such `python`; the engine ended with fewer results, or took longer than `seconds`; with the
            end of its log.
    """
    with _job_file(job) as path, _text_file(log_file) as log, _finally_at_sigterm() as heed_sigterm:
        try:
            process = subprocess.Popen(
                [python, str(worker), path], env=environment, stdout=subprocess.PIPE, stderr=log, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RuntimeError(f"no engine starts with --python {python}: {error.strerror}") from error
        late = threading.Event()
        timer = threading.Timer(seconds, lambda: (late.set(), _end(process)))
        count = 0
        try:
            heed_sigterm()
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                if (row := _row(line)) is not None:
                    count += is_result(row)
                    yield row
            process.wait()
        finally:
            timer.cancel()
            _end(process)
        if count < results:
            log.seek(0)
            end = [line.strip() for line in log.read().splitlines() if line.strip()][-8:]
            why = f"took longer than {round(seconds, 1):g} s ({limit})" if late.is_set() else f"ended with {process.returncode}"
            raise RuntimeError("\n".join((f"{why} after {count} of {results} cases", *end)))


@contextlib.contextmanager
def _job_file(job: dict[str, Any]) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(job, file)
        file.flush()
        yield file.name


@contextlib.contextmanager
def _finally_at_sigterm() -> Iterator[Callable[[], None]]:
    """SIGTERM, as `timeout` and schedulers send it, runs `finally`: else the engine would keep the GPU's memory. One that comes
    before there is an engine to end waits for a call of what this yields."""
    heeded = arrived = False

    def end(*_: object) -> None:
        nonlocal arrived
        arrived = True
        if heeded:
            sys.exit(128 + signal.SIGTERM)

    def heed() -> None:
        nonlocal heeded
        heeded = True
        if arrived:
            sys.exit(128 + signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield heed
    finally:
        signal.signal(signal.SIGTERM, previous)
        if arrived and not heeded:
            signal.raise_signal(signal.SIGTERM)


def _text_file(path: Path | None) -> IO[str]:
    """A new one to write and read, which is gone with its end where no `path` is given."""
    if path is None:
        return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w+", encoding="utf-8", errors="replace")


def _row(line: str) -> Row | None:
    """What the worker says in `line`; None if it is of something else that prints there, or of two processes at once."""
    if not line.startswith(MARK):
        return None
    try:
        row = json.loads(line.removeprefix(MARK))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _end(process: subprocess.Popen) -> None:
    """The engine's processes too, which are of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
