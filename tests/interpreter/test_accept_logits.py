"""`accept_sampled_logits` in Triton's interpreter against the CPU reference: the same paths and tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.sampling import accept_logits
from spec_ops.ops import accept
from spec_ops.ops.reference.accept import accept_sampled_logits as reference
from spec_ops.ops.reference.sampling import sampling_support
from tests.helpers.accept_rows import ROW_KINDS, long_rows
from tests.helpers.op_cases import compare
from tests.ops.test_accept_logits import KINDS, Case


def tiles_of(rows: int, lane: int, chunks: int, vocab: int) -> dict[str, int]:
    tiles = -(-vocab // (rows * lane))
    each = -(-tiles // chunks)
    return {"tiles": each, "CHUNKS": -(-tiles // each), "ROWS": rows, "LANE": lane, "num_warps": 1}


def assert_same(args: tuple, share: dict[str, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accept_logits, "shares", lambda *_: dict(share))
        compare(reference(*args), accept_logits.accept_sampled_logits(*args), args)


@pytest.mark.parametrize("kind", KINDS)
def test_small_vocabularies(kind, monkeypatch):
    """Ties, masked tokens, greedy rows, places without a draft and rows that are no distribution."""
    taken: list[tuple] = []

    def note(*args: Any) -> tuple[torch.Tensor, ...]:
        taken.append(args)
        return reference(*args)

    monkeypatch.setattr(accept, "accept_sampled_logits_op", note)
    for seed in range(10):
        case = Case(random.Random(f"{kind}{seed}"), kind)
        case.op("cpu")
        assert_same(taken.pop(), tiles_of(2, 1, 1 + seed % 3, case.vocab))


VOCAB = 300


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_long_rows(kind):
    for seed in range(3):
        args = long_rows(seed, kind, VOCAB)
        assert_same(args, tiles_of(16, 4, (1, 2, 5)[seed], VOCAB))
        assert_same((*args[:1], args[1].mT.contiguous().mT, *args[2:]), tiles_of(8, 8, 3, VOCAB))


@pytest.mark.parametrize("kind", ["drafts", "blocks"])
def test_drafts_of_the_target_itself(kind):
    """No residual at all: nothing is rejected."""
    args = long_rows(0, kind, VOCAB, noise=0.0)
    tokens, _, lens = accept_logits.accept_sampled_logits(*args)
    assert lens.tolist() == [4, 4]
    assert torch.equal(tokens[:, :-1], args[0][:, 1:])
    assert_same(args, tiles_of(16, 4, 5, VOCAB))


@pytest.mark.parametrize("block", [False, True], ids=["drafts", "blocks"])
def test_a_uniform_at_the_boundary_rejects(block):
    """Accepted is strictly below: a draft of q = 1/2 and p = 1/4 up to 1/2."""
    target, hot = torch.zeros(1, 2, 4), torch.ones(1)
    draft = torch.tensor([[[0.0, 0.0, -torch.inf, -torch.inf]]])
    supports = [sampling_support(logits, hot, None, None, None) for logits in (target, draft)]
    for uniform, accepted in ((0.5, 1), (0.5 - 2**-24, 2)):
        coins = torch.tensor([[uniform, 0.0]]), torch.zeros(1)
        args = torch.tensor([[-1, 1]]), target, supports[0], *coins, hot, None, draft, supports[1], None, 2, 1.0, 1.0, block
        assert reference(*args)[2].tolist() == [accepted]
        assert_same(args, tiles_of(2, 1, 2, 4))


@pytest.mark.parametrize(
    ("candidates", "parents", "coin", "final", "tokens"),
    [
        ([-1, 1, 1], [-1, 0, 0], 0.9, 0.5, [2, -1]),  # rejected twice: once of four tokens less
        ([-1, 1, 2], [-1, 0, 1], 0.0, 0.6, [1, 2]),  # a child that a full path has no room for was not rejected
    ],
)
def test_what_the_last_token_may_be(candidates, parents, coin, final, tokens):
    target, hot = torch.zeros(1, 3, 4), torch.ones(1)
    support = sampling_support(target, hot, None, None, None)
    rows = torch.tensor([candidates]), target, support, torch.full((1, 3), coin), torch.tensor([final]), hot
    args = (*rows, torch.tensor([parents]), None, None, None, 2, 1.0, 1.0, False)
    assert reference(*args)[0].tolist() == [tokens]
    assert_same(args, tiles_of(2, 1, 2, 4))


def test_no_requests_and_roots_alone():
    empty = [x[:0] if isinstance(x, torch.Tensor) and x.dim() else x for x in long_rows(0, "target_only", VOCAB)]
    assert [x.shape for x in accept_logits.accept_sampled_logits(*empty)] == [(0, 4), (0, 4), (0,)]
    for kind in ("target_only", "drafts"):
        args = list(long_rows(1, kind, VOCAB))
        for i in (0, 1, 2, 3):
            args[i] = args[i][:, :1]
        args[7], args[8] = (None, None) if args[7] is None else (args[7][:, :0], args[8][:, :0])
        args[10] = 1
        assert_same(tuple(args), tiles_of(16, 4, 5, VOCAB))


@pytest.mark.parametrize(("bs", "vocab"), [(1, 128_256), (8, 128_256), (64, 32_000), (300, 7)])
def test_shares(bs, vocab):
    share = accept_logits.shares(bs, vocab, 264)
    chunk = share["tiles"] * share["ROWS"] * share["LANE"]
    assert (share["CHUNKS"] - 1) * chunk < vocab <= share["CHUNKS"] * chunk
    assert share["CHUNKS"] <= accept_logits.MOST_CHUNKS
