"""Which function computes a call of an op on a GPU: what the op's implementation finds, without a call of it."""

from __future__ import annotations

from typing import Any

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.registry import append_meta, missing_backends, select_backend
from spec_ops.ops._library import CUDA_KERNELS
from spec_ops.ops.attention import HOST_PLAN_OPS, OPS
from spec_ops.ops.kv_cache import append_kv_by_op, append_mla_kv_by_op

_STEPS: dict[Any, str] = {op: step for table in (OPS, HOST_PLAN_OPS) for step, op in table.items()}
_APPENDS: dict[Any, str] = {append_kv_by_op: "append_kv", append_mla_kv_by_op: "append_mla_kv"}


def has_own_kernel(op: Any) -> bool:
    """Whether `op` has one kernel on a GPU, which no backend replaces."""
    return op in CUDA_KERNELS


def kernel_of(op: Any, args: tuple, arch: int) -> tuple[str, tuple] | None:
    """The kernel of a call, as `"module:function"`, and what it takes; None for an op without one.

    Args:
        op: one of this package.
        args: all of its arguments, in the schema's order, on any device.
        arch: of the GPU (90 for sm_90).

    Raises:
        BackendError: no backend can run the call.
    """
    if (step := _STEPS.get(op)) is not None:
        call = AttentionCall.of(step, args)
        return select_backend(call.meta(), arch, call.backend, missing_backends()).backend.kernels[step], (call,)
    if (step := _APPENDS.get(op)) is not None:
        return select_backend(append_meta(step, args), arch, args[-1], missing_backends()).backend.kernels[step], args[:-1]
    return (CUDA_KERNELS[op], args) if op in CUDA_KERNELS else None
