"""The support of logits, draws from it, and `sampling_probs` in Triton's interpreter, against the CPU reference."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.sampling import guide, probabilities, search, support
from spec_ops.ops.reference import sampling as reference
from tests.gpu.test_sampling import case
from tests.helpers.op_cases import Rng
from tests.interpreter.resident import resident

# exp2 of a product for exp of a quotient: both arguments, of up to 30.5, are rounded to float32.
CLOSE = {"rtol": 1e-5, "atol": 0}

ALONE = support.Shares(chunks=1, tiles=3, rows=64, lane=2, num_warps=1)
MANY = support.Shares(chunks=5, tiles=1, rows=16, lane=4, num_warps=1)
FEW = support.Shares(chunks=3, tiles=2, rows=8, lane=8, num_warps=1)
VOCAB = 300  # `ALONE`: 3 tiles, two parts; `MANY` and `FEW`: 5 tiles of 64. The last one is not full


@pytest.fixture(autouse=True)
def few_pivots(monkeypatch):
    monkeypatch.setattr(support, "PIVOTS", 4)


def run(share: support.Shares, *args, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch, resident(support.sampling_support_kernel, seed):
        patch.setattr(support, "shares", lambda *_: share)
        return support.sample_logits(*args)


def assert_same(share: support.Shares, *args, seed: int = 0) -> None:
    tokens, found = run(share, *args, seed=seed)
    wanted_tokens, wanted = reference.sample_logits(*args)
    assert torch.equal(found[..., :2], wanted[..., :2]), (found, wanted, args)
    torch.testing.assert_close(found[..., 2], wanted[..., 2], **CLOSE)
    assert torch.equal(tokens, wanted_tokens), args


def settings(rng: Rng, bs: int, vocab: int, which: str) -> tuple[torch.Tensor | None, ...]:
    top_k = torch.tensor([rng.choice([0, 1, 2, vocab // 3, vocab - 1, vocab, vocab + 5]) for _ in range(bs)])
    top_p = torch.tensor([rng.choice([-1.0, 0.0, 0.3, 0.9, 0.999, 1.0]) for _ in range(bs)])
    min_p = torch.tensor([rng.choice([0.0, 1e-6, 0.02, 0.3, 1.0]) for _ in range(bs)])
    top_k = top_k.to(rng.index_dtype())
    return top_k if "k" in which else None, top_p if "p" in which else None, min_p if "m" in which else None


def little_room(monkeypatch, listed: int, candidates: int) -> None:
    """For tokens at the boundary, and for the candidates of a program, each of `candidates // 2` groups (1 at least)."""
    monkeypatch.setattr(support, "LISTED", listed)
    monkeypatch.setattr(support, "sizes", lambda _: {"CANDIDATES": candidates, "GROUPS": max(candidates // 2, 1)})


@pytest.mark.parametrize("room", [(1, 1), (16, 8), (128, 64)], ids="listed_{0[0]}-candidates_{0[1]}".format)
@pytest.mark.parametrize("share", [ALONE, MANY, FEW], ids="chunks_{0.chunks}".format)
def test_random_rows(share, room, monkeypatch):
    """If there is less room, the search goes on to one key, and its ties."""
    little_room(monkeypatch, *room)
    listed = room[0]
    rng = Rng(f"{share} {listed}")
    for which in rng.sample(["k", "p", "m", "kp", "kpm", "km", "pm"], 2):
        bs = 2
        logits = rng.tensor(bs, VOCAB) * rng.choice([1, 4])
        if rng.random() < 0.5:  # ties, and among them the boundary
            logits = (logits * 2).round() / 2
        if rng.random() < 0.3:
            logits[:, ::3] = -math.inf
        logits = logits.to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))
        temperature = torch.tensor([rng.choice([0.7, 1.0, 2.0, 30.0]) for _ in range(bs)])
        uniforms = torch.rand(bs, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
        assert_same(share, logits, uniforms, temperature, *settings(rng, bs, VOCAB, which), seed=rng.getrandbits(32))


@pytest.mark.parametrize("share", [ALONE, MANY], ids="chunks_{0.chunks}".format)
def test_nothing_to_cut(share):
    """Three dimensions, and a last one with strides."""
    rng = Rng(1)
    logits = rng.tensor(VOCAB, 2, 2).transpose(0, 2) * 5
    uniforms, hot = torch.tensor([[0.0, 0.3], [0.7, 1 - 2**-24]]), torch.tensor([1.0, 0.5])
    assert_same(share, logits, uniforms, hot, None, None, None)
    off = torch.tensor([0, VOCAB]), torch.ones(2), torch.zeros(2)
    assert_same(share, logits, uniforms.T, hot, *off)


def test_any_number_of_programs_finds_the_same_bits():
    rng = Rng(2)
    logits, uniforms = (rng.tensor(3, VOCAB) * 3).bfloat16(), torch.tensor([0.1, 0.4, 0.95])
    args = logits, uniforms, torch.tensor([1.0, 0.7, 5.0]), torch.tensor([0, 40, 290]), torch.full((3,), 0.95), None
    tokens, found = run(ALONE, *args)
    for i, (share, candidates) in enumerate(((MANY, 64), (FEW, 1))):
        with pytest.MonkeyPatch.context() as patch:
            little_room(patch, 128, candidates)
            others = run(share, *args, seed=i)
        assert torch.equal(others[0], tokens)
        assert torch.equal(others[1], found)


@pytest.mark.parametrize("share", [ALONE, MANY], ids="chunks_{0.chunks}".format)
def test_tokens_that_hardly_weigh_anything_move_top_p(share):
    """Of two equal tokens the first weighs half of the row but for all the others together: 2**-16 of it."""
    logits = torch.full((1, VOCAB), -17.0)
    logits[0, 40] = logits[0, 250] = 0.0
    half = torch.tensor([0.5])
    assert run(share, logits, half, torch.ones(1), None, half, None)[1][0, 1] == 250
    assert_same(share, logits, torch.tensor([0.9]), torch.ones(1), None, half, None)


@pytest.mark.parametrize("share", [ALONE, MANY], ids="chunks_{0.chunks}".format)
def test_candidates_settle_what_few_tokens_decide(share, monkeypatch):
    """No pass counts at pivots, and none weighs all that is kept; not even with ties at the boundary."""
    for name in ("tally", "weigh_chunk"):
        monkeypatch.setattr(search, name, lambda *_: pytest.fail("a further pass over the row"))
    monkeypatch.setattr(
        support, "sizes", lambda chunks: {"CANDIDATES": 64 if chunks == 1 else 16, "GROUPS": 16 if chunks == 1 else 4}
    )
    rank = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    logits = -3 * (rank // 2 * 2 + 1.0).log()  # pairs of equal ones
    uniforms, hot = torch.tensor([0.05, 0.5, 0.999]), torch.tensor([0.7, 1.0, 1.0])
    p, min_p = torch.tensor([0.9, 0.7, 0.95]), torch.tensor([0.0, 0.03, 0.9])
    assert_same(share, logits, uniforms, hot, None, p, None)
    assert_same(share, logits, uniforms, hot, torch.tensor([3, 5, 7]), None, min_p)
    assert_same(share, logits, uniforms, hot, torch.tensor([5, 1, 0]), p, min_p)


@pytest.mark.parametrize("share", [ALONE, MANY], ids="chunks_{0.chunks}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_top_p_of_flat_rows_takes_one_exact_pass(share, dtype, monkeypatch):
    """Passes with sums of float32 find two keys that few tokens, or one key, lie between."""
    little_room(monkeypatch, 8, 8)
    exact, calls = search.tally, []
    monkeypatch.setattr(search, "tally", lambda *args: (calls.append(None), exact(*args))[1])
    flat = torch.stack([Rng(4).tensor(VOCAB), torch.linspace(0, 6, VOCAB)]).to(dtype)
    u = torch.tensor([0.2, 0.95])
    for temperature, p in ((1.0, 0.9), (0.7, 0.8)):
        calls.clear()
        assert_same(share, flat, u, torch.full((2,), temperature), None, torch.full((2,), p), None)
        assert len(calls) == 2 * share.chunks


@pytest.mark.parametrize("share", [ALONE, MANY], ids="chunks_{0.chunks}".format)
@pytest.mark.parametrize("wrong", ["nothing", "everything"])
def test_a_wrong_guess_changes_no_result(share, wrong, monkeypatch):
    little_room(monkeypatch, 8, 8)
    sums = guide.guide_sums
    factor = 0 if wrong == "nothing" else 1 << 10
    monkeypatch.setattr(guide, "guide_sums", lambda *args: sums(*args) * factor)
    rows, u = Rng(5).tensor(2, VOCAB), torch.tensor([0.2, 0.95])
    assert_same(share, rows, u, torch.ones(2), None, torch.tensor([0.9, 0.7]), None)
    assert_same(share, rows, u, torch.ones(2), None, torch.tensor([0.9, 0.7]), torch.tensor([0.0, 0.2]))


@pytest.mark.parametrize(
    ("share", "room"),
    [(FEW, (2, 1)), (ALONE, (128, 1)), (ALONE, (128, 512)), (FEW, (128, 512))],
    ids=lambda x: f"chunks_{x.chunks}" if isinstance(x, support.Shares) else f"listed_{x[0]}-candidates_{x[1]}",
)
def test_ties_at_the_boundary_go_to_the_lower_ids(share, room, monkeypatch):
    little_room(monkeypatch, *room)
    flat = torch.zeros(3, VOCAB).bfloat16()
    flat[1, 200:] = -1.0
    one, u = torch.ones(3), torch.tensor([0.999, 0.5, 0.0])
    assert_same(share, flat, u, one, torch.tensor([70, 250, 0]), None, torch.tensor([0.0, 0.0, 0.9]))
    # 75 of 300; of the 200 likely ones of 260, and of what is left of them by top-k
    assert_same(share, flat, u, one, torch.tensor([0, 260, 100]), torch.tensor([0.25, 0.5, 0.125]), None)


def test_min_p_cuts_all_that_top_p_lists():
    """The least likely kept token lies above the list then: top-k first, whose last keys were once top-p's first."""
    logits, _, *settings = (x[40:41] for x in case((150, 1, 50_257), torch.float16))
    wanted = reference.sampling_support(logits, *settings)
    assert (reference.kept_weights(logits, wanted, settings[0]) > 0).sum() == 81
    assert torch.equal(support.sampling_support(logits, *settings)[:, :2], wanted[:, :2])


