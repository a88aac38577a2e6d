"""Rows rounded to float8 in one launch, on a GPU: the bits of eager torch, and what a compiled graph launches."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="float8 needs sm_89"),
]

from spec_ops.models.quantized import float8_tensor  # noqa: E402
from spec_ops.models.stored_tensor import StoredTensor  # noqa: E402
from spec_ops.ops.rounding import (  # noqa: E402
    add_norm_round_rows_op,
    gated_round_rows_op,
    norm_round_rows_op,
    round_rows_op,
)
from spec_ops.passes.manager import SLOT, PassManager  # noqa: E402
from tests.helpers.roundings import FP8, KINDS, how, measured, rows, times_steps  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16)
SIZES = ((1, 128), (3, 640), (17, 4096), (128, 14336), (200, 4096), (5, 32768))


def of(kind: str, m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return rows(m, k, dtype, seed, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bits_of_eager(kind, dtype):
    inputs, _ = KINDS[kind]
    for m, k in SIZES:
        x = torch.cat([of(kind, m, k, dtype), of(kind, m, 8, dtype)], 1)[:, :k]  # rows farther apart than they are long
        numbers, steps = round_rows_op(x, *how(kind, k, dtype, "cuda"))
        assert numbers.is_contiguous()
        want = inputs.rounded(x, measured(kind, dtype, "cuda"))
        assert torch.equal(times_steps(numbers, steps, kind, dtype), want)


@torch.no_grad()
def test_rows_of_zeros_and_small_and_large_numbers():
    for kind in KINDS:
        x = of(kind, 8, 512, torch.bfloat16)
        x[0], x[1, :128], x[2], x[3, 5], x[4, 130] = 0, 0, 1e-39, float("nan"), float("inf")
        x[5, :3] = torch.tensor([1e38, -3e38, 2e38])
        got = times_steps(*round_rows_op(x, *how(kind, 512, x.dtype, "cuda")), kind, x.dtype)
        want = KINDS[kind][0].rounded(x, measured(kind, x.dtype, "cuda"))
        assert torch.equal(got.isnan(), want.isnan())
        torch.testing.assert_close(got.nan_to_num(), want.nan_to_num(), rtol=0, atol=0)


@pytest.mark.parametrize("columns", [128, 512])
@torch.no_grad()
def test_steps_of_zero_and_infinity(columns):
    """Steps of 16 bits without a least one, as torchao has them: small rows have 0, and are cut off."""
    x = of("rows", 8, 512, torch.float16)
    x[0], x[1], x[2, 3], x[3] = 0, 1e-5, float("inf"), -6e-8
    x[1, 7] = 0
    steps = (x.unflatten(1, (-1, columns)).abs().amax(2, keepdim=True) / 448).float()
    want = (x.float().unflatten(1, (-1, columns)) / steps).clamp(-448, 448).to(FP8).view(x.shape)
    numbers, got = round_rows_op(x, columns, torch.float16, torch.float32, 0.0, 0.0)
    assert (steps[1] == 0).all()
    assert torch.equal(got, steps.squeeze(2))
    assert torch.equal(numbers.float().isnan(), want.float().isnan())
    assert torch.equal(numbers.float().nan_to_num(), want.float().nan_to_num())


def same(got: tuple[torch.Tensor, ...], want: torch.Tensor, kind: str, part: float) -> None:
    """But for that part of the numbers, where the last bit of float32 decides; those are the next number of float8."""
    restored = times_steps(*got, kind, want.dtype)
    assert (restored != want).double().mean() <= part
    torch.testing.assert_close(restored, want, rtol=0.13, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_after_activations_and_norms(kind, dtype):
    inputs, scale = KINDS[kind][0], measured(kind, dtype, "cuda")
    for m, k in SIZES:
        x, y = (of(kind, m, k, dtype, seed) for seed in (1, 2))
        both = torch.cat([x, y], 1)
        weight = (torch.rand(k, device="cuda") + 0.5).to(dtype)
        called = how(kind, k, dtype, "cuda")
        for name, fn in (("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", lambda v: F.gelu(v, approximate="tanh"))):
            got = gated_round_rows_op(both[:, :k], both[:, k:], name, *called)
            same(got, inputs.rounded(fn(x) * y, scale), kind, 5e-3)
        total, *got = add_norm_round_rows_op(x, y, weight, 1e-5, 2, *called)
        assert torch.equal(total, x + y)
        exact = total.float() * torch.rsqrt(total.float().square().mean(1, True) + 1e-5)
        same(tuple(got), inputs.rounded(exact.to(dtype) * weight, scale), kind, 5e-3)
        got = norm_round_rows_op(total, weight, 1e-5, 1, *called)
        same(got, inputs.rounded((exact * weight.float()).to(dtype), scale), kind, 5e-3)


class Layer(nn.Module):
    """What lies between attention and the next: four products."""

    def __init__(self, kind: str, e: int = 1024, f: int = 2048) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(e, eps=1e-5), nn.RMSNorm(e, eps=1e-5)])
        sizes = {"o": (e, e), "gate_up": (2 * f, e), "down": (e, f), "qkv": (e, e)}
        for name, (n, k) in sizes.items():
            layer = nn.Linear(k, n, bias=False)
            inputs = KINDS[kind][0]
            stored = float8_tensor(layer.weight) if inputs.group else float8_tensor(layer.weight, 1, k)
            scale = measured(kind, torch.bfloat16)
            layer.weight = nn.Parameter(
                StoredTensor(stored.data_, stored.scale, dtype=torch.bfloat16, inputs=inputs, input_scale=scale), False
            )
            self.add_module(name, layer)
        self.norms.bfloat16()

    def forward(self, x, attended):
        x = x + self.o(attended)
        gate, up = self.gate_up(self.norms[0](x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return x, self.qkv(self.norms[1](x))


def names(run) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="`float8_mm` is for sm_90"
)
@pytest.mark.parametrize("m", [20, 128])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer(kind, m):
    """A launch each for four roundings and four products, and the last product's sum is left to its norm; replays of a graph,
    where each comes before the last one's end, have the same bits."""
    torch._dynamo.reset()
    layer = Layer(kind).cuda()
    x, attended = (rows(m, 1024, torch.bfloat16, seed, "cuda") for seed in (1, 2))
    options = {SLOT: PassManager(every_graph=True), "shape_padding": False}
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, options=options)
    want = compiled(x, attended)
    found = names(lambda: compiled(x, attended))
    assert ["round_rows" in name for name in found] == [True, False] * 4, found
    assert sum("hopper_float8" in name for name in found) == 4, found
    for got, eager in zip(want, layer(x, attended), strict=True):
        assert (got.double() - eager.double()).square().mean().sqrt() <= 0.03 * eager.double().std()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [compiled(x, attended) for _ in range(5)]
    for _ in range(10):
        for pair in got:
            for each in pair:
                each.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for pair in got for a, b in zip(pair, want, strict=True))


@torch.no_grad()
def test_no_rows():
    x = torch.empty(0, 256, device="cuda").bfloat16()
    for kind in KINDS:
        numbers, steps = round_rows_op(x, *how(kind, 256, x.dtype, "cuda"))
        assert numbers.shape == (0, 256)
        assert numbers.dtype == FP8
        assert steps.numel() == (1 if KINDS[kind][1] else 0)
