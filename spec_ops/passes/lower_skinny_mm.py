"""Compute products of few rows by a kernel that reads the weight once, where that is faster than cuBLAS.

    mm(x [4, 4096], permute(weight [6144, 4096], [1, 0]))   ->   skinny_mm(x, weight, None)

A product of few rows takes as long as its weight takes to arrive from memory. cuBLAS comes close to that as long as the weight
has columns for every multiprocessor. With fewer columns it splits k, over too few blocks and with a second kernel for the sums.
`RULES` says for each architecture which products our kernel computes, by the figures in
`benchmarks/results/h200-skinny-mm.json` (`benchmarks/skinny_mm.py`).

cuBLAS keeps products of more rows than the last rule has, on architectures without figures, of sizes that are unknown while
compiling, and of a weight that is computed in the graph (it may still be in cache). If Inductor was asked to time products
(`max_autotune`), nothing is replaced.

A weight that is stored in 8 or 4 bits is read as it lies:

    mm(x, convert(mul(convert(permute(weight)), scale)))   ->   skinny_mm(x, weight, None, scale)

Otherwise a kernel reads it and writes a number of 16 bits for each, which cuBLAS reads: five bytes of traffic for one. So this
needs no figures, only a GPU with the kernel's instructions and no more rows than it takes. With more rows the weight is
dequantized. torchao's int4 weights come with a kernel, which a product of few rows does without too, unless they lie in an
order of that kernel's own.

Rows that were rounded to float8, as `quantize(model, "float8_dynamic")` asks for, meet a float8 weight as they are too:

    mm(view(mul(convert(numbers), steps)), convert(mul(convert(permute(weight)), scale)))
    _scaled_mm(numbers, permute(weight), steps, permute(scale))     ->     float8_mm(numbers, steps, weight, scale, None)

on Hopper, for as few and as many rows as `hopper_tiles` says. Rows that several products share are rounded once. Elsewhere
rounded rows are rows like any others.

Where results must be batch-invariant, every product with a weight is replaced, by the variant of the kernel that is
(`require_invariance`), and weights of fewer bits are dequantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from spec_ops.backends.registry import device_arch
from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.ops.linear import invariant_weight, skinny_mm_op
from spec_ops.passes.analysis.graph import calls, insert, value
from spec_ops.passes.analysis.stored_weights import (
    NoFormatError,
    StoredWeight,
    dequantized,
    int4_rows,
    is_stored,
    scaled_after,
    shuffled_int4,
)
from spec_ops.passes.base import GraphPass, PassContext, PassResult
from spec_ops.passes.float8_products import Float8Products, layout_refusal

aten = torch.ops.aten
BLOCK_K = 256  # values of a row of the weight that the kernel reads at a time
QUANTIZED_ARCH, QUANTIZED_K = 90, 64  # least architecture, what k is a multiple of


@dataclass(frozen=True)
class Rule:
    """Which products `skinny_mm` computes.

    Attributes:
        max_m: most rows.
        max_n: most columns.
        min_k: least k.
        min_bytes, max_bytes: least and most bytes of the weight.
        min_n: least columns.
        k_multiple: what k is a multiple of, 64 at least; None: `BLOCK_K`, so that no block is filled up with zeros.
    """

    max_m: int
    max_n: int
    min_k: int
    min_bytes: int
    max_bytes: int
    min_n: int = 1
    k_multiple: int | None = None

    def refusal(self, n: int, k: int) -> str | None:
        """Why cuBLAS keeps the product of `[m, k]` and `[k, n]`; None if `skinny_mm` computes it."""
        if not self.min_n <= n <= self.max_n:
            return f"more than {self.max_n} columns" if n > self.max_n else f"fewer than {self.min_n} columns"
        multiple = BLOCK_K if self.k_multiple is None else self.k_multiple
        if k < self.min_k or k % multiple:
            return f"k is less than {self.min_k} or no multiple of {multiple}"
        if not self.min_bytes <= 2 * n * k <= self.max_bytes:
            return f"the weight is not of {self.min_bytes / 2**20:g} to {self.max_bytes / 2**20:g} MiB"
        return None


Rules = dict[int, tuple[Rule, ...]]

# The rules of an architecture are in order of `max_m`; those with the least `max_m` that covers the rows apply, and a product
# that any of them allows is computed by `skinny_mm`. On Hopper up to 32 rows go by tiles of 64 columns, one for each of 132
# multiprocessors at about 8192 columns: there it is fast again. 112 MiB is the largest weight that was faster at every m; 7168
# x 16384 (224 MiB) took up to 1.08 times as long as cuBLAS.
RULES: Rules = {
    90: (
        Rule(max_m=16, max_n=48 * 132, min_k=3072, min_bytes=6 << 20, max_bytes=112 << 20),
        Rule(max_m=16, max_n=48 * 132, min_k=1024, min_bytes=8 << 20, max_bytes=112 << 20, min_n=4096),
        Rule(max_m=32, max_n=32 * 132, min_k=3072, min_bytes=6 << 20, max_bytes=112 << 20),
        Rule(max_m=32, max_n=32 * 132, min_k=1792, min_bytes=10 << 20, max_bytes=112 << 20),
        Rule(max_m=32, max_n=64 * 132, min_k=1024, min_bytes=16 << 20, max_bytes=128 << 20, min_n=58 * 132),
        Rule(max_m=64, max_n=32 * 132, min_k=7168, min_bytes=20 << 20, max_bytes=112 << 20),
    ),
}


def refusal(arch: int, m: int, n: int, k: int, rules: Rules | None = None) -> str | None:
    """Why cuBLAS keeps the product of `[m, k]` and `[k, n]` on `arch`; None if `skinny_mm` computes it. `rules` default to
    `RULES`."""
    if (given := (RULES if rules is None else rules).get(arch)) is None:
        return f"no figures for sm_{arch}"
    rows = next((rule.max_m for rule in given if m <= rule.max_m), None)
    if rows is None:
        return f"more than {given[-1].max_m} rows"
    refusals = [rule.refusal(n, k) for rule in given if rule.max_m == rows]
    return None if None in refusals else refusals[0]


class LowerSkinnyMm(GraphPass):
    name = "lower_skinny_mm"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        if context.invariant:
            _all_with_weights(graph, context, result)
            return
        if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
            return  # the user asked Inductor to choose the kernels of products by timing them
        float8 = Float8Products(graph, result)
        for node in [node for node in graph.nodes if node.op == "call_function"]:
            if (int4 := int4_rows(node)) is not None:
                _read_as_stored(graph, node, None, *int4, context, result)
                continue
            if (shuffled := shuffled_int4(node)) is not None:
                result.refuse(
                    node, f"product with torchao's {shuffled}: its weight lies in the order of that product's own kernel"
                )
                continue
            if node.target is aten._scaled_mm.default:
                if (arch := _arch(value(node), context)) is not None:
                    float8.lower_scaled_mm(node, arch)
                continue
            if node.target not in (aten.mm.default, aten.addmm.default):
                continue
            bias, x, right = operands(node)
            if not isinstance(fake := value(x), torch.Tensor):
                continue
            arch = _arch(fake, context)
            if arch is None or fake.dtype not in (torch.bfloat16, torch.float16):
                continue
            m, n, k = _sizes(x, right)
            try:
                stored, after = dequantized(right), scaled_after(node)
            except NoFormatError as error:
                result.refuse(node, f"product of {m} x {k} and {k} x {n}: {error}")
                continue
            if stored is not None:
                if not float8.lower(node, bias, x, stored, arch):
                    _read_as_stored(graph, node, *operands(node)[:2], stored, context, result)
                continue
            if after is not None:
                _read_as_stored(graph, after[0], None, x, after[1], context, result)
                continue
            if reason := product_refusal(node, arch):
                result.refuse(node, f"product of {m} x {k} and {k} x {n}: {reason}")
                continue
            new = insert(graph, node, skinny_mm_op, (x, stored_weight(graph, node, right), bias), source=node)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            result.did(new, f"skinny_mm: {m} rows, weight {n} x {k}")


def _arch(fake: torch.Tensor, context: PassContext) -> int | None:
    return context.arch if context.arch is not None else device_arch(fake.device)


def _all_with_weights(graph: fx.Graph, context: PassContext, result: PassResult) -> None:
    """Replace every product that the batch-invariant kernel computes, whatever cuBLAS would take for it."""
    for node in calls(graph, aten.mm.default, aten.addmm.default):
        bias, x, right = operands(node)
        weight, (m, n, k) = value(right), _sizes(x, right)
        arch = context.machine(weight.device)[0]
        alike = bias is None or (not node.kwargs and value(bias).shape == (n,) and value(bias).dtype == weight.dtype)
        if not (alike and value(x).dtype == weight.dtype and invariant_weight(weight, arch)):
            continue
        args = (x, stored_weight(graph, node, right), bias, None, None, None, True)
        new = insert(graph, node, skinny_mm_op, args, source=node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        result.did(new, f"skinny_mm, invariant: {m} rows, weight {n} x {k}")


def _read_as_stored(
    graph: fx.Graph,
    node: fx.Node,
    bias: fx.Node | None,
    x: fx.Node,
    stored: StoredWeight,
    context: PassContext,
    result: PassResult,
) -> None:
    """Replace the product at `node` of rows `x` and a weight of 8 or 4 bits, or say why not."""
    fake = value(x)
    if (arch := _arch(fake, context)) is None:
        return
    (m, k), n = fake.shape, value(node).shape[1]
    if reason := _stored_refusal(node, bias, x, stored, arch):
        result.refuse(node, f"product of {m} x {k} and {k} x {n}: {reason}")
        return
    data, *scales = stored.insert(graph, node)
    new = insert(graph, node, skinny_mm_op, (x, data, bias, *scales), source=node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    bits = 4 if 2 * value(data).numel() == n * k else 8
    result.did(new, f"skinny_mm: {m} rows, weight {n} x {k} of {bits} bits")


def _stored_refusal(node: fx.Node, bias: fx.Node | None, x: fx.Node, stored: StoredWeight, arch: int) -> str | None:
    """Why a weight of 8 or 4 bits is not read as it lies; None if it is."""
    fake = value(x)
    (m, k), n = fake.shape, value(node).shape[1]
    if not all(isinstance(size, int) for size in (m, n, k)):
        return "its sizes are not known while compiling"
    if arch < QUANTIZED_ARCH:
        return f"sm_{arch} has no tensor memory access, with which the kernel reads a weight of 8 or 4 bits"
    try:
        format_ = stored.format_of(k)
    except (TypeError, ValueError) as error:  # scales of torchao's product, which nothing looked at so far
        return str(error).removeprefix("skinny_mm: ")
    if m > (most := hopper_tiles.most_rows(n, k, format_, fake.dtype, value(stored.scale).dtype, arch)):
        return f"more than {most} rows, for which the weight is dequantized"
    if k % QUANTIZED_K:
        return f"k is no multiple of {QUANTIZED_K}"
    return layout_refusal(node, bias, stored, fake.dtype)


def operands(node: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
    """The bias, the rows and the transposed weight of a `mm` or `addmm`."""
    bias, x, right = (None, *node.args) if node.target is aten.mm.default else node.args
    return bias, x, right  # type: ignore[return-value]


def stored_weight(graph: fx.Graph, before: fx.Node, right: fx.Node) -> fx.Node:
    """The weight `[n, k]` as it is stored. A node that only transposed it is dead afterwards."""
    transposed = right.target is aten.permute.default
    return right.args[0] if transposed else insert(graph, before, aten.permute.default, (right, [1, 0]))  # type: ignore[return-value]


def _sizes(x: fx.Node, right: fx.Node) -> tuple[Any, Any, Any]:
    """m, n and k of a product."""
    return value(x).shape[0], value(right).shape[1], value(x).shape[1]


def product_refusal(node: fx.Node, arch: int, rules: Rules | None = None) -> str | None:
    """Why cuBLAS keeps the product at `node`; None if `skinny_mm` computes it. `rules` default to `RULES`."""
    bias, x, right = operands(node)
    m, n, k = _sizes(x, right)
    if arch not in (RULES if rules is None else rules):
        return f"no figures for sm_{arch}"
    if not all(isinstance(size, int) for size in (m, n, k)):
        return "its sizes are not known while compiling"
    if reason := refusal(arch, m, n, k, rules):
        return reason
    weight = value(right)
    if weight.stride(0) != 1 or weight.stride(1) < k:
        return "the weight's rows are not contiguous"
    if weight.stride(1) % 8 or weight.storage_offset() % 8:
        return "the weight's rows do not start at multiples of 16 bytes"
    if not is_stored(right):
        return "the weight is computed here"
    if bias is not None and (node.kwargs or value(bias).shape != (n,) or value(bias).dtype != weight.dtype):
        return "what is added is not a bias of the weight's dtype"
    return None
