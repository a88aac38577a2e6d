"""Weights of 8 and 4 bits that a graph dequantizes for a product: where they are stored, and which scales they share.

    mm(x, convert(mul(convert(permute(weight)), scales)))

`torch.compile` traces this of torchao's `Float8Tensor` (weight only), of transformers' fine-grained fp8 as our models call it,
of `StoredTensor`, and of whoever writes `F.linear(x, (weight.float() * scale).to(x.dtype))`. Scales are broadcast, or repeated
over blocks with `repeat_interleave`, or a view of the weight has its blocks as dimensions. Numbers of 4 bits are those of
`weight_format.unpacked`, and a zero point may follow the scales; or they are those of `e2m1`, with scales of e4m3 or of `e8m0`,
and a scale of the whole weight may follow.

    mul(mm(x, convert(permute(weight))), scales)

is what torchao's `Int8Tensor` traces to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.backends.weight_format import E2M1_UNIT, KINDS, SCALE_DTYPES, WeightFormat, for_columns, weight_format
from spec_ops.ops.linear import add_skinny_mm_op, float8_mm_op, scaled_skinny_mm_op, skinny_mm_op
from spec_ops.passes.analysis.graph import arg, insert, value
from spec_ops.passes.analysis.rows import RESHAPES

aten, prims = torch.ops.aten, torch.ops.prims
_SKINNY = (skinny_mm_op, add_skinny_mm_op, scaled_skinny_mm_op)
_STORED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
_SWAPS = {aten.permute.default, aten.t.default, aten.transpose.int}
SAME = {aten.alias.default, aten.detach.default, aten.clone.default}  # what gives the numbers of its operand
_VIEWS = {
    *_SWAPS, aten.view.default, aten.reshape.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default,
    aten.squeeze.dim, aten.alias.default, aten.detach.default,
}  # fmt: skip
_BITS = {aten.view.dtype, aten.bitwise_or.Tensor, aten.bitwise_and.Scalar, aten.__lshift__.Scalar}  # of `e2m1`
_DEPTH = 20  # nodes above a product in which a weight of 8 or 4 bits is looked for


class StoredWeight(NamedTuple):
    """A weight as the graph has it.

    Attributes:
        data: float8 or int8, as `[n, k]`, or `[k, n]` if `flipped`; two numbers of 4 bits in a byte, `[n, k / 2]`.
        scale, zero: as `[n, k]` of scales, or `[k, n]` if `flipped_scale`; of any shape if one of these is 1. `zero` or None.
        shape: the scales', `[n, k]`.
        tensor_scale: of the whole weight, or None.
    """

    data: fx.Node
    flipped: bool
    scale: fx.Node
    flipped_scale: bool
    shape: tuple[int, int]
    zero: fx.Node | None = None
    tensor_scale: fx.Node | None = None

    def insert(self, graph: fx.Graph, before: fx.Node) -> tuple[fx.Node | None, ...]:
        """Nodes of the weight `[n, k]`, its scale, its zero and its tensor's scale, as `skinny_mm` takes them."""
        flip = [1, 0]
        data = insert(graph, before, aten.permute.default, (self.data, flip)) if self.flipped else self.data
        scales = []
        for node in (self.scale, self.zero):
            shape = self.shape[::-1] if self.flipped_scale else self.shape
            if node is not None and tuple(value(node).shape) != shape:
                node = insert(graph, before, aten.reshape.default, (node, list(shape)))
            if node is not None and self.flipped_scale:
                node = insert(graph, before, aten.permute.default, (node, flip))
            scales.append(node)
        return data, *scales, self.tensor_scale

    def format_of(self, k: int) -> WeightFormat:
        """What `skinny_mm` takes it for beside rows of `k` numbers; raises as `weight_format` does."""
        data, scale = value(self.data), value(self.scale)
        sizes = data.shape[::-1] if self.flipped else data.shape
        weight = for_columns(torch.empty(sizes, dtype=data.dtype, device="meta"), k)
        return weight_format("skinny_mm", weight, _meta(scale, self.shape), None)


