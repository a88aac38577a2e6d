"""Products of at most 64 rows with a weight that is read once (128, if it has few bits): `x [m, k] @ weight [n, k]^T`.

Such a product takes as long as its weight takes to come from memory, so all multiprocessors have to ask for weights all the
time. A program computes `BLOCK_N` columns for all rows, over a share of k where there are fewer tiles than programs fit
(`splits`): then each writes a partial sum and announces it, and the last one adds them up, always in the order of k. Weights
are the long operand (`out^T = weight x^T`), so that rows pad to 8 and not to 64.

Every program reads all rows over its share of k, from L2: `BLOCK_M / BLOCK_N` bytes of `x` for each byte of the weight. Up to
16 rows that is at most one, and narrow tiles, of which each warp takes a chunk of k, need the fewest partial sums. With more
rows a tile has the 64 columns of a warpgroup's instruction (`wgmma`), which reads both operands from shared memory.

A weight of 8 or 4 bits is read as it lies, and its numbers become 16 bits wide in registers (`quantized.py`, `float4.py`),
from which a warpgroup's instructions take them. A few rows beside 8 bits are loaded, and not read by TMA (`LOADED_ROWS`). With
few rows 4 bits are read as words of eight numbers (`words.py`, `int4.py`, `float4_words.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_ops.backends.triton.linear.float4 import float4_products, rest_of, wide_float4_products
from spec_ops.backends.triton.linear.float4_words import float4_word_products
from spec_ops.backends.triton.linear.int4 import int4_word_products
from spec_ops.backends.triton.linear.operands import Weight, check_operands, readable, scale_arguments
from spec_ops.backends.triton.linear.quantized import ROWS_IN_PLACE, quantized_products, scaled
from spec_ops.backends.triton.linear.tiles import Config, choose, most_rows, takes_words
from spec_ops.backends.triton.runtime.ahead import ARCHS, Variant
from spec_ops.backends.triton.runtime.arrival import arrive
from spec_ops.backends.triton.runtime.counters import arrival_counters
from spec_ops.backends.triton.runtime.launch import arch_of, await_predecessors, device_guard, launch, num_sms, on_gpu
from spec_ops.backends.weight_format import WeightFormat, for_columns, weight_format

ASKED = 2  # blocks of the weight that a program asks for before it may begin, if it is launched early


@triton.jit
def ask_for_weight(
    weight, row_stride, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, ASKED: tl.constexpr,
    PDL: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Before the wait for earlier kernels: this program's first `ASKED` blocks of the weight on their way to L2. No kernel's
    result is read or overtaken by that, not even where one writes the weight: L2 is what all of them see."""
    if PDL and ASKED > 0:
        pid = tl.program_id(0)
        first = pid % SPLITS * tl.cdiv(K, BLOCK_K) // SPLITS
        LINE: tl.constexpr = 1024 // BITS  # numbers in 128 bytes
        LINES: tl.constexpr = max(1, ASKED * BLOCK_K // LINE)
        i = tl.arange(0, BLOCK_N * LINES)
        row = tl.minimum(pid // SPLITS * BLOCK_N + i // LINES, N - 1)
        column = tl.minimum(first * BLOCK_K + i % LINES * LINE, K - 1)
        if BITS == 4:
            column = column // 2
        line = (weight + row.to(tl.int64) * row_stride + column).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def combined(
    acc, partial, counters, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, FEW: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """The sum of `acc [BLOCK_N, BLOCK_M]` over the programs of a tile, in the order of k, and whether this program has it: the
    last one to arrive. `FEW`: registers hold all partial sums of a tile; else shared memory holds `ROOM` of them."""
    pid = tl.program_id(0)
    tile = pid // SPLITS
    complete = True
    if SPLITS > 1:
        local = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(partial + pid * (BLOCK_N * BLOCK_M) + local, acc)
        complete = (arrive(counters + tile, SPLITS) & 0xFFFF) == SPLITS - 1
        if complete:
            # Its own sum is read back too: the order of addition must not depend on who is last.
            parts = partial + tile * (SPLITS * BLOCK_N * BLOCK_M) + local
            if FEW:
                acc = tl.load(parts)
                for i in tl.static_range(1, SPLITS):
                    acc += tl.load(parts + i * (BLOCK_N * BLOCK_M))
            else:
                # ptxas keeps few such reads in flight, so they go through shared memory, as many as fit where blocks were.
                acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for i in tl.range(0, SPLITS, num_stages=min(SPLITS, ROOM) + 1):
                    acc += tl.load(parts + i * (BLOCK_N * BLOCK_M))
    return acc, complete


@triton.jit
def products(
    x, x_stride, weight, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """This program's tile of the transposed product, `[BLOCK_N, BLOCK_M]`, and whether it is summed over all of k, as
    only the last program of a tile to arrive has it. The arguments are those of `skinny_mm_kernel`."""
    pid = tl.program_id(0)
    tile = pid // SPLITS
    split = pid % SPLITS
    blocks = tl.cdiv(K, BLOCK_K)
    first = split * blocks // SPLITS
    end = (split + 1) * blocks // SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    FLOAT4: tl.constexpr = scale.dtype.element_ty == tl.uint8 or scale.dtype.element_ty == tl.float8e4nv if BITS == 4 else False
    CHUNKED: tl.constexpr = len(weight.block_shape) == 3
    WORDS: tl.constexpr = weight.dtype == tl.int32
    if FLOAT4 and not CHUNKED:
        acc = wide_float4_products(
            x, weight, scale, rest_of(scale, tensor_scale), scale_row, scale_column, tile, first, end, n, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, STAGES, COLUMNS,
        )  # fmt: skip
    elif FLOAT4 and WORDS:
        acc = float4_word_products(
            x, x_stride, weight, scale, scale_row, scale_column, tile, first, end, n, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, STAGES, COLUMNS,
        )  # fmt: skip
    elif FLOAT4:
        acc = float4_products(
            x, x_stride, weight, scale, scale_row, scale_column, tile, first, end, n, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, STAGES, COLUMNS,
        )  # fmt: skip
    elif WORDS:
        acc = int4_word_products(
            x, x_stride, weight, scale, zero, scale_row, scale_column, tile, first, end, n, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, STAGES, COLUMNS,
        )  # fmt: skip
    elif BITS < 16:
        acc = quantized_products(
            x, x_stride, weight, scale, zero, scale_row, scale_column, tile, first, end, n, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, STAGES, BITS, ROWS, COLUMNS,
        )  # fmt: skip
    elif CHUNKED:
        # A batch of products, of which Triton gives each warp its own: no warp reads what another one reads.
        CHUNKS: tl.constexpr = BLOCK_K // CHUNK
        sums = tl.zeros([CHUNKS, BLOCK_N, BLOCK_M], tl.float32)
        for block in tl.range(first, end, num_stages=STAGES):
            columns = weight.load([block * CHUNKS, tile * BLOCK_N, 0])
            rows = x.load([block * CHUNKS, 0, 0])
            sums = tl.dot(columns, tl.permute(rows, (0, 2, 1)), sums)
        acc = tl.sum(sums, 0)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for block in tl.range(first, end, num_stages=STAGES):
            columns = weight.load([tile * BLOCK_N, block * BLOCK_K])
            rows = x.load([0, block * BLOCK_K])
            acc = tl.dot(columns, tl.permute(rows, (1, 0)), acc)
    BLOCK: tl.constexpr = BLOCK_K * (BLOCK_N * BITS // 8 + 2 * BLOCK_M)
    ROOM: tl.constexpr = max(1, ((STAGES - 1) * BLOCK) // (4 * BLOCK_N * BLOCK_M))
    acc, complete = combined(acc, partial, counters, BLOCK_M, BLOCK_N, SPLITS, CHUNKED, ROOM)
    if BITS < 16 and COLUMNS == 0 and BLOCK_M <= ROWS_IN_PLACE:
        acc = scaled(acc, scale, scale_row, n, N)
    if FLOAT4 and CHUNKED:
        acc *= rest_of(scale, tensor_scale)
    return acc, complete


@triton.jit
def store_transposed(out, acc, n, m, N, M):
    """`acc`, at columns `n` and rows `m`, to the contiguous `out [M, N]`."""
    to = out + m[None, :] * N + n[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["M"])
def skinny_mm_kernel(
    x, x_stride, weight, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K, weight_rows,
    row_stride, bias, out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, ASKED: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`x`, `weight`: tensor descriptors of what `_block_shape` says, of `BLOCK_M` and `BLOCK_N` rows. `scale`, `zero` and
    `tensor_scale`: for `BITS` below 16; the first two have strides `scale_row` and `scale_column`, and one for `ROWS` and
    `COLUMNS` of the weight (0: for all of k). `partial`, `counters`: of the sums that the programs of a tile exchange, None if
    there is one. `weight_rows`: the weight, as a pointer. `bias [N]` or None; `out [M, N]` is contiguous."""
    ask_for_weight(weight_rows, row_stride, N, K, BLOCK_N, BLOCK_K, SPLITS, ASKED, PDL, BITS)
    await_predecessors(PDL)
    acc, complete = products(
        x, x_stride, weight, scale, zero, tensor_scale, scale_row, scale_column, partial, counters, M, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, SPLITS, STAGES, BITS, ROWS, COLUMNS,
    )  # fmt: skip
    if complete:
        n = tl.program_id(0) // SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        store_transposed(out, acc, n, tl.arange(0, BLOCK_M), N, M)


def _block_shape(rows: int, config: Config, packed: int = 1) -> list[int]:
    """Of `[k / chunk, n, chunk]` where warps take chunks, of `[n, k]` else; an element holds `packed` numbers of k."""
    if config.chunks:
        return [config.block_k // config.chunk, rows, config.chunk // packed]
    return [rows, config.block_k // packed]


def _descriptor(matrix: torch.Tensor, rows: int, config: Config, packed: int = 1) -> TensorDescriptor:
    (n, k), block = matrix.shape, _block_shape(rows, config, packed)
    if len(block) == 3:
        chunk = block[2]
        return TensorDescriptor(matrix, [k // chunk, n, chunk], [chunk, matrix.stride(0), 1], block)
    return TensorDescriptor(matrix, [n, k], [matrix.stride(0), 1], block)


def _rows(x: torch.Tensor, config: Config) -> tuple[TensorDescriptor | torch.Tensor, int | None]:
    """`x` and `x_stride` of `skinny_mm_kernel`. Loads are wide only where the compiler sees that rows are 32 bytes apart."""
    m, k = x.shape
    stride = x.stride(0) if m > 1 else k
    return (x, stride) if config.loaded and stride % 16 == 0 else (_descriptor(x, config.block_m, config), None)


def run(kernel: Any, name: str, x: torch.Tensor, weights: Weight, config: Config | None, *args: Any, **constants: Any) -> None:
    """Launches `kernel`, which takes what `skinny_mm_kernel` takes up to `row_stride` and then `args`, for the op `name`.

    An `x` that TMA cannot read is copied.

    Raises:
        TypeError, ValueError: a weight of no known format.
        ValueError: more than `MAX_ROWS` rows (with a `config`: than its `block_m`), 2^31 outputs or more, another k than the
            weight's or no multiple of 64, or a weight that TMA cannot read.
    """
    (m, k), (data, *scales) = x.shape, weights
    weight = for_columns(data, k)
    stored, n = weight_format(name, weight, *scales), weight.shape[0]
    most = most_rows(stored) if config is None else config.block_m
    if m > most:
        raise ValueError(f"{name}: `x` must have at most {most} rows, got {m}")
    if m * n >= 2**31:  # kernels address the output in 32 bits
        raise ValueError(f"{name}: `x` rows times `weight` rows must be less than 2^31, got {m} times {n}")
    check_operands(name, x, weight)
    x = readable(x)
    config = config or choose(m, n, k, num_sms(x.device), arch_of(x.device), stored)
    block_m, block_n, splits = config.block_m, config.block_n, config.splits
    tiles = triton.cdiv(n, block_n)
    read = weight.view(torch.int32) if takes_words(stored, config) else weight
    partial = counters = None
    if splits > 1:
        partial = torch.empty(tiles * splits * block_n * block_m, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device, tiles, "skinny_mm")
    with device_guard(x):
        launch(
            kernel, (tiles * splits,), *_rows(x, config), _descriptor(read, block_n, config, k // read.shape[1]),
            *scale_arguments(*scales), partial, counters, m, n, k, weight, weight.stride(0), *args, **constants,
            **_constants(config, stored, n, k), **config.limit, num_warps=config.num_warps, early=config.full,
        )  # fmt: skip


def _constants(config: Config, stored: WeightFormat, n: int, k: int) -> dict[str, Any]:
    # Scales of parts of k; those of int4 always, as zero points are added where a part is summed.
    within = stored.bits < 16 and (stored.kind == "int4" or not (stored.columns == k and stored.rows in (1, n)))
    return {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "CHUNK": config.chunk,
        "SPLITS": config.splits, "STAGES": config.num_stages, "ASKED": ASKED if config.full else 0,
        "BITS": stored.bits, "ROWS": stored.rows if within else 1, "COLUMNS": stored.columns if within else 0,
    }  # fmt: skip


def skinny_mm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None, tensor_scale: torch.Tensor | None = None, config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """`spec_ops.ops.linear.skinny_mm_op` without `invariant`; raises as `run` does."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    if out.numel():
        bias, weights = None if bias is None else bias.contiguous(), Weight(weight, scale, zero, tensor_scale)
        if config is None and scale is not None and on_gpu(x) and arch_of(x.device) == 90:
            from spec_ops.backends.triton.linear import hopper_float8, hopper_mm  # here: no Gluon on other platforms

            if hopper_mm.product(x, weights, bias, out) or hopper_float8.product(x, weights, bias, out):
                return out
        run(skinny_mm_kernel, "skinny_mm", x, weights, config, bias, out)
    return out


def ahead() -> Iterator[Variant]:
    shapes = (
        [(m, 6144, 4096) for m in (4, 32, 64)] + [(m, 4096, 4096) for m in (16, 32)] + [(m, 1536, 7168) for m in (4, 16, 64)]
    )
    for shape in shapes:
        yield from variants(skinny_mm_kernel, "skinny_mm", shape, {"out": "*bf16:16"}, {"bias": None})
    for name, stored in stored_ahead():
        sizes = [(4, 4096), (4, 28672), (16, 4096), (16, 28672), (32, 4096), (64, 4096), (128, 4096), (128, 28672)]
        # Of 8 bits on sm_90 rows that are loaded, of 4 bits tiles of a few.
        sizes += [(1, 4096), (8, 28672), (2 if stored.bits == 8 else 1, 28672)]
        for m, n in (size for size in sizes if size[0] <= most_rows(stored)):
            shape = (m, n, 4096)
            yield from variants(skinny_mm_kernel, "skinny_mm", shape, {"out": "*bf16:16"}, {"bias": None}, name, stored)
    for (m, n), group in itertools.product(((8, 28672), (16, 4096), (32, 4096), (64, 4096)), (32, 64)):
        stored, name = WeightFormat("int4", 1, group), f"int4 in groups of {group}"
        yield from variants(skinny_mm_kernel, "skinny_mm", (m, n, 4096), {"out": "*bf16:16"}, {"bias": None}, name, stored)


def stored_ahead() -> list[tuple[str, WeightFormat]]:
    """Formats of a weight of 4096 columns, by name."""
    return [
        ("float8", WeightFormat("float8", 1, 4096)),
        ("float8 in blocks", WeightFormat("float8", 128, 128)),
        ("int8", WeightFormat("int8", 1, 4096)),
        ("int4", WeightFormat("int4", 1, 128)),
        ("nvfp4", WeightFormat("nvfp4", 1, 16)),
        ("mxfp4", WeightFormat("mxfp4", 1, 32)),
    ]


def variants(
    kernel: Any, name: str, shape: tuple[int, int, int], signature: dict[str, str], constexprs: dict[str, Any],
    weight: str = "", stored: WeightFormat | None = None, chooses: Callable[..., Config] | None = None,
) -> Iterator[Variant]:  # fmt: skip
    """The variants of `kernel` for m, n and k; `signature` and `constexprs` are of the arguments that `skinny_mm_kernel` lacks
    or that follow its `row_stride`. `weight` names the format `stored`; `chooses` takes the place of `choose`."""
    chosen: dict[Config, list[int]] = {}
    for arch in (a for a in ARCHS if a >= 90):  # older ones have no tensor descriptors, and no pass gives them these products
        config = choose(*shape, 132, arch, stored) if chooses is None else chooses(*shape, 132, arch)
        chosen.setdefault(config, []).append(arch)
    m, n, k = shape
    stored = stored or WeightFormat("plain", n, k)
    element = {"plain": "bf16", "float8": "fp8e4nv", "int8": "i8"}.get(stored.kind, "u8")
    packed = 2 if stored.bits == 4 else 1
    for config, archs in chosen.items():
        read, each = ("i32", 8) if takes_words(stored, config) else (element, packed)
        blocks = {
            "x": "*bf16:16" if config.loaded else f"tensordesc<bf16{_block_shape(config.block_m, config)}>",
            "weight": f"tensordesc<{read}{_block_shape(config.block_n, config, each)}>",
        }
        split = {"partial": "*fp32:16", "counters": "*i32:16"}
        sizes = {"M": "i32", "N": "i32:16", "K": "i32:16", "weight_rows": f"*{element}:16", "row_stride": "i32:16"}
        given, absent = _scale_types(stored)
        yield Variant(
            " ".join(part for part in (name, weight) if part) + f", {m} x {n} x {k} on sm_{archs[0]}",
            kernel,
            {
                **blocks,
                **({"x_stride": "i32:16"} if config.loaded else {}),
                **given,
                **sizes,
                **(split if config.splits > 1 else {}),
                **signature,
            },
            {
                **_constants(config, stored, n, k),
                **({} if config.loaded else {"x_stride": None}),
                **({} if config.splits > 1 else dict.fromkeys(split)),
                **absent,
                **constexprs,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            options={**config.limit, **({} if chooses is None else {"enable_fp_fusion": False})},
            archs=tuple(archs),
            programs=config.programs,
            early=config.full,
        )


def _scale_types(stored: WeightFormat) -> tuple[dict[str, str], dict[str, Any]]:
    """Of `scale`, `zero` and their strides: types of those that are given, and constants. As published: float32 with 8 bits,
    bfloat16 and stored transposed with 4."""
    if stored.bits == 16:
        return {}, dict.fromkeys(("scale", "zero", "tensor_scale", "scale_row", "scale_column"))
    if stored.bits == 8:
        given, one = ("scale_row", "scale_column") if stored.rows > 1 else ("scale_column", "scale_row")
        return {"scale": "*fp32:16", given: "i32:16"}, {"zero": None, "tensor_scale": None, one: 1}
    if stored.float4:
        types, constants = {"scale": "*u8:16", "scale_row": "i32:16"}, {"zero": None, "scale_column": 1}
        if stored.kind == "nvfp4":
            return {**types, "scale": "*fp8e4nv:16", "tensor_scale": "*fp32:16"}, constants
        return types, {**constants, "tensor_scale": None}
    return {"scale": "*bf16:16", "zero": "*bf16:16", "scale_column": "i32:16"}, {"scale_row": 1, "tensor_scale": None}
