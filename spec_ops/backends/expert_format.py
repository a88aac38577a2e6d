"""How the weights of a stack of experts are stored in 8 and 4 bits: what `moe_experts`, its reference and its kernels agree on.

A stack `[E, n, k]` comes with scales, of which an expert has its own:

| stack | scales | as in |
|---|---|---|
| float8_e4m3fn `[E, n, k]` | `[E, rows, columns]`, floating-point | transformers' `FP8Experts` |
| uint8 `[E, n, k / 2]` | uint8 `[E, n, k / 32]` | MXFP4, as gpt-oss is published |
| uint8 `[E, n, k / 2]` | floating-point `[E, n, k / group]` | int4 without zero points, as Kimi-K2 is published |

`columns` is `ceil(k / 128)`, or 1. `rows` is `ceil(n / 128)`, n, or 1. Where the gate's rows come before those of the up
projection, each was quantized alone: `rows` is twice what n / 2 would have, or 1.

A byte of MXFP4 holds two numbers of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign (e2m1), the even column in its low half. Its scales
are powers of 2, `2^(byte - 127)` (e8m0); 255 would be NaN. A byte of int4 holds two of -8 to 7 in the same order, and the
columns of a `group` (`weight_format.GROUPS`) share a scale.

Source: OCP Microscaling Formats 1.0; DeepSeek-V3 (arXiv:2412.19437, 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_ops.backends.weight_format import BLOCK, FLOAT4_GROUPS, GROUPS, SCALE_DTYPES, e2m1, e8m0, unpacked

MX_GROUP = FLOAT4_GROUPS["mxfp4"]  # numbers of a row that share an e8m0 scale


class ExpertFormat(NamedTuple):
    """What a stack is.

    Attributes:
        bits: 16 (or 32: no scales), 8 or 4.
        rows, columns: how many of each share a scale.
        parts: of a stack's rows, each with scales of its own: 2 if gate and up projection lie one after the other.
        int4: whether 4 bits are integers, and not floats.
    """

    bits: int
    rows: int
    columns: int
    parts: int = 1
    int4: bool = False


def inner_of(stack: torch.Tensor) -> int:
    """k of a stack that is not transposed."""
    return stack.shape[2] * (2 if stack.dtype == torch.uint8 else 1)


def expert_format(op: str, name: str, stack: torch.Tensor, scale: torch.Tensor | None, parts: int = 1) -> ExpertFormat:
    """The format of the argument `name` of `op`, of which `name_scale` is the scale.

    Raises:
        TypeError: a dtype that no format has.
        ValueError: scales that are missing, of another shape, or not wanted.
    """
    dtype, (experts, n, _) = stack.dtype, stack.shape
    if dtype.is_floating_point and dtype.itemsize > 1:
        if scale is not None:
            raise ValueError(f"{op}: `{name}_scale` must be None beside a `{name}` of {dtype}, got a tensor")
        return ExpertFormat(16, n, inner_of(stack))
    if dtype not in (torch.float8_e4m3fn, torch.uint8):
        wanted = "of 16 or 32 bits, float8_e4m3fn, or uint8 (MXFP4, int4)"
        raise TypeError(f"{op}: `{name}` must be {wanted}, got {dtype}")
    if scale is None:
        raise ValueError(f"{op}: `{name}_scale` must be given beside a `{name}` of {dtype}, got None")
    k, shape = inner_of(stack), tuple(scale.shape)
    if dtype == torch.uint8:
        if scale.dtype in SCALE_DTYPES:
            group = k // shape[2] if len(shape) == 3 and shape[2] and k % shape[2] == 0 else 0
            if group not in GROUPS or shape[:2] != (experts, n):
                wanted = f"[{experts}, {n}, {k} / group] with a group of {GROUPS} beside int4"
                raise ValueError(f"{op}: `{name}_scale` must be {wanted}, got shape {shape}")
            return ExpertFormat(4, 1, group, parts, int4=True)
        if scale.dtype != torch.uint8:
            wanted = "of uint8 (e8m0) beside MXFP4, or of float32, bfloat16 or float16 beside int4"
            raise TypeError(f"{op}: `{name}_scale` must be {wanted}, got {scale.dtype}")
        if k % MX_GROUP or shape != (experts, n, k // MX_GROUP):
            raise ValueError(f"{op}: `{name}_scale` must be [{experts}, {n}, {k} / {MX_GROUP}] beside MXFP4, got shape {shape}")
        return ExpertFormat(4, 1, MX_GROUP, parts)
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{op}: `{name}_scale` must be of float32, bfloat16 or float16, got {scale.dtype}")
    half, blocks = n // parts, -(-k // BLOCK)
    known = {parts: (half, parts), parts * half: (1, parts), parts * -(-half // BLOCK): (BLOCK, parts), 1: (n, 1)}
    if len(shape) != 3 or shape[0] != experts or shape[1] not in known or shape[2] not in (1, blocks):
        wanted = f"[{experts}, {' or '.join(map(str, sorted(known)))}, {' or '.join(map(str, sorted({1, blocks})))}]"
        raise ValueError(f"{op}: `{name}_scale` must be {wanted} for experts of {n} x {k}, got shape {shape}")
    return ExpertFormat(8, known[shape[1]][0], BLOCK if shape[2] == blocks else k, known[shape[1]][1])


def dequantized_expert(weight: torch.Tensor, scale: torch.Tensor, stored: ExpertFormat) -> torch.Tensor:
    """`[n, k]` in float32, as exact as that is, of one expert's `weight` and `scale`."""
    if stored.int4:
        return unpacked(weight).float() * scale.float().repeat_interleave(stored.columns, 1)
    if stored.bits == 4:
        return e2m1(weight) * e8m0(scale).repeat_interleave(stored.columns, 1)
    values = weight.float()
    wide = scale.float().repeat_interleave(stored.columns, 1)[:, : values.shape[1]]
    parts = [part.repeat_interleave(stored.rows, 0) for part in wide.chunk(stored.parts)]
    return values * torch.cat([part[: values.shape[0] // stored.parts] for part in parts])
