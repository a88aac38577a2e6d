"""Compute a concatenation as a whole where a graph is partitioned.

    tokens = cat([last, first, second])        ->        tokens = spec_ops.concatenate([last, first, second])

Inductor computes the pieces of a `cat` in slices of one buffer. If a call that no CUDA graph can record (a host plan, a copy to
the host) lies between them, the pieces are computed in different partitions. Each partition allocates a buffer of its own, and
the pieces of the other partitions are lost (torch 2.11 to 2.13). A whole concatenation is one kernel that reads its pieces.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from spec_ops.ops.concatenate import concatenate
from spec_ops.passes.analysis.counts import cuda_graphs
from spec_ops.passes.analysis.graph import value
from spec_ops.passes.base import GraphPass, PassContext, PassResult


@functools.cache
def register_lowering() -> None:
    """Tell Inductor how to compute the op. Not at import, since Inductor takes a second to import."""
    from torch._inductor import lowering

    def lowered(tensors, dim):
        return lowering.pointwise_cat(list(tensors), dim)

    lowering.register_lowering(concatenate, type_promotion_kind=None)(lowered)


class WholeConcatenations(GraphPass):
    name = "whole_concatenations"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        cats = [node for node in graph.nodes if node.target is torch.ops.aten.cat.default and _on_cuda(node)]
        if not cats or cuda_graphs(graph) < 2:
            return
        register_lowering()
        for node in cats:
            tensors: Any = node.args[0]
            dim: Any = node.args[1] if len(node.args) > 1 else 0
            if reason := _obstacle(value(node), [value(piece) for piece in tensors]):
                result.refuse(node, reason)
                continue
            node.target, node.args = concatenate, (tensors, dim % value(node).dim())
            result.did(node, f"{len(tensors)} pieces are put together by one kernel")


def _on_cuda(node: fx.Node) -> bool:
    return value(node).device.type == "cuda"


def _obstacle(whole: torch.Tensor, pieces: list[torch.Tensor]) -> str | None:
    """Why a concatenation cannot be one kernel as Inductor writes it; None if it can."""
    if not all(isinstance(size, int) for piece in pieces for size in piece.shape):
        return "its pieces have sizes that are not known while compiling"
    if any(piece.dim() != whole.dim() or piece.dtype != whole.dtype for piece in pieces):
        return "its pieces differ in rank or dtype"
    return None if whole.is_contiguous() else "its result is not contiguous"
