"""SGLang's CUDA graphs on a CPU: its runners capture and replay as on a GPU, and what is recorded are calls of operators.

As in a CUDA graph, a replay runs what was recorded on the memory of the capture, whatever Python has bound since, and nothing
that waits for a value may be recorded. In use if `SGLANG_CPU_GRAPHS` is set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SYNCS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default}


class Graph(TorchDispatchMode):
    """While it is active, everything that runs is recorded."""

    active: Graph | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[[], Any], list[torch.Tensor]]] = []
        self.output: Any = None

    def capture(self, function: Callable[[], Any]) -> None:
        Graph.active = self
        try:
            with self:
                self.output = function()
        finally:
            Graph.active = None

    def replay(self) -> None:
        for call, outputs in self.calls:
            made = call()
            for output, new in zip(outputs, tree_leaves(made) if outputs else (), strict=True):
                output.copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SYNCS:
            raise RuntimeError(f"{func} waits for the device, which a stream that is being captured does not permit")
        if func._can_decompose() and (made := self._decomposed(func, args, kwargs)) is not NotImplemented:
            return made
        made = self.run(lambda: func(*args, **kwargs))
        aliases = [returned.alias_info for returned in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):  # no view, which is of the same memory
            written = any(alias is not None for alias in aliases) or not func._schema.returns
            self.calls.append((lambda: func(*args, **kwargs), [] if written else tree_leaves(made)))
        return made

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return func.decompose(*args, **kwargs)

    def run(self, call: Callable[[], Any]) -> Any:
        """Not recorded itself."""
        Graph.active = None
        try:
            return call()
        finally:
            Graph.active = self


class GraphBackend:
    """Stands for `FullCudaGraphBackend`."""

    def __init__(self, runner: Any, **_: Any) -> None:
        self.graphs: dict[Any, Graph] = {}

    @contextlib.contextmanager
    def capture_session(self, stream: Any):
        yield

    replay_session = contextlib.nullcontext

    def capture_one(self, shape_key, forward_fn, dummies=None, post_warmup_hook=None) -> None:
        for _ in range(2):
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        self.graphs[shape_key] = graph = Graph()
        graph.capture(forward_fn)
        print(f"CPU graph of {len(graph.calls)} calls, {shape_key}", flush=True)

    def can_run(self, forward_batch, shape_key) -> bool:
        return shape_key in self.graphs

    def replay(self, shape_key, forward_batch, **_: Any) -> Any:
        self.graphs[shape_key].replay()
        return self.graphs[shape_key].output

    def cleanup(self) -> None:
        self.graphs.clear()


def record_launches() -> None:
    """Triton's interpreter writes to memory past torch, so a launch is recorded as a whole."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def recorded(self, *args, **kwargs):
        if (graph := Graph.active) is None:
            return launch(self, *args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            graph.run(lambda: launch(self, *args, **kwargs))
        graph.calls.append((lambda: launch(self, *args, **kwargs), []))
        return None

    GridExecutor.__call__ = recorded


def init_decode_cuda_graph(runner: Any) -> None:
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    runner.graph_mem_usage = 0
    runner.decode_cuda_graph_runner = DecodeCudaGraphRunner(runner)


def capture_draft(worker: Any) -> None:
    """`EagleDraftWorker._capture_cuda_graphs`, as on CUDA."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    worker.cuda_graph_runner = EAGLEDraftCudaGraphRunner(worker) if worker.speculative_num_steps > 1 else None
    assert isinstance(worker.draft_extend_attn_backend, TritonAttnBackend)  # one of the classes that SGLang captures for
    worker.cuda_graph_runner_for_draft_extend = EAGLEDraftExtendCudaGraphRunner(worker)


def install() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    record_launches()
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    no_stream = contextlib.contextmanager(lambda stream=None: iter([SimpleNamespace(stream=stream)]))
    for target, hook in {
        "model_executor.model_runner.ModelRunner.init_decode_cuda_graph": init_decode_cuda_graph,
        "speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs": capture_draft,
        "model_executor.runner_backend.utils.resolve_decode_backend": GraphBackend,
        "distributed.parallel_state.graph_capture": no_stream,
    }.items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.REPLACE)
