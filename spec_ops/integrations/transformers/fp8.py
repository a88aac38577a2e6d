"""Fine-grained fp8 models of transformers, as DeepSeek and Qwen publish them: linear layers that the passes read as stored.

transformers computes such a layer with a kernel of the Hub, which quantizes the rows too. Here rows keep their dtype and meet
the dequantized weight; in a compiled round of few rows `skinny_mm` reads the 8 bits (`passes/lower_skinny_mm.py`). Without a
GPU transformers dequantizes when it loads, and there is nothing to do. Experts keep transformers' kernels.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from spec_ops.backends.weight_format import SCALE_DTYPES, dequantized, weight_format

_MODULE = "transformers.integrations.finegrained_fp8"


def _scale(layer: Any) -> torch.Tensor:
    """The scales as `dequantized` takes them: transformers stores one for the whole weight without dimensions."""
    scale = layer.weight_scale_inv
    scale = scale if scale.dtype in SCALE_DTYPES else scale.float()  # powers of 2 in 8 bits
    return scale if scale.dim() == 2 else scale.reshape(1, 1)


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    return F.linear(input, dequantized(self.weight, _scale(self)).to(input.dtype), self.bias)


@contextlib.contextmanager
def reading_as_stored(model: PreTrainedModel, argument: Any) -> Iterator[None]:
    """Inside, linear layers of fine-grained fp8 compute with their rows' dtype, from what is stored.

    Raises:
        ValueError: naming a layer whose weight is of another format; nothing has changed then.
    """
    layers = _layers(model)
    for name, layer in layers.items():
        problem = None
        if layer.weight.dtype != torch.float8_e4m3fn:
            problem = f"a weight of {layer.weight.dtype}"
        else:
            try:
                weight_format(name, layer.weight, _scale(layer), None)
            except (TypeError, ValueError):
                problem = f"scales {tuple(layer.weight_scale_inv.shape)} of a weight {tuple(layer.weight.shape)}"
        if problem is not None:
            known = "float8_e4m3fn with a scale for each weight or each block of 128 x 128"
            raise ValueError(f"{argument} must have fp8 layers of {known}, got {problem} in {name}")
    own = {layer: type(layer) for layer in layers.values()}
    for layer, kind in own.items():
        layer.__class__ = type("StoredFP8Linear", (kind,), {"forward": _forward})
    try:
        yield
    finally:
        for layer, kind in own.items():
            layer.__class__ = kind


def _layers(model: nn.Module) -> dict[str, Any]:
    """The layers that still hold 8 bits, by name. Who has one has imported its module."""
    kind = getattr(sys.modules.get(_MODULE), "FP8Linear", None)
    if kind is None:
        return {}
    return {name: m for name, m in model.named_modules() if type(m) is kind and m.weight.element_size() == 1}
