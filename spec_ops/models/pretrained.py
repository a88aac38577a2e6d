"""The checkpoint of a target and its EAGLE-3 head: three files in one directory.

* `target.safetensors`: state of `CausalLM`;
* `draft.safetensors`: `Eagle3Draft.own_state_dict()` (the embedding is the target's), with `draft_to_target` as int64;
* `config.json`: format version, both `ModelConfig`s, and how the pair was trained.

Weights are stored in bfloat16. `examples/train_tiny.py` writes such a directory; the package ships one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from spec_ops.models.config import ModelConfig
from spec_ops.models.corpus import ByteTokenizer
from spec_ops.models.drafts import Eagle3Draft
from spec_ops.models.target import CausalLM

FORMAT_VERSION = 1
PRETRAINED = Path(__file__).resolve().parent.parent / "pretrained"
_TARGET, _DRAFT, _CONFIG = "target.safetensors", "draft.safetensors", "config.json"


def save_pair(directory: str | Path, target: CausalLM, draft: Eagle3Draft, metadata: dict[str, Any]) -> None:
    """Write the pair to `directory` (created if missing, earlier files replaced). `metadata`: JSON values on the training."""
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
    """Target, EAGLE-3 head and tokenizer from the directory `path` (default: the pair shipped with the package).

    Both models come in evaluation mode with gradients off. The head shares the target's embedding module.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, of another format version, or does not fit the configuration.
    """
    directory = PRETRAINED if path is None else Path(path)
    config_path = directory / _CONFIG
    try:
        config = json.loads(_existing(config_path).read_text(encoding="utf-8"))
        if config.get("format_version") != FORMAT_VERSION:
            found = config.get("format_version")
            raise ValueError(f"format version {found}, this package reads {FORMAT_VERSION}")
        target_config, draft_config = ModelConfig.from_dict(config["target"]), ModelConfig.from_dict(config["draft"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"load_pair: {config_path}: {type(error).__name__}: {error}") from error

    target_state = _read(directory / _TARGET, device, dtype)
    draft_state = _read(directory / _DRAFT, device, dtype)
    if "draft_to_target" not in draft_state:
        raise ValueError(f"load_pair: {directory / _DRAFT}: missing tensors ['draft_to_target']")
    # On the meta device nothing is initialized: no memory is taken twice and the random state stays as it is.
    with torch.device("meta"):
        target = CausalLM(target_config)
        draft = Eagle3Draft(draft_config, target, draft_state["draft_to_target"].to("meta"))
    _check(directory / _TARGET, target.state_dict(), target_state)
    _check(directory / _DRAFT, draft.own_state_dict(), draft_state)
    target.load_state_dict(target_state, assign=True)
    draft.load_state_dict(draft_state, strict=False, assign=True)  # not strict: the embedding is the target's
    return target.eval().requires_grad_(False), draft.eval().requires_grad_(False), ByteTokenizer()


def _stored(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        # Copies: the parts of a packed weight share memory, which safetensors refuses.
        name: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else value.dtype, copy=True).contiguous()
        for name, value in state.items()
    }


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"load_pair: no such file: {path}")
    return path


def _read(path: Path, device: torch.device | str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    try:
        state = load_file(_existing(path), device=str(device))
    except SafetensorError as error:
        raise ValueError(f"load_pair: {path}: {error}") from error
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


def _check(path: Path, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"load_pair: {path}: missing tensors {missing}")
    if unknown := sorted(found.keys() - expected.keys()):
        raise ValueError(f"load_pair: {path}: unknown tensors {unknown}")
    for name, value in expected.items():
        if found[name].shape != value.shape:
            raise ValueError(f"load_pair: {path}: `{name}` is {list(found[name].shape)}, expected {list(value.shape)}")
