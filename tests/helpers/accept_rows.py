"""Arguments of `accept_sampled_logits` in the order of its schema, with rows of any length."""

from __future__ import annotations

import random

import torch

from spec_ops.ops.reference.sampling import sampling_support
from tests.helpers.tree_oracle import random_parents

ROW_KINDS = ["target_only", "tree", "drafts", "reduced drafts", "blocks", "reduced blocks"]


def long_rows(seed: int, kind: str, vocab: int, bs: int = 2, noise: float = 1.0) -> tuple:
    """Drafts that are likely accepted, and draft logits that differ from the target's by `noise`; greedy requests too."""
    rng, generator = random.Random(f"{seed}{kind}"), torch.Generator().manual_seed(seed)
    nodes = 6 if kind == "tree" else 4
    hot = torch.tensor([rng.choice([0.0, 0.7, 1.0, 1.3]) for _ in range(bs)])
    cuts = torch.tensor([rng.choice([0, 40]) for _ in range(bs)]), torch.tensor([rng.choice([0.95, 1.0]) for _ in range(bs)])
    target = (torch.randn(bs, nodes, vocab, generator=generator) * 3).bfloat16()
    candidates = torch.cat([torch.randint(vocab, (bs, 1), generator=generator), target[:, :-1].argmax(-1)], 1)
    coins = torch.rand(bs, nodes, generator=generator), torch.rand(bs, generator=generator)
    parents = torch.tensor([random_parents(rng, nodes) for _ in range(bs)]) if kind == "tree" else None
    draft = draft_support = ids = None
    if kind not in ("tree", "target_only"):
        draft = target[:, :-1].float() + noise * torch.randn(bs, nodes - 1, vocab, generator=generator)
        if "reduced" in kind:
            chosen = torch.cat([candidates[:, 1:].flatten(), torch.randperm(vocab, generator=generator)[: vocab // 3]]).unique()
            ids = torch.full((vocab,), -1).index_copy(0, chosen, torch.arange(len(chosen)))
            draft = draft[..., chosen]
        draft_support = sampling_support(draft, hot, *cuts, None)
    support = sampling_support(target, hot, *cuts, None)
    path_len = 4 if kind == "tree" else nodes
    return candidates, target, support, *coins, hot, parents, draft, draft_support, ids, path_len, 1.0, 1.0, "blocks" in kind
