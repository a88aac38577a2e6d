"""Random small transformers models: family, sizes, window, rotation and weights all from one seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

Sizes = dict[str, Any]


def _gqa(sizes: Sizes) -> Sizes:
    return {name: value for name, value in sizes.items() if name != "window"}


def _heads_fill_hidden(sizes: Sizes) -> Sizes:
    return {name: value for name, value in _gqa(sizes).items() if name != "head_dim"}


def _mixed(sizes: Sizes) -> Sizes:
    """Every other layer with a window."""
    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(sizes["num_hidden_layers"])]
    return {**_gqa(sizes), "sliding_window": sizes["window"], "layer_types": kinds}


def _latent(sizes: Sizes) -> Sizes:
    return {
        **_heads_fill_hidden(sizes),
        "num_key_value_heads": sizes["num_attention_heads"],
        **{"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
    }


FAMILIES: dict[str, Callable[[Sizes], Any]] = {
    "llama": lambda s: transformers.LlamaConfig(**_gqa(s), attention_bias=True),
    "qwen2": lambda s: transformers.Qwen2Config(**_heads_fill_hidden(s)),
    "qwen3": lambda s: transformers.Qwen3Config(**_gqa(s)),
    "mistral": lambda s: transformers.MistralConfig(**_gqa(s), sliding_window=s["window"]),
    "gemma2": lambda s: transformers.Gemma2Config(**_mixed(s), query_pre_attn_scalar=16, attn_logit_softcapping=3.0),
    "gemma3_text": lambda s: transformers.Gemma3TextConfig(**_mixed(s), query_pre_attn_scalar=16),
    "gpt_neox": lambda s: transformers.GPTNeoXConfig(**_heads_fill_hidden(s), rotary_pct=0.5),
    "gpt_oss": lambda s: transformers.GptOssConfig(
        **_mixed(s), num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "olmo2": lambda s: transformers.Olmo2Config(**_heads_fill_hidden(s)),
    "starcoder2": lambda s: transformers.Starcoder2Config(**_heads_fill_hidden(s), sliding_window=s["window"]),
    "stablelm": lambda s: transformers.StableLmConfig(**_heads_fill_hidden(s), partial_rotary_factor=0.5),
    "granite": lambda s: transformers.GraniteConfig(**_heads_fill_hidden(s), logits_scaling=2.0, residual_multiplier=0.7),
    "cohere": lambda s: transformers.CohereConfig(**_heads_fill_hidden(s), logit_scale=1.0),
    "deepseek_v3": lambda s: transformers.DeepseekV3Config(**_latent(s)),
}
_BRANCH_ENDS = ("o_proj.weight", "down_proj", "attention.dense.weight", "dense_4h_to_h.weight", "c_proj.weight")


class RandomModel:
    """`rng` chooses all. `copy(attention, layers)` gives a model with the first `layers` layers."""

    def __init__(self, rng: random.Random, family: str, vocab: int) -> None:
        heads = rng.choice([2, 4, 6])
        self.family, self.vocab = family, vocab
        sizes = {
            "vocab_size": vocab,
            "hidden_size": heads * rng.choice([8, 16]),
            "intermediate_size": rng.choice([24, 48]),
            "num_hidden_layers": rng.randint(1, 3),
            "num_attention_heads": heads,
            "num_key_value_heads": rng.choice([n for n in (1, 2, 3, 6) if heads % n == 0]),
            "head_dim": rng.choice([8, 16, 24]),
            "max_position_embeddings": 64,
            "window": rng.randint(2, 12),
            "tie_word_embeddings": False,  # tied and random, a model repeats its input
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        }
        self.config = FAMILIES[family](sizes)
        self.layers = sizes["num_hidden_layers"]
        self.eager = AutoModelForCausalLM.from_config(self.config, attn_implementation="eager").eval()
        _fill(self.eager, rng.randrange(2**31))

    def copy(self, attention: str = "spec_ops", layers: int | None = None) -> PreTrainedModel:
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = layers or self.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        weights = self.eager.state_dict()
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        return model


@torch.no_grad()
def _fill(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that tokens depend on the text, small in later layers, so that a cut model often agrees."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
        elif "sinks" in name or "bias" in name:
            parameter.normal_(std=0.3, generator=generator)
        if "layers." in name and "layers.0." not in name and any(part in name for part in _BRANCH_ENDS):
            parameter *= 0.3
