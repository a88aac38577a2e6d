"""Dense float64 attention written from the contract's words, sharing nothing with spec_ops.

Every request is handled by itself: its keys and values are copied out of the pages one token at a time, the keys that each
query sees are listed one by one (from the tree's parents, never from a bit mask), and the softmax is taken over that list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PREFIX = -1  # parent of a draft whose parent is the last committed token


def contiguous_rows(cache: torch.Tensor, page_ids: list[int], length: int, scale: float = 1.0) -> torch.Tensor:
    """`[length, ...]` float64 rows of one request, in order, dequantized; NaN where a page id lies outside of the pool."""
    page_size = cache.shape[1]
    rows = torch.zeros(length, *cache.shape[2:], dtype=torch.float64)
    for position in range(length):
        page = page_ids[position // page_size]
        there = 0 <= page < cache.shape[0]
        rows[position] = cache[page, position % page_size].cpu().double() * scale if there else float("nan")
    return rows


def path_to_root(parents: list[int], node: int) -> list[int]:
    """`node`, its parent, and so on to the first draft of its branch."""
    path = []
    while node != PREFIX:
        path.append(node)
        node = parents[node]
    return path


def mask_words(parents: list[int], nodes: list[int]) -> list[int]:
    """Bit masks (signed 64-bit words) of `nodes`: a bit for the node itself and for each ancestor."""
    words = []
    for node in nodes:
        word = 0
        for seen in path_to_root(parents, node):
            word |= 1 << seen
        words.append(word - (1 << 64) if word >= 1 << 63 else word)
    return words


def causal_keys(length: int, q_len: int, window_left: int) -> list[list[int]]:
    """KV positions that each of the last `q_len` tokens sees; a token before the start of the sequence sees nothing."""
    seen = []
    for query in range(q_len):
        position = length - q_len + query
        keys = [key for key in range(length) if key <= position]
        if window_left >= 0:
            keys = [key for key in keys if position - key <= window_left]
        seen.append(keys)
    return seen


def tree_keys(
    length: int, parents: list[int], nodes: list[int], window_left: int, window_by_slot: bool = False
) -> list[list[int]]:
    """KV positions that each query sees when the last `len(parents)` positions are drafts and query `i` is draft `nodes[i]`.

    `window_by_slot` measures the window in cache slots instead of depth: the mistake that tests must be able to notice.
    """
    prefix = length - len(parents)
    seen = []
    for node in nodes:
        ancestors = path_to_root(parents, node)
        query_position = prefix + (node if window_by_slot else len(ancestors) - 1)
        keys = []
        for key in range(length):
            draft = key - prefix
            if draft >= 0 and draft not in ancestors:
                continue
            by_depth = draft >= 0 and not window_by_slot
            key_position = prefix + len(path_to_root(parents, draft)) - 1 if by_depth else key
            if window_left >= 0 and query_position - key_position > window_left:
                continue
            keys.append(key)
        seen.append(keys)
    return seen


@dataclass
class Attended:
    """Result of one request: `out [q_len, heads, v_dim]` float64, and how far a float32 evaluation of it may stray."""

    out: torch.Tensor
    float32_error: torch.Tensor


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: list[list[int]],
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> Attended:
    """Attention of `q [q_len, heads, dim]` over `keys [length, kv_heads, dim]` and `values`, one KV head's queries at a time.

    The error estimate follows Higham and Mary (2019): rounding errors behave like a random walk, so a float32 sum of n terms
    is off by about `sqrt(n) * u * sum|terms|` (worst case `n * u`); four times that is exceeded with negligible probability.
    A logit error `e` (plus a few `u` for scaling, exp and tanh) multiplies every weight by `1 +- e`, twice through the
    normalization, and the weighted sum over the visible keys adds its own walk; all of it scales with the largest value.
    """
    unit = 2.0**-24
    q = q.cpu().double()
    q_len, heads, dim = q.shape
    group = heads // keys.shape[1]
    out = torch.zeros(q_len, heads, values.shape[-1], dtype=torch.float64)
    error = torch.zeros(q_len, heads, 1, dtype=torch.float64)
    for i in range(q_len):
        if not seen[i]:
            continue
        rows = torch.tensor(seen[i])
        for kv_head in range(keys.shape[1]):
            own = slice(kv_head * group, (kv_head + 1) * group)
            k, v, queries = keys[rows, kv_head], values[rows, kv_head], q[i, own]
            logits = (queries @ k.T) * scale
            if softcap > 0:
                logits = softcap * torch.tanh(logits / softcap)
            largest = logits.amax(-1, keepdim=True)
            weights = torch.exp(logits - largest)
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + torch.exp(sinks[own, None].cpu().double() - largest)
            out[i, own] = (weights / total) @ v
            magnitude = (queries.abs() @ k.abs().T).amax(-1, keepdim=True) * scale
            logit_error = 4 * dim**0.5 * unit * magnitude + 8 * unit * (1 + magnitude + softcap)
            error[i, own] = (2 * logit_error + 4 * len(rows) ** 0.5 * unit) * v.abs().max()
    return Attended(out, error)
