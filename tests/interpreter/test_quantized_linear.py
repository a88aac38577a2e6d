"""Products with weights of 8 and 4 bits in Triton's interpreter, against float64 on the dequantized weight.

float16, since the interpreter truncates to bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spec_ops.backends.squares import sums_of
from spec_ops.backends.triton.linear import norm as norm_linear
from spec_ops.backends.triton.linear import skinny_mm as linear
from spec_ops.backends.triton.linear import tiles
from spec_ops.backends.triton.runtime.launch import recorded
from spec_ops.backends.weight_format import WeightFormat, dequantized, weight_format
from spec_ops.ops.reference import linear as reference
from tests.helpers.pairs import pairwise
from tests.helpers.stored_weights import KINDS, exact, stored

EPS = 1e-5
# Rows, n and k that no tile divides; 320 and 832 are no multiples of 128.
SIZES = [(1, 16, 768), (4, 150, 1280), (9, 33, 768), (16, 20, 1024), (31, 130, 1280), (64, 100, 768), (97, 150, 768)]
SIZES += [(128, 290, 1280)]

SCALES_OF_E4M3 = torch.tensor([1, 7, 8, 21, 56, 77, 119, 126], dtype=torch.uint8).view(torch.float8_e4m3fn)  # to 448


def tensors(m: int, n: int, k: int, kind: str) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(m + n + k)
    x, weight, bias = (torch.randn(shape, generator=g) for shape in ((m, k), (n, k), (n,)))
    return x.half(), bias.half(), *stored(weight * 2.0 ** torch.randint(-4, 4, (n, 1), generator=g), kind)


def format_of(weight: torch.Tensor, *scales: torch.Tensor | None) -> WeightFormat:
    return weight_format("", weight, *scales)


@pairwise(kind=KINDS, size=SIZES, splits=(1, 2, 3))
def test_like_float64(kind, size, splits):
    if kind.startswith("int4") and size[0] > 64:
        size = (64, *size[1:])
    x, bias, weight, *scales = tensors(*size, kind)
    config = replace(tiles.choose(*size, 1, 90, format_of(weight, *scales)), splits=splits)
    got = linear.skinny_mm(x, weight, bias, *scales, config=config)
    want = exact(x, weight, *scales) + bias.double()
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=2**-12 * want.abs().max().item())


@pytest.mark.parametrize("kind", ["tensor", "row", "block", "group", "int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [3, 20, 64, 100])
def test_k_that_128_does_not_divide(m, kind):
    """2880 of gpt-oss: blocks of 128 whose last one is half."""
    x, bias, weight, *scales = tensors(m, 140, 832, kind)
    got = linear.skinny_mm(x, weight, bias, *scales)
    torch.testing.assert_close(got.double(), exact(x, weight, *scales) + bias.double(), rtol=2**-10, atol=2**-8)


@pytest.mark.parametrize("m", [20, 64, 100])
def test_scales_beyond_the_weight_are_not_read(m):
    """Scales are a slice of some that are no numbers, which times the rows' zeros beyond k would be no number either."""
    n, k = 70, 320
    x, bias, weight, scale, *rest = tensors(m, n, k, "mxfp4")
    around = torch.full((n + 1, 32), 255, dtype=torch.uint8)
    inside = around[:n, : scale.shape[1]]
    inside.copy_(scale)
    got = linear.skinny_mm(x, weight, bias, inside, *rest)
    assert torch.equal(got, linear.skinny_mm(x, weight, bias, scale, *rest))
    torch.testing.assert_close(got.double(), exact(x, weight, scale, *rest) + bias.double(), rtol=2**-10, atol=2**-8)


@pytest.mark.parametrize("k", [64, 128, 256])
@pytest.mark.parametrize("m", [1, 9, 32, 64])
def test_int4_of_one_group(m, k):
    x, bias, weight, *scales = tensors(m, 40, k, f"int4-{k}")
    got = linear.skinny_mm(x, weight, bias, *scales)
    torch.testing.assert_close(got.double(), exact(x, weight, *scales) + bias.double(), rtol=2**-10, atol=2**-8)


@pytest.mark.parametrize(("m", "scales_as"), [(8, torch.float32), (16, torch.float16)])
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_that_of_a_product_with_the_dequantized_weight(kind, m, scales_as):
    g = torch.Generator().manual_seed(0)
    x, (weight, *scales) = (
        torch.randn(m, 1024, generator=g).half(),
        stored(torch.randn(256, 1024, generator=g), kind, scales_as),
    )
    rounded = dequantized(weight, *scales).half()
    want = exact(x, weight, *scales)
    ours, theirs = (
        (out.double() - want).square().mean().sqrt()
        for out in (linear.skinny_mm(x, weight, None, *scales), linear.skinny_mm(x, rounded, None))
    )
    assert ours <= 1.05 * theirs


