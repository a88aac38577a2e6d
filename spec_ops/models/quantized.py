"""Weights of 8 and 4 bits for any model of linear layers: the passes read them as they are stored."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spec_ops._extras import install_hint
from spec_ops.backends.weight_format import BLOCK, GROUPS, packed
from spec_ops.models.stored_tensor import StoredTensor

KINDS = ("float8", "float8_block", "float8_tensor", "int8", "int4")
_COLUMNS = 2 * min(GROUPS)  # what the kernels need k to be a multiple of
_GROUP = 128  # columns that share a scale in 4 bits, where k is a multiple of it; torchao's default
_RANGES = [1 - 0.02 * i for i in range(16)]  # parts of a group's range that 4 bits may cover


def quantize(model: nn.Module, kind: str = "float8", *, lm_head: bool = True) -> nn.Module:
    """Store the weights of a model's linear layers in 8 or 4 bits, in place. Activations keep their dtype.

    The weights become torchao's `Float8Tensor` or `Int8Tensor`, but for two kinds that become `StoredTensor`: `"float8_block"`,
    which torchao has for 8-bit activations alone, and `"int4"`, in the layout of torchao's `Int4Tensor`, whose own kernels need
    a GPU and one more package. Biases, embeddings, norms and layers whose input is no multiple of 64 stay as they are, and so
    do layers that are quantized already, such as an LM head that a draft shares with its target. Load weights first: a
    quantized model has no state dict in the layout of checkpoints.

    Args:
        model: of any kind; ours, or one of transformers.
        kind: `"float8"`: float8_e4m3fn with a float32 scale for each row (output channel). `"float8_block"`: with one for each
            block of 128 x 128, as in DeepSeek's and Qwen's checkpoints. `"float8_tensor"`: with one for each weight.
            `"int8"`: int8 with a scale for each row. `"int4"`: 4 bits, a scale and a zero point for 128 columns of a row each
            (64 where 128 does not divide them).
        lm_head: whether layers of that name are quantized too.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no module.
        ValueError: an unknown `kind`; a model without a linear layer to quantize, or with none left.
        ImportError: torchao is not installed, which all kinds but `"float8_block"` and `"int4"` need.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize: `model` must be a torch.nn.Module, got {type(model).__name__}")
    if kind not in KINDS:
        raise ValueError(f"quantize: `kind` must be one of {list(KINDS)}, got {kind!r}")
    layers = linear_layers(model, lm_head)
    if kind in ("float8_block", "int4"):
        store = int4_tensor if kind == "int4" else float8_tensor
        for layer in layers:
            layer.weight = nn.Parameter(store(layer.weight), requires_grad=False)
        return model
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, PerRow, PerTensor, quantize_
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torchao":
            raise
        raise ImportError(f"quantize: needs torchao: {install_hint('quantize')}", name="torchao") from error
    # Inductor's settings stay the user's.
    config: Any
    if kind == "int8":
        config = Int8WeightOnlyConfig(granularity=PerRow(), set_inductor_config=False)
    else:
        granularity = PerRow() if kind == "float8" else PerTensor()
        config = Float8WeightOnlyConfig(granularity=granularity, set_inductor_config=False)
    chosen = {id(layer) for layer in layers}
    quantize_(model, config, filter_fn=lambda module, _: id(module) in chosen)
    return model


def linear_layers(model: nn.Module, lm_head: bool = True) -> list[nn.Linear]:
    """Those of `model` that `quantize` stores anew; raises as it does if there are none."""
    found = [module for name, module in model.named_modules() if _is_linear(name, module, lm_head)]
    chosen: list[Any] = [module for module in found if not is_quantized(module)]
    if not chosen:
        got = "one that is quantized already" if found else type(model).__name__
        raise ValueError(f"quantize: `model` must have linear layers with an input of a multiple of {_COLUMNS}, got {got}")
    return chosen


@torch.no_grad()
def float8_tensor(weight: torch.Tensor, rows: int = BLOCK, columns: int = BLOCK) -> StoredTensor:
    """`weight [n, k]` in float8_e4m3fn, with a float32 scale for each `rows` x `columns` of it, whose greatest magnitude
    becomes the greatest number of float8.

    Args:
        weight: floating-point.
        rows, columns: 128 x 128, 1 x k, or n x k.
    """
    n, k = weight.shape
    padded = F.pad(weight.float(), (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    numbers = blocks / torch.where(scale == 0, 1, scale)[:, None, :, None]
    stored = numbers.view(padded.shape)[:n, :k].to(torch.float8_e4m3fn).contiguous()
    return StoredTensor(stored, scale, dtype=weight.dtype)


@torch.no_grad()
def int4_tensor(weight: torch.Tensor, group: int = _GROUP) -> StoredTensor:
    """`weight [n, k]` in 4 bits: the 16 numbers of a group are evenly spaced. Of several ranges, all around the middle of the
    group's values, each group has the one whose squared error is least.

    Args:
        weight: floating-point, k a multiple of 64.
        group: columns that share a scale; half of it where it does not divide k.
    """
    group = group if weight.shape[1] % group == 0 else group // 2
    values = weight.float().unflatten(1, (-1, group))
    low, high = values.aminmax(dim=2)
    middle, half = (low + high) / 2, (high - low) / 2
    least = torch.full_like(low, torch.inf)
    scale, zero = (torch.empty_like(low, dtype=weight.dtype) for _ in range(2))
    numbers = torch.empty_like(values, dtype=torch.int8)
    for part in _RANGES:
        # Rounded first, so that numbers are nearest to what is dequantized. A group of one value has the scale 0.
        s = (2 * part * half / 15).to(weight.dtype)
        z = (middle - part * half + 8 * s.float()).to(weight.dtype)
        wide, start = s.float()[..., None], z.float()[..., None]
        found = ((values - start) / torch.where(wide == 0, 1, wide)).round_().clamp_(-8, 7)
        error = (found * wide + start - values).square_().sum(2)
        better = error < least
        least = torch.where(better, error, least)
        scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
        numbers = torch.where(better[..., None], found.to(torch.int8), numbers)
    return StoredTensor(packed(numbers.flatten(1)), scale, zero, dtype=weight.dtype)


def is_quantized(module: nn.Module) -> bool:
    """Whether the weight of a linear layer is stored in another form than a plain floating-point tensor."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and (type(weight.data) is not torch.Tensor or weight.element_size() < 2)


def _is_linear(name: str, module: nn.Module, lm_head: bool) -> bool:
    if not isinstance(module, nn.Linear) or module.in_features % _COLUMNS:
        return False
    return lm_head or name.rpartition(".")[2] != "lm_head"
