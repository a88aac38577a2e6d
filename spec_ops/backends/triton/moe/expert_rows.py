"""What comes before, between and after the products of `hopper_mxfp4.py`: rows sorted by expert, as sums of two rows of float8.

Each is one launch. The two parts of a row are those of `linear/row_parts.py`. The products take 32 columns at a time, first the
even ones and then the odd ones, since that is how a word of eight 4-bit numbers is unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from spec_ops.backends.squares import SUM_COLUMNS, sums_of
from spec_ops.backends.triton.linear.row_parts import store_parts
from spec_ops.backends.triton.moe.activation import activated, gated
from spec_ops.backends.triton.moe.few import contiguous
from spec_ops.backends.triton.moe.shapes import MXFP4, meta_call
from spec_ops.backends.triton.runtime.ahead import Variant, variant_of
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, recorded

MAX_PAIRS = 1024  # whose ids a program reads at once
SUM_BLOCK = 1024


class ExpertRows(NamedTuple):
    """Rows of pairs of a token and one of its experts, sorted by expert.

    Attributes:
        parts: `[2 * pairs, k]` float8_e4m3fn, the nearest numbers and then the rests. Rows of no expert are not written.
        scale: `[pairs]` float32, of both parts.
        place: `[pairs]` int32, where each pair's row is; -1 for one of no expert.
        offsets: `[E + 1]` int32, where each expert's rows begin.
    """

    parts: torch.Tensor
    scale: torch.Tensor
    place: torch.Tensor
    offsets: torch.Tensor


@triton.jit
def _column(k):
    """The column that comes at place `k`."""
    return k // 32 * 32 + k // 4 % 4 * 8 + k % 4 * 2 + k // 16 % 2


@triton.jit(do_not_specialize=["pairs"])
def sorted_rows_kernel(
    x, x_row, ids, squares, eps, parts, scale, place, offsets, pairs, experts, K,
    TOP_K: tl.constexpr, PAIRS_PAD: tl.constexpr, BLOCK_K: tl.constexpr, SUMS: tl.constexpr, SUMS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program `pair`, and of `offsets` the entry of that number. `squares [tokens, SUMS]` or None."""
    await_predecessors(PDL)
    me = tl.program_id(0)
    pair = tl.arange(0, PAIRS_PAD)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    known = (expert >= 0) & (expert < experts)
    if me <= experts:
        tl.store(offsets + me, tl.sum((known & (expert < me)).to(tl.int32), 0))
    if me < pairs:
        mine = tl.load(ids + me)
        before = known & ((expert < mine) | ((expert == mine) & (pair < me)))
        at = tl.sum(before.to(tl.int32), 0)
        there = (mine >= 0) & (mine < experts)
        tl.store(place + me, tl.where(there, at, -1))
        if there:
            token = (me // TOP_K).to(tl.int64)
            factor = 1.0
            if squares is not None:
                s = tl.arange(0, SUMS_PAD)
                total = tl.sum(tl.load(squares + token * SUMS + s, mask=s < SUMS, other=0.0), 0)
                factor = tl.rsqrt(total / K + eps)
            k = tl.arange(0, BLOCK_K)
            value = tl.load(x + token * x_row + _column(k), mask=k < K, other=0.0).to(tl.float32)
            store_parts(value, factor, parts, scale, at.to(tl.int64), pairs, K, k)


@triton.jit(do_not_specialize=["pairs"])
def activated_rows_kernel(
    made, bias, offsets, parts, scale, pairs, experts, inner, limit, alpha, beta,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `row`: what is between the products. `made [pairs, gates and ups]` float32; `bias [experts, gates and ups]`."""
    await_predecessors(PDL)
    at = tl.program_id(0)
    e = tl.arange(0, EXPERTS_PAD)
    ends = tl.load(offsets + e + 1, mask=e < experts, other=0)
    if at < tl.max(ends, 0):
        expert = tl.sum(((ends <= at) & (e < experts)).to(tl.int32), 0)
        k = tl.arange(0, BLOCK_K)
        n = _column(k)
        WIDE: tl.constexpr = 2 if GATED else 1
        row = made + at.to(tl.int64) * (WIDE * inner)
        if bias is not None:
            bias += expert.to(tl.int64) * (WIDE * inner)
        if GATED:
            STEP: tl.constexpr = 2 if INTERLEAVED else 1
            between = 1 if INTERLEAVED else inner
            both = n[:, None] * STEP + tl.arange(0, 2)[None, :] * between
            mask = (k < inner)[:, None]
            values = tl.load(row + both, mask=mask, other=0.0)
            if bias is not None:
                values += tl.load(bias + both, mask=mask, other=0.0).to(tl.float32)
            gate, up = tl.split(values)
            value = gated(gate, up, limit, alpha, beta, ACTIVATION)
        else:
            value = tl.load(row + n, mask=k < inner, other=0.0)
            if bias is not None:
                value += tl.load(bias + n, mask=k < inner, other=0.0).to(tl.float32)
            value = activated(value, alpha, ACTIVATION)
        value = tl.where(k < inner, value, 0.0)
        store_parts(value, 1.0, parts, scale, at.to(tl.int64), pairs, inner, k)


@triton.jit
def summed_rows_kernel(
    made, place, ids, weights, bias, residual, norm_weight, out, z, squares, hidden,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, SUM_COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(token, block of columns)`: its experts' rows of `made [pairs, hidden]`, in the order of its slots. `bias
    [experts, hidden]` or None; `residual` to `squares`: as in `add_skinny_mm_kernel`, or None."""
    await_predecessors(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted = n < hidden
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        at = tl.load(place + pair)
        if at >= 0:
            row = tl.load(made + at.to(tl.int64) * hidden + n, mask=wanted, other=0.0)
            if bias is not None:
                expert = tl.load(ids + pair).to(tl.int64)
                row += tl.load(bias + expert * hidden + n, mask=wanted, other=0.0).to(tl.float32)
            acc += tl.load(weights + pair).to(tl.float32) * row
    dtype: tl.constexpr = out.dtype.element_ty
    total = acc.to(dtype)
    if residual is not None:
        r = tl.load(residual + token * hidden + n, mask=wanted, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + r).to(dtype)
        exact = total.to(tl.float32)
        g = tl.load(norm_weight + n, mask=wanted, other=0.0).to(tl.float32)
        tl.store(z + token * hidden + n, (exact * g).to(dtype), mask=wanted)
        SUMS: tl.constexpr = BLOCK // SUM_COLUMNS
        width = tl.cdiv(hidden, SUM_COLUMNS)
        sums = tl.sum(tl.reshape(tl.abs(exact * exact), [SUMS, SUM_COLUMNS]), 1)  # `abs`: see `norm.store_sum`
        s = tl.program_id(1) * SUMS + tl.arange(0, SUMS)
        tl.store(squares + token * width + s, sums, mask=s < width)
    tl.store(out + token * hidden + n, total, mask=wanted)


def sorted_rows(
    x: torch.Tensor, ids: torch.Tensor, experts: int, squares: torch.Tensor | None = None, eps: float = 0.0
) -> ExpertRows:
    """Of `x [tokens, hidden]` bfloat16 with contiguous columns, hidden a multiple of 32; `ids [tokens, k]` contiguous, at most
    `MAX_PAIRS`. With `squares`, rows are those of an RMS norm without its weight (`linear/norm.py`)."""
    (tokens, k), hidden = ids.shape, x.shape[1]
    pairs = tokens * k
    made = ExpertRows(
        torch.empty(2 * pairs, hidden, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(pairs, dtype=torch.float32, device=x.device),
        torch.empty(pairs, dtype=torch.int32, device=x.device),
        torch.empty(experts + 1, dtype=torch.int32, device=x.device),
    )
    block = triton.next_power_of_2(hidden)
    with device_guard(x):
        launch(
            sorted_rows_kernel, (max(pairs, experts + 1),),
            x, x.stride(0), ids, contiguous(squares), eps, *made, pairs, experts, hidden,
            TOP_K=k, PAIRS_PAD=triton.next_power_of_2(pairs), BLOCK_K=block, SUMS=sums_of(hidden),
            SUMS_PAD=triton.next_power_of_2(sums_of(hidden)), num_warps=_warps(block), early=True,
        )  # fmt: skip
    return made


def activated_rows(
    made: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor, inner: int,
    numbers: tuple[float | None, float, float], form: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Parts and scale of the rows of the second product. `numbers`: limit, alpha and beta."""
    pairs, experts = made.shape[0], offsets.shape[0] - 1
    parts = torch.empty(2 * pairs, inner, dtype=torch.float8_e4m3fn, device=made.device)
    scale = torch.empty(pairs, dtype=torch.float32, device=made.device)
    block = triton.next_power_of_2(inner)
    with device_guard(made):
        launch(
            activated_rows_kernel, (pairs,), made, contiguous(bias), offsets, parts, scale, pairs, experts, inner, *numbers,
            **form, EXPERTS_PAD=triton.next_power_of_2(experts), BLOCK_K=block, num_warps=_warps(block), early=True,
        )  # fmt: skip
    return parts, scale


def summed_rows(
    made: torch.Tensor, place: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, norm_weight: torch.Tensor | None, dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The result; with a `residual` y, z and squares of `add_moe_experts`."""
    (tokens, k), hidden = ids.shape, made.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=made.device)
    z = squares = None
    if residual is not None:
        z = torch.empty_like(out)
        squares = torch.empty(tokens, sums_of(hidden), dtype=torch.float32, device=made.device)
    with device_guard(made):
        launch(
            summed_rows_kernel, (tokens, triton.cdiv(hidden, SUM_BLOCK)), made, place, ids, weights, contiguous(bias),
            contiguous(residual), contiguous(norm_weight), out, z, squares, hidden, TOP_K=k, BLOCK=SUM_BLOCK,
            SUM_COLUMNS=SUM_COLUMNS, num_warps=4, early=True,
        )  # fmt: skip
    return (out,) if z is None or squares is None else (out, z, squares)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def ahead() -> Iterator[Variant]:
    for name, tokens, (experts, k, hidden, inner), form in (
        ("gpt-oss", 32, (32, 4, 2880, 2880), MXFP4), ("Qwen3-MoE", 128, (128, 8, 2048, 768), {"bits": 4}),
    ):  # fmt: skip
        x, ids, weights, gate_up, _, bias, down_bias, activation, gated, interleaved, _, *numbers = meta_call(
            tokens, experts, k, hidden, inner, **form
        )[:14]
        kind = {"GATED": gated, "INTERLEAVED": interleaved, "ACTIVATION": activation}
        for squares in (None, x.new_empty(tokens, sums_of(hidden), dtype=torch.float32)):
            with recorded() as launches:
                rows = sorted_rows(x, ids, experts, squares)
                made = x.new_empty(tokens * k, gate_up.shape[1], dtype=torch.float32)
                activated_rows(made, bias, rows.offsets, inner, tuple(numbers), kind)
                made = x.new_empty(tokens * k, hidden, dtype=torch.float32)
                normed = None if squares is None else x
                summed_rows(made, rows.place, ids, weights, down_bias, normed, None if normed is None else x[0], x.dtype)
            for launched in launches:
                between = "" if squares is None else " between norms"
                yield variant_of(f"{launched.kernel.__name__}, {name}{between}", launched, archs=(90,))
