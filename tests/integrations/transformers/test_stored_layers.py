"""Quantized checkpoints through transformers: GPTQ, AWQ and compressed-tensors read as they are stored, and torchao's."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from spec_ops.backends.weight_format import dequantized
from spec_ops.integrations.transformers import TransformersGenerator, read_as_stored
from spec_ops.integrations.transformers.loading import load_checkpoints
from spec_ops.integrations.transformers.torchao_int4 import has_kernels
from spec_ops.models import CheckpointError
from spec_ops.models.stored_tensor import StoredTensor
from tests.helpers.layouts import LAYOUTS, rounding
from tests.helpers.stored_weights import stored
from tests.integrations.transformers.test_fp8 import exact_model, linears

GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1))


def saved(folder: Path, kind: str) -> PreTrainedModel:
    """A checkpoint in the layout `kind`; returns the model that it means."""
    model = exact_model()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for name, layer in linears(model).items():
        parts, values, exact = LAYOUTS[kind](tensors.pop(f"{name}.weight"))
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        layer.weight.copy_(exact)
        if (rounded := rounding(values)) is not None:
            layer.register_forward_pre_hook(lambda _, args, rounded=rounded: (rounded(args[0]),))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": values}))
    return model


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def load(folder: Path) -> PreTrainedModel:
    config = read_as_stored(AutoConfig.from_pretrained(folder))
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_checkpoint_is_the_dequantized_model(tmp_path, kind):
    plain = saved(tmp_path, kind)
    model = load(tmp_path)
    for name, layer in linears(plain).items():
        own = model.get_submodule(name)
        assert type(own) is nn.Linear
        assert type(own.weight.data) is StoredTensor
        torch.testing.assert_close(own.weight.dequantize(), layer.weight, rtol=2**-22, atol=0)
    assert type(model.lm_head.weight.data) is torch.Tensor
    logits = [m(IDS).logits for m in (model, plain)]
    # A row near the middle of two numbers of 8 bits may be rounded to either.
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4 if rounding(config_of(tmp_path)) is None else 0.02)


# With compressed-tensors 0.20, transformers 5.23 has a parameter of another shape for packed zero points, and raises.
# And 4-bit floats have a test of their own.
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind in LAYOUTS if not kind.startswith(("gptq", "awq")) and "zero" not in kind and "fp4" not in kind]
)
def test_logits_are_those_of_compressed_tensors(tmp_path, kind):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    saved(tmp_path, kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with pytest.raises(ValueError, match=r"must not be compressed by compressed-tensors.*`read_as_stored\(config\)`"):
        TransformersGenerator(theirs, exact_model())
    want = theirs(IDS).logits
    torch.testing.assert_close(load(tmp_path)(IDS).logits, want, rtol=1e-5, atol=1e-5)
    if rounding(config_of(tmp_path)) is None:  # else differences in the last place may become those of 8 bits
        text = theirs.generate(IDS, **GREEDY)
        with TransformersGenerator(theirs, exact_model(), compile=False) as generator:  # decompressed by now
            assert torch.equal(generator.generate(IDS, **GREEDY), text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_compressed_tensors_loads_the_same_4_bit_floats(tmp_path, kind):
    """It makes the weights bfloat16."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    saved(tmp_path, kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    want = theirs(IDS).logits.float()
    assert (load(tmp_path)(IDS).logits - want).abs().max() < 0.02 * want.abs().max()


def test_a_damaged_weight_of_4_bit_floats_is_named(tmp_path):
    saved(tmp_path, "nvfp4")
    state = load_file(tmp_path / "model.safetensors")
    state.pop(f"{Q}.weight_global_scale")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj: `weight_global_scale` must be one positive number, got None"):
        load_checkpoints(tmp_path, None, device="cpu", dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq in the order of activations", "awq", "packed", "float8", "int8", "nvfp4"])
def test_speculation_gives_the_models_own_text(tmp_path, kind):
    draft = saved(tmp_path, kind)
    model = load(tmp_path)
    want = model.generate(IDS, **GREEDY)
    with TransformersGenerator(model, draft, compile=False) as generator:
        assert torch.equal(generator.generate(IDS, **GREEDY), want)
    assert torch.equal(model.generate(IDS, **GREEDY), want)


def test_the_command_lines_loader_reads_as_stored(tmp_path):
    saved(tmp_path, "awq")
    target, _ = load_checkpoints(tmp_path, None, device="cpu", dtype=torch.bfloat16)
    layers = [module for module in target.decoder.modules() if isinstance(module, nn.Linear)]
    assert layers
    assert all(type(layer.weight.data) is StoredTensor and layer.weight.dtype == torch.bfloat16 for layer in layers)
    # float16, or float32 beside zero points: scales are not rounded to the model's dtype.
    assert {layer.weight.scale.dtype for layer in layers} == {torch.float32}
    target.close()


Q = "model.layers.0.mlp.up_proj"


def reshaped(tensors: dict) -> None:
    tensors[f"{Q}.scales"] = tensors[f"{Q}.scales"][:2].clone()


def misnamed(tensors: dict) -> None:
    tensors["model.layers.0.mlp.other.qweight"] = tensors.pop(f"{Q}.qweight")


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (reshaped, {}, r"model.layers.0.mlp.up_proj: `qzeros` must be \[2, 48\], got \[4, 48\]"),
        (lambda t: t.pop(f"{Q}.qzeros"), {}, r"model.layers.0.mlp.up_proj: `qzeros` must be \[4, 48\], got None"),
        (misnamed, {}, "model.layers.0.mlp.other must be a linear layer of LlamaForCausalLM"),
        (lambda t: t.pop(f"{Q}.qweight"), {}, "must hold every tensor of LlamaForCausalLM.*up_proj.weight"),
        (lambda t: None, {"bits": 3}, r"quantization_config: `bits` must be one of \[4, 8\], got 3"),
        (lambda t: None, {"checkpoint_format": "marlin"}, "`checkpoint_format` must be .* got 'marlin'"),
        (lambda t: None, {"quant_method": "squeeze"}, "must be a method of transformers, got 'squeeze'"),
        (lambda t: None, {"quant_method": "aqlm"}, "aqlm"),
    ],
)
def test_damaged_and_unknown_checkpoints_are_named(tmp_path, tensors, config, message):
    saved(tmp_path, "gptq")
    state = load_file(tmp_path / "model.safetensors")
    tensors(state)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] |= config
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoints(tmp_path, None, device="cpu", dtype=torch.float32)


