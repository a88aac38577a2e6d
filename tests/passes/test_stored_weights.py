"""lower_skinny_mm on weights of 8 and 4 bits: which are read as they are stored, and why others are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from spec_ops.backends.weight_format import dequantized, e2m1, unpacked
from spec_ops.ops.linear import add_skinny_mm_op, scaled_skinny_mm_op, skinny_mm_op
from spec_ops.passes.analysis.stored_weights import weight_bytes
from spec_ops.passes.fuse_norm_linear import FuseNormLinear
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm
from tests.helpers.pass_harness import capture, run_pass, targets, texts
from tests.helpers.stored_weights import exact, stored

aten = torch.ops.aten
M, N, K = 4, 320, 512


def spread(scale, rows, columns, n, k):
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]


def as_torchao(x, weight, scale):
    return torch.matmul(x, (weight.t().float() * scale.t()).to(x.dtype))


def as_linear(x, weight, scale):
    return F.linear(x, (weight.float() * scale).to(x.dtype))


def in_bfloat16(x, weight, scale):
    return F.linear(x, weight.to(x.dtype) * scale.to(x.dtype))


def in_batches(x, weight, scale):
    return F.linear(x.view(2, 2, -1), (weight.float() * scale).to(x.dtype)).flatten(0, 1)


def repeated(x, weight, scale):
    return F.linear(x, (weight.float() * spread(scale, 128, 128, *weight.shape)).to(x.dtype))


def repeated_transposed(x, weight, scale):
    return x @ (spread(scale, 128, 128, *weight.shape).t() * weight.t().float()).to(x.dtype)


def viewed(x, weight, scale):
    n, k = weight.shape
    blocks = weight.float().view(n // 128, 128, k // 128, 128) * scale[:, None, :, None]
    return F.linear(x, blocks.view(n, k).to(x.dtype))


def grouped(x, weight, scale):
    return torch.matmul(x, (weight.t().float() * scale.t().repeat_interleave(64, 0)).to(x.dtype))


def tensors(kind: str, m: int = M, n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=g) for shape in ((m, k), (n, k)))
    return [x.to(dtype), *stored(weight, kind)[:2]]


def check(module: torch.fx.GraphModule, inputs: list[torch.Tensor], fn: Callable, args: list[torch.Tensor]) -> None:
    """As exact as eager's, against the same program in float64."""
    doubles = [a.double() if a.dtype == torch.bfloat16 or (a.dtype == torch.float32 and a.numel()) else a for a in args]
    for got, eager, want in zip(
        module(*inputs), *(r if isinstance(r, tuple) else (r,) for r in (fn(*args), fn(*doubles))), strict=True
    ):
        errors = [(out.double() - want).square().mean().sqrt() for out in (got, eager)]
        assert 0 < errors[0] <= 1.05 * errors[1]


def refused(fn: Callable, args: list[torch.Tensor], arch: int = 90) -> str:
    module, _ = capture(fn, *args)
    before = str(module.graph)
    result = run_pass(LowerSkinnyMm(), module, arch)
    assert result.matches == 0
    assert str(module.graph) == before
    return texts(result.refused)


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize(
    ("fn", "kind", "n"),
    [
        (as_torchao, "tensor", N),
        (as_torchao, "row", N),
        (as_linear, "row", N),
        (as_linear, "tensor", N),
        (in_bfloat16, "row", N),
        (in_batches, "row", N),
        (repeated, "block", N),
        (repeated, "block", 100),
        (repeated_transposed, "block", N),
        (viewed, "block", 384),
        (grouped, "group", N),
    ],
)
def test_read_as_stored(fn, kind, n, arch):
    args = tensors(kind, n=n)
    module, inputs = capture(fn, *args)
    result = run_pass(LowerSkinnyMm(), module, arch)
    assert texts(result.done) == f"skinny_mm: 4 rows, weight {n} x 512 of 8 bits", texts(result.refused)
    (node,) = (node for node in module.graph.nodes if node.target is skinny_mm_op)
    assert node.args[1].op == "placeholder"
    assert not {aten.mm.default, aten.mul.Tensor, aten.expand.default} & set(targets(module))
    check(module, inputs, fn, args)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_of_any_shape(shape):
    x, weight, scale = tensors("tensor")
    args = [x, weight, scale.view(shape)]
    module, inputs = capture(as_linear, *args)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
    check(module, inputs, as_linear, args)


