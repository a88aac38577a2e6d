"""lower_skinny_mm on `_scaled_mm`, as torchao's `Float8Tensor` calls it for rows that it rounds."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.backends.weight_format import dequantized
from spec_ops.ops.linear import float8_mm_op
from spec_ops.ops.rounding import round_rows_op
from spec_ops.passes.analysis.stored_weights import weight_bytes
from spec_ops.passes.fuse_rounding import FuseRounding
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm
from tests.helpers.pass_harness import capture, capture_for_cuda, run_pass, targets, texts
from tests.helpers.stored_weights import stored

aten = torch.ops.aten
FP8, M, N, K = torch.float8_e4m3fn, 4, 320, 512


@pytest.fixture(autouse=True)
def few_rows_too(monkeypatch):
    """Graphs of four rows are as good as others, and faster to run."""
    monkeypatch.setattr(hopper_tiles, "FLOAT8_LEAST_ROWS", 1)


def of(kind: str, group: int | None = None, m: int = M, k: int = K) -> list[torch.Tensor]:
    """Numbers of rows with a scale for `group` of their columns or for all rows, and a weight with its scales."""
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=g) for shape in ((m, k), (N, k)))
    steps = (x.view(1, 1, -1) if group is None else x.unflatten(1, (-1, group))).abs().amax(2) / 448
    numbers = x / steps.repeat_interleave(k // steps.shape[1], 1)
    return [numbers.to(FP8), steps, *stored(weight, kind)[:2]]


def product(x, steps, weight, scale, bias=None, **options: Any):
    return torch._scaled_mm(x, weight.t(), steps, scale.t(), bias=bias, **({"out_dtype": torch.bfloat16} | options))


def only(module: torch.fx.GraphModule) -> torch.fx.Node:
    (node,) = (node for node in module.graph.nodes if node.target is float8_mm_op)
    return node


@pytest.mark.parametrize("m", [1, 4, 128])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("kind", "group"), [("row", K), ("tensor", None)])
def test_scales_of_rows_and_of_all(kind, group, biased, m):
    if m == 1 and kind == "row":
        group = None  # one number either way
    args = [*of(kind, group, m), *([torch.randn(N).bfloat16()] * biased)]
    module, inputs = capture(product, *args, dynamo=False)
    (node,) = (node for node in module.graph.nodes if node.target is aten._scaled_mm.default)
    assert weight_bytes(node) == args[2].nbytes + args[3].nbytes
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert texts(result.done) == f"float8_mm: {m} rows of 8 bits, weight 320 x 512 of 8 bits", texts(result.refused)
    assert [tuple(operand.meta["val"].shape) for operand in only(module).args[:4]] == [tuple(t.shape) for t in args[:4]]
    assert weight_bytes(only(module)) == args[2].nbytes + args[3].nbytes
    assert aten._scaled_mm.default not in targets(module)
    (got,) = module(*inputs)
    x, steps, weight, scale = args[:4]
    want = (x.double() * steps.double()) @ dequantized(weight, scale).double().t() + (args[4].double() if biased else 0)
    torch.testing.assert_close(got.double(), want, rtol=1.01 * 2**-8, atol=1e-4)  # rounded once
    torch.testing.assert_close(got, product(*args), rtol=2**-7, atol=2**-6)


def test_scales_of_blocks():
    """cuBLAS has those from CUDA 12.9 on: rows with a scale for 128 columns, weights with one for 128 x 128."""
    x, steps, weight, scale = of("block", 128)
    args = [x, steps.t().contiguous().t(), weight, scale]
    module = capture_for_cuda(lambda *given: product(*given), *args)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
    assert [tuple(operand.meta["val"].shape) for operand in only(module).args[1:4]] == [(M, 4), (N, K), (3, 4)]
    want = (x.double() * steps.double().repeat_interleave(128, 1)) @ dequantized(weight, scale).double().t()
    torch.testing.assert_close(module(*args).double(), want, rtol=1.01 * 2**-8, atol=1e-4)


def of_a_sum(x, steps, weight, scale):
    return product(x, steps, (weight.float() + 1).to(FP8), scale)


def of_columns(x, steps, weight, scale):
    """A slice, whose rows start anywhere."""
    return product(x[:, :256], steps, weight[:, 8:264], scale)


@pytest.mark.parametrize(
    ("fn", "args", "arch", "reason"),
    [
        (product, of("row", K), 100, "needs a GPU of sm_90 (Hopper), got sm_100"),
        (product, of("row", K, m=129), 90, "`x` must have at most 128 rows, got 129"),
        (product, of("row", 448, k=448), 90, "the columns of `x` must be a multiple of 128, got 448"),
        (lambda *args: product(*args, out_dtype=torch.float32), of("row", K), 90, "got torch.float32"),
        (of_a_sum, of("row", K), 90, "the weight is computed here"),
        (of_columns, of("row", K), 90, "the weight's rows do not start at multiples of 16 bytes"),
    ],
)
def test_what_stays(fn, args, arch, reason):
    module, _ = capture(fn, *args, dynamo=False)
    before = str(module.graph)
    result = run_pass(LowerSkinnyMm(), module, arch)
    assert result.matches == 0
    assert reason in texts(result.refused)
    assert str(module.graph) == before


def test_a_scale_of_the_result_and_other_scales():
    x, steps, weight, scale = of("row", K)
    cases = [
        ([x, steps, weight, scale, torch.ones(1)], lambda *a: product(*a[:4], scale_result=a[4]), "its result has a scale"),
        ([x, torch.ones(1), weight.float().to(torch.float8_e5m2), torch.ones(1)], product, "not float8_e4m3fn"),
        ([x.float().to(torch.float8_e5m2), torch.ones(1), weight, torch.ones(1)], product, "not float8_e4m3fn"),
    ]
    for args, fn, reason in cases:
        module = capture_for_cuda(lambda *given, fn=fn: fn(*given), *args)
        result = run_pass(LowerSkinnyMm(), module, 90)
        assert result.matches == 0
        assert reason in texts(result.refused)


@pytest.mark.parametrize("granularity", ["PerRow", "PerTensor"])
@torch.no_grad()
def test_torchaos_dynamic_tensors(granularity):
    """What `Float8DynamicActivationFloat8WeightConfig` makes, which wants a GPU; two layers round their rows once."""
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    tensors = importlib.import_module("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    config = importlib.import_module("torchao.float8.inference").Float8MMConfig(use_fast_accum=True)
    kind = getattr(torchao, granularity)()
    rows = tensors.QuantizeTensorToFloat8Kwargs(granularity=kind, mm_config=config)
    made = []
    for _ in range(2):
        layer = nn.Linear(K, N).bfloat16()
        weight = torchao.Float8Tensor.from_hp(layer.weight.detach(), granularity=kind, mm_config=config, act_quant_kwargs=rows)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        made.append(layer)
    module, _ = capture(lambda x: tuple(layer(x) for layer in made), torch.randn(2, 2, K).bfloat16())
    assert targets(module).count(aten.amax.default) == 2
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert result.matches == 2, texts(result.refused)
    assert targets(module).count(float8_mm_op) == 2
    assert targets(module).count(aten.amax.default) == 1
    shapes = {tuple(node.args[1].meta["val"].shape) for node in module.graph.nodes if node.target is float8_mm_op}
    assert shapes == {(M, 1) if granularity == "PerRow" else (1, 1)}
    result = run_pass(FuseRounding(), module, 90)
    assert targets(module).count(round_rows_op) == result.matches == (granularity == "PerRow"), texts(result.refused)
    assert ("a step is not of columns of one row" in texts(result.refused)) == (granularity == "PerTensor")
