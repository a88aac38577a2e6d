"""Published EAGLE-3 heads: the checkpoint layout that SGLang (`LlamaForCausalLMEagle3`) and vLLM (`Eagle3LlamaForCausalLM`,
`speculators`) read.

A folder with `config.json` and `model.safetensors` or `pytorch_model.bin`:

* `fc`, `norm`, `lm_head`, and the first layer as `midlayer.*` or `layers.0.*`, its attention twice the hidden size wide;
* further layers as `layers.N.*` (vLLM) or `additional_layers.N-1.*` (SGLang);
* `d2t [draft_vocab]`: target id minus draft id; `t2d [vocab]`: whether a target id is in the reduced vocabulary;
* optional `embed_tokens`; without it the target's is shared, and the same for `lm_head` over the whole vocabulary;
* `input_norm` with `norm_before_fc`, `fc_norm.N` with `fc_norm` (EAGLE-3.1; `use_aux_norm` in older files).

`config.json` is flat (SGLang, vLLM), or that of vLLM's `speculators`: `speculators_model_type`, and the sizes of the layer in
`transformer_layer_config`. NVIDIA's files have `norm_before_fc` in `eagle_config`.

The layers of the target it reads: `eagle_config["eagle_aux_hidden_state_layer_ids"]` counts layer outputs (SGLang), a top-level
`eagle_aux_hidden_state_layer_ids` counts layer inputs (vLLM); default `2, n // 2, n - 3`, as inputs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from spec_ops.integrations.transformers.model import TransformersModel
from spec_ops.integrations.transformers.probe import Argument
from spec_ops.integrations.transformers.sharing import all_of
from spec_ops.models.checkpoint import (
    CheckpointError,
    CheckpointNotFoundError,
    check_dtype,
    check_tensors,
    read_fields,
    read_tensors,
)
from spec_ops.models.config import ModelConfig
from spec_ops.models.drafts import Eagle3Draft, vocabulary_problem
from spec_ops.models.fields import FieldError, Fields
from spec_ops.models.huggingface import EAGLE3_LAYER

_LAYER = {theirs: ours for ours, theirs in EAGLE3_LAYER.items()}
# vLLM's norm of a later layer's input, and SGLang's name for the same.
_LATER_LAYER = {**_LAYER, "input_layernorm": "input_norm"}
_ADDITIONAL_LAYER = {**_LAYER, "hidden_norm": "input_norm"}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_KIND = "speculators_model_type"
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def is_eagle3(path: str | Path) -> bool:
    """Whether the folder's `config.json` describes an EAGLE-3 head."""
    config = _read_config(Path(path))
    return any("eagle3" in name.lower() for name in (*config.texts("architectures", ()), config.text(_KIND, "")))


