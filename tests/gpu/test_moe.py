"""Mixtures of experts on a GPU: error, repeats, CUDA graphs, no syncs and no copies of weights."""

from __future__ import annotations

import os
import random

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

from spec_ops.backends.triton.moe.sort import sorted_pairs  # noqa: E402
from spec_ops.ops.moe import (  # noqa: E402
    add_moe_experts_op,
    moe_experts_op,
    route_experts_op,
    scaled_moe_experts_op,
)
from spec_ops.ops.reference import moe as reference  # noqa: E402
from tests.helpers.mixtures import (  # noqa: E402
    FORMS,
    PUBLISHED,
    STORED,
    call,
    check_sorted,
    dequantized_call,
    exact,
    routing_ids,
    stored_call,
)
from tests.helpers.op_samples import route_experts_sample  # noqa: E402
from tests.helpers.sample_source import Source  # noqa: E402

TOKENS = (1, 3, 8, 9, 16, 17, 40, 64, 65, 300)
BF16 = torch.bfloat16


def on_gpu(args: tuple) -> tuple:
    return tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return (got.double().cpu() - wanted).square().mean().sqrt().item()


def eager(args: tuple) -> torch.Tensor:
    """Each step rounded to the dtype, as the loop of transformers computes it, on the device of `args`."""
    x, ids, weights, gate_up, down, first_bias, second_bias, activation, gated, interleaved, transposed, *numbers = args
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if not 0 <= expert < gate_up.shape[0]:
                continue
            biases = [None if b is None else b[expert : expert + 1] for b in (first_bias, second_bias)]
            one = (x[token : token + 1], ids.new_zeros(1, 1), weights.new_ones(1, 1))
            form = (activation, gated, interleaved, transposed, *numbers)
            made = reference.moe_experts(*one, gate_up[expert : expert + 1], down[expert : expert + 1], *biases, *form)
            out[token] += (made[0].float() * weights[token, slot]).to(x.dtype)
    return out


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMS)
def test_error_is_that_of_the_loop(name, dtype):
    for tokens, (hidden, inner) in zip(TOKENS, [(256, 192), (320, 128)] * 5, strict=True):
        args = call(FORMS[name], tokens, 4, 24, hidden, inner, dtype, routing="zipf", dropped=0.1)
        wanted = exact(args)
        slack = 1e-7
        if dtype == torch.float32:
            # Ours adds in the order of the inner dimension, where roundings add up as a random walk; the loop's products add
            # blocks first, and are closer.
            slack = torch.finfo(dtype).eps / 2 * hidden**0.5 * wanted.square().mean().sqrt().item()
        assert error(moe_experts_op(*on_gpu(args)), wanted) <= 1.1 * error(eager(on_gpu(args)), wanted) + slack


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("form", [FORMS["Qwen3-MoE"], PUBLISHED], ids=["gate and up", "published"])
def test_error_with_stored_weights_is_that_of_dequantized_ones(form, kind, dtype):
    """At most 1.05 times that of the same kernels on the dequantized weights in the rows' dtype."""
    for tokens, (hidden, inner) in zip(TOKENS, [(256, 192), (320, 128)] * 5, strict=True):
        args = stored_call(form, kind, tokens, 4, 24, hidden, inner, dtype, routing="zipf", dropped=0.1)
        wide = dequantized_call(args)
        wide = (*wide[:3], *(stack.to(dtype) for stack in wide[3:5]), *wide[5:])
        wanted = exact(args)
        ours, theirs = (error(moe_experts_op(*on_gpu(given)), wanted) for given in (args, wide))
        assert ours <= 1.05 * theirs + 1e-7, (tokens, ours, theirs)


