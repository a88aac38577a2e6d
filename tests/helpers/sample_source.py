"""Where samples of operators' arguments (`op_samples.py`) get their sizes, choices and numbers from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
INDEX = (torch.int32, torch.int64)


class Source:
    """Where a sample generator gets its choices from."""

    def __init__(self, integer: Callable[[int, int], int], device: str, fp8: bool | None = None) -> None:
        self.integer = integer
        self.device = device
        self.fp8 = fp8  # whether caches and weights are fp8; None: sometimes
        self.generator = torch.Generator().manual_seed(integer(0, 1000))

    def pick(self, *options: Any) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def cache_dtype(self, *options: torch.dtype) -> torch.dtype:
        fp8 = self.pick(False, True) if self.fp8 is None else self.fp8
        return FP8 if fp8 else self.pick(*options)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in one of four memory layouts; the last dimension stays contiguous."""
        tensor = tensor.to(self.device)
        layout = self.integer(0, 3)
        if layout == 1 and tensor.dim() > 1:  # a slice of something wider
            return tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)[..., : tensor.shape[-1]].copy_(tensor)
        if layout == 2 and tensor.dim() > 2:  # the first two dimensions swapped in memory
            return tensor.transpose(0, 1).contiguous().transpose(0, 1)
        return tensor

    def any_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `laid_out`, but the last dimension may be strided too: for tensors that are no caches."""
        tensor = self.laid_out(tensor)
        if tensor.dim() > 1 and self.integer(0, 3) == 0:
            return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        return tensor

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return self.any_layout(torch.rand(shape, generator=self.generator))

    def ids(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(dtype)

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)
