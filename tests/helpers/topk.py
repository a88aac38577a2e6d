"""Rows of logits, and what their likeliest tokens are: `torch.sort`, stable."""

from __future__ import annotations

from collections.abc import Callable

import torch

import spec_ops

SCORES = ("log_softmax", "softmax", "none")


def rows_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Some of which are equal, in 16 bits many."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 4).to(dtype)


def check_topk(logits: torch.Tensor, k: int, scores: str, call: Callable | None = None) -> None:
    """Compares with float64; ids are exact."""
    values, ids = (spec_ops.topk_logits if call is None else call)(logits, k, scores=scores)
    exact = logits.double().cpu()  # where torch sorts a negative NaN as any other
    want = exact.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    assert ids.dtype == torch.int64
    assert values.dtype == torch.float32
    assert ids.is_contiguous()
    assert values.is_contiguous()
    assert torch.equal(ids.cpu(), want)
    if scores != "none":
        exact = torch.log_softmax(exact, -1) if scores == "log_softmax" else torch.softmax(exact, -1)
    torch.testing.assert_close(values.double().cpu(), exact.gather(-1, want), rtol=1e-5, atol=1e-6, equal_nan=True)
