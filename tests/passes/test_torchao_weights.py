"""torchao's NVFP4 weights: what a compiled graph reads of them, and which of torchao's weights are left."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import spec_ops
from spec_ops.passes import torchao_weights
from spec_ops.passes.analysis.counts import WEIGHTS
from spec_ops.passes.analysis.stored_weights import shuffled_int4, weight_bytes
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm
from tests.helpers.pass_harness import capture, compile_interpreted, run_pass, texts

pytest.importorskip("torchao", reason="torchao is not installed")
nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao has no NVFP4")
workflow = importlib.import_module("torchao.prototype.mx_formats")
quantization = importlib.import_module("torchao.quantization")


class Layers(nn.Module):
    """Two layers beside an op of ours: rows and columns that fill no whole tile of scales, and some that do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, 1024, bias=False), nn.Linear(1024, 208)

    def forward(self, x, cache_k, cache_v, slots):
        spec_ops.append_kv(cache_k, cache_v, x.view(4, 2, 96), x.view(4, 2, 96), slots)
        return self.second(self.first(x))


def quantized(dtype: torch.dtype = torch.bfloat16, **options) -> tuple[Layers, list[torch.Tensor]]:
    """Layers in NVFP4, and arguments."""
    torch.manual_seed(0)
    model = Layers().to(dtype).requires_grad_(False)
    quantization.quantize_(model, workflow.NVFP4WeightOnlyConfig(**options))
    caches = [torch.zeros(1, 4, 2, 96, dtype=dtype) for _ in range(2)]
    return model, [torch.randn(4, 192).to(dtype), *caches, torch.arange(4)]


def exact(model: Layers, x: torch.Tensor) -> torch.Tensor:
    """In float64 of the dequantized weights."""
    first, second = (layer.weight.dequantize(torch.float32).double() for layer in (model.first, model.second))
    return x.double() @ first.t() @ second.t() + model.second.bias.double()


@pytest.mark.parametrize("whole", [True, False])
def test_read_as_stored(whole):
    model, args = quantized(use_dynamic_per_tensor_scale=whole)
    assert isinstance(model.first.weight.data, nvfp4.NVFP4Tensor)
    assert model.first.weight.is_swizzled_scales
    torch._dynamo.reset()
    compiled, reports = compile_interpreted(model, arch=90)
    got, want, eager = compiled(*args), exact(model, args[0]), model(*args)
    assert reports[0].matches("lower_skinny_mm") == 2
    assert "weight 1024 x 192 of 4 bits" in reports[0].text()
    assert reports[0].after[WEIGHTS] < reports[0].before[WEIGHTS]
    errors = [(out.double() - want).square().mean().sqrt() for out in (got, eager)]
    assert 0 < errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("shape", [(208, 192), (128, 64), (304, 1088)])
