"""Published EAGLE-3 heads: the checkpoint layout that SGLang (`LlamaForCausalLMEagle3`) and vLLM (`Eagle3LlamaForCausalLM`,
`speculators`) read.

A folder with `config.json` and `model.safetensors` or `pytorch_model.bin`:

* `fc`, `norm`, `lm_head`, and the first layer as `midlayer.*` or `layers.0.*`, its attention twice the hidden size wide;
* further layers as `layers.N.*` (vLLM) or `additional_layers.N-1.*` (SGLang);
* `d2t [draft_vocab]`: target id minus draft id; `t2d [vocab]`: whether a target id is in the reduced vocabulary;
* optional `embed_tokens`; without it the target's is shared, and the same for `lm_head` over the whole vocabulary.

The layers of the target it reads: `eagle_config["eagle_aux_hidden_state_layer_ids"]` counts layer outputs (SGLang), a top-level
`eagle_aux_hidden_state_layer_ids` counts layer inputs (vLLM); default `2, n // 2, n - 3`, as inputs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from spec_ops.integrations.transformers.model import TransformersModel
from spec_ops.models.config import ModelConfig
from spec_ops.models.drafts import Eagle3Draft

_LAYER = {
    "self_attn": "attention",
    "mlp": "mlp",
    "hidden_norm": "hidden_norm",
    "input_layernorm": "embed_norm",
    "post_attention_layernorm": "post_norm",
}
# vLLM's norm of a later layer's input, and SGLang's name for the same.
_LATER_LAYER = {**_LAYER, "input_layernorm": "input_norm"}
_ADDITIONAL_LAYER = {**_LAYER, "hidden_norm": "input_norm"}
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def is_eagle3(path: str | Path) -> bool:
    """Whether the folder's `config.json` describes an EAGLE-3 head."""
    config = _read_config(Path(path))
    return any("eagle3" in name.lower() for name in config.get("architectures") or ())


def load_eagle3(path: str | Path, target: PreTrainedModel) -> tuple[TransformersModel, Eagle3Draft]:
    """The EAGLE-3 head in folder `path` and `target` prepared for it; the head gets the target's device and dtype.

    Args:
        path: see the module docstring.
        target: the causal language model it was trained for; gives the embedding (and an LM head if the head has none).

    Returns:
        `(target, draft)`, for `speculative_generate` or `Generator`.

    Raises:
        FileNotFoundError: no configuration or weights.
        ValueError: a configuration or weights that `Eagle3Draft` cannot represent, or that do not fit `target`.
    """
    folder = Path(path)
    config = _read_config(folder)
    sizes = target.config.get_text_config()
    values = _check_config(folder, config, sizes)
    adapter = TransformersModel(target, _aux_layers(config, sizes.num_hidden_layers))
    weight = adapter.embed.weight
    state = {_our_name(name): value for name, value in _read_weights(folder).items()}

    map_to_target = _draft_to_target(folder, state, values["draft_vocab_size"], sizes.vocab_size)
    head_config = ModelConfig(**{k: v for k, v in values.items() if k not in ("draft_vocab_size", "norm_before_residual")})
    with torch.device("meta"):  # nothing is initialized; the target's shared modules stay where they are
        draft = Eagle3Draft(
            head_config,
            adapter,
            None if map_to_target is None else map_to_target.to("meta"),
            norm_before_residual=values["norm_before_residual"],
        )
    draft.draft_to_target = None if map_to_target is None else map_to_target.to(weight.device)
    embedding = state.pop("embed.weight", None)
    if embedding is not None and not torch.equal(embedding.to(weight), weight):
        draft.embed = nn.Embedding.from_pretrained(embedding)
    expected = {n: v for n, v in draft.own_state_dict().items() if n != "draft_to_target"}
    if "lm_head.weight" not in state and map_to_target is None:
        draft.lm_head = adapter.lm_head
        del expected["lm_head.weight"]
    _check_weights(folder, expected, state)
    draft.load_state_dict(state, strict=False, assign=True)  # not strict: shared modules are already in place
    return adapter, draft.to(device=weight.device, dtype=weight.dtype).eval()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"load_eagle3: no such file: {path}")
    config = json.loads(path.read_text(encoding="utf-8"))
    # `speculators` nests the sizes of the layer.
    return {**config.pop("transformer_layer_config", {}), **config}


