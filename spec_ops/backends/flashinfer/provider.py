"""What all calls into FlashInfer share: its buffers, what a release accepts, and queries for fp8 caches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from spec_ops.backends.workspace import workspace

SCRATCH_BYTES = 128 << 20  # what FlashInfer's own examples and every engine give it
COUNTER_BYTES = 1 << 20  # trtllm-gen's semaphores
COUNTERS = COUNTER_BYTES // 4  # one per (request, query head)
COUNTERS_IN_SCRATCH = (8 << 20) // 4  # releases before 0.7 put theirs into the first 8 MiB of the scratch buffer


def scratch(use: str, device: torch.device) -> torch.Tensor:
    return workspace(f"flashinfer {use}", device, SCRATCH_BYTES)


@functools.cache
def accepts(function: Callable, parameter: str) -> bool:
    """Whether this release's `function` has `parameter`."""
    return parameter in inspect.signature(function).parameters


def counters(function: Callable, device: torch.device, requests: int, heads: int) -> dict[str, Any]:
    """trtllm-gen's semaphores as an argument: without ours, every call allocates and zeroes some. Releases before 0.7 have no
    such argument.

    Raises:
        ValueError: more requests times query heads than there are semaphores.
    """
    ours = accepts(function, "multi_ctas_kv_counter_buffer")
    limit = COUNTERS if ours else COUNTERS_IN_SCRATCH
    if requests * heads > limit:
        raise ValueError(
            f"flashinfer-trtllm: `q` must have at most {limit} requests x heads, got {requests} x {heads}: trtllm-gen has a "
            "semaphore for each; split the batch"
        )
    if not ours:
        return {}
    return {"multi_ctas_kv_counter_buffer": workspace("flashinfer counters", device, COUNTER_BYTES)}
