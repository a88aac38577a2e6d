"""Weights of 8 and 4 bits for the models that `python -m benchmarks round` measures."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from spec_ops.models.quantized import STORED, float8_tensor, linear_layers, mxfp4_tensor
from spec_ops.models.quantized_experts import EXPERT_KINDS, mixtures, store_experts
from spec_ops.models.stored_tensor import StoredTensor

KINDS = ("float8", "float8_block", "float8_dynamic", "float8_block_dynamic", "int4", "nvfp4", "mxfp4", "mxfp4_experts")
OF_EXPERTS = "_experts"  # of a kind that stores experts alone, as gpt-oss is published
_DYNAMIC = "_dynamic"  # of one that rounds rows too, but not those of experts


def store(model: nn.Module, kind: str) -> None:
    """What `quantize(model, kind)` does, without torchao: a compiled round has the same kernels. A model without experts keeps
    its weights where `kind` is one of experts alone."""
    layers = [] if kind.endswith(OF_EXPERTS) else linear_layers(model)
    kind = kind.removesuffix(OF_EXPERTS)
    if (of_experts := kind.removesuffix(_DYNAMIC)) in EXPERT_KINDS:
        for mixture in mixtures(model):
            store_experts(mixture, of_experts, mxfp4_tensor if of_experts == "mxfp4" else float8_tensor)
    for layer in layers:
        layer.weight = nn.Parameter(stored(layer.weight, kind), requires_grad=False)


def stored(weight: torch.Tensor, kind: str) -> StoredTensor:
    """`weight [n, k]` in one of `KINDS` but those of experts alone; `"float8"` has a scale for each row."""
    return float8_tensor(weight, 1, weight.shape[1]) if kind == "float8" else STORED[kind](weight)


def parameter_bytes(parameter: torch.Tensor) -> int:
    """Of what is stored; of a DTensor, by this rank."""
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local()
    if not isinstance(parameter, StoredTensor):
        return parameter.numel() * parameter.element_size()
    return sum(getattr(parameter, name).nbytes for name in parameter.__tensor_flatten__()[0])
