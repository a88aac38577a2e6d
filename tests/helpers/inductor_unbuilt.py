"""Inductor without building C++: it lowers a graph and writes its code, which nobody builds; the graph runs node by node.

Most of the time of Inductor on a CPU is g++. That its C++ code computes what the graph does is asked by a few tests of
`tests/passes`, which build it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from functorch.compile import make_boxed_func
from torch import fx
from torch._inductor import compile_fx, config, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile


class _MadeError(BaseException):
    """Ends a compilation whose graph is made. Inductor would turn an `Exception` into one of its own."""


@contextlib.contextmanager
def unbuilt(lowered: bool = True) -> Iterator[None]:
    """Inside, compiled functions run the graphs that Inductor's and our passes made, just before their lowering. With
    `lowered=False` that is left out too: what runs is the same, and lowering takes a third of the time."""
    post_grad_passes = compile_fx.post_grad_passes
    graphs: list[fx.GraphModule] = []

    def noted(module: fx.GraphModule, *args: Any) -> None:
        post_grad_passes(module, *args)
        graphs.append(fx.GraphModule(module, copy.deepcopy(module.graph)))
        if not lowered:
            raise _MadeError

    def inner(module: fx.GraphModule, inputs: Any, **options: Any) -> Callable:
        graphs.clear()
        with contextlib.suppress(_MadeError):
            compile_fx.compile_fx_inner(module, inputs, **options)
        (graph,) = graphs
        return make_boxed_func(graph.forward)

    with (
        config.patch(force_disable_caches=True),
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=[]),  # builds a program for each
        mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=None),
        mock.patch.object(compile_fx, "post_grad_passes", noted),
        mock.patch.object(compile_fx, "compile_fx", functools.partial(compile_fx.compile_fx, inner_compile=inner)),
    ):
        yield
