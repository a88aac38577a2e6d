"""Runs every attention kernel once or twice on tiny inputs, for compute-sanitizer:

    python benchmarks/sanitize_attention.py  # first: compiles the kernels
    compute-sanitizer --tool memcheck python benchmarks/sanitize_attention.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize_attention.py

Page ids past a request's pages lie outside the pool, so that reading through one is an invalid address. Results are compared
with the reference, and a NaN or a wrong one fails the run. Allocations are exact: PYTORCH_NO_CUDA_MEMORY_CACHING is set.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

import spec_ops

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# kind, query heads, KV heads, widths of keys and values, page size, queries (0: ragged), tree, cache's dtype, window
CASES = [
    ("mha", 8, 2, 128, 128, 64, 1, False, BF16, -1),
    ("mha", 8, 2, 128, 128, 64, 16, True, BF16, -1),
    ("mha", 8, 2, 64, 64, 16, 4, True, BF16, 20),
    ("mha", 8, 2, 256, 256, 32, 2, False, BF16, -1),
    ("mha", 8, 2, 192, 128, 1, 2, False, BF16, -1),
    ("mha", 8, 2, 128, 128, 64, 4, False, FP8, -1),
    ("mha", 8, 2, 128, 128, 64, 0, False, BF16, -1),
    ("mha", 8, 2, 64, 64, 16, 0, False, BF16, 20),
    ("mla", 16, 0, 576, 512, 64, 1, False, BF16, -1),
    ("mla", 128, 0, 576, 512, 64, 4, False, BF16, -1),
    ("mla", 16, 0, 320, 256, 16, 4, True, BF16, -1),
    ("mla", 16, 0, 576, 512, 64, 2, False, FP8, -1),
    ("mla", 16, 0, 576, 512, 64, 0, False, BF16, -1),
]


def arguments(kind, heads, kv_heads, head_dim, v_dim, page_size, q_len, tree, kv_dtype, window) -> tuple[str, dict]:
    """Requests without keys, of one token, around a page's end, and one that many programs share."""
    lens = [0, 1, page_size - 1 + q_len, page_size + 1, 0, 700]
    live = [-(-length // page_size) for length in lens]
    tables = torch.full((len(lens), max(live)), 2**30, dtype=torch.int32)
    ids = iter(torch.randperm(sum(live)).tolist())
    for row, count in zip(tables, live, strict=True):
        row[:count] = torch.tensor([next(ids) for _ in range(count)], dtype=torch.int32)

    def cache(*row: int) -> torch.Tensor:
        return torch.randn(sum(live), page_size, *row, device="cuda").to(kv_dtype)

    q_lens = [0, 1, 3, 40, 2, 5]
    rows = (len(lens), q_len) if q_len else (sum(q_lens) + 3,)
    a = {
        "q": torch.randn(*rows, heads, head_dim, device="cuda").to(BF16),
        "block_tables": tables.cuda(),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device="cuda"),
        "scale": head_dim**-0.5,
        "window_left": window,
    }
    if kind == "mha":
        a |= {"k_cache": cache(kv_heads, head_dim), "v_cache": cache(kv_heads, v_dim)}
        a |= {"k_scale": 1.5, "v_scale": 0.5} if kv_dtype == FP8 else {}
    else:
        a |= {"kv_cache": cache(head_dim), "kv_lora_rank": v_dim} | ({"kv_scale": 1.5} if kv_dtype == FP8 else {})
    if not q_len:
        starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
        a |= {"q_indptr": starts.cuda(), "max_q_len": max(q_lens)}
    elif tree:  # siblings in pairs
        parents = [max(0, (i - 1) // 2) for i in range(q_len)]
        words: list[int] = []
        for i, parent in enumerate(parents):
            words.append((1 << i) | (words[parent] if i else 0))
        a |= {"tree_mask": torch.tensor([words] * len(lens), device="cuda"), "mask_len": q_len}
    return f"{kind}_{'target_verify' if q_len else 'extend'}", a


def main() -> None:
    torch.manual_seed(0)
    for case in CASES:
        name, a = arguments(*case)
        out = getattr(spec_ops, name)(**a, backend="triton").float()
        expected = getattr(spec_ops, name)(**a, backend="reference").float()
        # Weights and results are rounded to bfloat16 once each: half of 2^-7 of values up to 5, twice.
        if not (out - expected).abs().max().item() <= 0.05:
            raise SystemExit(f"{case}: off by {(out - expected).abs().max().item()}")
        print(*case, "ok")


if __name__ == "__main__":
    main()
