"""Products with weights of 8 and 4 bits: formats, errors, launches that fit, and on a GPU the kernels."""

from __future__ import annotations

import os

import pytest
import torch

from spec_ops.backends.weight_format import WeightFormat, dequantized, unpacked, weight_format
from spec_ops.ops.linear import add_skinny_mm_op, scaled_skinny_mm_op, skinny_mm_op
from tests.helpers.stored_weights import KINDS, exact, stored

GPU = pytest.mark.gpu
F8 = torch.float8_e4m3fn


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape).to(dtype)


@pytest.mark.parametrize(
    ("weight", "scale", "expected"),
    [
        (zeros(300, 256, dtype=torch.bfloat16), None, ("plain", 300, 256)),
        (zeros(300, 256, dtype=F8), zeros(1, 1), ("float8", 300, 256)),
        (zeros(300, 256, dtype=F8), zeros(300, 1, dtype=torch.bfloat16), ("float8", 1, 256)),
        (zeros(300, 256, dtype=F8), zeros(3, 2), ("float8", 128, 128)),
        (zeros(300, 320, dtype=F8), zeros(3, 3), ("float8", 128, 128)),
        (zeros(300, 128, dtype=F8), zeros(3, 1), ("float8", 128, 128)),
        (zeros(300, 256, dtype=F8), zeros(300, 4), ("float8", 1, 64)),
        (zeros(300, 256, dtype=torch.int8), zeros(1, 1), ("int8", 300, 256)),
        (zeros(300, 256, dtype=torch.int8), zeros(300, 1), ("int8", 1, 256)),
        (zeros(300, 256, dtype=torch.int8), zeros(300, 2), ("int8", 1, 128)),
        (zeros(300, 128, dtype=torch.uint8), zeros(300, 2), ("int4", 1, 128)),
        (zeros(300, 128, dtype=torch.uint8), zeros(300, 1), ("int4", 1, 256)),
    ],
)
def test_formats(weight, scale, expected):
    assert weight_format("op", weight, scale, None) == WeightFormat(*expected)


def test_assembly_of_4_bits():
    """Instruction by instruction, on all bytes: what GPUs run in place of what the interpreter does."""
    quantized = pytest.importorskip("spec_ops.backends.triton.linear.quantized", reason="triton comes for Linux only")
    prmt = {"prmt.b32": lambda a, b, s: sum(((a | b << 32) >> 8 * (s >> 4 * i & 7) & 255) << 8 * i for i in range(4))}
    other = {"mov.b32": lambda a: a, "shr.u32": lambda a, b: a >> b, "lop3.b32": lambda a, b, c, table: (a & b) ^ c}
    for source, dtype, kind in ((quantized._PAIRS_BF16, torch.bfloat16, "bf16"), (quantized._PAIRS_FP16, torch.float16, "f16")):

        def halves(word: int, dtype=dtype) -> torch.Tensor:
            return torch.tensor([word - (word >> 31 << 32)], dtype=torch.int32).view(dtype)

        run = prmt | other | {f"sub.{kind}x2": lambda a, b: halves(a) - halves(b)}
        steps = source.value.strip("{ }").split("; ")
        assert steps.pop(0).startswith(".reg .b32")
        for word in (0x03020100, 0x7F80FF08, *(0x01010101 * i + 0x10203040 & 0xFFFFFFFF for i in range(256))):
            registers = {"$4": word}
            for step in steps:
                op, to, *given = step.rstrip(";").replace(",", " ").split()
                assert op != "lop3.b32" or given[-1] == "0x6A"
                registers[to] = run[op](*(registers[g] if g in registers else int(g, 0) for g in given))
            got = torch.cat([registers[f"${i}"] for i in range(4)]).float()
            stored_bytes = torch.tensor([[word >> 8 * i & 255 for i in range(4)]], dtype=torch.uint8)
            assert got.tolist() == unpacked(stored_bytes)[0].tolist()