def test_scales_in_rows(shape):
    """Those that torchao would store without tiles."""
    weight = torch.randn(shape)
    made = [nvfp4.NVFP4Tensor.to_nvfp4(weight, is_swizzled_scales=tiles) for tiles in (True, False)]
    rows = [torchao_weights.in_rows(part).float() for part in made]
    assert torch.equal(*rows)
    assert rows[0].shape == (shape[0], shape[1] // 16)
    data, scale = made[0].qdata, torchao_weights.in_rows(made[0])
    assert torch.equal(torchao_weights.dequantized_weight(data, scale, dtype="float32"), made[0].dequantize())


@torch.no_grad()
@pytest.mark.parametrize("how", ["in place", "another tensor", "another weight"])
def test_scales_are_read_anew_when_they_change(how):
    model, args = quantized()
    compiled, reports = compile_interpreted(model, arch=90)
    before = compiled(*args)
    weight = model.second.weight
    if how == "in place":
        weight.scale.copy_((weight.scale.float() / 2).to(torch.float8_e4m3fn))
    elif how == "another tensor":
        weight.scale = (weight.scale.float() / 2).to(torch.float8_e4m3fn)
    else:
        other = copy.deepcopy(weight)
        other.scale = (weight.scale.float() / 2).to(torch.float8_e4m3fn)
        model.second.weight = nn.Parameter(other, requires_grad=False)
    got = compiled(*args)
    assert not torch.allclose(got, before)
    torch.testing.assert_close(got, model(*args), rtol=2**-6, atol=2**-6)
    assert len(reports) == 1


@torch.no_grad()
def test_scales_are_put_in_rows_once():
    """For all graphs that read a weight, and as long as it lives; CUDA graphs find them at the same address."""
    model, args = quantized()
    takes = [torchao_weights.ScalesInRows() for _ in range(2)]
    rows = [take(model.first.weight) for take in takes for _ in range(2)]
    assert len({id(each) for each in rows}) == 1
    kept = weakref.ref(rows[0])
    del takes, rows, model, args
    gc.collect()
    assert kept() is None


@torch.no_grad()
def test_a_compiled_model_and_its_cache(tmp_path):
    """Inductor's code in float32, and a hit of its cache, in which the test has keys of its own."""
    own_keys = torch.compiler.config.patch(cache_key_tag=str(tmp_path))
    hits = []
    for options in ({}, {}, {"use_dynamic_per_tensor_scale": False}):
        torch._dynamo.reset()
        counters.clear()
        model, args = quantized(torch.float32, **options)
        with own_keys:
            got = spec_ops.compile(model, mode="default")(*args)
        torch.testing.assert_close(got, model(*args), rtol=1e-4, atol=1e-5)
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0]


def test_what_is_left_to_torchao():
    weight = torch.randn(64, 64)
    known = nvfp4.NVFP4Tensor.to_nvfp4(weight, is_swizzled_scales=True)
    assert torchao_weights.parts_of(known) == ("qdata", "scale_in_rows")
    assert torchao_weights.parts_of(weight) is None
    of_rows = nvfp4.QuantizeTensorToNVFP4Kwargs()
    assert torchao_weights.parts_of(nvfp4.NVFP4Tensor.to_nvfp4(weight, act_quant_kwargs=of_rows)) is None
    assert torchao_weights.parts_of(nvfp4.NVFP4Tensor.to_nvfp4(torch.randn(2, 64, 64))) is None
    assert torchao_weights.parts_of(known.t()) is None
    with torch.inference_mode():
        assert torchao_weights.parts_of(nvfp4.NVFP4Tensor.to_nvfp4(weight)) is None  # changes of which cannot be seen
    damaged = copy.deepcopy(known)
    damaged.scale = damaged.scale[:, :8]
    assert torchao_weights.parts_of(damaged) is None


def test_int4_in_the_order_of_its_own_kernel_is_named():
    with torch.library._scoped_library("mslk", "FRAGMENT") as library:
        if not hasattr(torch.ops.mslk, "bf16i4bf16_shuffled"):
            library.define("bf16i4bf16_shuffled(Tensor X, Tensor W, Tensor w_scale_group, Tensor w_zero_group) -> Tensor")
            library.impl("bf16i4bf16_shuffled", lambda x, w, s, z: x.new_empty(len(x), len(w)), "CompositeExplicitAutograd")
        args = torch.randn(4, 256).bfloat16(), torch.zeros(64, 128, dtype=torch.int8), *torch.zeros(2, 2, 64).bfloat16()
        module, _ = capture(lambda *args: torch.ops.mslk.bf16i4bf16_shuffled(*args), *args)
        result = run_pass(LowerSkinnyMm(), module, 90)
        assert "product with torchao's Int4PreshuffledTensor: its weight lies in the order" in texts(result.refused)
        (product,) = (node for node in module.graph.nodes if shuffled_int4(node) is not None)
        assert weight_bytes(product) == sum(part.nbytes for part in args[1:])
    graph = torch.fx.Graph()
    tiled = graph.call_function(torch.ops.aten._weight_int4pack_mm.default, (None,) * 4)
    assert shuffled_int4(tiled) == "Int4TilePackedTo4dTensor"
