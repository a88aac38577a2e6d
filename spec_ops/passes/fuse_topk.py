"""Find the likeliest few tokens, and their probabilities, in one launch.

    values, ids = topk(log_softmax(logits.float(), -1), 4)        ->        values, ids = topk_logits(logits, 4, "log_softmax")

Inductor has no kernel for `topk`. torch's takes two launches where rows are short, and about twenty where they are few and as
long as a vocabulary; and the probabilities are written to memory for it. Each draft step of a tree is such a graph.

Probabilities rise with their logits, so the likeliest tokens are those of the largest logits. Of tokens with equal scores torch
may take any; `topk_logits` takes the first.

Probabilities that something else reads too stay, and the op ranks them as they are. If it computed them anew, they would be
rounded differently, and `p >= values[:, -1:]` would no longer keep `k` tokens.

The op finds one value after the other, so many values of many long rows are left to torch (`docs/notebook/launches.md`), unless
results must be batch-invariant: otherwise the number of rows would decide the bits.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from spec_ops.ops.topk import FLOATS, MAX_ROW, MAX_TOP_K, topk_logits_op
from spec_ops.passes.analysis.graph import arg, calls, insert, value
from spec_ops.passes.analysis.replacement import in_place_of
from spec_ops.passes.analysis.softmax import Softmax, find_softmax
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten = torch.ops.aten
ALWAYS = 8  # up to so many values of a row are found faster than by torch, however many rows there are
MOST = 1 << 25  # numbers in all rows, times how many of a row are wanted: up to here torch's launches take longer


class FuseTopk(GraphPass):
    name = "fuse_topk"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        fused: list[fx.Node] = []
        for node in calls(graph, aten.topk.default):
            scores, k = node.args[0], arg(node, "k")
            fake = value(scores)
            if fake.device.type != "cuda" or fake.dtype not in FLOATS or fake.dim() == 0:
                continue
            if not isinstance(k, int) or not isinstance(fake.shape[-1], int):
                result.refuse(node, "topk: the rows' length, or how many are wanted, is not known while compiling")
            elif not arg(node, "largest") or arg(node, "dim") % fake.dim() != fake.dim() - 1:
                result.refuse(node, "topk: not of the largest values of the last dimension")
            elif not 1 <= k <= MAX_TOP_K:
                result.refuse(node, f"topk: {k} values of a row; `topk_logits` finds 1 to {MAX_TOP_K}")
            elif fake.shape[-1] > MAX_ROW:
                result.refuse(node, f"topk: rows of {fake.shape[-1]} values; `topk_logits` takes rows of {MAX_ROW} at most")
            elif k > ALWAYS and not context.invariant and not (isinstance(size := fake.numel(), int) and size * k <= MOST):
                result.refuse(node, f"topk: {k} values of each row of {fake.shape[-1]}, which torch's kernels find faster")
            else:
                fused.append(node)
                result.did(node, f"the {k} largest of {fake.shape[-1]} values in one launch")
        for node in fused:
            _fuse(graph, node, _softmax_of(node, fused))


def _softmax_of(node: fx.Node, fused: list[fx.Node]) -> Softmax | None:
    """The softmax whose largest values `node` finds, if nothing but `fused` reads it, rounded or not; else None."""
    scores: Any = node.args[0]
    found = find_softmax(scores)
    if found is None or not set(scores.users).issubset(fused):
        return None
    return found if scores is found.exact or list(found.exact.users) == [scores] else None


def _fuse(graph: fx.Graph, node: fx.Node, found: Softmax | None) -> None:
    logits = node.args[0] if found is None else found.logits
    scores = "none" if found is None else "log_softmax" if found.log else "softmax"
    best = insert(graph, node, topk_logits_op, (logits, arg(node, "k"), scores, value(node.args[0]).dtype))
    for user in list(node.users):
        new = insert(graph, node, operator.getitem, (best, user.args[1]), source=user)
        user.replace_all_uses_with(in_place_of(user, new))
        graph.erase_node(user)
    graph.erase_node(node)
