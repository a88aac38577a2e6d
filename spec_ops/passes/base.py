"""What a pass is, and what it reports."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from spec_ops.backends.registry import device_arch, missing_backends
from spec_ops.passes.analysis.graph import source_line


@dataclass(frozen=True)
class Note:
    """One thing that a pass did or refused, with the line of the user's source.

    Attributes:
        text: what it did, or why it did not: `"subject: reason"` where several things may share a reason, which a report then
            names once.
        where: `file:line`.
        why: reasons against what it might have done instead.
    """

    text: str
    where: str
    why: tuple[str, ...] = ()


@dataclass
class PassResult:
    """The outcome of one pass over one graph.

    Attributes:
        name: of the pass.
        matches: number of rewrites.
        done: the rewrites.
        refused: near misses (graphs that almost match the pass), each with the reason.
        warnings: what will be slow.
        about: what the pass is for, in one sentence.
    """

    name: str
    matches: int = 0
    done: list[Note] = field(default_factory=list)
    refused: list[Note] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)
    about: str = ""

    def did(self, node: fx.Node, text: str, why: Iterable[str] = ()) -> None:
        """Count a rewrite of `node`, or because of it; `text` says what was done, and `why` gives reasons."""
        self.matches += 1
        self.done.append(Note(text, source_line(node), tuple(why)))

    def refuse(self, node: fx.Node, reason: str) -> None:
        """Note the `reason` why `node` was left as it is."""
        self.refused.append(Note(reason, source_line(node)))

    def warn(self, node: fx.Node, text: str) -> None:
        """Note that `node` will be slow; `text` says why."""
        self.warnings.append(Note(text, source_line(node)))


@dataclass(frozen=True)
class PassContext:
    """What a pass may depend on besides the graph.

    Attributes:
        arch: compute capability to plan for (100 for sm_100); None for that of the tensors' device.
        invariant: whether all that stands must be batch-invariant (`require_invariance`).
    """

    arch: int | None = None
    invariant: bool = False

    def machine(self, device: torch.device) -> tuple[int | None, frozenset[str]]:
        """The architecture that calls on `device` are planned for, and the backends that are not installed there.

        A plan for a stated architecture assumes a machine with every package. On this machine, what is installed counts.
        """
        return (device_arch(device), missing_backends()) if self.arch is None else (self.arch, frozenset())


class GraphPass(ABC):
    """A rewrite of a functional post-grad graph. It has no state: whatever varies comes with the context.

    Attributes:
        name: for switches, counters and reports.
    """

    name: ClassVar[str]

    @classmethod
    def about(cls) -> str:
        """The first sentence of the docstring of the pass's file."""
        return ((sys.modules[cls.__module__].__doc__ or "").strip().splitlines() or [""])[0].rstrip(".")

    @abstractmethod
    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        """Rewrite a graph. The manager removes dead nodes afterwards.

        Args:
            graph: is changed in place.
            context: what the rewrite may depend on besides the graph.
            result: notes what was done and refused.
        """
