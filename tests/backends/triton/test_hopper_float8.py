"""How the Hopper kernel of `float8_mm` is launched and compiled; `tests/gpu/test_hopper_float8.py` has what it computes."""

from __future__ import annotations

import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what is launched")

from spec_ops.backends.registry import BackendError  # noqa: E402
from spec_ops.backends.triton.linear import hopper_float8, hopper_shares, row_parts, skinny_mm  # noqa: E402
from spec_ops.backends.triton.linear.hopper_tiles import (  # noqa: E402
    choose_float8,
    choose_parts,
    float8_mm_refusal,
    splits_of,
)
from spec_ops.backends.triton.runtime import ahead  # noqa: E402
from spec_ops.backends.triton.runtime.launch import Launch, Target, recorded  # noqa: E402
from spec_ops.backends.weight_format import WeightFormat  # noqa: E402
from tests.helpers.selection import covering, parametrize_pairs  # noqa: E402

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
LIMIT = 232_448  # bytes of shared memory that a program may have on sm_90


def empty(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=of, device="meta")


def operands(m: int, n: int = 4096, k: int = 4096, blocks: bool = False) -> dict[str, torch.Tensor]:
    x_scale, scale = (empty(m, k // 128), empty(-(-n // 128), k // 128)) if blocks else (empty(m, 1), empty(n, 1))
    return {"x": empty(m, k, of=F8), "x_scale": x_scale, "weight": empty(n, k, of=F8), "scale": scale}


def launched(given: dict[str, torch.Tensor], arch: int = 90, sms: int = 132, bias=None, dtype: torch.dtype = BF16) -> Launch:
    with recorded(Target(arch, sms)) as launches:
        out = hopper_float8.float8_mm(**given, bias=bias, dtype=dtype)
    assert (out.shape, out.dtype) == ((given["x"].shape[0], given["weight"].shape[0]), dtype)
    (only,) = launches
    return only


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128])
def test_a_tile_has_all_rows_and_fits(m, blocks):
    for n, k in ((4096, 4096), (28672, 4096), (100, 128), (4096, 14336)):
        tile = choose_float8(m, n, k, blocks, 132)
        assert m <= tile.block_m < max(2 * m, 9)
        assert tile.stages >= 4
        # One program on a multiprocessor, and not two.
        assert LIMIT / 2 < tile.stages * (128 * (64 * tile.consumers + tile.block_m) + blocks * 4 * tile.block_m) <= LIMIT
        given = launched(operands(m, n, k, blocks)).arguments
        assert given["x"].block_shape == [tile.block_m, 128]
        assert given["weight"].block_shape == [64, 128]
        assert (given["X_BLOCKS"], given["W_BLOCKS"]) == (blocks and k > 128, blocks and k > 128)


@pytest.mark.parametrize(
    ("tiles", "blocks", "splits"),
    [
        (64, 32, 2), (96, 32, 1), (132, 32, 1), (16, 32, 4), (1, 112, 14), (1, 1, 1), (133, 32, 0), (184, 32, 0), (185, 32, 1),
        (224, 32, 1), (277, 32, 0), (278, 32, 1), (2004, 32, 1),
    ],
)  # fmt: skip
def test_programs_of_a_tile(tiles, blocks, splits):
    """Whole tiles, if they leave few multiprocessors idle; several programs for each where tiles are few."""
    assert splits_of(tiles, blocks, 132) == splits


