"""On a GPU: an RMS norm divided among the products around it, against float64 and next to a norm with a kernel of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import spec_ops
from spec_ops.ops.linear import add_skinny_mm_op, scaled_silu_mul_op, scaled_skinny_mm_op, skinny_mm_op

pytestmark = pytest.mark.gpu

E, WIDE, QKV = 4096, 14336, 6144
EPS = 1e-5
ROWS = (1, 4, 8, 9, 16, 17, 32, 64)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    shapes = {"o": (E, E), "gate_up": (2 * WIDE, E), "down": (E, WIDE), "qkv": (QKV, E)}
    made = {name: torch.randn(shape, generator=g, device="cuda").bfloat16() * 0.02 for name, shape in shapes.items()}
    return made | {"norm": torch.rand(E, generator=g, device="cuda").bfloat16() + 0.5}


def rows(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention's output and the residual, over an octave of scales: how large a rounding is depends on it."""
    g = torch.Generator("cuda").manual_seed(m)
    scales = 2 ** (torch.arange(m, device="cuda") / m)[:, None]
    x, r = (torch.randn(m, E, generator=g, device="cuda") * scales for _ in range(2))
    return x.bfloat16(), (3 * r).bfloat16()


def rms_norm(y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """In float32 or float64, rounded once."""
    exact = y if y.dtype == torch.float64 else y.float()
    return (exact * torch.rsqrt(exact.square().mean(-1, True) + EPS) * g.to(exact.dtype)).to(y.dtype)


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got.double() - exact).square().mean().sqrt().item()


@pytest.mark.parametrize("m", ROWS)
def test_error_is_that_of_a_norm_alone(weights, m):
    x, r = rows(m)
    o, g, gate_up, qkv = (weights[name] for name in ("o", "norm", "gate_up", "qkv"))
    y, z, squares = add_skinny_mm_op(x, o, r, g)
    assert torch.equal(y, skinny_mm_op(x, o, None) + r)
    assert torch.equal(z, (y.float() * g.float()).bfloat16())
    torch.testing.assert_close(squares, y.float().view(m, -1, 16).square().sum(2), rtol=1e-5, atol=0)
    h, exact = rms_norm(y, g), rms_norm(y.double(), g.double())
    # Equal in number, roundings of fewer rows lie at other places between powers of two.
    bound = 1.05 if m > 4 else 1.4
    fused, wanted = scaled_skinny_mm_op(z, qkv, None, squares, EPS), exact @ qkv.double().t()
    assert error(fused, wanted) <= bound * error(torch.mm(h, qkv.t()), wanted)
    fused = scaled_silu_mul_op(*torch.mm(z, gate_up.t()).chunk(2, 1), squares, E, EPS)
    wanted = silu_mul(exact @ gate_up.double().t())
    assert error(fused, wanted) <= bound * error(silu_mul(torch.mm(h, gate_up.t()).float()).bfloat16(), wanted)


def chain(weights, x, r) -> list[torch.Tensor]:
    """Ours as the pass places them, and a plain product that shares their counters."""
    y, z, squares = add_skinny_mm_op(x, weights["o"], r, weights["norm"])
    q = scaled_skinny_mm_op(z, weights["qkv"], None, squares, EPS)
    return [y, z, squares, q, skinny_mm_op(y, weights["o"], None), scaled_silu_mul_op(q[:, :E], q[:, :E], squares, E, EPS)]


def test_results_repeat(weights):
    """Whoever is last to arrive, between launches of other sizes, and in a CUDA graph."""
    inputs = [rows(m) for m in (4, 32, 9, 64)]
    want = [chain(weights, *pair) for pair in inputs]
    for _ in range(50):
        for pair, outs in zip(inputs, want, strict=True):
            assert all(map(torch.equal, chain(weights, *pair), outs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [chain(weights, *pair) for pair in inputs * 2]
    for _ in range(20):
        for out in (out for outs in got for out in outs):
            out.zero_()
        graph.replay()
        for i, outs in enumerate(got):
            assert all(map(torch.equal, outs, want[i % len(want)]))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="skinny_mm has figures for sm_90 alone"
)
def test_a_compiled_layer(weights):
    """Between the products of a layer only SiLU is launched; the first sum is bit for bit that of the layer with norms."""

    def layer(x, r, k_cache, v_cache, slots):
        y = r + F.linear(x, weights["o"])
        y2 = y + F.linear(silu_mul(F.linear(F.rms_norm(y, (E,), weights["norm"], EPS), weights["gate_up"])), weights["down"])
        qkv = F.linear(F.rms_norm(y2, (E,), weights["norm"], EPS), weights["qkv"])
        q, k, v = qkv.split([E, 1024, 1024], -1)
        spec_ops.append_kv(k_cache, v_cache, k.unflatten(-1, (8, 128)), v.unflatten(-1, (8, 128)), slots)
        return y, y2, q, torch.cat([y, y2], -1)

    x, r = rows(8)
    caches = [torch.zeros(1, 8, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    args = (x, r, *caches, torch.arange(8, device="cuda"))
    results, names = {}, {}
    for on in (False, True):
        torch._dynamo.reset()
        compiled = spec_ops.compile(layer, passes={"fuse_norm_linear": on}, mode="default")
        compiled(*args)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            results[on] = [t.clone() for t in compiled(*args)]
            torch.cuda.synchronize()
        names[on] = [e.name for e in profile.events() if "Mem" not in e.name]
    norms = {on: [name for name in found if "rsqrt" in name or "rms_norm" in name] for on, found in names.items()}
    assert len(norms[False]) == 2, names[False]
    assert not norms[True]
    for kernel, count in {"add_skinny_mm_kernel": 2, "scaled_skinny_mm_kernel": 1, "scaled_silu_mul_kernel": 1}.items():
        assert sum(kernel in name for name in names[True]) == count, names[True]
    assert torch.equal(results[True][0], results[False][0])

    exact = {name: w.double() for name, w in weights.items()}
    y = r.double() + x.double() @ exact["o"].t()
    y2 = y + silu_mul(rms_norm(y, exact["norm"]) @ exact["gate_up"].t()) @ exact["down"].t()
    wanted = [y, y2, (rms_norm(y2, exact["norm"]) @ exact["qkv"].t())[:, :E], torch.cat([y, y2], -1)]
    # Eager, which also normalizes the rounded sum: Inductor's norm, fused with the sum, takes it unrounded.
    for ours, eager, want in zip(results[True], layer(*args), wanted, strict=True):
        assert error(ours, want) <= 1.05 * error(eager, want)
