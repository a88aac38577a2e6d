"""EAGLE-3 checkpoints in the layouts that are published, small and random: what they compute, and what is refused."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from typer.testing import CliRunner

from spec_ops import cli
from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, load_eagle3, speculative_generate
from spec_ops.integrations.transformers.eagle3 import is_eagle3
from spec_ops.models.target import TargetOutput
from tests.decoding.test_generate import full_prefill
from tests.helpers.tiny_transformers import VOCAB, batch, eager_tokens, make_model, tokenizer

DRAFT_VOCAB = 40
HIDDEN, HEADS, KV_HEADS, DIM = 32, 4, 2, 8
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}


def _layer(prefix: str, width: int, norms: tuple[str, ...]) -> dict[str, torch.Tensor]:
    def weight(out: int, size: int) -> torch.Tensor:
        return torch.randn(out, size) * size**-0.5

    return {
        f"{prefix}.self_attn.q_proj.weight": weight(HEADS * DIM, width),
        f"{prefix}.self_attn.k_proj.weight": weight(KV_HEADS * DIM, width),
        f"{prefix}.self_attn.v_proj.weight": weight(KV_HEADS * DIM, width),
        f"{prefix}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * DIM),
        f"{prefix}.mlp.gate_proj.weight": weight(48, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": weight(48, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": weight(HIDDEN, 48),
        **{f"{prefix}.{norm}.weight": 1 + 0.3 * torch.randn(HIDDEN) for norm in norms},
    }


FIRST_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def _common(draft_vocab: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(6)
    return {
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) * (3 * HIDDEN) ** -0.5,
        "norm.weight": 1 + 0.3 * torch.randn(HIDDEN),
        "lm_head.weight": torch.randn(draft_vocab, HIDDEN),
    }


def _reduced() -> dict[str, torch.Tensor]:
    targets = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))[:DRAFT_VOCAB].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[targets] = True
    return {"d2t": targets - torch.arange(DRAFT_VOCAB), "t2d": known}


def write_sglang(folder, layers: int = 1) -> tuple[dict, dict]:
    """As the EAGLE authors and SpecForge publish: `midlayer`, a pickle, layer ids (if any) counted as outputs."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **SIZES,
        "num_hidden_layers": layers,
        "draft_vocab_size": DRAFT_VOCAB,
        "rope_theta": 5000.0,
        "rope_scaling": ROPE,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    weights = {**_common(DRAFT_VOCAB), **_reduced(), **_layer("midlayer", 2 * HIDDEN, FIRST_NORMS)}
    for extra in range(layers - 1):
        weights |= _layer(f"additional_layers.{extra}", HIDDEN, ("hidden_norm", "post_attention_layernorm"))
    folder.mkdir(exist_ok=True)
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return config, weights


