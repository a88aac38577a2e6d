"""What the attention kernels' launches count on, shown without a GPU: so many programs resident on every multiprocessor."""

from __future__ import annotations

import dataclasses
import os
import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"),
]

from spec_ops.backends import AttentionMeta  # noqa: E402
from spec_ops.backends.triton import _constraint  # noqa: E402
from spec_ops.backends.triton.attention import launcher as steps  # noqa: E402
from spec_ops.backends.triton.attention import tuning  # noqa: E402
from spec_ops.backends.triton.attention import variants as attention_ahead  # noqa: E402
from spec_ops.backends.triton.attention.deterministic import launcher as deterministic_steps  # noqa: E402
from spec_ops.backends.triton.runtime import ahead  # noqa: E402
from spec_ops.backends.triton.runtime.launch import Target, recorded  # noqa: E402
from tests.helpers.selection import GENERATION, covering, pairs, parametrize_pairs  # noqa: E402

OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
VARIANTS = list(attention_ahead.ahead())
WGMMA = [
    (v, 90)
    for v in VARIANTS
    if 90 in v.archs and ("D128, 16" in v.name or v.name.startswith("ragged attention, GQA 32/8 D128 "))
]
FP8 = [(v, 90) for v in VARIANTS if "fp8" in v.name and 90 in v.archs and v.hot]
SPLIT = [v for v in VARIANTS if v.estimated is not None or v.name.startswith("Hopper")]


def _facts(variant, arch):
    """What decides on a variant's resources: where it runs, how many rows, and how keys are stored."""
    constants, generation = variant.constexprs, GENERATION[arch]
    yield "architecture", arch
    yield "kernel", variant.kernel.__name__, generation
    if variant.estimated is not None:
        yield "tile", generation, constants["BLOCK_M"] >= 64
        yield "cache", generation, "fp8" in variant.name
        yield "keys", generation, constants["SHARED_KV"]
        width, value_width = constants["D0"] + constants["D1"], constants["BLOCK_DV"]
        yield "padding", constants["D1"] > 0, width > constants["D"], value_width > constants["DV"]
        yield "window", constants["WINDOW"] >= 0


SHARE = covering(WGMMA, lambda variant, arch: [(variant.name[:6], "tree" in variant.name)])
FP8_SHARE = covering(FP8, lambda variant, arch: [variant.constexprs["BLOCK_M"]])
RESIDENT = covering(pairs(SPLIT), _facts, [*SHARE, *FP8_SHARE])

DETERMINISTIC = [pair for pair in pairs(VARIANTS) if re.match("deterministic (?!combine)", pair[0].name)]
ORDERS = covering(
    DETERMINISTIC,
    lambda variant, arch: [
        (variant.kernel.__name__, variant.constexprs["SHARED_KV"], GENERATION[arch]),
        ("warps", variant.num_warps, variant.constexprs["ORDERED"]),
    ],
)


def pytest_generate_tests(metafunc):
    if metafunc.function is test_programs_are_resident_at_once:
        parametrize_pairs(metafunc, pairs(VARIANTS), RESIDENT)
    elif metafunc.function is test_values_that_no_query_sees_cost_no_registers:
        metafunc.parametrize("arch", [90, 100] if metafunc.config.getoption("--all-variants") else [90])
    elif metafunc.function is test_numbers_of_a_row_have_one_order:
        parametrize_pairs(metafunc, DETERMINISTIC, ORDERS)
    elif metafunc.function is test_wgmma_run_side_by_side:
        parametrize_pairs(metafunc, WGMMA, SHARE)
    elif metafunc.function is test_fp8_goes_to_products_without_detours:
        parametrize_pairs(metafunc, FP8, FP8_SHARE)


def test_programs_are_resident_at_once(variant, arch):
    """A cooperative launch fails otherwise, and programs that wait for others would wait forever. No more than these where a
    launch may be early (`launch.launch`). Nor does a decode step's kernel spill."""
    used = ahead.compile_ahead(variant, arch)
    assert used.shared_bytes <= ahead.SHARED_LIMIT[arch]
    assert variant.estimated is None or used.shared_bytes <= variant.estimated[arch]
    assert ahead.as_counted_on(variant, used, arch)
    if variant.hot:
        assert not used.serialized
        # Triton 3.6's assembler gives nearly every kernel a stack of 8 to 32 bytes on sm_120.
        assert used.spill_bytes <= (32 if arch == 120 and OLD_TRITON else 0)


def test_the_share_has_every_kernel_and_architecture():
    share = RESIDENT
    assert {fact for pair in share for fact in _facts(*pair)} == {fact for pair in pairs(SPLIT) for fact in _facts(*pair)}
    assert {arch for _, arch in share} == set(ahead.ARCHS)
    assert {variant.kernel.__name__ for variant, _ in share} == {variant.kernel.__name__ for variant in SPLIT}
    assert len(share) < 20  # seconds each


