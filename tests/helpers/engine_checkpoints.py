"""Tiny checkpoints of random weights that SGLang and vLLM serve: a Llama and its EAGLE heads, a DeepSeek and its MTP layer,
a Gemma 3 with windows."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCAB = 64, 8, 4, 2, 96, 128  # eight layers: an EAGLE-3 head reads three of them
RANK, ROPE, NOPE = 512, 64, 32  # of latent attention; vLLM's CPU kernel knows this width of a row alone


def _llama(dim: int, **changes: object) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": dim,
        "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False,
        **changes,
    }  # fmt: skip


def _save(
    folder: Path,
    config: dict,
    shapes: dict[str, tuple[int, ...]],
    seed: int,
    size: float = 1.5,
    ids: int = VOCAB,
    others: dict[str, torch.Tensor] | None = None,
) -> None:
    """Args: ids: tokens that are likely, so that random drafts are accepted at times. others: weights that are given."""
    folder.mkdir(parents=True)
    g = torch.Generator().manual_seed(seed)
    weights = {
        # Large enough that attention decides tokens: one weight in `HIDDEN` numbers of a row.
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=g) * (size / shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }
    if "lm_head.weight" in weights:
        weights["lm_head.weight"][ids:] *= 0.1
    save_file(weights | (others or {}), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def _layer(prefix: str, attention: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()} | {
        f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def _grouped(dim: int, width: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    kv = (KV_HEADS * dim, width)
    return {"q_proj": (HEADS * dim, width), "k_proj": kv, "v_proj": kv, "o_proj": (HIDDEN, HEADS * dim)}


_LATENT = {
    "q_proj": (HEADS * (NOPE + ROPE), HIDDEN), "kv_a_proj_with_mqa": (RANK + ROPE, HIDDEN), "kv_a_layernorm": (RANK,),
    "kv_b_proj": (HEADS * 2 * NOPE, RANK), "o_proj": (HIDDEN, HEADS * NOPE),
}  # fmt: skip
_ENDS = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}


def write_target(folder: Path, dim: int = 16, ids: int = VOCAB) -> None:
    """A Llama of heads `dim` wide that writes one of `ids` tokens nearly always."""
    shapes = dict(_ENDS)
    for i in range(LAYERS):
        shapes |= _layer(f"model.layers.{i}", _grouped(dim))
    _save(folder, _llama(dim), shapes, seed=0, ids=ids)


def write_draft(folder: Path, dim: int = 16, ids: int = VOCAB) -> None:
    """Its EAGLE-3 head, likewise."""
    shapes = _layer("midlayer", _grouped(dim, 2 * HIDDEN)) | {
        "midlayer.hidden_norm.weight": (HIDDEN,), "fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    config = _llama(dim, architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=VOCAB)
    _save(folder, config, shapes, seed=1, ids=ids)


def write_first_draft(folder: Path, dim: int = 16) -> None:
    """Its EAGLE head, of the first kind: over the target's last hidden states, with its LM head, and without a norm first."""
    shapes = {
        name: shape
        for name, shape in _layer("layers.0", _grouped(dim)).items()
        if not name.endswith("input_layernorm.weight")
    } | {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,), "embed_tokens.weight": (VOCAB, HIDDEN)}  # fmt: skip
    # No norm before the LM head either: larger weights give probabilities of 1, so that a child ties with its parent.
    _save(folder, _llama(dim, architectures=["LlamaForCausalLMEagle"], num_hidden_layers=1), shapes, seed=5, size=0.5)


def write_windowed_target(folder: Path, window: int, dim: int = 16) -> None:
    """A Gemma 3 of which every other layer sees `window` positions, the query's own among them."""
    shapes = {name: shape for name, shape in _ENDS.items() if not name.startswith("lm_head")}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}"
        shapes |= _layer(prefix, _grouped(dim) | {"q_norm": (dim,), "k_norm": (dim,)})
        shapes |= {f"{prefix}.{side}_feedforward_layernorm.weight": (HIDDEN,) for side in ("pre", "post")}
    config = _llama(
        dim, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", tie_word_embeddings=True, sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2), query_pre_attn_scalar=dim,
        hidden_activation="gelu_pytorch_tanh", rope_local_base_freq=10000.0, pad_token_id=0,
    )  # fmt: skip
    _save(folder, config, shapes, seed=3)


