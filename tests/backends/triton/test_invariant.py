"""What decides the order of additions in the batch-invariant kernels, read from their compiled code; no GPU is needed."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.attention import variants as attention
from spec_ops.backends.triton.linear import invariant
from spec_ops.backends.triton.moe import grouped
from spec_ops.backends.triton.runtime import ahead
from tests.helpers.selection import covering

VARIANTS = {variant.name: variant for variant in invariant.ahead() if 90 in variant.archs}
EXPERTS = {variant.name: variant for variant in grouped.ahead() if "invariant" in variant.name}
ATTENTION = {v.name: v for v in attention.ahead() if v.name.startswith("deterministic") and 90 in v.archs}
ALL = {name: v for name, v in (VARIANTS | EXPERTS | ATTENTION).items() if 90 in v.archs}


# Tiles and widths take one path: of the products each number of rows and of splits, of attention each kernel with its kind of
# keys and of mask. Of the latter those that `test_attention_ahead.py` assembles, which Triton's cache has.
ASSEMBLED = {
    "deterministic tree attention, GQA 32/8 D128 on sm_90", "deterministic tree attention, GQA 32/8 D128, few rows",
    "deterministic attention, GQA 32/8 D128 float32",
    "deterministic tree attention, GQA 32/8 D128 float32",
}  # fmt: skip


def _facts(variant: ahead.Variant, arch: int) -> list[tuple]:
    name = variant.name
    if name in ATTENTION:
        kind = variant.kernel.__name__, "tree" in name
        keys, float32 = variant.constexprs.get("SHARED_KV"), "float32" in name
        return [(*kind, "keys", keys), (*kind, "numbers", float32, "fp8" in name)]
    if found := re.fullmatch(r"(skinny_mm, invariant, \d+) x .*", name):
        return [(found[1],), ("splits", variant.constexprs["SPLITS"])]
    return [(name,)]


PAIRS = [(variant, 90) for variant in ALL.values()]
SHARE = covering(PAIRS, _facts, [pair for pair in PAIRS if "GQA 32/8 D128" in pair[0].name])


def pytest_generate_tests(metafunc):
    everything = metafunc.config.getoption("--all-variants")
    if metafunc.function is test_compiled_code:
        names = list(ALL) if everything else [variant.name for variant, _ in SHARE]
        long = [name for name in names if "MLA" in name and "float32" in name]  # kernels of thousands of multiply-adds
        metafunc.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in long else n for n in names])
    elif metafunc.function is test_attention_of_chains_and_trees_shares_its_instructions:
        metafunc.parametrize("shape", ["GQA 64/8 D64", "GQA 32/8 D128"] if everything else ["GQA 32/8 D128"])


def code(variant: ahead.Variant, arch: int) -> str:
    """Without the assembler's part, where no other test needs that."""
    return ahead.compiled(variant, arch).asm["ptx"] if variant.name in ASSEMBLED else ahead.lowered(variant, arch).ptx


def products(variant: ahead.Variant, arch: int) -> set[str]:
    """Its instructions that multiply matrices, with their shapes."""
    return set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S*", code(variant, arch)))


def test_compiled_code(name):
    """No float is added by an atomic instruction, in any order that comes, and no multiplication was fused with an addition,
    but for those of float32 products."""
    ptx = code(ALL[name], 90)
    assert not re.findall(r"\b(?:atom|red)\.\S*\.(?:f|bf)\d+", ptx)
    assert len(re.findall(r"\bfma\.rn\.", ptx)) == (multiply_adds(ALL[name]) if "float32" in name else 0)
    if "float32" in name:
        assert not products(ALL[name], 90)  # no tensor core, and so no tf32


def multiply_adds(variant: ahead.Variant) -> int:
    """Of a thread, in all products of float32 that the kernel has: one for every number along k."""
    c = variant.constexprs
    if "BLOCK_K" in c:
        return c["BLOCK_M"] * c["BLOCK_N"] * c["BLOCK_K"] // (32 * variant.num_warps)
    logits, outputs = c["D0"] + c["D1"], c["BLOCK_DV"]
    loops = 2 if variant.name.startswith("deterministic tree") else 1  # over keys in order, and over those of a path
    return loops * c["BLOCK_M"] * c["BLOCK_N"] * (logits + outputs) // (32 * variant.num_warps)


def test_tiles_of_a_weight_share_their_splits():
    by_weight: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for variant in VARIANTS.values():
        if found := re.search(r"(\d+) x (\d+) x (\d+)", variant.name):
            _, n, k = map(int, found.groups())
            blocks = k // variant.constexprs["BLOCK_K"]
            ends = [i * blocks // variant.constexprs["SPLITS"] * variant.constexprs["BLOCK_K"] for i in range(1, 5)]
            by_weight.setdefault((n, k), set()).add((variant.constexprs["SPLITS"], *ends))
    assert {(6144, 4096), (4096, 14336)} <= by_weight.keys()  # each with tiles of several numbers of rows
    assert all(len(orders) == 1 for orders in by_weight.values())


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_tiles_of_experts_share_their_instruction(arch, request):
    """Those of few tokens and of many, where both are used. Both kernels have one product: but on Hopper, whose instruction
    follows the rows, each format's is looked at in one of them."""
    pairs = [
        (v, EXPERTS[n.replace(" 4 tokens", " 4096 tokens")]) for n, v in EXPERTS.items() if " 4 tokens" in n and "sum" not in n
    ]
    pairs = [pair for pair in pairs if arch in pair[0].archs]
    assert len(pairs) == (8 if arch >= 89 else 6)
    if arch != 90 and not request.config.getoption("--all-variants"):
        pairs = [pair for i, pair in enumerate(pairs) if i % 2 != i // 2 % 2]  # by turns
    for few, many in pairs:
        assert few.constexprs["BLOCK_M"] < many.constexprs["BLOCK_M"]
        assert len(products(few, arch)) == 1
        assert products(few, arch) == products(many, arch)


def test_attention_of_chains_and_trees_shares_its_instructions(shape):
    kinds = ("attention", "extend", "tree attention")
    found = [products(ATTENTION[f"deterministic {kind}, {shape} on sm_90"], 90) for kind in kinds]
    assert found[0]
    assert found[1:] == found[:1] * 2


def test_tiles_of_few_rows_share_their_instruction():
    """Another one than that of 64 rows: that its bits are the same is for `tests/gpu/test_deterministic.py` to show."""
    few = [products(v, 90) for name, v in ATTENTION.items() if name.endswith("GQA 32/8 D128, few rows")]
    assert few == [{"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}] * 2
