"""`sampling_probs` in Triton's interpreter against the CPU reference: the same tokens kept, with the same probabilities."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.sampling import probabilities as sampling
from spec_ops.ops.reference.sampling import sampling_probs as reference
from tests.interpreter.cases import Rng

# Both round to float32 at the exponential and after the division.
CLOSE = {"rtol": 6e-7, "atol": 0}


def assert_same(args: tuple) -> None:
    got, wanted = sampling.sampling_probs(*args), reference(*args, None)
    assert torch.equal(got > 0, wanted > 0), args
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert got.is_contiguous()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK", 32)


@pytest.mark.parametrize("gathered", [1, 12, 8192], ids="gathered_{}".format)
@pytest.mark.parametrize("seed", range(4))
def test_random_rows(seed, gathered, monkeypatch):
    monkeypatch.setattr(sampling, "GATHERED", gathered)
    rng = Rng(f"{seed} {gathered}")
    bs, vocab = rng.choice([1, 2]), rng.choice([1, 5, 32, 70])
    logits = rng.tensor(*rng.choice([(bs, vocab), (bs, 2, vocab)])) * rng.choice([1, 4])
    if rng.random() < 0.6:  # ties, and among them the boundary
        logits = (logits * 2).round() / 2
    if rng.random() < 0.3:
        logits[..., ::3], logits[..., -1] = -float("inf"), 1.0
    logits = logits.to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))
    temperature = torch.tensor([rng.choice([0.0, 0.7, 1.0, 2.0]) for _ in range(bs)])
    top_k = torch.tensor([rng.choice([0, 1, 2, vocab // 2, vocab, vocab + 5]) for _ in range(bs)], dtype=rng.index_dtype())
    top_p = torch.tensor([rng.choice([0.0, 0.3, 0.9, 0.999, 1.0]) for _ in range(bs)])
    filters = rng.choice([(top_k, None), (None, top_p), (top_k, top_p)])
    assert_same((logits, temperature, *filters))
    assert_same((logits.transpose(0, -1).contiguous().transpose(0, -1), temperature, None, None))


def test_ties_at_the_boundary_go_to_the_lower_ids():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 2.0, 1.0, 0.0, 1.0]])
    one = torch.ones(1)
    for k in (1, 3, 7):
        assert_same((logits, one, torch.tensor([k]), None))
    kept = sampling.sampling_probs(logits, one, torch.tensor([4]), None)
    assert (kept > 0).nonzero()[:, 1].tolist() == [1, 2, 3, 4]
    for p in (0.35, 0.75, 0.9):  # within a tie, at its end, and after top-k has taken a part of it
        assert_same((logits, one, None, torch.tensor([p])))
        assert_same((logits, one, torch.tensor([4]), torch.tensor([p])))


def test_tiny_temperature_and_greedy_rows():
    logits = torch.tensor([[1.0, 3.0, 3.0, -1e30], [5.0, 5.0, 4.0, 0.0]])
    assert_same((logits, torch.tensor([1e-30, 0.0]), torch.tensor([2, 2]), torch.tensor([0.5, 0.5])))
    assert_same((logits, torch.tensor([0.0, 1e-30]), None, None))
