"""Experts of compressed-tensors checkpoints in int4 without zero points, in the stacks that `moe_experts` reads as stored.

Such a checkpoint has linear layers, three for each expert:

    model.layers.0.mlp.experts.7.gate_proj.weight_packed   [I, H / 8] int32

and the models of transformers have stacks of all experts, a gate's rows before those of the up projection. Here a stack is made
of what the layers become (`models/layouts.py`), once, while the model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from spec_ops.integrations.transformers.experts import experts_forward, is_experts
from spec_ops.models.stored_tensor import StoredTensor

_LAYER = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def experts_of(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The modules, by name, of whose experts some of the linear layers `names` are.

    Raises:
        ValueError: one whose stacks are not `gate_up_proj [E, 2 * I, H]` and `down_proj [E, H, I]` without biases, or that has
            not all of its experts among `names`.
    """
    found: dict[str, nn.Module] = {}
    given, modules = set(names), dict(model.named_modules())
    for name in sorted(given):
        place = _LAYER.fullmatch(name)
        module = None if place is None else modules.get(place[1])
        if place is None or module is None or place[1] in found or not is_experts(module):
            continue
        experts: Any = module
        if not experts.has_gate or not experts.is_concatenated or experts.is_transposed or experts.has_bias:
            wanted = "gates before up projections, neither transposed nor with biases, to be read as they are stored"
            raise ValueError(f"{place[1]}: {type(module).__name__} must have {wanted}")
        layers = _layers(place[1], len(experts.down_proj))
        if missing := [layer for layer in layers if layer not in given]:
            raise ValueError(f"{place[1]} must have all of its {len(experts.down_proj)} experts quantized, not {missing[0]}")
        found[place[1]] = module
    return found


def _layers(name: str, experts: int) -> list[str]:
    return [f"{name}.{i}.{part}" for i in range(experts) for parts in _STACKS.values() for part in parts]


def take(model: nn.Module, name: str) -> dict[str, tuple[int, ...]]:
    """Takes an experts module out of `model`, and its stacks, which transformers would look for in the files and initialize,
    out of it; the shapes that they had, by name."""
    module, shapes = model.get_submodule(name), {}
    for stack in _STACKS:
        shapes[stack] = tuple(getattr(module, stack).shape)
        delattr(module, stack)
    model.set_submodule(name, nn.Module())
    return shapes


def fill(
    module: nn.Module, name: str, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str, int, int], StoredTensor]
) -> None:
    """Gives an experts module its stacks, and the forward that reads them.

    Args:
        module, name: without its stacks, and what it is called in the checkpoint.
        shapes: of `take`.
        read: the weight of a linear layer `[n, k]` by its name.

    Raises:
        ValueError: weights that `moe_experts` does not read: of another format than int4, or with zero points.
    """
    for stack, parts in _STACKS.items():
        experts, rows, k = shapes[stack]
        data, scales = [], []
        for expert in range(experts):
            for part in parts:
                layer = f"{name}.{expert}.{part}"
                weight = read(layer, rows // len(parts), k)
                int4 = weight.data_.dtype == torch.uint8 and weight.scale.is_floating_point() and weight.tensor_scale is None
                if not int4 or weight.scale.element_size() == 1 or weight.zero is not None or weight.inputs is not None:
                    raise ValueError(f"{layer}: experts must be of int4 without zero points, with rows as they are")
                data.append(weight.data_)
                scales.append(weight.scale)
        for suffix, made in (("", data), ("_scale_inv", scales)):
            whole = torch.cat(made).unflatten(0, (experts, rows))
            module.register_parameter(stack + suffix, nn.Parameter(whole, requires_grad=False))
    module.__class__ = type(f"Stored{type(module).__name__}", (type(module),), {"forward": experts_forward})