def test_dequantized():
    """By hand, number by number."""
    weight = torch.tensor([[0.5, -2, 448] + [0] * 125, [1, 2, 3] + [1] * 125]).to(F8)
    assert dequantized(weight, torch.tensor([[0.5], [2.0]]))[:, :4].tolist() == [[0.25, -1, 224, 0], [2, 4, 6, 2]]
    blocks = torch.arange(6.0).view(3, 2) + 1
    full = dequantized(torch.ones(257, 200).to(F8), blocks)
    assert full.shape == (257, 200)
    assert [full[i, j].item() for i, j in ((0, 0), (127, 128), (128, 127), (255, 128), (256, 0), (256, 199))] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    packed = torch.tensor([[0x70, 0x8F] + [0] * 14] * 2, dtype=torch.uint8)  # 0, 7, -1, -8
    values = dequantized(packed, torch.tensor([[2.0], [1.0]]), torch.tensor([[0.5], [0.0]]))
    assert values[:, :5].tolist() == [[0.5, 14.5, -1.5, -15.5, 0.5], [0, 7, -1, -8, 0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_that_of_a_product_with_the_dequantized_weight(kind, dtype):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 512, generator=g).to(dtype), torch.randn(256, 512, generator=g)
    weight, scale, zero = stored(w, kind, torch.bfloat16 if kind.startswith("int4") else torch.float32)
    want = exact(x, weight, scale, zero)
    ours = skinny_mm_op(x, weight, None, scale, zero)
    theirs = x @ dequantized(weight, scale, zero).to(dtype).t()
    errors = [(out.double() - want).square().mean().sqrt() for out in (ours, theirs)]
    assert errors[0] <= 1.05 * errors[1]
    lost = (dequantized(weight, scale, zero) - w).square().mean().sqrt() / w.square().mean().sqrt()
    assert lost < (0.12 if kind.startswith("int4") else 0.03)  # half a step of 15 in a range of about 5.5; of 2^-3


WEIGHT = zeros(300, 256, dtype=F8)


@pytest.mark.parametrize(
    ("weight", "scale", "zero", "error", "message"),
    [
        (WEIGHT, None, None, ValueError, "`scale` must be given beside a weight of torch.float8_e4m3fn, got None"),
        (
            WEIGHT.view(torch.uint8).long(),
            zeros(1, 1),
            None,
            TypeError,
            "`weight` must be of 16 or 32 bits, float8_e4m3fn, int8",
        ),
        (WEIGHT.to(torch.float8_e5m2), zeros(1, 1), None, TypeError, "got torch.float8_e5m2"),
        (WEIGHT.bfloat16(), zeros(1, 1), None, ValueError, "`scale` and `zero` must be None beside a weight of torch.bfloat16"),
        (WEIGHT, zeros(1, 1).long(), None, TypeError, "`scale` must be of float32, bfloat16 or float16, got torch.int64"),
        (WEIGHT, zeros(2, 3), None, ValueError, r"\[1, 1\], \[300, 1\], .*, or \[3, 2\] for blocks .* got shape \(2, 3\)"),
        (WEIGHT, zeros(300), None, ValueError, r"got shape \(300,\)"),
        (WEIGHT, zeros(300, 128), None, ValueError, r"got shape \(300, 128\)"),  # a group of 2
        (WEIGHT, zeros(1, 1), zeros(1, 1), ValueError, "`zero` must be None beside float8"),
        (WEIGHT.to(torch.uint8), zeros(3, 4), None, ValueError, r"of a weight 300 x 512 of int4 must be .* got shape \(3, 4\)"),
        (
            WEIGHT.to(torch.uint8),
            zeros(300, 4),
            zeros(300, 2),
            ValueError,
            r"of the shape \(300, 4\) of `scale`, got .*\(300, 2\)",
        ),
    ],
)
def test_weights_of_no_format(weight, scale, zero, error, message):
    x = zeros(2, 256, dtype=torch.bfloat16)
    with pytest.raises(error, match=f"skinny_mm: {message}" if message[0] == "`" else message):
        skinny_mm_op(x.to("meta"), *(t if t is None else t.to("meta") for t in (weight, None, scale, zero)))
    with pytest.raises(error):
        skinny_mm_op(x, weight, None, scale, zero)


def test_columns_that_differ():
    weight = torch.zeros(8, 256, dtype=F8, device="meta")
    with pytest.raises(ValueError, match=r"skinny_mm: `x` must have the 256 columns of `weight`, got shape \(2, 128\)"):
        skinny_mm_op(torch.zeros(2, 128, device="meta"), weight, None, torch.zeros(1, 1, device="meta"))


needs_triton = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what is launched")
FORMATS = {
    "tensor": ("float8", 0, 0),
    "row": ("float8", 1, 0),
    "block": ("float8", 128, 128),
    "group": ("float8", 1, 64),
    "int8": ("int8", 1, 0),
    "int4": ("int4", 1, 128),
}
SHAPES = [(6144, 4096), (28672, 4096), (4096, 14336), (5120, 2880), (1536, 7168), (100, 64), (32000, 4096)]


@needs_triton
@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_size_has_a_config_that_fits(kind, arch):
    linear = pytest.importorskip("spec_ops.backends.triton.linear.skinny_mm", reason="triton comes for Linux only")
    from spec_ops.backends.triton.runtime import ahead

    stored_kind, rows, columns = FORMATS[kind]
    for n, k in SHAPES:
        if kind == "int4" and k % columns:
            continue
        stored_as = WeightFormat(stored_kind, rows or n, columns or k)
        for m in (1, 8, 9, 16, 17, 33, 64):
            for sms in (1, 132, 188):
                config = linear.choose(m, n, k, sms, arch, stored_as)
                blocks = -(-k // config.block_k)
                assert config.block_m >= m
                assert 1 <= config.splits <= blocks
                assert k % config.chunk == 0
                assert config.chunk <= stored_as.columns
                assert config.block_n < 64 or config.block_k <= stored_as.columns
                one = config.block_k * (config.block_n * stored_as.bits // 8 + 2 * config.block_m)
                assert config.num_stages - 1 >= min(2, blocks)
                assert config.programs * ((config.num_stages - 1) * one + 1024) <= ahead.SHARED_LIMIT[arch] + 1024


def ahead_cases() -> list:
    try:
        from spec_ops.backends.triton.linear import norm, skinny_mm
    except ImportError:  # triton comes for Linux only
        return []
    return [v for v in (*skinny_mm.ahead(), *norm.ahead()) if any(kind in v.name for kind in ("float8", "int8", "int4"))]


@needs_triton
@pytest.mark.parametrize("variant", ahead_cases(), ids=lambda variant: variant.name)
def test_kernels_fit_without_spills(variant):
    from spec_ops.backends.triton.runtime import ahead

    arch = variant.archs[-1]
    used = ahead.compile_ahead(variant, arch)
    import triton

    # ptxas of triton 3.6 makes calls of TMA loads on sm_120, which take 8 or 16 bytes of arguments on the stack: no spill.
    # And for 16 rows of int8 ptxas keeps 8 bytes on the stack of sm_100's kernel, outside of its loop.
    outside = 8 if "skinny_mm int8, 16 x" in variant.name and arch in (100, 103) else 0
    assert used.spill_bytes <= (16 if arch == 120 and triton.__version__.startswith("3.6.") else outside)
    assert used.loop_spills == 0
    resident = ahead.resident_blocks(used, variant.num_warps, arch)
    assert resident == variant.programs if variant.early else resident >= variant.programs


@needs_triton
def test_numbers_of_8_bits_take_no_slow_conversion():
    """`cvt` between the formats of 16 bits runs at a quarter of the rate at which an H200's memory gives weights."""
    from spec_ops.backends.triton.runtime import ahead

    variant = next(v for v in ahead_cases() if v.name.startswith("skinny_mm float8, 4 ") and 90 in v.archs)
    ptx = ahead.compiled(variant, 90).asm["ptx"]
    assert "cvt.rn.f16x2.e4m3x2" in ptx
    assert "cvt.bf16.f16" not in ptx


def on_gpu(m: int, n: int, k: int, kind: str) -> tuple:
    g = torch.Generator("cuda").manual_seed(m + n + k)
    x, w = (torch.randn(shape, generator=g, device="cuda") for shape in ((m, k), (n, k)))
    weight, scale, zero = stored(w, kind, torch.bfloat16 if kind.startswith("int4") else torch.float32)
    return x.bfloat16(), weight, scale, zero


@GPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1536, 7168), (1000, 1280)])
def test_error_on_a_gpu(n, k, kind):
    for m in (1, 4, 8, 9, 16, 17, 32, 33, 64):
        x, weight, scale, zero = on_gpu(m, n, k, kind)
        want = exact(x, weight, scale, zero)
        rounded = x @ dequantized(weight, scale, zero).bfloat16().t()
        errors = [(out.double() - want).square().mean().sqrt() for out in (skinny_mm_op(x, weight, None, scale, zero), rounded)]
        assert errors[0] <= 1.05 * errors[1], m


