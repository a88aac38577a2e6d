"""Registration of the `spec_ops` operator namespace.

`Library.define` + `impl` + `register_fake` rather than `torch.library.custom_op`: the latter's Python layers cost about
twice as much per call, and a decode step makes hundreds of calls. Nothing here imports a kernel provider: an
implementation imports its kernels the first time it runs, so `import spec_ops` needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

NAMESPACE = "spec_ops"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def define_op(schema: str, impl: Callable, fake: Callable, *, tags: tuple[torch.Tag, ...] = ()) -> torch._ops.OpOverload:
    """Register one operator.

    Args:
        schema: `"name(Tensor a, ...) -> Tensor"`, or `"name.overload(...)"`; mutated arguments carry `(a!)`, and such an op
            returns nothing.
        impl: what runs on real CPU and CUDA tensors.
        fake: output metadata only; must agree with `impl` in shape, dtype and strides.
        tags: besides `pt2_compliant_tag`.

    Returns:
        The overload, kept by callers and passes as a module constant so that no call looks the op up by name.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, impl, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), packet), overload or "default")