def load_eagle3(path: str | Path, target: PreTrainedModel) -> tuple[TransformersModel, Eagle3Draft]:
    """Load the EAGLE-3 head in folder `path`, and prepare `target` for it. The head gets the target's device and dtype.

    Args:
        path: folder with `config.json` and weights, as published for SGLang or vLLM.
        target: the causal language model that the head was trained for. Its embedding, and its LM head where the checkpoint has
            none, are shared.

    Returns:
        `(target, draft)` for `speculative_generate`, `TransformersGenerator` or `Generator`. `target.close()` gives the model
        its own attention back.

    Raises:
        CheckpointError: a folder that holds no EAGLE-3 head; a configuration or weights that are damaged, that `Eagle3Draft`
            cannot represent, or that do not fit `target`. A missing file is a FileNotFoundError as well.
        TypeError, ValueError: a `target` that cannot run on these ops.
    """
    folder = Path(path)
    config, sizes = _read_config(folder), target.config.get_text_config()
    values, norms = _model_config(config, sizes), _norms(config)
    aux_layers = _aux_layers(config, sizes.num_hidden_layers)
    file, tensors = _read_weights(folder)
    names, state = _our_names(file, tensors)
    if "fc.weight" not in state:
        what = "holds no EAGLE-3 head: `fc.weight`, of the layer that joins the target's hidden states, is missing"
        raise CheckpointError(file, f"{what}; a draft that is a whole model is loaded with transformers and passed as `draft`")

    draft_vocab = config.integer("draft_vocab_size", default=values["vocab_size"])
    to_target = _draft_to_target(file, state, draft_vocab, sizes.vocab_size)
    embedding = state.pop("embed.weight", None)
    if embedding is not None:
        check_dtype(file, names["embed.weight"], embedding)
        if embedding.dim() != 2 or embedding.shape[0] < sizes.vocab_size or embedding.shape[1] != sizes.hidden_size:
            expected = f"[{sizes.vocab_size}, {sizes.hidden_size}], the target's vocabulary and hidden size"
            raise CheckpointError(file, f"must be {expected}, got {list(embedding.shape)}", names["embed.weight"])
    try:
        head_config = ModelConfig(**values)
    except FieldError as error:
        raise config.error(error.field, error.problem) from error

    adapter = TransformersModel(target, aux_layers, argument=Argument("load_eagle3", "target"))
    try:
        weight = adapter.embed.weight
        with torch.device("meta"):  # nothing is initialized; the target's shared modules stay where they are
            draft = Eagle3Draft(
                head_config,
                adapter,
                None if to_target is None else to_target.to("meta"),
                **norms,
            )
        draft.draft_to_target = None if to_target is None else to_target.to(weight.device)
        if embedding is not None and not torch.equal(embedding.to(weight), all_of(weight)):
            draft.embed = nn.Embedding.from_pretrained(embedding)
        expected_state = {n: v for n, v in draft.own_state_dict().items() if n != "draft_to_target"}
        if "lm_head.weight" not in state and to_target is None:
            draft.lm_head = adapter.lm_head
            del expected_state["lm_head.weight"]
        check_tensors(file, expected_state, state, names)
        draft.load_state_dict(state, strict=False, assign=True)  # not strict: shared modules are already in place
        return adapter, draft.to(device=weight.device, dtype=weight.dtype).eval()
    except BaseException:
        adapter.close()
        raise


def _read_config(folder: Path) -> Fields:
    config = read_fields(folder / "config.json")
    # `speculators` nests the sizes of the layer.
    nested = config.inner("transformer_layer_config", {}).values
    return Fields({**nested, **config.values}, config.fail)


def _norms(config: Fields) -> dict[str, bool]:
    """Which norms an `Eagle3Draft` has, by its arguments."""
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    norms = {name: config.flag(name) for name in names}
    norms["norm_before_fc"] |= config.inner("eagle_config", {}).flag("norm_before_fc")
    norms["fc_norm"] |= config.flag("use_aux_norm")
    return norms


def _model_config(config: Fields, target: Any) -> dict[str, Any]:
    """The keyword arguments of the head's `ModelConfig`."""

    def need(key: str, value: Any, expected: Any) -> None:
        if value != expected:
            raise config.error(key, f"must be {expected!r} for this target and head, got {value!r}")

    need(_KIND, config.text(_KIND, "eagle3"), "eagle3")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    need("hidden_size", hidden, target.hidden_size)
    need("target_hidden_size", config.integer("target_hidden_size", default=hidden), target.hidden_size)
    need("hidden_act", config.text("hidden_act", "silu"), "silu")
    for key in ("attention_bias", "mlp_bias", "bias", "qkv_bias"):
        need(key, config.flag(key), False)
    need("partial_rotary_factor", config.positive("partial_rotary_factor", 1.0), 1.0)
    need("use_aux_hidden_state", config.inner("eagle_config", {}).flag("use_aux_hidden_state", True), True)
    vocab = config.integer("target_vocab_size", default=target.vocab_size)
    need("target_vocab_size", vocab, target.vocab_size)
    theta, scaling = _rope(config)
    values = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": config.integer("intermediate_size"),
        "num_layers": config.integer("num_hidden_layers", default=1),
        "num_heads": heads,
        "num_kv_heads": config.integer("num_key_value_heads", default=heads),
        "head_dim": config.integer("head_dim", default=hidden // heads),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": config.positive("rms_norm_eps", 1e-6),
        "sliding_window": config.integer("sliding_window", default=None),
    }
    if not config.flag("use_sliding_window", True):  # Qwen's configurations name a window and switch it off here
        values["sliding_window"] = None
    return values