def write_sunk_target(folder: Path, window: int, dim: int = 16, ids: int = VOCAB, *, mimo: bool = False) -> None:
    """A Granite whose heads have sinks, of which every other layer sees `window` positions, the query's own among them.

    Args: mimo: write the same function as a MiMo V2, with an MTP layer, whose heads have sinks and a window too.
    """
    prefixes, sinks = [f"model.layers.{i}" for i in range(LAYERS)], {}
    shapes, head = dict(_ENDS), "model.mtp.layers.0"
    for prefix in [*prefixes, head] if mimo else prefixes:
        shapes |= _layer(prefix, _grouped(dim))
        name = f"{prefix}.self_attn.{'attention_sink_bias' if mimo else 'sinks'}"
        # Exact in bfloat16, in which SGLang keeps Granite's.
        sinks[name] = 1.0 + (torch.arange(HEADS) + len(sinks)) % 4
    changes: dict[str, object] = {
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "layer_rope_theta": [10000.0] * LAYERS,
        "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": dim**-0.5,
        "mlp_bias": False, "sliding_window": window, "architectures": ["GraniteSWAForCausalLM"], "model_type": "granite_swa",
    }  # fmt: skip
    if mimo:
        shapes |= {f"{head}.{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "final_layernorm")}
        shapes[f"{head}.eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
        # Its configuration class comes with its checkpoints; SGLang goes by the architecture and counts without the query.
        changes = {
            "architectures": ["MiMoV2FlashForCausalLM"], "hybrid_layer_pattern": [1, 0] * (LAYERS // 2),
            "moe_layer_freq": [0] * LAYERS, "n_routed_experts": 1, "layernorm_epsilon": 1e-5, "sliding_window_size": window - 1,
            "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": True, "v_head_dim": dim, "swa_head_dim": dim,
            "swa_v_head_dim": dim, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": KV_HEADS,
            "swa_rope_theta": 10000.0,
        }  # fmt: skip
    _save(folder, _llama(dim, **changes), shapes, seed=4, ids=ids, others=sinks)


# SGLang's rotary embedding of DeepSeek on a CPU knows no other kind.
YARN = {
    "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip


def write_latent_target(folder: Path, layers: int = 2, *, experts: int = 0, **changes: object) -> None:
    """A DeepSeek-V3 without experts, and its MTP layer after the others, with `experts`; `changes` to its configuration."""
    shapes, head = dict(_ENDS), f"model.layers.{layers}"
    for i in range(layers + 1):
        shapes |= _layer(f"model.layers.{i}", _LATENT)
    shapes |= {
        f"{head}.enorm.weight": (HIDDEN,), f"{head}.hnorm.weight": (HIDDEN,), f"{head}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"{head}.embed_tokens.weight": (VOCAB, HIDDEN), f"{head}.shared_head.head.weight": (VOCAB, HIDDEN),
        f"{head}.shared_head.norm.weight": (HIDDEN,),
    }  # fmt: skip
    if experts:
        inner = 32
        for name in [name for name in shapes if name.startswith(f"{head}.mlp.")]:
            del shapes[name]
        shapes |= {f"{head}.mlp.gate.weight": (experts, HIDDEN), f"{head}.mlp.gate.e_score_correction_bias": (experts,)}
        for part in ("shared_experts", *(f"experts.{i}" for i in range(experts))):
            shapes |= {f"{head}.mlp.{part}.{name}_proj.weight": (inner, HIDDEN) for name in ("gate", "up")}
            shapes[f"{head}.mlp.{part}.down_proj.weight"] = (HIDDEN, inner)
        changes |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 1.0, "norm_topk_prob": True}
    config = _llama(
        NOPE + ROPE, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", num_hidden_layers=layers,
        num_nextn_predict_layers=1, num_key_value_heads=HEADS, q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=NOPE, first_k_dense_replace=layers + 1, moe_layer_freq=1,
        n_routed_experts=experts or 4, n_shared_experts=1, num_experts_per_tok=1, moe_intermediate_size=32, n_group=1,
        topk_group=1, **changes,
    )  # fmt: skip
    config.pop("head_dim")
    _save(folder, config, shapes, seed=2)