def test_other_methods_are_refused(tmp_path):
    model = exact_model()
    with pytest.raises(ValueError, match=r"read_as_stored: quantization_config: `quant_method` must be .* got None"):
        read_as_stored(model.config)
    config = copy.deepcopy(model.config)
    config.quantization_config = {"quant_method": "awq", "bits": 4, "version": "gemv"}
    with pytest.raises(ValueError, match="read_as_stored: quantization_config: `version` must be gemm, got 'gemv'"):
        read_as_stored(config)


def int4_checkpoint(folder: Path, torchao, **options) -> PreTrainedModel:
    """A checkpoint that `Int4WeightOnlyConfig` makes on a GPU; returns the model that it means."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    model = exact_model()
    config = TorchAoConfig(torchao.Int4WeightOnlyConfig(group_size=128)).to_dict()
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name, layer in linears(model).items():
        data, scale, zero = stored(layer.weight, "int4-128")
        layer.weight.copy_(dequantized(data, scale, zero))
        parts = data.view(torch.int8), scale.t().contiguous(), zero.t().contiguous()
        state[f"{name}.weight"] = torchao.Int4Tensor(*parts, [1, 128], layer.weight.shape, **options)
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **metadata})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return model


def test_torchaos_int4_without_its_kernels(tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    if has_kernels():
        pytest.skip("mslk is installed")
    plain = int4_checkpoint(tmp_path, torchao)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    weights = {name: layer.weight for name, layer in linears(model).items()}
    assert all(isinstance(weight.data, torchao.Int4Tensor) for weight in weights.values())
    want = plain.generate(IDS, **GREEDY)
    with TransformersGenerator(model, plain, compile=False) as generator:
        assert torch.equal(generator.generate(IDS, **GREEDY), want)
        assert all(type(layer.weight.data) is StoredTensor for layer in linears(model).values())
        layer = model.model.layers[0].mlp.up_proj
        assert layer.weight.data_.data_ptr() == weights["model.layers.0.mlp.up_proj"].qdata.data_ptr()  # no copy
    assert all(layer.weight is weights[name] for name, layer in linears(model).items())


def test_torchaos_int4_for_rows_of_8_bits_is_named(tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    if has_kernels():
        pytest.skip("mslk is installed")
    int4_checkpoint(tmp_path, torchao, activation_dtype=torch.float8_e4m3fn)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"`target` must have int4 weights for bfloat16 rows .*float8_e4m3fn rows in mod"):
        TransformersGenerator(model, exact_model())
    assert isinstance(model.model.layers[0].mlp.up_proj.weight.data, torchao.Int4Tensor)


@pytest.mark.parametrize(
    ("name", "parts", "needs"),
    [
        ("Int4TilePackedTo4dTensor", lambda n, k, s: (torch.zeros(n // 8, k // 64, 32, 2), s, [1, 128], (n, k)), "needs cuda;"),
        ("Int4PreshuffledTensor", lambda n, k, s: (torch.zeros(n, k // 2), s, [1, 128], (n, k)), "needs cuda and mslk;"),
        ("Int4PlainInt32Tensor", lambda n, k, s: (torch.zeros(n, k // 8), s, s, [1, 128], (n, k)), "needs xpu or npu;"),
    ],
)
def test_torchaos_int4_for_other_kernels_is_named(name, parts, needs):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = exact_model()
    layer = model.model.layers[1].mlp.up_proj
    kind, (n, k) = getattr(torchao, name), layer.weight.shape
    layer.weight = nn.Parameter(kind(*parts(n, k, torch.zeros(k // 128, n))), requires_grad=False)
    with pytest.raises(
        ValueError, match=rf"`target` must have int4 .* on cpu: model.layers.1.mlp.up_proj has an {name}, .*{needs}"
    ):
        TransformersGenerator(model, exact_model())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "NVFP4WeightOnlyConfig"])
def test_torchaos_checkpoints(tmp_path, name):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    exact_model().save_pretrained(tmp_path / "exact")
    if name.startswith("NVFP4"):
        torchao = pytest.importorskip("torchao.prototype.mx_formats", reason="torchao has no NVFP4")
        config = TorchAoConfig(torchao.NVFP4WeightOnlyConfig())
        torchao = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    else:
        config = TorchAoConfig(getattr(torchao, name)(set_inductor_config=False))
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", quantization_config=config, dtype=torch.float32)
    made.save_pretrained(tmp_path / "quantized")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float32).eval()
    kind = getattr(torchao, name.removesuffix("WeightOnlyConfig") + "Tensor")
    assert all(isinstance(layer.weight.data, kind) for layer in linears(model).values())
    want = model.generate(IDS, **GREEDY)
    with TransformersGenerator(model, exact_model(), compile=False) as generator:
        assert torch.equal(generator.generate(IDS, **GREEDY), want)
    target, _ = load_checkpoints(tmp_path / "quantized", None, device="cpu", dtype=torch.float32)
    assert any(isinstance(getattr(m, "weight", None), kind) for m in target.decoder.modules())
    target.close()