@pytest.mark.parametrize("tokens", [1, 4, 9, 20, 64, 65, 100, 300])
def test_scales_of_all_magnitudes(tokens):
    """Numbers of MXFP4 are scaled in bfloat16: exactly, so that powers of 2 may go from the rows to the weights."""
    args = on_gpu(stored_call(PUBLISHED, "MXFP4", tokens, 4, 24, 576, 320, BF16))
    wanted = moe_experts_op(*args)
    for power in (-100, -60, 60, 100):
        shifted = (args[14].int() + power).to(torch.uint8)
        got = moe_experts_op(args[0] * 2.0**-power, *args[1:14], shifted, args[15])
        assert torch.equal(got, wanted), power


@pytest.mark.parametrize("form", [FORMS["Qwen3-MoE"], PUBLISHED], ids=["gate and up", "published"])
@pytest.mark.parametrize("routing", ["uniform", "zipf", "identical"])
def test_sizes_of_mxfp4(routing, form):
    """Columns and k that blocks do not divide, one tile of an expert and many, more experts than are touched."""
    for tokens, k, experts, hidden, inner in (
        (6, 1, 1, 64, 64), (13, 3, 5, 704, 192), (33, 4, 32, 2880, 320), (100, 2, 9, 320, 1088), (128, 8, 128, 512, 320),
    ):  # fmt: skip
        args = stored_call(form, "MXFP4", tokens, k, experts, hidden, inner, BF16, routing=routing, dropped=0.1)
        wide = dequantized_call(args)
        wide = (*wide[:3], *(stack.to(BF16) for stack in wide[3:5]), *wide[5:])
        wanted = exact(args)
        ours, theirs = (error(moe_experts_op(*on_gpu(given)), wanted) for given in (args, wide))
        assert ours <= 1.05 * theirs, (tokens, ours, theirs)


@pytest.mark.parametrize("kind", ["16 bits", "MXFP4"])
@pytest.mark.parametrize("tokens", [5, 8, 40, 300])
def test_ids_whose_last_32_bits_are_an_experts(tokens, kind):
    """They are no expert's."""
    sizes = (tokens, 2, 4, 192, 320, BF16)
    args = call(FORMS["gpt-oss"], *sizes) if kind == "16 bits" else stored_call(PUBLISHED, kind, *sizes)
    ids = args[1].to(torch.int64)
    ids[:4, 1] = torch.tensor([-(2**63), -(2**32), 2**32 + 1, -(2**32) + 2])
    none = torch.where((ids < 0) | (ids > 3), -1, ids)
    got, wanted = (moe_experts_op(*on_gpu((args[0], given, *args[2:]))) for given in (ids, none))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("routing", ["uniform", "zipf", "identical"])
def test_pairs_are_sorted_by_expert(routing, dtype):
    """Also in a graph whose ids are others."""
    for tokens, k, experts in ((1, 1, 1), (65, 4, 32), (128, 8, 128), (129, 8, 128), (512, 8, 384), (7000, 8, 256)):
        ids = routing_ids(routing, tokens, experts, k, torch.Generator().manual_seed(tokens))
        draw = torch.rand(ids.shape, generator=torch.Generator().manual_seed(tokens))
        ids = torch.where(draw < 0.05, -1, torch.where(draw > 0.95, experts + 2, ids)).to(dtype).cuda()
        given = torch.zeros_like(ids)
        check_sorted(sorted_pairs(given, experts), given, experts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = sorted_pairs(given, experts)
        given.copy_(ids)
        for _ in range(20):
            got.order.fill_(-1)
            graph.replay()
            check_sorted(got, ids, experts)


def assert_same_bits_in_a_graph(given: tuple) -> None:
    first = moe_experts_op(*given)
    assert all(torch.equal(moe_experts_op(*given), first) for _ in range(50))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [moe_experts_op(*given) for _ in range(3)]
    for _ in range(10):
        for out in got:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, first) for out in got)