def write_speculators(folder, layers: int = 1, **norms: bool) -> tuple[dict, dict]:
    """As vLLM's `speculators` writes: nested sizes, `layers.N`, safetensors, its own embedding, ids counted as inputs."""
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**SIZES, "num_hidden_layers": layers, "rope_theta": 5000.0},
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": HIDDEN,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "norm_before_fc": None,
        **norms,
    }
    weights = {**_common(DRAFT_VOCAB), **_reduced(), **_layer("layers.0", 2 * HIDDEN, FIRST_NORMS)}
    for extra in range(1, layers):
        weights |= _layer(f"layers.{extra}", HIDDEN, ("input_layernorm", "post_attention_layernorm"))
    weights["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    if norms.get("norm_before_fc"):
        weights["input_norm.weight"] = 1 + 0.3 * torch.randn(3 * HIDDEN)
    if norms.get("fc_norm"):
        weights |= {f"fc_norm.{i}.weight": 1 + 0.3 * torch.randn(HIDDEN) for i in range(3)}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return config, weights


def head_reference(
    config: dict, weights: dict, embedded: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the next step reads `[T, hidden]` and logits `[T, draft_vocab]` from `embedded [T, hidden]`, `features [T, 3 *
    hidden]`: the head in plain PyTorch, with transformers' RoPE. Norms around `fc`, and which hidden state goes on: vLLM's
    `Eagle3LlamaForCausalLM` and `speculators`' `Eagle3DraftModel`."""
    nested = {**config.get("transformer_layer_config", {}), **config}
    rope = {**(nested.get("rope_scaling") or {"rope_type": "default"}), "rope_theta": nested["rope_theta"]}
    llama = transformers.LlamaConfig(**SIZES, rope_parameters=rope)
    cos, sin = LlamaRotaryEmbedding(llama)(embedded, torch.arange(len(embedded))[None])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], SIZES["rms_norm_eps"])

    def layer(prefix: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            (x @ weights[f"{prefix}.self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, DIM)).transpose(0, 1)[None] for p in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        hidden = residual + out @ weights[f"{prefix}.self_attn.o_proj.weight"].T
        normed = norm(f"{prefix}.post_attention_layernorm", hidden)
        gate, up, down = (weights[f"{prefix}.mlp.{p}_proj.weight"].T for p in ("gate", "up", "down"))
        return hidden + (F.silu(normed @ gate) * (normed @ up)) @ down

    first = "midlayer" if "midlayer.hidden_norm.weight" in weights else "layers.0"
    if nested.get("norm_before_fc"):
        features = norm("input_norm", features)
    if nested.get("fc_norm"):
        features = torch.cat([norm(f"fc_norm.{i}", features[:, i * HIDDEN : (i + 1) * HIDDEN]) for i in range(3)], 1)
    hidden = features @ weights["fc.weight"].T
    normed = norm(f"{first}.hidden_norm", hidden)
    x = torch.cat([norm(f"{first}.input_layernorm", embedded), normed], -1)
    hidden = layer(first, x, normed if nested.get("norm_before_residual") else hidden)
    for prefix, before in (("additional_layers.0", "hidden_norm"), ("layers.1", "input_layernorm")):
        if f"{prefix}.{before}.weight" in weights:
            hidden = layer(prefix, norm(f"{prefix}.{before}", hidden), hidden)
    out = norm("norm", hidden)
    return out if nested.get("norm_output") else hidden, out @ weights["lm_head.weight"].T


EAGLE31 = {"fc_norm": True, "norm_output": True}
write_eagle31 = partial(write_speculators, **EAGLE31)
write_all_norms = partial(write_speculators, norm_before_fc=True, **EAGLE31)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "write",
    [write_sglang, write_speculators, write_eagle31, write_all_norms],
    ids=["sglang", "speculators", "eagle3.1", "all norms"],
)
def test_a_loaded_head_computes_what_its_engines_compute(tmp_path, write, layers):
    config, weights = write(tmp_path, layers)
    target, draft = load_eagle3(tmp_path, make_model("llama"))
    assert target.config.aux_layers == (1, 2, 3)
    tokens = batch()[0][1]
    torch.manual_seed(8)
    features = torch.randn(9, 3 * HIDDEN)
    embedding = weights.get("embed_tokens.weight", target.embed.weight).detach()
    with torch.no_grad():
        hidden, _ = full_prefill(draft, tokens.tolist(), draft.encode(TargetOutput(features, features)))
        got = hidden, draft.logits(hidden)
    # fp32, another order of sums
    torch.testing.assert_close(got, head_reference(config, weights, embedding[tokens], features), rtol=1e-4, atol=1e-4)
    assert torch.equal(draft.draft_to_target, weights["t2d"].nonzero()[:, 0])


@pytest.mark.parametrize("config", [SpeculationConfig(3), SpeculationConfig(3, 2, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize("write", [write_sglang, write_speculators, write_eagle31], ids=["sglang", "speculators", "eagle3.1"])
def test_loaded_heads_draft_for_their_target(tmp_path, write, config):
    write(tmp_path, 2)
    ids, mask = batch()
    target, draft = load_eagle3(tmp_path, make_model("llama"))
    generator = TransformersGenerator(target, draft, config, max_batch_size=3, max_seq_len=40)
    result = generator.generate(ids, mask, max_new_tokens=20, eos_token_id=(), return_dict_in_generate=True)
    assert result.tokens == eager_tokens("llama")


def test_a_head_that_knows_the_answer_is_believed(tmp_path):
    """Features, norm and reduced vocabulary end up in the right place: target and head have silent layers, so that the target
    repeats its last token, and the head predicts the same from the last layer's output."""

    def silence(weights) -> None:
        for name, weight in weights.items():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()

    model, (_, weights) = make_model("llama"), write_sglang(tmp_path)
    with torch.no_grad():
        silence(dict(model.named_parameters()))
        rows = F.normalize(model.model.embed_tokens.weight, dim=1)
        model.model.embed_tokens.weight.copy_(rows)
        model.lm_head.weight.copy_(rows)
    silence(weights)
    targets = weights["t2d"].nonzero()[:, 0]
    weights["fc.weight"] = F.pad(torch.eye(HIDDEN), (2 * HIDDEN, 0))
    weights["norm.weight"] = torch.ones(HIDDEN)
    weights["lm_head.weight"] = rows.detach()[targets]
    torch.save(weights, tmp_path / "pytorch_model.bin")
    ids = batch()[0][1:2]
    for repeated, accepted in ((int(targets[5]), 4), (int((~weights["t2d"]).nonzero()[9]), 1)):  # known to the head, and not
        ids[0, -1] = repeated
        target, draft = load_eagle3(tmp_path, model)
        result = speculative_generate(target, draft, ids, max_new_tokens=13, eos_token_id=(), return_dict_in_generate=True)
        assert result.tokens == [[repeated] * 13]
        assert result.stats.accept_length == accepted


def test_a_head_over_the_whole_vocabulary_shares_embedding_and_lm_head(tmp_path):
    config, weights = write_sglang(tmp_path)
    config["draft_vocab_size"] = None
    for name in ("d2t", "t2d", "lm_head.weight"):
        del weights[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(weights, tmp_path / "pytorch_model.bin")
    target, draft = load_eagle3(tmp_path, make_model("llama"))
    assert draft.draft_to_target is None
    assert draft.lm_head is target.lm_head
    assert draft.embed is target.embed
    ids, mask = batch()
    out = speculative_generate(target, draft, ids, mask, max_new_tokens=20, eos_token_id=())
    assert out[:, 9:].tolist() == eager_tokens("llama")


def test_default_layers_are_the_papers(tmp_path):
    """2, n // 2, n - 3 of a deeper target."""
    config, _ = write_sglang(tmp_path)
    del config["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    deep = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 12})
    target, _ = load_eagle3(tmp_path, transformers.LlamaForCausalLM(deep))
    assert target.config.aux_layers == (2, 6, 9)


def test_command_line_with_an_eagle3_head(tmp_path):
    write_speculators(tmp_path / "head")
    make_model("llama").save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    models = ["--model", str(tmp_path / "target"), "--draft", str(tmp_path / "head")]
    options = ["--prompt", "the thing", "--max-new-tokens", "12", "--device", "cpu", "--compare"]
    result = CliRunner().invoke(cli.app, ["generate", *models, *options])
    assert result.exit_code == 0, result.output
    assert "texts are equal" in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "`hidden_size` must be 32 .*, got 64"),
        ({"target_hidden_size": 48}, "`target_hidden_size` must be 32"),
        ({"attention_bias": True}, "`attention_bias` must be False"),
        ({"hidden_act": "gelu"}, "`hidden_act` must be 'silu'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "`use_aux_hidden_state` must be True"),
        ({"speculators_model_type": "dflash"}, "`speculators_model_type` must be 'eagle3' .*, got 'dflash'"),
        ({"fc_norm": "yes"}, "`fc_norm` must be true or false, got 'yes'"),
        ({"fc_norm": True}, "missing tensors .*fc_norm.0.weight"),
        ({"eagle_config": {"norm_before_fc": True}}, "missing tensors .*input_norm.weight"),
        ({"target_vocab_size": 5}, f"`target_vocab_size` must be {VOCAB}"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "`rope_scaling.rope_type` must be .*, got 'yarn'"),
        ({"draft_vocab_size": 41}, r"`d2t` must be of shape \[41\], got \[40\]"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
            r"`eagle_config.eagle_aux_hidden_state_layer_ids` must lie in \[-1, 3\)",
        ),
        ({"num_hidden_layers": 2}, "missing tensors .*layers.0.attention"),
        ({"head_dim": 16}, r"`midlayer\.self_attn\.\w+\.weight` must be of shape \[.*\], got \["),
    ],
)
def test_configurations_that_do_not_fit_are_named(tmp_path, change, message):
    config, _ = write_sglang(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        load_eagle3(tmp_path, make_model("llama"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("d2t"), f"`d2t` is missing, but the head knows 40 of {VOCAB} tokens"),
        (lambda w: w["d2t"].fill_(VOCAB), r"`d2t` plus the draft's ids must hold ids in \[0, "),
        (lambda w: w["t2d"].logical_not_(), "`t2d` disagrees with `d2t`"),
        (lambda w: w.pop("fc.weight"), "holds no EAGLE-3 head: `fc.weight`, .*loaded with transformers and passed as `draft`"),
        (
            lambda w: w.update({"embed_tokens.weight": torch.zeros(30, 32)}),
            rf"`embed_tokens.weight` must be \[{VOCAB}, 32\], the target's vocabulary and hidden size, got \[30, 32\]",
        ),
        (lambda w: w.update({"embed_tokens.weight": torch.zeros(VOCAB)}), r"`embed_tokens.weight` must be .*, got \["),
        (
            lambda w: w.update({"midlayer.self_attn.q_proj.bias": torch.zeros(32)}),
            "unknown tensors .*midlayer.self_attn.q_proj.bias",
        ),
    ],
    ids=["no d2t", "bad d2t", "bad t2d", "missing", "few embeddings", "flat embeddings", "unknown"],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, message):
    _, weights = write_sglang(tmp_path)
    change(weights)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        load_eagle3(tmp_path, make_model("llama"))


def test_heads_are_recognized_by_architecture_or_format(tmp_path):
    for values, found in (
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"architectures": ["Speculator"], "speculators_model_type": "eagle3"}, True),
        ({"architectures": ["LlamaForCausalLM"]}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert is_eagle3(tmp_path) is found


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_eagle3(tmp_path, make_model("llama"))
    write_sglang(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors, pytorch_model\.bin"):
        load_eagle3(tmp_path, make_model("llama"))
