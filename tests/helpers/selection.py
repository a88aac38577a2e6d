"""Which kernel variants a test compiles: a covering share of them, or all with `--all-variants`.

A variant takes seconds to compile, and there are hundreds on seven architectures. What a test looks for depends on a few facts
of a variant, so CI compiles a share that has each fact at least once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

import pytest

from spec_ops.backends.triton.runtime.ahead import Variant

Pair = tuple[Variant, int]  # a variant and one of its architectures

# Architectures whose kernels differ in kind: `mma.sync` with `cp.async`, `wgmma`, tensor memory, `mma.sync` with descriptors.
GENERATION = {80: "Ampere", 86: "Ampere", 89: "Ampere", 90: "Hopper", 100: "Blackwell", 103: "Blackwell", 120: "GeForce"}


def pairs(variants: Iterable[Variant]) -> list[Pair]:
    return [(variant, arch) for variant in variants for arch in variant.archs]


def _tile(variant: Variant) -> int:
    """Multiply-adds of a thread for one block of keys or of a weight, which compile times grow with; 0 of kernels without such
    tiles."""
    c = variant.constexprs
    if "BLOCK_M" not in c or "BLOCK_N" not in c:
        return 0
    inner = c["D0"] + c["D1"] + c["BLOCK_DV"] if "BLOCK_DV" in c else c.get("BLOCK_K", 0)
    return c["BLOCK_M"] * c["BLOCK_N"] * inner // (32 * variant.num_warps)


def product_facts(variant: Variant, arch: int) -> Iterator[Hashable]:
    """Of a product of few rows, `FORM KIND, M x N x K`: what decides on its registers and its shared memory."""
    form, _, kind = variant.name.partition(",")[0].partition(" ")
    generation, rows = GENERATION[arch], variant.constexprs.get("BLOCK_M", 0)
    bits = 16 if not kind else 4 if "4" in kind else 8
    yield form, bits
    yield form, generation
    yield kind, generation
    yield kind, rows >= 64
    yield bits, generation, rows


def covering(
    candidates: list[Pair], facts: Callable[[Variant, int], Iterable[Hashable]], compiled: Iterable[Pair] = ()
) -> list[Pair]:
    """Few of the candidates that together have all the facts of all of them: the one that adds most, again and again, and of
    several such the one of the smallest tile. First of those that other tests compile, which then come from Triton's cache."""
    left = {fact for pair in candidates for fact in facts(*pair)}
    chosen = []
    for share in ([pair for pair in compiled if pair in candidates], candidates):
        while share:
            best = max(share, key=lambda pair: (len(left.intersection(facts(*pair))), -_tile(pair[0])))
            if not left.intersection(facts(*best)):
                break
            chosen.append(best)
            left.difference_update(facts(*best))
    return chosen


def parametrize_pairs(metafunc: pytest.Metafunc, every: list[Pair], share: list[Pair]) -> None:
    """Give the test's `variant` and `arch` all pairs with `--all-variants`, else the share."""
    chosen = every if metafunc.config.getoption("--all-variants") else share
    metafunc.parametrize(("variant", "arch"), chosen, ids=lambda part: getattr(part, "name", f"sm_{part}"))
