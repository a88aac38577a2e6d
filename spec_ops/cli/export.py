"""`python -m spec_ops export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from spec_ops.cli.options import DType, PairPath, console, parse_dtype, refusing


def export(
    directory: Annotated[Path, typer.Argument(file_okay=False, help="Gets the folders `target` and `draft`.")],
    pair: PairPath = None,
    dtype: DType = "bfloat16",
    context: Annotated[int, typer.Option(min=1, help="Tokens of the longest text that the pair was trained for.")] = 1024,
) -> None:
    """Write a pair as checkpoints that transformers, SGLang and vLLM load: a Llama with its tokenizer, and an EAGLE-3 head."""
    from spec_ops.models.huggingface import export_pair
    from spec_ops.models.pretrained import load_pair

    weights: torch.dtype = parse_dtype(dtype)
    with refusing("--pair"):
        loaded = load_pair(pair, dtype=weights)
        try:
            target, draft = export_pair(directory, *loaded, context=context)
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="DIRECTORY") from error
    console.print(f"target: {target}\ndraft:  {draft}", markup=False, soft_wrap=True)
