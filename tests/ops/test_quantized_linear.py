"""Products with weights of 8 and 4 bits: formats, errors, launches that fit, and on a GPU the kernels."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from spec_ops.backends.triton.linear.hopper_tiles import most_rows
from spec_ops.backends.weight_format import WeightFormat, dequantized, e2m1, e8m0, packed_e2m1, unpacked, weight_format
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
        (zeros(300, 128, dtype=torch.uint8), zeros(300, 16, dtype=F8), ("nvfp4", 1, 16)),
        (zeros(300, 128, dtype=torch.uint8), zeros(300, 8, dtype=torch.uint8), ("mxfp4", 1, 32)),
    ],
)
def test_formats(weight, scale, expected):
    assert weight_format("op", weight, scale, None) == WeightFormat(*expected)


WORDS = (0x03020100, 0x7F80FF08, *(0x01010101 * i + 0x10203040 & 0xFFFFFFFF for i in range(256)))  # all bytes


def _prmt(a: int, b: int, selector: int) -> int:
    """Bytes of both words; 8 and more repeat a byte's sign."""
    taken = [(a | b << 32) >> 8 * (selector >> 4 * i & 7) & 255 for i in range(4)]
    signs = [selector >> 4 * i & 8 for i in range(4)]
    return sum(
        (byte if not sign else 255 * (byte >> 7)) << 8 * i for i, (byte, sign) in enumerate(zip(taken, signs, strict=True))
    )


