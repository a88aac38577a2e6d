"""Reading and rewriting post-grad graphs: arguments by schema name, fake values, user source lines.

At this point of Inductor the graph is functional: a mutating op is an `auto_functionalized_v2` node, and the value of a node
never changes. All uses of a node see the same contents, so the same node means the same value.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from spec_ops.backends import AttentionCall
from spec_ops.ops.attention import HOST_PLAN_OPS, OPS
from spec_ops.ops.kv_indices import draft_kv_indices_op, draft_kv_indices_steps_op, kv_indices_op, page_table_op

ATTENTION_OPS: dict[Any, str] = {op: name for table in (OPS, HOST_PLAN_OPS) for name, op in table.items()}
INDEX_OPS: dict[Any, str] = {
    page_table_op: "page_table",
    kv_indices_op: "kv_indices",
    draft_kv_indices_op: "draft_kv_indices",
    draft_kv_indices_steps_op: "draft_kv_indices_steps",
}

AUTO_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2

# Where tracing notes the arguments of a custom op as eager mode would pass them. Inductor gives inputs these strides; a call
# without the note may get inputs of any strides.
EAGER = "eager_input_vals"


def op_of(node: fx.Node) -> Any:
    """The op of ours that `node` calls, also through `auto_functionalized_v2`; None if it calls none."""
    if node.op != "call_function":
        return None
    target = node.args[0] if node.target is AUTO_FUNCTIONALIZED else node.target
    return target if getattr(target, "namespace", None) == "spec_ops" else None


def group_of(node: fx.Node) -> str | None:
    """The group of ranks over which `node` calls one of torch's functional collectives; None if it calls none."""
    if getattr(node.target, "namespace", None) != "_c10d_functional" or not has_arg(node, "group_name"):
        return None
    return arg(node, "group_name")


def num_ranks(group: Any) -> int:
    """How many ranks the group of that name has."""
    return dist.distributed_c10d._resolve_process_group(group).size()


def mutated_input(node: Any) -> fx.Node | None:
    """The input of the graph that `node` is, unchanged or after earlier mutations; None if `node` is made in the graph."""
    while node.target is operator.getitem and op_of(node.args[0]) is not None and node.args[0].target is AUTO_FUNCTIONALIZED:
        call, place = node.args
        bases = call.kwargs["_all_bases"]
        node = bases[place - (len(call.args[0]._schema.returns) or 1)]  # the op's results come first; None if it has none
    return node if node.op == "placeholder" else None


def calls(graph: fx.Graph, *targets: Any) -> Iterator[fx.Node]:
    """The nodes that call one of `targets`, in order. The graph may be edited meanwhile."""
    wanted = set(targets)
    return iter([node for node in graph.nodes if node.op == "call_function" and node.target in wanted])


def attention_calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return calls(graph, *ATTENTION_OPS)


def _position(node: fx.Node, name: str) -> int:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if name not in names:
        raise KeyError(f"{node.target} has no argument {name!r}")
    return names.index(name)


def has_arg(node: fx.Node, name: str) -> bool:
    return any(argument.name == name for argument in node.target._schema.arguments)  # type: ignore[union-attr]


def arg(node: fx.Node, name: str) -> Any:
    """The argument of an op call by its name in the schema; the schema's default if it was not passed."""
    index = _position(node, name)
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, node.target._schema.arguments[index].default_value)  # type: ignore[union-attr]


def value(node: Any) -> Any:
    """The fake value of a node; anything else is returned unchanged."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def set_arg(node: fx.Node, name: str, new: Any) -> None:
    index = _position(node, name)
    if index < len(node.args):
        node.update_arg(index, new)
    else:
        node.update_kwarg(name, new)
    if (eager := node.meta.get(EAGER)) is not None:
        args, kwargs = list(eager[0]), dict(eager[1])
        if index < len(args):
            args[index] = value(new)
        else:
            kwargs[name] = value(new)
        node.meta[EAGER] = (tuple(args), kwargs)


def insert(
    graph: fx.Graph,
    before: fx.Node,
    target: Any,
    args: tuple,
    kwargs: dict | None = None,
    source: fx.Node | None = None,
    result: Any = None,
) -> fx.Node:
    """Insert a call. A call of our ops gets its inputs with the strides that they have here.

    Args:
        graph, target, args, kwargs: of the call.
        before: the node that it is inserted before.
        source: the node whose source line it gets; default `before`.
        result: its fake value; default: computed.
    """
    kwargs = kwargs or {}
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), value)
    fakes = (v for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor))
    fake = next(fakes, None)  # one is enough: all of a graph's fakes share a mode
    with fake.fake_mode if fake is not None else contextlib.nullcontext():
        node.meta["val"] = target(*fake_args, **fake_kwargs) if result is None else result
    for key in ("stack_trace", "nn_module_stack"):
        if key in (source or before).meta:
            node.meta[key] = (source or before).meta[key]
    if op_of(node) is not None:
        node.meta[EAGER] = (fake_args, fake_kwargs)
    return node


def drop_unread(graph: fx.Graph) -> None:
    """Erase what nobody reads. Sums of ranks too, which torch keeps, since to wait for one is a side effect: ranks have one
    graph, so none of them computes it."""
    waits = {torch.ops._c10d_functional.wait_tensor.default} if dist.is_available() else set()
    graph.eliminate_dead_code(lambda node: node.is_impure() and node.target not in waits)


def attention_call(node: fx.Node) -> AttentionCall | None:
    """The attention call that `node` makes, of fake values; None if one of its inputs has none."""
    given = [arg(node, argument.name) for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    fakes = fx.node.map_arg(tuple(given), value)
    if any(fake is None for fake, had in zip(fakes, given, strict=True) if had is not None):
        return None
    return AttentionCall.of(ATTENTION_OPS[node.target], fakes)


def call_like(graph: fx.Graph, before: fx.Node, node: fx.Node, changes: dict[str, Any], target: Any = None) -> fx.Node:
    """Insert a copy of a call of one of our ops. Arguments that do not change keep the strides that they had in the user's
    call.

    Args:
        graph: that both calls are in.
        before: the node that the copy is inserted before.
        node: the call.
        changes: new arguments by name.
        target: another op; default: that of `node`.
    """
    target = target or node.target
    names = [argument.name for argument in target._schema.arguments]
    new = insert(graph, before, target, tuple(changes[n] if n in changes else arg(node, n) for n in names), source=node)
    old_args, old_kwargs = node.meta.get(EAGER, ((), {}))
    old_names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    kept = {**dict(zip(old_names, old_args, strict=False)), **old_kwargs}
    args = (kept.get(n, fake) if n not in changes else fake for n, fake in zip(names, new.meta[EAGER][0], strict=True))
    new.meta[EAGER] = (tuple(args), {})
    return new


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_PACKAGE = str(Path(__file__).resolve().parents[2]) + "/"


def source_line(node: fx.Node) -> str:
    """`file:line` of the user's code that made `node`: the innermost frame outside this package, else the innermost inside."""
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(node.meta.get("stack_trace") or "") if "/torch/" not in m["file"]]
    own = [frame for frame in frames if not frame[0].startswith(_PACKAGE)]
    ours = [frame for frame in frames if not frame[0].startswith(_PACKAGE + "ops/")]
    return ":".join((own or ours or frames or [("unknown source", "0")])[-1])
