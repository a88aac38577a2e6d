"""Experts of 8 and 4 bits: fine-grained fp8 as transformers has it on a GPU, and gpt-oss in MXFP4 as it is published."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear

from spec_ops.backends.expert_format import dequantized_expert, expert_format
from spec_ops.backends.weight_format import dequantized
from spec_ops.integrations.transformers import TransformersGenerator, experts, read_mxfp4_as_stored
from spec_ops.integrations.transformers.loading import load_checkpoints
from spec_ops.integrations.transformers.mxfp4 import StoredMxfp4Experts
from spec_ops.models import CheckpointError
from tests.helpers.mixtures import stored_stack
from tests.helpers.stored_weights import stored
from tests.helpers.tiny_transformers import VOCAB

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
}
NEW = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def filled(config: transformers.PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def whole(stack: torch.Tensor, scale: torch.Tensor, parts: int) -> torch.Tensor:
    kind = expert_format("test", "stack", stack, scale, parts)
    return torch.stack([dequantized_expert(*expert, kind) for expert in zip(stack, scale, strict=True)])


class Calls(TorchDispatchMode):
    """Counts calls of `moe_experts` on weights of 8 or 4 bits."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.spec_ops.moe_experts.default and args[3].element_size() == 1
        return func(*args, **(kwargs or {}))


def fp8_pair(block: bool = True) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A mixture in 8 bits, and the same one dequantized."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 192, "intermediate_size": 128}
    plain = filled(transformers.Qwen3MoeConfig(**COMMON, **sizes))
    fp8 = copy.deepcopy(plain)
    config = FineGrainedFP8Config(weight_block_size=(128, 128) if block else None)
    replace_with_fp8_linear(fp8, ["lm_head"], config, pre_quantized=True)
    for name, module in list(plain.named_modules()):
        own = fp8.get_submodule(name)
        if isinstance(own, FP8Experts):
            for part, parts in (("gate_up_proj", 2), ("down_proj", 1)):
                data, scale = stored_stack(getattr(module, part), "block" if block else "expert", parts)
                getattr(module, part).copy_(whole(data, scale, parts))
                setattr(own, part, nn.Parameter(data, requires_grad=False))
                setattr(own, f"{part}_scale_inv", nn.Parameter(scale, requires_grad=False))
        elif isinstance(module, nn.Linear) and name != "lm_head":
            weight, scale, _ = stored(module.weight, "block" if block else "tensor")
            module.weight.copy_(dequantized(weight, scale))
            own.weight = nn.Parameter(weight, requires_grad=False)
            own.weight_scale_inv = nn.Parameter(scale if block else scale.reshape(()), requires_grad=False)
    return fp8.requires_grad_(False), plain


@pytest.mark.parametrize("block", [True, False])
def test_text_of_an_fp8_mixture_is_that_of_the_dequantized_one(block):
    fp8, plain = fp8_pair(block)
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    want = plain.generate(ids, **NEW)
    own = fp8.config._experts_implementation
    with TransformersGenerator(fp8, copy.deepcopy(plain), compile=False) as generator, Calls() as calls:
        got = generator.generate(ids, **NEW)
    assert torch.equal(got, want)
    assert calls.count > 4
    assert fp8.config._experts_implementation == own != "spec_ops"


