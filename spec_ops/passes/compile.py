"""`spec_ops.compile` and `spec_ops.explain`."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spec_ops.passes.manager import enabled
from spec_ops.passes.report import GraphReport


def compile(
    fn: Callable,
    *,
    passes: Mapping[str, bool] | None = None,
    mode: str = "reduce-overhead",
    fullgraph: bool = True,
    dynamic: bool | None = False,
    options: Mapping[str, Any] | None = None,
) -> Callable:
    """`torch.compile` with the graph passes, for this function alone.

    Args:
        fn: function or module.
        passes: pass name to on or off; all are on by default (`spec_ops.passes.pass_names()`).
        mode: as in `torch.compile`; "reduce-overhead" makes CUDA graphs.
        fullgraph, dynamic: as in `torch.compile`.
        options: further Inductor options.

    Raises:
        ValueError: an unknown pass name.
    """
    with enabled(passes):  # an unknown name raises here, not at the first call
        pass
    patches = {**torch._inductor.list_mode_options(mode, dynamic), **(options or {})}

    def backend(graph_module: torch.fx.GraphModule, example_inputs: list) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with enabled(passes):
            return compile_fx(graph_module, example_inputs, config_patches=patches)

    return torch.compile(_with_own_code(fn), backend=backend, fullgraph=fullgraph, dynamic=dynamic)


def _with_own_code(fn: Callable) -> Callable:
    """`fn` behind a function whose code object is new, and what is compiled for it dies with it.

    Dynamo keeps what it compiled, and counts towards its recompile limit (8), per code object. The rounds of all buckets share
    one `forward`: without this the ninth fails. It never lets go of a code object (`orig_code_map` holds it by what was made of
    it), so a round that is gone would leave its CUDA graphs and their memory pool until `torch._dynamo.reset()`.
    """
    from torch._dynamo.eval_frame import reset_code

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    own = types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    weakref.finalize(own, reset_code, own.__code__).atexit = False
    return own


class _PlanReady(Exception):
    """Stops a compilation once the passes have run."""


def explain(
    fn: Callable, *args: Any, arch: int | str | None = None, passes: Mapping[str, bool] | None = None, **kwargs: Any
) -> GraphReport:
    """What the passes make of `fn(*args, **kwargs)`: kernels chosen, rewrites made and refused, syncs left.

    Nothing runs and no code is generated, so a graph can be planned for an architecture that is not there.

    Args:
        arch: 100 or "sm100" (also "sm_100") plans for that compute capability; None for the tensors' device.
        passes: as in `compile`.

    Raises:
        RuntimeError: `fn` calls none of our ops.
        torch._dynamo.exc.Unsupported: `fn` is not one graph.
    """
    reports: list[GraphReport] = []
    capability = parse_arch(arch)

    def listener(report: GraphReport) -> None:
        reports.append(report)
        raise _PlanReady

    def backend(graph_module: torch.fx.GraphModule, example_inputs: list) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with enabled(passes, arch=capability, listener=listener):
            return compile_fx(graph_module, example_inputs, config_patches={})

    try:
        torch.compile(_with_own_code(fn), backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except Exception:  # Dynamo wraps what the listener raises
        if not reports:
            raise
    if not reports:
        raise RuntimeError("explain: the function calls none of the spec_ops operators")
    return reports[0]


def parse_arch(arch: int | str | None) -> int | None:
    """100, "100", "sm100" or "sm_100" to 100."""
    if arch is None or isinstance(arch, int):
        return arch
    digits = arch.lower().removeprefix("sm").removeprefix("_").rstrip("af")
    if not digits.isdigit():
        raise ValueError(f"explain: `arch` must be like 100 or 'sm100', got {arch!r}")
    return int(digits)
