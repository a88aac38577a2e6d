"""Registration of the `spec_ops` operator namespace.

`Library.define` + `impl` + `register_fake` rather than `torch.library.custom_op`: the latter's Python layers cost about
twice as much per call, and a decode step makes hundreds of calls. Nothing here imports a kernel provider: an
implementation imports its kernels the first time it runs, so `import spec_ops` needs torch alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

NAMESPACE = "spec_ops"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def define_op(
    schema: str, impl: Callable, fake: Callable, *, cuda: str | None = None, tags: tuple[torch.Tag, ...] = ()
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

    Returns:
        The overload, kept by callers and passes as a module constant so that no call looks the op up by name.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _LIBRARY.impl(name, impl, "CPU")
    _LIBRARY.impl(name, impl if cuda is None else imported_at_first_call(name, cuda), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), packet), overload or "default")


def fakes_check() -> bool:
    """Whether the checks of an op's tensors are left to its fake implementation: while Dynamo traces.

    Dynamo interprets every bytecode of a function it traces, layer by layer, in every process anew; fakes it runs as they are.
    Checks of tensors were two thirds of what it interpreted.
    """
    return torch.compiler.is_dynamo_compiling()


def imported_at_first_call(op: str, path: str) -> Callable:
    """The function at `"module:function"`, whose module is imported when it is first called.

    Raises (when called):
        ImportError: triton is not installed. No other implementation takes its place: that would only be slow, and silent.
    """
    function: Callable | None = None

    def call(*args):
        nonlocal function
        if function is None:
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