@pytest.mark.parametrize("sms", [1, 114, 132])
@pytest.mark.parametrize(("n", "k"), [(100, 128), (64, 14336), (1000, 1280), (4096, 4096), (8960, 4096), (28672, 4096)])
def test_programs_share_the_blocks_of_k(n, k, sms):
    """Each has some, and partial sums where a program does not have whole tiles: two of them for each program."""
    for m in (8, 32, 128):
        given = launched(operands(m, n, k), sms=sms).arguments
        consumers, block_m = given["CONSUMERS"], given["x"].block_shape[0]
        tiles, blocks = -(-n // (64 * consumers)), k // 128
        splits = splits_of(tiles, blocks, sms)
        whole = splits == 1 or tiles % sms == 0
        assert (given["partial"] is None) == (given["counters"] is None) == whole
        if not whole:
            assert given["partial"].numel() == 2 * (splits * tiles or sms) * consumers * 64 * block_m
            assert given["counters"].numel() >= tiles * consumers


@pytest.mark.parametrize(
    ("tiles", "blocks", "splits", "programs"),
    [
        (64, 32, 2, 128),
        (224, 32, 1, 112),
        (2004, 32, 1, 126),
        (96, 32, 1, 96),
        (140, 32, 0, 132),
        (1, 8, 0, 8),
        (1, 8, 2, 2),
        (24, 56, 5, 120),
        (1, 10, 7, 5),
        (2, 10, 0, 20),
        (12, 24, 0, 96),
    ],
)
def test_counts_of_programs(tiles, blocks, splits, programs):
    """As few as give none more whole tiles, or none of a tile more blocks of k; never more than blocks."""
    device = torch.device("meta")
    with recorded(Target(90, 132)):
        assert hopper_shares.divided(device, "test", tiles, blocks, 1, 8, splits)[0] == programs


def test_strides_of_scales():
    """Any; what all share is read at stride 0."""
    given = operands(8, blocks=True) | {"x_scale": empty(32, 8).t(), "scale": empty(64, 32)[::2]}
    found = launched(given).arguments
    assert [found[name] for name in ("x_row", "x_column", "scale_row", "scale_column")] == [1, 8, 64, 1]
    found = launched(operands(8) | {"x_scale": empty(1, 1), "scale": empty(1, 1)}).arguments
    assert [found[name] for name in ("x_row", "x_column", "scale_row", "scale_column")] == [0, 0, 0, 0]
    assert (found["X_BLOCKS"], found["W_BLOCKS"]) == (False, False)
    found = launched(operands(8) | {"x_scale": empty(8, 32)}).arguments  # either without the other
    assert (found["X_BLOCKS"], found["W_BLOCKS"]) == (True, False)
    found = launched(operands(8) | {"scale": empty(32, 32)}).arguments
    assert (found["X_BLOCKS"], found["W_BLOCKS"]) == (False, True)


@pytest.mark.parametrize(
    ("given", "more", "error", "message"),
    [
        (operands(8), {"arch": 100}, BackendError, r"needs a GPU of sm_90 \(Hopper\), got sm_100"),
        (operands(8), {"dtype": torch.float32}, TypeError, "`dtype` must be torch.bfloat16 or torch.float16 on CUDA, got"),
        (operands(129), {}, ValueError, "`x` must have at most 128 rows, got 129"),
        (operands(8, k=4160), {}, ValueError, "the columns of `x` must be a multiple of 128, got 4160"),
        (operands(8, k=0), {}, ValueError, "the columns of `x` must be a multiple of 128, got 0"),
        (operands(128, 2**24, 128), {}, ValueError, "`x` rows times `weight` rows must be less than 2.31, got 128 t"),
        (operands(8) | {"x": empty(8, 4104, of=F8)[:, :4096]}, {}, ValueError, "`x` must have contiguous rows that start at"),
        (operands(8) | {"x": empty(4096, 8, of=F8).t()}, {}, ValueError, "`x` must have contiguous rows that start at"),
        (operands(8) | {"x": empty(1, 4096, of=F8).expand(8, -1)}, {}, ValueError, "`x` must have contiguous rows"),
        (operands(8) | {"weight": empty(4096, 4104, of=F8)[:, :4096]}, {}, ValueError, "`weight` must have contiguous rows"),
        (operands(8), {"bias": empty(8)}, ValueError, "`bias` must have shape"),
    ],
)  # fmt: skip
def test_refusals(given, more, error, message):
    with pytest.raises(error, match=f"^float8_mm: {message}"):
        launched(given, **more)


def test_refusal_without_tensors():
    assert float8_mm_refusal(128, 28672, 4096, BF16, 90) is None
    assert isinstance(float8_mm_refusal(128, 28672, 4096, BF16, None), BackendError)


def test_rows_of_other_strides_and_one_row():
    assert launched(operands(8) | {"x": empty(8, 4224, of=F8)[:, 128:]}).arguments["x"].strides == [4224, 1]
    assert launched(operands(1) | {"x": empty(1, 4096, of=F8).expand(1, -1)}).arguments["x"].strides == [4096, 1]


def test_nothing_is_launched_for_nothing():
    for given in (operands(0), operands(8, n=0) | {"scale": empty(0, 1)}):
        with recorded(Target(90, 132)) as launches:
            hopper_float8.float8_mm(**given, bias=None, dtype=BF16)
        assert not launches


def parted(m: int, n: int = 4096, k: int = 4096, blocks: bool = False, dtype: torch.dtype = BF16) -> list[Launch]:
    given = operands(1, n, k, blocks)
    with recorded(Target(90, 132)) as launches:
        out = skinny_mm.skinny_mm(empty(m, k, of=dtype), given["weight"], None, given["scale"])
    assert (out.shape, out.dtype) == ((m, n), dtype)
    return launches


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("m", "rows"), [(33, 64), (64, 64), (65, 128), (128, 128)])
def test_rows_of_bfloat16_in_two_parts(m, rows, blocks):
    for n, k in ((6144, 4096), (28672, 4096), (1536, 7168), (4096, 14336)):
        first, product = parted(m, n, k, blocks)
        assert first.kernel is row_parts.row_parts_kernel
        assert first.arguments["rests"] == rows
        given = product.arguments
        assert given["X_PARTS"] == 2
        assert list(given["x"].shape) == [2 * rows, k]
        assert given["x"].block_shape == [rows, 128]
        assert (given["M"], given["X_BLOCKS"], given["W_BLOCKS"]) == (m, False, blocks and k > 128)


