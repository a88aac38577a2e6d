"""The paths of a tree as chains over the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

CACHES = ("k_cache", "v_cache", "kv_cache")


def as_chains(a: dict[str, Any], queries: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Some queries of an attention call with a tree mask, each as a request of its own: the last token of a chain.

    Caches are views with pages of one token, so that a table lists a chain's keys in their order: those before the tree, then
    those of the set bits of the query's mask. `queries`: pairs of a request and a query of it.
    """
    caches = {name: a[name] for name in CACHES if name in a}
    page_size = next(iter(caches.values())).shape[1]
    tables, words = a["block_tables"].cpu(), a["tree_mask"].cpu()
    chains = []
    for b, i in queries:
        prefix, word = int(a["seq_lens"][b]) - a["mask_len"], int(words[b, i])
        draft = [prefix + bit for bit in range(a["mask_len"]) if word >> bit & 1]
        keys = torch.tensor([key for key in [*range(prefix), *draft] if key >= 0], dtype=torch.int64)
        chains.append(tables[b, keys // page_size].long() * page_size + keys % page_size)
    lens = torch.tensor([len(chain) for chain in chains], dtype=torch.int32)
    slots = torch.zeros(len(chains), max(int(lens.max()), 1), dtype=torch.int32)
    for row, chain in zip(slots, chains, strict=True):
        row[: len(chain)] = chain
    return {
        **a,
        **{name: cache.flatten(0, 1)[:, None] for name, cache in caches.items()},
        "q": torch.stack([a["q"][b, i] for b, i in queries])[:, None],
        "block_tables": slots.to(a["q"].device),
        "seq_lens": lens.to(a["q"].device),
        "tree_mask": None,
        "mask_len": None,
    }
