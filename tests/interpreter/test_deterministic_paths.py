"""Trees in the batch-invariant attention kernels: every query has the bits of the chain that its path is, and is right within
float32's error. `tests/gpu/test_deterministic.py` asks the same of the tensor cores."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
import triton.language as tl  # noqa: E402

from spec_ops.backends.triton.attention.deterministic.paths import nth_bit  # noqa: E402
from tests.helpers.chains import as_chains  # noqa: E402
from tests.interpreter.test_deterministic import CHUNK, OPTIONS, WAYS, alone, run, same_bits  # noqa: E402
from tests.ops.test_attention import FP8, Case, check, make_case, poison_unseen  # noqa: E402

# Where a tree begins: before, at and after the ends of a block (16 keys) and of a chunk; and before a request's first key.
PREFIXES = (-2, 0, 1, 15, 16, 17, CHUNK - 5, CHUNK - 1, CHUNK, CHUNK + 1, 47, 2 * CHUNK + 3)
MODELS = {
    "GQA": ("mha", {"heads": 6, "kv_heads": 2, "head_dim": 32, "v_dim": 16}),
    "MHA": ("mha", {"heads": 1, "kv_heads": 1, "head_dim": 16, "v_dim": 16}),
    "fp8": ("mha", {"heads": 4, "kv_heads": 1, "head_dim": 32, "v_dim": 32, "kv_dtype": FP8}),
    "MLA": ("mla", {"heads": 3, "kv_heads": 1, "head_dim": 48, "v_dim": 32}),
    "MLA, many heads": ("mla", {"heads": 32, "kv_heads": 1, "head_dim": 48, "v_dim": 32}),
    "MLA, fp8": ("mla", {"heads": 3, "kv_heads": 1, "head_dim": 80, "v_dim": 64, "kv_dtype": FP8}),
}
TREES = ("verify 1", "verify 6", "verify 13", "verify 64", "draft 4 x 5", "draft 3 x 2")


def made(model: str, tree: str, seed: int, options: dict[str, Any]) -> Case:
    """Two requests with trees of their own, and padded ones."""
    rng = random.Random(seed)
    kind, shape = MODELS[model]
    mode, size, *rest = tree.replace(" x", "").split()
    sizes = {"draft_steps": int(size), "width": int(rest[0])} if rest else {"num_nodes": int(size)}
    lens = [max(prefix, 1 - int(size)) for prefix in rng.sample(PREFIXES, 2)]
    page_size = rng.choice([1, 3, 16, 24, 64])
    return make_case(kind, f"{mode}_tree", "cpu", lens=lens, page_size=page_size, seed=seed, **sizes, **shape, **options)


def paths_have_the_bits_of_chains(case: Case, seed: int) -> torch.Tensor:
    """Of some queries, in one call of all trees and request by request; the work is divided otherwise each time."""
    rng = random.Random(seed)
    way, other, chains = rng.sample(list(WAYS), 3)
    nodes = sorted([*rng.sample(range(case.q_lens[0]), min(case.q_lens[0], 5)), case.q_lens[0] - 1])
    expected = run(case, chains, **as_chains(case.arguments, [(b, i) for b in range(2) for i in nodes]))
    expected = expected.view(2, len(nodes), *expected.shape[2:])
    out = run(case, way)
    assert same_bits(out[:2, nodes], expected)
    b = rng.randrange(2)
    assert same_bits(run(case, other, **alone(case, b))[:, nodes], expected[b : b + 1])
    return out


# Every tree with half of the models: each of their features meets small, wide and deep ones.
@pytest.mark.parametrize(("tree", "model"), [(t, m) for i, t in enumerate(TREES) for m in [*MODELS][i % 2 :: 2]])
def test_paths_are_chains(products_by_rows, tree, model):
    seed = sum(map(ord, model + tree))
    options = [*OPTIONS, {"window_left": 0, "softcap": 2.0}][seed % (len(OPTIONS) + 1)]
    case = made(model, tree, seed, options)
    check(case, paths_have_the_bits_of_chains(case, seed))


@pytest.mark.parametrize("model", ["MHA", "GQA", "MLA"])
def test_masks_of_any_bits(products_by_rows, model):
    """Of no tree: queries that see no draft, not themselves, or what another one sees and more before it."""
    case = made(model, "verify 23", 0, {})
    rng = random.Random(model)
    words = [[rng.getrandbits(rng.choice([3, 23, 63])) & rng.getrandbits(63) for _ in range(23)] for _ in case.q_lens]
    for row in words:
        row[3], row[4], row[5] = 0, row[6] | 1 << 30, row[7] & -8 | 0b101  # a bit from `mask_len` on means nothing
    a = case.arguments
    paths_have_the_bits_of_chains(case.but(tree_mask=torch.tensor(words), q=torch.nan_to_num(a["q"])), 1)


@pytest.mark.parametrize("model", ["GQA", "MLA"])
def test_keys_between_windows(model):
    """A window smaller than the tree, and of a path its first, its middle and its last node alone as queries: no window holds
    the nodes between them."""
    case = made(model, "verify 23", 0, {"window_left": 2})
    case.trees[:] = [list(range(-1, 22))] * len(case.trees)
    words = torch.tensor([[(1 << (i + 1)) - 1 for i in range(23)]] * len(case.q_lens))
    some, q = [0, 9, 22], torch.nan_to_num(case.arguments["q"])
    case = case.but(tree_mask=words[:, some], q=q[:, some])
    case.q_lens[:], case.nodes[:] = [len(some)] * len(case.q_lens), some
    assert poison_unseen(case) > 0
    for way in ("whole", "split"):
        check(case, run(case, way))


def test_deep_trees(products_by_rows):
    """Two branches, as deep as there are nodes but one: over two chunks and five blocks. And the chain of the first of them."""
    case = made("MHA", "verify 64", 0, {})
    words = [(1 << (i + 1)) - 1 for i in range(62)] + [1 << 62 | 1, -(1 << 63) | (1 << 62) - 1]
    case = case.but(tree_mask=torch.tensor([words] * len(case.q_lens)), q=torch.nan_to_num(case.arguments["q"]))
    out = paths_have_the_bits_of_chains(case, 1)
    chain = {"q": case.arguments["q"][:2, :62], "seq_lens": case.arguments["seq_lens"][:2] - 2}
    chain["block_tables"] = case.arguments["block_tables"][:2]
    assert same_bits(run(case, **chain, tree_mask=None, mask_len=None), out[:2, :62])


@triton.jit
def _places(words, out, COUNT: tl.constexpr):
    for row in range(COUNT):
        tl.store(out + row * 64 + tl.arange(0, 64), nth_bit(tl.load(words + row), tl.arange(0, 64)))


def test_nth_bit():
    rng = random.Random(0)
    words = [0, 1, -1, -(1 << 63), 0x5555555555555555, *(rng.getrandbits(63) & rng.getrandbits(63) for _ in range(20))]
    out = torch.empty(len(words), 64, dtype=torch.int32)
    _places[(1,)](torch.tensor(words), out, len(words))
    for word, row in zip(words, out.tolist(), strict=True):
        bits = [bit for bit in range(64) if word >> bit & 1]
        assert row[: len(bits)] == bits
        assert all(0 <= place < 64 for place in row)
