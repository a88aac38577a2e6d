"""Products grouped by expert, for any number of tokens, any layout of weights and any dtype: prefill, float32, older GPUs.

Pairs of a token and one of its experts are sorted by expert on the device. An expert's pairs are cut into tiles of rows; how
many tiles there are is known to the device alone, so the grid has as many as there may be, and the rest returns at once. No
weight is copied, those of 8 and 4 bits are dequantized in registers, and what the products leave between them is bounded
(`TEMPORARY`). Numbers of MXFP4 are most of the work up to some 128 rows an expert, so they have tiles of their own there (on
Hopper `hopper_mxfp4.py` takes up to 256 tokens).

A pair's row depends on its token and its expert alone: the program that has some columns of it adds up all of k, and a token's
rows are added in the order of its slots. So the kernels are batch-invariant if the tile does not follow the number of pairs, or
only in ways that change no row's order along k (`invariant_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from spec_ops.backends.expert_format import ExpertFormat, inner_of
from spec_ops.backends.triton.linear.invariant import UNFUSED
from spec_ops.backends.triton.linear.quantized import numbers
from spec_ops.backends.triton.moe.activation import activated, gated
from spec_ops.backends.triton.moe.shapes import FLOAT8, GPT_OSS, INT4, MXFP4, meta_call
from spec_ops.backends.triton.moe.sort import sorted_pairs
from spec_ops.backends.triton.moe.stored import (
    added,
    block_scales,
    formats,
    scale_arguments,
    scale_constants,
    scaled_4_bits,
    scales_numbers,
)
from spec_ops.backends.triton.runtime.ahead import ARCHS, Variant, variant_of
from spec_ops.backends.triton.runtime.launch import arch_of, await_predecessors, device_guard, launch, recorded

TEMPORARY = 1 << 29  # bytes between the products: more tokens are worked on in turn
SUM_BLOCK = 1024


@triton.jit
def _tile_rows(offsets, tile, experts, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert of the tile (-1: there is no such tile), where its rows begin among the sorted pairs, and where the expert's end.

    `offsets [E + 1]`: where each expert's pairs begin.
    """
    place = tl.arange(0, EXPERTS_PAD)
    live = place < experts
    first = tl.load(offsets + place, mask=live, other=0).to(tl.int32)
    last = tl.load(offsets + place + 1, mask=live, other=0).to(tl.int32)
    ends = tl.cumsum(tl.cdiv(last - first, BLOCK_M), 0)
    expert = tl.sum(((ends <= tile) & live).to(tl.int32), 0)
    mine = place == expert
    begin = tl.sum(tl.where(mine, first, 0), 0)
    end = tl.sum(tl.where(mine, last, 0), 0)
    before = tl.sum(tl.where(mine, ends - tl.cdiv(last - first, BLOCK_M), 0), 0)
    return tl.where(expert < experts, expert, -1), begin + (tile - before) * BLOCK_M, end