def _pair(word: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([word - (word >> 31 << 32)], dtype=torch.int32).view(dtype)


def run_assembly(source: str, dtype: torch.dtype, registers: dict[str, int]) -> torch.Tensor:
    """The pairs `$0` to `$3`, or `$0` alone, that PTX computes, instruction by instruction."""
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    integers = {
        "prmt.b32": _prmt,
        "mov.b32": lambda a: a,
        "shr.u32": lambda a, b: a >> b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "and.b32": lambda a, b: a & b,
        "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
        "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
        "max.u32": max,
        "min.u32": min,
        "lop3.b32": lambda a, b, c, table: {0x6A: (a & b) ^ c, 0xEA: (a & b) | c}[table],
    }
    floats = {f"sub.{kind}x2": torch.sub, f"mul.{kind}x2": torch.mul, f"mul.rn.{kind}x2": torch.mul}
    floats[f"fma.rn.{kind}x2"] = lambda a, b, c: (a.double() * b.double() + c.double()).to(dtype)
    steps = source.strip("{ }").split("; ")
    assert steps.pop(0).startswith(".reg .b32")
    for step in steps:
        op, to, *given = step.rstrip(";").replace(",", " ").split()
        words = [registers[g] if g in registers else int(g, 0) for g in given]
        if op in floats:
            low, high = floats[op](*(_pair(word, dtype) for word in words)).view(torch.int16).tolist()
            registers[to] = (low & 0xFFFF) | (high & 0xFFFF) << 16
        else:
            registers[to] = integers[op](*words)
    return torch.cat([_pair(registers[f"${i}"], dtype) for i in range(4) if f"${i}" in registers]).float()


def bytes_of(word: int) -> torch.Tensor:
    return torch.tensor([[word >> 8 * i & 255 for i in range(4)]], dtype=torch.uint8)


def test_assembly_of_4_bits():
    """On all bytes: what GPUs run in place of what the interpreter does."""
    quantized = pytest.importorskip("spec_ops.backends.triton.linear.quantized", reason="triton comes for Linux only")
    for source, dtype in ((quantized._PAIRS_BF16, torch.bfloat16), (quantized._PAIRS_FP16, torch.float16)):
        for word in WORDS:
            got = run_assembly(source.value, dtype, {"$4": word})
            assert got.tolist() == unpacked(bytes_of(word))[0].tolist()


def _twice(number: torch.Tensor) -> int:
    return (number.view(torch.int16).item() & 0xFFFF) * 0x10001


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_assembly_of_words_of_int4(dtype):
    """Pairs of numbers i and i + 4, plus what sums lose again."""
    int4 = pytest.importorskip("spec_ops.backends.triton.linear.int4", reason="triton comes for Linux only")
    name = "BF16" if dtype == torch.bfloat16 else "FP16"
    for word in WORDS:
        pairs = [run_assembly(getattr(int4, f"_{name}_{i}").value, dtype, {"$1": word})[:2] for i in range(4)]
        want = unpacked(bytes_of(word))[0] + getattr(int4, f"OFFSET_{name}").value
        assert torch.stack(pairs, 1).flatten().tolist() == want.tolist()


@pytest.mark.parametrize("kind", ["INT4_SCALED", "INT4_SHIFTED", "NVFP4", "MXFP4"])
def test_assembly_of_the_hopper_kernel(kind):
    """On all bytes, one at a time."""
    hopper_mm = pytest.importorskip("spec_ops.backends.triton.linear.hopper_mm", reason="triton comes for Linux only")
    scales = {"NVFP4": [2.0**-9, 0.8125, 448.0], "MXFP4": [2.0**-120, 1.0, 2.0**120]}.get(kind, [0.0137, 3.3, 1.0])
    zero = torch.tensor(0.41 if kind == "INT4_SHIFTED" else 0.0).bfloat16()
    for scale in torch.tensor(scales).bfloat16():
        given = scale * hopper_mm.NV_UNIT.value if kind == "NVFP4" else scale
        for byte in range(256):
            registers = {"$1": byte, "$2": _twice(given), "$3": _twice(zero)}
            got = run_assembly(getattr(hopper_mm, kind).value, torch.bfloat16, registers)[:2]  # `$0` is all that it gives
            stored_as = torch.tensor([[byte]], dtype=torch.uint8)
            numbers = (unpacked if kind.startswith("INT4") else e2m1)(stored_as)[0].double()
            want = (numbers * scale.double() + zero.double()).bfloat16().float()
            assert (got * (hopper_mm.NV_REST.value if kind == "NVFP4" else 1.0)).tolist() == want.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unit", [False, True])
def test_assembly_of_4_bit_floats(dtype, unit):
    """Times least and greatest scales: e4m3, which comes multiplied by what is taken off again; e8m0."""
    float4 = pytest.importorskip("spec_ops.backends.triton.linear.float4", reason="triton comes for Linux only")
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    source = float4._PAIRS[kind, unit].value
    scales = [2.0**-9, 7 * 2.0**-9, 0.8125, 448.0] if not unit else [2.0**-13, 1.0, 2.0**13]
    scales += [2.0**-120, 2.0**125] if unit and kind == "bf16" else []
    rest = 1.0 if unit else float4.NV_REST.value
    given = torch.tensor([scale if unit else scale * float4._NV_UNIT[kind] for scale in scales]).to(dtype)
    words = [(bits & 0xFFFF) * 0x10001 for bits in given.view(torch.int16).tolist()]
    for first in range(len(scales)):
        four = [(first + i) % len(scales) for i in range(4)]  # each byte has its own
        pairs = {f"${5 + i}": words[index] for i, index in enumerate(four)}
        factors = torch.tensor([scales[index] for index in four]).repeat_interleave(2)
        for stored_word in WORDS[:: 1 if first == 0 else 8]:
            got = run_assembly(source, dtype, {"$4": stored_word, **pairs}) * rest
            assert got.tolist() == (e2m1(bytes_of(stored_word))[0] * factors).tolist()


@pytest.mark.parametrize("exact", [False, True])
def test_assembly_of_words_of_4_bit_floats(exact):
    """For the experts: every number with every scale, in the order of pairs, and nothing but sums that are no numbers where
    one factor is too small, or a scale is none (255). What is small is exact."""
    words = pytest.importorskip("spec_ops.backends.triton.linear.float4_words", reason="triton comes for Linux only")
    scale_code, even, odd = (getattr(words, f"{name}_EXACT" if exact else name).value for name in ("_SCALE", "_EVEN", "_ODD"))
    rest = 1.0 if exact else words.WORD_REST.value
    for byte in range(256):
        scale = run_assembly(scale_code, torch.bfloat16, {"$1": byte})[:2]
        assert scale[0] == scale[1]
        twice = _twice(scale[:1].bfloat16())
        for word in (0x76543210, 0xFEDCBA98, 0x01234567, 0x9ABCDEF8) if byte % 16 else WORDS[::8]:
            pairs = [
                run_assembly(code, torch.bfloat16, {"$1": shifted, "$2": twice})[:2]
                for shifted in (word, word >> 8)
                for code in (even, odd)
            ]
            got = torch.stack(pairs, 1).flatten().double() * rest
            want = e2m1(bytes_of(word))[0].double() * 2.0 ** (byte - 127)
            if byte <= (254 if exact else words.GREATEST.value):
                in_range = want.abs() < 2.0**128
                assert got[in_range].tolist() == want[in_range].tolist(), (byte, hex(word))
            else:
                assert not got.isfinite().any(), (byte, hex(word))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unit", [False, True])
def test_assembly_of_words_of_4_bit_floats_in_a_product(unit, dtype):
    """NVFP4, whose scale comes multiplied by what numbers are left by, and MXFP4 with two factors."""
    words = pytest.importorskip("spec_ops.backends.triton.linear.float4_words", reason="triton comes for Linux only")
    float4 = pytest.importorskip("spec_ops.backends.triton.linear.float4", reason="triton comes for Linux only")
    kind, name = ("bf16", "") if dtype == torch.bfloat16 else ("f16", "_FP16")
    even, odd = (getattr(words, f"{which}{name}{'_EXACT' if unit else ''}").value for which in ("_EVEN", "_ODD"))
    rest = 1.0 if unit else float4.NV_REST.value
    for scale in (2.0**-13, 1.0, 2.0**13) if unit else (2.0**-9, 7 * 2.0**-9, 0.8125, 448.0):
        twice = _twice(torch.tensor(scale if unit else scale * float4._NV_UNIT[kind]).to(dtype))
        for word in WORDS:
            codes = [(code, shifted) for shifted in (word, word >> 8) for code in (even, odd)]
            pairs = [run_assembly(code, dtype, {"$1": shifted, "$2": twice})[:2] for code, shifted in codes]
            got = torch.stack(pairs, 1).flatten() * rest
            assert got.tolist() == (e2m1(bytes_of(word))[0] * scale).tolist()


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


def test_4_bit_floats():
    """Each of them, against the table of the format, times scales of both kinds; and which of them a number is stored as."""
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    every = torch.arange(256, dtype=torch.uint8).view(1, 256)
    assert e2m1(every)[0].tolist() == [table[half] for byte in range(256) for half in (byte & 15, byte >> 4)]
    assert torch.equal(packed_e2m1(e2m1(every)), every)
    near = torch.tensor([[0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 9.0, -0.2, -0.3, -5.0, 0.74]])
    assert e2m1(packed_e2m1(near))[0].tolist() == [0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, 0, -0.5, -4, 0.5]
    bytes = torch.arange(255, dtype=torch.uint8)
    assert e8m0(bytes).tolist() == [2.0 ** (i - 127) for i in range(255)]
    scale = torch.tensor([[0.5, 2.0, 448.0, 2.0**-9] * 8]).to(F8)
    got = dequantized(every, scale, None, torch.tensor([0.25]))
    assert got.tolist() == (e2m1(every) * scale.float().repeat_interleave(16, 1) * 0.25).tolist()
    got = dequantized(every, bytes[100:116].view(1, 16))
    assert got[0, 32 * 3 + 7] == e2m1(every)[0, 32 * 3 + 7] * 2.0**-24


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_that_of_a_product_with_the_dequantized_weight(kind, dtype):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 512, generator=g).to(dtype), torch.randn(256, 512, generator=g)
    weight, *scales = stored(w, kind, torch.bfloat16 if kind.startswith("int4") else torch.float32)
    want = exact(x, weight, *scales)
    ours = skinny_mm_op(x, weight, None, *scales)
    theirs = x @ dequantized(weight, *scales).to(dtype).t()
    errors = [(out.double() - want).square().mean().sqrt() for out in (ours, theirs)]
    assert errors[0] <= 1.05 * errors[1]
    lost = (dequantized(weight, *scales) - w).square().mean().sqrt() / w.square().mean().sqrt()
    # Half a step of 15 in a range of about 5.5; of 2^-1 of the number, below its least; of 2^-3.
    assert lost < (0.12 if "4" in kind else 0.03)


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
        (WEIGHT.bfloat16(), zeros(1, 1), None, ValueError, "`scale`, `zero` and `tensor_scale` must be None beside a"),
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


