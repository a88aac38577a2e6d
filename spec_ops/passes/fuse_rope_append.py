"""Rotate queries and keys in the launch that appends keys and values.

    q, k = rope(q, cos, sin), rope(k, cos, sin)               q, kc, vc = rope_append_kv(q, k, v, cos, sin, kc, vc, slots)
    append_kv(kc, vc, k, v, slots)                    ->      mha_target_verify(q, kc, vc, ...)
    mha_target_verify(q, kc, vc, ...)

Models that are not written for these ops rotate queries, rotate keys and append in three launches (two after
`lower_kv_append`). RoPE is recognized by what it computes (`analysis/rotations.py`), so its tables may have half a head or a
whole one, and part of a head may stay as it is. Norms of each head before it (Qwen3) are computed in the same launch.

Queries and keys before their rotation, or before their norm, must be buffers, such as columns of a product. What Inductor
computes it can rotate in the same kernel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from spec_ops.backends.call import FP8_DTYPES
from spec_ops.ops.kv_cache import append_kv_op
from spec_ops.ops.rope import rope_append_kv_op
from spec_ops.passes.analysis.buffers import is_computed
from spec_ops.passes.analysis.graph import (
    ATTENTION_OPS,
    AUTO_FUNCTIONALIZED,
    EAGER,
    arg,
    calls,
    insert,
    set_arg,
    value,
)
from spec_ops.passes.analysis.norms import RMSNorm, find_norms
from spec_ops.passes.analysis.rotations import NotRotatedError, Read, Rotation, find_rotation
from spec_ops.passes.analysis.rows import is_pointwise
from spec_ops.passes.analysis.storage import is_view, storage_of
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten, prims = torch.ops.aten, torch.ops.prims


class _NotFusedError(Exception):
    """Why an append keeps a launch of its own."""


class _Heads(NamedTuple):
    """Queries or keys: `rotation` of a buffer, or of the norm of a buffer."""

    rotation: Rotation
    norm: RMSNorm | None

    @property
    def buffer(self) -> Read:
        """What the op takes."""
        x = self.rotation.x
        return x if self.norm is None else x._replace(source=self.norm.x)


class FuseRopeAppend(GraphPass):
    name = "fuse_rope_append"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        appends = [node for node in calls(graph, AUTO_FUNCTIONALIZED) if node.args[0] is append_kv_op]
        if context.invariant or not appends:  # a fused norm adds in another order, and may be fused in one round alone
            return
        norms = {norm.out: norm for norm in find_norms(graph)}
        tables: dict[tuple, fx.Node] = {}
        for node in appends:
            order = {node: place for place, node in enumerate(graph.nodes)}
            try:
                call = _attention(node)
                keys = _heads(cast(fx.Node, node.kwargs["k"]), node, norms, "keys")
                queries = _heads(arg(call, "q"), call, norms, "queries")
                if (reason := _obstacle(node, queries, keys)) is not None:
                    raise _NotFusedError(reason)
                moved = _moved(node, call, order)
                _fuse(graph, node, call, moved, queries, keys, tables)
            except _NotFusedError as refused:
                result.refuse(node, f"append_kv: {refused}")
                continue
            normed = "normalized, " * (keys.norm is not None)
            result.did(node, f"queries and keys are {normed}rotated and appended in one launch")


def _attention(node: fx.Node) -> fx.Node:
    """The attention call that reads what `node` appended."""
    seen, queue = {node}, [user for user in node.users if user.args[1] != 0]
    readers: set[fx.Node] = set()
    for current in queue:
        for user in current.users:
            if user.target in ATTENTION_OPS:
                readers.add(user)
            elif is_view(user) and user not in seen:
                seen.add(user)
                queue.append(user)
    if len(readers) != 1:
        raise _NotFusedError(
            f"{len(readers) or 'no'} attention calls read what it appends: which queries rotate with its keys?"
        )
    return readers.pop()


def _heads(rotated: fx.Node, reader: fx.Node, norms: dict[fx.Node, RMSNorm], what: str) -> _Heads:
    """What `rotated [..., heads, dim]`, which `reader` takes, is computed from."""
    *rows, heads, dim = value(rotated).shape
    if not all(isinstance(size, int) for size in (*rows, heads, dim)):
        raise _NotFusedError("its sizes are not known while compiling")
    try:
        rotation = find_rotation(rotated, (math.prod(rows), heads, dim))
    except NotRotatedError as reason:
        raise _NotFusedError(f"{what} are not known to be rotated: {reason}") from None
    node, user = rotated, reader
    while set(node.users) == {user} and is_view(node):
        node, user = node.args[0], node  # type: ignore[assignment]
    if set(node.users) != {user}:
        raise _NotFusedError(f"the rotated {what} have other readers")
    norm = norms.get(rotation.x.source)
    if norm is not None and not (
        value(norm.weight).shape == value(norm.out).shape[-1:] == (dim,)
        and norm.weight.op == "placeholder"
        and _are_rows(rotation.x.at, dim)
    ):
        norm = None
    found = _Heads(rotation, norm)
    if value(found.buffer.source).dtype != value(rotated).dtype:
        raise _NotFusedError(f"the {what} have another dtype before they are rotated")
    if is_computed(found.buffer.source):
        raise _NotFusedError(f"the {what} are computed, which Inductor does in the kernel that rotates them")
    return found


def _are_rows(at: torch.Tensor, dim: int) -> bool:
    """Whether heads of `dim` are whole rows of what `at` is a view of, not the end of one row and the start of the next."""
    *outer, column = at.stride()
    return column == 1 and all(stride % dim == 0 for stride in (*outer, at.storage_offset()))


def _obstacle(node: fx.Node, queries: _Heads, keys: _Heads) -> str | None:
    """Why queries and keys cannot be rotated at `node`; None if they can."""
    q, k, bases = queries.rotation, keys.rotation, cast(Any, node.kwargs["_all_bases"])
    cache = value(bases[node.kwargs["_k_cache_base_index"]])
    if q.x.at.shape[0] != k.x.at.shape[0]:
        return f"there are {q.x.at.shape[0]} rows of queries and {k.x.at.shape[0]} of keys"
    if _table(q.cos) != _table(k.cos) or _table(q.sin) != _table(k.sin):
        return "queries and keys rotate by different angles"
    dtypes = {value(heads.buffer.source).dtype for heads in (queries, keys)} | {value(node.kwargs["v"]).dtype}
    written = {storage_of(base, written=True) for base in bases}
    if any(storage_of(read.source, written=True) in written for read in (queries.buffer, keys.buffer, q.cos, q.sin)):
        return "it would read what it rotates from a cache that it writes"  # in the same launch, in any order
    if len(dtypes) > 1 or cache.dtype not in (*dtypes, *FP8_DTYPES):
        return "queries, keys, values and caches are of several dtypes"
    if (queries.norm is None) != (keys.norm is None):
        return "only the queries are normalized" if keys.norm is None else "only the keys are normalized"
    if queries.norm is not None and keys.norm is not None and queries.norm.eps != keys.norm.eps:
        return "the norms of queries and keys have different epsilons"
    return None


def _moved(node: fx.Node, call: fx.Node, order: Mapping[fx.Node, int]) -> list[fx.Node]:
    """What has to move after the queries, right before `call`: the append, and views of what it wrote, in order.

    Raises:
        _NotFusedError: something else reads what it wrote before the queries are there.
    """
    moved, queue = {node}, [node]
    for current in queue:
        for user in current.users:
            if order[user] < order[call] and user not in moved:
                if not is_view(user) and user.target is not operator.getitem:
                    raise _NotFusedError("what it appends is read before the queries are computed")
                moved.add(user)
                queue.append(user)
    return sorted(moved, key=order.__getitem__)


def _table(read: Read) -> tuple:
    """Which rows of angles these are, whatever the number of heads."""
    tokens, _, width = read.at.shape
    row, _, column = read.at.stride()
    return _computation(read.source), tokens, width, row if tokens > 1 else 0, column, read.at.storage_offset()


def _computation(node: fx.Node) -> Any:
    """Equal for nodes that compute one value: `cos.to(dtype)` is written once for queries and once for keys."""
    if node.op != "call_function" or not is_pointwise(node.target) or len(node.all_input_nodes) != 1:
        return node
    (source,) = node.all_input_nodes
    others = fx.node.map_arg((node.args, node.kwargs), lambda _: None)
    return node.target, repr(others), _computation(source)


def _fuse(
    graph: fx.Graph, node: fx.Node, call: fx.Node, moved: list[fx.Node], queries: _Heads, keys: _Heads,
    tables: dict[tuple, fx.Node],
) -> None:  # fmt: skip
    q, k = (_rows(graph, call, heads.buffer) for heads in (queries, keys))
    angles = {}
    for name in ("cos", "sin"):
        read = getattr(keys.rotation, name)  # these come before all later appends, those of the queries perhaps after some
        if _table(read) not in tables:
            tables[_table(read)] = _angles(graph, read)
        angles[name] = tables[_table(read)]
    norms: dict[str, Any] = {"q_norm": None, "k_norm": None, "norm_eps": 0.0}
    if queries.norm is not None and keys.norm is not None:
        norms = {"q_norm": queries.norm.weight, "k_norm": keys.norm.weight, "norm_eps": queries.norm.eps}
    for each in moved:
        call.prepend(each)
    node.args = (rope_append_kv_op,)
    node.kwargs = {**node.kwargs, "q": q, "k": k, **angles, **norms}
    node.meta.pop(EAGER, None)  # the op takes any strides
    fake = value(q)
    with fake.fake_mode:
        result = fake.new_empty(fake.shape)
    node.meta["val"] = (result, *value(node)[1:])
    out = insert(graph, call, operator.getitem, (node, 0), source=node, result=result)
    shape = list(value(arg(call, "q")).shape)
    set_arg(call, "q", insert(graph, call, aten.reshape.default, (out, shape), source=node))


def _rows(graph: fx.Graph, before: fx.Node, read: Read) -> fx.Node:
    """Nodes for what `read` sees, `[n, heads, dim]`.

    Raises:
        _NotFusedError: its rows are not rows of its source, or its heads are not side by side there.
    """
    n, heads, dim = read.at.shape
    row, head, column = read.at.stride()
    width, start = _width(read, row), int(read.at.storage_offset())
    head = dim if heads == 1 else head
    # Heads that are one head, expanded, lie 0 apart.
    if column != 1 or (head != dim and (head < dim or width % head or start % head + dim > head)):
        raise _NotFusedError("the heads before their rotation are not side by side")
    rows = _shaped(graph, before, read.source, (n, width))
    if head == dim:
        return _shaped(graph, before, _columns(graph, before, rows, 1, start, heads * dim), (n, heads, dim))
    wide = _columns(graph, before, _shaped(graph, before, rows, (n, width // head, head)), 1, start // head, heads)
    return _columns(graph, before, wide, 2, start % head, dim)


def _angles(graph: fx.Graph, read: Read) -> fx.Node:
    """`[n, r]` float32 of what `read` sees, made right after its source."""
    n, _, r = read.at.shape
    before = read.source.next
    while before.op in ("placeholder", "get_attr"):
        before = before.next
    width = _width(read, read.at.stride(0))
    if read.at.stride(2) != 1:
        raise _NotFusedError("the angles of a token are not side by side")
    rows = _columns(graph, before, _shaped(graph, before, read.source, (n, width)), 1, int(read.at.storage_offset()), r)
    if value(rows).dtype == torch.float32:
        return rows
    return insert(graph, before, prims.convert_element_type.default, (rows, torch.float32), source=read.source)


def _width(read: Read, stride: int) -> int:
    """Elements of a row of the source of `read`, whose rows are `stride` apart."""
    n, count = read.at.shape[0], value(read.source).numel()
    width = count // n
    if count % n or (n > 1 and stride != width) or read.at.storage_offset() >= width:
        raise _NotFusedError("tokens are not rows of what is rotated, or of the angles")
    return width


def _shaped(graph: fx.Graph, before: fx.Node, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    same = tuple(value(node).shape) == shape
    return node if same else insert(graph, before, aten.reshape.default, (node, list(shape)), source=node)


def _columns(graph: fx.Graph, before: fx.Node, node: fx.Node, dim: int, start: int, count: int) -> fx.Node:
    if count == value(node).shape[dim]:
        return node
    return insert(graph, before, aten.slice.Tensor, (node, dim, start, start + count), source=node)