@pairwise(
    kind=["int4-128", "int4-256", "nvfp4", "mxfp4"], m=(1, 3, 8), tile=("HOPPER_TILE", "NARROW_HOPPER_TILE"), splits=(1, 2)
)
def test_tiles_of_a_few_rows(kind, m, tile, splits):
    """Of 2 rows, 4 and 8; k is no multiple of a block."""
    x, bias, weight, *scales = tensors(m, 70, 1280, kind)
    rows = next(rows for rows in tiles.HOPPER_ROWS if m <= rows)
    config = tiles.fitted(getattr(tiles, tile)._replace(block_m=rows), 70, 1280, 4, 90, format_of(weight, *scales), splits)
    got = linear.skinny_mm(x, weight, bias, *scales, config=config)
    want = exact(x, weight, *scales) + bias.double()
    torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=2**-12 * want.abs().max().item())


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("splits", [1, 2])
def test_scales_of_mxfp4_that_one_factor_has_no_room_for(m, splits):
    """Each output is one number times its scale. float16 has one factor in the interpreter alone."""
    numbers, x = torch.arange(256, dtype=torch.uint8).flip(0).view(1, 256), torch.eye(m, 512).half()
    for byte in (120, 133, 134, 139):  # 2^-7 to 2^12; up to 2^6 there is room
        scale = torch.full((1, 16), 127, dtype=torch.uint8)
        scale[0, 0] = byte
        config = replace(tiles.choose(m, 1, 512, 1, 90, format_of(numbers, scale, None)), splits=splits)
        got = linear.skinny_mm(x, numbers, None, scale, config=config)
        assert torch.equal(got[:, 0], dequantized(numbers, scale)[0, :m].half())


