"""Appends in which one dimension of the rows or caches reaches over more than 2^31 elements: interpreter and GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.ops.test_attention import spread

# By position in the op's schema, with the number of dimensions of any stride: a cache's last has stride 1.
STRIDED = {
    "append_kv": {0: 3, 1: 3, 2: 3, 3: 3},
    "append_mla_kv": {0: 2, 1: 2, 2: 2},
    "rope_append_kv": {0: 3, 1: 3, 2: 3, 3: 1, 4: 1, 5: 3, 6: 3},
}


def arguments(op: str, device: str) -> list[Any]:
    """Three rows and caches of three pages, in float16."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).half().to(device)

    slots = torch.tensor([11, 0, 6], dtype=torch.int32, device=device)
    if op == "append_mla_kv":
        return [normal(3, 4, 24), normal(3, 16), normal(3, 8), slots, 1.0]
    caches, rows = [normal(3, 4, 4, 16) for _ in range(2)], [normal(3, 4, 16) for _ in range(2)]
    if op == "append_kv":
        return [*caches, *rows, slots, 1.0, 1.0]
    angles = [normal(3, 7) for _ in range(2)]  # 2 of 16 dimensions do not rotate
    return [normal(3, 8, 16), *rows, *angles, *caches, slots, 1.0, 1.0, None, None, 1e-6]


def check(op: str, run: Callable, device: str) -> None:
    """`run` computes the same, and writes the same, wherever a dimension of one tensor reaches."""
    args = arguments(op, device)

    def result(position: int | None = None, dim: int = 0) -> list[torch.Tensor]:
        given = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        if position is not None:
            # The last dimension further: a kernel's index within half of the heads' 16 numbers is 6 at most.
            given[position] = spread(given[position], dim, 2**31 if dim < 2 else 5 * 2**30)
        out = run(*given)
        return [t.clone(memory_format=torch.contiguous_format) for t in (*given, out) if isinstance(t, torch.Tensor)]

    expected = result()
    before = [arg for arg in args if isinstance(arg, torch.Tensor)]
    assert not all(map(torch.equal, before, expected))
    for position, dims in STRIDED[op].items():
        for dim in range(dims):
            found = result(position, dim)
            same = [torch.equal(got, wanted) for got, wanted in zip(found, expected, strict=True)]
            assert all(same), (op, position, dim, same)
