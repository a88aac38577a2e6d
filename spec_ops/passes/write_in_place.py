"""Write caches that are views of one pool in place.

    _, k1, v1 = auto_functionalized_v2(append_kv, bases=[k, v])        ->        append_kv(k, v, ...)

A compiled function that takes views of a pool `[2, num_pages, page_size, heads, dim]`, or of a pool for all layers, has several
inputs of one storage. Where one op writes two of them, Inductor writes the first in place. It clones, writes and copies back
the others, a whole cache each (torch 2.11 to 2.15: `reinplace.py` asks whether they have one storage, not whether they
overlap). Here the op is called on the inputs themselves, if they do not overlap and the old contents are not read afterwards.
This is the last pass, since the others rely on values that never change.

Interleaved views (`[num_pages, 2, ...]`, as in vLLM and FlashInfer) do not get here: AOTAutograd cannot tell that they do not
overlap, and merges them into one input. That input is written in place, but then no input counts as static, not even
parameters. The report says so.

`refuse_misplaced_views` is not a pass: where torch would write at a wrong address, it raises, whichever passes are on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.torch_version import TorchVersion

from spec_ops.passes.analysis.graph import AUTO_FUNCTIONALIZED, EAGER, calls, insert, mutated_input, op_of, source_line, value
from spec_ops.passes.analysis.storage import is_view, storage_of
from spec_ops.passes.base import GraphPass, PassContext, PassResult

aten = torch.ops.aten

STORAGE_OFFSETS_ARE_RIGHT = TorchVersion(torch.__version__) >= "2.13"


class WriteInPlace(GraphPass):
    name = "write_in_place"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        for node in calls(graph, AUTO_FUNCTIONALIZED):
            bases: list[fx.Node] = node.kwargs["_all_bases"]  # type: ignore[assignment]
            if (op := op_of(node)) is None:
                continue
            name = op._schema.name.removeprefix("spec_ops::")
            if any(map(_is_merged, bases)):
                result.refuse(
                    node,
                    f"{name}: its caches are interleaved views, which torch merges into one input of the graph and then counts "
                    "no input as static, so that CUDA graphs are off or copy them: pass the pool, take the views of it inside",
                )
            if len(set(map(storage_of, bases))) == len(bases):
                continue
            if (reason := _obstacle(graph, node, bases)) is not None:
                result.refuse(node, f"{name}: {reason}, so Inductor copies all but one of its caches")
                continue
            _call_directly(graph, node, bases)
            result.did(node, f"{name} writes {len(bases)} caches of one storage in place")


def refuse_misplaced_views(graph: fx.Graph) -> None:
    """Raise where torch would let one of our ops write at a wrong address: into a view that is taken in the compiled function.

    For `as_strided` torch notes where the view begins in the storage. Before 2.13 Inductor counts that from the input, which
    need not begin where its storage does. Slices are counted like this in every release up to 2.15 (`try_use_slice` in
    auto_functionalize.py). The ops' fakes refuse symbolic offsets, which are wrong as well.

    Raises:
        ValueError: naming op, argument and line.
    """
    for node in calls(graph, AUTO_FUNCTIONALIZED):
        if (op := op_of(node)) is None:
            continue
        bases: Any = node.kwargs["_all_bases"]
        for name, index, view in written_views(node):
            if view is None or (reason := _misplaced(bases[index], view[0])) is None:
                continue
            raise ValueError(
                f"{op._schema.name.removeprefix('spec_ops::')}: `{name}` must be a whole input of the compiled function or a "
                f"view that torch {torch.__version__} places rightly, got one that it would write at a wrong address: a view "
                f"taken inside, {reason} [{source_line(node)}]"
            )


def _misplaced(base: fx.Node, view: Any) -> str | None:
    """Why torch places a view of `base` at a wrong address, with the remedy; None if it does not."""
    given = mutated_input(base)
    offset = 0 if given is None else value(given).storage_offset()
    if (view is aten.as_strided.default and STORAGE_OFFSETS_ARE_RIGHT) or statically_known_true(offset == 0):
        return None
    return f"of an input that begins at element {offset} of its storage (take all views inside the function or all outside)"


def written_views(node: fx.Node) -> Iterator[tuple[str, int, tuple[Any, tuple] | None]]:
    """For every tensor that the op writes: the argument, the index of its base, and the call that makes the tensor of the base
    (None if it is the base)."""
    from torch._higher_order_ops import auto_functionalize as torch_side

    names, types = torch_side.get_mutable_args(op_of(node))
    infos = torch_side.read_view_information_from_args(names, types, dict(node.kwargs), node.kwargs["_all_bases"])  # type: ignore[arg-type]
    for name, found in infos.items():
        for info in found if isinstance(found, list) else [found]:
            view: tuple[Any, tuple] | None = None
            if isinstance(info, torch_side.AsStridedViewInfo):
                view = aten.as_strided.default, (info.size, info.stride, info.storage_offset)
            elif isinstance(info, torch_side.SliceViewInfo):
                view = aten.slice.Tensor, (info.dim, info.start, info.end)
            yield name, info.base_index, view


def _overlap(a: fx.Node, b: fx.Node) -> bool:
    """Whether the two may have memory in common."""
    from torch._C._dynamo.guards import compute_overlapping_tensors

    if storage_of(a) != storage_of(b):
        return False
    sizes = (n for fake in (value(a), value(b)) for n in (*fake.shape, *fake.stride(), fake.storage_offset()))
    return not all(isinstance(n, int) for n in sizes) or bool(compute_overlapping_tensors([value(a), value(b)]))


def _epilogue(base: fx.Node) -> fx.Node | None:
    """The copy at the graph's end by which an input is mutated."""
    return next((user for user in base.users if user.target is aten.copy_.default and user.args[0] is base), None)


