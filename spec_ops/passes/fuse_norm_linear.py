"""Fuse an RMS norm between products of few rows into these products.

    y = residual + skinny_mm(x, w0, None)                     y, z, squares = add_skinny_mm(x, w0, residual, g)
    h = y * rsqrt(mean(y ** 2, -1) + eps) * g
    q = skinny_mm(h, w1, None)                        ->      q = scaled_skinny_mm(z, w1, None, squares, eps)
    gate, up = mm(h, w2).chunk(2, -1)                         gate, up = mm(z, w2).chunk(2, -1)
    a = silu(gate) * up                                       a = scaled_silu_mul(gate, up, squares, n, eps)

At few rows such a norm costs little more than a launch, about 3 us. Here the product before it adds the residual and sums the
squares, and the products after it scale their rows (`backends/triton/linear/norm.py`). The sum y stays the same, bit for
bit, for all its readers, such as the next residual and the hidden states that a draft takes. The norm is computed from that
rounded sum.

Where ranks share the product before the norm, the kernel that adds up their parts (`lower_all_reduce`) does what it would do:

    y = residual + all_reduce(part, "sum", group)        y, z, squares = all_reduce_add(part, residual, g, group)

A mixture of experts does what both products do (`backends/triton/moe/few.py`). Its norm is also read by its router:

    ids, weights = route_experts(mm(h, router), k)       logits = scaled_skinny_mm(z, router, None, squares, eps)
    y2 = y + moe_experts(h, ids, weights, ...)     ->    y2, z2, squares2 = add_moe_experts(z, ..., squares, eps, y, g2)

The product before the norm must be a `skinny_mm` or a mixture whose result only the residual sum reads. All readers of the
normalized value must be products that can scale: `skinny_mm`, products that it computes as fast as cuBLAS (`AFTER_NORM`),
mixtures, or products of cuBLAS that only `silu(gate) * up` reads, packed in one product or apart. Only bfloat16 is fused, since
`z = y * g` is not normalized and may be too large for float16. Nothing is fused where results must be batch-invariant: a fused
norm rounds elsewhere, and who reads it, hence whether it is fused, differs between a plain and a speculative round. Nor is it
where Hopper's kernel for weights of 4 bits, which scales no rows, gains more on the products after the norm than a norm costs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.backends.registry import device_arch
from spec_ops.backends.squares import SUM_COLUMNS
from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.backends.weight_format import for_columns, weight_format
from spec_ops.ops.collectives import all_reduce_add_op, all_reduce_op
from spec_ops.ops.linear import add_skinny_mm_op, scaled_silu_mul_op, scaled_skinny_mm_op, skinny_mm_op
from spec_ops.ops.moe import add_moe_experts_op, moe_experts_op, scaled_moe_experts_op
from spec_ops.passes.analysis.graph import arg, calls, insert, value
from spec_ops.passes.analysis.norms import RMSNorm, find_norms, is_convert, only_user, other_operand
from spec_ops.passes.analysis.rows import RESHAPES
from spec_ops.passes.base import GraphPass, PassContext, PassResult
from spec_ops.passes.lower_skinny_mm import Rule, Rules, operands, product_refusal, stored_weight

aten, prims = torch.ops.aten, torch.ops.prims
DTYPE = torch.bfloat16
# Most rows, by architecture. Microseconds of a layer without attention, before and after: 118.9 and 115.8 at 4 rows, 119.2 and
# 116.0 at 8, 121.6 and 119.0 at 16, 128.8 and 123.9 at 32.
MAX_ROWS = {90: 32}
# Products after a norm where `skinny_mm` is as fast as cuBLAS, so that saving the norm is the gain: 6144 x 4096 and 6144 x 8192
# at 32 rows. Alone, the first is 4% slower since it is launched early. A chain of layers gains (`docs/notebook/passes.md`).
# Up to 16 rows also qkv and router of Qwen3-30B-A3B, 5120 x 2048 and 128 x 2048 (`docs/notebook/products.md`), and of
# gpt-oss-20b, 5120 x 2880 and 32 x 2880, whose last block of k is filled up with zeros (`docs/notebook/mixtures.md`).
AFTER_NORM: Rules = {
    90: (
        Rule(max_m=16, max_n=48 * 132, min_k=2048, min_bytes=128 << 10, max_bytes=112 << 20, k_multiple=64),
        Rule(max_m=32, max_n=48 * 132, min_k=4096, min_bytes=32 << 20, max_bytes=112 << 20),
    )
}
# Columns of products after a norm, together, from which Hopper's kernel for weights of 4 bits gains more than a norm of its own
# costs: gate_up stays out of the fusion, and qkv in it (`docs/notebook/products.md`). More than 32 rows are not fused.
HOPPER_COLUMNS = 16384

# What comes before a norm, and what computes both.
FRONTS: dict[Any, Any] = {
    skinny_mm_op: add_skinny_mm_op,
    all_reduce_op: all_reduce_add_op,
    moe_experts_op: add_moe_experts_op,
    scaled_moe_experts_op: add_moe_experts_op,
}


class _NotFusedError(Exception):
    """Why a norm keeps a kernel of its own."""


class _Front(NamedTuple):
    """The sum of `residual` and the result of `product`, or of a sum of ranks in its place."""

    product: fx.Node
    residual: fx.Node
    total: fx.Node


class _After(NamedTuple):
    """The products that read a normalized value: those that `scaled_skinny_mm` computes, those of cuBLAS, and mixtures."""

    skinny: list[fx.Node]
    others: list[fx.Node]
    mixtures: list[fx.Node]

    def __str__(self) -> str:
        skinny = [f"{len(self.skinny)} scaled_skinny_mm"] * bool(self.skinny)
        return " and ".join(skinny + ["SiLU"] * bool(self.others) + ["mixture"] * bool(self.mixtures))


class _Columns(NamedTuple):
    """Some columns of a product."""

    product: fx.Node
    start: int
    width: int


class _SiluMul(NamedTuple):
    gate: _Columns
    up: _Columns
    out: fx.Node


class FuseNormLinear(GraphPass):
    name = "fuse_norm_linear"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        if context.invariant or not list(calls(graph, skinny_mm_op, all_reduce_op, moe_experts_op)):
            return
        for norm in find_norms(graph):
            if value(norm.x).dtype == torch.float32:  # no product before it is `skinny_mm`
                continue
            *outer, n = value(norm.x).shape
            what = f"RMSNorm of {math.prod(outer)} x {n}"
            arch = context.arch if context.arch is not None else device_arch(value(norm.x).device)
            try:
                front = _front(norm, arch)
                after = _products_after(norm.out, arch)
                silu = _silu_mul(after.others) if after.others else None
            except _NotFusedError as reason:
                result.refuse(norm.out, f"{what}: {reason}")
                continue
            before = "sum of ranks" if front.product.target is all_reduce_op else "mixture"
            if front.product.target is skinny_mm_op:
                before = f"product of {n} x {value(front.product.args[0]).shape[1]}"
            _fuse(graph, norm, front, after, silu)
            result.did(norm.out, f"{what} in the {before} before it and {after} after it")


def _unshaped(node: Any) -> Any:
    """The value that `node` is a reshape of, with rows of the same length."""
    while isinstance(node, fx.Node) and node.target in RESHAPES and _width(node) == _width(node.args[0]):
        node = node.args[0]
    return node


def _width(node: Any) -> int:
    shape = value(node).shape
    return shape[-1] if shape else 1


def _front(norm: RMSNorm, arch: int | None) -> _Front:
    total = _unshaped(norm.x)
    if total.target is not aten.add.Tensor or len(total.args) != 2 or total.kwargs:
        raise _NotFusedError("what it normalizes is not the sum of a residual and a product")
    for term, residual in (total.args, reversed(total.args)):
        product = _unshaped(term)
        if isinstance(product, fx.Node) and product.target in FRONTS and residual is not term:
            break
    else:
        raise _NotFusedError(
            "no term of the sum before it is a product that skinny_mm computes, a mixture, or a sum of ranks of ours"
        )
    n = _width(product)
    m = value(product).numel() // n
    if value(product).dtype != DTYPE:
        raise _NotFusedError(f"it is {value(product).dtype}, in which values that are not normalized yet may overflow")
    if arch not in MAX_ROWS:
        raise _NotFusedError(f"no figures for sm_{arch}")
    if m > MAX_ROWS[arch]:
        raise _NotFusedError(f"more than {MAX_ROWS[arch]} rows")
    if product.target is all_reduce_op and n % SUM_COLUMNS:
        raise _NotFusedError(f"its columns are no multiple of {SUM_COLUMNS}")
    if product.target is skinny_mm_op and product.args[2] is not None:
        raise _NotFusedError("the product before it has a bias")
    while term is not product:
        if len(term.users) != 1:
            break
        term = term.args[0]
    if len(term.users) != 1:
        raise _NotFusedError("the product before it is read by more than the residual sum")
    addend, whole = value(residual), value(total)
    alike = isinstance(addend, torch.Tensor) and addend.shape == whole.shape and addend.dtype == DTYPE
    if not alike or whole.numel() != m * n:
        raise _NotFusedError("the residual has another shape or dtype than the product")
    weight = value(norm.weight)
    if norm.weight.op != "placeholder" or weight.shape != (n,) or weight.dtype != DTYPE:
        raise _NotFusedError(f"its weight is not an input of {n} bfloat16 values")
    if _writes_between(product, total):
        raise _NotFusedError("something is written in place between the product and the residual sum")
    return _Front(product, residual, total)


def _writes_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether the product, which moves from `first` to `last`, would pass an op that writes. Functional graphs have none."""
    node = first.next
    while node is not last:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return True
        node = node.next
    return False


