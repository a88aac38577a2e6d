"""Compiles for tests without code generation: Dynamo and AOTAutograd with Inductor's decompositions, the passes, then the graph
is interpreted. Seconds instead of tens of seconds, and fp32 results differ from eager only by what a pass changed."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table

from spec_ops.passes import GraphReport, PassManager


def compile_interpreted(
    fn: Callable, passes: dict[str, bool] | None = None, *, on: bool = True, arch: int | None = None
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
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=False), reports


class Uncached(CustomGraphPass):
    """Does nothing; its id makes Inductor generate code anew, which a graph from the cache would not show."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return uuid.uuid4().hex


def cache_copies(code: str, cache: torch.Tensor) -> list[str]:
    """Lines of generated code that allocate a tensor of a KV cache's shape, or clone one."""
    shape = ", ".join(map(str, cache.shape))
    return [line for line in code.splitlines() if re.search(rf"empty_strided\w*\(\({shape}\)|clone\(", line)]
