"""Trees in the batch-invariant Hopper MLA kernel on a CPU: the kernel that gathers paths in Triton's interpreter, and the one
that walks them in numpy, as a GPU would run both; `tests/gpu/test_mla_pieces.py` has what tensor cores compute."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.hopper import (
    combine,
    mask,
    mla,
    mla_load,
    mla_paths,
    pages,
    pieces,
    program,
)
from spec_ops.ops.reference.attention import attention as reference
from tests.helpers import gluon_in_numpy
from tests.helpers.chains import as_chains
from tests.helpers.dense_attention import PREFIX, mask_words
from tests.helpers.gluon_in_numpy import Machine, in_numpy


class Runs:
    """What `mla.mla` launches."""

    def __init__(self, monkeypatch) -> None:
        self.machine = Machine()
        self.kernel = mla.mla_hopper_attention.fn
        for module in (mla, mla_paths):
            monkeypatch.setattr(module, "launch", self.launch)
        self.machine.into(monkeypatch, mla, mla_load, pages, pieces, program, combine, mask, mla_paths)

    def launch(self, kernel, grid, *args, **kwargs) -> None:
        for name in ("num_warps", "enable_fp_fusion", "launch_cooperative_grid", "early"):
            kwargs.pop(name, None)
        if kernel is mla_paths.gather_paths_kernel:
            kernel[grid](*args, **kwargs, PDL=False)
            return
        self.machine.run(self.kernel, grid[0], *map(in_numpy, args), **{n: in_numpy(x) for n, x in kwargs.items()}, PDL=False)


@pytest.fixture
def runs(monkeypatch) -> Iterator[Runs]:
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    yield Runs(monkeypatch)
    torch.use_deterministic_algorithms(False)


def tree_call(
    rng: random.Random, heads: int, q_len: int, mask_len: int, prefixes: list[int], page_size: int, words: list[list[int]]
) -> AttentionCall:
    """Results in float32, which show more than what 16 bits keep. Slots that no query sees hold NaN."""
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    bs, lens = len(prefixes), [prefix + mask_len for prefix in prefixes]
    each = -(-max(lens) // page_size)
    tables = torch.randperm(bs * each, generator=g).view(bs, each).to(torch.int32)
    cache = torch.randn(bs * each, page_size, 576, generator=g).half()
    for b, length in enumerate(lens):
        seen = 0
        for word in words[b]:
            seen |= word
        for position in range(each * page_size):
            bit = position - (length - mask_len)
            if bit >= 0 and (bit >= mask_len or not seen >> bit & 1):
                cache[tables[b, position // page_size], position % page_size] = float("nan")
    return AttentionCall(
        "mla_target_verify", torch.randn(bs, q_len, heads, 576, generator=g).half(), cache, cache, 512, tables,
        torch.tensor(lens, dtype=torch.int32), torch.tensor(words), mask_len, scale=0.05, k_scale=0.8, v_scale=0.8,
        sinks=torch.randn(heads, generator=g) if rng.random() < 0.3 else None,
    )  # fmt: skip


def attend(call: AttentionCall, piece: int, ranges: int) -> torch.Tensor:
    out = torch.full((*call.q.shape[:-1], 512), float("nan"))
    mla.mla(dataclasses.replace(call, out=out), piece=piece, ranges=ranges)
    return out


def chains_of(call: AttentionCall, queries: list[tuple[int, int]]) -> AttentionCall:
    """Each query alone, in pages of one key."""
    a = {name: getattr(call, name) for name in ("q", "block_tables", "seq_lens", "tree_mask", "mask_len")}
    chains = as_chains(a | {"kv_cache": call.k_cache}, queries)
    cache = chains.pop("kv_cache")
    return dataclasses.replace(call, **chains | {"mask_len": 0, "k_cache": cache, "v_cache": cache})


def words_of(rng: random.Random, kind: str, q_len: int, mask_len: int) -> list[int]:
    if kind == "any":
        return [rng.getrandbits(mask_len) & rng.getrandbits(64) for _ in range(q_len)]
    reach = 1 if kind == "chain" else rng.choice([2, 5, mask_len])
    parents = [PREFIX, *(rng.randrange(max(0, node - reach), node) for node in range(1, mask_len))]
    nodes = sorted(rng.sample(range(mask_len), q_len))
    return [word & (1 << 64) - 1 for word in mask_words(parents, nodes)]


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@pytest.mark.parametrize("seed", range(20))
def test_a_node_has_the_bits_of_its_chain(runs, seed):
    rng = random.Random(seed)
    heads = rng.choice([4, 8, 16, 20, 32, 64, 96, 128])
    mask_len = rng.choice([1, 3, 6, 16, 33, 64])
    q_len = min(rng.choice([mask_len, rng.randint(1, mask_len)]), max(1, 160 // heads))
    piece, page_size = rng.choice([2, 2, 4]), rng.choice([1, 16, 64, 128])
    edges = [0, 1, 63 - mask_len // 2, 64, 100, 127, 128 - mask_len // 2, 190, 191, 193, 250, 255, 256, 300]
    prefixes = [max(rng.choice(edges), 1 - mask_len) for _ in range(3)]
    prefixes[1] = rng.choice([-mask_len // 2 + 1, 5, prefixes[1]])
    prefixes[1] = max(prefixes[1], 1 - mask_len)
    words = [list(map(signed, words_of(rng, rng.choice(["tree", "chain", "any"]), q_len, mask_len))) for _ in prefixes]
    call = tree_call(rng, heads, q_len, mask_len, prefixes, page_size, words)
    out = attend(call, piece, rng.choice([1, 2, 5]))
    queries = [(b, i) for b in range(3) for i in sorted({0, rng.randrange(q_len), q_len - 1})]
    alone = attend(chains_of(call, queries), piece, rng.choice([1, 4]))
    for (b, i), expected in zip(queries, alone[:, 0], strict=True):
        found = out[b, i]
        assert torch.equal(found, expected), (b, i, prefixes[b], bin(words[b][i]))
    check = dataclasses.replace(call, q=call.q.double(), k_cache=call.k_cache.double(), v_cache=call.v_cache.double(), out=None)
    torch.testing.assert_close(out.double(), reference(check), rtol=1e-2, atol=1e-2)


def test_a_program_that_waits_in_vain_is_found(runs, monkeypatch):
    """By the stand-in for the GPU: here as where the odd warpgroup expects a block of its own in every pair."""
    monkeypatch.setattr(gluon_in_numpy, "PATIENCE", 1.0)
    monkeypatch.setattr(mla, "has_partner", lambda k, last, lonely, tree: np.asarray(k + 1 < last).view(gluon_in_numpy.Array))
    call = tree_call(random.Random(0), 16, 4, 4, [128], 64, [[1, 2, 4, 8]])
    with pytest.raises(RuntimeError, match="waited for what did not come"):
        attend(call, 4, 1)


@pytest.mark.parametrize("seed", range(12))
def test_gathered_keys(seed):
    """Of every path that takes a turn, as many blocks as the tile asks for; one turn for paths that begin with one another."""
    rng = random.Random(seed)
    heads = [16, 128, 20, 8, 96, 2, 64, 32, 1, 24, 4, 100][seed]
    mask_len = rng.choice([2, 5, 16, 40, 64])
    q_len = min(rng.choice([mask_len, rng.randint(1, mask_len)]), 24 if heads < 24 else 6)
    prefixes = [rng.choice([1 - mask_len, 0, 60, 64, 130]) for _ in range(2)]
    words = [words_of(rng, kind, q_len, mask_len) for kind in ("tree", rng.choice(["any", "chain"]))]
    call = tree_call(rng, heads, q_len, mask_len, prefixes, 16, [list(map(signed, row)) for row in words])
    plan, rows, stride = mla_paths.gathered(call, call.tree_mask, call.block_tables, call.seq_lens, 1)
    room = mla_paths.queries_of_a_tile(q_len, heads)
    assert stride == plan.stride(0) == plan.shape[1] * plan.shape[2]
    for b, length in enumerate(call.seq_lens.tolist()):
        prefix = max(length - mask_len, 0)
        tail = prefix // 64
        slots = [[bit for bit in range(mask_len) if word >> bit & 1 and length - mask_len + bit >= 0] for word in words[b]]
        for tile in range(plan.shape[1]):
            first = tile * 64 // heads
            queries = range(first, min(q_len, -(-(tile + 1) * 64 // heads)))
            turns, reaches = divmod(int(plan[b, tile, 0]), 2)
            paths, served = plan[b, tile, 1 : 1 + turns].tolist(), plan[b, tile, 1 + room :].tolist()
            assert len(set(paths)) == turns
            assert {path - b * q_len for path in paths} <= set(queries)
            assert reaches == any(prefix + len(slots[i]) > (tail + 1) * 64 for i in queries)
            for i in queries:
                turn, depth = divmod(served[i - first], 128)
                owner = paths[turn] - b * q_len
                assert depth == len(slots[i])
                assert slots[owner][:depth] == slots[i]
            ends = [i for i in queries if not any(slots[j][: len(slots[i])] == slots[i] != slots[j] for j in queries)]
            assert turns == len({tuple(slots[i]) for i in ends})
            for path in paths:
                places = [*range(tail * 64, prefix), *(length - mask_len + bit for bit in slots[path - b * q_len])]
                expected = torch.zeros(64 * (1 + reaches), 576, dtype=torch.half)
                for row, place in enumerate(places):
                    expected[row] = call.k_cache[call.block_tables[b, place // 16], place % 16]
                assert torch.equal(rows[path * 2 : path * 2 + 1 + reaches].flatten(0, 1), expected)
