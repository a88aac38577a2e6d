"""Pieces of the batch-invariant Hopper MLA kernel, in numpy and on the CPU: which range takes which piece, where partial
results lie, how they merge, and a prompt's queries as requests. `tests/gpu/test_mla_pieces.py` has what it computes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.hopper import mla as mla_hopper
from spec_ops.backends.triton.attention.hopper import mla_invariant, pieces, program
from spec_ops.ops.reference.attention import attention as reference

PIECE = 4


class _Int32(np.ndarray):
    """A mask as Triton has it, which `to` makes a number."""

    def to(self, dtype):
        return self.astype(dtype)


@pytest.fixture
def in_numpy(monkeypatch):
    gl = SimpleNamespace(
        minimum=np.minimum, maximum=np.maximum, where=np.where, sum=np.sum, int32=np.int64, exp2=np.exp2,
        expand_dims=np.expand_dims, associative_scan=lambda x, axis, _: np.cumsum(x),
    )  # fmt: skip
    for module, names in ((program, ("range_start", "nearest_piece", "exp_shift")), (pieces, ("exp_shift",))):
        monkeypatch.setattr(module, "gl", gl)
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name).fn)


def places(counts: np.ndarray, ranges: int, piece: int = PIECE) -> list[tuple[int, int, int, int]]:
    """`place` of each of `ranges` ranges and of two that are beyond them."""
    share, longer = divmod(int(counts.sum()), ranges)
    size = len(counts) + 3
    padded = np.zeros(size, np.int64)
    padded[: len(counts)] = counts
    ids = np.arange(size)
    in_use = (ids < len(counts)).view(_Int32)
    found = [program.place.fn(i, ranges, share, longer, padded, ids, in_use, piece) for i in range(ranges + 2)]
    return [tuple(map(int, each)) for each in found]  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(60))
def test_ranges_take_every_piece_once_and_whole(in_numpy, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, rng.choice([3, 10, 60]), size=rng.integers(1, 9))
    counts[rng.integers(len(counts))] += 1  # at least one block
    ranges = min(int(rng.integers(1, 60)), int(counts.sum()))
    ends = np.cumsum(counts)
    begins = ends - counts
    wanted = [(b, first) for b, count in enumerate(counts) for first in range(0, count, PIECE)]
    found, most = [], 0
    for position, stop, b, begin in places(counts, ranges):
        assert position == stop or (counts[b] > 0 and begin == begins[b] and begin <= position < ends[b])
        most = max(most, stop - position)
        while position < stop:
            b = int(np.searchsorted(ends, position, side="right"))
            found.append((b, position - begins[b]))
            position = min(position + PIECE, ends[b])
        assert position == stop
    assert found == wanted
    assert most <= -(-counts.sum() // ranges) + PIECE


def test_requests_of_equal_length_are_divided_evenly(in_numpy):
    """32 x 1,024 keys and 8 x 8,192, each with 4 more, over 16 ranges."""
    assert {stop - position for position, stop, *_ in places(np.full(32, 17), 16, 32)[:16]} == {34}
    assert max(stop - position for position, stop, *_ in places(np.full(8, 129), 16, 32)) == 65


@pytest.mark.parametrize("seed", range(20))
def test_partial_results_lie_apart_and_within_bounds(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 40, size=rng.integers(1, 9))
    begins = np.cumsum(counts) - counts
    slots = [
        int(pieces.piece_slot.fn(b, begins[b], first, PIECE)) for b, n in enumerate(counts) for first in range(0, n, PIECE)
    ]
    assert len(set(slots)) == len(slots)
    call = SimpleNamespace(block_tables=np.zeros((1, max(1, int(counts.max())))), page_size=64)
    assert pieces.blocks_of(call) <= PIECE or max(slots, default=0) < pieces.slots_of(call, len(counts), PIECE)


def test_a_piece_that_a_row_does_not_see_changes_no_bit(in_numpy):
    rng = np.random.default_rng(0)
    m, l = rng.standard_normal((2, 8)).astype(np.float32) * 5
    acc = rng.standard_normal((8, 16)).astype(np.float32)
    none = np.full(8, -np.inf, np.float32), np.zeros(8, np.float32), np.zeros((8, 16), np.float32)
    first = pieces.merge.fn(*none, m, l, acc)
    for merged in (first, pieces.merge.fn(*first, *none), pieces.merge.fn(*pieces.merge.fn(*none, *none), m, l, acc)):
        for found, expected in zip(merged, (m, l, acc), strict=True):
            assert found.dtype == np.float32
            assert np.array_equal(found, expected)
    assert np.array_equal(pieces.merge.fn(*none, *none)[2], none[2])


def prompt(heads: int, q_lens: list[int], before: list[int], padding: int = 3) -> AttentionCall:
    g = torch.Generator().manual_seed(heads)
    lens = [n + b for n, b in zip(q_lens, before, strict=True)]
    cache = torch.randn(40, 16, 576, generator=g)
    return AttentionCall(
        "mla_extend",
        torch.randn(sum(q_lens) + padding, heads, 576, generator=g),
        cache,
        cache,
        512,
        torch.randint(40, (len(lens), -(-max(lens) // 16)), generator=g, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        q_indptr=torch.tensor([0, *np.cumsum(q_lens)], dtype=torch.int32),
        max_q_len=max(q_lens),
        scale=0.05,
    )


@pytest.mark.parametrize("heads", [20, 32, 64, 128])
@pytest.mark.parametrize("room", [1 << 29, 1 << 18])
def test_a_prompt_is_requests_of_a_tile(monkeypatch, heads, room):
    """Whose queries may begin before the request, and which may come in several launches."""
    launches = []

    def uniform(call: AttentionCall, piece: int) -> torch.Tensor:
        launches.append(call.q.shape[:2])
        assert call.out is not None
        dense = torch.zeros_like(call.out)
        for b, length in enumerate(call.seq_lens.tolist()):
            seen = min(call.q.shape[1], length)  # the reference refuses queries before the first key
            if seen:
                one = dataclasses.replace(
                    call, q=call.q[b : b + 1, -seen:], seq_lens=call.seq_lens[b : b + 1],
                    block_tables=call.block_tables[b : b + 1], out=None,
                )  # fmt: skip
                dense[b, -seen:] = reference(one)[0]
        return call.out.copy_(dense)

    monkeypatch.setattr(mla_hopper, "mla", uniform)
    monkeypatch.setattr(mla_hopper, "supports", lambda call: True)
    monkeypatch.setattr(mla_invariant, "PARTIAL_BYTES", room)
    call = prompt(heads, [5, 1, 0, 7, 3], [0, 40, 9, 0, 100])
    expected = reference(dataclasses.replace(call, q=call.q[:16]))
    found = mla_invariant.attention(call)
    torch.testing.assert_close(found[:16], expected, rtol=1e-5, atol=1e-5)
    assert not found[16:].any()
    assert {queries for _, queries in launches} == {max(1, 64 // heads)}
    assert sum(n for n, _ in launches) <= 16 + 3 + 5
    given = torch.full_like(found, float("nan"))
    assert mla_invariant.attention(dataclasses.replace(call, out=given)) is given
    assert torch.equal(given, found)


def test_a_part_of_a_gpu_has_one_range(monkeypatch):
    """Where not all programs can be there at once; no other kernel, which would have other bits."""
    asked, ranges = [], []

    def uniform(call: AttentionCall, piece: int, **given: int) -> torch.Tensor:
        ranges.append(given.get("ranges"))
        assert call.out is not None
        return call.out.zero_()

    monkeypatch.setattr(mla_hopper, "mla", uniform)
    monkeypatch.setattr(mla_hopper, "supports", lambda call: True)
    monkeypatch.setattr(mla_invariant, "resident_or_none", lambda grid, start: asked.append(grid))
    call = prompt(16, [4, 4], [0, 60], padding=0)
    mla_invariant.attention(call)
    assert ranges == [1]
    assert [grid[-1] for grid in asked] == [(4, 4, 16, 576)]
    monkeypatch.setattr(mla_invariant, "resident_or_none", lambda grid, start: start())
    mla_invariant.attention(call)
    assert ranges == [1, None]
