"""Tiny random transformers models, drafts cut from them, and a tokenizer, for the tests of the integration."""

from __future__ import annotations

import copy
import string
from functools import cache

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import spec_ops.integrations.transformers  # noqa: F401  registers attn_implementation="spec_ops"

PAD, BOS, EOS = 0, 1, 2
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
MERGED = ["th", "he", "the", "in", "ing"]
VOCAB = 3 + len(CHARACTERS) + len(MERGED) + 3  # padded, as published models are
WINDOW = 6

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_GQA = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_GQA),
    "qwen3": lambda: transformers.Qwen3Config(**_GQA),
    "mistral": lambda: transformers.MistralConfig(**_GQA, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **_GQA,
        **_MIXED,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0,
        tie_word_embeddings=False,  # tied and random, the model repeats its input
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_GQA, **_MIXED, query_pre_attn_scalar=16, tie_word_embeddings=False),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_GQA,
        **_MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_COMMON, **_MOE},
        num_key_value_heads=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        rope_parameters=_YARN,
    ),
}
MIXTURES = {
    "mixtral": lambda: transformers.MixtralConfig(**_GQA, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_GQA, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "gpt_oss": CONFIGS["gpt_oss"],
    "deepseek_v3": CONFIGS["deepseek_v3"],
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **{**_GQA, **_MOE}, n_group=2, topk_group=1, first_k_dense_replace=1, use_qk_norm=True
    ),
}
BIASED = {"qwen2": lambda: transformers.Qwen2Config(**_COMMON, num_key_value_heads=2)}  # queries, keys and values have biases


@torch.no_grad()
def _fill(model: PreTrainedModel) -> PreTrainedModel:
    """Random weights whose later layers change little, so that a draft cut from the first layers often agrees."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
        elif "sinks" in name or "bias" in name:
            parameter.normal_(std=0.5, generator=generator)
        if "layers." in name and "layers.0." not in name:
            if "gemma" in model.config.model_type and "layernorm" in name and "post_" in name:
                parameter.fill_(-0.7)  # the norm of a branch's output scales by 1 + weight
            elif "o_proj.weight" in name or "down_proj" in name:
                parameter *= 0.3
    return model


@cache
def eager_model(name: str) -> PreTrainedModel:
    """The model with transformers' own eager attention: what ours is compared with. Not to be changed."""
    return _fill(
        AutoModelForCausalLM.from_config({**CONFIGS, **MIXTURES, **BIASED}[name](), attn_implementation="eager").eval()
    )


def make_model(name: str, attention: str = "spec_ops", layers: int = 3) -> PreTrainedModel:
    """A model of its own with the first `layers` layers of `eager_model(name)`."""
    full = eager_model(name)
    config = copy.deepcopy(full.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    weights = full.state_dict()
    model.load_state_dict({key: weights[key] for key in model.state_dict()})
    return model


def batch(side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids`, `attention_mask [3, 9]`: prompts of 5, 9 and 8 tokens, padded."""
    text = torch.randint(3, 3 + len(CHARACTERS), (3, 9), generator=torch.Generator().manual_seed(3))
    ids = torch.full_like(text, PAD)
    for row, length in enumerate((5, 9, 8)):
        ids[row, slice(-length, None) if side == "left" else slice(0, length)] = text[row, :length]
    return ids, (ids != PAD).long()


@cache
def eager_tokens(name: str, layers: int = 3) -> list[list[int]]:
    """20 new tokens of `batch()` by the eager model's own greedy `generate`, end tokens ignored."""
    ids, mask = batch()
    model = make_model(name, "eager", layers)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    return out[:, ids.shape[1] :].tolist()


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Characters and a few merged pairs."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS, *MERGED])}
    merges = [("t", "h"), ("h", "e"), ("th", "e"), ("i", "n"), ("in", "g")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
