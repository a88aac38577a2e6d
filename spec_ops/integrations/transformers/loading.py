"""Local checkpoints and tokenizers for the command line. Nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from spec_ops.decoding import SamplingParams
from spec_ops.integrations.transformers.attention import NAME
from spec_ops.integrations.transformers.eagle3 import is_eagle3, load_eagle3
from spec_ops.integrations.transformers.logits import Call, LogitsSettings, plan_logits
from spec_ops.integrations.transformers.model import TransformersModel
from spec_ops.integrations.transformers.mtp import holds_mtp, load_mtp
from spec_ops.integrations.transformers.mxfp4 import quantization_method, read_mxfp4_as_stored
from spec_ops.integrations.transformers.settings import GenerationSettings, resolve_settings
from spec_ops.integrations.transformers.stored import METHODS as STORED
from spec_ops.integrations.transformers.stored import read_as_stored
from spec_ops.models.checkpoint import MACHINE_ERRORS, CheckpointError, first_line, read_fields
from spec_ops.models.drafts import Draft, StandaloneDraft
from spec_ops.models.fields import Fields

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon", "norm_eps")
_METHOD = "quantization_config.quant_method"
_FLOAT8 = {"F8_E4M3", "F8_E5M2"}  # safetensors' names
_INTEGERS = {"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"}  # safetensors' names


def load_tokenizer(model: Path) -> TextTokenizer:
    """The tokenizer of a target. Raises CheckpointError."""
    _read_target_config(model)
    with _transformers_errors(model):
        return TextTokenizer(AutoTokenizer.from_pretrained(model, local_files_only=True))


def load_settings(model: Path, overrides: Mapping[str, Any], seed: int) -> GenerationSettings:
    """The settings of a target's `generation_config` with `overrides`, read before its weights are loaded.

    Raises:
        CheckpointError: a damaged file.
        TypeError, ValueError: naming a setting that is unknown, wrong or not supported.
    """
    config = _read_target_config(model)
    with _transformers_errors(model):
        if (model / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(model, local_files_only=True)
        else:
            generation = GenerationConfig.from_model_config(config)
    return resolve_settings(generation, overrides, vocab_size=config.get_text_config().vocab_size, seed=seed)


def plan_sampling(model: Path, settings: GenerationSettings, length: int, limit: int) -> SamplingParams:
    """How the tokens after a prompt of `length` tokens are chosen, `limit` of them at most: what the settings do to the logits
    included.

    Raises:
        ValueError: naming settings that `SamplingParams` does not have.
    """
    vocab_size, ends = _read_target_config(model).get_text_config().vocab_size, tuple(settings.stop_tokens)
    call = Call(vocab_size, ends, ends, length, (limit,), (limit,))
    sampling, steps = plan_logits(settings.logits, settings.sampling, [], call)
    if steps:
        off = LogitsSettings()
        on = [field.name for field in fields(off) if getattr(settings.logits, field.name) != getattr(off, field.name)]
        raise ValueError(f"{', '.join(map('`{}`'.format, on))} must be off here: `TransformersGenerator.generate` takes them")
    return sampling


def load_checkpoints(
    model: Path, draft: Path | None, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[TransformersModel, Draft | None]:
    """Target and draft from folders in transformers' layout. The draft may be an EAGLE-3 head, or an MTP layer: an export of
    it, or `model` itself.

    Raises:
        CheckpointError: a file is damaged, lacks a tensor, or does not fit; a missing one is a FileNotFoundError as well.
        TypeError, ValueError: a model that cannot run on these ops.
    """
    # The configurations come first, so that a mistake in them is found before gigabytes are read.
    config, draft_config = _read_target_config(model), None
    head = draft is not None and is_eagle3(draft)
    mtp = draft is not None and not head and holds_mtp(draft, model)
    if draft is not None and not head and not mtp:
        draft_config = _read_config(draft)
    base = _load_model(model, config, device, dtype)
    if draft is None:
        return TransformersModel(base), None
    if head:
        return load_eagle3(draft, base)
    if mtp:
        return load_mtp(draft, base)
    small = _load_model(draft, draft_config, device, dtype)
    return TransformersModel(base), StandaloneDraft(TransformersModel(small))


def _read_target_config(folder: Path) -> PreTrainedConfig:
    if is_eagle3(folder):
        raise CheckpointError(folder, "must be a target, got an EAGLE-3 head, which is a draft")
    return _read_config(folder)


def _read_config(folder: Path) -> PreTrainedConfig:
    """The configuration in a folder. Values that transformers would not look at before the first forward are checked."""
    raw = read_fields(folder / "config.json")
    if (generation := folder / "generation_config.json").is_file():
        # Transformers ignores a damaged file, and then generates to the end of the context.
        ends = read_fields(generation)
        if isinstance(ends.values.get("eos_token_id"), list):
            ends.integers("eos_token_id")
        else:
            ends.integer("eos_token_id", least=None, default=None)
    with _transformers_errors(folder / "config.json"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config()
    # By getattr: transformers maps the names of its models to common ones (`n_embd` of GPT-2 is `hidden_size`).
    names = (*_SIZES, *_EPSILONS, "rope_parameters")
    values = Fields({name: getattr(text, name, None) for name in names}, raw.fail)
    for name in _SIZES:
        values.integer(name, default=None)
    for name in _EPSILONS:
        values.positive(name, None)
    rope = values.inner("rope_parameters", {})
    for name in [name for name, value in rope.values.items() if isinstance(value, dict)]:  # by the type of layer
        rope.inner(name).positive("rope_theta", None)
    rope.positive("rope_theta", None)
    return config


def _load_model(folder: Path, config: Any, device: torch.device | str, dtype: torch.dtype) -> PreTrainedModel:
    options: dict[str, Any] = {"local_files_only": True, "dtype": dtype, "attn_implementation": NAME}
    # Transformers prints a table of missing tensors and wrong shapes; here they become an error.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    _check_stored(folder, files, config)
    weights = files[0] if len(files) == 1 else folder
    if torch.device(device).type == "cuda" and quantization_method(config) == "mxfp4":
        config = read_mxfp4_as_stored(config)
    if quantization_method(config) in STORED:
        try:
            config = read_as_stored(config)
        except ValueError as error:
            raise CheckpointError(folder / "config.json", str(error).removeprefix("read_as_stored: ")) from None
    with _transformers_errors(weights):
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
    model, report = loaded
    for name, got, expected in sorted(report["mismatched_keys"]):
        raise CheckpointError(weights, f"must be of shape {list(expected)}, got {list(got)}", name)
    if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise CheckpointError(weights, f"must hold every tensor of {type(model).__name__}, missing {missing}")
    return model.to(device)


class _Header(NamedTuple):
    """What a safetensors file says of a tensor."""

    file: Path
    kind: str
    shape: list[int]


def _check_stored(folder: Path, files: Sequence[Path], config: Any) -> None:
    """Refuse quantized weights without what they mean: transformers converts the stored numbers all the same."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = None if quantization is None else quantization.get("quant_method")
    if quantization is not None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING and "load_in_8bit" not in quantization:
        raise CheckpointError(folder / "config.json", f"must be a method of transformers, got {method!r}", _METHOD)
    if method not in (None, "fp8", "mxfp4"):
        return
    found: dict[str, _Header] = {}
    for file in (file for file in files if file.suffix == ".safetensors"):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(name)
                    found[name] = _Header(file, part.get_dtype(), part.get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(file, f"must be a safetensors file, got {first_line(error)}") from error
    for name, header in found.items():
        if method == "mxfp4" and name.endswith("_blocks"):
            scale = f"{name.removesuffix('_blocks')}_scales"
            if scale not in found:
                raise CheckpointError(header.file, "must have `_scales` beside it, as a weight in MXFP4", name)
            if header.shape[:-1] != found[scale].shape:
                raise CheckpointError(header.file, f"must be of shape {[*found[scale].shape, 16]}, got {header.shape}", name)
        if method == "mxfp4" and name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" not in found:
            raise CheckpointError(header.file, "must have `_blocks` beside it, as scales of MXFP4", name)
        if method == "mxfp4" or not name.endswith(".weight"):
            continue
        if method is None and header.kind in _INTEGERS:
            raise CheckpointError(
                header.file, f"must be floating-point in a model that is not quantized, got {header.kind}", name
            )
        if header.kind in _FLOAT8:
            _check_scales(name, found, quantization)


def _check_scales(name: str, found: Mapping[str, _Header], quantization: Mapping[str, Any] | None) -> None:
    """Refuse the weight `name` of 8 bits if its scales are not there, or of another shape than its blocks."""
    header, stem = found[name], name.removesuffix("weight")
    scale = next(
        (s for s in (f"{name}_scale_inv", f"{stem}scale", f"{stem}qscale_weight", f"{name}_scale") if s in found), None
    )
    if quantization is None:
        raise CheckpointError(header.file, f"must be of 16 bits in a model that is not quantized, got {header.kind}", name)
    if scale is None:
        raise CheckpointError(header.file, "must have scales beside it, as a weight of 8 bits", name)
    blocks, shape = quantization.get("weight_block_size"), found[scale].shape
    if blocks is not None and len(header.shape) == 2 and math.prod(shape) != 1:
        wanted = [-(-size // block) for size, block in zip(header.shape, blocks, strict=True)]
        if shape != wanted:
            raise CheckpointError(found[scale].file, f"must be of shape {wanted}, got {shape}", scale)


@contextmanager
def _transformers_errors(file: Path) -> Iterator[None]:
    """Names the file in whatever a damaged one makes transformers raise: errors of almost any type."""
    try:
        yield
    except MACHINE_ERRORS:
        raise
    except Exception as error:
        raise CheckpointError(file, f"transformers cannot load it: {first_line(error)}") from error


class TextTokenizer:
    """A tokenizer of transformers with the methods of `spec_ops.models.corpus.ByteTokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def stream_decoder(self) -> StreamDecoder:
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes tokens as they come. Text is held back as long as its last character is incomplete."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = 0

    def push(self, tokens: list[int]) -> str:
        self.tokens += tokens
        # Everything is decoded each time: the text of a token may depend on the one before it.
        text = self.tokenizer.decode(self.tokens)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._show(text)

    def finish(self) -> str:
        return self._show(self.tokenizer.decode(self.tokens))

    def _show(self, text: str) -> str:
        new, self.shown = text[self.shown :], len(text)
        return new
