"""Sampling from logits on a GPU: as many programs a row as there is room for, in one launch, alone and in CUDA graphs."""

from __future__ import annotations

import math
import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

from spec_ops.backends.triton.sampling import support  # noqa: E402
from spec_ops.ops.reference import sampling as reference  # noqa: E402
from spec_ops.ops.reference.accept import accept_sampled_logits as accept_reference  # noqa: E402
from tests.helpers.accept_rows import ROW_KINDS, long_rows  # noqa: E402
from tests.helpers.op_cases import Copy, Rng, compare  # noqa: E402
from tests.helpers.op_samples import overload  # noqa: E402
from tests.helpers.undecided_rows import HOT, undecided_rows  # noqa: E402

SHAPES = [(1, 1, 128_256), (4, 1, 128_256), (8, 4, 32_000), (3, 2, 262_144), (2, 1, 201_088), (150, 1, 50_257), (5, 1, 777)]
FILTERS = ["", "k", "p", "m", "kp", "kpm"]


def case(shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> tuple:
    """`logits, uniforms, temperature, top_k, top_p, min_p`."""
    rng = Rng(f"{shape}{dtype}")
    bs, inner, vocab = shape
    logits = (rng.tensor(bs, inner, vocab) * 3).to(dtype)
    if inner == 1:
        logits = logits[:, 0]
    uniforms = torch.rand(logits.shape[:-1], generator=torch.Generator().manual_seed(bs))
    temperature = torch.tensor([rng.choice([0.0, 0.7, 1.0, 1.5]) for _ in range(bs)])
    top_k = torch.tensor([rng.choice([0, 1, 50, 1000, 20_000]) for _ in range(bs)], dtype=torch.int32)
    top_p = torch.tensor([rng.choice([0.0, 0.5, 0.95, 0.9999, 1.0]) for _ in range(bs)])
    min_p = torch.tensor([rng.choice([0.0, 0.01, 0.1, 1.0]) for _ in range(bs)])
    return logits, uniforms, temperature, top_k, top_p, min_p


def cut(args: tuple, filters: str) -> tuple:
    return *args[:3], *(x if name in filters else None for name, x in zip("kpm", args[3:], strict=True))


def assert_right(args: tuple, tokens, found) -> None:
    logits, temperature = args[0], args[2]
    wanted = reference.sampling_support(logits, temperature, *args[3:])
    assert torch.equal(found[..., 0], wanted[..., 0])
    hot = temperature.reshape(-1, *[1] * (logits.dim() - 1))
    weights = reference.kept_weights(logits, found, hot)
    # A token at the edge of top-p or min-p may fall either way: the last bits of exp are the hardware's.
    assert ((weights > 0) != (reference.kept_weights(logits, wanted, hot) > 0)).sum(-1).max() <= 2
    if args[4] is None and args[5] is None:  # equal bfloat16 logits abound: which of them top-k keeps is decided exactly
        assert torch.equal(found[..., 1], wanted[..., 1])
    torch.testing.assert_close(found[..., 2], weights.sum(-1), rtol=1e-5, atol=0)
    running = weights.double().cumsum(-1)
    after = running.gather(-1, tokens[..., None])[..., 0] / running[..., -1]
    before = after - weights.gather(-1, tokens[..., None])[..., 0] / running[..., -1]
    assert (weights.gather(-1, tokens[..., None]) > 0).all()
    assert ((before <= args[1] + 1e-5) & (args[1] <= after + 1e-5)).all()


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_support_and_draw(shape, filters, dtype):
    args = cut(case(shape, dtype), filters)
    given = Copy(args, "cuda").args
    tokens, found = overload("sample_logits")(*given)
    assert_right(args, tokens.cpu(), found.cpu())
    alone = overload("sampling_support")(given[0], *given[2:])
    assert torch.equal(alone, found)


@pytest.mark.parametrize("filters", FILTERS)
def test_any_number_of_programs_finds_the_same_bits(filters, monkeypatch):
    given = Copy(cut(case((4, 1, 128_256)), filters), "cuda").args
    tokens, found = overload("sample_logits")(*given)
    shares = support.shares
    for programs in (1, 8, 13, 64):
        monkeypatch.setattr(support, "shares", lambda rows, vocab, _, *rest, most=programs: shares(rows, vocab, most, *rest))
        again = support.sample_logits(*given)
        assert torch.equal(again[0], tokens)
        assert torch.equal(again[1], found)


def test_rows_that_are_no_distribution():
    logits = torch.randn(5, 128_256)
    logits[0, 127_000], logits[1, 3], logits[2], logits[3, 100_000:] = math.nan, math.inf, -math.inf, -math.inf
    args = logits, torch.rand(5), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), torch.full((5,), 127_000), torch.ones(5), None
    tokens, found = (x.cpu() for x in overload("sample_logits")(*Copy(args, "cuda").args))
    assert tokens[:3].tolist() == [-1] * 3
    assert found[:3].tolist() == [[0, -1, 0], [0, -1, 0], [0, -2, 0]]
    assert_right(tuple(x if x is None else x[3:] for x in args), tokens[3:], found[3:])


