"""torchao's int4 weights where `mslk`, whose kernels they call, is not installed: without a GPU there is none.

The layers' weights become `StoredTensor`s over the same memory for as long as a model is taken over.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from spec_ops.models.stored_tensor import StoredTensor

_MODULE = "torchao.quantization.quantize_.workflows.int4.int4_tensor"


def has_kernels() -> bool:
    """Whether the product that torchao's `Int4Tensor` calls exists."""
    return hasattr(torch.ops.mslk, "bf16i4bf16_rowwise")


@contextlib.contextmanager
def computing_int4(model: PreTrainedModel, argument: Any) -> Iterator[None]:
    """Inside, linear layers with torchao's int4 weights need no kernels of `mslk`.

    Raises:
        ValueError: naming a layer that does need them; nothing has changed then.
    """
    kind = getattr(sys.modules.get(_MODULE), "Int4Tensor", None)  # who has one has imported its module
    found: list[tuple[nn.Linear, Any, StoredTensor]] = []
    if kind is not None and not has_kernels():
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and isinstance(layer.weight.data, kind):
                found.append((layer, layer.weight, _stored(name, layer.weight, argument)))
    for layer, _, stored in found:
        layer.weight = nn.Parameter(stored, requires_grad=False)
    try:
        yield
    finally:
        for layer, own, _ in found:
            layer.weight = own


def _stored(name: str, weight: Any, argument: Any) -> StoredTensor:
    if weight.act_pre_scale is not None or weight.activation_dtype != torch.bfloat16:
        got = f"{weight.activation_dtype} rows{'' if weight.act_pre_scale is None else ' with scales of their own'}"
        raise ValueError(
            f"{argument} must have int4 weights for bfloat16 rows where mslk is not installed, got {got} in {name}"
        )
    scale, zero = (part.t() for part in (weight.scale, weight.zero_point))
    try:
        return StoredTensor(weight.qdata.view(torch.uint8), scale, zero, dtype=weight.dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument} must have int4 weights of a known format: {name}: {error}") from None