@pytest.mark.parametrize(
    ("m", "n", "k", "stored", "dtype"),
    [
        (32, 6144, 4096, WeightFormat("float8", 1, 4096), BF16),  # converting the weight is as fast
        (128, 4096, 4096, WeightFormat("float8", 1, 4096), BF16),  # half of the multiprocessors would be idle
        (64, 100, 4096, WeightFormat("float8", 1, 4096), BF16),  # most would
        (64, 17152, 4096, WeightFormat("float8", 1, 4096), BF16),  # all exchange sums, and k is short
        (129, 6144, 4096, WeightFormat("float8", 1, 4096), BF16),
        (64, 6144, 4096, WeightFormat("float8", 1, 4096), torch.float16),  # more significant bits than two parts have
        (64, 6144, 4096, WeightFormat("float8", 1, 64), BF16),  # groups of a row
        (64, 6144, 4096, WeightFormat("int8", 1, 4096), BF16),
        (64, 6144, 4160, WeightFormat("float8", 1, 4160), BF16),
        (64, 6144, 65536, WeightFormat("float8", 1, 65536), BF16),
        (128, 2**24, 128, WeightFormat("float8", 1, 128), BF16),
    ],
)
def test_rows_that_are_not_taken_apart(m, n, k, stored, dtype):
    assert choose_parts(m, n, k, stored, dtype, 132) is None


@pytest.mark.parametrize("m", [33, 64, 65, 128])
def test_parts_fit(m):
    for n, k in ((6144, 4096), (28672, 4096), (1536, 7168), (4096, 14336)):
        tile = choose_parts(m, n, k, WeightFormat("float8", 1, k), BF16, 132)
        assert tile.stages >= 4
        assert tile.stages * 128 * (64 * tile.consumers + 2 * tile.block_m) <= LIMIT
    assert choose_parts(64, 6144, 4096, WeightFormat("float8", 128, 128), BF16, 132) is not None
    assert choose_parts(64, 6144, 4096, WeightFormat("float8", 6144, 4096), BF16, 132) is not None


def test_parts_are_not_read_back():
    """ptxas 12.8 takes what was converted to float8 from the wrong register where it is converted again."""
    for variant in row_parts.ahead():
        ptx = ahead.compiled(variant, 90).asm["ptx"]
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
        assert not re.search(r"cvt\S*\.e4m3x2 ", ptx)


VARIANTS = list(hopper_float8.ahead())
WHOLE = [variant for variant in VARIANTS if variant.constexprs["X_PARTS"] == 1]
PAIRS = [(variant, 90) for variant in VARIANTS]


def _facts(variant: ahead.Variant, arch: int) -> list[tuple]:
    constants = variant.constexprs
    shape = (variant.signature["x"], constants["X_PARTS"], constants["CONSUMERS"])
    return [(constants["X_BLOCKS"], constants["CONSUMERS"]), shape]