@pytest.mark.parametrize("vocab", [32_000, 50_257])
def test_what_counts_leave_to_the_search(vocab, monkeypatch):
    """Rows that counts decide and rows that they do not, in one launch: the bits of a launch that counts nothing."""
    logits = undecided_rows((torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).bfloat16())
    hot = torch.ones(40).index_fill_(0, torch.tensor([7]), HOT)
    given = Copy((logits, torch.linspace(0, 1, 40), hot, None, torch.full((40,), 0.5), None), "cuda").args
    counted = support.sample_logits(*given)
    monkeypatch.setattr(support, "COUNTED_VOCAB", vocab + 1)
    searched = support.sample_logits(*given)
    assert all(torch.equal(a, b) for a, b in zip(counted, searched, strict=True))


@pytest.mark.parametrize("shape", [(4, 1, 128_256), (150, 1, 50_257)])
def test_one_launch_without_a_sync_in_a_graph_and_on_another_stream(shape):
    given = Copy(case(shape), "cuda").args
    run = overload("sample_logits")
    wanted = run(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*given)
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):  # at the same time, each with counters of its own
            graph.replay()
            with torch.cuda.stream(stream):
                beside = run(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for found in (got, beside):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(*given)
    assert len([e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]) == 1


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize(("vocab", "bs"), [(128_256, 1), (128_256, 8), (32_000, 70), (262_144, 3)])
def test_acceptance(vocab, bs, kind):
    for seed in range(3):
        args = long_rows(seed, kind, vocab, bs)
        compare(accept_reference(*args), overload("accept_sampled_logits")(*Copy(args, "cuda").args), (seed, kind))


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_acceptance_is_one_launch_without_a_sync_and_repeats_in_a_graph(kind):
    args = long_rows(0, kind, 128_256, 4)
    given = Copy(args, "cuda").args
    run = overload("accept_sampled_logits")
    wanted = run(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            graph.replay()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            again = run(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found in (got, again):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len([e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]) == 1


def exact_probs(logits, temperature, top_k, top_p) -> torch.Tensor:
    """The definition in float64, row by row. (The reference's float32 softmax is off by 1e-5 of a row's sum on CPU.)"""
    probs = torch.zeros(logits.shape, dtype=torch.float64)
    for b, hot in enumerate(temperature.tolist()):
        for row, out in zip(logits[b].double(), probs[b], strict=True):
            if hot == 0:
                out[row.argmax()] = 1.0
                continue
            ordered, order = torch.softmax((row - row.max()) / temperature[b].double(), 0).sort(descending=True, stable=True)
            if top_k is not None and top_k[b] >= 1:
                ordered[top_k[b] :] = 0.0
                ordered /= ordered.sum()
            if top_p is not None and top_p[b] < 1:
                keep = ordered.cumsum(0) - ordered < top_p[b]
                keep[0] = True
                ordered = ordered * keep / (ordered * keep).sum()
            out[order] = ordered
    return probs


@pytest.mark.parametrize("filters", ["kp", "k", "p", ""])
@pytest.mark.parametrize("shape", [(2, 2, 128_256), (8, 4, 32_000), (3, 2, 262_144)])
def test_sampling_probs(shape, filters):
    logits, _, *settings = cut(case(shape), filters)
    got = overload("sampling_probs")(*Copy((logits, *settings), "cuda").args).cpu()
    wanted = exact_probs(logits, *settings[:3])
    # A token at the edge of top-p may fall either way: sums of 1e5 float32 weights are exact to about 1e-6.
    assert ((got - wanted).abs().sum(-1) < 1e-5).all()
    torch.testing.assert_close(got.double().sum(-1), torch.ones(shape[:2], dtype=torch.float64), rtol=0, atol=1e-5)
    differing = ((got > 0) != (wanted > 0)).sum(-1)
    assert differing.max() <= 2
    if filters == "k":  # equal bfloat16 logits abound: which of them are kept is decided exactly
        assert differing.max() == 0


def test_sampling_probs_in_a_graph():
    logits, _, *settings = case((4, 4, 32_000))
    given = Copy((logits, *settings), "cuda").args
    run = overload("sampling_probs")
    wanted = run(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*given)
    graph.replay()
    assert torch.equal(got, wanted)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(*given)
    assert len([e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]) == 2
