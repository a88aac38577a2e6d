"""Parts of a transformers model that behave differently from the model's own: shallow copies over the same weights.

The model itself stays as it is. A copy shares its parameters and its hooks, including hooks added later, with the original.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from spec_ops.models.target import PositionLimit


def _shallow(module: nn.Module) -> nn.Module:
    """A copy of `module` whose children and buffers can be replaced."""
    twin = copy.copy(module)
    twin._modules, twin._buffers = dict(module._modules), dict(module._buffers)
    return twin


def replaced(module: nn.Module, name: str, part: nn.Module) -> nn.Module:
    """`module` with `part` in the place of its submodule `name`."""
    child, _, rest = name.partition(".")
    twin = _shallow(module)
    twin._modules[child] = replaced(module.get_submodule(child), rest, part) if rest else part
    return twin


def as_decoder(module: PreTrainedModel) -> PreTrainedModel:
    """`module` with its undecorated `forward`: transformers' decorators read a registry of all models, and Dynamo would guard
    on its size."""
    twin = _shallow(module)
    twin.forward = MethodType(inspect.unwrap(type(module).forward), twin)  # type: ignore[method-assign]
    return twin  # type: ignore[return-value]


def cache_argument(module: nn.Module) -> str:
    """What the `forward` of `module` calls its cache: `cache` in transformers 5.24, `past_key_values` before and in code of
    others. A decorator that takes the older name too is not there after `as_decoder`."""
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


class GivenHiddenStates(nn.Module):
    """Stands in for a decoder: returns hidden states that were computed before, passed as `inputs_embeds`."""

    def __init__(self, output: Callable[..., Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_args, inputs_embeds: torch.Tensor, **_kwargs) -> Any:
        return self.output(last_hidden_state=inputs_embeds)


def watched(layer: nn.Module, before: Callable[[Any], None], after: Callable[[Any], None]) -> nn.Module:
    """`layer`, with its input passed to `before` and its output to `after`."""
    twin = _shallow(layer)
    for hooks in [name for name in vars(layer) if name.startswith("_forward_") and "hooks" in name]:
        setattr(twin, hooks, type(getattr(layer, hooks))())  # the original layer runs them

    def forward(*args: Any, **kwargs: Any) -> Any:
        before(args[0] if args else kwargs["hidden_states"])
        output = layer(*args, **kwargs)
        after(output)
        return output

    twin.forward = forward  # type: ignore[method-assign]
    return twin


def with_fixed_rope(decoder: nn.Module) -> tuple[nn.Module, PositionLimit | None]:
    """`decoder` whose rotary embeddings keep the angles of short sequences, and the positions for which these are right.

    RoPE of the types "dynamic" and "longrope" computes the angles of all rows from the longest position of the batch, so a
    row's tokens would depend on its neighbours and on drafts that are then rejected. Up to a length the angles are constant.
    """
    limit: PositionLimit | None = None
    for name, module in list(decoder.named_modules()):
        kind = getattr(module, "rope_type", None)
        kinds = kind if isinstance(kind, dict) else {None: kind}
        moving = {layer: k for layer, k in kinds.items() if k is not None and (k == "longrope" or "dynamic" in k)}
        if not moving:
            continue
        twin = _shallow(module)
        for layer, k in moving.items():
            prefix = "" if layer is None else f"{layer}_"
            twin._buffers[f"{prefix}inv_freq"] = getattr(module, f"{prefix}original_inv_freq")
            parameters = module.config.rope_parameters if layer is None else module.config.rope_parameters[layer]
            longest = parameters["original_max_position_embeddings"] if k == "longrope" else module.original_max_seq_len
            if limit is None or longest < limit.count:
                limit = PositionLimit(
                    int(longest),
                    f'past it, RoPE of rope_type="{k}" computes every row\'s angles from the longest position of the batch',
                )
        fixed = {layer: "default" if layer in moving else k for layer, k in kinds.items()}
        twin.rope_type = fixed if isinstance(kind, dict) else "default"  # type: ignore[assignment]
        decoder = replaced(decoder, name, twin)
    return decoder, limit
