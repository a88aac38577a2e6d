"""Weights of 8 bits for any model of linear layers: torchao makes them, the passes read them as they are stored."""

from __future__ import annotations

import torch
from torch import nn

from spec_ops._extras import install_hint
from spec_ops.backends.weight_format import GROUPS

KINDS = ("float8", "float8_tensor")
_COLUMNS = 2 * min(GROUPS)  # what the kernels need k to be a multiple of


def quantize(model: nn.Module, kind: str = "float8", *, lm_head: bool = True) -> nn.Module:
    """Store the weights of a model's linear layers in 8 bits, in place. Activations keep their dtype.

    The weights become torchao's `Float8Tensor`. Biases, embeddings, norms and layers whose input is no multiple of 64 stay as
    they are, and so do layers that are quantized already, such as an LM head that a draft shares with its target. Load weights
    first: a quantized model has no state dict in the layout of checkpoints.

    Args:
        model: of any kind; ours, or one of transformers.
        kind: `"float8"`: float8_e4m3fn with a float32 scale for each row (output channel). `"float8_tensor"`: with one scale
            for each weight.
        lm_head: whether layers of that name are quantized too.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no module.
        ValueError: an unknown `kind`; a model without a linear layer to quantize, or with none left.
        ImportError: torchao is not installed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize: `model` must be a torch.nn.Module, got {type(model).__name__}")
    if kind not in KINDS:
        raise ValueError(f"quantize: `kind` must be one of {list(KINDS)}, got {kind!r}")
    found = [module for name, module in model.named_modules() if _is_linear(name, module, lm_head)]
    chosen = {id(module) for module in found if not is_quantized(module)}
    if not chosen:
        got = "one that is quantized already" if any(map(is_quantized, found)) else type(model).__name__
        raise ValueError(f"quantize: `model` must have linear layers with an input of a multiple of {_COLUMNS}, got {got}")
    try:
        from torchao.quantization import Float8WeightOnlyConfig, PerRow, PerTensor, quantize_
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torchao":
            raise
        raise ImportError(f"quantize: needs torchao: {install_hint('quantize')}", name="torchao") from error
    granularity = PerRow() if kind == "float8" else PerTensor()
    # Inductor's settings stay the user's.
    config = Float8WeightOnlyConfig(granularity=granularity, set_inductor_config=False)
    quantize_(model, config, filter_fn=lambda module, _: id(module) in chosen)
    return model


def is_quantized(module: nn.Module) -> bool:
    """Whether the weight of a linear layer is stored in another form than a plain floating-point tensor."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and (type(weight.data) is not torch.Tensor or weight.element_size() < 2)


def _is_linear(name: str, module: nn.Module, lm_head: bool) -> bool:
    if not isinstance(module, nn.Linear) or module.in_features % _COLUMNS:
        return False
    return lm_head or name.rpartition(".")[2] != "lm_head"