@pytest.mark.parametrize(
    ("scale", "tensor_scale", "error", "message"),
    [
        (zeros(300, 8, dtype=F8), None, ValueError, r"300 x 256 of nvfp4 must be \[300, 256 / 16\], got shape \(300, 8\)"),
        (zeros(300, 16, dtype=torch.uint8), None, ValueError, r"of mxfp4 must be \[300, 256 / 32\], got shape \(300, 16\)"),
        (
            zeros(300, 16, dtype=torch.float8_e5m2),
            None,
            TypeError,
            "or float8_e4m3fn or uint8 beside 4-bit floats, got torch.flo",
        ),
        (
            zeros(300, 8, dtype=torch.uint8),
            zeros(1),
            ValueError,
            r"`tensor_scale` must be None beside mxfp4, got torch.float32 of shape \(1,\)",
        ),
        (
            zeros(300, 16, dtype=F8),
            zeros(2),
            ValueError,
            r"must be one number of torch.float32, got torch.float32 of shape \(2,\)",
        ),
        (zeros(300, 16, dtype=F8), zeros(1).double(), ValueError, "must be one number of torch.float32, got torch.float64"),
        (zeros(300, 1), zeros(1), ValueError, "`tensor_scale` must be None beside int4"),
    ],
)
def test_4_bit_floats_of_no_format(scale, tensor_scale, error, message):
    args = zeros(2, 256, dtype=torch.bfloat16), zeros(300, 128, dtype=torch.uint8), None, scale, None, tensor_scale
    with pytest.raises(error, match=message):
        skinny_mm_op(*(a if a is None else a.to("meta") for a in args))
    with pytest.raises(error, match=message):
        skinny_mm_op(*args)


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
    "nvfp4": ("nvfp4", 1, 16),
    "mxfp4": ("mxfp4", 1, 32),
}
SHAPES = [(6144, 4096), (28672, 4096), (4096, 14336), (5120, 2880), (1536, 7168), (100, 64), (32000, 4096)]


