"""Tiny checkpoints that SGLang serves: a Llama, and an EAGLE-3 head in SGLang's layout, of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCAB = 64, 8, 4, 2, 96, 128  # eight layers: an EAGLE-3 head reads three of them
DIM = HIDDEN // HEADS


def _llama(**changes: object) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False,
        **changes,
    }  # fmt: skip


def _save(folder: Path, config: dict, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    folder.mkdir(parents=True)
    g = torch.Generator().manual_seed(seed)
    weights = {
        # Large enough that attention decides tokens: one weight in `HIDDEN` numbers of a row.
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=g) * (1.5 / shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def _layer(prefix: str, width: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * DIM, width),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * DIM, width),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * DIM, width),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def write_target(folder: Path) -> None:
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= _layer(f"model.layers.{i}")
    _save(folder, _llama(), shapes, seed=0)


def write_draft(folder: Path) -> None:
    shapes = _layer("midlayer", 2 * HIDDEN) | {
        "midlayer.hidden_norm.weight": (HIDDEN,), "fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    config = _llama(architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=VOCAB)
    _save(folder, config, shapes, seed=1)
