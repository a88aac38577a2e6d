"""`sampling_probs` against a float64 oracle and `sample_tokens` against an exact CDF."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spec_ops
from tests.helpers.exact import ALMOST_ONE, FUZZ, below, filtered_probs, float_tensor, invert_cdf

# sampling_probs and sample_tokens


# |logit| <= 8 and temperature >= 1/4 keep |logit / temperature| (or the difference of two) below 64. Its float32 quotient is
# off by at most 64 * 2^-24 = 4e-6, which is the relative error of exp; a sum and three divisions add a few 2^-24 more.
PROBS_RTOL = 1e-5


@FUZZ
@given(st.data())
def test_sampling_probs_match_the_oracle(device, data):
    bs = data.draw(st.integers(1, 4), "bs")
    vocab = data.draw(st.integers(1, 12), "vocab")
    rows = data.draw(st.none() | st.integers(1, 3), "rows per request (None: 2-D)")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), "dtype")
    use_k, use_p = data.draw(st.booleans(), "top_k"), data.draw(st.booleans(), "top_p")
    k_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    grid = rng.choice([2, 64])  # a coarse grid ties many logits; all its points are exact in bfloat16
    logits = torch.tensor(
        [
            [[rng.randrange(-512, 513) // (512 // (8 * grid)) / grid for _ in range(vocab)] for _ in range(rows or 1)]
            for _ in range(bs)
        ]
    ).to(dtype)
    temperature = [rng.choice([0.0, 0.25, 1.0, 1.5]) for _ in range(bs)]
    top_k = [rng.choice([-1, 0, *range(1, vocab + 2)]) for _ in range(bs)] if use_k else [None] * bs
    top_p: list = [None] * bs
    if use_p:
        for b in range(bs):
            top_p[b] = rng.choice([0.0, 1.0, rng.random()])
            # Float32 sums are off by less than 12 * 2^-23 and the quotients above by 4e-6: stay 1e-5 off the boundaries (which
            # exact cases below visit).
            while min(filtered_probs(r.double(), temperature[b], top_k[b], top_p[b])[1] for r in logits[b]) < 1e-5:
                top_p[b] = rng.random()
            top_p[b] = float(np.float32(top_p[b]))
    expected = np.array(
        [[filtered_probs(row.double(), temperature[b], top_k[b], top_p[b])[0] for row in logits[b]] for b in range(bs)]
    )
    if rows is None:
        logits, expected = logits[:, 0], expected[:, 0]
    probs = spec_ops.sampling_probs(
        logits.to(device),
        torch.tensor(temperature, device=device),
        torch.tensor(top_k, dtype=k_dtype, device=device) if use_k else None,
        torch.tensor(top_p, device=device) if use_p else None,
    ).cpu()
    assert probs.dtype == torch.float32
    assert probs.shape == logits.shape
    np.testing.assert_array_equal(probs.numpy() > 0, expected > 0)
    np.testing.assert_allclose(probs.numpy(), expected, rtol=PROBS_RTOL, atol=0)


def _probs(device, logits, temperature=1.0, top_k=None, top_p=None):
    return spec_ops.sampling_probs(
        torch.tensor([logits], device=device),
        torch.tensor([temperature], device=device),
        None if top_k is None else torch.tensor([top_k], device=device),
        None if top_p is None else torch.tensor([top_p], device=device),
    )[0].tolist()


def test_temperature_0_is_one_hot_at_the_first_maximum(device):
    hot = [0.0, 1.0, 0.0, 0.0]
    for kwargs in ({}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 2, "top_p": 0.1}):
        assert _probs(device, [1.0, 3.0, 3.0, -2.0], 0.0, **kwargs) == hot
    long = torch.zeros(2, 70_000, device=device)  # ties far apart, in different blocks of a parallel reduction
    long[0, [123, 69_000]] = long[1, [40_000, 69_999]] = 1.0
    probs = spec_ops.sampling_probs(long, torch.zeros(2, device=device))
    assert probs.nonzero().tolist() == [[0, 123], [1, 40_000]]


def test_top_k_ties_go_to_the_lower_id(device):
    logits = [0.0, 5.0, 0.0, 5.0, 0.0, 5.0, 5.0, 0.0]
    assert _probs(device, logits, top_k=2) == [0, 0.5, 0, 0.5, 0, 0, 0, 0]
    assert [p > 0 for p in _probs(device, logits, top_k=6)] == [True, True, True, True, False, True, True, False]


# Equal logits over a power of two have exact float32 probabilities, and so exact partial sums: boundaries can be hit.
@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.0, 1), (below(0.25), 1), (0.25, 1), (0.2500001, 2), (0.5, 2), (below(0.75), 3), (0.75, 3), (0.7500001, 4), (1.0, 4)],
)
def test_top_p_boundary_is_inclusive(device, top_p, kept):
    logits = [-math.inf, 3.0, 3.0, 3.0, -math.inf, 3.0]
    ids = [1, 2, 3, 5][:kept]
    assert _probs(device, logits, top_p=top_p) == pytest.approx([1 / kept if i in ids else 0 for i in range(6)], rel=PROBS_RTOL)


def test_top_k_before_top_p(device):
    # Top-k leaves four tokens of 1/4, of which top-p needs two. The other order would have kept four of eight, then four.
    assert _probs(device, [0.0] * 8, top_k=4, top_p=0.5) == [0.5, 0.5, 0, 0, 0, 0, 0, 0]


def test_top_p_1_keeps_every_token(device):
    # A long tail: the rounded running sum reaches 1 well before it ends. A request with top_p 1 beside one with less must not
    # lose tokens that it keeps alone.
    logits = 3 * torch.randn(2, 32_768, generator=torch.Generator().manual_seed(0)).to(device)
    hot = torch.ones(2, device=device)
    probs = spec_ops.sampling_probs(logits, hot, None, torch.tensor([1.0, 0.9], device=device))
    alone = spec_ops.sampling_probs(logits, hot)
    assert (alone > 0).all()
    assert (probs[0] > 0).all()
    assert (probs[1] > 0).sum() < 32_768
    # Both are the same softmax; the second normalization divides by a sum within 32768 * 2^-24 of 1.
    torch.testing.assert_close(probs[0], alone[0], rtol=2e-3, atol=0)


def test_top_p_cuts_where_the_running_sum_says(device):
    # Far down a long tail, where tokens weigh less than float32 resolves beside a sum near 1.
    logits = 3 * torch.randn(8, 32_768, generator=torch.Generator().manual_seed(1)).to(device)
    top_p = torch.tensor([0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999, 0.9999999], device=device)
    hot = torch.ones(8, device=device)
    probs = spec_ops.sampling_probs(logits, hot).double()
    kept = spec_ops.sampling_probs(logits, hot, None, top_p) > 0
    mass = (probs * kept).sum(-1)
    least = torch.where(kept, probs, 1.0).amin(-1)
    slack = 2.0**-22  # what is cut is decided by exact sums of weights, each a few float32 roundings away from `probs`
    assert (mass >= top_p.double() - slack).all(), "the set does not reach top_p"
    assert (mass - least < top_p.double() + slack).all(), "a smaller set would have reached top_p"
    assert (least >= torch.where(kept, 0.0, probs).amax(-1)).all(), "a more likely token was dropped"


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 2.0**-126])
def test_tiny_temperature_tends_to_greedy(device, temperature):
    assert _probs(device, [80.0, 79.0, -90.0, 80.0], temperature) == [0.5, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5), (2, 0, 5)])
def test_sampling_probs_of_nothing(device, shape):
    ones = torch.ones(shape[0], device=device)
    assert spec_ops.sampling_probs(torch.zeros(shape, device=device), ones, ones.int(), ones).shape == shape


def test_outputs_are_contiguous_whatever_the_inputs(device):
    # Compiled graphs are traced with contiguous outputs; strides that follow the inputs' would break them.
    def strided(x):
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 8, generator=generator).to(device)
    ones = torch.ones(3, device=device)
    for args in ((logits, ones), (logits, ones, 3 * ones.int(), 0.9 * ones)):
        probs = spec_ops.sampling_probs(strided(args[0]), *args[1:])
        assert probs.is_contiguous()
        assert torch.equal(probs, spec_ops.sampling_probs(*args))
    uniforms = torch.rand(3, 4, generator=generator).to(device)
    tokens = spec_ops.sample_tokens(strided(probs), strided(uniforms))
    assert tokens.is_contiguous()
    assert torch.equal(tokens, spec_ops.sample_tokens(probs, uniforms))
    parents = torch.tensor([[-1, 0, 0, 1]] * 3, device=device)
    for kwargs in ({}, {"parents": parents}, {"draft_probs": probs[:, :3].contiguous()}):
        plain = spec_ops.accept_sampled(tokens, probs, uniforms, ones * 0.5, **kwargs)
        turned = {k: strided(v) for k, v in kwargs.items()}
        accepted = spec_ops.accept_sampled(strided(tokens), strided(probs), strided(uniforms), ones * 0.5, **turned)
        assert all(field.is_contiguous() for field in accepted)
        assert all(torch.equal(a, b) for a, b in zip(accepted, plain, strict=True))
    accepted = spec_ops.accept_greedy(strided(tokens), strided(tokens), strided(parents))
    assert all(field.is_contiguous() for field in accepted)


@FUZZ
@given(st.data())
def test_sample_tokens_matches_exact_cdf(device, data):
    vocab = data.draw(st.integers(1, 9), "vocab")
    shape = data.draw(st.sampled_from([(), (1,), (5,), (2, 3), (0,), (2, 1, 2)]), "shape")
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    count = math.prod(shape)
    # Not normalized: totals are 64ths of any size. Uniforms of 1/128 often hit partial sums exactly.
    rows = [[Fraction(rng.choice([0, 0, 1, 7, 32, 64]), 64) for _ in range(vocab)] for _ in range(count)]
    for row in rows:
        row[rng.randrange(vocab)] += Fraction(1, 64)
    uniforms = [Fraction(rng.choice([0, 127, *range(128)]), 128) for _ in range(count)]
    tokens = spec_ops.sample_tokens(
        float_tensor(rows, device).reshape(*shape, vocab), float_tensor(uniforms, device).reshape(shape)
    )
    assert tokens.dtype == torch.int64
    assert tokens.shape == shape
    assert tokens.flatten().tolist() == [invert_cdf(row, u) for row, u in zip(rows, uniforms, strict=True)]


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 1), (below(0.25), 1), (0.25, 3), (below(0.5), 3), (0.5, 4), (ALMOST_ONE, 4)],
)
def test_sample_tokens_boundaries(device, uniform, token):
    # Leading, inner and trailing tokens of probability 0.
    probs = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5, 0.0, 0.0], device=device)
    assert spec_ops.sample_tokens(probs, torch.tensor(uniform, device=device)).item() == token
    assert spec_ops.sample_tokens(4 * probs, torch.tensor(uniform, device=device)).item() == token


def test_sample_tokens_resolves_a_long_tail(device):
    # Token 0 weighs 1, the 2^17 others 2^-25 each, less than float32 resolves beside 1; float64 holds every sum exactly.
    tail = 2**17
    probs = torch.cat([torch.ones(1), torch.full((tail,), 2.0**-25)]).to(device)
    uniforms = [1 - k * 2.0**-24 for k in (1, 2, 3, 1000, 12345, 65000, 70000)]
    expected = [_invert_tail(Fraction(u) * (1 + Fraction(tail, 2**25))) for u in uniforms]
    assert expected[-1] == 0
    assert 0 < expected[-2] < expected[0] <= tail
    got = spec_ops.sample_tokens(probs.expand(len(uniforms), -1), torch.tensor(uniforms, device=device))
    assert got.tolist() == expected


def _invert_tail(level: Fraction) -> int:
    return 0 if level < 1 else 1 + math.floor((level - 1) * 2**25)


def test_sample_tokens_never_returns_probability_0(device):
    generator = torch.Generator().manual_seed(0)
    rows, vocab = 4096, 301
    # 30 orders of magnitude in a row, two thirds zeros, zeros at both ends.
    probs = 10 ** (-30 * torch.rand(rows, vocab, generator=generator))
    probs[torch.rand(rows, vocab, generator=generator) < 2 / 3] = 0
    probs[:, [0, 1, -2, -1]] = 0
    probs[:, 150] = 1e-30
    total = probs.double().sum(-1, keepdim=True)
    on_a_step = (probs.double().cumsum(-1) / total).float().gather(1, torch.randint(vocab, (rows, 1), generator=generator))
    for uniforms in (
        torch.zeros(rows),
        torch.full((rows,), ALMOST_ONE),
        torch.rand(rows, generator=generator),
        on_a_step[:, 0].clamp(max=ALMOST_ONE),
    ):
        tokens = spec_ops.sample_tokens(probs.to(device), uniforms.to(device)).cpu()
        assert (probs.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.1, 4), (0.2, 3), (0.3, 2), (0.6, 1), (1.0, 1)])
def test_min_p_keeps_what_is_likely_enough(device, min_p, kept):
    weights = [8.0, 4.0, 2.0, 1.0]
    logits = torch.tensor([[math.log(w) for w in weights]] * 2, device=device)
    ones = torch.ones(2, device=device)
    probs = spec_ops.sampling_probs(logits, ones, None, None, min_p * ones)[0].tolist()
    total = sum(weights[:kept])
    assert probs == pytest.approx([w / total if i < kept else 0 for i, w in enumerate(weights)], rel=PROBS_RTOL)
    # After top-k and top-p, which leave 8 and 4.
    probs = spec_ops.sampling_probs(logits, ones, 3 * ones.int(), 0.8 * ones, min_p * ones)[0].tolist()
    assert [p > 0 for p in probs] == [True, kept > 1, False, False]
