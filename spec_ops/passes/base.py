"""What a pass is, and what it reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from spec_ops.backends.registry import device_arch, missing_backends
from spec_ops.passes.analysis.graph import source_line


@dataclass(frozen=True)
class Note:
    """One thing a pass did or refused, at a line of the user's source."""

    text: str
    where: str


@dataclass
class PassResult:
    """Outcome of one pass over one graph: how often it matched, what it did, what it refused and why, and what is slow."""

    name: str
    matches: int = 0
    done: list[Note] = field(default_factory=list)
    refused: list[Note] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)

    def did(self, node: fx.Node, text: str) -> None:
        """Count a rewrite of (or because of) `node`."""
        self.matches += 1
        self.done.append(Note(text, source_line(node)))

    def refuse(self, node: fx.Node, reason: str) -> None:
        self.refused.append(Note(reason, source_line(node)))

    def warn(self, node: fx.Node, text: str) -> None:
        self.warnings.append(Note(text, source_line(node)))


@dataclass(frozen=True)
class PassContext:
    """What a pass may depend on besides the graph.

    Attributes:
        arch: compute capability to plan for (100 for sm_100) instead of the one of the tensors' device; None: the device's.
    """

    arch: int | None = None

    def machine(self, device: torch.device) -> tuple[int | None, frozenset[str]]:
        """The architecture that calls on `device` are planned for, and the backends that are not installed there.

        A plan for a stated architecture is a plan for a machine with every package; for this one only what is here counts.
        """
        return (device_arch(device), missing_backends()) if self.arch is None else (self.arch, frozenset())


class GraphPass(ABC):
    """A rewrite of a functional post-grad graph. Stateless: all that varies comes in through the context."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        """Rewrite `graph` in place; leave dead nodes to the manager, which removes them after every pass."""
