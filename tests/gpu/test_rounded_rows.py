"""Rows that a compiled graph rounds to float8, on a GPU: once for all products, with the scales that `float8_mm` takes."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.models.quantized import float8_tensor
from spec_ops.models.stored_tensor import Inputs, StoredTensor
from spec_ops.ops.linear import float8_mm_op
from spec_ops.passes.manager import SLOT, PassManager

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for sm_90"
    ),
]

N, K = 1024, 4096
# How rows are rounded, and a scale that was measured before.
KINDS = {
    "rows": (Inputs("float8", float32_scales=True), None),
    "groups": (Inputs("float8", 128, float32_scales=True), None),
    "rows, scales of bfloat16": (Inputs("float8"), None),
    "groups, scales of bfloat16": (Inputs("float8", 128), None),
    "measured": (Inputs("float8"), torch.tensor([0.0107]).bfloat16()),
}


def layer(inputs: Inputs, measured: torch.Tensor | None, seed: int) -> nn.Linear:
    made = nn.Linear(K, N, device="cuda").bfloat16().requires_grad_(False)
    made.weight.copy_(torch.randn(N, K, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"))
    weight = float8_tensor(made.weight) if inputs.group else float8_tensor(made.weight, 1, K)
    scale = None if measured is None else measured.cuda()
    stored = StoredTensor(weight.data_, weight.scale, dtype=weight.dtype, inputs=inputs, input_scale=scale)
    made.weight = nn.Parameter(stored, requires_grad=False)
    return made


def compiled_with_passes(fn):
    """On a graph without an op of ours too, and without CUDA graphs."""
    options = {SLOT: PassManager(every_graph=True), "shape_padding": False}
    return torch.compile(fn, fullgraph=True, dynamic=False, options=options)


def kernels(run) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("m", [4, 20, 128])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_two_layers_of_one_value(kind, m):
    torch._dynamo.reset()
    inputs, measured = KINDS[kind]
    layers = nn.ModuleList([layer(inputs, measured, seed) for seed in (1, 2)])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return tuple(each(x) for each in self.layers)

    g = torch.Generator("cuda").manual_seed(m)
    x = (torch.randn(m, K, device="cuda", generator=g) * (torch.rand(m, 1, device="cuda", generator=g) + 0.5)).bfloat16()
    compiled = compiled_with_passes(Both())
    compiled(x)
    names = kernels(lambda: compiled(x))
    in_float8 = m >= hopper_tiles.FLOAT8_LEAST_ROWS
    assert sum(("hopper_float8" if in_float8 else "skinny_mm") in name for name in names) == 2, names
    assert len(names) == 3, names
    for got, each in zip(compiled(x), layers, strict=True):
        exact = x.double() @ each.weight.dequantize().double().t() + each.bias.double()
        errors = [(out.double() - exact).square().mean().sqrt().item() for out in (got, each(x))]
        assert 0 < errors[0] <= 1.05 * errors[1], errors
        # Numbers of one scale times another would make a row as much too large as that is. Here the other would be the scale
        # rounded to bfloat16: what rows have too much does not go with that.
        if m == 128 and measured is None and not inputs.group:
            got, exact = got.double() - each.bias, exact - each.bias
            more = (got * exact).sum(1) / exact.square().sum(1) - 1
            steps = x.float().abs().amax(1) / 448
            off = (steps.bfloat16().double() / steps.double()) - 1
            assert abs(float((more * off).sum() / off.square().sum())) < 0.5
    assert all(torch.equal(a, b) for a, b in zip(compiled(x), compiled(x), strict=True))


@torch.no_grad()
def test_numbers_of_a_graph_are_those_of_eager():
    """Nearly all: a quotient in the middle between two numbers may go either way."""
    torch._dynamo.reset()
    for inputs in (KINDS["rows"][0], KINDS["groups"][0]):
        x = torch.randn(64, K, device="cuda").bfloat16()
        x[3], x[5, 128:256], x[7] = 0, 0, 1e-39
        eager = inputs.rounded(x, None)
        compiled = torch.compile(inputs.rounded)(x, None)
        assert (eager != compiled).double().mean() < 1e-3
        assert bool((compiled[3] == 0).all())
        assert bool(compiled.isfinite().all())


@torch.no_grad()
def test_products_of_torch():
    """`_scaled_mm` with scales of rows, beside ours."""
    torch._dynamo.reset()
    weight = float8_tensor(torch.randn(N, K, device="cuda"), 1, K)
    numbers, steps = torch.randn(32, K, device="cuda").to(torch.float8_e4m3fn), torch.rand(32, 1, device="cuda") + 0.5

    def fn(numbers, steps, data, scale):
        return torch._scaled_mm(numbers, data.t(), steps, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

    compiled = compiled_with_passes(fn)
    compiled(numbers, steps, weight.data_, weight.scale)
    names = kernels(lambda: compiled(numbers, steps, weight.data_, weight.scale))
    assert ["hopper_float8" in name for name in names] == [True], names
    got = compiled(numbers, steps, weight.data_, weight.scale)
    assert torch.equal(got, float8_mm_op(numbers, steps, weight.data_, weight.scale, None, torch.bfloat16))
    torch.testing.assert_close(got, fn(numbers, steps, weight.data_, weight.scale), rtol=2**-6, atol=0.5)
