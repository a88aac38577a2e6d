"""What SGLang 0.5.23 has for a CPU in a build of its own, which is on no package index: its EAGLE worker's kernels, in plain
PyTorch. `cpu_engine.py` has what both releases need."""

from __future__ import annotations

import ctypes

import torch
from cpu_engine import build_tree as build_tree_kernel_efficient_cpu  # noqa: F401
from cpu_engine import verify_tree_greedy


def verify_tree_greedy_cpu(*, retrive_index, retrive_next_token, retrive_next_sibling, **others):
    names = {"retrieve_index": retrive_index, "retrieve_next_token": retrive_next_token}
    return verify_tree_greedy(**names, retrieve_next_sibling=retrive_next_sibling, **others)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride: int) -> None:
    last = torch.arange(len(accept_lens)) * stride + accept_lens - 1
    bonus_tokens[: len(last)] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


def assign_draft_cache_locs_contiguous_cpu(requests, pool, seq_lens, out, width: int, topk: int, columns: int) -> None:
    at = seq_lens[:, None] + torch.arange(topk * columns)
    out[: at.numel()] = pool[requests[:, None], at].flatten().to(out.dtype)


def assign_extend_cache_locs_cpu(requests, pool, start, end, out, width: int) -> None:
    found = [pool[request, a:b] for request, a, b in zip(requests.tolist(), start.tolist(), end.tolist(), strict=False)]
    slots = torch.cat(found)
    out[: len(slots)] = slots.to(out.dtype)


def assign_req_to_token_pool_cpu(requests, pool, start, end, slots, width: int) -> None:
    first = 0
    for request, a, b in zip(requests.tolist(), start.tolist(), end.tolist(), strict=False):
        pool[request, a:b] = slots[first : first + b - a].to(pool.dtype)
        first += b - a


def copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources) -> None:
    """Rows of caches at addresses: all are read before one is written."""
    for base, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def fill_accept_out_cache_loc_cpu(accept_index, slots, out) -> None:
    kept = accept_index[accept_index > -1]
    out[: len(kept)] = slots[kept]
