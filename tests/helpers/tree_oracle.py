"""Draft trees in plain Python: lists, dicts and loops; nothing is shared with the ops under test."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass
class Draft:
    """All candidates of one request's top-k draft, in SGLang's numbering: K of step 0, then K * K per later step.

    `scores` are products of powers of two (and zeros), hence exact in float32; many are ties, also of child and parent.
    """

    tokens: list[int]
    scores: list[float]
    parents: list[int | None]
    """Candidate that each candidate continues; None for the root."""
    parent_list: list[int]


def num_candidates(topk: int, steps: int) -> int:
    return topk + (steps - 1) * topk * topk


def draft(rng: random.Random, topk: int, steps: int, vocab: int) -> Draft:
    """Beam search: at each step every branch proposes `topk` tokens, the best `topk` proposals are the next branches."""
    out = Draft([], [], [], [-1])

    def propose(parent: int | None, score: float) -> None:
        # A probability of 1 makes a child's score equal to its parent's. Powers above 2^-3 keep 63 steps in float32's range.
        probs = sorted((rng.choice([1.0, 1.0, 0.5, 0.25, 0.0]) for _ in range(topk)), reverse=True)
        for token, prob in zip(rng.sample(range(vocab), topk), probs, strict=True):
            out.tokens.append(token)
            out.scores.append(score * prob)
            out.parents.append(parent)

    propose(None, 1.0)
    branches = list(range(topk))
    for step in range(1, steps):
        out.parent_list.extend(branches)
        start = len(out.tokens)
        for branch in branches:
            propose(branch, out.scores[branch])
        new = range(start, len(out.tokens))
        branches = sorted(new, key=lambda c: (-out.scores[c], c))[:topk]
        assert len(out.tokens) == num_candidates(topk, step + 1)
    return out


def select(scores: list[float], num_tokens: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda c: (-scores[c], c))[:num_tokens])


@dataclass
class OracleTree:
    parents: list[int]
    positions: list[int]
    tree_mask: list[int]
    first_child: list[int]
    next_sibling: list[int]


def build(candidate_parents: list[int | None], selected: list[int], seq_len: int) -> OracleTree:
    """The tree over node 0 (root) and the selected candidates, found by walking from each node to the root."""
    node_of: dict[int | None, int] = {None: 0}
    node_of.update({candidate: node for node, candidate in enumerate(selected, start=1)})
    parents = [-1] + [node_of[candidate_parents[candidate]] for candidate in selected]
    positions, masks = [], []
    for node in range(len(parents)):
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        positions.append(seq_len + len(path) - 1)
        masks.append(signed(sum(1 << ancestor for ancestor in path)))
    first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
    last_child: dict[int, int] = {}
    for node in range(1, len(parents)):
        parent = parents[node]
        if parent in last_child:
            next_sibling[last_child[parent]] = node
        else:
            first_child[parent] = node
        last_child[parent] = node
    return OracleTree(parents, positions, masks, first_child, next_sibling)


def signed(word: int) -> int:
    """An unsigned 64-bit word as int64 holds it."""
    return word - (1 << 64) if word >> 63 else word


def random_parents(rng: random.Random, num_nodes: int) -> list[int]:
    return [-1] + [rng.randrange(node) for node in range(1, num_nodes)]
