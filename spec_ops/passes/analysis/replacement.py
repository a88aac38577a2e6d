"""Replacing a node, so that the graph's outputs keep their strides, and share memory only where they did before.

    return logits[i, row], logits[i, row]        ->        rows = mm(...); return rows, rows.clone()

Users may write an output in place, so it must not share memory with another output or an input, unless it does in eager mode.
They may call `view` on it, so its strides must be those of eager mode. Inductor keeps the strides of outputs that it computes,
but only the order of the strides of a view.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._prims_common import compute_elementwise_output_strides

from spec_ops.passes.analysis.graph import AUTO_FUNCTIONALIZED, insert, value
from spec_ops.passes.analysis.storage import (
    Storage,
    is_returned,
    is_view,
    may_copy,
    returned_tensors,
    storage_of,
    views_of,
)

aten = torch.ops.aten


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides. Those of dimensions of size 1 do not count."""
    return all(x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True) if size != 1)


def in_place_of(node: fx.Node, new: fx.Node) -> fx.Node:
    """`new`, or a copy of it, to replace all uses of `node`. Both have the same values, shape and dtype.

    A copy is needed where the graph returns memory of `node`, and `new` has other strides, or memory that users see elsewhere.
    It is also needed where the strides of `new` would change what is computed from it.
    """
    if escapes(node):
        memory = storage_of(new, written=True)
        keeps = _same_strides(value(node), value(new))
        return (
            new if keeps and (memory == storage_of(node, written=True) or memory not in _seen(node.graph)) else _copy(node, new)
        )
    if _same_strides(value(node), value(new)):
        return new
    alike = compute_elementwise_output_strides(value(node)) == compute_elementwise_output_strides(value(new))
    return new if alike and not _copied_for_its_strides(node) else _copy(node, new)


def escapes(node: fx.Node) -> bool:
    """Whether the graph returns `node` or a view of it. Returning something that `node` is a view of does not count."""
    returned = set(returned_tensors(node.graph))
    views = list(views_of(node))
    written = any(user.target is AUTO_FUNCTIONALIZED for view in views for user in view.users)
    return not returned.isdisjoint(views) or (written and is_returned(node))


def _seen(graph: fx.Graph) -> set[Storage]:
    """The memory that users see: of the graph's inputs and outputs."""
    inputs = (node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    tensors = (node for node in (*inputs, *returned_tensors(graph)) if isinstance(value(node), torch.Tensor))
    return {storage_of(node, written=True) for node in tensors}


def _copied_for_its_strides(node: fx.Node) -> bool:
    """Whether an op that is a view for other strides, such as `reshape`, copies `node` or a view of it."""
    return any(may_copy(user) and not is_view(user) for view in views_of(node) for user in view.users)


def _copy(node: fx.Node, new: fx.Node) -> fx.Node:
    """A copy of `new` with the strides of `node`, made before `node`."""
    fake = value(node)
    if fake.is_contiguous():
        return insert(node.graph, node, aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
    factory = {"dtype": fake.dtype, "device": fake.device}
    with fake.fake_mode:
        like = torch.empty_strided(fake.shape, fake.stride(), **factory)
    empty = insert(node.graph, node, aten.empty_strided.default, (list(fake.shape), list(fake.stride())), factory, result=like)
    with fake.fake_mode:
        copied = torch.empty_strided(fake.shape, fake.stride(), **factory)
    return insert(node.graph, node, aten.copy.default, (empty, new), result=copied)