@pytest.mark.parametrize("share", [ALONE, FEW], ids="chunks_{0.chunks}".format)
def test_rows_without_a_search(share):
    """No distributions, greedy rows, a min-p that leaves one token, and temperatures that leave nothing of a difference."""
    rng = Rng(3)
    logits = rng.tensor(9, VOCAB) * 3
    logits[0, 17], logits[1, 250], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 5] = logits[3, 250] = logits[4, 99] = logits[4, 70] = 50.0
    logits[8, 1] = -math.inf
    temperature = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1e-30, 1e-40, math.inf, math.inf])
    min_p = torch.tensor([0.1, 0.1, 0.1, 0.1, 1.5, 0.0, 0.0, 0.0, 0.0])
    uniforms = torch.full((9,), 0.6)
    assert_same(share, logits, uniforms, temperature, None, None, min_p)
    assert_same(share, logits, uniforms, temperature, torch.tensor([7] * 8 + [0]), torch.full((9,), 0.5), min_p)
    assert_same(share, logits, uniforms, temperature, None, None, None)


def test_small_vocabularies():
    for vocab in (1, 2, 9):
        logits = Rng(vocab).tensor(2, vocab)
        args = logits, torch.tensor([0.0, 0.9]), torch.tensor([1.0, 0.0])
        for share in (support.shares(2, vocab, 132), support.Shares(1, 1, 16, 4, 1)):
            assert_same(share, *args, None, None, None)
            assert_same(share, *args, torch.tensor([1, 2]), torch.tensor([0.5, 0.5]), torch.tensor([0.3, 0.3]))
    empty = torch.zeros(0, 5), torch.zeros(0), torch.zeros(0), None, None, None
    assert [x.shape for x in run(ALONE, *empty)] == [(0,), (0, 3)]


