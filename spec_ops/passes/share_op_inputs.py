"""Compute a value that several of our ops take only once.

    cos = angle.cos()                                   cos = force_stride_order(angle.cos())
    rope_append_kv(q0, k0, v0, cos, ...)        ->      rope_append_kv(q0, k0, v0, cos, ...)
    rope_append_kv(q1, k1, v1, cos, ...)                rope_append_kv(q1, k1, v1, cos, ...)

Our ops take buffers, and Inductor makes the buffer of a pointwise value where it is needed, once for each op that takes it. 32
layers would compute the same sines 32 times, in 32 launches. Here the value becomes a buffer once, before its first reader.
"""

from __future__ import annotations

import torch
from torch import fx

from spec_ops.passes.analysis.graph import insert, op_of, value
from spec_ops.passes.analysis.storage import is_returned
from spec_ops.passes.base import GraphPass, PassContext, PassResult

_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
}


class ShareOpInputs(GraphPass):
    name = "share_op_inputs"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        for node in list(graph.nodes):
            if not _is_pointwise(node):
                continue
            paths = [(user, readers) for user in node.users if (readers := _readers(user))]
            count = len({reader for _, readers in paths for reader in readers})
            if count < 2:
                continue
            fake = value(node)
            if not all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
                result.refuse(node, f"an input of {count} ops has sizes that are not known while compiling")
                continue
            args: tuple
            target, args = torch.ops.prims.inductor_force_stride_order.default, (node, list(fake.stride()))
            if fake.numel() == 1:  # for which Inductor ignores that op: `seq_lens` of one request
                target, args = torch.ops.aten.as_strided.default, (node, list(fake.shape), list(fake.stride()), 0)
            # The fake value is passed, since the op's eager form would copy. Returned views of the value share memory: all of
            # them become views of the buffer, or none.
            users = list(node.users) if is_returned(node) else [user for user, _ in paths]
            buffer = insert(graph, node.next, target, args, source=node, result=fake)
            for user in users:
                user.replace_input_with(node, buffer)
            result.did(node, f"one buffer for {count} ops")


def _is_pointwise(node: fx.Node) -> bool:
    """Whether Inductor makes no buffer of the node's value unless something asks for one."""
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.pointwise in node.target.tags
        and isinstance(value(node), torch.Tensor)
    )


def _readers(user: fx.Node) -> set[fx.Node]:
    """The calls of our ops that read a value through `user`: `user` itself, or readers of a view, which costs nothing."""
    if op_of(user) is not None:
        return {user}
    if user.op == "call_function" and user.target in _VIEWS:
        return set().union(*map(_readers, user.users))
    return set()
