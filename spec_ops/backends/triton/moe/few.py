"""Mixtures of experts for at most 64 tokens, in two launches that read each expert's weights once, whatever the routing.

Tokens are few and experts many, so a program computes some columns of one expert for all tokens. Results of tokens that do not
go to the expert are dropped, which costs nothing: up to 16 tokens are what a tensor core takes at least, up to 64 are hidden
behind the weight's bytes. So nothing is gathered and nothing is sorted.

The first kernel finds out by itself which expert is the i-th that any token goes to (a histogram of the ids in each program),
and leaves `h [touched, tokens, inner]`: activations times the router's weight, zeros where a token does not go to an expert.
With that the second product and the weighted sum are one product, over the touched experts' inner dimensions one after the
other: a program adds up all of it, or a share (`splits`, as in `skinny_mm`). Experts come in the order of their ids, so what a
token gets does not depend on where the others go.

Tiles are those of `linear/skinny_mm.py`: 16 columns of which each warp takes a chunk of k, or 64 columns for `wgmma` with more
than 16 tokens, and where columns lie side by side in memory (`transposed`), whose 16 would be a quarter of a line.

Weights of 8 and 4 bits are read as they lie, and become 16 bits wide in registers (`stored.py`). Numbers of MXFP4 that are
scaled there have tiles of their own (`tiles.SCALED_TILES`), come eight at a time up to 32 tokens, and up to 16 have one factor
for their scale, where it is not too great (`linear/float4_words.py`). Else the program's sums are computed again. With few
tokens on Hopper a program of the first kernel goes through a range of such tiles (`ranges.py`); with more than five
`hopper_mxfp4.py` takes MXFP4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_ops.backends.expert_format import inner_of
from spec_ops.backends.squares import SUM_COLUMNS, sums_of
from spec_ops.backends.triton.linear.float4_words import any_not_finite
from spec_ops.backends.triton.linear.norm import store_sum
from spec_ops.backends.triton.linear.operands import CHUNK
from spec_ops.backends.triton.linear.skinny_mm import combined, store_transposed
from spec_ops.backends.triton.moe.activation import load_bias, store_activated
from spec_ops.backends.triton.moe.ranges import ranged_gate_up_kernel
from spec_ops.backends.triton.moe.shapes import FLOAT8, GPT_OSS, INT4, MXFP4, meta_call
from spec_ops.backends.triton.moe.stored import formats, scale_arguments, scale_constants, scales_numbers
from spec_ops.backends.triton.moe.sums import down_sums, gate_up_sums
from spec_ops.backends.triton.moe.tiles import MAX_TOKENS, Config, Sizes, choose, tma_reads
from spec_ops.backends.triton.runtime.ahead import ARCHS, Variant, variant_of
from spec_ops.backends.triton.runtime.counters import arrival_counters
from spec_ops.backends.triton.runtime.launch import Launch, arch_of, await_predecessors, device_guard, launch, num_sms, recorded

ALIGNED = 8  # elements: TMA reads rows that start at multiples of 16 bytes


@triton.jit
def _touched(ids, tile, pairs, experts, PAIRS_PAD: tl.constexpr, EXPERTS_PAD: tl.constexpr):
    """The `tile`-th expert that a pair goes to, in the order of their ids, and how many there are."""
    place = tl.arange(0, PAIRS_PAD)
    expert = tl.load(ids + place, mask=place < pairs, other=-1).to(tl.int32)
    counts = tl.histogram(tl.maximum(expert, 0), EXPERTS_PAD, mask=(expert >= 0) & (expert < experts))
    touched = (counts > 0).to(tl.int32)
    rank = tl.cumsum(touched, 0)
    mine = (touched > 0) & (rank == tile + 1)
    return tl.sum(tl.where(mine, tl.arange(0, EXPERTS_PAD), 0), 0), tl.sum(touched, 0)


@triton.jit(do_not_specialize=["tokens"])
def few_gate_up_kernel(
    x, weight, scale, scale_expert, scale_row, scale_column, scale_up, ids, weights, bias, squares, eps, h, table, tokens,
    experts, hidden, inner, limit, alpha, beta,
    TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr, PAIRS_PAD: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, INT4: tl.constexpr, SCALED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    SUMS: tl.constexpr, SUMS_PAD: tl.constexpr, AGAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `tile * blocks of columns + block`. `x`, `weight`: tensor descriptors; `scale` to `scale_up`: of
    `scale_arguments`; `SCALED`, `AGAIN`: as in `Config`; `ids`, `weights [tokens, TOP_K]` contiguous; `squares [tokens, SUMS]`,
    as in `scaled_skinny_mm_kernel`, or None; `h [tiles, BLOCK_M, inner]`, in the order of `word_place` where the other kernel
    takes words; `table [2 + tiles]`: how many experts are touched, and which."""
    await_predecessors(PDL)
    blocks_n = tl.cdiv(inner, BLOCK_N)
    tile = tl.program_id(0) // blocks_n
    block_n = tl.program_id(0) % blocks_n
    expert, count = _touched(ids, tile, tokens * TOP_K, experts, PAIRS_PAD, EXPERTS_PAD)
    if block_n == 0:
        if tile == 0:
            tl.store(table, count)
        if tile < count:
            tl.store(table + 1 + tile, expert)
    if tile < count:
        # In flight while the weights stream.
        m = tl.arange(0, BLOCK_M)
        slot = tl.arange(0, TOP_K_PAD)
        at = m[:, None] * TOP_K + slot[None, :]
        there = (m < tokens)[:, None] & (slot < TOP_K)[None, :]
        mine = there & (tl.load(ids + at, mask=there, other=-1) == expert)
        share = tl.load(weights + at, mask=there, other=0.0).to(tl.float32)
        MOST: tl.constexpr = 2048 if SCALED else 4096
        HELD: tl.constexpr = BLOCK_M * SUMS_PAD <= MOST  # by registers
        if squares is not None:
            place = tl.arange(0, SUMS_PAD)
            at_sums = squares + m[:, None] * SUMS + place[None, :]
            all_sums = (m < tokens)[:, None] & (place < SUMS)[None, :]
            if HELD:
                sums = tl.load(at_sums, mask=all_sums, other=0.0)
        gate_bias = None
        up_bias = None
        EARLY: tl.constexpr = not SCALED or BLOCK_M <= 8  # by registers
        if EARLY:
            n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
            if bias is not None:
                gate_bias = load_bias(bias, expert, n, inner, GATED, INTERLEAVED, 0)
                if GATED:
                    up_bias = load_bias(bias, expert, n, inner, GATED, INTERLEAVED, 1)
        acc, other = gate_up_sums(
            x, weight, scale, scale_expert, scale_row, scale_column, scale_up, expert, block_n, hidden, inner,
            GATED, INTERLEAVED, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, CHUNKED, STAGES, BITS, INT4, SCALED,
            SCALE_ROWS, SCALE_COLUMNS, not AGAIN,
        )  # fmt: skip
        again = any_not_finite(acc) if AGAIN else False
        if AGAIN and GATED and not INTERLEAVED:
            again |= any_not_finite(other)
        if again:
            acc, other = gate_up_sums(
                x, weight, scale, scale_expert, scale_row, scale_column, scale_up, expert, block_n, hidden, inner,
                GATED, INTERLEAVED, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, CHUNKED, 1, BITS, INT4, SCALED,
                SCALE_ROWS, SCALE_COLUMNS, True,
            )  # fmt: skip
        rstd = None
        if squares is not None:
            if SCALED and not HELD:
                # Piece by piece: programs are as many as their registers let there be.
                PIECE: tl.constexpr = min(SUMS_PAD, 32)
                sums = tl.zeros([BLOCK_M, PIECE], tl.float32)
                for piece in range(0, SUMS_PAD, PIECE):
                    part = piece + tl.arange(0, PIECE)
                    mask = (m < tokens)[:, None] & (part < SUMS)[None, :]
                    sums += tl.load(squares + m[:, None] * SUMS + part[None, :], mask=mask, other=0.0)
            elif not HELD:
                sums = tl.load(at_sums, mask=all_sums, other=0.0)
            rstd = tl.rsqrt(tl.sum(sums, 1) / hidden + eps)[None, :]
        if not EARLY:
            n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
            if bias is not None:
                gate_bias = load_bias(bias, expert, n, inner, GATED, INTERLEAVED, 0)
                if GATED:
                    up_bias = load_bias(bias, expert, n, inner, GATED, INTERLEAVED, 1)
        store_activated(
            acc, other, gate_bias, up_bias, rstd, mine, share, tile, n, h, inner, limit, alpha, beta,
            GATED, INTERLEAVED, ACTIVATION, BLOCK_M, BLOCK_N, SCALED and CHUNKED,
        )  # fmt: skip