@needs_triton
@pytest.mark.parametrize("kind", FORMATS)
def test_most_rows(kind):
    """Passes and benchmarks ask one function. Where Hopper's kernel has no part in it, it says what Triton's tiles hold."""
    tiles = pytest.importorskip("spec_ops.backends.triton.linear.tiles", reason="triton comes for Linux only")
    stored_kind, rows, columns = FORMATS[kind]
    stored_as = WeightFormat(stored_kind, rows or 4096, columns or 4096)
    for arch, dtype in ((100, torch.bfloat16), (90, torch.float16)):
        assert most_rows(4096, 4096, stored_as, dtype, dtype, arch) == tiles.most_rows(stored_as)
    assert most_rows(4096, 4096, stored_as, torch.bfloat16, torch.bfloat16, 90) == 128


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_size_has_a_config_that_fits(kind, arch):
    tiles = pytest.importorskip("spec_ops.backends.triton.linear.tiles", reason="triton comes for Linux only")
    from spec_ops.backends.triton.runtime import ahead

    stored_kind, rows, columns = FORMATS[kind]
    for n, k in SHAPES:
        if kind == "int4" and k % columns:
            continue
        stored_as = WeightFormat(stored_kind, rows or n, columns or k)
        for m in (1, 8, 9, 16, 17, 33, 64, 65, 128):
            for sms in (1, 132, 188) if m <= tiles.most_rows(stored_as) else ():
                config = tiles.choose(m, n, k, sms, arch, stored_as)
                blocks = -(-k // config.block_k)
                assert config.block_m >= m
                assert 1 <= config.splits <= blocks
                assert k % config.chunk == 0
                assert stored_as.float4 or config.chunk <= stored_as.columns
                assert config.chunks or config.block_k <= stored_as.columns or (stored_as.float4 and m > 64)
                # Of a batch of fewer products than warps, each would be computed by several.
                assert not stored_as.float4 or config.block_n >= 64 or config.block_k >= config.chunk * config.num_warps
                one = config.block_k * (config.block_n * stored_as.bits // 8 + 2 * config.block_m)
                assert config.num_stages - 1 >= min(2, blocks)
                assert config.programs * ((config.num_stages - 1) * one + 1024) <= ahead.SHARED_LIMIT[arch] + 1024


@needs_triton
@pytest.mark.parametrize(
    ("kind", "n", "most"),
    [
        ("row", 128256, 4), ("row", 8448, 4), ("tensor", 28672, 4), ("int8", 28672, 4),
        ("block", 28672, 2), ("group", 28672, 2),
        ("row", 8432, 1), ("tensor", 6144, 1), ("int8", 4096, 1), ("block", 6144, 0), ("group", 4096, 0),
        ("int4", 28672, 0), ("nvfp4", 28672, 0), ("mxfp4", 4096, 0), (None, 28672, 0),
    ],
)  # fmt: skip
def test_which_rows_are_loaded(kind, n, most):
    """As measured on an H200 (`docs/notebook/products.md`), and on Hopper alone."""
    tiles = pytest.importorskip("spec_ops.backends.triton.linear.tiles", reason="triton comes for Linux only")
    stored_as = None
    if kind is not None:
        name, rows, columns = FORMATS[kind]
        stored_as = WeightFormat(name, rows or n, columns or 4096)
    for arch in (90, 100, 120):
        found = [m for m in range(1, 65) if tiles.choose(m, n, 4096, 132, arch, stored_as).loaded]
        assert found == (list(range(1, most + 1)) if arch == 90 else [])


@needs_triton
@pytest.mark.parametrize("kind", ["int4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (1, 28672, 4096, (2, 64, 512)), (3, 28672, 4096, (4, 64, 512)), (8, 16384, 4096, (8, 64, 512)),
        (2, 4096, 4096, (2, 64, 512)), (1, 4095, 4096, (2, 16, 1024)),
        (4, 4096, 14336, (4, 64, 512)), (4, 6144, 4096, (4, 16, 1024)), (5, 4096, 14336, (8, 16, 1024)),
        (9, 4096, 4096, (16, 32, 512)),
    ],
)  # fmt: skip
def test_tiles_of_4_bits_on_hopper(kind, m, n, k, tile):
    """As measured on an H200 (`docs/notebook/products.md`)."""
    tiles = pytest.importorskip("spec_ops.backends.triton.linear.tiles", reason="triton comes for Linux only")
    name, rows, columns = FORMATS[kind]
    config = tiles.choose(m, n, k, 132, 90, WeightFormat(name, rows, columns))
    assert (config.block_m, config.block_n, config.block_k) == tile
    assert config.full
    for other in (100, 120):
        assert tiles.choose(m, n, k, 132, other, WeightFormat(name, rows, columns)).block_n == 32


@needs_triton
def test_int4_in_small_groups_has_no_tile_of_hopper():
    """Its registers hold more scales; nor has a k of which chunks have 64."""
    tiles = pytest.importorskip("spec_ops.backends.triton.linear.tiles", reason="triton comes for Linux only")
    for kind, group, k in (("int4", 64, 4096), ("int4", 32, 4096), ("mxfp4", 32, 2880)):
        config = tiles.choose(1, 28672, k, 132, 90, WeightFormat(kind, 1, group))
        assert config.block_m == 8
        assert config.programs == (3 if (kind, group) == ("int4", 32) else 4)


@needs_triton
def test_registers_that_a_launch_counts_on():
    skinny_mm = pytest.importorskip("spec_ops.backends.triton.linear.skinny_mm", reason="triton comes for Linux only")
    from spec_ops.backends.triton.runtime.launch import Target, recorded

    x, weight, scale = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (((4, 4096), torch.bfloat16), ((28672, 2048), torch.uint8), ((28672, 128), torch.uint8))
    )
    with recorded(Target(90, 132)) as launches:
        skinny_mm.skinny_mm(x, weight, None, scale)
    assert launches[0].options["maxnreg"] == 128  # four programs


def ahead_cases() -> list:
    try:
        from spec_ops.backends.triton.linear import norm, skinny_mm
    except ImportError:  # triton comes for Linux only
        return []
    found = [
        v for v in (*skinny_mm.ahead(), *norm.ahead()) if any(kind in v.name for kind in ("float8", "int8", "int4", "fp4"))
    ]
    # MXFP4 is one multiplication a pair more than NVFP4.
    return [v for v in found if "mxfp4" not in v.name or v.name.startswith("skinny_mm mxfp4, 4 x 4096")]


def pytest_generate_tests(metafunc):
    if metafunc.function is not test_kernels_fit_without_spills:
        return
    if not (every := [(variant, variant.archs[-1]) for variant in ahead_cases()]):
        metafunc.parametrize(("variant", "arch"), every)
        return
    from tests.helpers.selection import covering, parametrize_pairs, product_facts

    parametrize_pairs(metafunc, every, covering(every, product_facts))


@needs_triton
def test_kernels_fit_without_spills(variant, arch):
    from spec_ops.backends.triton.runtime import ahead

    used = ahead.compile_ahead(variant, arch)
    import triton

    # ptxas of triton 3.6 makes calls of TMA loads on sm_120, which take 8 or 16 bytes of arguments on the stack: no spill.
    # And for 16 rows of int8 ptxas keeps 8 bytes on the stack of sm_100's kernel, outside of its loop.
    outside = 8 if "skinny_mm int8, 16 x" in variant.name and arch in (100, 103) else 0
    if "skinny_mm int4, 16 x 28672" in variant.name and arch == 90 and triton.__version__.startswith("3.6."):
        outside = 8  # as outside of the loop
    assert used.spill_bytes <= (16 if arch == 120 and triton.__version__.startswith("3.6.") else outside)
    assert used.loop_spills == 0
    assert not (used.serialized and "fp4" in variant.name)
    assert ahead.as_counted_on(variant, used, arch)


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
    return x.bfloat16(), *stored(w, kind, torch.bfloat16 if kind.startswith("int4") else torch.float32)


@GPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1536, 7168), (1000, 1280), (28672, 4096)])
def test_error_on_a_gpu(n, k, kind):
    for m in (1, 4, 8, 9, 16, 17, 32, 33, 64) if kind.startswith("int4") else (1, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128):
        x, weight, *scales = on_gpu(m, n, k, kind)
        want = exact(x, weight, *scales)
        rounded = x @ dequantized(weight, *scales).bfloat16().t()
        errors = [(out.double() - want).square().mean().sqrt() for out in (skinny_mm_op(x, weight, None, *scales), rounded)]
        assert errors[0] <= 1.05 * errors[1], m


