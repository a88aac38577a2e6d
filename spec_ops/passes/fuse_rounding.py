"""Round rows to float8 in one launch, with the activation or the norm before that.

    h = silu(gate) * up
    step = amax(abs(h), -1) / 448                                            numbers, step = gated_round_rows(gate, up, "silu")
    out = float8_mm(convert(h / step, float8_e4m3fn), step, weight, scale)   out = float8_mm(numbers, step, weight, scale)

Inductor finds the greatest magnitude of a long row in two kernels and rounds in a third; a norm with a scale for each 128
columns is two or three. Here (`backends/triton/linear/rounding.py`) it is one kernel. With a scale for each 128 columns, and
without a norm, it is launched early, as the products around it are.

How the rows are computed is read backwards from each `float8_mm`, the op that `lower_skinny_mm` puts in place of products of
rows that were rounded:

- `activation(gate) * up`: SiLU, GELU, and GELU by tanh, of products;
- an RMS norm, with the residual sum before it;
- rows as they are.

Inputs must be in memory: written by attention, another product, an op of ours, or the graph's caller. A term of a residual sum
may also be one that something else reads, as the next sum does. Whatever else Inductor computes, it can round in the same
kernel, so it keeps that. It also keeps what more than the rounding reads, and roundings of another form
(`analysis/roundings.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from spec_ops.backends.float8_rows import MAX_COLUMNS
from spec_ops.backends.weight_format import BLOCK
from spec_ops.ops.linear import float8_mm_op
from spec_ops.ops.rounding import add_norm_round_rows_op, gated_round_rows_op, norm_round_rows_op, round_rows_op
from spec_ops.passes.analysis.gates import gated
from spec_ops.passes.analysis.graph import arg, calls, insert, op_of, set_arg, value
from spec_ops.passes.analysis.norms import RMSNorm, find_norms
from spec_ops.passes.analysis.roundings import NotARoundingError, Rounding, rounding_of
from spec_ops.passes.analysis.rows import RESHAPES
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten, prims = torch.ops.aten, torch.ops.prims
_PIECES = {aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.select.int, operator.getitem}
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default}


class _NotFusedError(Exception):
    """Why Inductor keeps a rounding."""


class FuseRounding(GraphPass):
    name = "fuse_rounding"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        products: dict[tuple[Any, Any], list[fx.Node]] = {}
        for node in calls(graph, float8_mm_op):
            products.setdefault((_unshaped(node.args[0]), _unshaped(node.args[1])), []).append(node)
        if not products:
            return
        norms = {norm.out: norm for unrounded in (False, True) for norm in find_norms(graph, unrounded)}
        for readers in products.values():
            first = readers[0]
            m, k = value(first.args[0]).shape
            try:
                rounding = rounding_of(*first.args[:2])
                what = _fuse(graph, rounding, (m, k), norms, readers)
            except (NotARoundingError, _NotFusedError) as reason:
                result.refuse(first, f"rounding of {m} x {k}: {reason}")
                continue
            result.did(first, f"rounding of {m} x {k}, {rounding}, {what}")


def _unshaped(node: Any) -> Any:
    while node.op == "call_function" and node.target in RESHAPES:
        node = node.args[0]
    return node


def _fuse(
    graph: fx.Graph, rounding: Rounding, rows: tuple[int, int], norms: dict[fx.Node, RMSNorm], readers: Sequence[fx.Node]
) -> str:
    """Replace the rounding that `readers` read. Returns what was done."""
    k, before = rows[1], rounding.rows
    columns = rounding.columns or k
    if rounding.given is not None and rounding.given.op != "placeholder":  # it may come later than what reads it then
        raise _NotFusedError("the step that is given is a part of an input")
    if columns not in (BLOCK, k):
        raise _NotFusedError(f"{columns} columns have a step, not {BLOCK} or all")
    how = (columns, rounding.step_dtype, rounding.quotient_dtype, rounding.least, rounding.zero, rounding.given)
    first = next(node for node in graph.nodes if node is rounding.numbers or node in rounding.inside)
    norm, gate = norms.get(before), gated(before)
    if norm is None and before.target is prims.convert_element_type.default:
        exact: Any = before.args[0]  # which is read in float32 as well
        norm = norms.get(exact)
        norm = norm if norm is not None and value(before).dtype == value(norm.x).dtype else None
    whole = columns == k and rounding.given is None
    dtype = value(before if norm is None else norm.x).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise _NotFusedError(f"rows are {dtype} before")
    for name, of in (("steps", rounding.step_dtype), ("quotients", rounding.quotient_dtype)):
        if of not in (dtype, torch.float32):
            raise _NotFusedError(f"{name} are {of}")
    if norm is not None and value(norm.x).shape[-1] == k:
        if k > MAX_COLUMNS:
            raise _NotFusedError(f"rows of more than {MAX_COLUMNS} columns")
        _check_readers(rounding)
        return _with_norm(graph, rounding, rows, norm, how, readers)
    if whole and k > MAX_COLUMNS:
        raise _NotFusedError(f"rows of more than {MAX_COLUMNS} columns")
    if gate is not None and value(before).shape[-1] == k:
        _check_readers(rounding)
        parts = [_as_rows(graph, first, part, rows) for part in (gate.gate, gate.up)]
        call = insert(graph, first, gated_round_rows_op, (*parts, gate.activation, *how), source=readers[0])
        _replace(graph, rounding, call, 0, readers)
        return f"after {gate.activation}(gate) * up"
    if rounding.given is not None:
        _check_readers(rounding)  # Inductor rounds to several such steps in one kernel
    call = insert(graph, first, round_rows_op, (_as_rows(graph, first, before, rows), *how), source=readers[0])
    _replace(graph, rounding, call, 0, readers)
    return "alone"


def _with_norm(
    graph: fx.Graph, rounding: Rounding, rows: tuple[int, int], norm: RMSNorm, how: tuple, readers: Sequence[fx.Node]
) -> str:
    weight = value(norm.weight)
    if norm.weight.op != "placeholder" or weight.dtype != value(norm.x).dtype:
        raise _NotFusedError("the norm's weight is not an input of the rows' dtype")
    # `(x * rstd).to(dtype) * weight` ends with the product; the other form with a conversion, if it is not left out.
    converts = rounding.rows.target is prims.convert_element_type.default
    roundings = 1 if converts else 0 if value(rounding.rows).dtype == torch.float32 else 2
    norm_how = (norm.weight, norm.eps, roundings, *how)
    total = _unshaped(norm.x)
    terms: Any = total.args
    if total.target is aten.add.Tensor and not total.kwargs and all(_is_alike(term, total) for term in terms):
        x, residual = (_as_rows(graph, total, term, rows, shared=True) for term in terms)
        call = insert(graph, total, add_norm_round_rows_op, (x, residual, *norm_how), source=norm.out)
        summed = insert(graph, total, operator.getitem, (call, 0), source=total)
        total.replace_all_uses_with(_shaped(graph, total, summed, value(total).shape))
        _replace(graph, rounding, call, 1, readers)
        return "after a residual sum and an RMSNorm"
    call_at = next(node for node in graph.nodes if norm.x in node.all_input_nodes)
    call = insert(
        graph, call_at, norm_round_rows_op, (_as_rows(graph, call_at, norm.x, rows), *norm_how), source=norm.out
    )  # fmt: skip
    _replace(graph, rounding, call, 0, readers)
    return "after an RMSNorm"


def _is_alike(term: Any, total: fx.Node) -> bool:
    fake, whole = value(term), value(total)
    return isinstance(term, fx.Node) and fake.shape == whole.shape and fake.dtype == whole.dtype


def _check_readers(rounding: Rounding) -> None:
    """Raises if rows are read by something other than the rounding: then they are computed all the same."""
    results = {rounding.numbers, rounding.steps}
    for node in {rounding.rows, *rounding.inside} - results:
        for user in node.users:
            if user not in rounding.inside:
                raise _NotFusedError(f"{user.target} reads the rows too")


def _as_rows(graph: fx.Graph, before: fx.Node, node: fx.Node, rows: tuple[int, int], shared: bool = False) -> fx.Node:
    """`node` as `rows`, a view whose columns are contiguous. `shared`: it may be computed by Inductor, for others too.

    Raises:
        _NotFusedError: Inductor computes it, in the kernel that reads it; or it lies in another way.
    """
    if not (_in_memory(node) or (shared and len(_unshaped(node).users) > 1)):
        source = _unshaped(node)
        raise _NotFusedError(f"Inductor computes what is rounded by {source.target}, and can round in the same kernel")
    new = _shaped(graph, before, node, rows)
    fake = value(new)
    if fake.stride(1) != 1 or fake.untyped_storage()._cdata != value(node).untyped_storage()._cdata:
        raise _NotFusedError("what is rounded lies in memory in another order")
    return new


def _in_memory(node: Any) -> bool:
    """Whether what computes `node` writes it, whoever reads it: no kernel of Inductor's, or one that others read too."""
    while node.op == "call_function" and (node.target in RESHAPES or node.target in _PIECES):
        node = node.args[0]
    if node.op in ("placeholder", "get_attr") or op_of(node) is not None or node.target in _PRODUCTS:
        return True
    return getattr(node.target, "namespace", "") == "_c10d_functional"


