"""Folders that a serving engine loads with dummy weights: `config.json` of a model's shape, and of its draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.round.shapes import SHAPES, Shape
from spec_ops.models import ModelConfig

LENGTH = 131072  # that models claim to be trained for; an engine refuses longer contexts
MODELS = ("llama-8b", "qwen3-8b", "mistral-7b", "mla-stack", "qwen3-30b-a3b")  # whose layers engines have as they are


def write_shape(name: str, folder: Path, layers: int | None = None) -> tuple[Path, Path | None]:
    """`config.json` of a shape of `benchmarks round`, with another number of `layers` if given.

    Returns:
        Folder of the target, and of its EAGLE-3 head; None where the draft is the NextN layer of the target's own checkpoint.

    Raises:
        ValueError: engines have no such layers.
    """
    if name not in MODELS:
        raise ValueError(f"must be one of {list(MODELS)}, got {name!r}")
    shape = SHAPES[name].with_layers(layers)
    target = _write(folder / "target", _target(shape))
    if shape.draft_vocab is None:
        return target, None
    config = _llama(shape.head()) | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": shape.draft_vocab}
    return target, _write(folder / "draft", config)


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _common(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": LENGTH,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _llama(config: ModelConfig, family: str = "Llama") -> dict[str, Any]:
    heads = {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    names = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    return names | _common(config) | heads | {"mlp_bias": False, "sliding_window": None}


def _target(shape: Shape) -> dict[str, Any]:
    config = shape.target
    if config.is_mla:
        sizes = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        dense = {"first_k_dense_replace": config.num_layers, "num_nextn_predict_layers": 1}
        # Of the experts that no layer has but the NextN layer, which engines give a mixture.
        experts = {
            "moe_layer_freq": 1, "moe_intermediate_size": 2048, "n_routed_experts": 8, "n_shared_experts": 1,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        }  # fmt: skip
        names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        heads = {"num_key_value_heads": config.num_heads, **{size: getattr(config, size) for size in sizes}}
        return names | _common(config) | heads | dense | experts
    if (mixture := config.mixture) is None:
        return _llama(config, shape.family)
    experts = {
        "num_experts": mixture.num_experts, "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.intermediate_size, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False,
    }  # fmt: skip
    return _llama(config) | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | experts
