"""Which products go to the Hopper kernel for weights of 4 bits, and how it is compiled; `tests/gpu/test_hopper_mm.py` has what
it computes."""

from __future__ import annotations

import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what is launched")

from spec_ops.backends.triton.linear import hopper_mm, skinny_mm  # noqa: E402
from spec_ops.backends.triton.linear.hopper_tiles import STAGES, choose  # noqa: E402
from spec_ops.backends.triton.runtime import ahead  # noqa: E402
from spec_ops.backends.triton.runtime.launch import Launch, Target, recorded  # noqa: E402
from spec_ops.backends.weight_format import WeightFormat  # noqa: E402
from tests.helpers.selection import covering, parametrize_pairs  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOPPER, TRITON = "hopper_mm_kernel", "skinny_mm_kernel"
SCALES = {"nvfp4": (torch.float8_e4m3fn, 16), "mxfp4": (torch.uint8, 32), "int4": (BF16, 128)}


def launched(
    kind: str, m: int, n: int = 4096, k: int = 4096, arch: int = 90, dtype: torch.dtype = BF16, group: int = 0,
    scales: torch.dtype | None = None, sms: int = 132,
) -> Launch:  # fmt: skip
    dtype_of, default = SCALES[kind]

    def empty(*shape: int, of: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    scale = empty(n, k // (group or default), of=scales or dtype_of)
    zero = empty(*scale.shape, of=scale.dtype) if kind == "int4" else None
    with recorded(Target(arch, sms)) as launches:
        out = skinny_mm.skinny_mm(empty(m, k, of=dtype), empty(n, k // 2, of=torch.uint8), None, scale, zero)
    assert out.shape == (m, n)
    (only,) = launches
    return only


@pytest.mark.parametrize(
    ("kind", "n", "m", "kernel"),
    [
        *((kind, 4096, m, TRITON) for kind in SCALES for m in (1, 8, 16)),
        *((kind, 4096, m, HOPPER) for kind in SCALES for m in (17, 32, 33, 64, 65, 128)),
        *((kind, 28672, m, HOPPER) for kind in SCALES for m in (17, 128)),
        *((kind, 28672, 16, TRITON) for kind in SCALES),
    ],
)
def test_rows_decide(kind, n, m, kernel):
    assert launched(kind, m, n).kernel.fn.__name__ == kernel


@pytest.mark.parametrize(
    "call",
    [
        {"arch": 100}, {"arch": 120}, {"dtype": FP16}, {"dtype": FP16, "scales": FP16}, {"scales": FP32},
        {"kind": "nvfp4", "dtype": FP16}, {"kind": "mxfp4", "arch": 100},
    ],
    ids=str,
)  # fmt: skip
def test_near_misses(call):
    kind = call.get("kind", "int4")
    assert launched(**{"kind": kind, "m": 64, **call}).kernel.fn.__name__ == TRITON
    if kind == "int4":  # more rows have the one kernel alone
        with pytest.raises(ValueError, match="skinny_mm: `x` must have at most 64 rows, got 65"):
            launched(**{"kind": kind, "m": 65, **call})


@pytest.mark.parametrize("group", [32, 64])
def test_small_groups_of_int4(group):
    for m in (17, 32, 33, 64, 65, 128):
        found = launched("int4", m, group=group)
        assert (found.kernel.fn.__name__, found.arguments["COLUMNS"]) == (HOPPER, group)
    assert launched("int4", 16, group=group).kernel.fn.__name__ == TRITON


@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("int4", 64), ("nvfp4", 16), ("mxfp4", 32)])
def test_half_a_block_at_the_end_of_k(kind, group):
    """As gpt-oss has it: tiles reach beyond k, and programs have that block too."""
    for m in (33, 128):
        found = launched(kind, m, 5120, 2880, group=group)
        assert found.kernel.fn.__name__ == HOPPER
        assert [found.arguments[name].block_shape[1] for name in ("x", "weight")] == [128, 64]
        # A program for each three or four of 22.5 blocks, the last of which has the half.
        alone = launched(kind, m, 64, 2880, group=group).arguments
        assert (alone["CONSUMERS"], alone["partial"].numel()) == (1, 2 * (8 if m == 33 else 6) * 64 * (64 if m == 33 else 128))


@pytest.mark.parametrize(
    ("kind", "k", "row", "words"),
    [
        ("nvfp4", 4096, 256, True), ("mxfp4", 4096, 128, True), ("nvfp4", 7168, 448, True), ("mxfp4", 7168, 224, True),
        ("nvfp4", 4096, 264, True), ("nvfp4", 4096, 260, False), ("mxfp4", 4096, 132, True), ("mxfp4", 4096, 130, False),
        ("nvfp4", 2880, 180, False), ("nvfp4", 2880, 184, False), ("mxfp4", 2880, 90, False), ("mxfp4", 2880, 92, False),
    ],
)  # fmt: skip
def test_scales_in_words(kind, k, row, words):
    """Of whole blocks, where rows of scales are as far apart as words can be; else words have scales of what is behind k."""
    dtype, group = SCALES[kind]
    stored = WeightFormat(kind, 1, group)
    rows = torch.empty(4096, row, dtype=dtype, device="meta")[:, : k // group]
    assert hopper_mm._in_words(rows, stored, k) == words
    for apart in (torch.empty(k // group, 4096, dtype=dtype, device="meta").t(), rows.new_empty(4096, 2 * row)[:, ::2]):
        assert not hopper_mm._in_words(apart[:, : k // group], stored, k)
    assert launched(kind, 128, 4096, k).arguments["WORDS"] == (k % 128 == 0)
    assert not launched("int4", 128, group=32).arguments["WORDS"]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_rows_of_tiles_without_that_kernel(group):
    """Where a group is small, half as much of k with more than 8 rows, so that its scales stay in registers."""
    for m in (8, 16, 32):
        found = launched("int4", m, group=group, arch=100).arguments
        assert (found["BLOCK_N"], found["BLOCK_K"]) == (32, 512 if group == 128 or m == 8 else 256)


@pytest.mark.parametrize("group", [128, 256])
def test_groups_of_int4(group):
    assert launched("int4", 128, group=group).arguments["COLUMNS"] == group


@pytest.mark.parametrize(
    ("call", "most"),
    [
        ({"kind": "int4"}, 128), ({"kind": "nvfp4"}, 128), ({"kind": "int4", "arch": 100}, 64),
        ({"kind": "int4", "group": 64}, 128), ({"kind": "int4", "dtype": FP16, "scales": FP16}, 64),
    ],
    ids=str,
)  # fmt: skip
def test_more_rows_than_any_kernel_has(call, most):
    """The message has the rows of the kernel that such a weight has there."""
    with pytest.raises(ValueError, match=f"skinny_mm: `x` must have at most {most} rows, got 129"):
        launched(m=129, **call)
    launched(m=most, **call)


@pytest.mark.parametrize("sms", [1, 114, 132])
@pytest.mark.parametrize(("n", "k"), [(100, 128), (64, 14336), (1000, 1280), (4096, 4096), (28672, 4096), (132 * 128, 1024)])
def test_programs_share_the_blocks_of_k(n, k, sms):
    """Each has some, and partial sums where a program does not have whole tiles: two of them for each program."""
    for m in (32, 64, 128):
        given = launched("int4", m, n, k, sms=sms).arguments
        consumers, block_m = given["CONSUMERS"], given["x"].block_shape[0]
        assert m <= block_m
        tiles, blocks = -(-n // (64 * consumers)), k // 128
        splits = choose(m, n, k, WeightFormat("int4", 1, 128), sms).splits
        assert given["LINES"] == (m == 128)
        programs = min(splits * tiles or sms, tiles * blocks)
        whole = tiles % programs == 0
        assert (given["partial"] is None) == (given["counters"] is None) == whole
        if not whole:
            assert given["partial"].numel() == 2 * programs * consumers * 64 * block_m
            assert given["counters"].numel() >= tiles * consumers


@pytest.mark.parametrize(
    ("m", "n", "k", "consumers", "splits"),
    [
        (32, 4096, 4096, 2, 4), (32, 6144, 4096, 3, 4), (64, 4096, 14336, 2, 4), (64, 6144, 4096, 3, 4),
        (64, 28672, 4096, 3, 0), (64, 64, 14336, 1, 16), (128, 1536, 7168, 1, 5), (128, 4096, 4096, 1, 2),
        (128, 6144, 4096, 1, 1), (128, 16896, 4096, 2, 1), (128, 28672, 4096, 2, 0), (128, 5120, 2880, 2, 3),
    ],
)  # fmt: skip
def test_tiles_that_were_fast(m, n, k, consumers, splits):
    """Of those of a sweep on an H200 the fastest, or within 4% of it."""
    tile = choose(m, n, k, WeightFormat("int4", 1, 128), 132)
    assert (tile.consumers, tile.splits) == (consumers, splits)


@pytest.mark.parametrize("sms", [1, 78, 132])
@pytest.mark.parametrize("m", [17, 33, 65])
def test_every_product_has_a_tile(m, sms):
    for n, k in ((1, 64), (64, 128), (100, 14336), (576, 7168), (5120, 2880), (128256, 4096), (2**24, 64)):
        for columns in (32, 64, 128):
            tile = choose(m, n, k, WeightFormat("int4", 1, columns), sms)
            assert m <= tile.block_m
            assert 0 <= tile.splits <= -(-k // 128)
            assert (tile.block_m, tile.consumers) in STAGES
            assert tile.consumers <= (3 if columns == 128 or (m == 17 and columns == 64) else 2)
            assert tile.splits <= 1 or -(-n // (64 * tile.consumers)) * tile.splits <= sms


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_scales_that_are_no_words_have_two_warpgroups(kind):
    """With 33 to 64 rows: three spill in their loop."""
    for m, k, consumers in ((64, 4096, 3), (32, 2880, 3), (64, 2880, 2)):
        assert launched(kind, m, 28672, k).arguments["CONSUMERS"] == consumers


def test_whole_tiles_in_several_rounds():
    """Also where there are more tiles than multiprocessors: with a short k, sums to exchange would take longer."""
    stored = WeightFormat("mxfp4", 1, 32)
    assert choose(128, 28672, 1024, stored, 132)[1::2] == (2, 1)
    assert choose(128, 28672, 4096, stored, 132)[1::2] == (2, 0)


def test_16_rows_and_many_columns_of_int4():
    """The tile that was faster there on an H200; other groups and other GPUs keep theirs."""
    found = launched("int4", 16, 28672).arguments
    assert (found["BLOCK_M"], found["BLOCK_N"], found["weight"].block_shape) == (16, 64, [4, 64, 16])  # words
    for call in ({"n": 16384}, {"arch": 100}, {"group": 64}):
        assert launched(**{"kind": "int4", "m": 16, "n": 28672, **call}).arguments["BLOCK_N"] == 32
    assert launched("nvfp4", 16, 28672).arguments["BLOCK_N"] == 32
    assert launched("int4", 8, 28672).arguments["BLOCK_M"] == 8


VARIANTS = list(hopper_mm.ahead())
PAIRS = [(variant, 90) for variant in VARIANTS]
ENDS = [VARIANTS[0], VARIANTS[-1]]


def _facts(variant: ahead.Variant, arch: int) -> list[tuple]:
    """Scales of small groups take registers, most beside many rows; a third consumer leaves fewer to each."""
    constants, rows = variant.constexprs, int(variant.name.split(", ")[1].split()[0])
    kind = constants["KIND"], constants["COLUMNS"]
    return [(*kind, rows >= 64), ("rows", constants["KIND"], rows), ("consumers", rows, constants["CONSUMERS"])]


def pytest_generate_tests(metafunc):
    everything = metafunc.config.getoption("--all-variants")
    if metafunc.function is test_compiles_without_spills_for_one_program_on_a_multiprocessor:
        parametrize_pairs(metafunc, PAIRS, covering(PAIRS, _facts))
    elif metafunc.function is test_other_arguments_compile:
        together = [("a bias", "no zero points in groups of 32"), ("a column", "a group of all of k", "no zero points")]
        together.append(("no scale of the whole weight",))
        metafunc.parametrize("case", [(c,) for cases in together for c in cases] if everything else together, ids=", ".join)


@pytest.mark.slow
def test_other_arguments_compile(case):
    kind = "nvfp4" if "no scale of the whole weight" in case else "int4"
    n, k = 1 if "a column" in case else 4096, 128 if "a group of all of k" in case else 4096
    found = launched(kind, 64, n, k, group=32 if "no zero points in groups of 32" in case else 0)
    if any(argument.startswith("no zero points") for argument in case):
        found.arguments["zero"] = None
    if "a bias" in case:
        found.arguments["bias"] = torch.empty(4096, dtype=BF16, device="meta")
    used = ahead.compile_ahead(ahead.variant_of("other arguments", found, archs=(90,)), 90)
    assert used.spill_bytes == 0


@pytest.mark.slow
def test_compiles_without_spills_for_one_program_on_a_multiprocessor(variant, arch):
    used = ahead.compile_ahead(variant, arch)
    assert (used.spill_bytes, used.loop_spills, used.serialized) == (0, 0, False)
    warps = 4 * variant.constexprs["CONSUMERS"] + 4  # the loading warp's registers are those of a warpgroup
    assert ahead.resident_blocks(used, warps, 90) == 1


@pytest.mark.parametrize("variant", ENDS, ids=lambda variant: variant.name)
def test_nothing_is_read_or_written_before_the_wait(variant):
    """But for asking: each warp that reads or writes waits for earlier kernels first, the loading warp after its requests."""
    ptx = ahead.compiled(variant, 90).asm["ptx"]
    waits = [at.start() for at in re.finditer(r"griddepcontrol\.wait", ptx)]
    assert len(waits) == variant.constexprs["CONSUMERS"] + 1
    first = min(at.start() for at in re.finditer(r"ld\.global|st\.global|atom\.|cp\.async\.bulk\.tensor", ptx))
    assert first > waits[0]
    asked, loads = ptx.find("prefetch.global.L2"), ptx.find("cp.async.bulk.tensor")
    assert any(0 < asked < wait < loads for wait in waits)