def test_launches_are_early_where_programs_fill_a_multiprocessor():
    """The heads and batches of `benchmarks/results/h200-kernels.json`; one warp for fp8 of 64 leaves room for three more."""

    def full(head_dim: int, kv_bytes: int, rows: int) -> bool:
        return tuning.choose(90, False, head_dim, head_dim, kv_bytes, rows).full

    assert all(full(head_dim, 2, rows) for head_dim in (64, 128) for rows in (4, 8, 16, 32, 64, 128))
    assert [full(64, 1, rows) for rows in (8, 32, 128)] == [False, True, True]
    assert {v.early for v in VARIANTS if v.name.startswith("Hopper")} == {True}
    assert not any(v.early for v in VARIANTS if v.name.startswith(("ragged", "deterministic extend")))
    of_chunks = [v for v in VARIANTS if v.name.startswith(("deterministic attention", "deterministic tree attention"))]
    assert all(v.early != ("float32" in v.name) for v in of_chunks if 90 in v.archs)  # float32 reads through no descriptors


@pytest.mark.slow
def test_wgmma_run_side_by_side(variant, arch):
    """On Hopper; what `opaque_zeros` is for."""
    kernel = ahead.compiled(variant, arch)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert not ahead.resources(kernel).serialized


def test_both_masks_and_the_ragged_kernel_are_looked_at():
    assert all(any(what in v.name for v, _ in WGMMA) for what in ("16 causal", "16 tree", "ragged"))


# Pages that no tensor descriptor reads: `(shape, queries)`. Small products, large ones, and rows in two parts.
POINTERS = [(attention_ahead.GQA_FP8, 1), (attention_ahead.GQA_128, 16), (attention_ahead.MLA_16, 1)]


@pytest.mark.parametrize(("shape", "q_len"), POINTERS, ids=lambda part: getattr(part, "label", part))
def test_pointers_are_read_in_wide_and_early_loads(shape, q_len):
    """Through `cp.async`, several blocks ahead. Triton 3.7 read 2 bytes at a time, and nothing ahead, in a loop over keys that
    began at a value from outside (`attend`)."""
    call = attention_ahead.call_of(shape, 8, q_len)
    rows = q_len * shape.heads // max(shape.kv_heads, 1)
    config = tuning.choose(90, not shape.kv_heads, shape.head_dim, shape.v_dim, shape.kv_dtype.itemsize, rows)
    config = dataclasses.replace(config, tma=False)
    with recorded() as launches:
        steps.attention(call, config)
    assert launches[0].arguments["TMA"] is False
    ptx = ahead.lowered(attention_ahead.variant_of("pointers", launches[0], config, (90,), hot=False), 90).ptx
    assert "cp.async.c" in ptx
    assert not re.search(r"ld\.global[\w.:]*\.b(8|16)\b", ptx)


@pytest.mark.parametrize(("bs", "warps"), [(8, 1), (64, 4)])
def test_chunks_are_merged_without_waiting_for_each(bs, warps):
    """Many of them lie in memory: several are read at once, without masks, before one is used. A program has one row where rows
    are few, else four."""
    call = attention_ahead.call_of(attention_ahead.GQA_128, bs, 4)
    with recorded(Target(90, 132)) as launches:
        deterministic_steps.attention(call)
    variant = ahead.variant_of("combine", launches[1], archs=(90,), options={"enable_fp_fusion": False})
    assert variant.num_warps == variant.constexprs["ROWS"] == warps
    kernel = ahead.compiled(variant, 90)
    found = re.findall(r"(@\S+ )?(ld\.global\.v4\.b32|ex2)", kernel.asm["ptx"])
    assert found[: variant.constexprs["READ"]] == [("", "ld.global.v4.b32")] * variant.constexprs["READ"]
    assert {what for _, what in found[variant.constexprs["READ"] :]} == {"ex2"}
    assert ahead.resources(kernel).spill_bytes == 0


@pytest.mark.parametrize("rows", [" on sm_90", ", few rows"])
def test_paths_of_a_tree_are_read_in_wide_and_early_loads(rows):
    """Their keys are gathered one by one, beside the descriptors of all others. No loop spills."""
    name = f"deterministic tree attention, GQA 32/8 D128{rows}"
    (variant,) = (v for v in VARIANTS if v.name == name)
    kernel = ahead.compiled(variant, 90)
    ptx = kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx
    assert "cp.async.cg" in ptx
    assert not re.search(r"ld\.global[\w.:]*\.b(8|16)\b", ptx)
    assert ahead.resources(kernel).loop_spills == 0


