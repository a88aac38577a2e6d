"""torchao's int4 weights where `mslk`, whose kernels they call, is not installed: without a GPU there is none.

The layers' weights become `StoredTensor`s over the same memory for as long as a model is taken over. int4 weights in the order
of a kernel that the model's device does not have are refused by name: torchao would say so in the middle of a prefill.
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
_DEVICES = {  # of weights in the order of their own kernels
    "Int4TilePackedTo4dTensor": ("cuda",),
    "Int4PreshuffledTensor": ("cuda",),
    "Int4PlainInt32Tensor": ("xpu", "npu"),
}


def has_kernels() -> bool:
    """Whether the product that torchao's `Int4Tensor` calls exists."""
    return hasattr(torch.ops.mslk, "bf16i4bf16_rowwise")


@contextlib.contextmanager
def computing_int4(model: PreTrainedModel, argument: Any) -> Iterator[None]:
    """Inside, linear layers with torchao's int4 weights need no kernels of `mslk`.

    Raises:
        ValueError: naming a layer that does need them, or another kernel for int4 that is not there; nothing has changed then.
    """
    _check_kernels(model, argument)
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


def _check_kernels(model: PreTrainedModel, argument: Any) -> None:
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        kind = type(weight.data) if isinstance(weight, torch.Tensor) else None
        devices = None if kind is None or not kind.__module__.startswith("torchao.") else _DEVICES.get(kind.__name__)
        if kind is None or devices is None:
            continue
        device = weight.device.type  # type: ignore[union-attr]
        if device not in devices or (kind.__name__ == "Int4PreshuffledTensor" and not has_kernels()):
            needs = " or ".join(devices) + (" and mslk" if kind.__name__ == "Int4PreshuffledTensor" else "")
            raise ValueError(
                f"{argument} must have int4 weights that can be computed with on {device}: {name} has an {kind.__name__}, "
                f"whose kernel needs {needs}; Int4Tensor (int4_packing_format='plain') is read anywhere"
            )
