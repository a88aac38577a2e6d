"""`spec_ops.compile`."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch._dynamo import OptimizedModule
from torch._inductor import config as inductor_config

from spec_ops.passes.manager import SLOT, enabled
from spec_ops.passes.subclass_inputs import with_plain_inputs

_P = ParamSpec("_P")
_R = TypeVar("_R")
_M = TypeVar("_M", bound=torch.nn.Module)


@overload
def compile(
    fn: _M,
    *,
    passes: Mapping[str, bool] | None = None,
    mode: str = "reduce-overhead",
    fullgraph: bool = True,
    dynamic: bool | None = False,
    options: Mapping[str, Any] | None = None,
    invariant: bool = False,
) -> _M: ...


@overload
def compile(
    fn: Callable[_P, _R],
    *,
    passes: Mapping[str, bool] | None = None,
    mode: str = "reduce-overhead",
    fullgraph: bool = True,
    dynamic: bool | None = False,
    options: Mapping[str, Any] | None = None,
    invariant: bool = False,
) -> Callable[_P, _R]: ...


@overload
def compile(
    fn: None = None,
    *,
    passes: Mapping[str, bool] | None = None,
    mode: str = "reduce-overhead",
    fullgraph: bool = True,
    dynamic: bool | None = False,
    options: Mapping[str, Any] | None = None,
    invariant: bool = False,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...


def compile(
    fn: Callable | None = None,
    *,
    passes: Mapping[str, bool] | None = None,
    mode: str = "reduce-overhead",
    fullgraph: bool = True,
    dynamic: bool | None = False,
    options: Mapping[str, Any] | None = None,
    invariant: bool = False,
) -> Callable:
    """`torch.compile` with the graph passes, for this function or module only. Also a decorator, with or without arguments.

    Args:
        fn: function or module; None returns a decorator.
        passes: pass name to on or off; all are on by default (`spec_ops.passes.pass_names()`).
        mode: as in `torch.compile`; "reduce-overhead" captures CUDA graphs.
        fullgraph, dynamic: as in `torch.compile`.
        options: further Inductor options. Passes in `post_grad_custom_pre_pass` run before ours.
        invariant: let only batch-invariant operations stand: the bits of a row (a request, a token) of every result depend on
            that row alone, not on the number of rows, nor on the others. What can be replaced is; `explain` shows it.

    Returns:
        A function; for a module, the module that `torch.compile` gives, with the parameters and attributes of `fn`.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: an unknown pass name, or an option that Inductor does not have.
        RuntimeError: an unknown mode; at a call, with `invariant`, operations that are not batch-invariant, with their lines.
    """
    if fn is None:
        return functools.partial(
            compile, passes=passes, mode=mode, fullgraph=fullgraph, dynamic=dynamic, options=options, invariant=invariant
        )
    if isinstance(fn, OptimizedModule):
        fn = fn._orig_mod  # Dynamo would not trace its call
    if not callable(fn):
        raise TypeError(f"compile: `fn` must be a function or a module, got {type(fn).__name__}")
    compiler = _Compiler(_InductorWithPasses(passes, mode, options, dynamic, invariant), fullgraph, dynamic)
    return OptimizedModule(fn, compiler) if isinstance(fn, torch.nn.Module) else compiler(fn)  # type: ignore[arg-type]


class _InductorWithPasses(torch._TorchCompileInductorWrapper):
    """The backend: Inductor as `torch.compile` calls it (its CUDA graphs are reset by `torch._dynamo.reset()`)."""

    __name__ = "spec_ops"
    __eq__, __hash__ = object.__eq__, object.__hash__  # equal options do not make it plain Inductor

    def __init__(
        self,
        passes: Mapping[str, bool] | None,
        mode: str,
        options: Mapping[str, Any] | None,
        dynamic: bool | None,
        invariant: bool,
    ) -> None:
        super().__init__(mode, None, dynamic)
        # Not by its `apply_options`, which refuses settings that are the alias of another (`force_disable_caches`).
        self.config |= {name.replace("-", "_"): setting for name, setting in (options or {}).items()}
        for name in self.config:
            if not _is_setting(name):
                raise ValueError(f"compile: `options` must name settings of torch._inductor.config, got {name!r}")
        with enabled(passes, invariant=invariant):  # an unknown name raises here, not at the first call
            pass
        self.passes, self.invariant = passes, invariant
        # As a patch of one compilation it would replace our passes. As the setting around it, they are appended to it.
        self.slot = {SLOT: self.config.pop(SLOT)} if SLOT in self.config else {}

    def __call__(self, model_: torch.fx.GraphModule, inputs_: list, **patches: Any) -> Any:  # torch 2.13 has `config_patches`
        def compiled(model: torch.fx.GraphModule, inputs: list) -> Callable:
            return super(_InductorWithPasses, self).__call__(model, inputs, **patches)

        with inductor_config.patch(self.slot), enabled(self.passes, invariant=self.invariant):
            return with_plain_inputs(model_, inputs_, compiled)


def _is_setting(name: str) -> bool:
    place: Any = inductor_config
    for part in name.split("."):
        place = getattr(place, part, None)
    return place is not None or name in inductor_config.get_config_copy()


class _Compiler:
    """Compiles functions, each with a code object of its own; what `OptimizedModule` calls to make its `forward`."""

    def __init__(self, backend: Callable, fullgraph: bool, dynamic: bool | None) -> None:
        self.backend, self.fullgraph, self.dynamic = backend, fullgraph, dynamic

    def __call__(self, fn: Callable) -> Callable:
        compiled = torch.compile(with_own_code(fn), backend=self.backend, fullgraph=self.fullgraph, dynamic=self.dynamic)
        return functools.update_wrapper(compiled, fn, updated=())


def with_own_code(fn: Callable) -> Callable:
    """`fn` inside a function with a code object of its own. When the function dies, so does what was compiled for it.

    Dynamo keeps compiled code per code object, and counts recompilations per code object (the limit is 8). The rounds of all
    buckets share one `forward`, so that the ninth would fail. Dynamo also never releases a code object (`orig_code_map` refers
    to it), so that a round which is gone would keep its CUDA graphs and their memory pool until `torch._dynamo.reset()`.
    """
    from torch._dynamo.eval_frame import reset_code

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    own = types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    weakref.finalize(own, reset_code, own.__code__).atexit = False
    return own
