"""Choose the experts of a mixture's tokens in one launch.

    scores = softmax(logits.float(), -1)
    weights, ids = topk(scores, 8)                                    ids, weights = route_experts(logits, k=8)
    weights = weights / weights.sum(-1, keepdim=True)         ->      moe_experts(x, ids, weights, ...)
    moe_experts(x, ids, weights, ...)

Inductor has no kernel for `topk`: torch's takes two launches, or more with groups of experts, and splits what comes before
and after it. With few tokens a mixture's layer takes some ten microseconds, so that each launch counts.

A router is recognized by what it computes (`analysis/routers.py`). Where its weights are of a kind that `route_experts` does
not have, the op does what comes before them, or chooses the experts alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from spec_ops.backends.registry import device_arch
from spec_ops.ops.moe import moe_experts_op, route_experts_op
from spec_ops.passes.analysis.graph import arg, calls, insert, value
from spec_ops.passes.analysis.norms import only_user
from spec_ops.passes.analysis.replacement import in_place_of
from spec_ops.passes.analysis.routers import NotARouterError, Router, Routers
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten, prims = torch.ops.aten, torch.ops.prims


class FuseRouter(GraphPass):
    name = "fuse_router"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        if context.invariant:  # rounds of other numbers of rows must not differ in what is fused
            return
        routers = Routers()
        for node in calls(graph, moe_experts_op):
            arch = context.arch if context.arch is not None else device_arch(value(arg(node, "x")).device)
            ids, weights = arg(node, "topk_ids"), arg(node, "topk_weights")
            if arch is None or _is_routed(ids, weights):
                continue
            try:
                router = routers.find(ids, weights)
            except NotARouterError as error:
                result.refuse(node, f"router: {error}")
                continue
            _fuse(graph, router)
            form = router.form
            groups = f" of {form.top_groups} of {form.groups} groups" if form.groups > 1 else ""
            experts = value(router.logits).shape[1]
            weights = " and their weights" if router.weights is not None else ""
            result.did(node, f"{form.k} of {experts} experts{groups}{weights} in one launch")


def _is_routed(*nodes: Any) -> bool:
    """Whether one of `nodes` comes from the op already; ranks that share experts see only some of the ids as it gives them."""
    given = [node for node in nodes if isinstance(node, fx.Node)]
    sources: list[Any] = [source for node in given for source in (node, *node.all_input_nodes)]
    return any(one.target is operator.getitem and one.args[0].target is route_experts_op for one in sources)


def _fuse(graph: fx.Graph, router: Router) -> None:
    topk: Any = router.ids.args[0]
    bias = router.bias
    if bias is not None and value(bias).dim() > 1:
        bias = insert(graph, topk, aten.reshape.default, (bias, [-1]))
    if bias is not None and value(bias).dtype != torch.float32:
        bias = insert(graph, topk, prims.convert_element_type.default, (bias, torch.float32))
    weights = router.weights
    if weights is not None and value(weights).dtype == torch.float32:
        rounded = only_user(weights, prims.convert_element_type.default)
        if rounded is not None and value(rounded).dtype in (torch.bfloat16, torch.float16):
            weights = rounded  # in the same launch
    dtype = torch.float32 if weights is None else value(weights).dtype
    routed = insert(graph, topk, route_experts_op, (router.logits, bias, *router.form, dtype))
    for place, old in enumerate((router.ids, weights)):
        if old is not None:
            new = insert(graph, topk, operator.getitem, (routed, place), source=old)
            old.replace_all_uses_with(in_place_of(old, new))
