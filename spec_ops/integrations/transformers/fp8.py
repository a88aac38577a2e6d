"""Fine-grained fp8 models of transformers, as DeepSeek and Qwen publish them: linear layers that the passes read as stored.

transformers computes such a layer with a kernel of the Hub, which rounds the rows to 8 bits too. Here rows keep their dtype,
unless `round_rows` asked for it, and meet the dequantized weight; in a compiled round of few rows a kernel reads the 8 bits
(`passes/lower_skinny_mm.py`). Without a GPU transformers dequantizes when it loads, and there is nothing to do.
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

from spec_ops.backends.weight_format import BLOCK, SCALE_DTYPES, dequantized, weight_format
from spec_ops.models.eager_products import eager_linear, is_eager
from spec_ops.models.inputs import Inputs

_MODULE = "transformers.integrations.finegrained_fp8"
_ROUNDS = "spec_ops_inputs"  # of a layer whose rows are rounded


def _scale(layer: Any) -> torch.Tensor:
    """The scales as `dequantized` takes them: transformers stores one for the whole weight without dimensions."""
    scale = layer.weight_scale_inv
    scale = scale if scale.dtype in SCALE_DTYPES else scale.float()  # powers of 2 in 8 bits
    return scale if scale.dim() == 2 else scale.reshape(1, 1)


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    inputs: Inputs | None = getattr(self, _ROUNDS, None)
    if is_eager(input, self.weight, self.weight_scale_inv, self.bias):
        return eager_linear(
            input, self.weight, _scale(self), None, None, self.bias, inputs, None if inputs is None else self.activation_scale,
            None,
        )  # fmt: skip
    rows = input if inputs is None else inputs.rounded(input, self.activation_scale)
    return F.linear(rows, dequantized(self.weight, _scale(self)).to(input.dtype), self.bias)


def round_rows(model: PreTrainedModel) -> PreTrainedModel:
    """Let the linear layers of a fine-grained fp8 model round their rows to float8 in this package's generators too.

    As transformers' own layers do: with float32 scales for 128 columns of a row each where the weight has blocks, for whole
    rows where it has one scale, and with the scale that the checkpoint has where its `activation_scheme` is "static". Otherwise
    rows keep their values, which is more exact, and as fast while they are few: see the guide on quantized weights. Call it
    before a `TransformersModel` or a generator of the model compiles. Experts keep their rows.

        model = round_rows(AutoModelForCausalLM.from_pretrained(path, dtype="auto", device_map="cuda"))

    Args:
        model: as transformers loaded it on a GPU: without one it dequantizes the weights, and nothing says that they were fp8.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no module.
        ValueError: no layer is of 8 bits, or a generator has the model already; or a layer, by name, whose scales are powers of
            2 in 8 bits (`scale_fmt` "ue8m0"), or of other blocks, or of blocks that do not divide its columns. Nothing has
            changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"round_rows: `model` must be a torch.nn.Module, got {type(model).__name__}")
    layers = _layers(model)
    if not layers:
        wanted = "have layers of fine-grained fp8, and not be in a generator yet"
        raise ValueError(f"round_rows: `model` must {wanted}, got {type(model).__name__} without such layers")
    found = {}
    for name, layer in layers.items():
        blocks = None if layer.block_size is None else tuple(layer.block_size)
        fits = blocks is None or (blocks == (BLOCK, BLOCK) and layer.in_features % BLOCK == 0)
        if not fits or layer.weight_scale_inv.dtype not in SCALE_DTYPES:
            known = f"float scales for whole weights, or for blocks of {BLOCK} x {BLOCK} that divide the columns"
            got = f"{layer.weight_scale_inv.dtype} for {blocks} of {layer.in_features} columns in {name}"
            raise ValueError(f"round_rows: `model` must have {known}, got {got}")
        found[layer] = Inputs("float8", 0 if blocks is None else BLOCK, float32_scales=True)
    for layer, inputs in found.items():
        setattr(layer, _ROUNDS, inputs)
    return model


@contextlib.contextmanager
def reading_as_stored(model: PreTrainedModel, argument: Any) -> Iterator[None]:
    """Inside, linear layers of fine-grained fp8 compute in their rows' dtype, from what is stored.

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
