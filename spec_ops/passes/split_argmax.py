"""Compute the argmax of a few rows over a vocabulary in parts, so that all multiprocessors read.

    argmax(logits [4, 128256], -1)

        parts = view(logits, [4, 48, 2672])
        best = argmax(amax(parts, -1), -1)                                    the part of the largest value
        gather(argmax(parts, -1), -1, best) + best * 2672

Inductor splits sums and maxima of few rows, but not argmax: one program reads each row (torch 2.11 to 2.15). Here the two
reductions over the parts read the logits in one kernel. The result is the same, also for ties and NaN: the first of the largest
values is in the first part that has one.

Rows stay whole where there are many of them, and where no part of `PART` values divides them evenly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from spec_ops.passes.analysis.graph import calls, insert, value
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten = torch.ops.aten
PROGRAMS = 512  # programs to read with: three or four for every multiprocessor of a large GPU
PART = (1024, 16384)  # least and most values that one program reads: fewer are not worth a program
ALIGNED = 8  # values: 16 bytes of a 2-byte dtype
MIN_WIDTH = 16384  # 32000 values: 8.4 us whole, 4.0 us split; 128256: 31.6 and 5.0 (4 rows, H200)


class SplitArgmax(GraphPass):
    name = "split_argmax"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        for node in calls(graph, aten.argmax.default):
            x, dim, keepdim = _operands(node)
            fake = value(x)
            if fake.device.type != "cuda" or fake.dim() == 0 or not isinstance(dim, int) or dim % fake.dim() != fake.dim() - 1:
                continue
            width = fake.shape[-1]
            if not all(isinstance(size, int) for size in fake.shape):
                result.refuse(node, "argmax: its sizes are not known while compiling")
                continue
            rows = fake.numel() // max(width, 1)
            if width < MIN_WIDTH or rows >= PROGRAMS // 2:
                continue
            if (parts := _parts(rows, width)) is None:
                result.refuse(node, f"argmax: no part of {PART[0]} to {PART[1]} values divides rows of {width} evenly")
                continue
            _split(graph, node, x, parts, keepdim)
            result.did(node, f"argmax over {rows} rows of {width}: in {parts} parts each")


def _operands(node: fx.Node) -> tuple[fx.Node, Any, bool]:
    """The values, the dimension (None: all of them) and `keepdim`."""
    x, dim, keepdim = (*node.args, None, False)[:3] if len(node.args) < 3 else node.args
    return x, dim, bool(keepdim)  # type: ignore[return-value]


def _parts(rows: int, width: int) -> int | None:
    """Parts per row, so that their number is as close to `PROGRAMS` as aligned parts of equal size allow; None if there are no
    such parts."""
    sizes = range(PART[0], min(PART[1], width // 2) + 1, ALIGNED)
    return min((width // size for size in sizes if width % size == 0), key=lambda n: abs(n * rows - PROGRAMS), default=None)


def _split(graph: fx.Graph, node: fx.Node, x: fx.Node, parts: int, keepdim: bool) -> None:
    *outer, width = value(x).shape
    size = width // parts
    split = insert(graph, node, aten.reshape.default, (x, [*outer, parts, size]))
    largest = insert(graph, node, aten.amax.default, (split, [-1]))
    places = insert(graph, node, aten.argmax.default, (split, -1))
    part = insert(graph, node, aten.argmax.default, (largest, -1, True))
    place = insert(graph, node, aten.gather.default, (places, -1, part))
    start = insert(graph, node, aten.mul.Tensor, (part, size))
    best = insert(graph, node, aten.add.Tensor, (place, start))
    node.replace_all_uses_with(best if keepdim else insert(graph, node, aten.squeeze.dim, (best, -1)))
    graph.erase_node(node)
