"""What `python -m spec_ops generate` continues, with which models and by which settings; it is all read before any decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from spec_ops.cli.options import refusing
from spec_ops.decoding import SamplingParams
from spec_ops.decoding.batch import StopWhen
from spec_ops.models.drafts import Draft
from spec_ops.models.pretrained import load_pair
from spec_ops.models.target import Target
from spec_ops.parallel import TensorParallel
from spec_ops.parallel import load_pair as load_shares

MAX_NEW_TOKENS = 384  # where nobody says


@dataclass
class Text:
    """Models and one request. `stop_when()`: the hook of one run, whose time starts with the call."""

    target: Target
    draft: Draft | None
    tokenizer: Any
    tokens: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    stop_tokens: list[int]
    stop_when: Callable[[], StopWhen | None]


def read_prompt(text: str, file: Path | None) -> str:
    """The text to continue. An argument's bytes that are not UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    option = "--prompt" if file is None else "--prompt-file"
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        text.encode("utf-8")
    except (UnicodeError, OSError) as error:
        raise typer.BadParameter(f"must be text in UTF-8: {error}", param_hint=option) from error
    return text


def from_pair(
    prompt: str,
    pair: Path | None,
    sampling: SamplingParams,
    max_new_tokens: int | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ranks: TensorParallel | None = None,
) -> Text:
    """Of the pair in a folder, or the shipped one; a share of it if there are `ranks`."""
    with refusing("--pair"):
        if ranks is None:
            target, draft, tokenizer = load_pair(pair, device=device, dtype=dtype)
        else:
            target, draft, tokenizer = load_shares(ranks, pair, device=device, dtype=dtype)
    limit, stops = max_new_tokens or MAX_NEW_TOKENS, list(tokenizer.stop_tokens)
    return Text(target, draft, tokenizer, tokenizer.encode(prompt), sampling, limit, stops, lambda: None)


def from_checkpoints(
    prompt: str, model: Path, draft: Path | None, overrides: dict[str, Any], seed: int, device: torch.device, dtype: torch.dtype
) -> Text:
    """From folders in transformers' layout. `overrides`: settings in the place of those of the target's generation_config."""
    with refusing("--model / --draft"):
        from spec_ops.integrations.transformers import loading, stopping
        from spec_ops.integrations.transformers.prompts import Prompts

        tokenizer = loading.load_tokenizer(model)
    if not (tokens := tokenizer.encode(prompt)):
        raise typer.BadParameter("must hold at least one token for this model", param_hint="--prompt")
    with refusing("--model / --set"):
        settings = loading.load_settings(model, overrides, seed)
        if settings.num_return_sequences != 1:
            raise ValueError(f"`num_return_sequences` must be 1 here, got {settings.num_return_sequences}")
        limited = settings.max_new_tokens is not None or settings.max_length is not None
        limit = settings.new_tokens(len(tokens)) if limited else MAX_NEW_TOKENS
        if not isinstance(limit, int):
            raise ValueError(f"`max_new_tokens` must be one integer here, got {limit}")
        sampling = loading.plan_sampling(model, settings, len(tokens), limit)
        prompts = Prompts(torch.tensor([tokens], device="cpu"), [tokens], settings.padding)

        def stop_when() -> StopWhen | None:
            return stopping.stop_when(settings, [], tokenizer.tokenizer, prompts)

        stop_when()  # what is wrong with a stop string is found before the weights are read
    with refusing("--model / --draft"):
        target, drafting = loading.load_checkpoints(model, draft, device=device, dtype=dtype)
    return Text(target, drafting, tokenizer, tokens, sampling, limit, settings.stop_tokens, stop_when)
