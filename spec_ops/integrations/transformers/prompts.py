"""The prompts of a call: `input_ids` and `attention_mask` of transformers as rows without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spec_ops._numbers import is_integer
from spec_ops.integrations.transformers.settings import GenerationSettings


@dataclass(frozen=True)
class Prompts:
    """The prompts of a call.

    Attributes:
        ids: `[bs, length]` int64, as it came; lists of different lengths are padded on the left.
        rows: token ids of each row, without padding.
        padding: the id that fills up shorter rows.
    """

    ids: torch.Tensor
    rows: list[list[int]]
    padding: int


def read_prompts(input_ids: Any, attention_mask: Any, settings: GenerationSettings) -> Prompts:
    """Check the prompts, and repeat each `settings.num_return_sequences` times.

    Args:
        input_ids: `[bs, length]` integers: a tensor, an array, or a list of token id lists, which may differ in length.
        attention_mask: of the same shape, non-zero for real tokens. Without one, ids that equal `settings.pad_token_id` are
            padding, if it is set and no end token; lists of different lengths hold no padding.
        settings: of the call.

    Raises:
        ValueError: naming the argument.
    """
    ids, lengths = _matrix("input_ids", input_ids, settings.padding)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"generate: `input_ids` must be integers of shape [bs, length], got {ids.dtype}")
    ids = ids.long()
    ragged = lengths is not None and len(set(lengths)) > 1
    if attention_mask is not None:
        real, mask_lengths = _matrix("attention_mask", attention_mask, 0)
        if real.shape != ids.shape or (ragged and mask_lengths != lengths):
            raise ValueError(f"generate: `attention_mask` must be of shape {list(ids.shape)}, got {list(real.shape)}")
        real = real.bool().cpu()
    elif ragged:
        columns = torch.arange(ids.shape[1], device="cpu")
        real = columns >= ids.shape[1] - torch.tensor(lengths, device="cpu")[:, None]
    else:
        real = _inferred(ids.cpu(), settings)
    rows = _rows(ids.cpu(), real)
    count = settings.num_return_sequences
    return Prompts(ids.repeat_interleave(count, 0), [row for row in rows for _ in range(count)], settings.padding)


def _matrix(name: str, values: Any, padding: int) -> tuple[torch.Tensor, list[int] | None]:
    """`values` as a matrix, and the lengths of its rows if it was a list."""
    wanted = f"generate: `{name}` must be of shape [bs, length]"
    if isinstance(values, Mapping):
        raise ValueError(f"{wanted}, got a mapping with keys {list(values)}: pass its entries, `generate(**inputs)`")
    if isinstance(values, str) or (isinstance(values, (list, tuple)) and any(isinstance(row, str) for row in values)):
        raise ValueError(f"{wanted}, got text: encode it first, `tokenizer(text, return_tensors='pt')`")
    if isinstance(values, np.ndarray):
        # A copy, since torch takes neither swapped bytes nor negative strides, not even of a dimension of size 1.
        native = values.dtype.newbyteorder("=")
        values = torch.from_numpy(np.array(values, native, order="C")) if values.dtype.kind in "biufc" else values.tolist()
    if isinstance(values, torch.Tensor):
        if values.dim() != 2:
            hint = f": pass `{name}[None]` for one prompt" if values.dim() == 1 else ""
            raise ValueError(f"{wanted}, got {list(values.shape)}{hint}")
        if values.numel() == 0:
            raise ValueError(f"{wanted} with at least one row and one token, got {list(values.shape)}")
        return values, None
    if isinstance(values, (list, tuple)) and values and all(is_integer(value) for value in values):
        raise ValueError(f"{wanted}, got one flat list: pass `[{name}]` for one prompt")
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"{wanted}, got {values!r}")
    rows = [row.tolist() if isinstance(row, (torch.Tensor, np.ndarray)) else row for row in values]
    for i, row in enumerate(rows):
        if not isinstance(row, Sequence) or not row or not all(is_integer(value) for value in row):
            raise ValueError(f"generate: `{name}[{i}]` must be a list of integers, at least one, got {row!r}")
    longest = max(map(len, rows))
    padded = [[padding] * (longest - len(row)) + [int(value) for value in row] for row in rows]
    return torch.tensor(padded, device="cpu"), [len(row) for row in rows]


def _inferred(ids: torch.Tensor, settings: GenerationSettings) -> torch.Tensor:
    """Which tokens are real, as `generate` infers it without a mask."""
    pad = settings.pad_token_id
    if pad is None or pad in settings.stop_tokens:
        return torch.ones_like(ids, dtype=torch.bool)
    return ids != pad


def _rows(ids: torch.Tensor, real: torch.Tensor) -> list[list[int]]:
    runs = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]  # how often real tokens begin
    if bool((runs != 1).any()):
        row = int((runs != 1).nonzero()[0])
        raise ValueError(
            f"generate: `attention_mask` must show one run of tokens per row, padded on the left or the right; row {row} has "
            f"{int(runs[row])}"
        )
    return [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]
