"""Fine-grained fp8 models of transformers: layers in 8 bits, and checkpoints as they are published."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

from spec_ops.backends.weight_format import dequantized
from spec_ops.integrations.transformers import TransformersGenerator, round_rows
from spec_ops.integrations.transformers.loading import load_checkpoints
from spec_ops.integrations.transformers.model import TransformersModel
from spec_ops.models import CheckpointError
from spec_ops.models.stored_tensor import Inputs, StoredTensor
from spec_ops.ops.linear import float8_mm_op, skinny_mm_op
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm
from tests.helpers.pass_harness import capture, run_pass, targets, texts
from tests.helpers.stored_weights import stored
from tests.helpers.tiny_transformers import VOCAB

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def exact_model() -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


def pair(kind: str = "block") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model in 8 bits, as transformers has it on a GPU, and the same model dequantized."""
    plain = exact_model()
    fp8 = copy.deepcopy(plain)
    config = FineGrainedFP8Config(weight_block_size=(128, 128) if kind == "block" else None)
    replace_with_fp8_linear(fp8, ["lm_head"], config, pre_quantized=True)
    for name, layer in linears(plain).items():
        weight, scale, _ = stored(layer.weight, kind)
        layer.weight.copy_(dequantized(weight, scale))
        own = fp8.get_submodule(name)
        assert type(own) is FP8Linear
        own.weight = nn.Parameter(weight, requires_grad=False)
        own.weight_scale_inv = nn.Parameter(scale if kind == "block" else scale.reshape(()), requires_grad=False)
    return fp8.requires_grad_(False), plain


@pytest.mark.parametrize("kind", ["block", "tensor"])
def test_text_is_that_of_the_dequantized_model(kind):
    fp8, plain = pair(kind)
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    want = plain.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    draft = copy.deepcopy(plain)
    with TransformersGenerator(fp8, draft, compile=False) as generator:
        got = generator.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(got, want)
    assert all(type(fp8.get_submodule(name)) is FP8Linear for name in linears(plain))  # transformers' own again


@pytest.mark.parametrize("kind", ["block", "tensor"])
def test_layers_are_read_as_they_are_stored(kind):
    fp8, plain = pair(kind)
    model = TransformersModel(fp8)
    layer = fp8.model.layers[0].mlp.up_proj
    x = torch.randn(4, 256)
    assert torch.equal(layer(x), plain.model.layers[0].mlp.up_proj(x))
    module, _ = capture(lambda x: layer(x), x.bfloat16())
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert texts(result.done) == "skinny_mm: 4 rows, weight 384 x 256 of 8 bits", texts(result.refused)
    assert torch.ops.aten.mm.default not in targets(module)
    assert skinny_mm_op in targets(module)
    model.close()


