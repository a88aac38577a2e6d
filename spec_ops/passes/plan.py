"""`spec_ops.explain`.

A plan for a stated architecture is traced as if the tensors were on that GPU, also where there is none: a copy to the host is
a no-op on the CPU, and would not be counted. Dynamo traces them on the device `meta`, since a torch without CUDA cannot index a
fake CUDA tensor; before Inductor's first graph pass, what is on `meta` is put on `cuda`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from spec_ops.passes.analysis.graph import EAGER, arg, attention_calls
from spec_ops.passes.compile import with_own_code
from spec_ops.passes.manager import chained, enabled, parts_of
from spec_ops.passes.report import GraphReport

ARCHS = {"Turing": (75,), "Ampere": (80, 86, 87), "Ada": (89,), "Hopper": (90,), "Blackwell": (100, 103, 110, 120, 121)}

_META, _CUDA = torch.device("meta"), torch.device("cuda", 0)


class _PlanReady(Exception):
    """Stops a compilation once the passes have run."""


def explain(
    fn: Callable,
    *args: Any,
    arch: int | str | None = None,
    passes: Mapping[str, bool] | None = None,
    invariant: bool = False,
    **kwargs: Any,
) -> GraphReport:
    """What the passes make of `fn(*args, **kwargs)`: kernels chosen, rewrites made and refused, syncs left.

    Nothing runs and no code is generated, so a graph can be planned for an architecture that is not there.

    Args:
        arch: 100 or "sm100" (also "sm_100") plans for that compute capability, with all tensors on such a GPU but those that an
            attention call takes as `seq_lens_cpu`; None for the tensors' device.
        passes, invariant: as in `compile`; what `invariant` refuses is in the report.

    Raises:
        ValueError: an unknown architecture or pass name.
        RuntimeError: `fn` calls none of our ops.
        torch._dynamo.exc.Unsupported: `fn` is not one graph.
    """
    try:
        capability = parse_arch(arch)
    except ValueError as error:
        raise ValueError(f"explain: {error}") from error
    with enabled(passes, invariant=invariant):  # an unknown name raises here, not as an error of the compiler
        pass
    if capability is None or _on_gpu(fn, args, kwargs):
        return _plan(fn, args, kwargs, passes, capability, invariant)
    try:
        with _as_on_gpu(set()):
            return _plan(fn, args, kwargs, passes, capability, invariant)
    except Exception:
        if not (host := _host_inputs(fn, args, kwargs)):
            raise
    with _as_on_gpu(host):
        return _plan(fn, args, kwargs, passes, capability, invariant)


def _plan(
    fn: Callable, args: tuple, kwargs: dict, passes: Mapping[str, bool] | None, arch: int | None, invariant: bool
) -> GraphReport:
    reports: list[GraphReport] = []

    def listener(report: GraphReport) -> None:
        reports.append(report)
        raise _PlanReady

    def inner_compile(graph_module: fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        _put_on_cuda(example_inputs)
        return compile_fx_inner(graph_module, example_inputs, **options)

    def backend(graph_module: fx.GraphModule, example_inputs: list) -> Any:
        from torch._inductor.compile_fx import compile_fx

        # Nothing of a plan runs, so that no kernel need be compiled for it.
        switches = {"compile_kernels": False, **(passes or {})}
        with enabled(switches, arch=arch, listener=listener, keep_history=True, invariant=invariant):
            return compile_fx(graph_module, example_inputs, inner_compile=inner_compile)

    try:
        torch.compile(with_own_code(fn), backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except Exception:  # Dynamo wraps what the listener raises
        if not reports:
            raise
    if not reports:
        raise RuntimeError("explain: the function calls none of the spec_ops operators")
    return reports[0]


def _on_gpu(fn: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether the tensors are on a GPU already: then those on the CPU are there on purpose."""
    state = [*fn.parameters(), *fn.buffers()] if isinstance(fn, torch.nn.Module) else []
    return any(leaf.is_cuda for leaf in (*state, *tree_leaves((args, kwargs))) if isinstance(leaf, torch.Tensor))


@contextlib.contextmanager
def _as_on_gpu(host: set[int]) -> Iterator[None]:
    """Traces inside the block see every given tensor on `meta`, but those in `host`, by id; passes see it on `cuda`."""
    original = FakeTensorConverter.from_real_tensor

    def moved(self, fake_mode, t, make_constant=False, *args, **kwargs):
        fake = original(self, fake_mode, t, make_constant, *args, **kwargs)
        for part in _parts(fake):
            if not make_constant and part.fake_device.type == "cpu" and id(t) not in host:
                part.fake_device = _META
        return fake

    settings = {
        "joint_custom_pre_pass": chained([*parts_of(inductor_config.joint_custom_pre_pass), _OnCuda()]),
        # It folds `full(...) + 1` by computing it, on the device.
        "joint_graph_constant_folding": inductor_config.joint_graph_constant_folding and torch.cuda.is_available(),
    }
    with mock.patch.object(FakeTensorConverter, "from_real_tensor", moved), inductor_config.patch(settings):
        yield


def _parts(tensor: Any) -> list[FakeTensor]:
    """A fake tensor; those inside one of a subclass, such as a DTensor, whose parts are not only tensors."""
    if isinstance(tensor, FakeTensor):
        return [tensor]
    names = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else []
    return [part for name in names for part in _parts(getattr(tensor, name))]


class _OnCuda(CustomGraphPass):
    """Puts on `cuda` what the graph has on `meta`."""

    def __call__(self, graph: fx.Graph) -> None:
        def moved(item: Any) -> Any:
            return _CUDA if item == _META else item

        for node in graph.nodes:
            node.args = fx.node.map_aggregate(node.args, moved)  # type: ignore[assignment]
            node.kwargs = fx.node.map_aggregate(node.kwargs, moved)  # type: ignore[assignment]
            _put_on_cuda((node.meta.get("val"), node.meta.get(EAGER)))

    def uuid(self) -> None:
        return None  # a plan is not cached


def _put_on_cuda(fakes: Any) -> None:
    for fake in tree_leaves(fakes):
        if isinstance(fake, FakeTensor) and fake.fake_device == _META:
            fake.fake_device = _CUDA


def _host_inputs(fn: Callable, args: tuple, kwargs: dict) -> set[int]:
    """Ids of the tensors that attention calls take as `seq_lens_cpu` without a copy."""
    found: set[int] = set()

    def backend(graph_module: fx.GraphModule, inputs: list) -> Any:
        places = {node: place for place, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))}
        for call in attention_calls(graph_module.graph):
            node = arg(call, "seq_lens_cpu")
            while isinstance(node, fx.Node) and len(node.all_input_nodes) == 1 and node.target != "cpu":
                node = node.all_input_nodes[0]
            if node in places:
                found.add(id(inputs[places[node]]))
        raise _PlanReady

    with contextlib.suppress(Exception):  # whatever is wrong with `fn` was raised before
        torch.compile(with_own_code(fn), backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    return found


def parse_arch(arch: int | str | None) -> int | None:
    """100, "100", "sm100", "sm_100" or "sm100a" to 100.

    Raises:
        ValueError: it is no architecture that PyTorch supports.
    """
    if arch is None:
        return None
    digits = str(arch).lower().removeprefix("sm").removeprefix("_").rstrip("af")
    if not digits.isdigit() or not any(int(digits) in family for family in ARCHS.values()):
        known = ", ".join(f"{' '.join(f'sm{number}' for number in family)} ({name})" for name, family in ARCHS.items())
        raise ValueError(f"`arch` must be one of {known}, got {arch!r}")
    return int(digits)