@GPU
@pytest.mark.parametrize("kind", ["row", "block", "int8", "int4-128", "nvfp4", "mxfp4"])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (1000, 1280)])
def test_rows_that_are_loaded_have_the_same_bits(n, k, kind):
    from spec_ops.backends.triton.linear import skinny_mm, tiles
    from spec_ops.backends.triton.runtime.launch import Target

    target = Target.of(torch.device("cuda", torch.cuda.current_device()))
    for m in (1, 2, 3, 8):
        x, weight, *scales = on_gpu(m, n, k, kind)
        config = tiles.choose(m, n, k, target.sms, target.arch, weight_format("test", weight, *scales))
        loaded, read = (
            skinny_mm.skinny_mm(x, weight, None, *scales, config=replace(config, loaded=way)) for way in (True, False)
        )
        assert torch.equal(loaded, read), m


def assert_error_of_scaled_product(got: torch.Tensor, y: torch.Tensor, z: torch.Tensor, w: torch.Tensor, *scales) -> None:
    """In each row at most 1.05 times that of a product with the dequantized weight in bfloat16, which is all that it rounds
    before its result: `hopper_mm` rounds int4 so, too."""
    rstd = torch.rsqrt(y.double().square().mean(1, True) + 1e-5)
    want = exact(z, w, *scales) * rstd
    rounded = ((z.double() @ dequantized(w, *scales).bfloat16().double().t()) * rstd).bfloat16()
    ours, theirs = ((out.double() - want).square().mean(1).sqrt() for out in (got, rounded))
    assert (ours <= 1.05 * theirs).all(), (ours / theirs).max()