def weight_bytes(node: fx.Node) -> int:
    """The bytes that move for the weight of a product of two matrices, and 0 for any other node."""
    if node.op != "call_function":
        return 0
    if (found := int4_rows(node)) is not None:
        return _bytes(*_tensors(found[1]))
    if shuffled_int4(node) is not None:
        return _bytes(*node.all_input_nodes[1:])
    if node.target in _SKINNY:
        return _bytes(*(arg(node, name) for name in ("weight", "scale", "zero", "tensor_scale")))
    if node.target is float8_mm_op:
        return _bytes(arg(node, "weight"), arg(node, "scale"))
    if node.target is aten._scaled_mm.default:
        return _bytes(arg(node, "mat2"), arg(node, "scale_b"))
    if node.target not in (aten.mm.default, aten.addmm.default):
        return 0
    right: Any = node.args[-1]
    if not isinstance(value(right), torch.Tensor):
        return 0
    try:
        stored = dequantized(right) or ((after := scaled_after(node)) and after[1])
    except NoFormatError:
        stored = None
    return _bytes(right) if stored is None else 2 * _bytes(right) + _bytes(*_tensors(stored))


def _tensors(stored: StoredWeight) -> tuple[fx.Node | None, ...]:
    return stored.data, stored.scale, stored.zero, stored.tensor_scale


def _bytes(*nodes: Any) -> int:
    found = [value(node) for node in nodes if node is not None]
    return sum(v.numel() * v.element_size() for v in found if all(isinstance(size, int) for size in v.shape))


class NoFormatError(Exception):
    """Why a product with a weight of 8 or 4 bits is left as it is."""


class _Spread(NamedTuple):
    """Scales repeated to the weight's size: `base`, transposed if `swapped`, each number for so many of each dimension."""

    base: fx.Node
    swapped: bool
    repeats: tuple[int, int]


def is_stored(node: Any) -> bool:
    """Whether `node` is an input of the graph or a view of one: other weights may still be in cache."""
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]
    return node.op in ("placeholder", "get_attr")


def dequantized(right: fx.Node) -> StoredWeight | None:
    """The weight of 8 or 4 bits that `right [k, n]` is computed of; None if there is none, or if it has no scales yet.

    Raises:
        NoFormatError: `right` is computed of one, but not in a form that is known.
    """
    if value(right).dtype in _STORED or not _holds_stored(right, _DEPTH) or _bare_int8(right) is not None:
        return None
    node, flipped = peeled(right, True)
    zeros = None
    if node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
        node, zeros = next(((a, b) for a, b in factors_of(node) if a.target is aten.mul.Tensor), (node, None))
    node, tensor_scale = _without_tensor_scale(node)
    shape, parts, blocks = value(node).shape, None, None
    if node.target is aten.mul.Tensor:
        parts = factors_of(node)
    elif node.target in RESHAPES and (product := _same(node.args[0])).target is aten.mul.Tensor:
        blocks = tuple(value(product).shape)
        if len(blocks) == 4 and (blocks[0] * blocks[1], blocks[2] * blocks[3]) == tuple(shape):
            parts = factors_of(product)
    for numbers, scales in parts or ():
        if blocks is not None:
            if (viewed := peeled(numbers, flipped)[0]).target not in RESHAPES or value(viewed.args[0]).shape != shape:
                continue
            numbers = viewed.args[0]
        data, data_flipped = peeled(numbers, flipped)
        if (bytes_of := _of_e2m1(data)) is not None:
            return _of_float4(bytes_of, data_flipped, scales, flipped, tensor_scale)
        if tensor_scale is not None:
            continue
        if (bytes_of := _of_4_bits(data)) is not None:
            data = bytes_of
        elif value(data).dtype == torch.uint8:
            continue
        if value(data).dtype not in _STORED or value(data).dim() != 2:
            continue
        spread = spread_of(scales) if blocks is None else _of_blocks(scales, blocks)
        return _checked(data, data_flipped, spread, flipped, None if zeros is None else spread_of(zeros))
    raise NoFormatError("its weight of 8 or 4 bits is not dequantized as numbers times scales")


def _bare_int8(right: Any) -> tuple[fx.Node, bool] | None:
    """The int8 that `right [k, n]` is a conversion of, without scales, and whether that is `[k, n]`."""
    data, flipped = peeled(right, True)
    converted = value(right).dtype.is_floating_point and value(data).dtype == torch.int8 and value(data).dim() == 2
    return (data, flipped) if converted and is_stored(data) else None