@GPU
@pytest.mark.parametrize("kind", ["tensor", "row", "block", "int4-128"])
def test_norm_on_a_gpu(kind):
    for m in (1, 4, 16, 32):
        x, w0, s0, z0 = on_gpu(m, 4096, 4096, kind)
        _, w1, s1, z1 = on_gpu(m, 6144, 4096, kind)
        residual, g = torch.randn_like(x), torch.rand(4096, device="cuda").bfloat16() + 0.5
        y, z, squares = add_skinny_mm_op(x, w0, residual, g, s0, z0)
        assert torch.equal(y, skinny_mm_op(x, w0, None, s0, z0) + residual)
        got = scaled_skinny_mm_op(z, w1, None, squares, 1e-5, s1, z1)
        rstd = torch.rsqrt(y.double().square().mean(1, True) + 1e-5)
        torch.testing.assert_close(got.double(), exact(z, w1, s1, z1) * rstd, rtol=2**-8, atol=2**-6)


@GPU
def test_results_repeat_on_a_gpu():
    for kind in ("row", "block", "int4-128"):
        for m, n, k in ((4, 1536, 7168), (16, 4096, 4096), (64, 1536, 7168)):
            x, weight, scale, zero = on_gpu(m, n, k, kind)
            first = skinny_mm_op(x, weight, None, scale, zero)
            assert all(torch.equal(first, skinny_mm_op(x, weight, None, scale, zero)) for _ in range(100))
