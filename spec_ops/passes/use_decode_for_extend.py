"""Run a short extend of uniform length on the decode kernel instead of the prefill kernel (sglang#24566).

    q_indptr = arange(0, (bs + 1) * n, n)
    out = mha_extend(q, ..., q_indptr, max_q_len, ...)                                     q [bs * n, heads, dim]
->
    out = view(mha_draft_extend(view(q, [bs, n, heads, dim]), ..., None, 0, ...), [bs * n, heads, dim])

The lengths must provably be `n`, so `q_indptr` must be a constant of the graph. It is evaluated, not matched by a pattern: only
its entries count, not the integer ops that made them (arange, full, cumsum after a zero, slice assignment, a literal).

Both ops align queries to the end of `seq_lens`, and give zeros to a query that sees nothing. So the results agree for any
`seq_lens`, also 0 and less than `n`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from spec_ops.backends import BackendError, select_backend
from spec_ops.backends.registry import known_while_compiling
from spec_ops.ops.attention import HOST_PLAN_OPS, OPS
from spec_ops.ops.tree import MAX_TREE_TOKENS
from spec_ops.passes.analysis.graph import ATTENTION_OPS, arg, attention_call, call_like, calls, insert, value
from spec_ops.passes.base import GraphPass, PassContext, PassResult

# Decode kernels hold all queries of a request in one tile and stream the KV. They are made for drafts of at most 64 tokens, the
# width of a tree mask. A longer extend is a prefill, and faster on the kernel made for that.
MAX_DECODE_QUERIES = MAX_TREE_TOKENS

# No q_indptr is nearly as long. The limit keeps large constants that a q_indptr is made of from being computed while compiling.
MAX_CONSTANT_ELEMENTS = 1 << 16

# Constants of the program. Other attributes (AOTInductor's buffers) may be replaced between calls.
_CONSTANT_ATTRIBUTES = ("_tensor_constant", "lifted_tensor", "_lifted_tensor", "_frozen_param")

_DRAFT_EXTEND: dict[Any, Any] = {
    table[f"{kind}_extend"]: table[f"{kind}_draft_extend"] for table in (OPS, HOST_PLAN_OPS) for kind in ("mha", "mla")
}

aten, prims = torch.ops.aten, torch.ops.prims
# For integers these are exact on every device: the graph would compute what they give on the CPU now.
_CONSTANT_OPS = frozenset(
    {
        prims.iota, prims.convert_element_type, prims.device_put, aten.arange, aten.full, aten.zeros, aten.ones,
        aten.scalar_tensor, aten.add, aten.sub, aten.rsub, aten.mul, aten.neg, aten.cumsum, aten.cat, aten.constant_pad_nd,
        aten.slice, aten.select, aten.slice_scatter, aten.select_scatter, aten.expand, aten.view, aten.reshape,
        aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.copy, aten.clone, aten.alias, aten.detach, aten.lift_fresh_copy,
        aten._to_copy,
    }
)  # fmt: skip
# These use only the shape and dtype of their tensor.
_SHAPE_OPS = frozenset({aten.full_like, aten.zeros_like, aten.ones_like, aten.new_full, aten.new_zeros, aten.new_ones})


class NotConstant(Exception):
    """Why a node has no value at compile time."""


class Constants:
    """Values of small integer tensors that depend only on the program."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, torch.Tensor] = {}

    def __getitem__(self, node: fx.Node) -> torch.Tensor:
        """The contents of `node`, on the CPU.

        Raises:
            NotConstant: with the reason.
        """
        with _disable_current_modes(), torch.no_grad():
            return self._evaluate(node, depth=0)

    def _evaluate(self, node: fx.Node, depth: int) -> torch.Tensor:
        if node not in self._known:
            _check_small_integers(node)
            if depth > 200:
                raise NotConstant("is too long a computation to follow")
            if node.op == "get_attr":
                self._known[node] = _attribute(node)
            elif node.op == "call_function":
                self._known[node] = self._call(node, depth)
            else:
                raise NotConstant(f"depends on the graph's input {node.name}")
        return self._known[node]

    def _call(self, node: fx.Node, depth: int) -> torch.Tensor:
        target = node.target
        packet = getattr(target, "overloadpacket", None)
        shape_only = packet in _SHAPE_OPS
        if not (shape_only or packet in _CONSTANT_OPS) or target._schema.is_mutable:  # type: ignore[union-attr]
            raise NotConstant(f"depends on {target}")

        def known(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return _blank(argument) if shape_only else self._evaluate(argument, depth + 1)
            if isinstance(argument, torch.SymInt):
                raise NotConstant("depends on a dynamic size")
            return torch.device("cpu") if isinstance(argument, torch.device) else argument

        args = fx.node.map_aggregate(node.args, known)
        kwargs = dict(fx.node.map_aggregate(node.kwargs, known))  # type: ignore[call-overload]
        kwargs.pop("pin_memory", None)
        return target(*args, **kwargs)  # type: ignore[operator, misc]


def _check_small_integers(node: fx.Node) -> None:
    fake = value(node)
    if not isinstance(fake, torch.Tensor):
        raise NotConstant(f"depends on {node.name}, which is no tensor")
    if fake.is_floating_point() or fake.is_complex():
        raise NotConstant(f"depends on {node.name}, which is not integer")
    if not all(isinstance(n, int) for n in fake.shape):
        raise NotConstant(f"depends on {node.name}, which has a dynamic shape")
    if fake.numel() > MAX_CONSTANT_ELEMENTS:
        raise NotConstant(f"depends on {node.name}, which has more than {MAX_CONSTANT_ELEMENTS} elements")


def _blank(node: fx.Node) -> torch.Tensor:
    fake = value(node)
    if not isinstance(fake, torch.Tensor) or not all(isinstance(n, int) for n in fake.shape):
        raise NotConstant(f"depends on the shape of {node.name}, which is dynamic")
    return torch.empty((), dtype=fake.dtype).expand(fake.shape)


def _attribute(node: fx.Node) -> torch.Tensor:
    name, module = str(node.target), node.graph.owning_module
    tensor = getattr(module, name, None)
    if not name.startswith(_CONSTANT_ATTRIBUTES) or isinstance(tensor, torch.nn.Parameter):
        raise NotConstant(f"depends on the attribute {name}, which may change between calls")
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta:
        raise NotConstant(f"depends on the constant {name}, whose contents cannot be reached")
    for user in (user for other in node.graph.nodes if other.target == node.target for user in other.users):
        if not isinstance(user.target, torch._ops.OpOverload) or user.target._schema.is_mutable:
            raise NotConstant(f"depends on the constant {name}, which {user.name} may change")
    return tensor.cpu()


class UseDecodeForExtend(GraphPass):
    name = "use_decode_for_extend"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        constants = Constants()
        for node in calls(graph, *_DRAFT_EXTEND):
            op = ATTENTION_OPS[node.target]
            shape = _uniform_shape(node, constants)
            if isinstance(shape, str):
                result.refuse(node, f"{op}: {shape}")
            elif (why := _kernel_refusal(node, shape[1], context)) is not None:
                result.refuse(node, f"{op}: {why}")
            else:
                _rewrite(graph, node, *shape)
                result.did(node, f"{op} of {shape[1]} queries per request becomes {ATTENTION_OPS[_DRAFT_EXTEND[node.target]]}")


def _uniform_shape(node: fx.Node, constants: Constants) -> tuple[int, int] | str:
    """`(bs, n)` if every request has exactly `n` queries; else why this is not known, or why a decode kernel is not wanted."""
    q, seq_lens, max_q_len = value(arg(node, "q")), value(arg(node, "seq_lens")), arg(node, "max_q_len")
    if not isinstance(q, torch.Tensor) or not isinstance(seq_lens, torch.Tensor):
        return "an input has no fake value"
    total, bs = q.shape[0], seq_lens.shape[0]
    if not all(isinstance(n, int) for n in (total, bs, max_q_len)):
        return "the number of queries or requests is not static"
    if bs == 0 or total == 0 or total % bs != 0:
        return f"{total} query rows are not one uniform length for {bs} requests"
    n = total // bs
    if n > MAX_DECODE_QUERIES:
        return f"{n} queries per request are a prefill (at most {MAX_DECODE_QUERIES} go to a decode kernel)"
    if max_q_len < n:
        return f"max_q_len {max_q_len} is less than the {n} queries per request"
    try:
        q_indptr = constants[arg(node, "q_indptr")]
    except NotConstant as reason:
        return f"query lengths are not known at compile time: q_indptr {reason}"
    if q_indptr.tolist() != list(range(0, (bs + 1) * n, n)):
        return f"query lengths are not uniformly {n}: q_indptr is {_short(q_indptr.tolist())}"
    return bs, n


def _short(entries: list[int]) -> str:
    return str(entries) if len(entries) <= 8 else f"[{', '.join(map(str, entries[:8]))}, ...]"


def _kernel_refusal(node: fx.Node, n: int, context: PassContext) -> str | None:
    """Why no kernel would run the draft extend, or only one that ranks lower; None if one would."""
    call = attention_call(node)
    if call is None:
        return "an input has no fake value"
    meta = known_while_compiling(call.meta())
    if isinstance(meta, str):
        return meta
    arch, missing = context.machine(call.q.device)
    decode_meta = dataclasses.replace(meta, step=ATTENTION_OPS[_DRAFT_EXTEND[node.target]], q_len=n)
    try:
        decode = select_backend(decode_meta, arch, call.backend, missing)
    except BackendError as error:
        return str(error)
    try:
        extend = select_backend(meta, arch, call.backend, missing).backend
    except BackendError:
        return None
    # Where both can run the draft extend, selection has compared them, by measured times if there are any. For a backend that
    # cannot there are no times of such a call, so only the ranks compare it with the other.
    if decode.backend.rank > extend.rank and extend.refuse(decode_meta, arch) is not None:
        return f"{decode.backend.name} would run {decode_meta.step}, but ranks after {extend.name}, which runs this"
    return None


def _rewrite(graph: fx.Graph, node: fx.Node, bs: int, n: int) -> None:
    heads, dim = value(arg(node, "q")).shape[1:]
    # Views for any strides: one splits a dimension, the other joins two dimensions of a contiguous result.
    queries = insert(graph, node, aten.view.default, (arg(node, "q"), [bs, n, heads, dim]))
    changes = {"q": queries, "tree_mask": None, "mask_len": 0}
    call = call_like(graph, node, node, changes, _DRAFT_EXTEND[node.target])
    node.replace_all_uses_with(insert(graph, node, aten.view.default, (call, list(value(node).shape))))