@pytest.mark.parametrize("most", [1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_beyond_those_of_a_launch(dtype, most, monkeypatch):
    """They go in several launches, which share a workspace; a request's rows are not divided."""
    rng = Rng(6)
    logits = (rng.tensor(3, 2, VOCAB) * 3).to(dtype)
    args = logits, torch.rand(3, 2), torch.tensor([1.0, 0.7, 2.0]), *settings(rng, 3, VOCAB, "kpm")
    launches, start = [], support.launch
    monkeypatch.setattr(support, "launch", lambda *given, **more: (launches.append(given[1]), start(*given, **more)))
    monkeypatch.setattr(support, "ROWS_AT_ONCE", most)
    monkeypatch.setattr(support, "COUNTED_VOCAB", VOCAB)
    assert_same(ALONE, *args)
    assert launches == ([(2,)] * 3 if most < 4 else [(4,), (2,)])


def test_counters_are_left_as_they_were_found(monkeypatch):
    """A launch finds no arrival of the one before it."""
    counters = torch.zeros(1024, dtype=torch.int32)
    monkeypatch.setattr(support, "arrival_counters", lambda device, count, kernel: counters)
    args = Rng(4).tensor(2, VOCAB), torch.rand(2), torch.ones(2), torch.tensor([5, 0]), torch.tensor([0.9, 1.0]), None
    for _ in range(2):
        assert_same(MANY, *args)
        assert (counters & 0xFFFF == 0).all()
        assert (counters != 0).sum() == 4  # two for each row


def test_a_part_of_a_gpu_that_is_too_small(monkeypatch):
    """Where CUDA refuses programs that wait for one another, each row has one."""
    asked, planned = [], iter([MANY, ALONE])
    monkeypatch.setattr(support, "shares", lambda *_: next(planned))
    monkeypatch.setattr(support, "resident_or_none", lambda grid, start: asked.append(grid))
    args = Rng(5).tensor(2, VOCAB), torch.tensor([0.2, 0.7]), torch.ones(2), torch.tensor([50, 0]), None, None
    tokens, found = support.sample_logits(*args)
    assert asked == [("sampling_support", 2, MANY)]
    wanted_tokens, wanted = reference.sample_logits(*args)
    assert torch.equal(tokens, wanted_tokens)
    assert torch.equal(found[:, :2], wanted[:, :2])


@pytest.mark.parametrize(("rows", "vocab", "sms"), [(1, 128_256, 132), (4, 128_256, 132), (66, 32_000, 132), (512, 1, 132)])
def test_shares(rows, vocab, sms):
    share = support.shares(rows, vocab, sms)
    assert share.chunks * share.tiles * share.rows * share.lane >= vocab
    assert (share.chunks - 1) * share.tiles * share.rows * share.lane < vocab  # every program has some of it
    assert share.chunks == 1 or share.chunks * rows <= sms
    assert 8 <= share.num_warps == share.rows // 32
    assert (rows, vocab) != (4, 128_256) or share.chunks == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probabilities(dtype, monkeypatch):
    monkeypatch.setattr(probabilities, "BLOCK", 64)
    monkeypatch.setattr(support, "shares", lambda *_: ALONE)
    rng = Rng(str(dtype))
    logits = (rng.tensor(6, 2, VOCAB) * 4).to(dtype)
    logits[1, 0, 9], logits[2, 0] = math.nan, -math.inf
    logits[4, 1, 7] = math.nan  # of a greedy row
    hot = torch.tensor([1.0, 0.7, 1.0, 3.0, 0.0, 1.0])
    cuts = torch.tensor([0, 5, 5, 200, 5, 0]), torch.tensor([0.9, 1.0, 0.9, 0.5, 0.9, 1.0]), torch.tensor([0.0] * 5 + [0.05])
    for args in ((logits, hot, None, None, None), (logits, hot, *cuts), (logits.mT.contiguous().mT, hot, None, None, cuts[2])):
        got, wanted = probabilities.sampling_probs(*args), reference.sampling_probs(*args)
        assert torch.equal(got > 0, wanted > 0), args
        torch.testing.assert_close(got, wanted, **CLOSE, equal_nan=True)
        assert got.is_contiguous()
