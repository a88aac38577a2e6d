"""Concatenation in plain PyTorch."""

from __future__ import annotations

import torch


def concatenate(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(tensors, dim)
