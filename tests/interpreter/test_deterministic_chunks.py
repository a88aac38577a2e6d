"""Chunks of the batch-invariant attention kernels: where they begin, who computes them, and that this changes no bits."""

from __future__ import annotations

import random

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
import triton.language as tl  # noqa: E402

from spec_ops.backends.triton.attention.deterministic.chunks import (  # noqa: E402
    chunk_of,
    chunk_start,
    chunks_before,
    divide,
    find,
    in_order_of_length,
    most_chunks,
)
from spec_ops.backends.triton.attention.deterministic.launcher import places_of  # noqa: E402
from tests.interpreter.test_deterministic import CHUNK, alone, made, run, same_bits  # noqa: E402
from tests.ops.test_attention import KINDS, check  # noqa: E402

# Before, at and after the ends of chunks of each length: of 32 keys up to 256, of 64 up to 512, of 128 beyond.
GRADES = (255, 256, 257, 289, 320, 321, 511, 512, 513, 639, 641, 900)


def begins_of_chunks(keys: int) -> list[int]:
    """In keys, of all chunks up to there."""
    return [at for at in range(0, keys, CHUNK) if at < 256 or (at < 512 and at % 64 == 0) or at % 128 == 0]


def test_where_chunks_begin():
    launched = torch.full((40, 3), -1, dtype=torch.int32)
    _chunks[(1,)](launched, 40)
    begins = [at // CHUNK for at in begins_of_chunks(200 * CHUNK)]
    for unit, (before, of, start) in enumerate(launched.tolist()):
        assert before == most_chunks(unit) == sum(begin < unit for begin in begins)
        assert begins[of] <= unit < begins[of + 1]
        assert start == begins[unit]  # `unit` as the number of a chunk


def test_vectors_of_requests():
    """As many places as requests, as a power of two, but never a warp's width: `places_of`."""
    for bs in range(1, 300):
        places = places_of(bs)
        assert places >= max(bs, 2)
        assert places in (2, 4, 8, 16, 64, 128, 256, 512)
        assert places < 2 * max(bs, 2) or (17 <= bs <= 32 and places == 64)


@triton.jit
def _chunks(out, COUNT: tl.constexpr):
    for i in range(COUNT):
        at = out + 3 * i
        tl.store(at, chunks_before(i))
        tl.store(at + 1, chunk_of(i))
        tl.store(at + 2, chunk_start(i))


@triton.jit
def _dealt(lens, out, bs, span, ranges, capacity, WINDOW: tl.constexpr, BS: tl.constexpr):
    pieces, first, chunks = divide(lens, bs, span, ranges, capacity, WINDOW, 32, BS)
    ends = in_order_of_length(pieces, first, chunks)
    for piece in range(tl.sum(pieces, 0)):
        b, begin, number = find(ends, piece)
        tl.store(out + 3 * piece, b)
        tl.store(out + 3 * piece + 1, begin)
        tl.store(out + 3 * piece + 2, number)


@pytest.mark.parametrize("window", [-1, 300])
@pytest.mark.parametrize("capacity", [0, 12, 1000])
def test_every_piece_is_found_once_and_the_longest_first(window, capacity):
    rng = random.Random(capacity)
    for ranges in (1, 3, 50):
        lens = [0, *(rng.choice([0, 5, 70, 300, *GRADES, 2000]) for _ in range(6))]
        out = torch.full((400, 3), -1, dtype=torch.int32)
        _dealt[(1,)](torch.tensor(lens, dtype=torch.int32), out, 7, 4, ranges, capacity, window, 8)
        found = [row for row in out.tolist() if row[0] >= 0]
        begins = begins_of_chunks(4096)
        kinds = [{12: 0, 8: 1, 0: 2}[begin] for _, begin, _ in found]
        assert kinds == sorted(kinds)
        for b, length in enumerate(lens):
            mine = [(begin, number) for at, begin, number in found if at == b]
            low = max(length - 4 - window, 0) if window >= 0 else 0
            first = sum(at <= low for at in begins) - 1
            chunks = list(range(first, sum(at < length for at in begins)))
            if len(mine) > 1:
                assert sorted(max(first, begin) + number for begin, number in mine) == chunks
            else:
                assert [begin for begin, _ in mine] == [12 if len(chunks) > 1 else 0]
        assert capacity or len(found) == len(lens)
        assert capacity < 1000 or ranges < 50 or len(found) > len(lens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window_left", [-1, 200])
def test_longer_chunks_change_nothing(products_by_rows, kind, window_left):
    """Around the ends of chunks of every length: right, and the same bits alone and in the batch, split and whole, of one query
    and of many, in tiles of other sizes."""
    case = made(kind, "verify_chain", lens=GRADES, page_size=64, window_left=window_left)
    batch = run(case, "split")
    check(case, batch)
    a, most = case.arguments, batch.shape[1]
    assert a["seq_lens"].tolist() == list(GRADES)
    for way in ("whole", "mixed", "room for some"):
        assert same_bits(run(case, way), batch)
    for b in range(0, len(GRADES), 3):
        assert same_bits(run(case, "split", **alone(case, b)), batch[b : b + 1])
    assert same_bits(run(case, "split", q=a["q"][:, most - 1 :]), batch[:, most - 1 :])
    indptr = torch.arange(len(GRADES) + 1, dtype=torch.int32) * most
    ragged = {"q": a["q"].flatten(0, 1), "q_indptr": indptr, "max_q_len": most}
    assert same_bits(run(case, "whole", block_m=32, **ragged).view_as(batch), batch)