@triton.jit
def _weighted_biases(
    ids, weights, bias, n, m, tokens, experts, hidden, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """`[BLOCK_N, BLOCK_M]`: columns `n` of the biases of the experts that tokens `m` go to, times their weights."""
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for slot in tl.static_range(TOP_K):
        chosen = tl.load(ids + m * TOP_K + slot, mask=m < tokens, other=-1)
        goes = (chosen >= 0) & (chosen < experts)
        share = tl.load(weights + m * TOP_K + slot, mask=goes, other=0.0).to(tl.float32)
        at = bias + chosen.to(tl.int64)[None, :] * hidden + n[:, None]
        total += share[None, :] * tl.load(at, mask=goes[None, :] & (n < hidden)[:, None], other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["tokens"])
def few_down_kernel(
    h, weight, scale, scale_expert, scale_row, scale_column, ids, weights, bias, table, partial, counters, residual,
    norm_weight, out, z, squares, tokens, experts, hidden, inner,
    TOP_K: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, INT4: tl.constexpr, SCALED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr, AGAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `block of columns * SPLITS + split`. `h`, `weight`: tensor descriptors; `scale` to `scale_column`: of
    `scale_arguments`; `table`: the first kernel's; `BLOCKS` of an expert's inner dimension; `partial`, `counters`: as in
    `skinny_mm_kernel`; `residual` to `squares`: as in `add_skinny_mm_kernel`, or None; `out [tokens, hidden]`."""
    await_predecessors(PDL)
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    # In flight while the weights stream, unless programs would be fewer by its registers.
    EARLY: tl.constexpr = not (SCALED and BLOCK_M > 16)
    if residual is not None and EARLY:
        r = tl.load(residual + m[None, :] * hidden + n[:, None], mask=(m < tokens)[None, :] & (n < hidden)[:, None], other=0.0)
        g = tl.load(norm_weight + n, mask=n < hidden, other=0.0)
    HELD: tl.constexpr = BLOCK_M * BLOCK_N <= 512  # by registers
    if bias is not None and HELD:
        biases = _weighted_biases(ids, weights, bias, n, m, tokens, experts, hidden, TOP_K, BLOCK_M, BLOCK_N)
    total = tl.load(table) * BLOCKS
    begin = split * total // SPLITS
    acc = down_sums(
        h, weight, scale, scale_expert, scale_row, scale_column, table, tile, split, begin, total, n, hidden, inner,
        TRANSPOSED, BLOCKS, BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, CHUNKED, SPLITS, STAGES, BITS, INT4, SCALED,
        SCALE_ROWS, SCALE_COLUMNS, not AGAIN,
    )  # fmt: skip
    again = any_not_finite(acc) if AGAIN else False
    if again:
        acc = down_sums(
            h, weight, scale, scale_expert, scale_row, scale_column, table, tile, split, begin, total, n, hidden, inner,
            TRANSPOSED, BLOCKS, BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, CHUNKED, SPLITS, 1, BITS, INT4, SCALED,
            SCALE_ROWS, SCALE_COLUMNS, True,
        )  # fmt: skip
    ROOM: tl.constexpr = max(1, ((STAGES - 1) * BLOCK_K * (BLOCK_N * BITS // 8 + 2 * BLOCK_M)) // (4 * BLOCK_N * BLOCK_M))
    acc, complete = combined(acc, partial, counters, BLOCK_M, BLOCK_N, SPLITS, CHUNKED, ROOM)
    if complete:
        if bias is not None:
            if not HELD:
                biases = _weighted_biases(ids, weights, bias, n, m, tokens, experts, hidden, TOP_K, BLOCK_M, BLOCK_N)
            acc += biases
        if residual is not None:
            if not EARLY:
                mask = (m < tokens)[None, :] & (n < hidden)[:, None]
                r = tl.load(residual + m[None, :] * hidden + n[:, None], mask=mask, other=0.0)
                g = tl.load(norm_weight + n, mask=n < hidden, other=0.0)
            store_sum(out, z, squares, acc, r, g, tile, n, m, hidden, tokens, BLOCK_M, BLOCK_N, SUM_COLUMNS)
        else:
            store_transposed(out, acc, n, m, hidden, tokens)


def supports(
    x: torch.Tensor, topk_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, inner: int, arch: int | None = None
) -> bool:
    """Whether these kernels take a call."""
    (tokens, hidden), k = x.shape, topk_ids.shape[1]
    return (
        0 < tokens <= MAX_TOKENS
        and k > 0
        and inner > 0
        and x.dtype in (torch.bfloat16, torch.float16)
        and (arch or arch_of(x.device)) >= 90
        and hidden % ALIGNED == 0
        and inner % ALIGNED == 0
        and tma_reads(gate_up)
        and tma_reads(down)
    )


def _matrix(rows: torch.Tensor, config: Config) -> TensorDescriptor:
    """Of `rows [n, k]`, `block_m` at a time."""
    (n, k), stride = rows.shape, rows.stride(0)
    if config.chunked:
        chunk = CHUNK if config.scaled else config.chunk
        block = [config.block_k // chunk, config.block_m, chunk]
        return TensorDescriptor(rows, [k // chunk, n, chunk], [chunk, stride, 1], block)
    return TensorDescriptor(rows, [n, k], [stride, 1], [config.block_m, config.block_k])


def _stack(weight: torch.Tensor, config: Config, transposed: bool) -> TensorDescriptor:
    """Of `weight [E, n, k]`, `config.rows` of n at a time; `transposed`: `[E, k, n]`."""
    (experts, n, k), (expert, row, _), rows = weight.shape, weight.stride(), config.rows
    packed = 2 if weight.dtype == torch.uint8 else 1
    if config.chunked:
        if config.scaled:
            weight, packed = weight.view(torch.int32), 8
            k, expert, row = k // 4, expert // 4, row // 4
        if config.scaled and config.chunk > CHUNK:
            return TensorDescriptor(weight, [experts, n, k], [expert, row, 1], [1, rows, config.block_k // 8])
        chunk = config.chunk // packed
        block = [1, config.block_k // config.chunk, rows, chunk]
        return TensorDescriptor(weight, [experts, k // chunk, n, chunk], [expert, chunk, row, 1], block)
    block = [1, config.block_k, rows] if transposed else [1, rows, config.block_k // packed]
    return TensorDescriptor(weight, [experts, n, k], [expert, row, 1], block)


class Norms(NamedTuple):
    """Of the RMS norms around a mixture (`linear/norm.py`), what is computed in its kernels.

    Attributes:
        squares: of the norm before it, whose rows are `x` then; None for none. eps: its.
        residual, norm_weight: of the norm after it; None for none.
    """

    squares: torch.Tensor | None = None
    eps: float = 0.0
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None


def few_experts(*args: Any, configs: tuple[Config, Config] | None = None) -> torch.Tensor:
    """See `spec_ops.ops.moe.moe_experts`; for calls that `supports` takes."""
    return few_between_norms(*args, configs=configs)[0]


def few_between_norms(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, activation: str, gated: bool, interleaved: bool,
    transposed: bool, limit: float | None, alpha: float, beta: float, gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None, *, norms: Norms | None = None, configs: tuple[Config, Config] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As `few_experts`.

    Returns:
        The result; with `norms.residual` y, z and squares of `add_moe_experts`.
    """
    norms = norms or Norms()
    (tokens, k), (experts, hidden) = ids.shape, (gate_up.shape[0], x.shape[1])
    inner = down.shape[1] if transposed else inner_of(down)
    stored = formats(gate_up, gate_up_scale, down, down_scale, gated, interleaved)
    sizes = Sizes(
        tokens, k, experts, hidden, inner, gated, interleaved, transposed, stored[0].bits,
        x.dtype == torch.bfloat16 and scales_numbers(stored, (hidden, inner), (gate_up_scale, down_scale)),
    )  # fmt: skip
    first, second = configs or choose(sizes, num_sms(x.device), arch_of(x.device))
    block_m = first.block_m
    if x.stride(1) != 1 or x.stride(0) % ALIGNED or x.stride(0) < hidden or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    ids, weights = ids.contiguous(), weights.contiguous()
    h = x.new_empty(sizes.tiles * block_m, inner)
    table = ids.new_empty(2 + sizes.tiles, dtype=torch.int32)  # the last entry is read, and not used
    out = x.new_empty(tokens, hidden)
    z = squares = residual = norm_weight = None
    if norms.residual is not None and norms.norm_weight is not None:
        residual, norm_weight, z = norms.residual.contiguous(), norms.norm_weight.contiguous(), torch.empty_like(out)
        squares = x.new_empty(tokens, sums_of(hidden), dtype=torch.float32)
    partial = counters = None
    columns = triton.cdiv(hidden, second.block_n)
    if second.splits > 1:
        partial = x.new_empty(columns * second.splits * second.block_n * block_m, dtype=torch.float32)
        counters = arrival_counters(x.device, columns, "few_down")
    blocks_n = triton.cdiv(inner, first.block_n)
    ranged = {"BLOCKS": triton.cdiv(hidden, first.block_k), "BLOCKS_N": blocks_n} if first.ranges else {}
    with device_guard(x):
        launch(
            ranged_gate_up_kernel if ranged else few_gate_up_kernel, (min(first.ranges or 2**30, sizes.tiles * blocks_n),),
            _matrix(x, first), _stack(gate_up, first, transposed), *scale_arguments(gate_up_scale, stored[0]), ids, weights,
            contiguous(gate_up_bias), contiguous(norms.squares), norms.eps, h, table, tokens, experts, hidden, inner, limit,
            alpha, beta, TOP_K=k,
            TOP_K_PAD=triton.next_power_of_2(k), GATED=gated, INTERLEAVED=interleaved, TRANSPOSED=transposed,
            ACTIVATION=activation, PAIRS_PAD=triton.next_power_of_2(block_m * k),
            EXPERTS_PAD=triton.next_power_of_2(experts), SUMS=sums_of(hidden),
            SUMS_PAD=triton.next_power_of_2(sums_of(hidden)), **ranged, **_constants(first), **scale_constants(stored[0]),
            early=first.full,
        )  # fmt: skip
        launch(
            few_down_kernel, (columns * second.splits,),
            _matrix(h, second), _stack(down, second, transposed), *scale_arguments(down_scale, stored[1])[:4], ids, weights,
            contiguous(down_bias), table, partial, counters, residual, norm_weight, out, z, squares, tokens, experts, hidden,
            inner, TOP_K=k, TRANSPOSED=transposed, BLOCKS=triton.cdiv(inner, second.block_k), SPLITS=second.splits,
            SUM_COLUMNS=SUM_COLUMNS, **_constants(second), **scale_constants(stored[1]), early=second.full,
        )  # fmt: skip
    return (out,) if z is None or squares is None else (out, z, squares)


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _constants(config: Config) -> dict[str, Any]:
    limit = {"maxnreg": config.max_registers} if config.max_registers else {}
    return limit | {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "CHUNK": config.chunk,
        "CHUNKED": config.chunked, "STAGES": config.num_stages, "SCALED": config.scaled,
        "AGAIN": config.again, "num_warps": config.num_warps,
    }  # fmt: skip


# Tokens of the variants that are compiled ahead: of each tile, with the layouts of three models.
MODELS: tuple[tuple[str, tuple[int, ...], tuple[int, int, int, int], dict[str, Any]], ...] = (
    ("Qwen3-MoE", (1, 16, 32, 64), (128, 8, 2048, 768), {}),
    ("DeepSeek-V3", (8, 64), (256, 8, 7168, 2048), {}),
    ("gpt-oss", (4, 16, 64), (32, 4, 2880, 2880), GPT_OSS),
    ("Qwen3-MoE in float8", (4, 16, 64), (128, 8, 2048, 768), FLOAT8),
    ("DeepSeek-V3 in float8", (8, 64), (256, 8, 7168, 2048), FLOAT8),
    ("gpt-oss in MXFP4", (4, 16, 32, 64), (32, 4, 2880, 2880), MXFP4),
    ("gpt-oss in MXFP4 and float16", (4,), (32, 4, 2880, 2880), {**MXFP4, "dtype": torch.float16}),
    ("Qwen3-MoE in MXFP4", (4, 16, 64), (128, 8, 2048, 768), {"bits": 4}),
    ("Kimi-K2 in int4", (4, 16, 64), (384, 8, 7168, 2048), INT4),
)
BETWEEN_NORMS = (
    *MODELS[:1],
    ("DeepSeek-V3", (8, 32), (256, 8, 7168, 2048), {}),
    ("gpt-oss in MXFP4", (4, 16, 32), (32, 4, 2880, 2880), MXFP4),
)


def ahead() -> Iterator[Variant]:
    for name, all_tokens, sizes, form in MODELS:
        yield from _variants(name, all_tokens, sizes, form, False)
    for name, all_tokens, sizes, form in BETWEEN_NORMS:
        yield from _variants(f"{name} between norms", tuple(t for t in all_tokens if t <= 32), sizes, form, True)


def _variants(
    name: str, all_tokens: tuple[int, ...], sizes: tuple[int, int, int, int], form: dict[str, Any], normed: bool
) -> Iterator[Variant]:
    for tokens in all_tokens:
        found: dict[tuple[str, Config], list[tuple[Launch, int]]] = {}
        for arch in (a for a in ARCHS if a >= 90):
            call = meta_call(tokens, *sizes, **form)
            interleaved, transposed = (bool(form.get(flag)) for flag in ("interleaved", "transposed"))
            experts, k, hidden, inner = sizes
            bits = int(form.get("bits", 16))
            scaled = bits == 4 and not form.get("group") and form.get("dtype") != torch.float16
            sizes_of = Sizes(tokens, k, experts, hidden, inner, True, interleaved, transposed, bits, scaled)
            configs = choose(sizes_of, 132, arch)
            x = call[0]
            squares = x.new_empty(tokens, sums_of(hidden), dtype=torch.float32)
            norms = Norms(squares, 1e-6, x, x[0]) if normed else Norms()
            with recorded() as launches:
                few_between_norms(*call, norms=norms, configs=configs)  # type: ignore[misc]
            for made, config in zip(launches, configs, strict=True):
                found.setdefault((made.kernel.__name__, config), []).append((made, arch))
        for (kernel, config), same in found.items():
            made, arch = same[0]
            yield variant_of(
                f"{kernel}, {name}, {tokens} tokens on sm_{arch}",
                made,
                archs=tuple(arch for _, arch in same),
                num_stages=config.num_stages,
                programs=config.programs,
                serialized=bits == 4 and bool(form.get("group")) and tokens > 8,  # int4, by Triton 3.6 and 3.7
                options={"maxnreg": config.max_registers} if config.max_registers else {},
            )
