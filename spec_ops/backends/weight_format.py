"""How weights of 8 and 4 bits are stored: what the kernels, their ops, the reference, the passes and all loaders agree on.

A weight `[n, k]` comes with `scale`, whose shape says what shares a factor:

| weight | scale | as in |
|---|---|---|
| float8_e4m3fn or int8 `[n, k]` | `[1, 1]`, `[n, 1]`, or `[n, k / group]` | torchao's `Float8Tensor` and `Int8Tensor` |
| float8_e4m3fn or int8 `[n, k]` | `[ceil(n / 128), ceil(k / 128)]` | DeepSeek-V3, transformers' fine-grained fp8 |
| uint8 `[n, k / 2]`, int4 | `[n, k / group]`, and `zero` alike or None | torchao's `Int4Tensor`, whose scales are transposed |
| uint8 `[n, k / 2]`, NVFP4 | float8_e4m3fn `[n, k / 16]`, and `tensor_scale [1]` or None | compressed-tensors, torchao |
| uint8 `[n, k / 2]`, MXFP4 | uint8 `[n, k / 32]`, e8m0 | compressed-tensors, gpt-oss |

A byte of 4-bit numbers holds two, the even column in its low half: of int4 -8 to 7; of the others e2m1, which is 0, 0.5, 1,
1.5, 2, 3, 4, 6 and a sign. A weight is `stored * scale`, and `stored * scale + zero` with `zero`; `tensor_scale`, float32,
multiplies a whole weight. A scale of e8m0 is `2^(byte - 127)`, and 255 would be NaN. Other layouts of the same numbers (GPTQ,
AWQ, compressed-tensors) become one of these once, when a model is taken over.

Sources: OCP Microscaling Formats 1.0; "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149, 2).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

BLOCK = 128  # of rows and columns that share a scale, where blocks do
GROUPS = (32, 64, 128, 256)  # columns of a row that may share one
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = {torch.float8_e4m3fn: "float8", torch.int8: "int8", torch.uint8: "int4"}  # by the dtype of what is stored
FLOAT4 = {torch.float8_e4m3fn: "nvfp4", torch.uint8: "mxfp4"}  # what uint8 holds in place of int4, by the dtype of scales
FLOAT4_GROUPS = {"nvfp4": 16, "mxfp4": 32}  # columns of a row that share a scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = _E2M1[-1]
E2M1_UNIT = 2.0**14  # what float16 of such bits is multiplied by
_BITS = {"float8": 8, "int8": 8, "int4": 4, "nvfp4": 4, "mxfp4": 4}


class WeightFormat(NamedTuple):
    """What a stored weight is.

    Attributes:
        kind: one of `KINDS` or `FLOAT4`, or `"plain"` (16 or 32 bits, no scale).
        rows, columns: how many of each share a scale; n and k if all do.
    """

    kind: str
    rows: int
    columns: int

    @property
    def bits(self) -> int:
        """8, 4, or 16 for a plain weight."""
        return _BITS.get(self.kind, 16)

    @property
    def float4(self) -> bool:
        """Whether it holds e2m1."""
        return self.kind in FLOAT4_GROUPS


def columns_of(weight: torch.Tensor) -> int:
    """k of a stored weight."""
    return weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)


def for_columns(weight: torch.Tensor, k: int) -> torch.Tensor:
    """A weight of k columns as its format has it: torchao's `Int4Tensor` calls its bytes int8, of which k / 2 are a row."""
    return weight.view(torch.uint8) if weight.dtype == torch.int8 and 2 * weight.shape[1] == k else weight


