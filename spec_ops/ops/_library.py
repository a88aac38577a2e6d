"""Registration of the `spec_ops` operator namespace.

`Library.define` + `impl` + `register_fake` rather than `torch.library.custom_op`: the latter's Python layers cost about
twice as much per call, and a decode step makes hundreds of calls. Nothing here imports a kernel provider: an
implementation imports its kernels the first time it runs, so `import spec_ops` needs torch alone.

The ops are for inference: none has a derivative. Without a kernel of ours for the Autograd keys torch would run them all the
same, and hand back tensors, or caches, with a graph that leads nowhere (`torch.compile` and `torch.func`: no gradient at all).

That kernel calls the implementation itself, past the dispatcher. So a kernel that a user puts in its place with `torch.library`
(`allow_override=True`) is called in `torch.inference_mode()` alone, where no autograd kernel runs. Register a backend instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _after_autograd_keyset,  # private, as all here: what `torch.library`'s own autograd kernels are made of
    _any_requires_grad,
    is_grad_enabled,
)
from torch.autograd import forward_ad

from spec_ops.backends.registry import refuse_rocm

NAMESPACE = "spec_ops"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

_CPU, _CUDA = (DispatchKeySet(key).raw_repr() for key in (DispatchKey.CPU, DispatchKey.CUDA))
# What is asked of a call's keys: which backend, and whether a mode or a subclass (tracing, `torch.func`) comes before it.
_BELOW_AUTOGRAD = _after_autograd_keyset.raw_repr() & ~DispatchKeySet(DispatchKey.ADInplaceOrView).raw_repr()


# Of each op: whether its results are batch-invariant, or the argument that decides it (`define_op`).
INVARIANCE: dict[torch._ops.OpOverload, bool | str] = {}
CUDA_KERNELS: dict[torch._ops.OpOverload, str] = {}  # of each op that has one: `cuda` of `define_op`


def define_op(
    schema: str,
    impl: Callable,
    fake: Callable,
    *,
    cuda: str | None = None,
    tags: tuple[torch.Tag, ...] = (),
    invariant: bool | str = False,
) -> torch._ops.OpOverload:
    """Register one operator.

    Args:
        schema: `"name(Tensor a, ...) -> Tensor"`, or `"name.overload(...)"`; mutated arguments carry `(a!)`, and
            none of them is returned.
        impl: what runs on CPU tensors, and on CUDA tensors unless `cuda` is given.
        fake: output metadata only; must agree with `impl` in shape, dtype and strides. Checks tensors if the wrapper leaves
            that to it (`fakes_check`).
        cuda: `"module:function"` of the kernel for CUDA tensors, which takes what `impl` takes; imported at its first call.
        tags: besides `pt2_compliant_tag`.
        invariant: whether all implementations are batch-invariant: the bits of a row (a request, a token) of every result
            depend on that row alone, not on how many others there are, nor on its place among them. Or the argument that
            decides it: `"invariant"`, a bool, or `"backend"`, the name of a backend that declares it.

    Returns:
        The overload, kept by callers and passes as a module constant so that no call looks the op up by name. It raises
        RuntimeError for an input that gradients are asked of.
    """
    name = schema.split("(", 1)[0]
    on_cuda = impl if cuda is None else imported_at_first_call(name, cuda)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _LIBRARY.impl(name, impl, "CPU")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    packet, _, overload = name.partition(".")
    op = getattr(getattr(getattr(torch.ops, NAMESPACE), packet), overload or "default")
    _LIBRARY.impl(name, _inference_only(op, impl, on_cuda), "Autograd", with_keyset=True)
    INVARIANCE[op] = invariant
    if cuda is not None:
        CUDA_KERNELS[op] = cuda
    return op


def _inference_only(op: torch._ops.OpOverload, on_cpu: Callable, on_cuda: Callable) -> Callable:
    """The Autograd kernel of `op`: refuses inputs that gradients are asked of, and calls what comes next.

    For plain tensors that is the implementation itself. A second pass through the dispatcher would cost 4 us a call; this
    kernel as it is costs less than one.
    """
    kernels = {_CPU: on_cpu, _CUDA: on_cuda, _CPU | _CUDA: on_cuda}  # both: `seq_lens_cpu` beside tensors on a GPU

    def run(keyset: DispatchKeySet, *args: Any) -> Any:
        # Before anything else: under `torch.no_grad` nothing of this is asked for, and in `torch.inference_mode` no call comes.
        if is_grad_enabled() and _any_requires_grad(*args):
            raise RuntimeError(_refusal(op, args, "require gradients", lambda tensor: tensor.requires_grad))
        if forward_ad._current_level >= 0:
            for tensor in _tensors(args):
                if _is_dual(tensor):
                    raise RuntimeError(_refusal(op, args, "carry a tangent", _is_dual))
        kernel = kernels.get(keyset.raw_repr() & _BELOW_AUTOGRAD)
        return op.redispatch(keyset & _after_autograd_keyset, *args) if kernel is None else kernel(*args)

    return run


def _tensors(args: tuple) -> list[torch.Tensor]:
    """Those of an op's arguments, also in lists."""
    flat = [part for value in args for part in (value if isinstance(value, (list, tuple)) else (value,))]
    return [part for part in flat if isinstance(part, torch.Tensor)]


def _is_dual(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _refusal(op: torch._ops.OpOverload, args: tuple, what: str, refused: Callable[[torch.Tensor], bool]) -> str:
    names = [a.name for a, value in zip(op._schema.arguments, args, strict=False) if any(map(refused, _tensors((value,))))]
    return (
        f"{op._schema.name.split('::')[1]}: `{names[0]}` must not {what}, got a tensor that does: spec_ops is for inference, "
        "its ops have no derivatives. Call under `torch.inference_mode()` (or `torch.no_grad()`), or detach the tensor"
    )


def fakes_check() -> bool:
    """Whether the checks of an op's tensors are left to its fake implementation: while Dynamo traces.

    Dynamo interprets every bytecode of a function it traces, layer by layer, in every process anew; fakes it runs as they are.
    Checks of tensors were two thirds of what it interpreted.
    """
    return torch.compiler.is_dynamo_compiling()


def imported_at_first_call(op: str, path: str) -> Callable:
    """The function at `"module:function"`, whose module is imported when it is first called.

    Raises (when called):
        BackendError: the GPU is AMD's.
        ImportError: triton is not installed. No other implementation takes its place: that would only be slow, and silent.
    """
    function: Callable | None = None

    def call(*args):
        nonlocal function
        if function is None:
            refuse_rocm()
            module, attribute = path.split(":")
            try:
                function = getattr(importlib.import_module(module), attribute)
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    raise
                raise ImportError(
                    f"{op}: runs a Triton kernel on CUDA, and triton is not installed: `pip install triton`", name="triton"
                ) from error
        return function(*args)

    return call