def _shaped(graph: fx.Graph, before: fx.Node, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    return node if value(node).shape == shape else insert(graph, before, aten.reshape.default, (node, list(shape)))


def _replace(graph: fx.Graph, rounding: Rounding, call: fx.Node, place: int, readers: Sequence[fx.Node]) -> None:
    """Let all that read numbers and steps read results `place` and the next of `call`."""
    after = call.next
    numbers, steps = (insert(graph, after, operator.getitem, (call, place + i), source=readers[0]) for i in range(2))
    for node in readers:
        for name, new in (("x", numbers), ("x_scale", steps)):
            set_arg(node, name, _shaped(graph, node, new, value(arg(node, name)).shape))
    if rounding.numbers.users:
        rounding.numbers.replace_all_uses_with(_shaped(graph, after, numbers, value(rounding.numbers).shape))
    if rounding.given is None and any(user not in rounding.inside for user in rounding.steps.users):
        old = value(rounding.steps)
        new = steps
        if old.dtype != torch.float32:
            new = insert(graph, after, prims.convert_element_type.default, (new, old.dtype))
        if not value(new).is_contiguous():  # others may look at them as `view` does
            new = insert(graph, after, aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
        new = _shaped(graph, after, new, old.shape)
        rounding.steps.replace_all_uses_with(new, lambda user: user not in rounding.inside)
