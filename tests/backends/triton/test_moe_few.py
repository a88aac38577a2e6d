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
    "DeepSeek-V3 in float8, 64 tokens on sm_90",
    "gpt-oss in MXFP4, 4 tokens on sm_90",
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
    given, wide = variant.constexprs, variant.constexprs["BLOCK_M"] > 8
    rows = given["BLOCK_N"] * (2 if "gate_up" in variant.name else 1)
    one = given["BLOCK_K"] * (rows * given["BITS"] // 8 + 2 * given["BLOCK_M"])
    assert used.shared_bytes >= (variant.num_stages - 1) * one
    ptx = kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx
    assert ("wgmma" in ptx) == wide


@pytest.mark.parametrize("name", ["Qwen3-MoE in MXFP4, 64 tokens on sm_120", "Kimi-K2 in int4, 64 tokens on sm_120"])
def test_two_weights_of_4_bits_fit_in_registers(name):
    """A gate and an up projection, whose numbers and sums are there at the same time."""
    found = [v for v in few.ahead() if v.name.endswith(name)]
    assert len(found) == 2
    for variant in found:
        assert ahead.resources(ahead.compiled(variant, 120)).spill_bytes == 0