@GPU
@pytest.mark.parametrize("kind", ["tensor", "row", "block", "int4-128", "nvfp4", "mxfp4"])
def test_norm_on_a_gpu(kind):
    from spec_ops.backends.triton.linear import skinny_mm, tiles
    from spec_ops.backends.triton.runtime.launch import Target

    target = Target.of(torch.device("cuda", torch.cuda.current_device()))
    for m in (1, 4, 16, 32):
        x, w0, *s0 = on_gpu(m, 4096, 4096, kind)
        _, w1, *s1 = on_gpu(m, 6144, 4096, kind)
        residual, g = torch.randn_like(x), torch.rand(4096, device="cuda").bfloat16() + 0.5
        y, z, squares = add_skinny_mm_op(x, w0, residual, g, *s0)
        # By the kernel that `add_skinny_mm` has too: another one adds in another order.
        stored_as = weight_format("test", w0, *s0)
        config = tiles.choose(m, 4096, 4096, target.sms, target.arch, stored_as)
        alone = skinny_mm.skinny_mm(x, w0, None, *s0, config=config)
        assert torch.equal(y, alone + residual)
        got = scaled_skinny_mm_op(z, w1, None, squares, 1e-5, *s1)
        assert_error_of_scaled_product(got, y, z, w1, *s1)


@GPU
def test_results_repeat_on_a_gpu():
    for kind in ("row", "block", "int4-128", "nvfp4"):
        for m, n, k in ((4, 1536, 7168), (16, 4096, 4096), (64, 1536, 7168), (128, 4096, 14336)):
            if m > 64 and kind.startswith("int4") and torch.cuda.get_device_capability() != (9, 0):
                continue
            x, weight, *scales = on_gpu(m, n, k, kind)
            first = skinny_mm_op(x, weight, None, *scales)
            assert all(torch.equal(first, skinny_mm_op(x, weight, None, *scales)) for _ in range(100))