def pytest_generate_tests(metafunc):
    if metafunc.function is test_compiles_without_spills_for_one_program_on_a_multiprocessor:
        parametrize_pairs(metafunc, PAIRS, covering(PAIRS, _facts))


@pytest.mark.slow
def test_compiles_without_spills_for_one_program_on_a_multiprocessor(variant, arch):
    used = ahead.compile_ahead(variant, arch)
    assert (used.spill_bytes, used.loop_spills, used.serialized) == (0, 0, False)
    warps = 4 * variant.constexprs["CONSUMERS"] + 4  # the loading warp's registers are those of a warpgroup
    assert ahead.resident_blocks(used, warps, 90) == 1


@pytest.mark.slow
@pytest.mark.parametrize("m", [8, 128])
def test_other_arguments_compile(m):
    """A bias, float16, scales of 16 bits, of blocks of k of one operand alone, and a single column."""
    cases = [
        launched(operands(m), bias=empty(4096, of=BF16), dtype=torch.float16),
        launched(operands(m, n=1)),
        launched(operands(m, blocks=True) | {"scale": empty(4096, 1, of=BF16)}, bias=empty(4096)),
        launched(operands(m, blocks=True) | {"x_scale": empty(m, 1, of=BF16)}),
    ]
    for case in cases:
        used = ahead.compile_ahead(ahead.variant_of("other arguments", case, archs=(90,)), 90)
        assert used.spill_bytes == 0


@pytest.mark.parametrize("variant", [VARIANTS[0], WHOLE[0], WHOLE[-1]], ids=lambda variant: variant.name)
def test_nothing_is_read_or_written_before_the_wait(variant):
    """But for asking: each warp that reads or writes waits for earlier kernels first, the loading warp after its requests."""
    ptx = ahead.compiled(variant, 90).asm["ptx"]
    waits = [at.start() for at in re.finditer(r"griddepcontrol\.wait", ptx)]
    assert len(waits) == variant.constexprs["CONSUMERS"] + 1
    first = min(at.start() for at in re.finditer(r"ld\.global|st\.global|atom\.|cp\.async\.bulk\.tensor", ptx))
    assert first > waits[0]
    asked, loads = ptx.find("prefetch.global.L2"), ptx.find("cp.async.bulk.tensor")
    assert any(0 < asked < wait < loads for wait in waits)


@pytest.mark.parametrize("variant", [VARIANTS[0], WHOLE[0], WHOLE[-1]], ids=lambda variant: variant.name)
def test_both_operands_come_from_shared_memory(variant):
    """And each block of k, of both parts of the rows, is a product of its own: its first instruction adds to nothing."""
    ptx = ahead.compiled(variant, 90).asm["ptx"]
    rows, parts = int(re.search(r"\[(\d+), 128\]", variant.signature["x"])[1]), variant.constexprs["X_PARTS"]
    found = re.findall(
        rf"wgmma\.mma_async\S*\.m64n{rows}k32\.f32\.e4m3\.e4m3 \{{[^}}]*\}}, (%rd\d+), %rd\d+, (\S+), 1, 1;", ptx
    )
    assert len(found) == len(re.findall("wgmma.mma_async", ptx)) == 4 * parts * variant.constexprs["CONSUMERS"]
    always = set(re.findall(r"mov\.pred\s+(%p\d+), -1;", ptx))
    assert [flag in always for _, flag in found] == ([False] + [True] * (4 * parts - 1)) * variant.constexprs["CONSUMERS"]


def test_sums_and_results_move_in_lines():
    """Partial sums 16 bytes a thread; results 8, of 16 bits each."""
    variant = next(v for v in WHOLE if "128 x 4096 x" in v.name)
    ptx = ahead.compiled(variant, 90).asm["ptx"]
    assert set(re.findall(r"ld\.global\.cg\.\S+", ptx)) == {"ld.global.cg.v4.b32"}
    stores = re.findall(r"st\.global\.\S+", ptx)
    assert stores.count("st.global.v4.b32") == 128 * 64 // 128 // 4
    assert stores.count("st.global.v2.b32") == 128 * 64 // 128 // 4
    assert set(stores) - {"st.global.v4.b32", "st.global.v2.b32"} == {"st.global.b32"}  # of a counter
