"""Rounds of ranks that share a model: the processes' group, and shares of models with random weights.

    python -m benchmarks round --tp 1 --tp 2                                     # a GPU for each rank
    python -m benchmarks round --tp 1 --tp 2 --tp 4 --alone                      # one GPU: the first rank without the others

With a GPU for each rank, a case is as many processes, and its time is the largest of theirs. `--alone` shows what a rank's work
takes: all of it but the links between GPUs, and the wait for the slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.round.shapes import Shape
from spec_ops.models import CausalLM, Draft
from spec_ops.parallel import TensorParallel, shard

RESTARTED, COMPARED = 40, 1000  # after so many rounds
COLLECTIVES = {"push": {}, "nccl": {"lower_all_reduce": False}}  # switches of passes


def join(size: int, alone: bool, device: str) -> TensorParallel:
    """The ranks of a case: the processes that `jobs.py` has started, or this one without the others."""
    if alone:
        return TensorParallel.fake(size, device=device)
    return TensorParallel.connect(device, timeout=60)


def check_tokens(
    ranks: TensorParallel, step: Callable[[], object], output: torch.Tensor, restart: Callable[[int], None], rounds: int
) -> None:
    """Run rounds and compare what they emit on all ranks.

    Args:
        step: a round. output: what it writes, integers.
        restart: is called before every `RESTARTED` rounds with a number that counts up.
        rounds: how many.

    Raises:
        RankError: on every rank, if any of them emitted something else than rank 0.
    """
    # One number for all rounds since the last comparison, in arithmetic that wraps: every token of every round counts.
    total = torch.zeros((), dtype=torch.int64, device=output.device)
    weights = torch.arange(1, output.numel() + 1, device=output.device)
    for number in range(rounds):
        if number % RESTARTED == 0:
            restart(number // RESTARTED)
        step()
        total.mul_(1_000_003).add_((output.flatten() * weights).sum())
        if number % COMPARED == COMPARED - 1 or number == rounds - 1:
            ranks.check_same("round", {"tokens": total})


def slowest(ranks: TensorParallel, milliseconds: float) -> float:
    """The largest of all ranks' times."""
    if ranks.alone:
        return milliseconds
    found = torch.tensor(milliseconds)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


@dataclass(frozen=True)
class RandomWeight:
    """A weight without memory, whose parts are drawn when a rank reads them.

    Attributes:
        whole: on the meta device.
        device: of the parts.
    """

    whole: torch.Tensor
    device: str

    def get_shape(self) -> list[int]:
        return list(self.whole.shape)

    def __getitem__(self, place: Any) -> torch.Tensor:
        part = torch.empty_like(self.whole[place], device=self.device)
        if not part.is_floating_point():
            return torch.arange(part.numel(), device=self.device).view_as(part).to(part.dtype)  # the reduced vocabulary
        return part.fill_(1) if part.dim() < 2 else part.normal_(std=part.shape[-1] ** -0.5)


def _random(state: Mapping[str, torch.Tensor], device: str) -> dict[str, Any]:
    return {name: RandomWeight(tensor, device) for name, tensor in state.items()}


def shares(
    shape: Shape,
    ranks: TensorParallel,
    device: str,
    dtype: torch.dtype,
    *,
    expert_parallel: bool = False,
    whole_draft: bool = False,
) -> tuple[CausalLM, Draft]:
    """This rank's share of a target and its draft.

    Args:
        device: on "meta" they take no memory.
        expert_parallel: see `shard`.
        whole_draft: the draft is not divided.
    """
    torch.manual_seed(0)  # what every rank holds is the same on all
    whole, draft = shape.build("meta", dtype)
    options: dict[str, Any] = {"device": device, "expert_parallel": expert_parallel}
    target = shard(whole, ranks, tensors=_random(whole.state_dict(), device), **options)
    if whole_draft:
        torch.manual_seed(1)  # the same on all ranks, though their parts of the target need not be of one size
        return target, shape.build_draft(target, device, dtype)
    return target, shard(draft, ranks, target=target, tensors=_random(draft.own_state_dict(), device), **options)
