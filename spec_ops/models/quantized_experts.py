"""The experts of this package's mixtures in 8 and 4 bits, in the formats that `moe_experts` reads as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from spec_ops.backends.expert_format import MX_GROUP
from spec_ops.backends.weight_format import BLOCK, GROUPS, packed
from spec_ops.models.layers import Mixture
from spec_ops.models.stored_tensor import StoredTensor

Store = Callable[..., Any]  # of a weight `[n, k]`, and of rows and columns that share a scale in 8 bits: a `StoredTensor`
EXPERT_KINDS = ("float8", "float8_block", "float8_tensor", "int4", "mxfp4")
_GROUP = 128  # columns that share a scale of int4, where they divide k
_RANGES = [1.04 - 0.03 * i for i in range(18)]  # parts of a group's greatest magnitude that the numbers -7.5 to 7.5 may cover


def mixtures(model: nn.Module) -> Iterator[Mixture]:
    return (module for module in model.modules() if isinstance(module, Mixture))


def is_stored(mixture: Mixture) -> bool:
    """Whether its experts are of 8 or 4 bits."""
    return mixture.down_proj.element_size() == 1


@torch.no_grad()
def store_experts(mixture: Mixture, kind: str, store: Store) -> None:
    """Store a mixture's experts as `kind`, one of `EXPERT_KINDS`, in place. Those that are stored already stay, and so do those
    whose sizes are no multiple of 32 in 4 bits.

    Args:
        store: of a kind; not called for `"int4"`, which has no zero points here.
    """
    stacks = mixture.gate_up_proj, mixture.down_proj
    if is_stored(mixture) or (kind in ("int4", "mxfp4") and any(stack.shape[2] % MX_GROUP for stack in stacks)):
        return
    store = int4_without_zeros if kind == "int4" else store
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
    return numbers if kind in ("int4", "mxfp4") else numbers.view(torch.float8_e4m3fn), torch.stack(scales)


def int4_without_zeros(weight: torch.Tensor) -> StoredTensor:
    """`weight [n, k]` in integers of 4 bits times a scale for 128 columns of a row, or as many as divide k. Of several scales
    each group has the one whose squared error is least.

    Args:
        weight: floating-point, k a multiple of 32.
    """
    group = next(size for size in (_GROUP, *GROUPS[1::-1]) if weight.shape[1] % size == 0)
    values = weight.float().unflatten(1, (-1, group))
    greatest = values.abs().amax(2) / 7.5
    least, scale = torch.full_like(greatest, torch.inf), greatest.to(weight.dtype)
    numbers = torch.zeros_like(values, dtype=torch.int8)
    for part in _RANGES:
        s = (part * greatest).to(weight.dtype)
        wide = s.float()[..., None]
        found = (values / torch.where(wide == 0, 1, wide)).round_().clamp_(-8, 7)
        error = (found * wide - values).square_().sum(2)
        better = error < least
        least, scale = torch.where(better, error, least), torch.where(better, s, scale)
        numbers = torch.where(better[..., None], found.to(torch.int8), numbers)
    return StoredTensor(packed(numbers.flatten(1)), scale, dtype=weight.dtype)