@pytest.mark.parametrize("m", [1, 16])
def test_int4_beside_rows_of_one_sign(m):
    """What numbers have too much is taken off a sum a thousand times as large as the result."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.rand(m, 1024, generator=g).half() + 3, torch.randint(0, 256, (64, 512), generator=g, dtype=torch.uint8)
    scale, zero = torch.full((64, 8), 0.25), torch.full((64, 8), 0.125)  # the mean of a weight is 0
    want = exact(x, weight, scale, zero)
    got = linear.skinny_mm(x, weight, None, scale, zero)
    torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=2**-10 * want.square().mean().sqrt().item())


@pytest.mark.parametrize("kind", ["row", "block", "int4-128", "nvfp4"])
@pytest.mark.parametrize(("m", "splits"), [(4, 2), (33, 1)])
def test_norm_between_two_products(m, splits, kind):
    x, _, w0, *s0 = tensors(m, 768, 512, kind)
    residual, g = torch.randn(m, 768).half(), torch.rand(768).half() + 0.5
    config = replace(tiles.choose(m, 768, 512, 4, 90, format_of(w0, *s0)), splits=splits)
    y, z, squares = norm_linear.add_skinny_mm(x, w0, residual, g, *s0, config=config)
    assert torch.equal(y, linear.skinny_mm(x, w0, None, *s0, config=config) + residual)
    assert torch.equal(z, (y.float() * g.float()).half())
    assert squares.shape == (m, sums_of(768))
    _, bias, w1, *s1 = tensors(m, 50, 768, kind)
    got = norm_linear.scaled_skinny_mm(z * 2**-4, w1, bias, squares * 2**-8, EPS, *s1)
    want = reference.scaled_skinny_mm((z * 2**-4).double(), w1, bias, squares * 2**-8, EPS, *s1)
    torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=2**-8)


@pytest.mark.parametrize("kind", ["row", "block", "int8", "int4-128", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_rows_that_are_loaded(m, kind):
    """The bits are those of rows that TMA reads. k is no multiple of a block, and around the rows lies what is no number."""
    k = 896 if kind in ("int4-128", "block") else 832
    x, bias, weight, *scales = tensors(m, 50, k, kind)
    around = torch.full((m + 2, k + 64), float("nan"), dtype=x.dtype)
    inside = around[1 : m + 1, :k]
    inside.copy_(x)
    for splits in (1, 2):
        config = replace(tiles.choose(m, 50, k, 1, 90, format_of(weight, *scales)), splits=splits, loaded=False)
        with recorded() as launches:
            linear.skinny_mm(inside, weight, bias, *scales, config=replace(config, loaded=True))
        assert launches[0].arguments["x"] is inside
        want = linear.skinny_mm(x, weight, bias, *scales, config=config)
        assert torch.equal(linear.skinny_mm(inside, weight, bias, *scales, config=replace(config, loaded=True)), want)
    torch.testing.assert_close(want.double(), exact(x, weight, *scales) + bias.double(), rtol=2**-10, atol=2**-8)


@pytest.mark.parametrize("kind", ["row", "block"])
def test_norm_between_products_whose_rows_are_loaded(kind):
    x, bias, weight, *scales = tensors(2, 96, 512, kind)
    residual, g, squares = torch.randn(2, 96).half(), torch.rand(96).half() + 0.5, torch.rand(2, sums_of(512))
    config = replace(tiles.choose(2, 96, 512, 1, 90, format_of(weight, *scales)), loaded=False)
    for product, args in (
        (norm_linear.add_skinny_mm, (x, weight, residual, g, *scales)),
        (norm_linear.scaled_skinny_mm, (x, weight, bias, squares, EPS, *scales)),
    ):
        got, want = (product(*args, config=replace(config, loaded=loaded)) for loaded in (True, False))
        for ours, theirs in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
            assert torch.equal(ours, theirs)


def test_rows_that_lie_anywhere():
    """What TMA reads is not copied, and loaded only where loads are wide; a single row is, wherever the next one would be."""
    x, _, weight, *scales = tensors(2, 32, 512, "row")
    config = replace(tiles.choose(2, 32, 512, 1, 90, format_of(weight, *scales)), loaded=True)
    want = linear.skinny_mm(x, weight, None, *scales)
    for stride, m, loaded in ((520, 2, False), (528, 2, True), (520, 1, True)):
        rows = torch.zeros(2, stride).half()[:m, :512]
        rows.copy_(x[:m])
        with recorded() as launches:
            linear.skinny_mm(rows, weight, None, *scales, config=config)
        assert (launches[0].arguments["x"] is rows) == loaded
        assert torch.equal(linear.skinny_mm(rows, weight, None, *scales, config=config), want[:m])


def test_every_number_of_4_bits():
    numbers = torch.arange(256, dtype=torch.uint8).view(1, 256)
    one, x = torch.ones(1, 512 // 128), torch.eye(64, 512).half()
    for start in range(0, 512, 64):
        got = linear.skinny_mm(x.roll(start, 1), numbers, None, one)
        assert torch.equal(got[:, 0], dequantized(numbers, one)[0, start : start + 64].half())


@pytest.mark.parametrize("scale", [*SCALES_OF_E4M3, *(torch.tensor(e, dtype=torch.uint8) for e in (104, 110, 127, 139))])
def test_every_4_bit_float(scale):
    """Times scales of all magnitudes, exactly: of e4m3 subnormal ones too, and of e8m0 those that float16 has room for."""
    numbers = torch.arange(256, dtype=torch.uint8).view(1, 256)
    scales = scale.repeat(1, 512 // (32 if scale.dtype == torch.uint8 else 16))
    whole = None if scale.dtype == torch.uint8 else torch.tensor([0.75])
    for start in range(0, 512, 64):
        got = linear.skinny_mm(torch.eye(64, 512).half().roll(start, 1), numbers, None, scales, None, whole)
        assert torch.equal(got[:, 0], dequantized(numbers, scales, None, whole)[0, start : start + 64].half())


def test_every_number_of_8_bits():
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 127) != 127].view(torch.float8_e4m3fn)  # without NaN
    weight = torch.cat([numbers, torch.zeros(2).to(torch.float8_e4m3fn)]).view(1, 256)
    for start in range(0, 256, 64):
        got = linear.skinny_mm(torch.eye(64, 256).half().roll(start, 1), weight, None, torch.ones(1, 1))
        assert torch.equal(got[:, 0], weight[0, start : start + 64].half())


def test_every_integer_of_8_bits():
    weight = torch.arange(-128, 128).to(torch.int8).view(1, 256)
    for start in range(0, 256, 64):
        got = linear.skinny_mm(torch.eye(64, 256).half().roll(start, 1), weight, None, torch.ones(1, 1))
        assert torch.equal(got[:, 0], weight[0, start : start + 64].half())


def test_scales_of_other_strides_and_dtypes():
    x, _, weight, scale, zero = tensors(4, 64, 512, "int4-128")
    want = linear.skinny_mm(x, weight, None, scale, zero)
    assert torch.equal(linear.skinny_mm(x, weight, None, scale.contiguous(), zero), want)
    _, _, weight, scale, _ = tensors(4, 64, 512, "row")
    got = linear.skinny_mm(x, weight, None, scale.bfloat16())
    assert torch.equal(got, linear.skinny_mm(x, weight, None, scale.bfloat16().float()))
