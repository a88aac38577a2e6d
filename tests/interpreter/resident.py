"""Programs that wait for one another, in Triton's interpreter, which runs them one after another and would wait for ever.

Inside `resident`, each program of a kernel has a thread, of which one runs at a time: until it ends, or waits for others.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from spec_ops.backends.triton.runtime import arrival

MOST_SWITCHES = 100_000  # by then they wait for what never comes


class _Stop(BaseException):
    """Ends the other programs after one has failed."""


class _Grid:
    """The programs of one launch; `order` decides who goes on."""

    def __init__(self, order: random.Random) -> None:
        self.order = order
        self.programs: list[tuple[tuple[int, ...], Callable[[], Any]]] = []
        self.alive: set[int] = set()
        self.running = -1
        self.switches = 0
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.mine = threading.local()

    def switch(self) -> None:
        """Another program's turn, or the same one's again."""
        with self.changed:
            self.switches += 1
            if self.switches > MOST_SWITCHES and self.error is None:
                self.error = AssertionError(f"programs wait for ever; {len(self.alive)} of {len(self.programs)} have not ended")
            self._pass_on()
            self._await_turn()

    def _pass_on(self) -> None:
        self.running = self.order.choice(sorted(self.alive)) if self.alive else -1
        self.changed.notify_all()

    def _await_turn(self) -> None:
        self.changed.wait_for(lambda: self.running == self.mine.index)
        if self.error is not None:
            raise _Stop
        interpreter_builder.set_grid_idx(*self.programs[self.mine.index][0])

    def _run(self, index: int) -> None:
        self.mine.index = index
        try:
            with self.changed:
                self._await_turn()
            self.programs[index][1]()
        except _Stop:
            pass
        except BaseException as error:
            self.error = self.error or error
        finally:
            with self.changed:
                self.alive.discard(index)
                self._pass_on()

    def run(self) -> None:
        self.alive = set(range(len(self.programs)))
        threads = [threading.Thread(target=self._run, args=(i,)) for i in self.alive]
        for thread in threads:
            thread.start()
        with self.changed:
            self._pass_on()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def resident(kernel: Any, seed: int = 0) -> Iterator[Callable[[], None]]:
    """Programs of `kernel` may wait for one another inside; `seed` decides in what order they go on.

    Yields what gives other programs a turn, for kernels that wait in ways of their own."""
    rewrite, order = kernel.rewrite, random.Random(seed)
    current: list[_Grid] = []

    def rewritten() -> Callable:
        fn, grid = rewrite(), _Grid(order)
        current[:] = [grid]

        @functools.wraps(fn)
        def note(**args: Any) -> None:
            grid.programs.append((tuple(interpreter_builder.grid_idx), functools.partial(fn, **args)))
            if len(grid.programs) == math.prod(interpreter_builder.grid_dim):
                grid.run()

        note.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
        return note

    def await_all(counter, before, expected) -> None:
        arrived = before + 1
        while bool((arrived & 0xFFFF) != expected) and bool((arrived >> 16) == (before >> 16)):
            current[0].switch()
            arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")

    with mock.patch.object(kernel, "rewrite", rewritten), mock.patch.object(arrival, "await_all", await_all):
        yield lambda: current[0].switch()