def _rope(config: Fields) -> tuple[float, tuple[float, ...] | None]:
    name = "rope_scaling" if config.values.get("rope_parameters") is None else "rope_parameters"
    rope = config.inner(name, {})
    if nested := [key for key, value in rope.values.items() if isinstance(value, dict)]:
        raise config.error(name, f"must be the same for all layers, got different ones for {nested}")
    kind = rope.text("rope_type", rope.text("type", "default"))
    theta = rope.positive("rope_theta", config.positive("rope_theta", 10000.0))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return theta, tuple(rope.positive(key) for key in keys)
    raise rope.error("rope_type", f"must be 'default' or 'llama3', got {kind!r}")


def _aux_layers(config: Fields, layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs the head reads."""
    name = "eagle_aux_hidden_state_layer_ids"
    eagle = config.inner("eagle_config", {})
    if outputs := eagle.integers(name, ()):
        if any(not -1 <= layer < layers for layer in outputs):  # -1: the embedding
            raise eagle.error(name, f"must lie in [-1, {layers}), got {list(outputs)}")
        return tuple(layer + 1 for layer in outputs)
    inputs = config.integers(name, ()) or (2, layers // 2, layers - 3)
    if any(not 0 <= layer <= layers for layer in inputs):
        raise config.error(name, f"must lie in [0, {layers}], got {list(inputs)}")
    return inputs


def _read_weights(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    for name in _WEIGHT_FILES:
        if (path := folder / name).is_file():
            return path, read_tensors(path)
    raise CheckpointNotFoundError(folder, f"has none of {', '.join(_WEIGHT_FILES)}")


def _our_names(file: Path, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """What the file calls each of our names, and the tensors by our names."""
    names: dict[str, str] = {}
    for theirs in tensors:
        if (known := names.setdefault(_our_name(theirs), theirs)) != theirs:
            raise CheckpointError(file, f"holds {known!r} and {theirs!r}, two names of one tensor", theirs)
    return names, {ours: tensors[theirs] for ours, theirs in names.items()}


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


def _draft_to_target(file: Path, state: dict[str, torch.Tensor], draft_vocab: int, vocab: int) -> torch.Tensor | None:
    """Pops `d2t` and `t2d`; returns the map of draft ids to target ids, None if they are the same."""
    offsets, known = state.pop("d2t", None), state.pop("t2d", None)
    if offsets is None:
        if draft_vocab != vocab:
            raise CheckpointError(file, f"is missing, but the head knows {draft_vocab} of {vocab} tokens", "d2t")
        return None
    check_dtype(file, "d2t", offsets, _INTEGERS)
    if offsets.shape != (draft_vocab,):
        raise CheckpointError(file, f"must be of shape [{draft_vocab}], got {list(offsets.shape)}", "d2t")
    targets = offsets.long() + torch.arange(draft_vocab)
    if problem := vocabulary_problem(targets, vocab):
        raise CheckpointError(file, f"plus the draft's ids {problem}", "d2t")
    if known is not None:
        check_dtype(file, "t2d", known, (torch.bool, *_INTEGERS))
        if known.shape != (vocab,):
            raise CheckpointError(file, f"must be of shape [{vocab}], got {list(known.shape)}", "t2d")
        if not torch.equal(known.bool().nonzero()[:, 0], targets.sort().values):
            raise CheckpointError(file, "disagrees with `d2t` on the reduced vocabulary", "t2d")
    return targets