def scaled_after(node: Any) -> tuple[fx.Node, StoredWeight] | None:
    """The product `node` with an int8 weight, times a scale for each column or one for all: the node that multiplies, and the
    weight. None for any other node.

    Raises:
        NoFormatError: a product with int8 that nothing, or something else, multiplies.
    """
    if node.target is not aten.mm.default or (found := _bare_int8(node.args[1])) is None:
        return None
    n = value(node).shape[1]
    (user, *others) = node.users or [None]
    factors = factors_of(user) if user is not None and user.target is aten.mul.Tensor and not others else []
    for product, scales in factors:
        shape = tuple(value(scales).shape)
        if product is not node or value(user).dtype != value(node).dtype or shape[-1:] not in ((n,), (1,)):
            continue
        base = scales
        while base.op == "call_function" and (base.target in {*RESHAPES, *SAME} or is_float(base)):
            base = base.args[0]
        if value(scales).numel() == shape[-1] == value(base).numel() and value(base).dtype in SCALE_DTYPES:
            return user, StoredWeight(*found, base, False, (shape[-1], 1))
    raise NoFormatError("its weight of 8 bits has no scale for each column")


def _without_tensor_scale(node: Any) -> tuple[Any, fx.Node | None]:
    """`node`, or what one float32 multiplies in it if that is 4-bit floats times scales, and that float32."""
    for product, factor in factors_of(node) if node.target is aten.mul.Tensor else []:
        product, one = _same(product), value(factor)
        if product.target is not aten.mul.Tensor or one.numel() != 1 or one.dtype != torch.float32:
            continue
        if any(_of_e2m1(peeled(numbers, False)[0]) is not None for numbers, _ in factors_of(product)):
            return product, factor
    return node, None


def _of_float4(data: fx.Node, data_flipped: bool, scales: Any, flipped: bool, tensor_scale: fx.Node | None) -> StoredWeight:
    """The weight of 4-bit floats, if its scales are those of a format."""
    spread = spread_of(scales)
    if (base := _scale_of_8_bits(spread.base)) is None:
        raise NoFormatError("its 4-bit floats have no scales of e4m3 or e8m0")
    if tensor_scale is not None and value(base).dtype == torch.uint8:
        raise NoFormatError("its 4-bit floats have scales of e8m0 and one of the whole weight")
    found = _checked(data, data_flipped, spread._replace(base=base), flipped, float4=True)
    return found._replace(tensor_scale=tensor_scale)


def _of_e2m1(node: Any) -> fx.Node | None:
    """The bytes that `node [n, k]` holds the 4-bit floats of, as `weight_format.e2m1` computes them."""
    bits = _bits(_arithmetic(node, E2M1_UNIT, aten.mul), torch.float16)
    if getattr(bits, "target", None) is not aten.bitwise_or.Tensor:
        return None
    rest, sign = (_arithmetic(half, by, aten.__lshift__) for half, by in zip(bits.args, (9, 12), strict=True))
    halves = _arithmetic(rest, 7, aten.bitwise_and)
    if halves is None or halves is not _arithmetic(sign, 8, aten.bitwise_and) or value(halves).dtype != torch.int16:
        return None
    return _bytes_of_halves(halves.args[0], value(node).shape)


def _scale_of_8_bits(node: Any) -> fx.Node | None:
    """The e4m3, or the bytes of e8m0, that `node` is the float32 of."""
    if node.target is prims.convert_element_type.default and value(node.args[0]).dtype == torch.float8_e4m3fn:
        return node.args[0]
    exponent = _arithmetic(_arithmetic(_bits(node, torch.float32), 1 << 22, aten.clamp_min), 23, aten.__lshift__)
    if getattr(exponent, "target", None) is not prims.convert_element_type.default:
        return None
    return exponent.args[0] if (value(exponent).dtype, value(exponent.args[0]).dtype) == (torch.int32, torch.uint8) else None


def _bits(node: Any, dtype: torch.dtype) -> Any:
    """The integers that `node` is the floats of `dtype` of; None if it is something else."""
    node = None if node is None else _same(node)
    return node.args[0] if getattr(node, "target", None) is aten.view.dtype and value(node).dtype == dtype else None


def _of_4_bits(node: Any) -> fx.Node | None:
    """The bytes that `node [n, k]` holds the numbers of, as `weight_format.unpacked` computes them."""
    xor = _arithmetic(node, 8, aten.sub)
    xor = xor.args[0] if getattr(xor, "target", None) is prims.convert_element_type.default else xor
    return _bytes_of_halves(_arithmetic(xor, 8, aten.bitwise_xor), value(node).shape)


def _bytes_of_halves(view: Any, shape: torch.Size) -> fx.Node | None:
    """The bytes whose halves `view` holds, the lower one first, if those are of `shape`."""
    if getattr(view, "target", None) not in RESHAPES or (cat := view.args[0]).target is not aten.cat.default:
        return None
    halves, dim = arg(cat, "tensors"), arg(cat, "dim")
    if len(halves) != 2 or dim not in (2, -1) or any(h.target is not aten.unsqueeze.default for h in halves):
        return None
    low = _arithmetic(halves[0].args[0], 15, aten.bitwise_and)
    high = _arithmetic(halves[1].args[0], 4, aten.__rshift__, aten.bitwise_right_shift)
    if low is None or low is not high or value(low).dtype != torch.uint8 or value(low).dim() != 2:
        return None
    n, half = value(low).shape
    return low if tuple(value(cat).shape) == (n, half, 2) and tuple(shape) == (n, 2 * half) else None


