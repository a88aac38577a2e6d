"""Samples of the operators around attention: tables of pages, trees, acceptance, sampling, drafts that are looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import spec_ops
from tests.helpers.sample_source import FLOATS, INDEX, Source


def pool_sample(s: Source, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, bs = s.integer(1, 4), s.integer(0, 3)
    table = s.any_layout(s.ids(1000, rows, context, dtype=torch.int32))
    dtype = s.pick(*INDEX)
    return table, s.to(s.ids(rows, bs, dtype=dtype)), s.to(s.ids(12, bs, dtype=dtype))


def page_table_sample(s: Source) -> tuple[Any, ...]:
    page_size = s.integer(1, 8)
    return (*pool_sample(s, 24), page_size, s.integer(-(-12 // page_size), -(-24 // page_size)))


def kv_indices_sample(s: Source) -> tuple[Any, ...]:
    table, rows, lens = pool_sample(s, 16)
    return table, rows, lens, int(lens.sum()) + s.integer(0, 5)


def draft_kv_indices_sample(s: Source, every_step: bool) -> tuple[Any, ...]:
    num_steps, topk, page_size = s.integer(1, 3), s.integer(1, 3), s.integer(1, 4)
    table, rows, lens = pool_sample(s, 12 + topk * (num_steps + 2 * page_size))
    capacity = topk * (int(lens.sum()) + lens.numel() * num_steps) + s.integer(0, 5)
    if every_step:
        return (table, rows, lens, num_steps, topk, page_size, capacity, s.integer(1, num_steps))
    return (table, rows, lens, s.integer(0, num_steps - 1), num_steps, topk, page_size, capacity)


def tree_parents(s: Source, bs: int, nodes: int) -> torch.Tensor:
    rows = [[-1, *(int(s.ids(node)) for node in range(1, nodes))] for _ in range(bs)]
    return s.to(torch.tensor(rows, dtype=torch.int64).reshape(bs, nodes))


def accept_greedy_sample(s: Source) -> tuple[Any, ...]:
    bs, nodes = s.integer(0, 3), s.integer(1, 6)
    tokens = [s.any_layout(s.ids(3, bs, nodes, dtype=s.pick(*INDEX))) for _ in range(2)]
    parents = s.pick(None, tree_parents(s, bs, nodes))
    return (*tokens, parents, nodes if parents is None else s.integer(1, nodes))


def accept_sampled_sample(s: Source) -> tuple[Any, ...]:
    bs, nodes, vocab = s.integer(0, 3), s.integer(1, 5), s.integer(2, 6)
    mode = s.pick("chain", "tree", "rejection", "reduced_vocabulary")
    draft_vocab = s.integer(1, vocab) if mode == "reduced_vocabulary" else vocab
    candidates = s.any_layout(s.ids(draft_vocab, bs, nodes, dtype=s.pick(*INDEX)))
    target_probs = s.any_layout(torch.softmax(s.normal(bs, nodes, vocab), -1))
    parents = tree_parents(s, bs, nodes) if mode == "tree" else None
    draft_probs, draft_to_target = None, None
    if mode in ("rejection", "reduced_vocabulary"):
        draft_probs = s.any_layout(torch.softmax(s.normal(bs, nodes - 1, draft_vocab), -1))
    if mode == "reduced_vocabulary":
        draft_to_target = s.to(torch.randperm(vocab, generator=s.generator)[:draft_vocab])
    path_len = s.integer(1, nodes) if mode == "tree" else nodes
    thresholds = (1.0, 1.0) if draft_probs is not None else s.pick((1.0, 1.0), (0.5, 0.7))
    uniforms = (s.uniform(bs, nodes), s.uniform(bs))
    return (candidates, target_probs, *uniforms, parents, draft_probs, draft_to_target, path_len, *thresholds)


def accept_sampled_logits_sample(s: Source) -> tuple[Any, ...]:
    bs, nodes, vocab = s.integer(0, 3), s.integer(1, 5), s.integer(2, 6)
    mode = s.pick("chain", "tree", "rejection", "reduced_vocabulary", "block")
    draft_vocab = s.integer(1, vocab) if mode == "reduced_vocabulary" else vocab
    temperature = s.to(s.ids(3, bs) / 2)
    target_logits = s.any_layout(s.normal(bs, nodes, vocab, dtype=s.pick(*FLOATS)))
    target = (target_logits, spec_ops.sampling_support(target_logits, temperature, s.pick(None, s.to(s.ids(vocab, bs)))))
    candidates = s.any_layout(s.ids(vocab, bs, nodes, dtype=s.pick(*INDEX)))
    parents = tree_parents(s, bs, nodes) if mode == "tree" else None
    draft: tuple[Any, ...] = (None, None, None)
    if mode in ("rejection", "reduced_vocabulary", "block"):
        draft_logits = s.any_layout(s.normal(bs, nodes - 1, draft_vocab, dtype=s.pick(*FLOATS)))
        draft = (draft_logits, spec_ops.sampling_support(draft_logits, temperature), None)
    if mode == "reduced_vocabulary":
        ids = torch.full((vocab,), -1)
        ids[torch.randperm(vocab, generator=s.generator)[:draft_vocab]] = torch.arange(draft_vocab)
        draft = (*draft[:2], s.to(ids))
    path_len = s.integer(1, nodes) if mode == "tree" else nodes
    thresholds = (1.0, 1.0) if draft[0] is not None else s.pick((1.0, 1.0), (0.5, 0.7))
    uniforms = (s.uniform(bs, nodes), s.uniform(bs))
    return (candidates, *target, *uniforms, temperature, parents, *draft, path_len, *thresholds, mode == "block")


def sampling_sample(s: Source) -> tuple[Any, ...]:
    bs, vocab = s.integer(0, 3), s.integer(1, 7)
    logits = s.any_layout(s.normal(*s.pick((bs, vocab), (bs, s.integer(0, 3), vocab)), dtype=s.pick(*FLOATS)))
    temperature = s.to(s.ids(3, bs) / 2)
    top_k = s.pick(None, s.to(s.ids(vocab + 1, bs, dtype=s.pick(*INDEX))))
    return logits, temperature, top_k, s.pick(None, s.uniform(bs)), s.pick(None, s.uniform(bs))


def sample_logits_sample(s: Source) -> tuple[Any, ...]:
    logits, *settings = sampling_sample(s)
    return logits, s.uniform(*logits.shape[:-1]), *settings


def sample_tokens_sample(s: Source) -> tuple[Any, ...]:
    shape = s.pick((), (s.integer(0, 3),), (s.integer(0, 3), 2), (2, 3, 2))
    return s.uniform(*shape, s.integer(1, 7)), s.uniform(*shape)


def select_draft_tokens_sample(s: Source) -> tuple[Any, ...]:
    bs, width = s.integer(0, 3), s.integer(1, 12)
    return s.uniform(bs, width), s.any_layout(s.ids(50, bs, width, dtype=s.pick(*INDEX))), s.integer(1, width)


def build_tree_sample(s: Source) -> tuple[Any, ...]:
    """A draft of two steps of width K, of which the K first candidates and some of their children are selected."""
    bs, topk = s.integer(0, 3), s.integer(1, 3)
    parent_list = torch.cat([torch.tensor([-1]), torch.arange(topk)]).expand(bs, -1)
    extra = s.integer(0, topk * topk)
    children = [torch.randperm(topk * topk, generator=s.generator)[:extra].sort().values + topk for _ in range(bs)]
    first = torch.arange(topk)
    selected = torch.stack([torch.cat([first, c]) for c in children]) if bs else torch.zeros(0, topk + extra, dtype=torch.int64)
    lens = s.to(s.ids(100, bs, dtype=s.pick(*INDEX)))
    return s.any_layout(parent_list), s.any_layout(selected), lens, topk


def page_table_out_sample(s: Source) -> tuple[Any, ...]:
    *source, page_size, pages = page_table_sample(s)
    rows = source[1].shape[0] + s.integer(0, 2)
    return *source, page_size, s.to(torch.full((rows, pages + 3), -1, dtype=torch.int32))[:, s.pick(0, 2) :][:, :pages]


def full_mask_words_sample(s: Source) -> tuple[Any, ...]:
    lens, nodes = s.ids(9, s.integer(0, 3), dtype=s.pick(*INDEX)), s.integer(1, 8)
    total = int((nodes * (lens + nodes)).sum()) + s.integer(0, 5)
    return s.to(s.ids(2, total) > 0), s.to(lens), nodes


def lookup_drafts_sample(s: Source) -> tuple[Any, ...]:
    bs, width, max_ngram = s.integer(0, 3), s.integer(0, 12), s.integer(1, 4)
    tokens = s.any_layout(s.ids(2, bs, width, dtype=s.pick(*INDEX)))
    lens = s.to(s.ids(width + 1, bs, dtype=s.pick(*INDEX)))
    return tokens, lens, s.integer(1, 6), max_ngram, s.integer(1, max_ngram)


def topk_logits_sample(s: Source) -> tuple[Any, ...]:
    vocab, rows = s.integer(1, 12), s.pick((), (0,), (3,), (2, 2))
    logits = s.any_layout(s.normal(*rows, vocab, dtype=s.pick(torch.float32, torch.bfloat16)))
    return logits, s.integer(1, vocab), s.pick("log_softmax", "softmax", "none"), s.pick(torch.float32, torch.float16)


DECODING_SAMPLES: dict[str, Callable[[Source], tuple[Any, ...]]] = {
    "page_table": page_table_sample,
    "kv_indices": kv_indices_sample,
    "draft_kv_indices": lambda s: draft_kv_indices_sample(s, every_step=False),
    "draft_kv_indices_steps": lambda s: draft_kv_indices_sample(s, every_step=True),
    "page_table_out": page_table_out_sample,
    "full_mask_words": full_mask_words_sample,
    "accept_greedy": accept_greedy_sample,
    "accept_sampled": accept_sampled_sample,
    "accept_sampled_logits": accept_sampled_logits_sample,
    "sampling_support": sampling_sample,
    "sample_logits": sample_logits_sample,
    "sampling_probs": sampling_sample,
    "sample_tokens": sample_tokens_sample,
    "topk_logits": topk_logits_sample,
    "select_draft_tokens": select_draft_tokens_sample,
    "build_tree": build_tree_sample,
    "lookup_drafts": lookup_drafts_sample,
}
