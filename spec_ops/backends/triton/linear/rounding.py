"""Rows rounded to float8 for `float8_mm`, with the activation or the norm before that, in one launch.

A row is as long as its greatest magnitude takes to find: where a row has one step, or is normalized, a program has all of it in
registers; where 128 columns have one, some groups of a row. The product after it is launched early, and asks for its weight
meanwhile. Figures: `docs/notebook/products.md`, "Rounding rows to float8".

The bits are those of eager torch on a GPU, which rounds after the activation, the product with `up` and the norm, but for an
activation or a norm whose last bit in float32 decides how it is rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from spec_ops.backends.float8_rows import FLOAT8_MAX, MAX_COLUMNS, rounding_shape
from spec_ops.backends.registry import BackendError
from spec_ops.backends.triton.linear.quantized import INTERPRETED
from spec_ops.backends.triton.moe.activation import activated
from spec_ops.backends.triton.runtime.ahead import FP8_ARCHS, Variant, variant_of
from spec_ops.backends.triton.runtime.launch import arch_of, await_predecessors, device_guard, launch, num_sms, recorded
from spec_ops.backends.triton.runtime.repeat import repeated
from spec_ops.backends.weight_format import BLOCK

A_THREAD = 8  # columns of a whole row, with as many warps as there may be
GROUP_WARPS = 8  # of a program that has some groups of a row
FULL = 4  # programs for each multiprocessor from which a program has 16 groups, not 8
EARLY_ROWS = 128  # most that are launched early
LEAST_ARCH = min(FP8_ARCHS)
_GREATEST = tl.constexpr(FLOAT8_MAX)


@triton.jit
def _rounded_to(value, dtype: tl.constexpr):
    """Float32 values that `dtype` has."""
    return value.to(dtype).to(tl.float32)


@triton.jit
def _quotient(value, divisor, BOUNDED: tl.constexpr):
    """`value [.., n] / divisor [.., 1]`, rounded once as a division is. Of `BOUNDED` quotients, some hundreds at most, from one
    reciprocal for all, since divisions would be a good part of the kernel: what each product leaves over is exact (Markstein);
    the power of 2 keeps that normal, and the reciprocal finite. Over 0 and infinity nothing is left over."""
    if INTERPRETED or not BOUNDED:
        return tl.div_rn(value, tl.broadcast_to(divisor, value.shape))
    power = tl.where(divisor < 2.0**-64, 2.0**64, 1.0)
    divisor *= power
    value *= power
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    less, inverse = tl.broadcast_to(-divisor, value.shape), tl.broadcast_to(inverse, value.shape)
    first = value * inverse
    quotient = tl.fma(tl.fma(first, less, value), inverse, first)
    quotient = tl.fma(tl.fma(quotient, less, value), inverse, quotient)
    return tl.where((divisor > 0) & (divisor < float("inf")), quotient, first)


@triton.jit(do_not_specialize=["M"])
def round_rows_kernel(
    x, x_row, up, up_row, residual, residual_row, weight, eps, total, step, least, zero, numbers, steps, M, N,
    ACTIVATION: tl.constexpr, ROUNDINGS: tl.constexpr, STEP_ROUNDED: tl.constexpr, QUOTIENT_ROUNDED: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `row, part`: `GROUPS` groups of `COLUMNS`, those that share a step or all of a row and more. `x`, `up`,
    `residual`: rows `.._row` apart; `up` and all of the norm (`residual` to `total`) may be None. `total`, `numbers [M, N]`
    contiguous; `steps`: `[groups, M]`."""
    await_predecessors(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.expand_dims(tl.arange(0, GROUPS), 1)
    n = group * COLUMNS + tl.expand_dims(tl.arange(0, COLUMNS), 0)
    live = n < N
    value = tl.load(x + row * x_row + n, mask=live, other=0.0).to(tl.float32)
    if up is not None:
        factor = tl.load(up + row * up_row + n, mask=live, other=0.0).to(tl.float32)
        value = _rounded_to(_rounded_to(activated(value, 1.0, ACTIVATION), dtype) * factor, dtype)
    if residual is not None:
        value = _rounded_to(value + tl.load(residual + row * residual_row + n, mask=live, other=0.0).to(tl.float32), dtype)
        tl.store(total + row * N + n, value.to(dtype), mask=live)
    if weight is not None:
        g = tl.load(weight + n, mask=live, other=0.0).to(tl.float32)
        # `abs` changes no value: `norm.store_sum` says what for.
        value *= tl.rsqrt(tl.sum(tl.sum(tl.abs(value * value), 1), 0) / N + eps)
        if ROUNDINGS == 2:
            value = _rounded_to(value, dtype)
        value *= g
        if ROUNDINGS > 0:
            value = _rounded_to(value, dtype)
    if step is None:
        # Magnitudes are in the order of their bits, with NaN above all.
        bits = tl.max(tl.abs(value).to(tl.int32, bitcast=True), 1)
        divisor = tl.expand_dims(bits.to(tl.float32, bitcast=True), 1) * (1 / _GREATEST)
        if STEP_ROUNDED:
            divisor = _rounded_to(divisor, dtype)
        divisor = tl.maximum(divisor, tl.cast(least, tl.float32), propagate_nan=tl.PropagateNan.ALL)
        divisor = tl.where(divisor == 0, tl.cast(zero, tl.float32), divisor)
        tl.store(steps + group * M + row, divisor, mask=group * COLUMNS < N)
    else:
        divisor = tl.full([1, 1], 1.0, tl.float32) * tl.load(step).to(tl.float32)
        if STEP_ROUNDED:
            divisor = _rounded_to(divisor, dtype)
        tl.store(steps + tl.zeros([1, 1], tl.int32), divisor, mask=(row == 0) & (tl.program_id(1) == 0))
    quotient = _quotient(value, divisor, step is None)
    if QUOTIENT_ROUNDED:
        quotient = _rounded_to(quotient, dtype)
    quotient = tl.clamp(quotient, -_GREATEST, _GREATEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(numbers + row * N + n, quotient.to(tl.float8e4nv), mask=live)


def round_rows(x: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `spec_ops.ops.rounding`.

    Raises:
        TypeError, ValueError: what `rounding_shape` refuses; a dtype, strides, or groups of columns that no kernel takes.
        BackendError: a GPU before sm_89.
    """
    return _run("round_rows", {"x": x}, *how)


def gated_round_rows(gate: torch.Tensor, up: torch.Tensor, activation: str, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `spec_ops.ops.rounding`; raises as `round_rows`."""
    return _run("gated_round_rows", {"gate": gate, "up": up}, *how, activation=activation)


def norm_round_rows(
    x: torch.Tensor, weight: torch.Tensor, eps: float, roundings: int, *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `spec_ops.ops.rounding`; raises as `round_rows`."""
    return _run("norm_round_rows", {"x": x}, *how, weight=weight, eps=eps, roundings=roundings)


def add_norm_round_rows(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, roundings: int, *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `spec_ops.ops.rounding`; raises as `round_rows`."""
    total = x.new_empty(x.shape)
    given = {"x": x, "residual": residual}
    return total, *_run("add_norm_round_rows", given, *how, weight=weight, eps=eps, roundings=roundings, total=total)


def _run(
    op: str, rows: dict[str, torch.Tensor], columns: int, step_dtype: torch.dtype, quotient_dtype: torch.dtype, least: float,
    zero: float, step: torch.Tensor | None = None, *, activation: str = "", weight: torch.Tensor | None = None,
    eps: float = 0.0, roundings: int = 0, total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    x = next(iter(rows.values()))
    groups, m = rounding_shape(op, x, columns, step_dtype, quotient_dtype, step)
    numbers = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    steps = x.new_empty(groups, m, dtype=torch.float32)
    if (arch := arch_of(x.device)) < LEAST_ARCH:
        raise BackendError(f"{op}: needs a GPU of sm_{LEAST_ARCH} or newer, which converts to float8, got sm_{arch}")
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"{op}: rows must be of torch.bfloat16 or torch.float16 on CUDA, got {x.dtype}")
    m, k = x.shape
    for name, given in rows.items():
        if k > 1 and given.stride(1) != 1:
            raise ValueError(f"{op}: `{name}` must have contiguous columns, got strides {tuple(given.stride())}")
    if columns not in (BLOCK, k):
        raise ValueError(f"{op}: `columns` must be {BLOCK} or the {k} of a row on CUDA, got {columns}")
    whole = weight is not None or (step is None and columns == k)
    if whole and k > MAX_COLUMNS:
        raise ValueError(f"{op}: rows must have at most {MAX_COLUMNS} columns, got {k}")
    if not numbers.numel():
        if step is not None:
            steps.fill_(float("nan")).copy_(step.to(step_dtype).reshape(1, 1))
        return numbers, steps.t()
    up, residual = rows.get("up"), rows.get("residual")
    weight = None if weight is None else weight.contiguous()

    def start() -> None:
        tile = tile_of(m, k, BLOCK if step is not None else columns, whole, num_sms(x.device))
        launch(
            round_rows_kernel, (m, triton.cdiv(k, tile["GROUPS"] * tile["COLUMNS"])), x, x.stride(0),
            up, None if up is None else up.stride(0), residual, None if residual is None else residual.stride(0),
            weight, eps, total, step, least, zero, numbers, steps, m, k,
            ACTIVATION=activation, ROUNDINGS=roundings, STEP_ROUNDED=step_dtype != torch.float32,
            QUOTIENT_ROUNDED=quotient_dtype != torch.float32, **tile,
            # Programs of whole rows are as large as a multiprocessor holds two of: early, some would take two.
            early=not whole and m <= EARLY_ROWS,
        )  # fmt: skip

    what = round_rows_kernel, columns, step_dtype, quotient_dtype, least, zero, activation, eps, roundings
    with device_guard(x):
        repeated(what, (x, up, residual, weight, total, step, numbers, steps), x.device, start)
    return numbers, steps.t()


def tile_of(m: int, k: int, columns: int, whole: bool, sms: int) -> dict[str, Any]:
    """How many groups, and of which width, a program has of a row of `k`, and its warps. Of a `whole` row, whose squares it may
    sum, that is a matter of k alone."""
    if whole:
        width = triton.next_power_of_2(k) if columns == k else columns
        groups = triton.next_power_of_2(triton.cdiv(k, width))
        return {"GROUPS": groups, "COLUMNS": width, "num_warps": max(1, min(32, groups * width // (32 * A_THREAD)))}
    many = m * triton.cdiv(k, 16 * columns) >= FULL * sms
    return {"GROUPS": 16 if many else 8, "COLUMNS": columns, "num_warps": GROUP_WARPS}


def ahead() -> Iterator[Variant]:
    x, up = (torch.empty(128, 14336, dtype=torch.bfloat16, device="meta") for _ in range(2))
    weight, step = x.new_empty(4096), x.new_empty(1)
    float32, of_rows = (torch.float32, torch.float32, 0.0, 0.0), (x.dtype, x.dtype, 0.0, 1e-3)
    for k, how in ((0, float32), (BLOCK, float32), (0, of_rows), (BLOCK, of_rows), (0, (*of_rows, step))):
        name = f"{'given' if len(how) > 4 else BLOCK if k else 'rows'}, {'float32' if how[0] == torch.float32 else 'rounded'}"
        with recorded() as launches:
            round_rows(x[:, :4096].contiguous(), k or 4096, *how)
            gated_round_rows(x, up, "silu", k or 14336, *how)
            add_norm_round_rows(x[:, :4096].contiguous(), up[:, :4096].contiguous(), weight, 1e-5, 1, k or 4096, *how)
            norm_round_rows(x[:, :4096].contiguous(), weight, 1e-5, 2, k or 4096, *how)
        ops = "round_rows", "gated_round_rows", "add_norm_round_rows", "norm_round_rows"
        for op, found in zip(ops, launches, strict=True):
            yield variant_of(f"{op}, steps: {name}", found._replace(early=False), archs=FP8_ARCHS)