def test_row_scales_without_a_second_dimension():
    x, weight, scale = tensors("row")
    args = [x, weight, scale[:, 0].contiguous()]

    def fn(x, weight, scale):
        return x @ (weight.t().float() * scale).to(x.dtype)

    module, inputs = capture(fn, *args)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
    check(module, inputs, fn, args)


def test_bias():
    x, weight, scale = tensors("row")
    bias = torch.randn(N).bfloat16()

    def fn(x, weight, scale, bias):
        return F.linear(x, (weight.float() * scale).to(x.dtype), bias)

    module, inputs = capture(fn, x, weight, scale, bias)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
    (node,) = (node for node in module.graph.nodes if node.target is skinny_mm_op)
    assert node.args[2] is not None
    check(module, inputs, fn, [x, weight, scale, bias])


def other_blocks(x, weight, scale):
    return F.linear(x, (weight.float() * spread(scale, 64, 128, *weight.shape)).to(x.dtype))


def tiled(x, weight, scale):
    """Scales that follow one another instead of blocks."""
    return F.linear(x, (weight.float() * scale.repeat(128, 128)[: weight.shape[0], : weight.shape[1]]).to(x.dtype))


def shifted(x, weight, scale):
    n, k = weight.shape
    return F.linear(x, (weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[1 : n + 1, :k]).to(x.dtype))


def with_zero(x, weight, scale):
    return F.linear(x, (weight.float() * scale + 1).to(x.dtype))


def quantized_here(x, weight, scale):
    return F.linear(x, ((weight.float() * 2).to(torch.float8_e4m3fn).float() * scale).to(x.dtype))


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (as_linear, tensors("row", m=129), "more than 128 rows, for which the weight is dequantized"),
        (as_linear, tensors("row", k=544), "k is no multiple of 64"),
        (with_zero, tensors("row"), "its weight of 8 or 4 bits is not dequantized as numbers times scales"),
        (quantized_here, tensors("row"), "the weight is computed here"),
        (other_blocks, [*tensors("row")[:2], torch.rand(5, 4)], "its scales are of no known format: float32 of shape [5, 4]"),
        (tiled, tensors("block"), "its scales are of no known format: float32 of shape [384, 512]"),
        (shifted, tensors("block", n=300), "its scales are of no known format"),
        (
            as_linear,
            [t if i != 1 else t.float().to(torch.float8_e5m2) for i, t in enumerate(tensors("row"))],
            "its weight is torch.float8_e5m2, not float8_e4m3fn",
        ),
        (
            lambda x, right, scale: x @ (right.float() * scale).to(x.dtype),
            [t if i != 1 else t.t().contiguous() for i, t in enumerate(tensors("tensor"))],
            "the weight's rows are not contiguous",
        ),
        (
            lambda x, weight, scale: as_linear(x[:, :448], weight[:, 8:456], scale),
            tensors("row"),
            "the weight's rows do not start at multiples of 16 bytes",
        ),
    ],
)
def test_near_misses(fn, args, reason):
    assert reason in refused(fn, args)


def test_older_gpus_and_other_dtypes():
    assert "sm_89 has no tensor memory access" in refused(as_linear, tensors("row"), arch=89)
    assert refused(as_linear, tensors("row", dtype=torch.float32)) == ""


def test_the_error_says_no_more_than_it_knows():
    """A product without float8 keeps its own reasons."""
    assert "the weight is computed here" in refused(
        lambda x, w: F.linear(x, w * 2), [torch.randn(4, 4096).bfloat16(), torch.randn(4096, 4096).bfloat16()]
    )


@pytest.fixture
def mslk() -> Iterator[Callable]:
    """The product that torchao's `Int4Tensor` calls, by the schema of the package that has it."""
    library = torch.library.Library("mslk", "FRAGMENT")
    if not hasattr(torch.ops.mslk, "bf16i4bf16_rowwise"):
        library.define("bf16i4bf16_rowwise(Tensor X, Tensor W, Tensor w_scale_group, Tensor w_zero_group) -> Tensor")

    def product(x, weight, scale, zero):
        return x @ dequantized(weight, scale.t(), zero.t()).to(x.dtype).t()

    library.impl("bf16i4bf16_rowwise", product, "CPU")
    torch.library.register_fake("mslk::bf16i4bf16_rowwise", lambda x, w, s, z: x.new_empty(x.shape[0], w.shape[0]), lib=library)
    yield lambda x, weight, scale, zero: torch.ops.mslk.bf16i4bf16_rowwise(x, weight, scale, zero)
    library._destroy()