@triton.jit
def _four_bits(weight, n, N, n_stride, k_stride, block, inner, BLOCK_K: tl.constexpr):
    """The bytes `[n, BLOCK_K / 2]` of a block of the weight's rows `n` below `N`."""
    k = block * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    at = weight + (n * n_stride)[:, None] + (k * k_stride)[None, :]
    # `inner` is a multiple of 32. A mask of single bytes has each loaded by itself, and at once, not some iterations ahead.
    return tl.load(at, mask=(n < N)[:, None] & (k // 16 < inner // 32)[None, :], other=0)


@triton.jit
def _added(
    acc, a, weight, expert, n, N, n_stride, k_stride, scale, scale_expert, scale_row, scale_column, row, rows, block, inner,
    BLOCK_K: tl.constexpr, BITS: tl.constexpr, INT4: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`acc [m, n]` and the product of `a [m, BLOCK_K]`, a block of k, with that of the weight's rows `n` below `N`, which have
    the scales of the rows `row` below `rows`."""
    if BITS == 4:
        stored = _four_bits(weight, n, N, n_stride, k_stride, block, inner, BLOCK_K)
        s = block_scales(
            scale,
            expert,
            scale_expert,
            scale_row,
            scale_column,
            row,
            rows,
            block,
            inner,
            True,
            1,
            BLOCK_K,
            BITS,
            INT4,
            ROWS,
            COLUMNS,
        )
        return tl.dot(a, tl.trans(scaled_4_bits(stored, s, a.dtype, INT4)), acc, input_precision="ieee")
    else:
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        at = weight + (k * k_stride)[:, None] + (n * n_stride)[None, :]
        stored = tl.load(at, mask=(n < N)[None, :] & (k < inner)[:, None], other=0.0)
        if BITS == 16:
            return tl.dot(a, stored, acc, input_precision="ieee")
        else:
            s = block_scales(
                scale, expert, scale_expert, scale_row, scale_column, row, rows, block, inner, True, 1, BLOCK_K, BITS, INT4,
                ROWS, COLUMNS,
            )  # fmt: skip
            made = tl.dot(a, numbers(stored, a.dtype, 8), input_precision="ieee")
            return acc + made * tl.reshape(s, [1, n.shape[0]])


@triton.jit
def _products(
    rows, row_mask, weight, expert, scale, scale_expert, scale_row, scale_column, scale_up, first, second, wide, n, N, inner,
    n_stride, k_stride, PAIR: tl.constexpr, SPREAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BITS: tl.constexpr, INT4: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_M, BLOCK_N]` of `rows` and the weight's rows `first`, and if `PAIR` of those at `second`; all below `wide`, and
    of interest where `n < N`.

    `rows` point to where each begins; their elements are contiguous. Scales are those of rows `n`, and with `PAIR` of rows `n`
    from `scale_up` on; with `SPREAD` those of `first` and `second`.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    other = acc
    first = tl.where(n < N, first, wide)
    second = tl.where(n < N, second, wide)
    for block in range(0, tl.cdiv(inner, BLOCK_K)):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(rows[:, None] + k[None, :], mask=row_mask[:, None] & (k < inner)[None, :], other=0.0)
        acc = _added(
            acc, a, weight, expert, first, wide, n_stride, k_stride, scale, scale_expert, scale_row, scale_column,
            first if SPREAD else n, wide if SPREAD else N, block, inner, BLOCK_K, BITS, INT4, ROWS, COLUMNS,
        )  # fmt: skip
        if PAIR:
            ups = scale if BITS == 16 or SPREAD else scale + scale_up
            other = _added(
                other, a, weight, expert, second, wide, n_stride, k_stride, ups, scale_expert, scale_row, scale_column,
                second if SPREAD else n, wide if SPREAD else N, block, inner, BLOCK_K, BITS, INT4, ROWS, COLUMNS,
            )  # fmt: skip
    return acc, other


@triton.jit
def _columns(
    rows, row_mask, weight, step, N, inner, k_stride, PAIR: tl.constexpr, SPREAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `_products`, of a 16-bit or float32 weight whose rows lie side by side in memory: those of the program's block of the
    `N`, and if `PAIR` those `step` after them; with `SPREAD` the two alternate.

    None is replaced by one that is masked: the compiler would no longer know that they are neighbours, and load each number by
    itself, synchronously. Alternating ones are one tile, for the same reason.
    """
    JOINED: tl.constexpr = PAIR and SPREAD
    WIDTH: tl.constexpr = 2 * BLOCK_N if JOINED else BLOCK_N
    n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    wanted = n < N * (WIDTH // BLOCK_N)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    other = acc
    for block in range(0, tl.cdiv(inner, BLOCK_K)):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(rows[:, None] + k[None, :], mask=row_mask[:, None] & (k < inner)[None, :], other=0.0)
        at = weight + (k * k_stride)[:, None] + n[None, :]
        mask = (k < inner)[:, None] & wanted[None, :]
        acc = tl.dot(a, tl.load(at, mask=mask, other=0.0), acc, input_precision="ieee")
        if PAIR and not SPREAD:
            other = tl.dot(a, tl.load(at + step, mask=mask, other=0.0), other, input_precision="ieee")
    if JOINED:
        acc, other = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
    return acc, other


@triton.jit
def _scaled_products(
    rows, row_mask, weight, expert, scale, scale_expert, scale_row, scale_up, first, second, wide, n, N, inner, n_stride,
    k_stride, PAIR: tl.constexpr, SPREAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `_products`, of numbers of MXFP4 that are scaled. The weight is on the left, whose numbers `wgmma` and `mma.sync` take
    from the registers that they are made in."""
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    other = acc
    first = tl.where(n < N, first, wide)
    second = tl.where(n < N, second, wide)
    row, row_up = (first, second) if SPREAD else (n, n)
    count = wide if SPREAD else N
    ups = scale if SPREAD else scale + scale_up // 2 * 2  # as strides in `block_scales`
    # Scales are asked for a block ahead: Triton's pipeline has the operands of products alone.
    s = _scales_of_pairs(scale, expert, scale_expert, scale_row, row, count, 0, inner, BLOCK_K)
    t = _scales_of_pairs(ups, expert, scale_expert, scale_row, row_up, count, 0, inner, BLOCK_K) if PAIR else s
    for block in range(0, tl.cdiv(inner, BLOCK_K)):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(rows[None, :] + k[:, None], mask=row_mask[None, :] & (k < inner)[:, None], other=0.0)
        stored = _four_bits(weight, first, wide, n_stride, k_stride, block, inner, BLOCK_K)
        acc = added(acc, stored, a, s, 4, False, True)
        s = _scales_of_pairs(scale, expert, scale_expert, scale_row, row, count, block + 1, inner, BLOCK_K)
        if PAIR:
            stored = _four_bits(weight, second, wide, n_stride, k_stride, block, inner, BLOCK_K)
            other = added(other, stored, a, t, 4, False, True)
            t = _scales_of_pairs(ups, expert, scale_expert, scale_row, row_up, count, block + 1, inner, BLOCK_K)
    return tl.trans(acc), tl.trans(other)


@triton.jit
def _scales_of_pairs(scale, expert, expert_stride, row_stride, n, N, block, inner, BLOCK_K: tl.constexpr):
    return block_scales(
        scale, expert, expert_stride, row_stride, 1, n, N, block, inner, True, 1, BLOCK_K, 4, False, 1, 32, True
    )


@triton.jit(do_not_specialize=["pairs"])
def grouped_gate_up_kernel(
    x, weight, scale, scale_expert, scale_row, scale_column, scale_up, bias, order, offsets, out, pairs, experts, hidden, inner,
    x_stride, expert_stride, n_stride, k_stride, bias_expert, bias_stride, limit, alpha, beta,
    TOP_K: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr,
    EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr,
    INT4: tl.constexpr, SCALED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, ADJACENT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program `(block of columns, tile)`: `out [pairs, inner]` in sorted order. `order [pairs]`: which pair comes where;
    `scale` to `scale_up`: of `scale_arguments`; `ADJACENT`: of `_adjacent`."""
    await_predecessors(PDL)
    expert, begin, end = _tile_rows(offsets, tl.program_id(1), experts, EXPERTS_PAD, BLOCK_M)
    if expert >= 0:
        place = begin + tl.arange(0, BLOCK_M)
        live = place < end
        token = tl.load(order + place, mask=live, other=0) // TOP_K
        rows = x + token.to(tl.int64) * x_stride
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        wanted = n < inner
        weight += expert.to(tl.int64) * expert_stride
        first, second = n, n
        if GATED:
            first, second = (2 * n, 2 * n + 1) if INTERLEAVED else (n, n + inner)
        wide = 2 * inner if GATED else inner
        if SCALED:
            values, ups = _scaled_products(
                rows, live, weight, expert, scale, scale_expert, scale_row, scale_up, first, second, wide, n, inner, hidden,
                n_stride, k_stride, GATED, GATED and INTERLEAVED, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif ADJACENT:
            values, ups = _columns(
                rows, live, weight, inner, inner, hidden, k_stride, GATED, INTERLEAVED, BLOCK_M, BLOCK_N, BLOCK_K
            )
        else:
            values, ups = _products(
                rows, live, weight, expert, scale, scale_expert, scale_row, scale_column, scale_up, first, second, wide, n,
                inner, hidden, n_stride, k_stride, GATED, GATED and INTERLEAVED, BLOCK_M, BLOCK_N, BLOCK_K, BITS, INT4,
                SCALE_ROWS, SCALE_COLUMNS,
            )  # fmt: skip
        if bias is not None:
            bias += expert.to(tl.int64) * bias_expert
            values += tl.load(bias + first * bias_stride, mask=wanted, other=0.0).to(tl.float32)[None, :]
        if GATED:
            if bias is not None:
                ups += tl.load(bias + second * bias_stride, mask=wanted, other=0.0).to(tl.float32)[None, :]
            values = gated(values, ups, limit, alpha, beta, ACTIVATION)
        else:
            values = activated(values, alpha, ACTIVATION)
        to = out + place.to(tl.int64)[:, None] * inner + n[None, :]
        tl.store(to, values.to(out.dtype.element_ty), mask=live[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=["pairs"])
def grouped_down_kernel(
    h, weight, scale, scale_expert, scale_row, scale_column, bias, order, offsets, out, pairs, experts, hidden, inner,
    expert_stride, n_stride, k_stride, bias_expert, bias_stride,
    EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr,
    INT4: tl.constexpr, SCALED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, ADJACENT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program `(block of columns, tile)`: `out [pairs, hidden]` in the order of the pairs."""
    await_predecessors(PDL)
    expert, begin, end = _tile_rows(offsets, tl.program_id(1), experts, EXPERTS_PAD, BLOCK_M)
    if expert >= 0:
        place = begin + tl.arange(0, BLOCK_M)
        live = place < end
        pair = tl.load(order + place, mask=live, other=0)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        wanted = n < hidden
        rows = h + place.to(tl.int64) * inner
        weight += expert.to(tl.int64) * expert_stride
        if SCALED:
            values, _ = _scaled_products(
                rows, live, weight, expert, scale, scale_expert, scale_row, 0, n, n, hidden, n, hidden, inner, n_stride,
                k_stride, False, False, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif ADJACENT:
            values, _ = _columns(rows, live, weight, 0, hidden, inner, k_stride, False, False, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            values, _ = _products(
                rows, live, weight, expert, scale, scale_expert, scale_row, scale_column, 0, n, n, hidden, n, hidden, inner,
                n_stride, k_stride, False, False, BLOCK_M, BLOCK_N, BLOCK_K, BITS, INT4, SCALE_ROWS, SCALE_COLUMNS,
            )  # fmt: skip
        if bias is not None:
            bias += expert.to(tl.int64) * bias_expert
            values += tl.load(bias + n * bias_stride, mask=wanted, other=0.0).to(tl.float32)[None, :]
        to = out + pair.to(tl.int64)[:, None] * hidden + n[None, :]
        tl.store(to, values, mask=live[:, None] & wanted[None, :])


@triton.jit
def weighted_sum_kernel(
    made, ids, weights, out, experts, hidden, id_row, id_stride, weight_row, weight_stride,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(token, block of columns)`: its experts' rows of `made [pairs, hidden]`, in the order of its slots."""
    await_predecessors(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(ids + token * id_row + slot * id_stride)
        if (expert >= 0) & (expert < experts):  # rows of no expert were never written
            weight = tl.load(weights + token * weight_row + slot * weight_stride).to(tl.float32)
            acc += weight * tl.load(made + (token * TOP_K + slot) * hidden + n, mask=n < hidden, other=0.0)
    tl.store(out + token * hidden + n, acc.to(out.dtype.element_ty), mask=n < hidden)


class Blocks(NamedTuple):
    """Of a program: rows, columns and k. `scaled`: numbers of MXFP4 are, two at a time (`stored.py`)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    scaled: bool = False


def choose(pairs: int, experts: int, dtype: torch.dtype, scales: bool = False) -> Blocks:
    """By how many rows an expert has if all have as many. Not tuned.

    Args:
        scales: numbers may be scaled.
    """
    wide = pairs // experts
    if dtype == torch.float32:
        return Blocks(16, 32, 32, 4, 2) if wide < 32 else Blocks(32, 64, 32, 4, 2)
    if scales and wide < 128:
        # A tile makes all numbers of its columns, so an expert's rows are best one tile, also if they are half as many again.
        rows = min(max(16, triton.next_power_of_2(wide * 3 // 2)), 64)
        # Rows of more than 32 bytes, without swizzle, would have threads wait for one another's banks of shared memory.
        return Blocks(rows, 64, 64, 4, 4 if rows < 64 else 3, scaled=True)
    return Blocks(16, 64, 64, 4, 4) if wide < 32 else Blocks(64, 64, 64, 4, 3) if wide < 128 else Blocks(128, 64, 64, 8, 3)


def invariant_blocks(pairs: int, experts: int, dtype: torch.dtype, arch: int) -> Blocks:
    """As `choose`, but whatever it returns for a dtype and an architecture adds up a row in the same steps of k by the same
    instruction (on Hopper a `wgmma` of 64 rows by a group of four warps), and so has the same bits."""
    if dtype == torch.float32:
        return Blocks(32, 64, 32, 4, 2)
    one_instruction = not 100 <= arch < 120  # there `tcgen05.mma` of 64 rows and of 128 are two
    return Blocks(128, 64, 64, 8, 3) if one_instruction and pairs // experts >= 128 else Blocks(64, 64, 64, 4, 3)


def chunk_tokens(k: int, hidden: int, inner: int, dtype: torch.dtype) -> int:
    """Tokens at a time, so that what the products leave takes `TEMPORARY` bytes at most; at least 64."""
    a_token = k * (4 * hidden + dtype.itemsize * inner)
    return max(64, TEMPORARY // max(a_token, 1))


def grouped_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, activation: str, gated: bool, interleaved: bool,
    transposed: bool, limit: float | None, alpha: float, beta: float, gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None, invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See `spec_ops.ops.moe.moe_experts`.

    Raises:
        ValueError: an expert's weights span 2^31 elements or more.
    """
    out = x.new_empty(x.shape)
    inner = down.shape[1] if transposed else inner_of(down)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if sum((size - 1) * stride for size, stride in zip(weight.shape[1:], weight.stride()[1:], strict=True)) >= 2**31:
            raise ValueError(f"moe_experts: `{name}` must span less than 2^31 elements an expert, got {tuple(weight.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    step = chunk_tokens(ids.shape[1], x.shape[1], inner, x.dtype)
    for start in range(0, x.shape[0], step):
        chunk = slice(start, start + step)
        _run(
            x[chunk], ids[chunk], weights[chunk], gate_up, down, gate_up_bias, down_bias, out[chunk],
            {"GATED": gated, "INTERLEAVED": interleaved, "ACTIVATION": activation}, transposed, (limit, alpha, beta),
            gate_up_scale, down_scale, invariant,
        )  # fmt: skip
    return out


def _run(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, out: torch.Tensor, form: dict[str, Any],
    transposed: bool, numbers: tuple[float | None, float, float], gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None, invariant: bool,
) -> None:  # fmt: skip
    (tokens, k), experts, hidden = ids.shape, gate_up.shape[0], x.shape[1]
    inner, pairs = down.shape[1] if transposed else inner_of(down), tokens * k
    options: dict[str, Any] = UNFUSED if invariant else {}
    arch = arch_of(x.device)
    first, second = formats(gate_up, gate_up_scale, down, down_scale, form["GATED"], form["INTERLEAVED"])
    if invariant:
        blocks = invariant_blocks(pairs, experts, x.dtype, arch)
    else:
        scales = scales_numbers((first, second), (hidden, inner), (gate_up_scale, down_scale))
        # Before sm_90 two numbers of bfloat16 are not multiplied at a time.
        blocks = choose(pairs, experts, x.dtype, scales and x.dtype == torch.bfloat16 and arch >= 90)
    order, offsets = sorted_pairs(ids, experts)
    h = x.new_empty(pairs, inner)
    made = x.new_empty(pairs, hidden, dtype=torch.float32)
    tiles = triton.cdiv(pairs, blocks.block_m) + min(experts, pairs)  # each expert may end with a tile that is not full
    with device_guard(x):
        if pairs and inner:
            launch(
                grouped_gate_up_kernel, (triton.cdiv(inner, blocks.block_n), tiles),
                x, gate_up, *scale_arguments(gate_up_scale, first), gate_up_bias, order, offsets, h, pairs, experts, hidden,
                inner, x.stride(0), *_strides(gate_up, transposed), *_bias_strides(gate_up_bias), *numbers, TOP_K=k, **form,
                **_constants(experts, blocks), **scale_constants(first), ADJACENT=_adjacent(gate_up, transposed, first),
                **options,
            )  # fmt: skip
        if pairs:
            launch(
                grouped_down_kernel, (triton.cdiv(hidden, blocks.block_n), tiles),
                h, down, *scale_arguments(down_scale, second)[:4], down_bias, order, offsets, made, pairs, experts, hidden,
                inner, *_strides(down, transposed), *_bias_strides(down_bias), **_constants(experts, blocks),
                **scale_constants(second), ADJACENT=_adjacent(down, transposed, second), **options,
            )  # fmt: skip
        launch(
            weighted_sum_kernel, (tokens, triton.cdiv(hidden, SUM_BLOCK)),
            made, ids, weights, out, experts, hidden, *ids.stride(), *weights.stride(), TOP_K=k, BLOCK=SUM_BLOCK,
            num_warps=4, **options,
        )  # fmt: skip


def _strides(weight: torch.Tensor, transposed: bool) -> tuple[int, int, int]:
    """Of experts, rows (outputs) and columns (inputs)."""
    expert, first, second = weight.stride()
    return (expert, second, first) if transposed else (expert, first, second)


def _adjacent(weight: torch.Tensor, transposed: bool, stored: ExpertFormat) -> bool:
    """Whether rows (outputs) of a weight that is not quantized lie side by side, and not its columns."""
    _, row, column = _strides(weight, transposed)
    return stored.bits == 16 and row == 1 and column != 1


def _bias_strides(bias: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if bias is None else (bias.stride(0), bias.stride(1))


def _constants(experts: int, blocks: Blocks) -> dict[str, Any]:
    return {
        "EXPERTS_PAD": triton.next_power_of_2(experts), "BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n,
        "BLOCK_K": blocks.block_k, "num_warps": blocks.num_warps, "num_stages": blocks.num_stages,
        "SCALED": blocks.scaled,
    }  # fmt: skip


def ahead() -> Iterator[Variant]:
    for name, tokens, sizes, form in (
        ("Qwen3-MoE, 4096 tokens", 4096, (128, 8, 2048, 768), {}),
        ("gpt-oss, 128 tokens", 128, (32, 4, 2880, 2880), GPT_OSS),
        ("gpt-oss, 512 tokens", 512, (32, 4, 2880, 2880), GPT_OSS),
        ("gpt-oss, 1024 tokens", 1024, (32, 4, 2880, 2880), GPT_OSS),
        ("gpt-oss, 128 tokens in float32", 128, (32, 4, 2880, 2880), {**GPT_OSS, "dtype": torch.float32}),
        ("Qwen3-MoE, 8 tokens in float32", 8, (128, 8, 2048, 768), {"dtype": torch.float32}),
        ("Qwen3-MoE in float8, 4096 tokens", 4096, (128, 8, 2048, 768), FLOAT8),
        ("gpt-oss in MXFP4, 66 tokens", 66, (32, 4, 2880, 2880), MXFP4),
        ("gpt-oss in MXFP4, 128 tokens", 128, (32, 4, 2880, 2880), MXFP4),
        ("gpt-oss in MXFP4, 512 tokens", 512, (32, 4, 2880, 2880), MXFP4),
        ("gpt-oss in MXFP4, 1024 tokens", 1024, (32, 4, 2880, 2880), MXFP4),
        ("Kimi-K2 in int4, 1024 tokens", 1024, (384, 8, 7168, 2048), INT4),
    ):
        with recorded() as launches:
            grouped_experts(*meta_call(tokens, *sizes, **form))
        for made in launches[1:]:  # the first one sorts
            oldest = 90 if made.arguments.get("SCALED") else 89 if form is FLOAT8 else 80
            archs = tuple(arch for arch in ARCHS if arch >= oldest)
            yield variant_of(f"{made.kernel.__name__}, {name}", made, archs=archs, hot=False)
    for name, sizes, form in (
        ("Qwen3-MoE", (128, 8, 2048, 768), {}),
        ("gpt-oss", (32, 4, 2880, 2880), GPT_OSS),
        ("gpt-oss in MXFP4", (32, 4, 2880, 2880), MXFP4),
        ("Qwen3-MoE in float8", (128, 8, 2048, 768), FLOAT8),
    ):
        for tokens in (4, 4096):
            with recorded() as launches:
                grouped_experts(*meta_call(tokens, *sizes, **form), invariant=True)  # type: ignore[misc]
            # The last kernel is the same for any number of tokens.
            for made in launches[1:] if tokens == 4 else launches[1:-1]:
                archs = tuple(arch for arch in ARCHS if arch >= (89 if form is FLOAT8 else 80))
                archs = tuple(arch for arch in archs if made.options["num_warps"] == 4 or not 100 <= arch < 120)
                yield variant_of(
                    f"{made.kernel.__name__}, {name}, {tokens} tokens, invariant", made, archs=archs, hot=False, options=UNFUSED
                )
