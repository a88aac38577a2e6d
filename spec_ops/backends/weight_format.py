"""How weights of 8 and 4 bits are stored: what the kernels, their ops, the reference, the passes and all loaders agree on.

A weight `[n, k]` comes with `scale`, whose shape says what shares a factor:

| weight | scale | as in |
|---|---|---|
| float8_e4m3fn or int8 `[n, k]` | `[1, 1]`, `[n, 1]`, or `[n, k / group]` | torchao's `Float8Tensor` and `Int8Tensor` |
| float8_e4m3fn or int8 `[n, k]` | `[ceil(n / 128), ceil(k / 128)]` | DeepSeek-V3, transformers' fine-grained fp8 |
| uint8 `[n, k / 2]`, int4 | `[n, k / group]`, and `zero` alike or None | torchao's `Int4Tensor`, whose scales are transposed |

A byte of an int4 weight holds two numbers of -8 to 7, the even column in its low half. A weight is `stored * scale`, and
`stored * scale + zero` with `zero`. Other layouts of the same numbers (GPTQ, AWQ, compressed-tensors) become one of these once,
when a model is taken over.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128  # of rows and columns that share a scale, where blocks do
GROUPS = (32, 64, 128, 256)  # columns of a row that may share one
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = {torch.float8_e4m3fn: "float8", torch.int8: "int8", torch.uint8: "int4"}  # by the dtype of what is stored
_BITS = {"float8": 8, "int8": 8, "int4": 4}


class WeightFormat(NamedTuple):
    """What a stored weight is.

    Attributes:
        kind: one of `KINDS`, or `"plain"` (16 or 32 bits, no scale).
        rows, columns: how many of each share a scale; n and k if all do.
    """

    kind: str
    rows: int
    columns: int

    @property
    def bits(self) -> int:
        """8, 4, or 16 for a plain weight."""
        return _BITS.get(self.kind, 16)


def columns_of(weight: torch.Tensor) -> int:
    """k of a stored weight."""
    return weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)


def for_columns(weight: torch.Tensor, k: int) -> torch.Tensor:
    """A weight of k columns as its format has it: torchao's `Int4Tensor` calls its bytes int8, of which k / 2 are a row."""
    return weight.view(torch.uint8) if weight.dtype == torch.int8 and 2 * weight.shape[1] == k else weight


def weight_format(op: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None) -> WeightFormat:
    """The format of a weight of `op`.

    Raises:
        TypeError: a dtype that no format has.
        ValueError: the shape of `scale` or `zero` is that of no format; a weight without the scale that it needs.
    """
    (n, _), k = weight.shape, columns_of(weight)
    if weight.dtype.is_floating_point and weight.element_size() > 1:
        if scale is not None or zero is not None:
            raise ValueError(f"{op}: `scale` and `zero` must be None beside a weight of {weight.dtype}, got tensors")
        return WeightFormat("plain", n, k)
    if (kind := KINDS.get(weight.dtype)) is None:
        wanted = "of 16 or 32 bits, float8_e4m3fn, int8, or uint8 (two numbers of 4 bits)"
        raise TypeError(f"{op}: `weight` must be {wanted}, got {weight.dtype}")
    if scale is None:
        raise ValueError(f"{op}: `scale` must be given beside a weight of {weight.dtype}, got None")
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{op}: `scale` must be of float32, bfloat16 or float16, got {scale.dtype}")
    if zero is not None and (kind != "int4" or zero.shape != scale.shape or zero.dtype != scale.dtype):
        wanted = f"{scale.dtype} of the shape {tuple(scale.shape)} of `scale`" if kind == "int4" else f"None beside {kind}"
        raise ValueError(f"{op}: `zero` must be {wanted}, got {zero.dtype} of shape {tuple(zero.shape)}")
    if (shared := _shared(kind, n, k, tuple(scale.shape))) is None:
        wanted = f"[{n}, {k} / group] with a group of {GROUPS}"
        if kind != "int4":
            wanted = f"[1, 1], [{n}, 1], {wanted}, or [{-(-n // BLOCK)}, {-(-k // BLOCK)}] for blocks of {BLOCK} x {BLOCK}"
        raise ValueError(f"{op}: `scale` of a weight {n} x {k} of {kind} must be {wanted}, got shape {tuple(scale.shape)}")
    return WeightFormat(kind, *shared)


def _shared(kind: str, n: int, k: int, scale: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns that share a scale of that shape."""
    if len(scale) != 2:
        return None
    if kind != "int4":
        if scale[1] == 1 and scale[0] in (1, n):
            return (n if scale[0] == 1 else 1), k
        if scale == (-(-n // BLOCK), -(-k // BLOCK)):
            return BLOCK, BLOCK
    grouped = scale[0] == n and scale[1] > 0 and k % scale[1] == 0 and k // scale[1] in GROUPS
    return (1, k // scale[1]) if grouped else None


def dequantized(weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None = None) -> torch.Tensor:
    """`[n, k]` in float32, as exact as that is.

    Args:
        weight, scale, zero: see this module.

    Raises:
        TypeError, ValueError: as `weight_format`.
    """
    shared = weight_format("dequantized", weight, scale, zero)
    if scale is None:
        return weight.float()
    values = unpacked(weight).float() if shared.kind == "int4" else weight.float()
    values = values * _spread(scale, shared, *values.shape)
    return values if zero is None else values + _spread(zero, shared, *values.shape)


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """The numbers -8 to 7 of `[n, k / 2]` bytes, int8 `[n, k]`."""
    halves = torch.stack([weight & 15, weight >> 4], dim=2).flatten(1)
    return (halves ^ 8).to(torch.int8) - 8


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """`[n, k / 2]` uint8 of integers -8 to 7 `[n, k]`: the inverse of `unpacked`."""
    halves = (numbers & 15).to(torch.uint8)
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def _spread(scale: torch.Tensor, shared: WeightFormat, n: int, k: int) -> torch.Tensor:
    """The scale of each weight, `[n, k]` or broadcastable to it, float32."""
    scale = scale.float()
    if shared.columns < k:
        scale = scale.repeat_interleave(shared.columns, 1)[:, :k]
    return scale.repeat_interleave(shared.rows, 0)[:n] if 1 < shared.rows < n else scale
