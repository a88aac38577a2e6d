"""Let only batch-invariant operations stand: `compile(..., invariant=True)`.

    mm(x, permute(weight, [1, 0]))                        ->   skinny_mm(x, weight, None, invariant=True)
    bmm(x [heads, rows, k], weight [heads, k, n])         ->   batched_mm(x, weight)
    (x * rsqrt(mean(x ** 2, -1) + eps)) * g               ->   rms_norm(x, g, eps)
    y = x + residual; rms_norm(y, g, eps)                 ->   y, h = add_rms_norm(x, residual, g, eps)
    sum(x, [-1])                                          ->   row_sum(x)
    wait_tensor(_c10d_functional.all_reduce(x, "sum"))    ->   all_reduce(x, "sum")

`spec_ops/ops/invariance.py` judges every node: it is batch-invariant as it is, another operation takes its place, or it is
refused, which fails the compilation with all such nodes and their source lines. What takes whose place depends on weights and
dtypes, never on the number of rows: the rounds of two batches, or of two chain lengths, must come to the same operations.

Products with plain weights are replaced by `lower_skinny_mm` already, so that `fuse_norm_linear` finds them. What Inductor
makes of the pointwise nodes that are left must not depend on what it fuses them with: `INDUCTOR` rounds as the graph says, and
leaves multiplications and additions apart.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from spec_ops.ops.invariance import Verdict, judge, named_arguments
from spec_ops.ops.invariant import add_rms_norm_op, rms_norm_op
from spec_ops.passes.analysis.graph import AUTO_FUNCTIONALIZED, insert, value
from spec_ops.passes.analysis.norms import RMSNorm, find_norms
from spec_ops.passes.analysis.replacement import in_place_of
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten = torch.ops.aten

# Of Inductor, where invariance is required. On the CPU vectors and what is left over have different functions.
INDUCTOR = {"emulate_precision_casts": True, "cpp.simdlen": 1}
# Python's own operators, on sizes and on tuples of results.
_PLAIN = ("_operator", "math", "torch.fx.experimental.sym_node", "torch.utils._sympy.functions")


class InGraph:
    """Replacements are nodes before `node`."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def value(self, operand: Any) -> Any:
        return value(operand)

    def call(self, op: Any, *args: Any) -> fx.Node:
        return insert(self.graph, self.node, op, args, source=self.node)


class RequireInvariance(GraphPass):
    name = "require_invariance"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        if not context.invariant:
            return
        for norm in find_norms(graph):
            if value(norm.x).dim() > 1:  # the only dimension is that of the rows
                _replace_norm(graph, norm, result)
        graph.eliminate_dead_code()
        for node in [node for node in graph.nodes if node.op == "call_function"]:
            verdict, arguments = judge_node(node, context)
            if verdict.refused is not None:
                result.refuse(node, verdict.refused)
            elif verdict.replace is not None:
                if node.target is AUTO_FUNCTIONALIZED:
                    result.refuse(node, f"{node.args[0]} writes its arguments, and is replaced in graphs that do not")
                    continue
                new = verdict.replace(InGraph(graph, node), arguments)
                result.did(node, f"{node.target}: {verdict.text}")
                _put(graph, node, new)
        for node in graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default):
            if getattr(node.args[0].target, "namespace", None) != "_c10d_functional":  # nothing is under way
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


def _replace_norm(graph: fx.Graph, norm: RMSNorm, result: PassResult) -> None:
    """Its own kernel, which adds the residual too where that gives the same bits: so it does not matter where it does."""
    *_, columns = value(norm.x).shape
    rounded = norm.out.target is aten.mul.Tensor  # the weight comes last
    terms = _terms(norm)
    emitter = InGraph(graph, norm.out if terms is None else norm.x)
    rows = [emitter.call(aten.reshape.default, term, [-1, columns]) for term in terms or [norm.x]]
    if terms is None:
        new = emitter.call(rms_norm_op, *rows, norm.weight, norm.eps, rounded)
        result.did(new, "RMSNorm: rms_norm")
    else:
        both = emitter.call(add_rms_norm_op, *rows, norm.weight, norm.eps, rounded)
        total, new = (emitter.call(operator.getitem, both, i) for i in range(2))
        result.did(both, "RMSNorm: add_rms_norm")
    shaped = emitter.call(aten.reshape.default, new, list(value(norm.out).shape))
    _put(graph, norm.out, shaped)
    if terms is not None:
        _put(graph, norm.x, emitter.call(aten.reshape.default, total, list(value(norm.x).shape)))


def _terms(norm: RMSNorm) -> Sequence[fx.Node] | None:
    """The two tensors whose sum is normalized, if the norm can be computed where they are added."""
    total = norm.x
    if total.target is not aten.add.Tensor or total.kwargs or norm.weight.op != "placeholder":
        return None
    alike = [isinstance(t, fx.Node) and _like(value(t), value(total)) for t in total.args]
    return total.args if len(alike) == 2 and all(alike) else None  # type: ignore[return-value]


def _like(term: Any, total: torch.Tensor) -> bool:
    return isinstance(term, torch.Tensor) and (term.shape, term.dtype) == (total.shape, total.dtype)


def judge_node(node: fx.Node, context: PassContext) -> tuple[Verdict, Sequence[Any]]:
    """What is to become of a node, and its arguments in the order of its op's schema."""
    target: Any = node.target
    kwargs: dict[str, Any] = dict(node.kwargs)
    if target is AUTO_FUNCTIONALIZED:
        target = node.args[0]
        given = {name: argument for name, argument in kwargs.items() if not name.startswith("_")}
        # Which of the bases a mutated argument is does not matter here.
        written = (argument.name for argument in target._schema.arguments if argument.alias_info)
        arguments = named_arguments(target, (), dict.fromkeys(written, kwargs["_all_bases"][0]) | given)
    elif isinstance(target, torch._ops.OpOverload):
        arguments = named_arguments(target, node.args, kwargs)
    elif getattr(target, "__module__", "") in _PLAIN or getattr(target, "__name__", "").startswith("sym_"):
        return Verdict(), ()
    else:
        return Verdict(f"{target} is not known to be batch-invariant"), ()
    return judge(target, arguments, value, lambda device: context.machine(device)[0]), list(arguments.values())


def _put(graph: fx.Graph, node: fx.Node, new: Any) -> None:
    if not isinstance(new, tuple):
        node.replace_all_uses_with(in_place_of(node, new))
        graph.erase_node(node)
        return
    for user in list(node.users):  # an operation of several results is read by `getitem` alone
        user.replace_all_uses_with(in_place_of(user, new[user.args[1]]))  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
