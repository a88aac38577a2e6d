"""How the host learns what a round emitted."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from spec_ops.decoding.state import RoundState


class OutputReader:
    """Brings `state.output` to the host: immediately on the CPU, one round late through pinned memory on CUDA, so that the host
    handles round `n - 1` while the device runs round `n`.

    Args:
        state: whose output.
        at_once: wait for each round's output, on CUDA too.
        timed: measure how long rounds take.

    Attributes:
        seconds: how long the round took whose output was read last; None if that is not known.
    """

    def __init__(self, state: RoundState, *, at_once: bool = False, timed: bool = False) -> None:
        self.state, self.timed = state, timed
        self.seconds: float | None = None
        self._began: float | torch.cuda.Event = 0.0
        self.late = state.output.is_cuda and not at_once
        self.pending: _Pending | None = None
        self.spare = [torch.empty_like(state.output, device="cpu", pin_memory=True) for _ in range(2)] if self.late else []

    def begin(self) -> None:
        """A round begins: note the time, if rounds are timed."""
        if self.timed:
            self._began = self._event() if self.late else time.perf_counter()

    def read(self) -> torch.Tensor | None:
        """Start copying this round's output. Returns the previous round's, or on the CPU this round's."""
        if not self.late:
            output = self.state.output.cpu()
            if isinstance(self._began, float) and self.timed:
                self.seconds = time.perf_counter() - self._began
            return output
        host = self.spare.pop(0)
        host.copy_(self.state.output, non_blocking=True)
        previous, self.pending = self.pending, _Pending(host, self._began, self._event())
        return self._finish(previous)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=self.timed)
        event.record(torch.cuda.current_stream(self.state.output.device))
        return event

    def drain(self) -> torch.Tensor | None:
        """Wait for the copy that is still under way, if there is one, and return it."""
        previous, self.pending = self.pending, None
        return self._finish(previous)

    def _finish(self, pending: _Pending | None) -> torch.Tensor | None:
        if pending is None:
            return None
        pending.copied.synchronize()
        if isinstance(pending.began, torch.cuda.Event):
            self.seconds = pending.began.elapsed_time(pending.copied) / 1000
        self.spare.append(pending.host)
        return pending.host


class _Pending(NamedTuple):
    """A copy that is under way, since when its round ran, and what tells that it is done."""

    host: torch.Tensor
    began: float | torch.cuda.Event
    copied: torch.cuda.Event
