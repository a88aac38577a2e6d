"""Weights of 8 and 4 bits as checkpoints have them, made of random numbers."""

from __future__ import annotations

import torch

from spec_ops.backends.weight_format import dequantized, packed, packed_e2m1

# kind: rows and columns that share a scale; None for all.
FLOAT8 = {"tensor": (None, None), "row": (1, None), "block": (128, 128), "group": (1, 64)}
INT4 = {"int4-32": 32, "int4-64": 64, "int4-128": 128, "int4-256": 256}
INT8 = {"int8": (1, None)}
FLOAT4 = {"nvfp4": 16, "mxfp4": 32}  # columns of a row that share a scale
KINDS = [*FLOAT8, *INT8, *INT4, *FLOAT4]


def stored(weight: torch.Tensor, kind: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor | None, ...]:
    """`weight [n, k]` in 8 or 4 bits, its scale and its zero, both of `dtype`; of 4-bit floats also its tensor's scale."""
    n, k = weight.shape
    if (group := FLOAT4.get(kind)) is not None:
        groups = weight.float().unflatten(1, (-1, group))
        largest = groups.abs().amax(2)
        whole = None
        if kind == "nvfp4":
            whole = (largest.amax() / (6 * 448)).reshape(1)
            scale = (largest / 6 / whole).to(torch.float8_e4m3fn)
            wide = scale.float() * whole
        else:
            exponents = (largest / 6).log2().ceil()
            scale, wide = (exponents + 127).to(torch.uint8), exponents.exp2()
        return packed_e2m1((groups / wide[..., None]).flatten(1)), scale, None, whole
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


def exact(x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor | None) -> torch.Tensor:
    """The product with the dequantized weight, in float64."""
    return x.double() @ dequantized(weight, *scales).double().t()