def weight_format(
    op: str,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    tensor_scale: torch.Tensor | None = None,
) -> WeightFormat:
    """The format of a weight of `op`.

    Raises:
        TypeError: a dtype that no format has.
        ValueError: the shape of `scale`, `zero` or `tensor_scale` is that of no format; a weight without the scale that it
            needs.
    """
    (n, _), k = weight.shape, columns_of(weight)
    if weight.dtype.is_floating_point and weight.element_size() > 1:
        if scale is not None or zero is not None or tensor_scale is not None:
            wanted = f"`scale`, `zero` and `tensor_scale` must be None beside a weight of {weight.dtype}"
            raise ValueError(f"{op}: {wanted}, got tensors")
        return WeightFormat("plain", n, k)
    if (kind := KINDS.get(weight.dtype)) is None:
        wanted = "of 16 or 32 bits, float8_e4m3fn, int8, or uint8 (two numbers of 4 bits)"
        raise TypeError(f"{op}: `weight` must be {wanted}, got {weight.dtype}")
    if scale is None:
        raise ValueError(f"{op}: `scale` must be given beside a weight of {weight.dtype}, got None")
    kind = FLOAT4.get(scale.dtype, kind) if kind == "int4" else kind
    if kind not in FLOAT4_GROUPS and scale.dtype not in SCALE_DTYPES:
        more = ", or float8_e4m3fn or uint8 beside 4-bit floats" if kind == "int4" else ""
        raise TypeError(f"{op}: `scale` must be of float32, bfloat16 or float16{more}, got {scale.dtype}")
    if zero is not None and (kind != "int4" or zero.shape != scale.shape or zero.dtype != scale.dtype):
        wanted = f"{scale.dtype} of the shape {tuple(scale.shape)} of `scale`" if kind == "int4" else f"None beside {kind}"
        raise ValueError(f"{op}: `zero` must be {wanted}, got {zero.dtype} of shape {tuple(zero.shape)}")
    if tensor_scale is not None and (kind != "nvfp4" or tensor_scale.numel() != 1 or tensor_scale.dtype != torch.float32):
        wanted = "one number of torch.float32" if kind == "nvfp4" else f"None beside {kind}"
        raise ValueError(
            f"{op}: `tensor_scale` must be {wanted}, got {tensor_scale.dtype} of shape {tuple(tensor_scale.shape)}"
        )
    if (shared := _shared(kind, n, k, tuple(scale.shape))) is None:
        wanted = f"[{n}, {k} / {FLOAT4_GROUPS.get(kind, 'group')}]"
        if kind in KINDS.values():
            wanted = f"{wanted} with a group of {GROUPS}"
        if kind in ("float8", "int8"):
            wanted = f"[1, 1], [{n}, 1], {wanted}, or [{-(-n // BLOCK)}, {-(-k // BLOCK)}] for blocks of {BLOCK} x {BLOCK}"
        raise ValueError(f"{op}: `scale` of a weight {n} x {k} of {kind} must be {wanted}, got shape {tuple(scale.shape)}")
    return WeightFormat(kind, *shared)


def _shared(kind: str, n: int, k: int, scale: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns that share a scale of that shape."""
    if len(scale) != 2:
        return None
    if (group := FLOAT4_GROUPS.get(kind)) is not None:
        return (1, group) if k % group == 0 and scale == (n, k // group) else None
    if kind != "int4":
        if scale[1] == 1 and scale[0] in (1, n):
            return (n if scale[0] == 1 else 1), k
        if scale == (-(-n // BLOCK), -(-k // BLOCK)):
            return BLOCK, BLOCK
    grouped = scale[0] == n and scale[1] > 0 and k % scale[1] == 0 and k // scale[1] in GROUPS
    return (1, k // scale[1]) if grouped else None


def dequantized(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[n, k]` in float32, as exact as that is.

    Args:
        weight, scale, zero, tensor_scale: see this module.

    Raises:
        TypeError, ValueError: as `weight_format`.
    """
    shared = weight_format("dequantized", weight, scale, zero, tensor_scale)
    if scale is None:
        return weight.float()
    if shared.float4:
        values, scale = e2m1(weight), e8m0(scale) if shared.kind == "mxfp4" else scale
    else:
        values = unpacked(weight).float() if shared.kind == "int4" else weight.float()
    values = values * _spread(scale, shared, *values.shape)
    if tensor_scale is not None:
        return values * tensor_scale
    return values if zero is None else values + _spread(zero, shared, *values.shape)


def e2m1(weight: torch.Tensor) -> torch.Tensor:
    """The 4-bit floats of `[n, k / 2]` bytes, float32 `[n, k]`.

    Exponent and mantissa are put where those of float16 meet: the number times 2^-14, also where it is subnormal.
    """
    halves = torch.stack([weight & 15, weight >> 4], dim=2).flatten(1).to(torch.int16)
    bits = ((halves & 7) << 9) | ((halves & 8) << 12)
    return bits.view(torch.float16).float() * E2M1_UNIT


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """`2^(byte - 127)` in float32: the exponent of one, but for 2^-127, which is subnormal."""
    return (scale.to(torch.int32) << 23).clamp_min(1 << 22).view(torch.float32)


def packed_e2m1(values: torch.Tensor) -> torch.Tensor:
    """`[n, k / 2]` uint8 of the 4-bit floats nearest to `values [n, k]`, the one with an even mantissa of two; greater
    magnitudes than 6 become 6."""
    magnitudes = values.abs().float()
    numbers = torch.zeros_like(values, dtype=torch.uint8)
    for i, (low, high) in enumerate(pairwise(_E2M1)):
        middle = (low + high) / 2
        numbers += (magnitudes >= middle if i % 2 else magnitudes > middle).to(torch.uint8)
    numbers |= torch.signbit(values).to(torch.uint8) << 3
    return numbers[:, ::2] | (numbers[:, 1::2] << 4)


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
