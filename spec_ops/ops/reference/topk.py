"""Reference of the likeliest tokens: a stable sort."""

from __future__ import annotations

import torch


def topk_logits(logits, k: int, scores: str, dtype: torch.dtype):
    exact = logits.float()
    ids = exact.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    ids = ids.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps the strides of no rows
    if scores != "none":
        exact = torch.log_softmax(exact, -1) if scores == "log_softmax" else torch.softmax(exact, -1)
    return exact.gather(-1, ids).to(dtype), ids