def _arithmetic(node: Any, number: float, *operations: Any) -> Any:
    """The first operand of one of `operations` whose second is `number`; None if `node` is nothing of that kind."""
    packet = getattr(getattr(node, "target", None), "overloadpacket", None)
    return node.args[0] if packet in operations and tuple(node.args[1:]) == (number,) and not node.kwargs else None


def factors_of(product: fx.Node) -> list[tuple[Any, Any]]:
    """The two factors of a product or terms of a sum, in both orders; none if one is a number."""
    both = product.args
    return [both, both[::-1]] if all(isinstance(factor, fx.Node) for factor in both) else []  # type: ignore[list-item]


def _holds_stored(node: Any, depth: int) -> bool:
    """Whether a tensor of numbers of 8 bits is found above `node`, through views and elementwise operations."""
    if not isinstance(node, fx.Node) or depth == 0 or not isinstance(value(node), torch.Tensor):
        return False
    if value(node).dtype in _STORED:
        return True
    known = _VIEWS | SAME | _BITS | {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.expand.default}
    if node.op != "call_function" or node.target not in known | {prims.convert_element_type.default}:
        return False
    return any(_holds_stored(parent, depth - 1) for parent in node.all_input_nodes)


def _same(node: Any) -> Any:
    """`node` without conversions to floats and copies."""
    while node.op == "call_function" and (node.target in SAME or is_float(node)):
        node = node.args[0]
    return node


def is_float(node: fx.Node) -> bool:
    """Whether `node` converts to floats of 16 bits or more. A conversion to 8 bits, to integers or to bool changes numbers."""
    converts = node.target is prims.convert_element_type.default
    return converts and value(node).dtype.is_floating_point and value(node).dtype not in _STORED


def peeled(node: Any, flipped: bool) -> tuple[Any, bool]:
    """`node` without conversions to floats, copies and transpositions, and whether it is the transpose of what is asked
    about."""
    while node.op == "call_function" and value(node).dim() in (2, 4):
        if node.target in _SWAPS and value(node).dim() == 2:
            flipped ^= _swaps(node)
        elif node.target not in SAME and not is_float(node):
            break
        node = node.args[0]
    return node, flipped


def _swaps(node: Any) -> bool:
    """Whether a permutation of two dimensions exchanges them."""
    if node.target is aten.permute.default:
        return [d % 2 for d in node.args[1]] == [1, 0]
    return node.target is aten.t.default or (node.args[1] - node.args[2]) % 2 == 1


def spread_of(node: Any) -> _Spread:
    """What `node [*, *]`, scales of the weight's size or broadcastable to it, repeats."""
    whole = _Spread(node, False, (1, 1))
    if node.op != "call_function" or value(node).dim() != 2:
        return whole
    source = node.args[0]
    if node.target in _SWAPS:
        inner = spread_of(source)
        return inner._replace(swapped=not inner.swapped, repeats=inner.repeats[::-1]) if _swaps(node) else inner
    if node.target is prims.convert_element_type.default:
        return spread_of(source) if value(source).dtype in SCALE_DTYPES and value(node).dtype == torch.float32 else whole
    if node.target in SAME or (node.target is aten.expand.default and value(source).dim() == 2):
        return spread_of(source)
    if node.target is aten.slice.Tensor:  # the last blocks are not whole
        return spread_of(source) if arg(node, "start") in (None, 0) and arg(node, "step") == 1 else whole
    if node.target not in RESHAPES or (found := _repeated(node)) is None:
        return whole
    inner, dim, times = spread_of(found[0]), found[1], found[2]
    if inner.repeats[dim] > 1:
        return whole
    return inner._replace(repeats=(times, inner.repeats[1]) if dim == 0 else (inner.repeats[0], times))


def _repeated(node: Any) -> tuple[fx.Node, int, int] | None:
    """The source, dimension and number of a `repeat_interleave`: `reshape(expand(unsqueeze(source)))`."""
    expand: Any = _same(node.args[0])
    if expand.target is not aten.expand.default:
        return None
    one: Any = expand.args[0]
    if one.target is not aten.unsqueeze.default or value(one.args[0]).dim() != 2:
        return None
    source, dim = one.args[0], one.args[1] % 3
    times = value(expand).shape[dim]
    rows, columns = value(source).shape
    repeated = {1: (rows * times, columns), 2: (rows, columns * times)}.get(dim)
    return (source, dim - 1, times) if repeated == tuple(value(node).shape) else None