def _products_after(out: fx.Node, arch: Any) -> _After:
    """The products that read the normalized value."""
    after = _After([], [], [])
    for node, user in _readers(out):
        if user.target is moe_experts_op and [i for i, given in enumerate(user.args) if given is node] == [0]:
            if any(size % 8 for size in value(arg(user, "down")).shape[1:]):
                raise _NotFusedError(
                    "an expert's sizes are no multiples of 8, and the kernel for few tokens does not take them"
                )
            after.mixtures.append(user)
            continue
        if user.target not in (skinny_mm_op, aten.mm.default, aten.addmm.default):
            raise _NotFusedError(f"{user.target} reads its value too")
        x, weight, bias, *_ = _parts(user)
        if x is not node or node in (weight, bias):
            raise _NotFusedError(f"{user.target} reads its value, but not as rows")
        if user.target is skinny_mm_op or product_refusal(user, arch, AFTER_NORM) is None:
            after.skinny.append(user)
        elif bias is None:
            after.others.append(user)
        else:
            raise _NotFusedError("cuBLAS adds a bias to a product after it")
    if not any(after):
        raise _NotFusedError("no product reads its value")
    if arch == hopper_tiles.ARCH and (columns := sum(map(_hopper_columns, after.skinny))) >= HOPPER_COLUMNS:
        raise _NotFusedError(
            f"Hopper's kernel for weights of 4 bits, which has no norm in it, is faster for the {columns} columns after it"
        )
    return after


