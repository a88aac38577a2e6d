"""Which values of a graph share memory.

    rows = hidden[:, -1]; parts = rows.view(bs, 2, -1)          storage_of(parts) == storage_of(rows) == storage_of(hidden)

The graph shows it: a view has the storage of its source, everything else has its own. Fake values of a graph that is being
rewritten do not show it, since a view whose source was replaced still has its old fake value. They are used only for what the
graph does not show: which inputs share a storage, and whether a reshape copies.

A functional graph has no writes, only new values. What `auto_functionalized_v2` returns for a base is a new value too, but it
ends up in the memory of the base. `written=True` asks for that memory, which is what users see of a graph's inputs and outputs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from spec_ops.passes.analysis.graph import AUTO_FUNCTIONALIZED, value

Storage = Hashable


def storage_of(node: fx.Node, *, written: bool = False) -> Storage:
    """A value that is equal for two tensors that share memory, and different for others.

    Args:
        node: a tensor of the graph.
        written: whether a value that an op makes by writing to a base shares memory with the base.
    """
    base = base_of(node, written=written)
    if base.op in ("placeholder", "get_attr") and isinstance(fake := value(base), torch.Tensor):
        return ("input", fake.untyped_storage()._cdata) if fake.layout is torch.strided else base
    if base.target is operator.getitem:  # two nodes may take the same result of a call
        return base.args
    return base


def base_of(node: fx.Node, *, written: bool = False) -> fx.Node:
    """`node`, or the tensor that it is a view of, through any number of views; `written` as in `storage_of`."""
    while (source := _source(node, written)) is not None:
        node = source
    return node


def is_view(node: fx.Node) -> bool:
    """Whether `node` is a view of another tensor of the graph."""
    return _source(node, written=False) is not None


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and all views of it, including views of views and the calls that return several views."""
    yield node
    for user in node.users:
        if is_view(user) and base_of(user) is base_of(node):
            yield from views_of(user)


def may_copy(node: fx.Node) -> bool:
    """Whether the strides of its source decide if `node` is a view or a copy, as for `reshape`, `contiguous` and `to`."""
    return (
        isinstance(node.target, torch._ops.OpOverload) and _viewed_argument(node.target) is not None and _composite(node.target)
    )


def returned_tensors(graph: fx.Graph) -> Iterator[fx.Node]:
    """The tensors that the graph returns, in order. One that is returned twice comes twice."""
    for node in torch.utils._pytree.tree_leaves(graph.output_node().args):
        if isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor):
            yield node


def is_returned(node: fx.Node) -> bool:
    """Whether the graph returns memory of `node`, a tensor or a call that gives several: the tensor, a view of it, or what an
    op makes of it by writing to it. The caller may write to that memory."""
    several = isinstance(value(node), (tuple, list))
    results = [user for user in node.users if user.target is operator.getitem] if several else [node]
    returned = {storage_of(tensor, written=True) for tensor in returned_tensors(node.graph)}
    return any(storage_of(result, written=True) in returned for result in results)


def _source(node: fx.Node, written: bool) -> fx.Node | None:
    """What `node` is a view of; None if it has memory of its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        call, place = node.args
        if not isinstance(call, fx.Node):
            return None
        if call.target is AUTO_FUNCTIONALIZED:
            return _written_base(call, place) if written else None
        return call if _source(call, written) is not None else None  # the parts of a split
    if not isinstance(node.target, torch._ops.OpOverload) or (position := _viewed_argument(node.target)) is None:
        return None
    source = node.args[position] if position < len(node.args) else None
    if not isinstance(source, fx.Node) or (_composite(node.target) and _copies(node, source)):
        return None
    return source


def _written_base(call: fx.Node, place: Any) -> fx.Node | None:
    """The base whose new contents are result `place` of an `auto_functionalized_v2`; None for a result of the op itself."""
    op: Any = call.args[0]
    bases: Any = call.kwargs["_all_bases"]
    first = len(op._schema.returns) or 1  # the results of the op come first; None if it has none
    return bases[place - first] if place >= first else None


@functools.cache
def _viewed_argument(target: torch._ops.OpOverload) -> int | None:
    """The position of the argument that the results of an op are, or are views of; None if they have memory of their own."""
    if target is torch.ops.aten._unsafe_view.default:  # a view, which its schema hides from autograd
        return 0
    if not any(result.alias_info for result in target._schema.returns):
        return None
    return next((place for place, argument in enumerate(target._schema.arguments) if argument.alias_info), None)


@functools.cache
def _composite(target: torch._ops.OpOverload) -> bool:
    return target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _copies(node: fx.Node, source: fx.Node) -> bool:
    """Whether `node`, a call that may copy `source`, does."""
    old, given = value(node), value(source)
    if not isinstance(given, FakeTensor) or not isinstance(old, torch.Tensor):
        return False  # nothing is known: they may share memory
    if old.untyped_storage()._cdata == given.untyped_storage()._cdata:
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)  # `source` may have been replaced since
    with given.fake_mode:
        new = node.target(*args, **kwargs)  # type: ignore[operator]
    return new.untyped_storage()._cdata != given.untyped_storage()._cdata
