"""Functions of single values on the CPU whose bits do not depend on where in a tensor a value stands.

torch's loops compute most values in vectors, and those that are left at the end of a tensor, or of a thread's share, one by
one, with another `exp`. Pieces of a size that vectors divide, and that one thread computes, have no such values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VECTOR = 256  # elements that every width of a vector loop divides
PIECE = 16_384  # elements: less than what torch divides among threads


def in_pieces(function: Callable[..., torch.Tensor], *operands: Any) -> torch.Tensor:
    """`function` of operands that broadcast, elementwise, on pieces of them, flattened, the last one filled up. Numbers and
    tensors of no dimension are handed over as they are."""
    shapes = {value.shape for value in operands if isinstance(value, torch.Tensor)}
    shape = next(iter(shapes)) if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    count = shape.numel()
    if not count:
        return function(*operands)
    padded = -(-count // VECTOR) * VECTOR

    def flat(value: Any) -> Any:
        if not _is_array(value):
            return value
        values = value.expand(shape).reshape(-1)
        if count == padded:
            return values
        whole = value.new_ones(padded)
        whole[:count] = values
        return whole

    whole = [flat(value) for value in operands]
    if padded <= PIECE:
        return function(*whole)[:count].reshape(shape)
    results = []
    for start in range(0, padded, PIECE):
        results.append(function(*(value[start : start + PIECE] if _is_array(value) else value for value in whole)))
    return torch.cat(results)[:count].reshape(shape)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
