"""Batch-invariant eager execution: `with BatchInvariant():` replaces or refuses operations as `invariance.py` judges them.

It is what runs prompts, and rounds that are not compiled. On the CPU, functions of single values that are not exact also depend
on where a value stands: there `_pieces.py` calls them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

from spec_ops.ops._library import NAMESPACE
from spec_ops.ops._pieces import in_pieces
from spec_ops.ops.invariance import NotInvariantError, always_stands, base_name, is_pointwise, judge, named_arguments
from spec_ops.ops.invariant import rms_norm_op

# Rounded once however they are computed, or not at all.
_EXACT = frozenset({
    "abs", "add", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
    "ceil", "clamp", "clamp_max", "clamp_min", "clone", "convert_element_type", "copysign", "div", "eq", "equal", "fill",
    "floor", "floor_divide", "fmax", "fmin", "frexp", "ge", "gt", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "le",
    "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mul", "nan_to_num",
    "ne", "neg", "relu", "remainder", "round", "rsub", "sgn", "sign", "signbit", "sqrt", "sub", "threshold", "trunc", "where",
})  # fmt: skip


# Made of sums, extrema and single values, which are replaced or stand.
_DECOMPOSED = frozenset({
    "_fused_rms_norm", "_log_softmax", "_softmax", "glu", "linalg_vector_norm", "logsumexp", "native_group_norm",
    "native_layer_norm", "std", "std_mean",
})  # fmt: skip


class _Now:
    """Replacements are computed at once."""

    def value(self, operand: Any) -> Any:
        return operand

    def call(self, op: Any, *args: Any) -> Any:
        return op(*args)


class BatchInvariant(TorchDispatchMode):
    """Inside, the bits of a row of any result depend on that row alone.

    Raises (inside):
        NotInvariantError: naming the operation.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if always_stands(func):
            if _inexact(func) and _in_arrays_on_cpu(func, args, kwargs):
                return _in_pieces(func, args, kwargs)
            return func(*args, **kwargs)
        arguments = named_arguments(func, args, kwargs)
        verdict = judge(func, arguments, lambda operand: operand)
        if verdict.replace is not None:
            return verdict.replace(_Now(), list(arguments.values()))
        if verdict.refused is not None:
            if func is torch.ops.aten._fused_rms_norm.default and _in_one_launch(*arguments.values()):
                return _rms_norm(*arguments.values())
            if func.namespace == "aten" and base_name(func) in _DECOMPOSED and func in decomposition_table:
                with self:
                    return decomposition_table[func](*args, **kwargs)
            raise NotInvariantError(f"invariant=True: {verdict.refused}")
        return func(*args, **kwargs)


def _in_one_launch(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None) -> bool:
    """Whether an RMS norm is one that `rms_norm` computes, and nobody asks for what its gradient needs."""
    differentiated = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    return len(shape) == 1 and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and not differentiated


def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None) -> Any:
    """`aten._fused_rms_norm`; its second result, for gradients, is undefined."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return rms_norm_op(x.reshape(math.prod(x.shape[:-1]), *shape), weight, eps, False).view(x.shape), None


@functools.cache
def _inexact(func: Any) -> bool:
    """Whether single values may depend on where they stand; with `alpha`, some calls."""
    if func.namespace == NAMESPACE or not is_pointwise(func):
        return False
    return base_name(func) not in _EXACT or any(argument.name == "alpha" for argument in func._schema.arguments)


def _in_arrays_on_cpu(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if base_name(func) in _EXACT and (not (kwargs or len(args) > 2) or named_arguments(func, args, kwargs)["alpha"] == 1):
        return False
    operands = (*args, *kwargs.values())
    return any(isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() for value in operands)


def _in_pieces(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    if not func._schema.is_mutable:
        return in_pieces(lambda *operands: func(*operands, **kwargs), *args)
    pure = getattr(getattr(torch.ops.aten, base_name(func)), func._overloadname)
    return args[0].copy_(in_pieces(lambda *operands: pure(*operands, **kwargs), *args))