def test_loops_of_float32_do_not_spill(request):
    """Of trees, which have a loop more, the wider heads; of chains the narrower, whose tiles are larger."""
    names = ["deterministic attention, GQA 64/8 D64 float32", "deterministic tree attention, GQA 32/8 D128 float32"]
    if request.config.getoption("--all-variants"):
        names += ["deterministic attention, GQA 32/8 D128 float32", "deterministic tree attention, GQA 64/8 D64 float32"]
    mine = [v for v in VARIANTS if v.name in names and 90 in v.archs]
    assert len(mine) == len(names)
    assert {ahead.compile_ahead(v, 90).loop_spills for v in mine} == {0}


def test_numbers_of_a_row_have_one_order(variant, arch):
    """In which order a reduction along keys adds is its layout's. Triton chose two for two loops of the MLA kernel, and a few
    results in a million had other bits than alone; on sm_120 it does so with GQA. Sums by pairs never add more than two numbers
    at a time."""
    text = ahead.lowered(variant, arch, "ttgir").ttgir
    reductions = re.findall(r'"tt\.reduce"\((.*?)\}\) : \(tensor<([^,>]*), (#\w+)', text, re.DOTALL)
    rows, keys = variant.constexprs["BLOCK_M"], variant.constexprs["BLOCK_N"]
    layouts = {layout for region, shape, layout in reductions if "arith.addf" in region and shape == f"{rows}x{keys}xf32"}
    if variant.constexprs["ORDERED"]:
        assert not layouts
        if variant.constexprs["ORDERED"] == "pairs":
            found = re.findall(
                rf'"tt\.reduce"\([^)]*\) <\{{axis = (\d) : i32[^}}]*\}}> \(\{{(.*?)\}}\) : \(tensor<{rows}x([\dx]+)xf32',
                text,
                re.DOTALL,
            )
            added = [shape.split("x")[int(axis) - 1] for axis, region, shape in found if "arith.addf" in region]
            assert len(added) >= 6
            assert set(added) == {"2"}
    elif arch < 100:
        (layout,) = layouts
        assert re.search(rf"^{layout} = .*warpsPerCTA = \[4, 1\]", text, re.MULTILINE)
    else:  # read from tensor memory: a row for each thread
        assert variant.num_warps == 4
        assert len(layouts) == 1


def test_values_that_no_query_sees_cost_no_registers(arch):
    """The last level of a tree: after their loop large tiles look for NaN (`attend`), as they do where there is a window."""
    call = attention_ahead.call_of(attention_ahead.GQA_64, 8, 8, tree=True)
    call.mask_len = 24
    config = tuning.choose(arch, False, 64, 64, 2, 64)
    assert config.block_m >= 64
    assert not config.clear
    with recorded() as launches:
        steps.attention(call, config)
    assert launches[0].arguments["TMA"]
    used = ahead.compile_ahead(attention_ahead.variant_of("unseen", launches[0], config, (arch,), hot=False), arch)
    assert used.spill_bytes == 0
    assert not used.serialized


def test_fp8_goes_to_products_without_detours(variant, arch):
    """From e4m3 to float16 at once, not on to bfloat16; and for `mma.sync` without loads of single bytes (see `tile.py`)."""
    ptx = ahead.compiled(variant, arch).asm["ptx"]
    assert "cvt.rn.f16x2.e4m3x2" in ptx
    assert "cvt.bf16.f16" not in ptx
    assert ("wgmma.mma_async" in ptx) == (variant.constexprs["BLOCK_M"] >= 64)
    assert not re.search(r"ld\.shared\.(b|u|s)8", ptx)


def test_tiles_of_fp8_of_both_kinds_are_looked_at():
    assert {v.constexprs["BLOCK_M"] for v, _ in FP8} >= {16, 32, 64}


def test_one_kernel_of_a_shape_is_hot_on_hopper():
    """Where a Gluon kernel serves the usual model, the plain one is for what it does not take."""
    mine = [v for v in VARIANTS if 90 in v.archs and re.match("(Hopper )?attention, GQA 64/8 D64, 16 ", v.name)]
    hot = {v.name for v in mine if v.hot}
    assert hot
    assert hot == {v.name for v in mine if v.name.startswith("Hopper") and not v.name.endswith(", pages of 1")}
    usual = [v for v in VARIANTS if max(v.archs) >= 90 and re.match("attention, GQA [^,]* D(64|128)[ ,]", v.name)]
    assert usual
    assert all(v.hot for v in usual if v not in mine)


