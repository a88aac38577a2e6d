"""What tests of passes share: graphs as passes see them, one pass alone, backends for a while, and compiling without code.

That is Dynamo and AOTAutograd with Inductor's decompositions, the passes, then the graph is interpreted: seconds instead of
tens of seconds, and fp32 results differ from eager only by what a pass changed.
"""

from __future__ import annotations

import contextlib
import copy
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import spec_ops
from spec_ops.backends import Backend, get_backend, unregister_backend
from spec_ops.passes import GraphPass, GraphReport, PassContext, PassManager, PassResult, manager
from spec_ops.passes.analysis.graph import drop_unread
from spec_ops.passes.analysis.outputs import Watch
from spec_ops.passes.subclass_inputs import with_plain_inputs


def compile_interpreted(
    fn: Callable,
    passes: dict[str, bool] | None = None,
    *,
    on: bool = True,
    arch: int | None = None,
    dynamic: bool | None = False,
) -> tuple[Callable, list[GraphReport]]:
    """`fn` compiled with the passes (`on`) or without, and the list that collects a report per graph."""
    reports: list[GraphReport] = []

    def compiler(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        if on:
            PassManager(passes, arch, reports.append)(module.graph)
            module.recompile()
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )

    def taken_apart(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        return with_plain_inputs(module, inputs, backend)

    return torch.compile(fn, backend=taken_apart, fullgraph=True, dynamic=dynamic), reports


@dataclass
class Ran:
    """What calls of a module left: results of each call and the buffers after the last."""

    results: list[list[torch.Tensor]]
    buffers: dict[str, torch.Tensor]
    report: GraphReport | None


class Traced:
    """A module traced once, which takes most of the time of `compile_interpreted`. Every run begins with the same buffers."""

    def __init__(self, module: torch.nn.Module, *args: Any) -> None:
        self.module = module
        self._start = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self._graph: fx.GraphModule | None = None
        self._current: Callable | None = None
        self._call: Callable | None = None
        self._inputs: list[torch.Tensor] = []

        def compiler(graph: fx.GraphModule, _: list[Any]) -> Callable:
            self._graph, self._current = graph, graph.forward
            return make_boxed_func(lambda *given: self._current(*given))

        lower = aot_autograd(
            fw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=select_decomp_table,
            keep_inference_input_mutations=True,
        )

        def backend(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
            self._inputs, self._call = list(inputs), lower(graph, inputs)
            return self._call

        torch._dynamo.reset()
        with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
            torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(*args)

    def run(self, times: int = 1, *, on: bool = True) -> Ran:
        """Calls with the graph as the passes (`on`) make it, or as it was traced."""
        assert self._graph is not None
        assert self._call is not None
        graph, reports = fx.GraphModule(self._graph, copy.deepcopy(self._graph.graph)), []
        with torch.no_grad():
            if on:
                PassManager(listener=reports.append)(graph.graph)
                graph.recompile()
            self._current = graph.forward
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self._start[name])
            results = [[result.clone() for result in self._call(*self._inputs)] for _ in range(times)]
            buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        return Ran(results, buffers, reports[0] if on else None)


def capture(
    fn: Callable, *args: Any, write_back: bool = False, dynamo: bool = True
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The functional graph that passes see of `fn(*args)`, and its inputs in its order.

    Its last nodes copy new contents to inputs that `fn` mutates if `write_back`, as for Inductor; else they are outputs.
    Without `dynamo` it takes a third of the time. The nodes are the same, but do not know their lines of the program, the
    inputs are `args`, and `fn` must be a function that reads no tensors but these.
    """
    graphs, inputs = [], []

    def compiler(module: fx.GraphModule, _: list[Any]) -> Callable:
        graphs.append(module)
        return make_boxed_func(lambda *args: fx.Interpreter(module).run(*args))

    options = {"fw_compiler": compiler, "inference_compiler": compiler, "keep_inference_input_mutations": write_back}
    if not dynamo:
        aot_function(fn, decompositions=select_decomp_table(), **options)(*args)
        return graphs[0], list(args)
    lower = aot_autograd(decompositions=select_decomp_table, **options)

    def backend(module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable:
        inputs.extend(example_inputs)
        return lower(module, example_inputs)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*args)
    return graphs[0], inputs


class WithoutGuards(TorchFunctionMode):
    """Indexing and `copy_` of a CUDA tensor enter a device guard, which a torch without CUDA lacks; the ops beneath do not."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args)
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        (x, items), dim, indices = args, 0, []
        items = items if isinstance(items, tuple) else (items,)
        for place, item in enumerate(items):
            if item is Ellipsis:
                dim = x.dim() - sum(later is not None for later in items[place + 1 :]) - 1
            elif item is None:
                x = x.unsqueeze(dim)
            elif isinstance(item, int):
                x, dim = x.select(dim, item), dim - 1
            elif isinstance(item, slice):
                x = torch.ops.aten.slice.Tensor(x, dim, item.start, item.stop, item.step or 1)
            else:
                indices += [None] * (dim - len(indices)) + [item]
            dim += 1
        return torch.ops.aten.index.Tensor(x, indices) if indices else x


def capture_for_cuda(fn: Callable, *args: Any) -> fx.GraphModule:
    """The graph of `fn` on CUDA tensors like those in `args`; it runs on CPU tensors too. Not functional if `fn` mutates."""
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode, WithoutGuards(), torch.no_grad():

        def like(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(mode.from_tensor(tensor), device="cuda", requires_grad=False)

        return make_fx(fn, decomposition_table=select_decomp_table())(*tree_map_only(torch.Tensor, like, args))


def run_pass(graph_pass: GraphPass, module: fx.GraphModule, arch: int | None = None, invariant: bool = False) -> PassResult:
    """One pass, as the manager runs it."""
    result = PassResult(graph_pass.name)
    watch = Watch(module.graph)
    graph_pass.run(module.graph, PassContext(arch, invariant), result)
    drop_unread(module.graph)
    watch.check(result)
    module.graph.lint()
    module.recompile()
    return result


def switched_off(graph_pass: GraphPass, module: fx.GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the manager leaves the graph alone if the pass is off."""
    monkeypatch.setattr(manager, "PASSES", (graph_pass,))
    before = str(module.graph)
    PassManager({graph_pass.name: False}, arch=90)(module.graph)
    assert str(module.graph) == before


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def texts(notes: list) -> str:
    return "\n".join(note.text for note in notes)


@contextlib.contextmanager
def registered(backend: Backend) -> Iterator[None]:
    """`backend` takes part in selection for as long as the block lasts."""
    spec_ops.register_backend(backend)
    try:
        yield
    finally:
        unregister_backend(backend.name)


def using_provider(name: str = "provider", **changes: Any) -> contextlib.AbstractContextManager[None]:
    """Registers a backend that runs the reference kernels."""
    reference = get_backend("reference")
    assert reference is not None
    fields = {"dtypes": reference.dtypes, "kv_dtypes": reference.kv_dtypes, "capabilities": None, "rank": 5}
    return registered(Backend(name, **{"kernels": reference.kernels, **fields, "tree_mask": True, **changes}))


class Uncached(CustomGraphPass):
    """Does nothing; its id makes Inductor generate code anew, which a graph from the cache would not show."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return uuid.uuid4().hex


def cache_copies(code: str, cache: torch.Tensor) -> list[str]:
    """Lines of generated code that allocate a tensor of a KV cache's shape or as large as its storage, or clone one."""
    shape, storage = ", ".join(map(str, cache.shape)), cache.untyped_storage().nbytes() // cache.element_size()
    return [line for line in code.splitlines() if re.search(rf"empty_strided\w*\(\(({shape}|{storage}, )\)|clone\(", line)]
