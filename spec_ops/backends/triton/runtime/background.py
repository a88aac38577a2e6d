"""Kernels that are compiled on threads of their own, so that the first launch of each finds its binary.

Triton computes the key of a launch, and what it compiles, where it always does; only the compilation moves to a thread
(`triton.AsyncCompileMode`). Threads are enough: Triton holds Python's lock while it reads a kernel's Python code, a quarter to
a third of a compilation. MLIR, LLVM and ptxas, which is a process, run without it. No process is forked for this, nothing here
calls CUDA, and there is no second import of torch to wait for.

What fails here is compiled again by the launch, which raises whatever there is to raise.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import triton
from triton.runtime import driver

logger = logging.getLogger("spec_ops.backends")

MOST_THREADS = 4  # of which one may hold Python's lock, as the thread that they work for does


class _Job:
    """A binary that is being compiled, or will be."""

    def __init__(self, kernel: Any, key: str, compile: Callable[[], Any], finish: Callable[[Any], None]) -> None:
        self.kernel, self.key, self.compile, self.finish = kernel, key, compile, finish
        self.done = threading.Event()

    def run(self) -> None:
        try:
            if threading.main_thread().is_alive():  # otherwise the process ends, and waits for this thread
                binary = self.compile()
                driver.active.launcher_cls(binary.src, binary.metadata)  # C code, which Triton 3.6 compiles for each signature
                self.finish(binary)
        except Exception as error:
            logger.debug("%s was not compiled in the background: %s", self.kernel.__name__, error, exc_info=True)
        finally:
            self.end()

    def end(self) -> None:
        """Nobody waits for it any longer."""
        with _lock:
            _jobs.pop(self.key, None)
            others = [job for job in pending.get(id(self.kernel), ()) if job is not self]
            pending[id(self.kernel)] = others
            if not others:
                del pending[id(self.kernel)]
        self.done.set()


pending: dict[int, list[_Job]] = {}  # by the kernel's id; empty whenever nothing is being compiled
_jobs: dict[str, _Job] = {}  # by Triton's key of the binary
_queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
_lock = threading.Lock()
_threads = 0


class _Collecting(triton.AsyncCompileMode):
    """Takes what Triton would compile inside the `with` block, which does not wait for it."""

    def __init__(self, kernel: Any) -> None:
        super().__init__(None)  # its executor, which `submit` does without
        self.kernel, self.started = kernel, 0

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> None:
        """What Triton calls in place of `compile_fn`. None tells it that there is no binary yet, which it does not remember."""
        job = _Job(self.kernel, key, compile_fn, finalize_fn)
        with _lock:
            if key in _jobs:
                return
            _jobs[key] = job
            pending.setdefault(id(self.kernel), []).append(job)
        self.started += 1
        _queue.put(job)
        _start_thread()


def start(kernel: triton.JITFunction, given: Mapping[str, Any]) -> int:
    """Compile what a launch of `kernel` with the arguments and options `given` needs, for the current device, on a thread.

    Returns:
        1, or 0 if there is nothing to do: the binary is in this process already, or it is being compiled.
    """
    with _Collecting(kernel) as collecting:
        kernel.run(grid=(1,), warmup=True, **given)
    return collecting.started


def wait_for(kernel: Any) -> None:
    """Return when no binary of `kernel` is being compiled. Which of them a launch needs is not known before Triton has made its
    key, and a round needs all of them."""
    for job in list(pending.get(id(kernel), ())):
        job.done.wait()


def _start_thread() -> None:
    """One more, if there is a processor for it. A thread ends when nothing is left to do, so that none has to be stopped."""
    global _threads
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with _lock:
        if _threads >= max(1, min(MOST_THREADS, processors - 1)):
            return
        _threads += 1
    # No daemon: when a process ends, a thread that Python stops inside of LLVM ends it with an error.
    try:
        threading.Thread(target=_work, name="spec_ops compiles kernels").start()
    except RuntimeError as error:  # too many threads, or the process ends: what no other thread takes is left to the launch
        logger.debug("no thread compiles kernels: %s", error)
        with _lock:
            _threads -= 1
            alone = not _threads
        while alone:
            try:
                job = _queue.get_nowait()
            except queue.Empty:
                return
            job.end()


def _work() -> None:
    global _threads
    while True:
        with _lock:
            try:
                job = _queue.get_nowait()
            except queue.Empty:
                _threads -= 1
                return
        job.run()


def _forget() -> None:
    """In a child that was forked meanwhile: its parent's threads are not there."""
    global _lock, _queue, _threads
    _lock, _queue, _threads = threading.Lock(), queue.SimpleQueue(), 0
    pending.clear()
    _jobs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