def test_int4_of_torchao(mslk):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(M, K, generator=g).bfloat16(), torch.randn(N, K, generator=g)
    weight, scale, zero = stored(w, "int4-128", torch.bfloat16)
    args = [x, weight, scale.t(), zero.t()]
    assert args[2].is_contiguous()
    module, inputs = capture(mslk, *args)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert texts(result.done) == "skinny_mm: 4 rows, weight 320 x 512 of 4 bits"
    want = exact(x, weight, scale, zero)
    errors = [(out.double() - want).square().mean().sqrt() for out in (module(*inputs)[0], mslk(*args))]
    assert errors[0] <= 1.05 * errors[1]
    module, _ = capture(mslk, x.repeat(33, 1), *args[1:])
    assert "more than 128 rows" in texts(run_pass(LowerSkinnyMm(), module, 90).refused)
    module, _ = capture(mslk, x.repeat(17, 1), *args[1:])
    assert "more than 64 rows" in texts(run_pass(LowerSkinnyMm(), module, 100).refused)


def test_int4_of_torchao_in_groups_of_no_format(mslk):
    """Nothing but the product itself looked at those scales."""
    weight, scale, zero = stored(torch.randn(N, K), "int4-128", torch.bfloat16)
    module, _ = capture(mslk, torch.randn(M, K).bfloat16(), weight, scale.t(), zero.t())
    for given in list(module.graph.nodes)[2:4]:
        given.meta["val"] = given.meta["val"].new_empty(K // 16, N)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert result.matches == 0
    assert "`scale` of a weight 320 x 512 of int4 must be [320, 512 / group]" in texts(result.refused)


def test_norms_are_divided_among_such_products():
    """A norm between two products with weights of 8 bits."""

    def fn(x, residual, g, w0, s0, w1, s1):
        y = residual + as_torchao(x, w0, s0)
        return y, as_torchao(F.rms_norm(y, y.shape[-1:], g, 1e-5), w1, s1)

    x, w0, s0 = tensors("row", n=K)
    _, w1, s1 = tensors("block", n=256)
    s1 = s1.repeat_interleave(128, 0)[:, :1].contiguous()
    args = [x, torch.randn(M, K).bfloat16(), torch.rand(K).bfloat16() + 0.5, w0, s0 * 0.05, w1, s1]
    module, inputs = capture(fn, *args)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 2
    result = run_pass(FuseNormLinear(), module, 90)
    assert result.matches == 1, texts(result.refused)
    assert {add_skinny_mm_op, scaled_skinny_mm_op} <= set(targets(module))
    assert skinny_mm_op not in targets(module)
    check(module, inputs, fn, args)


def test_weights_of_4_bits_read_as_stored():
    """What `StoredTensor` traces to: with and without zero points, and a group that is not the right one."""

    def fn(x, weight, scale, zero=None):
        return F.linear(x, dequantized(weight, scale, zero).to(x.dtype))

    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(M, K, generator=g).bfloat16(), torch.randn(N, K, generator=g)
    weights = stored(w, "int4-128", torch.bfloat16)
    for count in (2, 3):
        args = [x, *weights[:count]]
        module, inputs = capture(fn, *args)
        result = run_pass(LowerSkinnyMm(), module, 90)
        assert texts(result.done) == "skinny_mm: 4 rows, weight 320 x 512 of 4 bits", texts(result.refused)
        assert not {aten.mm.default, aten.mul.Tensor, aten.cat.default} & set(targets(module))
        want = exact(x, *weights[:count], *([None] * (3 - count)))
        errors = [(out.double() - want).square().mean().sqrt() for out in (module(*inputs)[0], fn(*args))]
        assert 0 < errors[0] <= 1.05 * errors[1]
    module, _ = capture(fn, x.repeat(32, 1), *weights)
    assert texts(run_pass(LowerSkinnyMm(), module, 90).done) == "skinny_mm: 128 rows, weight 320 x 512 of 4 bits"
    assert "more than 128 rows" in refused(fn, [x.repeat(33, 1), *weights])


def test_invariant_rounds_dequantize():
    """How the kernels for stored weights divide k depends on the rows."""

    def fn(x, weight, scale, zero):
        return F.linear(x, dequantized(weight, scale, zero).to(x.dtype))

    module, _ = capture(fn, torch.randn(64, K).bfloat16(), *stored(torch.randn(N, K), "int4-128", torch.bfloat16))
    run_pass(LowerSkinnyMm(), module, 90, invariant=True)
    for node in module.graph.nodes:
        assert node.target is not skinny_mm_op or node.args[3:] == (None, None, None, True)


@pytest.mark.parametrize(
    ("arch", "kind", "k", "dtype", "scales"),
    [
        (100, "int4-128", K, torch.bfloat16, torch.bfloat16),
        (100, "int4-32", K + 64, torch.bfloat16, torch.bfloat16),
        (90, "int4-128", K, torch.float16, torch.float16),
        (90, "int4-128", K, torch.bfloat16, torch.float32),
    ],
)
def test_65_rows_of_int4_need_what_the_hopper_kernel_has(arch, kind, k, dtype, scales):
    def fn(x, weight, scale, zero):
        return F.linear(x, dequantized(weight, scale, zero).to(x.dtype))

    g = torch.Generator().manual_seed(0)
    weights = stored(torch.randn(N, k, generator=g), kind, scales)
    assert "more than 64 rows" in refused(fn, [torch.randn(65, k).to(dtype), *weights], arch)
    module, _ = capture(fn, torch.randn(64, k).to(dtype), *weights)
    assert run_pass(LowerSkinnyMm(), module, arch).matches == 1


def in_float4(x, weight, scale, tensor_scale=None):
    return F.linear(x, dequantized(weight, scale, None, tensor_scale).to(x.dtype))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_4_bit_floats_read_as_stored(kind):
    """What `StoredTensor` traces to; with the weight transposed, and without a scale of the whole weight."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(M, K, generator=g).bfloat16(), torch.randn(N, K, generator=g)
    weight, scale, _, *whole = stored(w, kind)

    def transposed(x, weight, scale, tensor_scale=None):
        return torch.matmul(x, dequantized(weight, scale, None, tensor_scale).t().to(x.dtype))

    for fn in (in_float4, transposed):
        for args in ([x, weight, scale, *(t for t in whole if t is not None)], [x, weight, scale]):
            module, inputs = capture(fn, *args)
            assert weight_bytes(next(node for node in module.graph.nodes if node.target is aten.mm.default)) > 4 * N * K
            result = run_pass(LowerSkinnyMm(), module, 90)
            assert texts(result.done) == "skinny_mm: 4 rows, weight 320 x 512 of 4 bits", texts(result.refused)
            (node,) = (node for node in module.graph.nodes if node.target is skinny_mm_op)
            assert weight_bytes(node) == sum(t.numel() * t.element_size() for t in args[1:])
            assert not {aten.mm.default, aten.mul.Tensor, aten.cat.default} & set(targets(module))
            want = exact(x, weight, scale, None, *args[3:])
            errors = [(out.double() - want).square().mean().sqrt() for out in (module(*inputs)[0], fn(*args))]
            assert 0 < errors[0] <= 1.05 * errors[1]
    assert "more than 128 rows" in refused(in_float4, [x.repeat(33, 1), weight, scale])


def with_float_scales(x, weight, scale):
    return F.linear(x, (e2m1(weight) * (scale.float() + 1).repeat_interleave(16, 1)).to(x.dtype))


def of_other_groups(x, weight, scale):
    return F.linear(x, (e2m1(weight) * scale[:, ::2].float().repeat_interleave(32, 1)).to(x.dtype))


def of_another_unit(x, weight, scale):
    return F.linear(x, (e2m1(weight) / 16384 * 8192 * scale.float().repeat_interleave(16, 1)).to(x.dtype))


def bytes_as_scales(x, weight, scale):
    groups = scale.view(torch.uint8)[:, ::2].repeat_interleave(32, 1)
    return F.linear(x, (unpacked(weight).float() * groups).to(x.dtype))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (with_float_scales, "its 4-bit floats have no scales of e4m3 or e8m0"),
        (of_other_groups, "its scales are of no known format: float8_e4m3fn of shape [320, 16], one for 1 x 32"),
        (of_another_unit, "its weight of 8 or 4 bits is not dequantized as numbers times scales"),
        (bytes_as_scales, "its scales are of no known format"),
    ],
)
def test_near_misses_of_4_bit_floats(fn, reason):
    weight, scale, *_ = stored(torch.randn(N, K), "nvfp4")
    assert reason in refused(fn, [torch.randn(M, K).bfloat16(), weight, scale])


def halves(x, weight, scale, zero, high=4, offset=8):
    """As `unpacked` and `dequantized` compute it, with numbers that can be wrong."""
    numbers = (torch.stack([weight & 15, weight >> high], 2).flatten(1) ^ 8).to(torch.int8) - offset
    wide = [part.float().repeat_interleave(weight.shape[1] * 2 // part.shape[1], 1) for part in (scale, zero)]
    return F.linear(x, (numbers.float() * wide[0] + wide[1]).to(x.dtype))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda *args: halves(*args, high=3), "the weight is computed here"),
        (lambda *args: halves(*args, offset=7), "the weight is computed here"),
        (
            lambda x, weight, scale, zero: halves(x, weight, scale, zero.repeat_interleave(2, 1)),
            "its zero points are not those of groups of 4 bits",
        ),
        (
            lambda x, weight, scale, zero: F.linear(x[:, :256], weight.to(x.dtype) * scale.repeat_interleave(64, 1)),
            "its weight of 8 or 4 bits is not dequantized as numbers times scales",
        ),
    ],
)
def test_near_misses_of_4_bits(fn, reason):
    weight, scale, zero = stored(torch.randn(N, K), "int4-128", torch.bfloat16)
    assert reason in refused(fn, [torch.randn(M, K).bfloat16(), weight, scale, zero])


def after(x, weight, scale):
    """As torchao's `Int8Tensor` computes it: scales after the product."""
    return torch.mm(x, weight.t().to(x.dtype)) * scale.to(x.dtype).flatten()


def after_a_row(x, weight, scale):
    return F.linear(x, weight.to(x.dtype)) * scale.t().to(x.dtype)


@pytest.mark.parametrize(
    ("after", "shape"),
    [
        *((after, shape) for shape in ((N, 1), (N,), (1, N), (2, N // 2), (1, 1), (1,))),
        (after_a_row, (N, 1)),
        (after_a_row, (1, 1)),
    ],
)
def test_scales_after_the_product(after, shape):
    x, weight, scale = tensors("int8")
    args = [x, weight, scale[: math.prod(shape)].reshape(shape).contiguous()]
    module, inputs = capture(after, *args)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert texts(result.done) == "skinny_mm: 4 rows, weight 320 x 512 of 8 bits", texts(result.refused)
    assert not {aten.mm.default, aten.mul.Tensor} & set(targets(module))
    want = exact(x, weight, args[2].view(-1, 1), None)
    errors = [(out.double() - want).square().mean().sqrt() for out in (module(*inputs)[0], after(*args))]
    assert 0 < errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, weight, scale: torch.mm(x, weight.t().to(x.dtype)),
        lambda x, weight, scale: torch.mm(x, weight.t().to(x.dtype)) + scale.to(x.dtype).flatten(),
        lambda x, weight, scale: torch.mm(x, weight.t().to(x.dtype)) * scale[: len(x)].to(x.dtype),
    ],
)
def test_int8_without_scales_for_columns(fn):
    assert "its weight of 8 bits has no scale for each column" in refused(fn, tensors("int8"))


@pytest.mark.parametrize("kind", ["row", "int8"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, weight, scale: F.linear(x, (weight.to(torch.bool).float() * scale).to(x.dtype)),
        lambda x, weight, scale: F.linear(x, (weight.to(torch.int32).float() * scale).to(x.dtype)),
        lambda x, weight, scale: F.linear(x, (weight.float() * scale).to(torch.int32).to(x.dtype)),
    ],
    ids=["bool", "before", "after"],
)
def test_numbers_that_become_integers(fn, kind):
    assert "not dequantized as numbers times scales" in refused(fn, tensors(kind))


def test_scales_that_become_integers():
    def fn(x, weight, scale):
        return F.linear(x, weight.to(x.dtype)) * scale.flatten().to(torch.int32).to(x.dtype)

    assert "its weight of 8 bits has no scale for each column" in refused(fn, tensors("int8"))


def test_int8_in_other_forms():
    for fn in (as_linear, in_bfloat16):
        args = tensors("int8")
        module, inputs = capture(fn, *args)
        assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
        check(module, inputs, fn, args)