@pytest.mark.parametrize("tokens", [1, 8, 9, 40, 300])
@pytest.mark.parametrize("kind", ["block", "MXFP4"])
def test_stored_weights_repeat_and_fit_in_a_graph(kind, tokens):
    """Sizes of gpt-oss's kind: no multiple of 128."""
    given = on_gpu(stored_call(PUBLISHED, kind, tokens, 4, 32, 576, 320, BF16))
    assert_same_bits_in_a_graph(given)


@pytest.mark.parametrize("routing", ["uniform", "zipf", "identical"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_results_repeat_and_fit_in_a_graph(tokens, routing):
    given = on_gpu(call(FORMS["gpt-oss"], tokens, 4, 32, 576, 320, BF16, routing=routing))
    assert_same_bits_in_a_graph(given)


def test_another_routing_of_a_captured_graph():
    """The grid does not depend on how many experts are touched."""
    given, other = (on_gpu(call(FORMS["Qwen3-MoE"], 16, 4, 32, 256, 128, BF16, routing=r)) for r in ("identical", "uniform"))
    wanted = moe_experts_op(given[0], *other[1:3], *given[3:])
    moe_experts_op(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts_op(*given)
    for mine, theirs in zip(given[1:3], other[1:3], strict=True):
        mine.copy_(theirs)
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_no_sync_and_no_copy_of_weights(tokens):
    given = on_gpu(call(FORMS["Qwen3-MoE"], tokens, 8, 64, 1024, 512, BF16))
    moe_experts_op(*given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe_experts_op(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Rows between the products, in float32, and what sorts them; one expert's weights a token would be tokens * 25 MB.
    assert torch.cuda.max_memory_allocated() - before < tokens * 8 * (1024 + 512) * 16 + 2**22


@pytest.mark.parametrize("name", ["Qwen3-MoE", "gpt-oss", "MXFP4"])
@pytest.mark.parametrize("tokens", [1, 8, 9, 32, 65])
def test_norms_around_a_mixture(tokens, name):
    """The error is that of norms apart; the sum and what is made of it are those of its kernels, at every call."""
    if name == "MXFP4":
        args = stored_call(PUBLISHED, "MXFP4", tokens, 4, 24, 2048, 192, BF16, dropped=0.1)
    else:
        args = call(FORMS[name], tokens, 4, 24, 2048, 192, BF16, dropped=0.1)
    x, g = args[0], torch.Generator().manual_seed(tokens)
    squares = x.float().unflatten(1, (-1, 16)).square().sum(2) * 4.0
    residual, weight = torch.randn(x.shape, generator=g).to(BF16), (torch.rand(2048, generator=g) + 0.5).to(BF16)
    exact_x = x.double() * torch.rsqrt(squares.double().sum(1, keepdim=True) / 2048 + 1e-6)
    wanted = exact((exact_x, *args[1:]))
    scales = () if name == "MXFP4" else (None, None)
    given = on_gpu((*args, *scales, squares, 1e-6))
    fused, apart = scaled_moe_experts_op(*given), moe_experts_op(*on_gpu((exact_x.to(BF16), *args[1:])))
    assert error(fused, wanted) <= 1.05 * error(apart, wanted)
    residual, weight = residual.cuda(), weight.cuda()
    y, z, sums = add_moe_experts_op(*given, residual, weight)
    assert torch.equal(y, fused + residual)
    assert torch.equal(z, (y.float() * weight.float()).to(BF16))
    torch.testing.assert_close(sums, y.float().unflatten(1, (-1, 16)).square().sum(2), rtol=1e-5, atol=0)
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(add_moe_experts_op(*given, residual, weight), (y, z, sums), strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_routers(seed):
    args = route_experts_sample(Source(random.Random(seed).randint, "cpu"))
    got = route_experts_op(*on_gpu(args))
    wanted = reference.route_experts(*args)
    assert torch.equal(got[0].cpu(), wanted[0])
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[wanted[1].dtype]
    torch.testing.assert_close(got[1].cpu(), wanted[1], rtol=rounding, atol=1e-7)
