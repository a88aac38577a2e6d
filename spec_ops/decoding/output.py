"""How the host learns what a round emitted."""

from __future__ import annotations

import torch

from spec_ops.decoding.state import RoundState


class OutputReader:
    """Brings `state.output` to the host: immediately on the CPU, one round late through pinned memory on CUDA, so that the host
    handles round `n - 1` while the device runs round `n`.

    Args:
        state: whose output.
        at_once: wait for each round's output, on CUDA too.
    """

    def __init__(self, state: RoundState, *, at_once: bool = False) -> None:
        self.state = state
        self.late = state.output.is_cuda and not at_once
        self.pending: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self.spare = [torch.empty_like(state.output, device="cpu", pin_memory=True) for _ in range(2)] if self.late else []

    def read(self) -> torch.Tensor | None:
        """Start copying this round's output. Returns the previous round's, or on the CPU this round's."""
        if not self.late:
            return self.state.output.cpu()
        host = self.spare.pop(0)
        source = self.state.output
        host.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(source.device))
        previous, self.pending = self.pending, (host, event)
        return self._finish(previous)

    def drain(self) -> torch.Tensor | None:
        """Wait for the copy that is still under way, if there is one, and return it."""
        previous, self.pending = self.pending, None
        return self._finish(previous)

    def _finish(self, pending: tuple[torch.Tensor, torch.cuda.Event] | None) -> torch.Tensor | None:
        if pending is None:
            return None
        host, event = pending
        event.synchronize()
        self.spare.append(host)
        return host
