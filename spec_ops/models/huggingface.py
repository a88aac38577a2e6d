"""Models of this package as checkpoints of Hugging Face's layout, which transformers, SGLang and vLLM load.

* a target is a Llama: `config.json`, `model.safetensors`, `generation_config.json`, and a tokenizer of bytes where it has one;
* an EAGLE-3 head is what SGLang (`LlamaForCausalLMEagle3`) and vLLM read: the layer as `midlayer.*`, `d2t` and `t2d` for a
  reduced vocabulary, no embedding. `spec_ops.integrations.transformers.load_eagle3` reads it, and says more about the layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from spec_ops.models.config import ModelConfig
from spec_ops.models.corpus import ByteTokenizer
from spec_ops.models.drafts import Eagle3Draft
from spec_ops.models.quantized import check_plain
from spec_ops.models.target import CausalLM

# Names of a decoder layer's parts there.
_LAYER = {"input_norm": "input_layernorm", "attention": "self_attn", "post_norm": "post_attention_layernorm", "mlp": "mlp"}
_ENDS = {"embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
# Of an EAGLE-3 head: the parts of its layer, and what has the same name.
EAGLE3_LAYER = {
    "embed_norm": "input_layernorm", "hidden_norm": "hidden_norm", "attention": "self_attn",
    "post_norm": "post_attention_layernorm", "mlp": "mlp",
}  # fmt: skip
_WEIGHTS = "model.safetensors"
_FILES = (_WEIGHTS, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_SPECIAL = {ByteTokenizer.BOS: "<|bos|>", ByteTokenizer.EOS: "<|eos|>"}


def export_pair(
    directory: str | Path, target: CausalLM, draft: Eagle3Draft, tokenizer: ByteTokenizer | None = None, *, context: int
) -> tuple[Path, Path]:
    """Write a target and its EAGLE-3 head as checkpoints that transformers, SGLang and vLLM load.

    Args:
        directory: gets the folders `target` and `draft`. What an earlier export wrote there is replaced once all files are
            written.
        target: with grouped-query attention and plain layers, as Llama has. Weights are written in its dtype.
        draft: its head, of one layer, with the norms of EAGLE-3.
        tokenizer: written beside the target, so that `AutoTokenizer` gives its ids; its first and last ids are the
            configuration's. None: the folder has no tokenizer.
        context: tokens of the longest text that the pair was trained for (`max_position_embeddings`).

    Returns:
        The folders of target and draft.

    Raises:
        TypeError: a model or tokenizer of another class.
        ValueError: naming what a Llama, or the engines' layout of a head, does not have; a quantized weight, the share of a
            rank, a head or tokenizer of another vocabulary.
        FileExistsError: a folder has other weights, which engines would read too.
    """
    wanted = {"target": (target, CausalLM), "draft": (draft, Eagle3Draft), "tokenizer": (tokenizer, ByteTokenizer)}
    for name, (given, kind) in wanted.items():
        if not isinstance(given, kind) and not (name == "tokenizer" and given is None):
            raise TypeError(f"export_pair: `{name}` must be a spec_ops.models {kind.__name__}, got {type(given).__name__}")
    if not isinstance(context, int) or context < 1:
        raise ValueError(f"export_pair: `context` must be a positive number of tokens, got {context!r}")
    _check_model(target, "target")
    _check_model(draft, "draft")
    _check_head(draft, target.config.vocab_size)
    if tokenizer is not None and target.config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"export_pair: `target.config.vocab_size` must be at least the tokenizer's {tokenizer.vocab_size}, got "
            f"{target.config.vocab_size}"
        )
    folders = Path(directory) / "target", Path(directory) / "draft"
    ends = {} if tokenizer is None else {"bos_token_id": tokenizer.BOS, "eos_token_id": tokenizer.EOS}
    common = {"max_position_embeddings": context, **ends}
    config = {"architectures": ["LlamaForCausalLM"], **_sizes(target.config), **common, **_dtype(target)}
    written = {"config.json": _json(config), "generation_config.json": _json({"do_sample": False, **ends})}
    if tokenizer is not None:
        written |= _tokenizer_files(context)
    weights = {_llama_name(name): value for name, value in target.state_dict().items()}
    with _replacing(folders) as write:
        write(folders[0], {**written, _WEIGHTS: _safetensors(weights)})
        head = _head_config(draft, target.config) | common | _dtype(draft)
        write(folders[1], {"config.json": _json(head), _WEIGHTS: _safetensors(_head_tensors(draft, target.config.vocab_size))})
    return folders


def _dtype(model: CausalLM | Eagle3Draft) -> dict[str, str]:
    return {"torch_dtype": str(model.lm_head.weight.dtype).removeprefix("torch.")}


def _check_model(model: CausalLM | Eagle3Draft, name: str) -> None:
    _check_layers(model.config, name)
    check_plain("export_pair", name, model)
    if (ranks := model.ranks) is not None:
        raise ValueError(f"export_pair: `{name}` must be whole, got the share of rank {ranks.rank} of {ranks.size}")


def _check_layers(config: ModelConfig, name: str) -> None:
    for field, needed in (
        ("kv_lora_rank", 0),
        ("sliding_window", None),
        ("attention_sinks", False),
        ("mixture", None),
    ):
        if (got := getattr(config, field)) != needed:
            raise ValueError(f"export_pair: `{name}.config.{field}` must be {needed}, as of a Llama, got {got!r:.80}")


def _check_head(draft: Eagle3Draft, vocab: int) -> None:
    if draft.config.vocab_size != vocab:
        raise ValueError(f"export_pair: `draft` must know the target's {vocab} tokens, got {draft.config.vocab_size}")
    if draft.config.num_layers != 1:
        # Engines differ: vLLM has `layers.1`, SGLang `additional_layers.0`.
        raise ValueError(f"export_pair: `draft` must have one layer, got {draft.config.num_layers}")
    others = ("norm_before_residual", "norm_output", "input_norm", "fc_norm")
    if given := [name for name in others if getattr(draft, name) not in (None, False)]:
        raise ValueError(f"export_pair: `draft` must have the norms of EAGLE-3, got one with {', '.join(given)}")


def _sizes(config: ModelConfig) -> dict[str, Any]:
    scaling = None
    if config.rope_scaling is not None:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = {"rope_type": "llama3", **dict(zip(names, config.rope_scaling, strict=True))}
        scaling["original_max_position_embeddings"] = int(config.rope_scaling[-1])
    return {
        "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "hidden_act": "silu", "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope_theta, "rope_scaling": scaling,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip


def _llama_name(name: str) -> str:
    """`layers.3.input_norm.weight` to `model.layers.3.input_layernorm.weight`."""
    first, _, rest = name.partition(".")
    if first != "layers":
        return f"{_ENDS[first]}.{rest}"
    layer, part, rest = rest.split(".", 2)
    return f"model.layers.{layer}.{_LAYER[part]}.{rest}"


def _head_config(draft: Eagle3Draft, target: ModelConfig) -> dict[str, Any]:
    inputs = list(target.aux_layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"], **_sizes(draft.config),
        "draft_vocab_size": draft.draft_vocab_size, "target_hidden_size": target.hidden_size,
        # vLLM counts layers by their inputs, SGLang by their outputs, and each reads one of the two.
        "eagle_aux_hidden_state_layer_ids": inputs,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in inputs]},
    }  # fmt: skip


def _head_tensors(draft: Eagle3Draft, vocab: int) -> dict[str, torch.Tensor]:
    tensors, state = {}, draft.own_state_dict()
    to_target = state.pop("draft_to_target", None)
    for name, value in state.items():
        part, _, rest = name.partition(".")
        tensors[f"midlayer.{EAGLE3_LAYER[part]}.{rest}" if part in EAGLE3_LAYER else name] = value
    if to_target is not None:
        known = torch.zeros(vocab, dtype=torch.bool)
        known[to_target.cpu()] = True
        tensors |= {"d2t": to_target - torch.arange(len(to_target), device=to_target.device), "t2d": known}
    return tensors


@contextmanager
def _replacing(folders: tuple[Path, ...]) -> Iterator[Callable[[Path, dict[str, bytes]], None]]:
    """A function that writes files of a folder beside those that are there. These are replaced in the end, or, if anything
    fails, kept."""
    for folder in folders:
        weights = {path.name for path in folder.glob("*") if path.name.endswith((".safetensors", ".safetensors.index.json"))}
        if others := sorted(weights - {_WEIGHTS}):
            raise FileExistsError(f"export_pair: `directory` must have no other weights in {folder}, got {others[0]}")
    new: dict[Path, Path] = {}

    def write(folder: Path, files: dict[str, bytes]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            new[folder / name] = part = folder / f".{name}.part"
            part.write_bytes(content)

    try:
        yield write
    except BaseException:
        for part in new.values():
            part.unlink(missing_ok=True)
        raise
    for folder in folders:
        for name in _FILES:
            if folder / name not in new:
                (folder / name).unlink(missing_ok=True)
    for path, part in new.items():
        part.replace(path)


def _safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    # Copies: the parts of a packed weight share memory, which safetensors refuses.
    stored = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    # Not `save_file`, which gives its files mode 600. transformers asks for the format.
    return save(stored, metadata={"format": "pt"})


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a vocabulary of `ByteLevel` tokenizers, as GPT-2 chose them: a
    printable byte is itself, the others are counted from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _tokenizer_files(context: int) -> dict[str, bytes]:
    """`ByteTokenizer` as a `tokenizer.json`: byte-pair encoding without a pair."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    bos = _SPECIAL[ByteTokenizer.BOS]
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    parts = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags, "special": True} for i, text in _SPECIAL.items()],
        "normalizer": None, "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing", "single": [first, parts[0]], "pair": [first, *parts],
            "special_tokens": {bos: {"id": bos, "ids": [ByteTokenizer.BOS], "tokens": [bos]}},
        },
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {text: byte for byte, text in enumerate(_byte_characters())}, "merges": [],
        },
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": _SPECIAL[ByteTokenizer.EOS],
        "model_max_length": context, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config)}
