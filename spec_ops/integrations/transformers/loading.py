"""Local checkpoints and tokenizers for the command line. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from spec_ops.integrations.transformers.attention import NAME
from spec_ops.integrations.transformers.eagle3 import is_eagle3, load_eagle3
from spec_ops.integrations.transformers.generate import token_ids
from spec_ops.integrations.transformers.model import TransformersModel
from spec_ops.models.drafts import Draft, StandaloneDraft


def load_checkpoints(
    model: Path, draft: Path | None, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[TransformersModel, Draft | None, TextTokenizer]:
    """Target, draft and tokenizer from folders in transformers' layout; the draft may be an EAGLE-3 head.

    Raises:
        FileNotFoundError: a folder is missing. ValueError, OSError: a checkpoint that does not load or does not fit.
    """
    base = _load_model(model, device, dtype)
    target: TransformersModel | None = None
    head: Draft | None = None
    if draft is not None and is_eagle3(_existing(draft)):
        target, head = load_eagle3(draft, base)
    elif draft is not None:
        head = StandaloneDraft(TransformersModel(_load_model(draft, device, dtype)))
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return target or TransformersModel(base), head, TextTokenizer(tokenizer, token_ids(base.generation_config.eos_token_id))


def _existing(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no such checkpoint: {folder / 'config.json'}")
    return folder


def _load_model(folder: Path, device: torch.device | str, dtype: torch.dtype) -> PreTrainedModel:
    options: dict[str, Any] = {"local_files_only": True, "dtype": dtype, "attn_implementation": NAME}
    model: Any = AutoModelForCausalLM.from_pretrained(_existing(folder), **options)
    return model.to(device)


class TextTokenizer:
    """A tokenizer of transformers with the methods of `spec_ops.models.corpus.ByteTokenizer`."""

    def __init__(self, tokenizer: Any, stop_tokens: list[int]) -> None:
        self.tokenizer, self.stop_tokens = tokenizer, stop_tokens

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def stream_decoder(self) -> StreamDecoder:
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes tokens as they come; text is held back while its last character is incomplete."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = 0

    def push(self, tokens: list[int]) -> str:
        self.tokens += tokens
        # All of it each time: what a token reads as may depend on the one before it.
        text = self.tokenizer.decode(self.tokens)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._show(text)

    def finish(self) -> str:
        return self._show(self.tokenizer.decode(self.tokens))

    def _show(self, text: str) -> str:
        new, self.shown = text[self.shown :], len(text)
        return new
