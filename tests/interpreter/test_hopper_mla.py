"""The Hopper MLA kernel of many rows on a CPU, in numpy: how requests are divided, and what is computed. Its trees and pieces:
`test_hopper_trees.py`; what tensor cores compute: `tests/gpu/test_mla_hopper.py`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.hopper import mla
from spec_ops.ops.reference.attention import attention as reference
from tests.interpreter.test_hopper_trees import Runs

HEADS_AND_QUERIES = [(16, 4), (128, 1), (16, 6), (8, 2)]


@pytest.fixture
def runs(monkeypatch) -> Iterator[Runs]:
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    yield Runs(monkeypatch)
    torch.use_deterministic_algorithms(False)


def call_of(rng: random.Random, lens: list[int], heads: int, q_len: int, page_size: int) -> AttentionCall:
    """Results in float32. Rows after a request's end hold NaN."""
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    bs, each = len(lens), max(1, -(-max(lens) // page_size))
    tables = torch.randperm(bs * each, generator=g).view(bs, each).to(torch.int32)
    cache = torch.randn(bs * each, page_size, 576, generator=g).half()
    for b, length in enumerate(lens):
        for position in range(length, each * page_size):
            cache[tables[b, position // page_size], position % page_size] = float("nan")
    return AttentionCall(
        "mla_target_verify", torch.randn(bs, q_len, heads, 576, generator=g).half(), cache, cache, 512, tables,
        torch.tensor(lens, dtype=torch.int32), scale=0.05, k_scale=0.8, v_scale=0.8,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(16))
def test_right_however_requests_are_divided(runs, seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(mla, "EXTRA", rng.choice([0, 1, 3, 5]))
    monkeypatch.setattr(mla, "EXTRA_FROM", rng.choice([0, 1, 2]))
    heads, q_len = rng.choice(HEADS_AND_QUERIES)
    lens = [rng.choice([0, 1, 5, 64, 65, 128, 190, 256, 300, 448, 700, 1000]) for _ in range(rng.choice([1, 2, 3, 5, 8]))]
    if rng.random() < 0.3:
        lens = [rng.choice([128, 192, 256])] * 3
    ranges = rng.choice([1, 2, 3, 5, 7, 9])
    if seed % 4 == 0:  # one among short ones, in more parts than are merged at once
        lens, ranges = [5, rng.choice([1200, 2300, 2600]), 100], 45
    call = call_of(rng, [max(n, q_len) if n else 0 for n in lens], heads, q_len, rng.choice([1, 16, 64]))
    out = torch.full((*call.q.shape[:-1], 512), float("nan"))
    mla.mla(dataclasses.replace(call, out=out), 1 if ranges == 45 else rng.choice([1, 2]), ranges=ranges)
    cache = torch.nan_to_num(call.k_cache.double())
    exact = reference(dataclasses.replace(call, q=call.q.double(), k_cache=cache, v_cache=cache))
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("lens", [[256], [100, 256, 70]], ids=str)
def test_of_a_tile_in_two_the_second_part_alone_is_written(runs, lens, monkeypatch):
    """The first one is added to it in registers. With the short requests each of the two ranges has a whole tile too."""
    made = []

    def empty(*args) -> torch.Tensor:
        made.append(torch.full(args[0], float("nan")))
        return made[-1]

    monkeypatch.setattr(mla, "empty", empty)
    monkeypatch.setattr(mla, "EXTRA", 0)
    call = call_of(random.Random(0), lens, 16, 4, 64)
    out = torch.full((*call.q.shape[:-1], 512), float("nan"))
    mla.mla(dataclasses.replace(call, out=out), 1, ranges=2)
    cache = torch.nan_to_num(call.k_cache.double())
    exact = reference(dataclasses.replace(call, q=call.q.double(), k_cache=cache, v_cache=cache))
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    (partial,) = made
    written = partial[: 4 * 64 * 512].view(4, -1).isfinite().all(1)  # two slots a range, rows of 512 columns
    assert written.tolist() == [False, False, True, False]
    assert partial[: 4 * 64 * 512].isfinite().sum() == 64 * 512