def _hopper_columns(product: fx.Node) -> int:
    """The columns of `product` if `backends/triton/linear/hopper_mm.py` computes it where it is not fused, else 0."""
    if product.target is not skinny_mm_op or arg(product, "scale") is None:
        return 0
    (m, k), dtype = value(product.args[0]).shape, value(product).dtype
    weight = for_columns(value(product.args[1]), k)
    scales = [value(arg(product, name)) for name in ("scale", "zero", "tensor_scale")]
    stored, n = weight_format("skinny_mm", weight, *scales), weight.shape[0]
    return n if hopper_tiles.takes(m, n, k, stored, dtype, scales[0].dtype) else 0


def _mixture(node: fx.Node) -> tuple[Any, ...]:
    """What `scaled_moe_experts` takes, of a mixture; without squares those are None."""
    names = [argument.name for argument in scaled_moe_experts_op._schema.arguments]
    if node.target is moe_experts_op:
        return *(arg(node, name) for name in names[:-2]), None, 0.0
    return tuple(arg(node, name) for name in names)


def _parts(product: fx.Node) -> tuple[Any, Any, Any, Any, Any]:
    """Rows, weight (transposed for cuBLAS), bias, scale and zero of a product."""
    if product.target is skinny_mm_op:
        x, weight, bias, *stored = product.args
        return x, weight, bias, *(stored or (None, None))  # type: ignore[return-value]
    bias, x, right = operands(product)
    return x, right, bias, None, None


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of a value and its reader. The value is `node`, or a reshape of it with rows of the same length."""
    for user in node.users:
        if user.target in RESHAPES and _width(user) == _width(node):
            yield from _readers(user)
        else:
            yield node, user


def _pieces(node: fx.Node, columns: _Columns) -> Iterator[tuple[fx.Node, _Columns, fx.Node]]:
    """Values that are some of `columns`, which `node` has all of: each value, its columns, and a reader."""
    last = value(node).dim() - 1
    for of, user in _readers(node):
        if user.target in (aten.split.Tensor, aten.split_with_sizes.default) and arg(user, "dim") in (-1, last):
            starts = [0]
            for part in value(user):
                starts.append(starts[-1] + part.shape[-1])
            for part in user.users:
                index = part.args[1]
                start, end = starts[index], starts[index + 1]  # type: ignore[index, operator]
                yield from _pieces(part, _Columns(columns.product, columns.start + start, end - start))
        elif user.target is aten.slice.Tensor and arg(user, "dim") in (-1, last) and arg(user, "step") == 1:
            start = slice(arg(user, "start"), arg(user, "end")).indices(columns.width)[0]
            yield from _pieces(user, _Columns(columns.product, columns.start + start, _width(user)))
        else:
            yield of, columns, user


def _silu_mul(products: Sequence[fx.Node]) -> _SiluMul:
    """The `silu(gate) * up` that is the only reader of `products`."""
    whole = [_Columns(product, 0, _width(product)) for product in products]
    pieces = [piece for columns in whole for piece in _pieces(columns.product, columns)]
    found = [silu for node, columns, user in pieces if (silu := _silu_of(node, columns, user, pieces)) is not None]
    if not found or len(pieces) != 2 or {found[0].gate.product, found[0].up.product} != set(products):
        raise _NotFusedError("cuBLAS computes a product after it that something other than silu(gate) * up reads")
    return found[0]


def _silu_of(node: fx.Node, gate: _Columns, exact: fx.Node, pieces: list[tuple[fx.Node, _Columns, fx.Node]]) -> _SiluMul | None:
    """The `silu(gate) * up` that begins with `exact`, the gate `node` in float32; `up` is among `pieces`."""
    if not is_convert(exact, torch.float32) or (activated := _silu(exact)) is None:
        return None
    rounded = only_user(activated, prims.convert_element_type.default)
    out = None if rounded is None or not is_convert(rounded, DTYPE) else only_user(rounded, aten.mul.Tensor)
    if out is None or value(out).dtype != DTYPE:
        return None
    other = other_operand(out, rounded)
    ups = [up for part, up, user in pieces if part is other and user is out and up.width == gate.width]
    return _SiluMul(gate, ups[0], out) if ups and value(other).shape == value(node).shape else None


def _silu(x: fx.Node) -> fx.Node | None:
    """`x / (1 + exp(-x))` or `x * sigmoid(x)`, if nothing but its result is read elsewhere."""
    if len(gates := [user for user in x.users if user.target is aten.sigmoid.default]) == 1:
        product = only_user(gates[0], aten.mul.Tensor)
        return product if product is not None and other_operand(product, gates[0]) is x and len(x.users) == 2 else None
    chain: list[fx.Node] = [x]
    for target in (aten.neg.default, aten.exp.default, (aten.add.Tensor, aten.add.Scalar), aten.div.Tensor):
        targets = target if isinstance(target, tuple) else (target,)
        users = [user for user in chain[-1].users if user.target in targets]
        if len(users) != 1:
            return None
        chain.append(users[0])
    _, negated, power, plus, quotient = chain
    right = set(x.users) == {negated, quotient} and plus.args == (power, 1) and quotient.args == (x, plus)
    return quotient if right and all(len(node.users) == 1 and not node.kwargs for node in chain[1:-1]) else None


def _fuse(graph: fx.Graph, norm: RMSNorm, front: _Front, after: _After, silu: _SiluMul | None) -> None:
    product, residual, total = front
    n = _width(product)
    rows = (value(product).numel() // n, n)
    added = (_shaped(graph, total, residual, rows), norm.weight)
    if product.target is all_reduce_op:
        part, _, group = product.args
        args: tuple[Any, ...] = (_shaped(graph, total, part, rows), *added, group)  # type: ignore[arg-type]
    elif product.target is skinny_mm_op:
        x, weight, _, *stored = _parts(product)
        args = (x, weight, *added, *stored)
    else:
        args = (*_mixture(product), *added)
    call = insert(graph, total, FRONTS[product.target], args, source=norm.out)
    y, z, squares = (insert(graph, total, operator.getitem, (call, i), source=norm.out) for i in range(3))
    total.replace_all_uses_with(_shaped(graph, total, y, value(total).shape))
    for node in after.skinny:
        _, weight, bias, *stored = _parts(node)
        if node.target is not skinny_mm_op:
            weight = stored_weight(graph, node, weight)
        args = (z, weight, bias, squares, norm.eps, *stored)
        node.replace_all_uses_with(insert(graph, node, scaled_skinny_mm_op, args))
    for node in after.mixtures:
        _, *rest = _mixture(node)[:-2]
        node.replace_all_uses_with(insert(graph, node, scaled_moe_experts_op, (z, *rest, squares, norm.eps)))
    if silu is None:
        return
    for node in {silu.gate.product, silu.up.product}:
        node.update_arg(0, z)
    gate, up = (_columns(graph, silu.out, columns) for columns in (silu.gate, silu.up))
    scaled = insert(graph, silu.out, scaled_silu_mul_op, (gate, up, squares, n, norm.eps))
    silu.out.replace_all_uses_with(_shaped(graph, silu.out, scaled, value(silu.out).shape))


def _shaped(graph: fx.Graph, before: fx.Node, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    return node if value(node).shape == shape else insert(graph, before, aten.reshape.default, (node, list(shape)))


def _columns(graph: fx.Graph, before: fx.Node, columns: _Columns) -> fx.Node:
    product, start, width = columns
    if width == _width(product):
        return product
    return insert(graph, before, aten.slice.Tensor, (product, 1, start, start + width))
