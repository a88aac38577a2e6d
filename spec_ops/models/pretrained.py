"""The checkpoint of a target and its EAGLE-3 head: three files in one folder.

* `target.safetensors`: the state of `CausalLM`;
* `draft.safetensors`: `Eagle3Draft.own_state_dict()`, with `draft_to_target` as int64. The embedding is the target's;
* `config.json`: version of the format, both `ModelConfig`s, and how the pair was trained.

Weights are stored in bfloat16. `examples/train_tiny.py` writes such a folder, and the package ships one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from spec_ops.models.checkpoint import CheckpointError, check_tensors, open_tensors, read_fields, read_tensors
from spec_ops.models.config import ModelConfig
from spec_ops.models.corpus import ByteTokenizer
from spec_ops.models.drafts import Eagle3Draft, vocabulary_problem
from spec_ops.models.fields import FieldError, Fields
from spec_ops.models.quantized import check_plain
from spec_ops.models.target import CausalLM

FORMAT_VERSION = 1
PRETRAINED = Path(__file__).resolve().parent.parent / "pretrained"
_TARGET, _DRAFT, _CONFIG = "target.safetensors", "draft.safetensors", "config.json"


def save_pair(directory: str | Path, target: CausalLM, draft: Eagle3Draft, metadata: dict[str, Any]) -> None:
    """Write a pair.

    Args:
        directory: created if it is missing; earlier files are replaced.
        target, draft: the pair.
        metadata: JSON values that say how it was trained.

    Raises:
        ValueError: naming a weight that is quantized.
    """
    check_plain("save_pair", "target", target)
    check_plain("save_pair", "draft", draft)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "format_version": FORMAT_VERSION,
        "target": target.config.to_dict(),
        "draft": draft.config.to_dict(),
        "training": metadata,
    }
    # Not `save_file`, which gives its files mode 600.
    (directory / _TARGET).write_bytes(save(_stored(target.state_dict())))
    (directory / _DRAFT).write_bytes(save(_stored(draft.own_state_dict())))
    (directory / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_pair(
    path: str | Path | None = None, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[CausalLM, Eagle3Draft, ByteTokenizer]:
    """Load a target, its EAGLE-3 head and the tokenizer.

    Args:
        path: folder that `save_pair` wrote; default: the pair that the package ships.
        device: of both models.
        dtype: of both models.

    Returns:
        `(target, draft, tokenizer)`, in evaluation mode with gradients off. The head shares the target's embedding.

    Raises:
        CheckpointError: a file is damaged, of another format version, or does not fit the configuration; a missing one is a
            FileNotFoundError as well.
    """
    target, draft, (target_file, draft_file) = pair_on_meta(path)
    target_state, draft_state = read_tensors(target_file, device), read_tensors(draft_file, device)
    check_tensors(target_file, target.state_dict(), target_state)
    check_tensors(draft_file, draft.own_state_dict(), draft_state)
    target.load_state_dict(_converted(target_state, dtype), assign=True)
    # Not strict, because the embedding is the target's.
    draft.load_state_dict(_converted(draft_state, dtype), strict=False, assign=True)
    return target.eval().requires_grad_(False), draft.eval().requires_grad_(False), ByteTokenizer()


def pair_on_meta(path: str | Path | None = None) -> tuple[CausalLM, Eagle3Draft, tuple[Path, Path]]:
    """The pair of a folder as its configuration says, on the meta device, and the files of its weights.

    Nothing is initialized there: memory is not taken twice, and the random state is not touched.

    Raises:
        CheckpointError: see `load_pair`.
    """
    directory = PRETRAINED if path is None else Path(path)
    config = read_fields(directory / _CONFIG)
    if (version := config.integer("format_version", 0)) != FORMAT_VERSION:
        raise config.error("format_version", f"must be {FORMAT_VERSION} for this package, got {version}")
    target_config, draft_config = _model_config(config, "target"), _model_config(config, "draft")
    if target_config.vocab_size < ByteTokenizer.vocab_size:
        expected = f"must be at least the tokenizer's {ByteTokenizer.vocab_size}"
        raise config.error("target.vocab_size", f"{expected}, got {target_config.vocab_size}")
    if "draft_to_target" not in (stored := open_tensors(directory / _DRAFT)):
        raise CheckpointError(directory / _DRAFT, "is missing", "draft_to_target")
    reduced = stored["draft_to_target"][:]
    if problem := vocabulary_problem(reduced, target_config.vocab_size):
        raise CheckpointError(directory / _DRAFT, problem, "draft_to_target")
    with torch.device("meta"):
        target = CausalLM(target_config)
        try:
            draft = Eagle3Draft(draft_config, target, reduced.to("meta"))
        except ValueError as error:
            raise config.error("draft", f"does not fit the target: {error}") from error
    return target, draft, (directory / _TARGET, directory / _DRAFT)


def _model_config(config: Fields, name: str) -> ModelConfig:
    inner = config.inner(name)
    try:
        return ModelConfig.from_dict(inner.values)
    except FieldError as error:
        raise inner.error(error.field, error.problem) from error


def _converted(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


def _stored(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        # Copies: the parts of a packed weight share memory, which safetensors refuses.
        name: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else value.dtype, copy=True).contiguous()
        for name, value in state.items()
    }
