"""Cooperative launches, which CUDA refuses where not all programs can be resident at once: in a green context, or for an MPS
client, that has a part of the multiprocessors. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from spec_ops.backends.capture import current_context

_Result = TypeVar("_Result")
_refused: set[tuple[int, Hashable]] = set()


def resident_or_none(grid: Hashable, start: Callable[[], _Result]) -> _Result | None:
    """What `start` gives, or None if CUDA refuses its grid as too large, now or at an earlier call in this context.

    Refusals are remembered, since a failed launch takes its time, and may end a capture.

    Args:
        grid: what the answer depends on, besides the context: kernel and size.
    """
    if _refused and (current_context(), grid) in _refused:
        return None
    try:
        return start()
    except RuntimeError as error:
        if not too_large_a_grid(error):
            raise
        _refused.add((current_context(), grid))
        return None


def too_large_a_grid(error: RuntimeError) -> bool:
    """Whether CUDA refused a launch because its programs cannot all be resident at once."""
    return "too many blocks in cooperative launch" in str(error)