def _of_blocks(node: Any, blocks: tuple[int, ...]) -> _Spread:
    """Scales `[a, 1, b, 1]` of a weight's view `[a, rows, b, columns]`."""
    wanted = (blocks[0], 1, blocks[2], 1)
    while node.op == "call_function" and node.target in {*RESHAPES, aten.unsqueeze.default, *SAME} and value(node).dim() > 2:
        if value(node).numel() != blocks[0] * blocks[2] or (value(node).dim() == 4 and tuple(value(node).shape) != wanted):
            break
        node = node.args[0]
    if tuple(value(node).shape) != (blocks[0], blocks[2]):
        raise NoFormatError("its scales are not those of blocks")
    return _Spread(node, False, (blocks[1], blocks[3]))


def _checked(
    data: fx.Node,
    data_flipped: bool,
    spread: _Spread,
    flipped: bool,
    zeros: _Spread | None = None,
    float4: bool = False,
) -> StoredWeight:
    """The weight, if its scales are those of a format. `flipped`: where numbers meet scales, they are `[k, n]`."""
    if not is_stored(data):
        raise NoFormatError("the weight is computed here")
    if (dtype := value(data).dtype) not in KINDS:
        raise NoFormatError(f"its weight is {dtype}, not float8_e4m3fn")
    scale = value(spread.base)
    shape = (1, 1) if scale.numel() == 1 else (1, *scale.shape) if scale.dim() == 1 else tuple(scale.shape)
    swapped = spread.swapped != flipped and scale.numel() > 1
    shape, repeats = (shape[::-1] if swapped else shape), (spread.repeats[::-1] if flipped else spread.repeats)
    sizes = value(data).shape[::-1] if data_flipped else value(data).shape
    if zeros is not None:
        same = (zeros.swapped, zeros.repeats, value(zeros.base).shape) == (spread.swapped, spread.repeats, scale.shape)
        if not same or value(zeros.base).dtype != scale.dtype or dtype != torch.uint8:
            raise NoFormatError("its zero points are not those of groups of 4 bits")
    try:
        if (scale.dtype in SCALE_DTYPES) == float4:  # bytes times bytes would be taken for MXFP4
            raise TypeError
        stored = weight_format("lower_skinny_mm", torch.empty(sizes, dtype=dtype, device="meta"), _meta(scale, shape), None)
    except (TypeError, ValueError):
        text = f"{scale.dtype} of shape {list(shape)}, one for {repeats[0]} x {repeats[1]}".removeprefix("torch.")
        raise NoFormatError(f"its scales are of no known format: {text}") from None
    for size, times, shared in zip(shape, repeats, (stored.rows, stored.columns), strict=True):
        if size > 1 and times != shared:
            raise NoFormatError(f"its scales are not repeated for {stored.rows} x {stored.columns} numbers")
    return StoredWeight(data, data_flipped, spread.base, swapped, shape, None if zeros is None else zeros.base)


def _meta(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=scale.dtype, device="meta")


def int4_rows(node: fx.Node) -> tuple[fx.Node, StoredWeight] | None:
    """The rows and the weight of a product by the kernel that torchao's `Int4Tensor` calls; None for any other node.

    Its scales and zeros are `[k / group, n]`.
    """
    target: Any = node.target
    if getattr(target, "namespace", None) not in ("mslk", "fbgemm"):
        return None
    if target._schema.name.rpartition("::")[2] != "bf16i4bf16_rowwise":
        return None
    x, data, scale, zero = (arg(node, argument.name) for argument in target._schema.arguments)
    shape = tuple(value(scale).shape)[::-1]
    return x, StoredWeight(data, False, scale, True, shape, zero)


def shuffled_int4(node: fx.Node) -> str | None:
    """Which of torchao's int4 weights in an order of their own kernel's the product `node` reads; None for any other node."""
    target: Any = node.target
    name = getattr(target, "_name", "")
    if name in ("aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_with_scales_and_zeros"):
        return "Int4TilePackedTo4dTensor" if name.endswith("pack_mm") else "Int4PlainInt32Tensor"
    return "Int4PreshuffledTensor" if name in ("mslk::bf16i4bf16_shuffled", "mslk::f8i4bf16_shuffled") else None
