"""GPTQ, AWQ and compressed-tensors checkpoints, read as they are stored, without the packages that transformers asks for.

transformers hands the first two to gptqmodel's kernels and lets compressed-tensors dequantize the third on the first forward.
Here the layers stay `torch.nn.Linear`, their weights become `StoredTensor`s once, and compiled rounds read 8 or 4 bits. It is
one more quantizer of transformers, whose interface for these is public: `from_pretrained` loads and places everything else.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from spec_ops.integrations.transformers import packed_experts
from spec_ops.integrations.transformers.mxfp4 import quantization_of, read_mxfp4_as_stored
from spec_ops.models.layouts import layout_of
from spec_ops.models.stored_tensor import StoredTensor

METHOD = "spec_ops_stored"
METHODS = ("gptq", "awq", "compressed-tensors")


def read_as_stored(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration that makes transformers load a GPTQ, AWQ, compressed-tensors or MXFP4 checkpoint as it is stored.

        config = read_as_stored(AutoConfig.from_pretrained(path))
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype="auto", device_map="cuda")

    Layers of compressed-tensors whose activations are of 8 bits round their rows as that package does.

    Args:
        config: of a checkpoint whose `quantization_config` has the method `gptq`, `awq`, `compressed-tensors` or `mxfp4`; not
            changed.

    Returns:
        A copy.

    Raises:
        ValueError: another method, or one of its layouts that is not known: `spec_ops.models.layouts`.
    """
    values = quantization_of(config)
    if values.get("quant_method") == "mxfp4":
        return read_mxfp4_as_stored(config)
    try:
        layout_of(values)
    except ValueError as error:
        raise ValueError(f"read_as_stored: quantization_config: {error}") from None
    changed = copy.deepcopy(config)
    changed.quantization_config = {"quant_method": METHOD, "stored": values}
    return changed


@register_quantization_config(METHOD)
class StoredLayersConfig(QuantizationConfigMixin):
    """Attributes: `stored`: the checkpoint's own `quantization_config`."""

    def __init__(self, stored: dict[str, Any], **_: Any) -> None:
        self.quant_method: Any = METHOD
        self.stored = stored


class _Pending(nn.Module):
    """In the place of a linear layer until its weight is read."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias


def patterns_of(names: set[str], present: Iterable[str]) -> set[str]:
    """Regular expressions for the tensors `names`, and no others of `present`. Names that differ in their numbers alone share
    one where all such names are meant: transformers searches for every pattern in every name, and a mixture has tens of
    thousands of names.
    """
    forms: dict[str, list[str]] = {}
    for name in sorted({*names, *present}):
        forms.setdefault(r"\d+".join(map(re.escape, re.split(r"\d+", name))) + "$", []).append(name)
    found = set()
    for form, alike in forms.items():
        meant = [name for name in alike if name in names]
        found |= {form} if len(meant) == len(alike) else {re.escape(name) + "$" for name in meant}
    return found


@register_quantizer(METHOD)
class StoredLayersQuantizer(HfQuantizer):
    """Reads the weights of quantized layers itself: transformers would round their scales to the model's dtype."""

    quantization_config: StoredLayersConfig
    requires_calibration = True  # only checkpoints that are quantized already

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        files = checkpoint_files or []
        if not files or not all(file.endswith(".safetensors") for file in files):
            raise ValueError(f"a quantized checkpoint must be in safetensors files, got {files}")
        self._layout = layout_of(self.quantization_config.stored)
        places: dict[str, str] = {}
        for file in files:
            with safe_open(file, "pt") as tensors:
                places |= dict.fromkeys(tensors.keys(), file)
        ends = {name.rpartition(".")[2] for name in places} & set(self._layout.marks)
        names = sorted({name.rpartition(".")[0] for name in places if name.rpartition(".")[2] in ends})
        if not names:
            raise ValueError(f"a checkpoint of this method must have tensors {' or '.join(self._layout.marks)}, got none")
        linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        self._experts = packed_experts.experts_of(model, names)
        self._shapes = {name: packed_experts.take(model, name) for name in self._experts}
        of_experts = tuple(f"{name}." for name in self._experts)
        self._layers: dict[str, dict[str, str]] = {}
        self._pending: dict[str, Any] = {}
        for name in names:
            self._layers[name] = {part: places[f"{name}.{part}"] for part in self._layout.names if f"{name}.{part}" in places}
            if name.startswith(of_experts):
                continue
            if (layer := linears.get(name)) is None:
                raise ValueError(f"{name} must be a linear layer of {type(model).__name__} to be read as it is stored")
            self._pending[name] = _Pending(layer)
            model.set_submodule(name, self._pending[name])
        ignored = patterns_of({f"{name}.{part}" for name, parts in self._layers.items() for part in parts}, places)
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ignored}
        self._ignored = ignored

    @torch.no_grad()
    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        model._keys_to_ignore_on_load_unexpected -= self._ignored  # type: ignore[operator]

        # Opened once: whoever opens a file reads the names of all of its tensors.
        with ExitStack() as opened:
            paths = {path for parts in self._layers.values() for path in parts.values()}
            files: dict[str, Any] = {path: opened.enter_context(safe_open(path, "pt")) for path in paths}

            def read(name: str, n: int, k: int) -> StoredTensor:
                parts = self._layers[name].items()
                tensors = {part: files[path].get_tensor(f"{name}.{part}").to(model.device) for part, path in parts}
                try:
                    return self._layout.stored(tensors, n, k, model.dtype)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{name}: {error}") from None

            self._fill(model, read)

    def _fill(self, model: PreTrainedModel, read: Callable[[str, int, int], StoredTensor]) -> None:
        for name, pending in self._pending.items():
            n, k = pending.out_features, pending.in_features
            layer = nn.Linear(k, n, bias=False, device="meta")
            layer.weight, layer.bias = nn.Parameter(read(name, n, k), requires_grad=False), pending.bias
            model.set_submodule(name, layer)
        for name, module in self._experts.items():
            packed_experts.fill(module, name, self._shapes[name], read)
            model.set_submodule(name, module)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
