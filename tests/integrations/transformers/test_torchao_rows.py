"""torchao's weights with activations of 8 bits: texts are the model's own, and scales of whole batches are refused."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from spec_ops.integrations.transformers import TransformersGenerator
from spec_ops.integrations.transformers.torchao_rows import check_rows
from tests.integrations.transformers.test_fp8 import exact_model, linears

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1))


def of_int8(granularity) -> PreTrainedModel:
    model = exact_model()
    chosen = {id(layer) for layer in linears(model).values()}
    config = torchao.Int8DynamicActivationInt8WeightConfig(granularity=granularity, set_inductor_config=False)
    torchao.quantize_(model, config, filter_fn=lambda module, _: id(module) in chosen)
    return model


def of_float8(granularity) -> PreTrainedModel:
    """What `Float8DynamicActivationFloat8WeightConfig` makes, which wants a GPU."""
    tensors = importlib.import_module("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    config = importlib.import_module("torchao.float8.inference").Float8MMConfig(use_fast_accum=True)
    rows = tensors.QuantizeTensorToFloat8Kwargs(granularity=granularity, mm_config=config)
    model = exact_model().bfloat16()
    for layer in linears(model).values():
        weight = torchao.Float8Tensor.from_hp(
            layer.weight.detach(), granularity=granularity, mm_config=config, act_quant_kwargs=rows
        )
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return model


def behind(model: PreTrainedModel, text: torch.Tensor) -> float:
    """By how much the logit of a generated token is below the greatest one at most, by the model's own forward; in its
    standard deviations."""
    logits = model(text).logits[:, IDS.shape[1] - 1 : -1].float()
    chosen = logits.gather(-1, text[:, IDS.shape[1] :, None])[..., 0]
    return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("made", "bound"), [(of_int8, 0.02), (of_float8, 0.2)])
def test_text_is_the_models_own(made, bound):
    """Plain and speculative: rows are rounded as torchao's own layers round them. A difference in the last place that changes
    to which number one is rounded can decide between two tokens that are about as likely."""
    model = made(torchao.PerRow())
    for draft in (None, copy.deepcopy(model)):
        with TransformersGenerator(model, draft, compile=False) as generator:
            text = generator.generate(IDS, **GREEDY)
            x, layer = torch.randn(3, 256, dtype=model.dtype), model.model.layers[0].mlp.up_proj
            rounded, exact = layer(x), nn.functional.linear(x, layer.weight.dequantize())
        assert behind(model, text) < bound
        assert 0.002 < (rounded - exact).std() / exact.std() < 0.1
        assert torch.equal(rounded, layer(x))


@pytest.mark.parametrize("made", [of_int8, of_float8])
def test_scales_of_whole_batches_are_refused(made):
    model = made(torchao.PerTensor())
    message = r"`target` must round each row .*: model.layers.0.self_attn.q_proj has a \w+8Tensor .* with granularity=PerRow"
    with pytest.raises(ValueError, match=message):
        TransformersGenerator(model, exact_model().to(model.dtype))


def test_scales_of_whole_batches_in_4_bits_are_refused():
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao has no NVFP4")
    model = exact_model()
    layer = model.model.layers[1].mlp.up_proj
    exact = layer.weight.detach()
    for measured in (True, False):
        rows = nvfp4.QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=not measured)
        weight = nvfp4.NVFP4Tensor.to_nvfp4(exact, act_quant_kwargs=rows)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if measured:
            check_rows(model, "`target`")
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj has a NVFP4Tensor .*step='prepare'"):
        TransformersGenerator(model, exact_model())
