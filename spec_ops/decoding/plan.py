"""The chain lengths of a call's rounds, from the choice to the output that comes one round late."""

from __future__ import annotations

from collections import deque

import torch

from spec_ops.decoding.batch import Batch
from spec_ops.decoding.lengths import LengthChooser, Planned
from spec_ops.models.target import Ranks


class RoundPlan:
    """Chooses the length of each round, and hands out what rounds emitted.

    Args:
        chooser: what chooses, and learns from what is read; None if all rounds have the same length.
        ranks: the processes that share the target; rank 0 chooses, since their clocks differ.
    """

    def __init__(self, chooser: LengthChooser | None, ranks: Ranks | None = None) -> None:
        self.chooser, self.ranks = chooser, ranks
        self._under_way: deque[Planned] = deque()
        if chooser is not None:
            chooser.begin()

    def next(self, batch: Batch) -> int | None:
        """The length of the round that comes now; None if it is always the same."""
        if self.chooser is None:
            return None
        planned = self.chooser.plan([member.request for member in batch.members.values()])
        self._under_way.append(planned if self.ranks is None else self.ranks.first(planned))
        return self._under_way[-1].length

    def read(self, batch: Batch, output: torch.Tensor, seconds: float | None) -> None:
        """Hand out the tokens of the first round that was not read yet.

        Args:
            batch: whose requests gain them.
            output: `[bs, P + 2]`, on the host, as in `RoundState.output`.
            seconds: how long the round took; None if that is not known.
        """
        if self.chooser is None:
            batch.emit(output)
            return
        planned = self._under_way.popleft()
        gained = batch.emit(output, planned.length)
        accepted: dict[int, int] = {}
        if planned.length or self.chooser.sees_first:
            accepted = {one.request: one.tokens - 1 if planned.length else int(one.draft_was_right) for one in gained}
        self.chooser.observe(planned, accepted, {one.request: one.ended for one in gained}, seconds)
