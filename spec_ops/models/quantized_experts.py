"""The experts of this package's mixtures in 8 and 4 bits, in the formats that `moe_experts` reads as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from spec_ops.backends.expert_format import MX_GROUP
from spec_ops.backends.weight_format import BLOCK
from spec_ops.models.layers import Mixture

Store = Callable[..., Any]  # of a weight `[n, k]`, and of rows and columns that share a scale in 8 bits: a `StoredTensor`
EXPERT_KINDS = ("float8", "float8_block", "float8_tensor", "mxfp4")


def mixtures(model: nn.Module) -> Iterator[Mixture]:
    return (module for module in model.modules() if isinstance(module, Mixture))


def is_stored(mixture: Mixture) -> bool:
    """Whether its experts are of 8 or 4 bits."""
    return mixture.down_proj.element_size() == 1


@torch.no_grad()
def store_experts(mixture: Mixture, kind: str, store: Store) -> None:
    """Store a mixture's experts as `kind`, one of `EXPERT_KINDS`, in place. Those that are stored already stay, and so do those
    whose sizes are no multiple of 32 in MXFP4."""
    stacks = mixture.gate_up_proj, mixture.down_proj
    if is_stored(mixture) or (kind == "mxfp4" and any(stack.shape[2] % MX_GROUP for stack in stacks)):
        return
    # The gate's rows lie before those of the up projection, and each has blocks of its own.
    for name, stack, parts in zip(("gate_up", "down"), stacks, (2, 1), strict=True):
        data, scale = _stored(stack, kind, parts, store)
        setattr(mixture, f"{name}_proj", nn.Parameter(data, requires_grad=False))
        setattr(mixture, f"{name}_scale", nn.Parameter(scale, requires_grad=False))


def _stored(stack: torch.Tensor, kind: str, parts: int, store: Store) -> tuple[torch.Tensor, torch.Tensor]:
    """`stack [E, n, k]` and its scales; one expert at a time, since what is computed on the way is many times as large."""
    _, n, k = stack.shape
    sizes = {"float8": (1, k), "float8_block": (BLOCK, BLOCK), "float8_tensor": (n // parts, k)}.get(kind, ())
    data, scales = [], []
    for expert in stack:
        made = [store(part, *sizes) for part in expert.chunk(parts)]
        data.append(torch.cat([part.data_.view(torch.uint8) for part in made]))
        scales.append(torch.cat([part.scale for part in made]))
    numbers = torch.stack(data)
    return numbers if kind == "mxfp4" else numbers.view(torch.float8_e4m3fn), torch.stack(scales)