def rounded_by_hand(layer: nn.Linear, x: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    values = x.float().unflatten(-1, (-1, group))
    steps = values.abs().amax(-1, keepdim=True) / 448 if scale is None else scale
    rows = ((values / steps).clamp(-448, 448).to(torch.float8_e4m3fn).float() * steps).view(x.shape).to(x.dtype)
    return nn.functional.linear(rows, layer.weight.to(x.dtype), layer.bias)


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["block", "tensor"])
def test_rows_are_rounded_where_that_is_asked_for(kind, scheme):
    """As the checkpoint says: in the order of the format's blocks, for whole rows, or by the scale that it has."""
    fp8, plain = pair(kind)
    layer, like = (model.model.layers[0].mlp.up_proj for model in (fp8, plain))
    if scheme == "static":
        for own in linears(fp8).values():
            own.activation_scale = nn.Parameter(torch.tensor(0.01), requires_grad=False)
    assert round_rows(fp8) is fp8
    assert type(layer) is FP8Linear
    model = TransformersModel(fp8)
    x = torch.randn(20, 256)
    group = 128 if kind == "block" and scheme == "dynamic" else 256
    want = rounded_by_hand(like, x, group, None if scheme == "dynamic" else torch.tensor(0.01))
    assert torch.equal(layer(x), want)
    assert not torch.equal(want, like(x))
    module, _ = capture(lambda x: layer(x), x.bfloat16())
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert texts(result.done) == "float8_mm: 20 rows of 8 bits, weight 384 x 256 of 8 bits", texts(result.refused)
    (product,) = (node for node in module.graph.nodes if node.target is float8_mm_op)
    scales = {"dynamic": (20, 256 // group), "static": (1, 1)}[scheme]
    assert tuple(product.args[1].meta["val"].shape) == scales
    model.close()


@torch.no_grad()
def test_text_with_rounded_rows():
    """Plain and speculative text is that of a model that rounds its rows. Where a number rounds the other way, another of two
    tokens that are about as likely may follow."""
    fp8, plain = pair()
    like = copy.deepcopy(plain)
    for name, layer in linears(like).items():
        own, inputs = fp8.get_submodule(name), Inputs("float8", 128, float32_scales=True)
        weight = StoredTensor(own.weight.data, own.weight_scale_inv.data, dtype=torch.float32, inputs=inputs)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    behind = []
    for model, draft in ((copy.deepcopy(fp8), None), (round_rows(copy.deepcopy(fp8)), None), (round_rows(fp8), plain)):
        with TransformersGenerator(model, draft, compile=False) as generator:
            text = generator.generate(ids, **settings)
        logits = like(text).logits[:, ids.shape[1] - 1 : -1]
        chosen = logits.gather(-1, text[:, ids.shape[1] :, None])[..., 0]
        behind.append(float(((logits.amax(-1) - chosen) / logits.std(-1)).max()))
    assert max(behind[1:]) < 0.15 < behind[0], behind


def test_rows_that_cannot_be_rounded_are_named():
    fp8, plain = pair()
    with pytest.raises(ValueError, match=r"round_rows: `model` must have layers of fine-grained fp8, .* got LlamaForCausalLM"):
        round_rows(plain)
    with pytest.raises(TypeError, match=r"round_rows: `model` must be a torch.nn.Module, got str"):
        round_rows("path")
    layer = fp8.model.layers[1].mlp.down_proj
    for change in ({"block_size": (64, 128)}, {"in_features": 192}, {"weight_scale_inv": torch.ones(2, 3, dtype=torch.uint8)}):
        broken = copy.deepcopy(fp8)
        (own := broken.get_submodule("model.layers.1.mlp.down_proj")).weight_scale_inv.requires_grad_(False)
        for name, value in change.items():
            own._parameters.pop(name, None)
            setattr(own, name, value)
        with pytest.raises(ValueError, match=r"round_rows: .* got torch.* columns in model.layers.1.mlp.down_proj"):
            round_rows(broken)
        assert not any(hasattr(module, "spec_ops_inputs") for module in broken.modules())
    assert layer.in_features == 384


def test_formats_that_are_not_known_are_named():
    fp8, _ = pair()
    layer = fp8.model.layers[1].mlp.down_proj
    layer.weight_scale_inv = nn.Parameter(torch.ones(4, 6), requires_grad=False)
    with pytest.raises(ValueError, match=r"got scales \(4, 6\) of a weight \(256, 384\) in model.layers.1.mlp.down_proj"):
        TransformersModel(fp8)
    layer.weight = nn.Parameter(torch.zeros(256, 192, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"got a weight of torch.int8 in model.layers.1.mlp.down_proj"):
        TransformersModel(fp8)
    assert type(fp8.model.layers[0].mlp.up_proj) is FP8Linear


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A checkpoint as DeepSeek and Qwen publish theirs."""
    pytest.importorskip("accelerate", reason="transformers loads fp8 models with accelerate")
    folder = tmp_path_factory.mktemp("fp8")
    model = exact_model()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in linears(model):
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"], _ = stored(tensors[f"{name}.weight"], "block")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(folder: Path, to: Path, tensors=lambda t: None, config=lambda c: None) -> Path:
    state = load_file(folder / "model.safetensors")
    tensors(state)
    to.mkdir(exist_ok=True)
    save_file(state, to / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    config(values["quantization_config"])
    (to / "config.json").write_text(json.dumps(values))
    return to


def test_a_published_checkpoint_is_the_dequantized_model(published):
    target, _ = load_checkpoints(published, None, device="cpu", dtype=torch.float32)
    tensors = load_file(published / "model.safetensors")
    for name, layer in linears(target.decoder).items():
        stored_as = tensors[f"model.{name}.weight"], tensors[f"model.{name}.weight_scale_inv"]
        assert torch.equal(layer.weight, dequantized(*stored_as)), name
    target.close()


SCALE = "model.layers.0.mlp.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (lambda t: t.update({SCALE: torch.ones(3, 5)}), lambda c: None, r"up_proj.weight_scale_inv.* \[3, 2\], got \[3, 5\]"),
        (lambda t: t.pop(SCALE), lambda c: None, "up_proj.weight.* must have scales beside it"),
        (lambda t: None, lambda c: c.update(quant_method="fp7"), "quant_method.* got 'fp7'"),
        (lambda t: None, lambda c: c.update(activation_scheme="sometimes"), "sometimes"),
    ],
)
def test_damaged_and_unknown_checkpoints_are_named(published, tmp_path, tensors, config, message):
    folder = changed(published, tmp_path / "changed", tensors, config)
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoints(folder, None, device="cpu", dtype=torch.float32)
    assert "changed" in str(error.value)


def test_8_bits_in_a_model_that_is_not_quantized(published, tmp_path):
    """Otherwise the numbers would be taken as they are, without their scales."""
    folder = changed(published, tmp_path / "changed")
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="must be of 16 bits in a model that is not quantized, got F8_E4M3"):
        load_checkpoints(folder, None, device="cpu", dtype=torch.float32)
