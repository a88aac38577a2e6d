"""Cases of `sanitize_kernels.py` for the attention kernels.

Page ids past a request's pages lie outside the pool, so that reading through one is an invalid address.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import spec_ops

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LENS = [0, 1, 0, 700]  # and two around a page's end: requests without keys, of one token, and one that many programs share
ALONE = 2500  # one request for all programs: too many splits for partial results by strips (`hopper_combine.py`)
Q_LENS = [0, 1, 3, 40, 2, 5]  # of a ragged call
SPLIT = ("split_kv_attention_kernel",)
HOPPER = ("mla_hopper_attention",)
HOPPER_FEW = ("mla_hopper_few_attention",)
GQA_HOPPER = ("gqa_hopper_attention",)
RAGGED = ("ragged_attention_kernel",)
DETERMINISTIC = ("deterministic_attention_kernel", "deterministic_combine_kernel")


class Shape(NamedTuple):
    """Heads, widths of keys and values, page size, queries (0: ragged), whether a tree, cache, window, whether one request."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    page_size: int
    q_len: int
    tree: bool = False
    kv_dtype: torch.dtype = BF16
    window: int = -1
    alone: bool = False

    def label(self) -> str:
        queries = f"{self.q_len}{' in a tree' if self.tree else ''}" if self.q_len else "ragged"
        cache = "" if self.kv_dtype == BF16 else ", fp8"
        alone = ", one request" if self.alone else ""
        return f"{self.kind} {self.heads}/{self.kv_heads or 1} of {self.head_dim}, queries {queries}{cache}{alone}"


CASES = [
    (Shape("mha", 8, 2, 128, 128, 64, 1), SPLIT),
    (Shape("mha", 8, 2, 128, 128, 64, 16, tree=True), SPLIT),
    (Shape("mha", 8, 2, 64, 64, 16, 4, tree=True, window=20), SPLIT),
    (Shape("mha", 8, 2, 256, 256, 32, 2), SPLIT),
    (Shape("mha", 8, 2, 192, 128, 1, 2), SPLIT),
    (Shape("mha", 8, 2, 128, 128, 64, 4, kv_dtype=FP8), SPLIT),
    (Shape("mha", 8, 2, 128, 128, 64, 16, kv_dtype=FP8), SPLIT),
    (Shape("mha", 16, 2, 64, 64, 64, 9), GQA_HOPPER),
    (Shape("mha", 16, 2, 64, 64, 128, 16, tree=True), GQA_HOPPER),
    (Shape("mha", 16, 2, 64, 64, 64, 16, alone=True), GQA_HOPPER),
    (Shape("mha", 8, 2, 128, 128, 64, 0), RAGGED),
    (Shape("mha", 8, 2, 64, 64, 16, 0, window=20), RAGGED),
    (Shape("mla", 16, 0, 576, 512, 64, 1), HOPPER_FEW),
    (Shape("mla", 4, 0, 576, 512, 128, 3, tree=True), HOPPER_FEW),
    (Shape("mla", 16, 0, 576, 512, 64, 3), HOPPER),
    (Shape("mla", 128, 0, 576, 512, 64, 4), HOPPER),
    (Shape("mla", 16, 0, 320, 256, 16, 4, tree=True), SPLIT),
    (Shape("mla", 16, 0, 576, 512, 64, 2, kv_dtype=FP8), SPLIT),
    (Shape("mla", 16, 0, 576, 512, 64, 0), RAGGED),
]
DETERMINISTIC_CASES = [
    (Shape("mha", 8, 2, 128, 128, 64, 4), DETERMINISTIC),
    (Shape("mha", 8, 2, 64, 64, 16, 16, tree=True), DETERMINISTIC),
    (Shape("mha", 8, 2, 128, 128, 64, 16, tree=True, window=20), DETERMINISTIC),
    (Shape("mla", 16, 0, 576, 512, 64, 2), DETERMINISTIC),
    (Shape("mla", 16, 0, 576, 512, 64, 4, tree=True), DETERMINISTIC),
    (Shape("mha", 8, 2, 64, 64, 16, 0), ("deterministic_extend_kernel",)),
]
PIECES_CASES = [
    (Shape("mla", 16, 0, 576, 512, 64, 4), HOPPER),
    (Shape("mla", 16, 0, 576, 512, 64, 7, tree=True), ("gather_paths_kernel", *HOPPER)),
]


def arguments(shape: Shape) -> dict[str, Any]:
    """Of the op, on CPU."""
    kind, heads, kv_heads, head_dim, v_dim, page_size, q_len, tree, kv_dtype, window, alone = shape
    lens = [ALONE] if alone else [*LENS[:2], page_size - 1 + q_len, page_size + 1, *LENS[2:]]
    live = [-(-length // page_size) for length in lens]
    tables = torch.full((len(lens), max(live)), 2**30, dtype=torch.int32)
    ids = iter(torch.randperm(sum(live)).tolist())
    for row, count in zip(tables, live, strict=True):
        row[:count] = torch.tensor([next(ids) for _ in range(count)], dtype=torch.int32)

    def cache(*row: int) -> torch.Tensor:
        return torch.randn(sum(live), page_size, *row).to(kv_dtype)

    rows = (len(lens), q_len) if q_len else (sum(Q_LENS) + 3,)
    a = {
        "q": torch.randn(*rows, heads, head_dim).to(BF16),
        "block_tables": tables,
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "scale": head_dim**-0.5,
        "window_left": window,
    }
    if kind == "mha":
        a |= {"k_cache": cache(kv_heads, head_dim), "v_cache": cache(kv_heads, v_dim)}
        a |= {"k_scale": 1.5, "v_scale": 0.5} if kv_dtype == FP8 else {}
    else:
        a |= {"kv_cache": cache(head_dim), "kv_lora_rank": v_dim} | ({"kv_scale": 1.5} if kv_dtype == FP8 else {})
    if not q_len:
        starts = torch.tensor([0, *Q_LENS]).cumsum(0).to(torch.int32)
        a |= {"q_indptr": starts, "max_q_len": max(Q_LENS)}
    elif tree:  # siblings in pairs
        parents = [max(0, (i - 1) // 2) for i in range(q_len)]
        words: list[int] = []
        for i, parent in enumerate(parents):
            words.append((1 << i) | (words[parent] if i else 0))
        a |= {"tree_mask": torch.tensor([words] * len(lens)), "mask_len": q_len}
    return a


def check(shape: Shape, backend: str, device: str) -> None:
    a = arguments(shape)
    op = getattr(spec_ops, f"{shape.kind}_{'target_verify' if shape.q_len else 'extend'}")
    expected = op(**a, backend="reference").float()
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in a.items()}
    got = op(**given, backend=backend).float().cpu()
    # Weights and results are rounded to bfloat16 once each: half of 2^-7 of values up to 5, twice. A NaN fails too.
    error = (got - expected).abs().max().item()
    assert error <= 0.05, f"off by {error}"


def cases() -> Iterator[tuple[str, tuple[str, ...], Callable[[str], None]]]:
    """Name, kernels launched on Hopper, and what runs the case on a device."""
    named = ("triton", CASES), ("triton-deterministic", DETERMINISTIC_CASES), ("triton-mla-pieces", PIECES_CASES)
    for backend, shapes in named:
        for shape, kernels in shapes:
            yield f"{backend} attention, {shape.label()}", kernels, functools.partial(check, shape, backend)
