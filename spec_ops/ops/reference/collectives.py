"""Reference reductions over ranks. Each rank gathers all parts and adds them up in the order of the ranks, so that all ranks
have the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from spec_ops.backends.squares import SUM_COLUMNS, sums_of


def parts_of(x: torch.Tensor, group: str) -> Sequence[torch.Tensor]:
    """The tensors of all ranks."""
    size = dist.distributed_c10d._resolve_process_group(group).size()  # type: ignore[arg-type] # torch 2.13 has a type of names
    flat = x.contiguous().reshape(1, -1)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(flat, size, group)
    return torch.ops._c10d_functional.wait_tensor(gathered).view(size, *x.shape).unbind()


def sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32 or more, from +0.0 on in the order of the ranks; rounded once."""
    exact = torch.promote_types(parts[0].dtype, torch.float32)
    total = torch.zeros_like(parts[0], dtype=exact, memory_format=torch.contiguous_format)
    for part in parts:
        total = total + part
    return total.to(parts[0].dtype)


def add_to(
    total: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = (total.float() + residual.float()).to(total.dtype)
    z = (y.float() * norm_weight.float()).to(total.dtype)
    (m, n), sums = y.shape, sums_of(y.shape[1])
    padded = F.pad(y.float(), (0, sums * SUM_COLUMNS - n))
    return y, z, padded.view(m, sums, SUM_COLUMNS).square().sum(-1)


def all_reduce(x: torch.Tensor, reduce: str, group: str) -> torch.Tensor:
    parts = parts_of(x, group)
    return sum_of(parts) if reduce == "sum" else torch.stack(list(parts)).amax(0)


def all_reduce_add(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return add_to(sum_of(parts_of(x, group)), residual, norm_weight)
