"""`sampling_support` and `sample_logits` against the contract in Python integers, ties and rows that are no distribution."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spec_ops
from tests.helpers.exact import ALMOST_ONE, FUZZ, below
from tests.helpers.sampling_oracle import MASKED, NOTHING, ONE, support_of, token_of, weights_of

NAN, INF = math.nan, math.inf


def compare(logits, uniforms, temperature, top_k=None, top_p=None, min_p=None, k_dtype=torch.int32) -> None:
    """Both ops, all rows, against the oracles; settings are lists of one number per request, or None.

    On the CPU: the last bit of a GPU's exponential is another one.
    """
    floats = [None if s is None else torch.tensor(s, dtype=torch.float32) for s in (temperature, top_p, min_p)]
    k = None if top_k is None else torch.tensor(top_k, dtype=k_dtype)
    settings = (floats[0], k, *floats[1:])
    support = spec_ops.sampling_support(logits, *settings)
    sampled = spec_ops.sample_logits(logits, uniforms, *settings)
    assert support.dtype == sampled.tokens.dtype == torch.int64
    assert support.shape == (*logits.shape[:-1], 3)
    assert sampled.tokens.shape == logits.shape[:-1]
    assert torch.equal(sampled.support, support)
    rows, coins = logits.reshape(len(logits), -1, logits.shape[-1]), uniforms.reshape(len(logits), -1)
    expected, tokens = [], []
    for b, request in enumerate(rows):
        single = [None if s is None else s[b].item() for s in (*settings,)]
        for row, uniform in zip(request, coins[b].tolist(), strict=True):
            expected.append(support_of(row, *single))
            tokens.append(token_of(row, single[0], expected[-1], uniform))
    assert support.reshape(-1, 3).tolist() == expected
    assert sampled.tokens.flatten().tolist() == tokens


@FUZZ
@given(st.data())
def test_random_rows_match_the_oracle(data):
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    bs, vocab, inner = rng.randint(1, 4), rng.choice([1, 2, 3, 7, 40]), rng.choice([None, 1, 3])
    shape = (bs, vocab) if inner is None else (bs, inner, vocab)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(2**31))) * rng.choice([0.1, 1, 5, 40])
    if rng.random() < 0.6:  # ties, the boundary among them
        logits = (logits * 2).round() / 2
    if rng.random() < 0.3:
        logits[..., ::3], logits[..., -1] = -INF, 1.0
    logits = logits.to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))
    if rng.random() < 0.2:
        logits[0, ..., rng.randrange(vocab)] = rng.choice([NAN, INF])
    if rng.random() < 0.2:  # laid out by columns
        logits = logits.transpose(0, -1).contiguous().transpose(0, -1)
    compare(
        logits,
        torch.tensor(
            [rng.choice([0.0, ALMOST_ONE, rng.randrange(2**24) / 2**24]) for _ in range(math.prod(shape[:-1]))]
        ).reshape(shape[:-1]),
        [rng.choice([0.0, 1e-30, 0.3, 0.7, 1.0, 2.0, 1e30]) for _ in range(bs)],
        [rng.choice([-1, 0, 1, 2, vocab // 2, vocab, vocab + 5]) for _ in range(bs)] if rng.random() < 0.6 else None,
        [rng.choice([0.0, 1e-38, rng.random(), 0.999, 1.0]) for _ in range(bs)] if rng.random() < 0.6 else None,
        [rng.choice([0.0, 1e-38, rng.random(), 0.05, 1.0]) for _ in range(bs)] if rng.random() < 0.6 else None,
        rng.choice([torch.int32, torch.int64]),
    )


def test_uniforms_at_the_boundaries_of_tokens():
    """Where one of 24 bits decides between two tokens: the level `u * total` has to be exact in all of its 88 bits."""
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(4))
    rows, uniforms, expected = [], [], []
    for row in logits:
        support = support_of(row, 1.0)
        running = 0
        for weight in weights_of(row, 1.0)[:-1]:
            running += weight
            for m in (running * 2**24 // support[2], running * 2**24 // support[2] + 1):
                rows.append(row)
                uniforms.append(m / 2**24)
                expected.append(token_of(row, 1.0, support, m / 2**24))
    got = spec_ops.sample_logits(torch.stack(rows), torch.tensor(uniforms), torch.ones(len(rows)))
    assert got.tokens.tolist() == expected


def test_mixed_settings_in_one_batch():
    # Greedy, plain, and each filter alone and with the others, over long rows of bfloat16 logits full of ties.
    logits = torch.randn(9, 2, 3000, generator=torch.Generator().manual_seed(0)).mul(3).bfloat16()
    compare(
        logits,
        torch.rand(9, 2, generator=torch.Generator().manual_seed(1)),
        [0.0, 1.0, 0.7, 1.3, 0.8, 1.0, 1.0, 0.0, 5.0],
        [5, 0, 50, 0, 0, 200, 3000, 1, 2999],
        [0.5, 1.0, 1.0, 0.9, 1.0, 0.95, 0.01, 1.0, 0.999],
        [0.1, 0.0, 0.0, 0.0, 0.05, 0.02, 0.0, 1.0, 0.001],
    )


def support(device, logits, temperature=1.0, top_k=None, top_p=None, min_p=None, dtype=torch.float32) -> list[int]:
    settings = [None if s is None else torch.tensor([s], device=device) for s in (temperature, top_k, top_p, min_p)]
    return spec_ops.sampling_support(torch.tensor([logits], dtype=dtype, device=device), *settings)[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-30, 1e30])
@pytest.mark.parametrize(
    "row", [[NAN, 1.0, 2.0], [1.0, 2.0, NAN], [1.0, INF, 2.0], [-INF] * 3, [INF, -INF, 0.0], [INF, NAN, INF]]
)
def test_rows_that_are_no_distribution(device, row, temperature, dtype):
    for filters in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 1, "top_p": 0.1, "min_p": 1.0}):
        assert support(device, row, temperature, **filters, dtype=dtype) == (MASKED if row == [-INF] * 3 else NOTHING)
    logits, coin = torch.tensor([row], dtype=dtype, device=device), torch.tensor([0.5], device=device)
    assert spec_ops.sample_logits(logits, coin, torch.tensor([temperature], device=device)).tokens.tolist() == [-1]


def test_greedy_rows_keep_the_first_largest_logit_alone(device):
    for filters in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert support(device, [1.0, 3.0, 3.0, -2.0], 0.0, **filters) == [1, 1, ONE]
    zeros = support(device, [-1.0, -0.0, 0.0, -INF], 0.0)  # the zeros are equal
    assert zeros == [1, 1, ONE]


def test_last_is_the_least_likely_kept_token(device):
    row = [0.0, 5.0, 0.0, 5.0, 0.0, 5.0]
    assert support(device, row)[:2] == [1, -1]
    assert support(device, row, top_k=2) == [1, 3, 2 * ONE]
    assert support(device, row, top_k=3) == [1, 5, 3 * ONE]
    assert support(device, row, top_k=4)[:2] == [1, 0]
    assert support(device, row, top_k=6)[:2] == [1, -1]  # nothing to cut
    assert support(device, row, min_p=1.0) == [1, 5, 3 * ONE]
    assert support(device, row, min_p=2.0) == [1, 1, ONE]  # the most likely token stays
    assert support(device, row, min_p=1e-6)[:2] == [1, 4]  # a setting that could cut, and does not
    assert support(device, row, top_p=0.0) == [1, 1, ONE]
    assert support(device, [5.0], top_p=0.3) == [0, 0, ONE]
    assert support(device, [-0.0, 0.0, -1.0], top_k=1) == [0, 0, ONE]


@pytest.mark.parametrize(
    ("top_p", "last"),
    [(below(0.25), 1), (0.25, 1), (0.2500001, 2), (0.5, 2), (below(0.75), 3), (0.7500001, 5), (below(1.0), 5)],
)
def test_top_p_boundary_is_inclusive(device, top_p, last):
    row = [-INF, 3.0, 3.0, 3.0, -INF, 3.0]
    assert support(device, row, top_p=top_p) == [1, last, ONE * [1, 2, 3, 5].index(last) + ONE]


def test_truncation_order(device):
    # Top-p looks at what top-k left: of eight equal tokens 4, of which 2 reach one half. Min-p looks at the top's weight alone.
    assert support(device, [0.0] * 8, top_k=4, top_p=0.5) == [0, 1, 2 * ONE]
    row = [math.log(x) for x in (8.0, 4.0, 2.0, 1.0)]
    assert support(device, row, top_p=0.75, min_p=0.3)[:2] == [0, 1]
    assert support(device, row, top_k=1, min_p=0.3)[:2] == [0, 0]


def test_the_total_does_not_depend_on_order_or_neighbours(device):
    generator = torch.Generator().manual_seed(2)
    logits = (4 * torch.randn(5, 20_000, generator=generator)).to(device)
    temperature = torch.full((5,), 0.8, device=device)
    whole = spec_ops.sampling_support(logits, temperature)
    shuffled = spec_ops.sampling_support(logits[:, torch.randperm(20_000, generator=generator).to(device)], temperature)
    assert torch.equal(whole[:, 2], shuffled[:, 2])
    for b in range(5):
        assert torch.equal(spec_ops.sampling_support(logits[b : b + 1], temperature[:1])[0], whole[b])


def test_a_draw_never_takes_what_is_cut_or_masked(device):
    generator = torch.Generator().manual_seed(3)
    logits = 6 * torch.randn(2000, 50, generator=generator)
    logits[:, ::4] = -INF
    settings = (torch.full((2000,), 1.5), torch.full((2000,), 20), torch.full((2000,), 0.9), torch.full((2000,), 0.01))
    settings = tuple(s.to(device) for s in settings)
    probs = spec_ops.sampling_probs(logits.to(device), *settings)
    for uniforms in (torch.zeros(2000), torch.full((2000,), ALMOST_ONE), torch.rand(2000, generator=generator)):
        tokens = spec_ops.sample_logits(logits.to(device), uniforms.to(device), *settings).tokens
        assert (probs.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("vocab", [2**18, 2**19 - 1])
def test_the_largest_vocabularies_do_not_overflow(device, vocab):
    rows = torch.zeros(1, vocab, dtype=torch.bfloat16, device=device)
    ones = torch.ones(1, device=device)
    assert spec_ops.sampling_support(rows, ones).tolist() == [[0, -1, vocab * ONE]]
    for uniform in (0.0, 0.5, 1 / 3, ALMOST_ONE):
        coin = torch.tensor([uniform], device=device)
        token = spec_ops.sample_logits(rows, coin, ones).tokens.item()
        assert token == vocab * int(coin.item() * 2**24) >> 24
    assert spec_ops.sampling_support(rows, ones, None, 0.5 * ones).tolist() == [[0, -(-vocab // 2) - 1, -(-vocab // 2) * ONE]]


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5), (2, 0, 5)])
def test_no_rows(device, shape):
    ones = torch.ones(shape[0], device=device)
    filters = (ones.int(), ones, ones)
    logits = torch.zeros(shape, device=device)
    assert spec_ops.sampling_support(logits, ones, *filters).shape == (*shape[:-1], 3)
    assert spec_ops.sample_logits(logits, torch.zeros(shape[:-1], device=device), ones).tokens.shape == shape[:-1]