def _check_config(folder: Path, config: dict[str, Any], target: Any) -> dict[str, Any]:
    """The keyword arguments of the head's `ModelConfig`, with `draft_vocab_size` and `norm_before_residual`."""

    def need(key: str, value: Any, expected: Any) -> None:
        if value != expected:
            raise ValueError(f"load_eagle3: {folder}: `{key}` must be {expected!r} for this target and head, got {value!r}")

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    need("hidden_size", hidden, target.hidden_size)
    need("target_hidden_size", config.get("target_hidden_size") or hidden, target.hidden_size)
    need("hidden_act", config.get("hidden_act", "silu"), "silu")
    for key in ("attention_bias", "mlp_bias", "bias", "qkv_bias", "norm_before_fc", "fc_norm", "norm_output"):
        need(key, bool(config.get(key)), False)
    need("use_aux_hidden_state", (config.get("eagle_config") or {}).get("use_aux_hidden_state", True), True)
    vocab = config.get("target_vocab_size") or target.vocab_size
    need("target_vocab_size", vocab, target.vocab_size)
    theta, scaling = _rope(folder, config)
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "num_layers": config.get("num_hidden_layers", 1),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "sliding_window": config.get("sliding_window"),
        "draft_vocab_size": config.get("draft_vocab_size") or vocab,
        "norm_before_residual": bool(config.get("norm_before_residual")),
    }


def _rope(folder: Path, config: dict[str, Any]) -> tuple[float, tuple[float, float, float, float] | None]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return theta, None
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, context = (float(rope[key]) for key in keys)
        return theta, (factor, low, high, context)
    raise ValueError(f"load_eagle3: {folder}: RoPE must be of type 'default' or 'llama3', got {kind!r}")


def _aux_layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested:
        return tuple(layer + 1 for layer in nested)
    return tuple(config.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3))


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    for name in _WEIGHT_FILES:
        if (path := folder / name).is_file():
            if path.suffix == ".safetensors":
                return load_file(path)
            return torch.load(path, map_location="cpu", weights_only=True)
    raise FileNotFoundError(f"load_eagle3: {folder} has none of {', '.join(_WEIGHT_FILES)}")


def _our_name(name: str) -> str:
    """`midlayer.self_attn.q_proj.weight` to `attention.q_proj.weight`."""
    name = name.removeprefix("model.")
    found = re.fullmatch(r"(midlayer|layers\.(\d+)|additional_layers\.(\d+))\.(\w+)\.(.+)", name)
    if not found:
        return name.replace("embed_tokens.", "embed.")
    _, layer, additional, part, rest = found.groups()
    if additional:
        return f"layers.{additional}.{_ADDITIONAL_LAYER.get(part, part)}.{rest}"
    if layer and int(layer):
        return f"layers.{int(layer) - 1}.{_LATER_LAYER.get(part, part)}.{rest}"
    return f"{_LAYER.get(part, part)}.{rest}"


def _draft_to_target(folder: Path, state: dict[str, torch.Tensor], draft_vocab: int, vocab: int) -> torch.Tensor | None:
    """Pops `d2t` and `t2d`; returns the map of draft ids to target ids, None if they are the same."""
    offsets, known = state.pop("d2t", None), state.pop("t2d", None)
    if offsets is None:
        if draft_vocab != vocab:
            raise ValueError(f"load_eagle3: {folder}: `d2t` is missing, but the head knows {draft_vocab} of {vocab} tokens")
        return None
    if offsets.shape != (draft_vocab,):
        raise ValueError(f"load_eagle3: {folder}: `d2t` must be of shape [{draft_vocab}], got {tuple(offsets.shape)}")
    targets = offsets.long() + torch.arange(draft_vocab)
    if int(targets.min()) < 0 or int(targets.max()) >= vocab or targets.unique().numel() != draft_vocab:
        raise ValueError(f"load_eagle3: {folder}: `d2t` must map to different ids in [0, {vocab})")
    if known is not None and not torch.equal(known.bool().nonzero()[:, 0], targets.sort().values):
        raise ValueError(f"load_eagle3: {folder}: `t2d` and `d2t` disagree on the reduced vocabulary")
    return targets


def _check_weights(folder: Path, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"load_eagle3: {folder}: missing tensors {missing} (names as in Eagle3Draft)")
    if unknown := sorted(found.keys() - expected.keys()):
        raise ValueError(f"load_eagle3: {folder}: unknown tensors {unknown} (names as in Eagle3Draft)")
    for name, value in expected.items():
        if found[name].shape != value.shape:
            raise ValueError(
                f"load_eagle3: {folder}: `{name}` is {list(found[name].shape)}, the configuration says {list(value.shape)}"
            )