def test_fp4_experts_of_such_a_checkpoint():
    """DeepSeek-V4's: e2m1 two in an int8, scales e8m0."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 64, "intermediate_size": 128}
    module = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts(transformers.Qwen3MoeConfig(**COMMON, **sizes))
    model = nn.Module()
    model.mlp, model.config = nn.Module(), module.config
    model.mlp.experts = module
    for part in (module.gate_up_proj, module.down_proj):
        nn.init.normal_(part, std=0.1)
    config = FineGrainedFP8Config(weight_block_size=(128, 128), scale_fmt="ue8m0")
    config.expert_dtype = "fp4"
    replace_with_fp8_linear(model, [], config, pre_quantized=True)
    own = model.mlp.experts
    for part in ("gate_up_proj", "down_proj"):
        data, scale = stored_stack(getattr(module, part).data, "MXFP4")
        getattr(module, part).data.copy_(whole(data, scale, 1))
        setattr(own, part, nn.Parameter(data.view(torch.int8), requires_grad=False))
        setattr(own, f"{part}_scale_inv", nn.Parameter(scale.view(torch.float8_e8m0fnu), requires_grad=False))
    assert type(own) is FP8Experts
    call = torch.randn(5, 128), torch.randint(4, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        assert torch.equal(experts.experts_forward(own, *call), experts.experts_forward(module, *call))


def test_unknown_formats_are_named():
    fp8, _ = fp8_pair()
    module = fp8.model.layers[1].mlp.experts
    module.down_proj_scale_inv = nn.Parameter(torch.ones(4, 5, 2))
    with pytest.raises(ValueError, match=r"FP8Experts: `down_proj_scale` must be .*, got shape \(4, 5, 2\)"):
        experts.form_of(module)
    module.down_proj_scale_inv = None
    with pytest.raises(ValueError, match=r"FP8Experts must have scales `down_proj_scale_inv` .*, got NoneType"):
        experts.form_of(module)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """gpt-oss's files: blocks and scales, interleaved rows, biases."""
    sizes = {"num_local_experts": 4, "intermediate_size": 96, "sliding_window": 16}
    model = filled(transformers.GptOssConfig(**COMMON, **sizes, tie_word_embeddings=False)).bfloat16()
    folder = tmp_path_factory.mktemp("mxfp4")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        data, scale = stored_stack(tensors.pop(name).transpose(1, 2), "MXFP4")
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = data.unflatten(2, (-1, 16)), scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_as_stored(folder: Path, **options) -> PreTrainedModel:
    config = read_mxfp4_as_stored(AutoConfig.from_pretrained(folder))
    return AutoModelForCausalLM.from_pretrained(folder, config=config, **options)


def test_mxfp4_is_read_as_published(published):
    """Every parameter is a tensor of the file; text is that of transformers' dequantized model, with and without a draft."""
    model = load_as_stored(published, dtype=torch.float32)
    tensors = load_file(published / "model.safetensors")
    layers = [module for module in model.modules() if isinstance(module, StoredMxfp4Experts)]
    assert len(layers) == 2
    for name in ("gate_up_proj_blocks", "down_proj_scales", "down_proj_bias"):
        assert torch.equal(getattr(layers[1], name), tensors[f"model.layers.1.mlp.experts.{name}"].to(getattr(layers[1], name)))
    plain = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    want = plain.generate(ids, **NEW)
    assert torch.equal(model.generate(ids, **NEW), want)
    for draft in (None, plain):
        with TransformersGenerator(model, draft, compile=False) as generator, Calls() as calls:
            assert torch.equal(generator.generate(ids, **NEW), want)
        assert calls.count > 4


def test_a_model_as_stored_can_be_saved(published, tmp_path):
    load_as_stored(published, dtype=torch.bfloat16).save_pretrained(tmp_path)
    saved, tensors = load_file(tmp_path / "model.safetensors"), load_file(published / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensors[name]) for name in saved)


def test_the_command_line_takes_a_checkpoint_in_mxfp4(published):
    target, _ = load_checkpoints(published, None, device="cpu", dtype=torch.float32)
    name = "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(published / "model.safetensors")
    want = whole(tensors[f"{name}_blocks"].flatten(2), tensors[f"{name}_scales"], 1).transpose(1, 2)
    assert torch.equal(target.decoder.layers[1].mlp.experts.down_proj, want)
    target.close()


@pytest.mark.parametrize("name", ["gate_up_proj_scales", "down_proj_blocks"])
def test_damaged_checkpoints_in_mxfp4_are_named(published, tmp_path, name):
    tensors = load_file(published / "model.safetensors")
    full = f"model.layers.0.mlp.experts.{name}"
    for damage, message in ((lambda t: t[:, :-2].contiguous(), "must be of shape"), (lambda t: None, "beside it")):
        changed = {**tensors, full: damage(tensors[full])}
        save_file(
            {n: t for n, t in changed.items() if t is not None}, tmp_path / "model.safetensors", metadata={"format": "pt"}
        )
        (tmp_path / "config.json").write_text((published / "config.json").read_text())
        with pytest.raises(CheckpointError, match=message) as error:
            load_checkpoints(tmp_path, None, device="cpu", dtype=torch.float32)
        assert name.rpartition("_")[0] in str(error.value)


def test_other_methods_are_not_mxfp4():
    for config in (None, {"quant_method": "fp8"}):
        made = transformers.GptOssConfig(**COMMON, quantization_config=config)
        with pytest.raises(ValueError, match="read_mxfp4_as_stored: `config` must have the quantization method 'mxfp4', got"):
            read_mxfp4_as_stored(made)
