"""Every causal language model of transformers, tiny and random: does it run on these ops, and does it give its own tokens?

    python -m tests.helpers.model_families [MODEL_TYPE ...]    # writes docs/models.md; with names, prints those instead

One process for everything, 2 to 3 minutes on one core.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator
from tests.helpers.paths import DOCS

PAGE = DOCS / "models.md"
FAMILIES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SHAPES = {"plain": None, "chain": SpeculationConfig(3), "tree": SpeculationConfig(3, 2, 6)}
VOCAB, NEW = 64, 10
_LARGEST = 15_000_000  # parameters of a model that is still tiny

# What configurations call their sizes; of these, each gets those that it has.
_NAMES = {
    VOCAB: "vocab_size n_vocab vocab_size_per_layer_input index_topk",
    128: "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len max_target_positions max_source_positions",
    48: "intermediate_size n_inner ffn_dim d_ff d_inner dff encoder_ffn_dim decoder_ffn_dim dim_ff ffn_hidden_size "
    "feed_forward_size dense_intermediate_size intermediate_size_mlp prefix_dense_intermediate_size",
    32: "hidden_size n_embd d_model word_embed_proj_dim embedding_size emb_dim dim lru_width image_size projection_dim",
    24: "q_lora_rank qk_head_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size kv_lora_rank qk_nope_head_dim patch_size",
    12: "v_head_dim",
    8: "head_dim d_kv d_head dim_head kv_channels attention_head_dim swa_head_dim swa_v_head_dim global_head_dim "
    "qk_rope_head_dim index_head_dim rotary_dim query_pre_attn_scalar hidden_size_per_layer_input attention_head_size "
    "key_head_dim linear_key_head_dim linear_value_head_dim mamba_n_heads mamba_d_head mamba_num_heads mamba_head_dim "
    "mamba_d_state state_size num_mel_bins",
    6: "sliding_window attention_chunk_size window_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts linear_num_value_heads linear_num_key_heads",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers "
    "num_key_value_heads swa_num_key_value_heads num_global_key_value_heads num_experts_per_tok num_experts_per_token "
    "moe_topk moe_k top_k_experts moe_top_k top_k zero_expert_num index_n_heads n_mamba_heads",
    1: "n_group topk_group first_k_dense_replace num_dense_layers n_shared_experts",
    0: "layerdrop num_nextn_predict_layers num_kv_shared_layers",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
_ALWAYS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_IF_THERE = {"tie_word_embeddings": False, "is_decoder": True}
_MLA = "axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear longcat_flash minicpm3 youtu"
_OWN: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in _MLA.split()},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16], "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
}


class Result(NamedTuple):
    """`outcome`: "runs", "refused" or "not tried"; or "wrong", which no family may be."""

    outcome: str
    reason: str


def tiny_config(config_class: type) -> Any:
    """A configuration of a few small layers: one of each kind that the default has, at least two."""
    made = config_class()
    default = made.to_dict()
    values = {name: size for name, size in _SIZES.items() if default.get(name) is not None}
    values |= _ALWAYS | {name: value for name, value in _IF_THERE.items() if name in default}
    if default.get("layer_types"):
        kinds = list(dict.fromkeys(default["layer_types"]))
        values["layer_types"] = kinds * 2 if len(kinds) == 1 else kinds
        values |= {name: len(values["layer_types"]) for name in _DEPTHS if name in values}
    if default.get("mlp_layer_types"):
        depth = len(values.get("layer_types", "12"))
        values["mlp_layer_types"] = (list(dict.fromkeys(default["mlp_layer_types"])) * depth)[:depth]
    for name in config_class.sub_configs:
        if isinstance(getattr(made, name, None), PreTrainedConfig):
            values[name] = tiny_config(type(getattr(made, name)))
    return config_class(**(values | _OWN.get(config_class.model_type, {})))


def tiny_model(family: str) -> PreTrainedModel:
    """With eager attention and random weights, large enough that every part of it changes tokens.

    Raises:
        whatever transformers raises; ValueError if it is not tiny.
    """
    config = tiny_config(CONFIG_MAPPING[family])
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"the smallest one made has {size / 1e6:.0f} million parameters")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            elif "bias" in name or "sinks" in name:
                parameter.normal_(std=0.5, generator=generator)
    return model


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids`, `attention_mask [2, 9]`: 5 and 9 tokens, padded on the left."""
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    ids[0, :4] = 0
    return ids, (ids != 0).long()


def try_family(family: str) -> Result:
    """Plain, chain and tree decoding against the model's own `generate` of each prompt alone."""
    ids, mask = prompts()
    try:
        model = tiny_model(family)
        want = []
        for row, keep in zip(ids, mask.bool(), strict=True):
            out = model.generate(row[keep][None], max_new_tokens=NEW, do_sample=False)
            want.append(out[0, int(keep.sum()) :].tolist())
    except Exception as error:  # of transformers alone: nothing of ours has run
        return Result("not tried", f"transformers makes no tiny random one: {type(error).__name__}: {_line(error)}")
    try:
        TransformersGenerator(model, max_batch_size=2, max_seq_len=32).close()
    except (TypeError, ValueError) as error:
        return Result("refused", _line(error))
    for name, config in SHAPES.items():
        with TransformersGenerator(model, config and model, config, max_batch_size=2, max_seq_len=32) as generator:
            result = generator.generate(ids, mask, max_new_tokens=NEW, eos_token_id=(), return_dict_in_generate=True)
        if result.tokens != want:
            return Result("wrong", f"{name} decoding gives {result.tokens}, generate() {want}")
    return Result("runs", "")


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).replace("|", "/").removeprefix("TransformersGenerator: ")


def page(results: dict[str, Result]) -> str:
    """docs/models.md."""
    counts = {outcome: sum(r.outcome == outcome for r in results.values()) for outcome in ("runs", "refused", "not tried")}
    lines = [
        "# Model families of transformers",
        "",
        f"Every model type of `AutoModelForCausalLM` in transformers {transformers.__version__}: {counts['runs']} of "
        f"{len(results)} run,",
        f"{counts['refused']} are refused when a generator is made, {counts['not tried']} could not be tried.",
        "",
        "*Runs*: a tiny random model gives the same tokens as its own `generate()`, decoded plainly, with a chain and with a",
        "tree of drafts, on CPU in float32. *Refused*: `TransformersGenerator(model)` raises, with the reason given here. *Not",
        "tried*: there is no tiny random model to try it with; the check at construction holds there too. Each row is about a",
        "model that has every kind of layer in the type's default configuration.",
        "",
        "`python -m tests.helpers.model_families` writes this page.",
        "",
        "| model type | result | class |",
        "|---|---|---|",
    ]
    for family, result in results.items():
        said = result.outcome if not result.reason else f"{result.outcome}: {result.reason}"
        lines.append(f"| {family} | {said} | {FAMILIES[family]} |")
    return "\n".join(lines) + "\n"


def main(chosen: list[str]) -> int:
    os.environ["TQDM_DISABLE"] = "1"
    transformers.logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    for family in chosen or FAMILIES:
        results[family] = try_family(family)
        print(family, *results[family], file=sys.stderr, flush=True)
    if not chosen:
        PAGE.write_text(page(results))
    return int(any(result.outcome == "wrong" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