def test_every_architecture_has_every_shape():
    alone = re.compile("Hopper|few rows$|pages of")  # sm_90's
    everywhere = [v for v in VARIANTS if not alone.search(v.name)]
    names = {v.name.split(" on sm_")[0] for v in everywhere}
    for arch in ahead.ARCHS:
        mine = {v.name.split(" on sm_")[0] for v in everywhere if arch in v.archs}
        assert mine == {name for name in names if arch in ahead.FP8_ARCHS or "fp8" not in name}


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "arch", "blocks"),
    [
        (255, 0, 4, 90, 2), (255, 0, 2, 90, 4), (168, 0, 8, 90, 1), (128, 0, 8, 90, 2), (32, 0, 4, 90, 16), (32, 0, 4, 120, 12),
        (32, 113 * 1024, 4, 90, 2), (32, 114 * 1024, 4, 90, 1), (32, 99 * 1024, 4, 120, 1), (32, 49 * 1024, 4, 120, 2),
        (32, 228 * 1024, 4, 90, 0), (232, 0, 16, 90, 0),
        (32, 0, 4, 80, 16), (32, 0, 4, 86, 12), (32, 81 * 1024, 4, 80, 2), (32, 82 * 1024, 4, 80, 1), (32, 49 * 1024, 4, 89, 2),
    ],
)  # fmt: skip
def test_resident_blocks(registers, shared, warps, arch, blocks):
    """By hand, from the limits in the CUDA programming guide's table of compute capabilities."""
    assert ahead.resident_blocks(ahead.Resources(registers, shared, 0, 0), warps, arch) == blocks


def test_recorded_arguments_are_specialized_as_a_launch_does():
    hopper = [v for v in VARIANTS if 90 in v.archs]
    variant = next(v for v in hopper if v.name.startswith("attention, GQA 32/8 D128, 16 tree"))
    assert variant.signature["q"] == "*bf16:16"
    assert variant.signature["tree_mask"] == "*i64:16"
    assert variant.signature["k_stride_page"] == "i32:16"
    assert variant.signature["bs"] == "i32"
    assert variant.constexprs["sinks"] is None
    assert variant.constexprs["MASK_LEN"] == 16
    assert variant.constexprs["COOPERATIVE"] is True
    wide = next(v for v in hopper if v.name.startswith("attention, MLA 16 heads, 1 causal"))
    assert wide.signature["k_cache"].startswith("tensordesc<bf16[")
    assert wide.signature["k_cache"].endswith(", 512]>")
    assert wide.constexprs["v_cache"] is None


@pytest.mark.parametrize(("window", "block"), [(128, (64, 32)), (129, (64, 64)), (1025, (128, 64))])
def test_settings_follow_the_window(window, block):
    shape = attention_ahead.GQA_64._replace(window=window)
    call = attention_ahead.call_of(shape, 8, 16, tree=True)
    with recorded() as launches:
        steps.attention(call)
    assert [(launch.arguments["BLOCK_M"], launch.arguments["BLOCK_N"]) for launch in launches] == [block]


@pytest.mark.parametrize("arch", ahead.ARCHS)
def test_descriptors_are_read_where_the_hardware_does(arch):
    """Below sm_90 Triton emulates them: MLA's program then took 116,736 bytes of the 101,376 that sm_86 has."""
    for head_dim, v_dim, shared_kv in ((64, 64, False), (128, 128, False), (576, 512, True)):
        for rows in (1, 16, 64, 1000):
            assert tuning.choose(arch, shared_kv, head_dim, v_dim, 2, rows).tma == (arch >= 90)
            assert tuning.choose_ragged(arch, shared_kv, head_dim, v_dim, 2, rows).tma == (arch >= 90)


def test_every_width_of_heads_is_compiled():
    """What a launch takes depends on the padded parts that keys and values are read in."""

    def parts(head_dim: int) -> tuple[tuple[int, int], int]:
        return tuning.head_parts(head_dim), tuning.value_width(head_dim)

    served = [width for width in range(8, 300) if _constraint(head_meta(width), 90) is None]
    assert (served[0], served[-1]) == (16, 256)
    for kernel in (steps.split_kv_attention_kernel, steps.ragged_attention_kernel):
        mine = [v for v in VARIANTS if v.kernel is kernel and not v.constexprs["SHARED_KV"] and "fp8" not in v.name]
        for arch in ahead.ARCHS:
            assert {parts(v.constexprs["D"]) for v in mine if arch in v.archs} == set(map(parts, served))


def head_meta(width: int) -> AttentionMeta:
    features = dict.fromkeys(("tree_mask", "window", "sinks", "softcap"), False)
    sizes = {"num_heads": 8, "num_kv_heads": 2, "page_size": 64, "q_len": 1, "head_dim": width, "v_head_dim": width}
    return AttentionMeta("mha_draft_decode", torch.bfloat16, torch.bfloat16, **sizes, **features)


def test_narrow_heads_are_refused():
    """Keys are read in parts of at least 16: those of a narrower head would run into the next head."""
    assert _constraint(head_meta(8), 90) == "supports head_dim from 16, not 8"
    assert _constraint(head_meta(16), 90) is None