def _is_merged(base: fx.Node) -> bool:
    """Whether AOTAutograd made the input `base` of several inputs that may overlap."""
    from torch._functorch._aot_autograd.descriptors import SyntheticBaseAOTInput, ViewBaseAOTInput

    given = mutated_input(base)
    return given is not None and isinstance(given.meta.get("desc"), (SyntheticBaseAOTInput, ViewBaseAOTInput))


def _obstacle(graph: fx.Graph, node: fx.Node, bases: list[fx.Node]) -> str | None:
    """Why the op at `node` cannot be called on `bases` themselves; None if it can."""
    if not all(base.op == "placeholder" and _epilogue(base) for base in bases):
        return "not all its caches are inputs that it mutates"
    if any(_overlap(a, b) for a, b in combinations(bases, 2)):
        return "its caches may overlap"
    order = {n: place for place, n in enumerate(graph.nodes)}
    storages = set(map(storage_of, bases))
    views = [n for n in order if isinstance(value(n), torch.Tensor) and storage_of(n) in storages]
    for base in bases:
        end = _epilogue(base)
        assert end is not None
        for view in views:
            # Readers after the epilogue read the new contents anyway.
            after = (user for user in _readers(view) if order[node] < order[user] < order[end])
            if (reader := next(after, None)) is not None and _overlap(base, view):
                return f"what its caches held is read afterwards ({source_line(reader)})"
    return None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads the contents of `node`, or of a copy of it. Inductor removes copies that do not differ from their source
    (`remove_noop_ops`), whatever is written between the copy and its reader."""
    from torch._inductor.fx_passes.post_grad import noop_registry

    seen, queue = {node}, [node]
    for current in queue:
        for user in current.users:
            if user.target is aten.copy_.default and user.args[1] is not current:
                continue  # it is written, not read
            yield user
            if user not in seen and (user.target in noop_registry or (current is not node and is_view(user))):
                seen.add(user)
                queue.append(user)


def _call_directly(graph: fx.Graph, node: fx.Node, bases: list[fx.Node]) -> None:
    op = op_of(node)
    written: dict[str, list[fx.Node]] = {}
    for name, index, view in written_views(node):
        made = bases[index] if view is None else insert(graph, node, view[0], (bases[index], *view[1]))
        written.setdefault(name, []).append(made)
    args: dict[str, Any] = {}
    for argument in op._schema.arguments:
        name = argument.name
        if name not in written:
            args[name] = node.kwargs.get(name, argument.default_value)
        else:
            args[name] = written[name][0] if f"_{name}_base_index" in node.kwargs else written[name]
    (result,) = value(node)[:1]  # None if the op returns nothing; no op of ours returns more than one
    call = insert(graph, node, op, tuple(args.values()), result=result)
    if (eager := node.meta.get(EAGER)) is not None:
        kept = [eager[1].get(name, fake) for name, fake in zip(args, call.meta[EAGER][0], strict=True)]
        call.meta[EAGER] = (tuple(kept), {})
    for user in list(node.users):
        place: Any = user.args[1]
        user.replace_all_uses_with(call if place == 0 else bases[place - 1])
        graph.erase_node(user)
    graph.erase_node(node)
    for base in bases:
        end = _epilogue(base)
        if end is not None and end.args[1] is base:
            graph.erase_node(end)
