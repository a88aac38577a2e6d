"""Weights of 8 and 4 bits as checkpoints have them, made of random numbers."""

from __future__ import annotations

import torch

from spec_ops.backends.weight_format import dequantized, packed

# kind: rows and columns that share a scale; None for all.
FLOAT8 = {"tensor": (None, None), "row": (1, None), "block": (128, 128), "group": (1, 64)}
INT4 = {"int4-32": 32, "int4-128": 128, "int4-256": 256}
INT8 = {"int8": (1, None)}
KINDS = [*FLOAT8, *INT8, *INT4]


def stored(
    weight: torch.Tensor, kind: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`weight [n, k]` in 8 or 4 bits, its scale and its zero, both of `dtype`."""
    n, k = weight.shape
    if (sizes := {**FLOAT8, **INT8}.get(kind)) is not None:
        rows, columns = (size or whole for size, whole in zip(sizes, (n, k), strict=True))
        padded = torch.nn.functional.pad(weight.float(), (0, -k % columns, 0, -n % rows))
        blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        scale = (blocks.abs().amax((1, 3)) / (127 if kind in INT8 else 448)).to(dtype)
        data = blocks / scale.float()[:, None, :, None]
        data = data.round().clamp(-127, 127).to(torch.int8) if kind in INT8 else data.to(torch.float8_e4m3fn)
        return data.view(padded.shape)[:n, :k].contiguous(), scale, None
    groups = weight.float().unflatten(1, (-1, INT4[kind]))
    low, high = groups.aminmax(dim=2)
    scale = ((high - low) / 15).to(dtype)
    zero = (low + 8 * scale.float()).to(dtype)
    numbers = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(1)
    return packed(numbers), scale.t().contiguous().t(), zero.t().contiguous().t()  # as torchao stores them


def exact(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None) -> torch.Tensor:
    """The product with the dequantized weight, in float64."""
    return x.double() @ dequantized(weight, scale, zero).double().t()
