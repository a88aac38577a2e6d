"""Parameters that are tensor subclasses enter a compiled graph as the tensors that they hold.

    linear(x, weight)   ->   linear(x, rebuilt(weight.data_, weight.scale, like="..."))

AOTAutograd gives a graph such tensors too, but takes every subclass apart in Python at each call: in torch 2.11 that is 18 us
for a weight of three tensors, and for the weights of an 8B model longer than a round takes on a GPU. Here it is a list of
attributes, which are read anew at each call. Of some weights of torchao (`torchao_weights.py`) these are put in another order.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.source import AttrSource
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spec_ops.passes.torchao_weights import IN_ROWS, ScalesInRows, dequantized_weight, in_rows, parts_of


class _Like(NamedTuple):
    """What a subclass is made of, beside its tensors."""

    cls: Any
    names: tuple[str, ...]
    rest: Any
    shape: torch.Size
    stride: tuple[int, ...]


_LIKE: dict[str, _Like] = {}
_COUNT = itertools.count()


def rebuilt(*parts: torch.Tensor, like: str) -> torch.Tensor:
    """The subclass that holds `parts`. `like`: key of `_LIKE`, which says all that a cache of compiled graphs has to know."""
    cls, names, rest, shape, stride = _LIKE[like]
    return cls.__tensor_unflatten__(dict(zip(names, parts, strict=True)), rest, shape, stride)


def rebuilt_uncached(*parts: torch.Tensor, like: str) -> torch.Tensor:
    """`rebuilt`, for a subclass without `_stable_hash_for_caching`. AOTAutograd caches no graph with this function."""
    return rebuilt(*parts, like=like)


def with_plain_inputs(
    graph_module: fx.GraphModule, inputs: Sequence[Any], compile_fn: Callable[[fx.GraphModule, list[Any]], Callable]
) -> Callable:
    """What `compile_fn(graph_module, inputs)` returns, but compiled for the tensors inside of parameters.

    `graph_module` is a graph of Dynamo, which reads it after the compilation: a copy is changed. An argument that is a subclass
    is left as it is, and so is a parameter with sizes that are not known while compiling, that holds more than tensors, whose
    tensors the graph reads by themselves too, or that needs a gradient, which would go to none of its tensors.
    """
    if not any(map(_is_parameter, graph_module.graph.find_nodes(op="placeholder"), inputs)):
        return compile_fn(graph_module, list(inputs))
    graph_module = _copied(graph_module)
    taken: list[tuple[int, Callable[[Any], Any] | None]] = []
    plain: list[Any] = []
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    sources = {node._dynamo_source for node in placeholders}  # type: ignore[attr-defined]
    for i, (node, given) in enumerate(zip(placeholders, inputs, strict=True)):
        apart = _is_parameter(node, given) and not any(source in sources for source in _sources(node, given))
        takes = _take_apart(graph_module.graph, node, given) if apart else [None]
        taken += [(i, take) for take in takes]
        plain += [given if take is None else take(given) for take in takes]
    graph_module.recompile()
    known = inductor_config.unsafe_marked_cacheable_functions
    ours = {f"{function.__module__}.{function.__name__}": "1" for function in (rebuilt, dequantized_weight)}
    with inductor_config.patch(unsafe_marked_cacheable_functions={**known, **ours}):
        compiled = compile_fn(graph_module, plain)

    def call(*args: Any) -> Any:
        return compiled(*[args[i] if take is None else take(args[i]) for i, take in taken])

    return call


def _copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """With what Dynamo notes on modules and placeholders for AOTAutograd, which copies of `fx` lack."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, nodes))  # type: ignore[arg-type]
    for node in graph_module.graph.find_nodes(op="placeholder"):
        nodes[node]._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    made = fx.GraphModule(graph_module, graph)
    made.meta = dict(graph_module.meta)
    for name, noted in vars(graph_module).items():
        if name not in vars(made):
            setattr(made, name, noted)
    return made


def _is_parameter(node: fx.Node, given: Any) -> bool:
    static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    if not static or (given.requires_grad and torch.is_grad_enabled()) or not is_traceable_wrapper_subclass(given):
        return False
    example = node.meta["example_value"]
    parts = [getattr(example, name) for name in given.__tensor_flatten__()[0]]
    # A DTensor of torch 2.13 holds a mesh too.
    if not all(isinstance(part, torch.Tensor) and not is_traceable_wrapper_subclass(part) for part in parts):
        return False
    return all(isinstance(size, int) for part in (example, *parts) for size in (*part.shape, *part.stride()))


def _sources(node: fx.Node, given: Any) -> list[AttrSource]:
    """Of the tensors that a parameter holds, by which AOTAutograd tells arguments apart."""
    return [AttrSource(node._dynamo_source, name) for name in given.__tensor_flatten__()[0]]  # type: ignore[attr-defined]


def _take_apart(graph: fx.Graph, node: fx.Node, given: Any) -> list[Callable[[Any], torch.Tensor] | None]:
    """Placeholders for the tensors that `given` holds, in place of `node`; what takes them of a parameter."""
    example = node.meta["example_value"]
    known = parts_of(given)
    names: Sequence[str] = known or given.__tensor_flatten__()[0]
    takes: list[Any] = [ScalesInRows() if name == IN_ROWS else operator.attrgetter(name) for name in names]
    fakes = [in_rows(example) if name == IN_ROWS else getattr(example, name) for name in names]
    context = TracingContext.try_get()
    outer = None if context is None else context.tensor_to_context.get(given)
    parts = []
    for name, take, fake in zip(names, takes, fakes, strict=True):
        with graph.inserting_before(node):
            part = graph.placeholder(f"{node.target}_{name}")
        part._dynamo_source = AttrSource(node._dynamo_source, name)  # type: ignore[attr-defined]
        part.meta |= {"example_value": fake, "tensor_dict": dict(node.meta["tensor_dict"])}
        if context is not None and outer is not None and name in getattr(outer, "inner_contexts", {}):
            context.tensor_to_context[take(given)] = outer.inner_contexts[name]
        parts.append(part)
    call: tuple[Any, dict[str, Any]]
    if known:
        call = dequantized_weight, {"dtype": str(given.dtype).removeprefix("torch.")}
    else:
        told_apart = hasattr(given, "_stable_hash_for_caching")
        cls = f"{type(given).__module__}.{type(given).__qualname__}"
        like = f"{cls} {given._stable_hash_for_caching() if told_apart else next(_COUNT)}"
        _LIKE[like] = _Like(type(given), tuple(names), given.__tensor_flatten__()[1], given.shape, given.stride())
        call = rebuilt if told_apart else rebuilt_uncached, {"like": like}
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        made = graph.call_function(call[0], tuple(parts), call[1])
    made.meta |= {"example_value": example}
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return takes
