"""Mixtures of few tokens: launches that fit, work for every program, blocks in flight."""

from __future__ import annotations

import os

import pytest

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what is launched")

from spec_ops.backends.triton.moe import few  # noqa: E402
from spec_ops.backends.triton.runtime import ahead  # noqa: E402

SIZES = [
    (128, 8, 2048, 768),
    (32, 4, 2880, 2880),
    (256, 8, 7168, 2048),
    (8, 2, 4096, 14336),
    (64, 6, 2048, 1408),
    (4, 1, 72, 8),
]
LAYOUTS = [(True, False, False), (True, True, True), (True, True, False), (False, False, True), (False, False, False)]


@pytest.mark.parametrize("arch", [90, 100, 103, 120])
@pytest.mark.parametrize(("experts", "k", "hidden", "inner"), SIZES)
def test_every_size_has_configs_that_fit(experts, k, hidden, inner, arch):
    for tokens in (1, 2, 8, 9, 16, 17, 32, 33, 64):
        for layout in LAYOUTS:
            for sms in (1, 84, 132, 188):
                sizes = few.Sizes(tokens, k, experts, hidden, inner, *layout)
                first, second = few.choose(sizes, sms, arch)
                loads = 2 if layout[0] and first.rows == first.block_n else 1
                assert first.block_m == second.block_m >= tokens
                assert first.splits == 1
                assert second.splits <= max(1, min(k, experts) * -(-inner // second.block_k) // 2)
                for config, loaded in ((first, loads * first.rows), (second, second.rows)):
                    buffers = config.num_stages - (config.chunked or arch == 120)
                    assert buffers >= 2
                    one = 2 * config.block_k * (loaded + config.block_m)
                    assert config.programs * (buffers * one + 1024) <= ahead.SHARED_LIMIT[arch] + 1024


def test_what_the_notebook_counts_on():
    """One token of Qwen3-30B-A3B, on 132 multiprocessors."""
    first, second = few.choose(few.Sizes(1, 8, 128, 2048, 768, True, False, False), 132, 90)
    assert first == few.Config(8, 16, 16, 256, True, 1, 4, 3, True)
    assert second == few.Config(8, 16, 16, 256, True, 3, 7, 3, True)


STORED = [
    "Qwen3-MoE in float8, 4 tokens on sm_90",
    *(f"DeepSeek-V3 in float8, {tokens} tokens on sm_90" for tokens in (8, 64)),
    *(f"gpt-oss in MXFP4, {tokens} tokens on sm_90" for tokens in (4, 16, 32, 64)),
    "gpt-oss in MXFP4 and float16, 4 tokens on sm_90",
    "Kimi-K2 in int4, 4 tokens on sm_90",
]


def variants(*names: str) -> list[ahead.Variant]:
    found = [v for v in few.ahead() if 90 in v.archs and v.name.endswith(names)]
    assert len(found) == 2 * len(names)
    return found


@pytest.mark.parametrize(
    "variant", variants("Qwen3-MoE, 1 tokens on sm_90", "gpt-oss, 64 tokens on sm_90"), ids=lambda v: v.name
)
def test_programs_are_resident_and_blocks_in_flight(variant):
    """As many programs as `choose` counts on; as many blocks as it gives stages: Triton would keep half of them in flight if
    the address of one load came from another load of the same iteration."""
    kernel = ahead.compiled(variant, 90)
    used = ahead.resources(kernel)
    assert used.spill_bytes == 0
    assert not used.serialized
    assert ahead.resident_blocks(used, variant.num_warps, 90) == variant.programs
    given, wide = variant.constexprs, variant.constexprs["BLOCK_M"] > 8
    rows = given["BLOCK_N"] * (2 if "gate_up" in variant.name else 1)
    one = 2 * given["BLOCK_K"] * (rows + given["BLOCK_M"])
    assert used.shared_bytes >= (variant.num_stages - (not wide)) * one
    ptx = kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx
    assert ("wgmma" in ptx) == wide


@pytest.mark.parametrize("variant", variants(*STORED), ids=lambda v: v.name)
def test_stored_weights_are_resident_and_in_flight(variant):
    kernel = ahead.compiled(variant, 90)
    used = ahead.resources(kernel)
    assert used.spill_bytes == 0
    assert not used.serialized
    assert ahead.resident_blocks(used, variant.num_warps, 90) >= variant.programs
    given = variant.constexprs
    rows = given["BLOCK_N"] * (2 if "gate_up" in variant.name else 1)
    one = given["BLOCK_K"] * (rows * given["BITS"] // 8 + 2 * given["BLOCK_M"])
    assert used.shared_bytes >= (variant.num_stages - 1) * one
    if given["SCALED"] and given["CHUNKED"]:  # scales alone go through shared memory, and not the numbers that they made
        rest = 16 * rows * given["BLOCK_M"] if "BLOCKS_N" in given else 0  # sums of four warps, beside the next tile's blocks
        assert used.shared_bytes <= (variant.num_stages - 1) * one + rows * given["BLOCK_K"] // 32 + rest + 1024
    ptx = kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx
    assert ("wgmma" in ptx) != given["CHUNKED"]


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize(("experts", "k", "hidden", "inner"), SIZES[:5])
def test_scaled_pairs_have_configs_that_fit(experts, k, hidden, inner, arch):
    for tokens in (1, 8, 9, 16, 17, 32, 33, 64):
        for gated, interleaved in ((True, True), (True, False), (False, False)):
            for sms in (1, 132):
                configs = few.choose(
                    few.Sizes(tokens, k, experts, hidden, inner, gated, interleaved, False, 4, True), sms, arch
                )
                for config, loads in zip(configs, (2 if gated and not interleaved else 1, 1), strict=True):
                    assert config.scaled
                    assert config.chunked == (tokens <= 32)
                    # Of a batch of fewer products than warps, each would be computed by several.
                    assert not config.chunked or config.block_k >= config.chunk * config.num_warps
                    buffers = config.num_stages - 1
                    one = config.block_k * (loads * config.rows // 2 + 2 * config.block_m)
                    sums = 16 * loads * config.rows * config.block_m if config.ranges else 0
                    assert buffers >= 2
                    assert config.programs * (buffers * one + sums + 1024) <= ahead.SHARED_LIMIT[arch] + 1024


@pytest.mark.parametrize(
    ("tokens", "block_m", "gate", "down"),
    [
        (1, 2, (64, 512, 3, 128), (32, 1024, 3, 128)),
        (3, 4, (64, 512, 3, 128), (32, 1024, 3, 128)),
        (8, 8, (64, 512, 3, 128), (32, 1024, 3, 128)),
        (9, 16, (64, 256, 4, 64), (64, 256, 4, 64)),
        (32, 32, (64, 256, 3, 64), (64, 256, 3, 64)),
    ],
)
def test_tiles_of_scaled_pairs(tokens, block_m, gate, down):
    """Of gpt-oss-20b on an H200 (`docs/notebook/mixtures.md`)."""
    configs = few.choose(few.Sizes(tokens, 4, 32, 2880, 2880, True, True, False, 4, True), 132, 90)
    for config, tile in zip(configs, (gate, down), strict=True):
        assert (config.rows, config.block_k, config.programs, config.chunk) == tile
        assert config.block_m == block_m
    assert configs[0].block_n == gate[0] // 2


def test_no_second_wave_of_few_programs():
    """A down projection in float8 whose blocks of columns are a few more than three programs a multiprocessor: four, unless
    they would be too many or have too few blocks in flight."""

    def down(hidden: int, sms: int = 132, arch: int = 90, bits: int = 8) -> tuple[int, int]:
        second = few.choose(few.Sizes(4, 8, 256, hidden, 2048, True, False, False, bits), sms, arch)[1]
        assert second.splits == 1
        return second.programs, second.num_stages - 1

    assert down(7168) == (4, 3)  # DeepSeek-V3: 448 blocks of columns on 132 multiprocessors
    assert down(7168, 148, 100) == (4, 3)
    assert down(16 * 396) == (3, 4)
    assert down(16 * 397) == down(16 * 528) == (4, 3)
    assert down(16 * 529) == (3, 4)
    assert down(7168, 188, 120) == (2, 2)
    assert down(7168, bits=16)[0] == 3
    gateless = few.Sizes(1, 8, 256, 7168, 16 * 56, False, False, False, 8)  # eight experts of 56 blocks: 448 too
    assert few.choose(gateless, 132, 90)[0].programs == 3


def test_who_has_a_range_of_tiles():
    """Up to 8 tokens on Hopper: as many programs as there are places, or tiles. Its tiles are of two experts at most, so not
    where experts are more than programs."""

    def ranges(tokens: int, experts: int, sms: int, arch: int) -> int:
        sizes = few.Sizes(tokens, 4, experts, 2880, 2880, True, True, False, 4, True)
        return few.choose(sizes, sms, arch)[0].ranges

    assert ranges(2, 32, 132, 90) == ranges(8, 32, 132, 90) == 3 * 132
    assert ranges(1, 32, 132, 90) == 4 * 90
    assert ranges(1, 1, 132, 90) == 90
    assert ranges(9, 32, 132, 90) == ranges(8, 32, 132, 100) == ranges(8, 32, 10, 90) == 0
    assert ranges(8, 30, 10, 90) == 30


@pytest.mark.parametrize("name", ["Qwen3-MoE in MXFP4, 64 tokens on sm_120", "Kimi-K2 in int4, 64 tokens on sm_120"])
def test_two_weights_of_4_bits_fit_in_registers(name):
    """A gate and an up projection, whose numbers and sums are there at the same time."""
    found = [v for v in few.ahead() if v.name.endswith(name)]
    assert len(found) == 2
    for variant in found:
        assert ahead.resources(ahead.compiled(variant, 120)).spill_bytes == 0
