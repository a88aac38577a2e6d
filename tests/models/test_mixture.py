"""Mixture layers: those of transformers' models, configurations, and speculation that changes no token."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from spec_ops.decoding import SpeculationConfig, generate
from spec_ops.models import CausalLM, MixtureConfig, ModelConfig, MTPDraft
from spec_ops.models.layers import MLP, Mixture
from tests.decoding.test_generate import PROMPTS, model_config

EXPERTS, HIDDEN, INNER = 8, 64, 24
GROUPED = {"scoring": "sigmoid", "correction_bias": True, "groups": 4, "top_groups": 2, "scale": 2.5}
OSS = {"biases": True, "limit": 7.0, "alpha": 1.702, "beta": 1.0}


def mixture(**fields) -> MixtureConfig:
    return MixtureConfig(num_experts=EXPERTS, experts_per_token=3, intermediate_size=INNER, **fields)


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    for value in (*module.parameters(), *module.buffers()):
        value.data.copy_(torch.randn(value.shape, generator=generator) * (value.shape[-1] ** -0.5 if value.dim() > 1 else 0.3))
    return module.requires_grad_(False)


def block_of(name: str) -> tuple[torch.nn.Module, dict]:
    """A block of transformers, and the fields of a mixture that is the same."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": 3, "vocab_size": 8, "hidden_act": "silu"}
    if name == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        return MixtralSparseMoeBlock(
            transformers.MixtralConfig(**sizes, intermediate_size=INNER, num_local_experts=EXPERTS)
        ), {}
    if name == "gpt_oss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

        return GptOssMLP(transformers.GptOssConfig(**sizes, intermediate_size=INNER, num_local_experts=EXPERTS)), OSS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = transformers.DeepseekV3Config(
        **sizes, moe_intermediate_size=INNER, n_routed_experts=EXPERTS, n_group=4, topk_group=2, routed_scaling_factor=2.5,
        n_shared_experts=2,
    )  # fmt: skip
    return DeepseekV3MoE(config), {**GROUPED, "shared_intermediate_size": 2 * INNER}


def with_weights_of(block: torch.nn.Module, ours: Mixture) -> Mixture:
    """Our layer with the weights of a block of transformers."""
    theirs = dict(block.named_parameters()) | dict(block.named_buffers())
    router = "router" if "router.weight" in theirs else "gate"
    state = {"router.weight": theirs[f"{router}.weight"]}
    for name in ("gate_up_proj", "down_proj"):
        weight = theirs[f"experts.{name}"]
        if router == "router":  # gpt-oss: transposed, and gates beside up projections
            weight = weight.transpose(1, 2)
            bias = theirs[f"experts.{name}_bias"]
            if name == "gate_up_proj":
                weight, bias = (torch.cat([w[:, ::2], w[:, 1::2]], 1) for w in (weight, bias))
            state[f"{name.removesuffix('_proj')}_bias"] = bias
        state[name] = weight
    if "router.bias" in theirs:
        state["router.bias"] = theirs["router.bias"]
    if ours.correction_bias is not None:
        state["correction_bias"] = theirs["gate.e_score_correction_bias"]
    state |= {n.replace("shared_experts", "shared"): w for n, w in theirs.items() if n.startswith("shared_experts")}
    ours.load_state_dict(state)
    return ours


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_blocks_of_transformers(name):
    block, fields = block_of(name)
    filled(block)
    ours = with_weights_of(block, Mixture(model_config(False), mixture(**fields)))
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    wanted = block(x)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    torch.testing.assert_close(ours(x), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(x[0]), wanted[0], rtol=1e-5, atol=1e-5)  # of a ragged extend


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_speculation_gives_the_tokens_of_plain_decoding(mla):
    """A draft layer that is a mixture too, and a target whose first layer is not."""
    torch.manual_seed(3)
    fields = {**GROUPED, "shared_intermediate_size": 16} if mla else OSS
    target = CausalLM(model_config(mla, mixture=mixture(first_dense=1, **fields)))
    assert [type(layer.mlp) for layer in target.layers] == [MLP, Mixture, Mixture]
    draft = MTPDraft(model_config(mla, 1, mixture=mixture(**fields)), target)
    assert any(isinstance(module, Mixture) for module in draft.modules())
    options = {"max_new_tokens": 12, "compile": False}
    plain = generate(target, None, PROMPTS[:3], **options)
    fast = generate(target, draft, PROMPTS[:3], SpeculationConfig(3), **options)
    assert fast.tokens == plain.tokens


def test_configurations_survive_json():
    config = model_config(False, mixture=mixture(first_dense=1, **OSS))
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert [config.is_mixture(layer) for layer in range(3)] == [False, True, True]
    assert not model_config(False).is_mixture(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "`num_experts` must be an integer of at least 1, got 0"),
        ({"num_experts": 2048}, "`num_experts` must be at most 1024, got 2048"),
        ({"experts_per_token": 9}, "`experts_per_token` must be at most 8, got 9"),
        ({"groups": 4, "top_groups": 1}, "`experts_per_token` must be at most 2, got 3"),
        ({"groups": 3}, "`groups` must divide `num_experts` 8, got 3"),
        ({"groups": 8, "top_groups": 8, "correction_bias": True}, "`groups` must have two experts each"),
        ({"top_groups": 2}, "`top_groups` must be at most `groups` 1, got 2"),
        ({"scoring": "relu"}, "`scoring` must be 'softmax' or 'sigmoid', got 'relu'"),
        ({"limit": 0.0}, "`limit` must be a positive number, got 0.0"),
        ({"beta": -1.0}, "`beta` must be a positive number, got -1.0"),
        ({"biases": 1}, "`biases` must be true or false, got 1"),
        ({"width": 3}, "`width` is unknown"),
    ],
)
def test_wrong_fields_are_named(changes, message):
    values = model_config(False).to_dict() | {"mixture": {**asdict(mixture()), **changes}}
    with pytest.raises(ValueError, match=f"^MixtureConfig: {message}"):
        ModelConfig.from_dict(values)


def test_a_mixture_of_another_type_is_named():
    with pytest.raises(ValueError, match=r"^ModelConfig: `mixture` must be a MixtureConfig, got 3"):
        model_config(False, mixture=3)
