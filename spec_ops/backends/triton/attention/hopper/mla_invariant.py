"""Batch-invariant MLA by the Gluon kernel, all steps alike: what the backend `triton-mla-pieces` declares. `pieces.py` says why
bits do not depend on a batch.

One kernel takes all calls, with any number of queries: decoding, verification of chains and trees (`mla_paths.py`), and
prompts. It reads pages of every size, a block of keys in one piece, in a few, or row by row, which changes no bit either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.hopper import mla, mla_paths
from spec_ops.backends.triton.attention.hopper.pieces import slots_of
from spec_ops.backends.triton.runtime.cooperative import resident_or_none
from spec_ops.backends.triton.runtime.launch import device_guard

PIECE = 32  # blocks of 64 keys
PARTIAL_BYTES = 1 << 29  # most memory of a launch for partial results and paths; larger batches take several launches
PROMPT_TILES = 256  # requests that a launch takes at most for a prompt, whose tiles fill the GPU many times over


def attention(call: AttentionCall, piece: int = PIECE) -> torch.Tensor:
    """Every MLA step.

    Raises:
        ValueError: the cache is in a layout, or has a window or a soft cap, that the kernel does not read.
    """
    if not mla.supports(call):
        raise ValueError(
            f"{call.step}: `kv_cache` must hold dense rows at one distance, aligned to 16 bytes, for batch-invariant attention "
            "in pieces, without a window or a soft cap; take the backend 'triton-deterministic'"
        )
    out = call.new_result()
    if out.numel() == 0:
        return out
    with device_guard(call.q):
        if not call.is_ragged:
            _launch(call, call.q, call.seq_lens, lambda part: call.block_tables[part], out, call.q.shape[0], piece)
        elif call.seq_lens.shape[0] == 0:
            out.zero_()
        else:
            _extend(call, out, piece)
    return out


def _launch(
    call: AttentionCall, q: torch.Tensor, seq_lens: torch.Tensor, tables: Callable[[slice], torch.Tensor], out: torch.Tensor,
    most: int, piece: int,
) -> None:  # fmt: skip
    """Attention of `q [n, queries, heads, dim]`, `most` requests at a time; `tables` gives some requests' pages."""
    tile_bytes = triton.cdiv(q.shape[1] * q.shape[2], 64) * 64 * (512 + 2) * 4
    request_bytes = slots_of(call, 1, piece) * tile_bytes + mla_paths.bytes_of(call)
    most = max(1, min(most, PARTIAL_BYTES // request_bytes))
    if most < q.shape[0]:
        most = most // 4 * 4 or most  # lengths and tables from a multiple of 16 bytes on: others compile anew
    for first in range(0, q.shape[0], most):
        part = slice(first, first + most)
        some = replace(
            call, step="mla_target_verify", q=q[part], block_tables=tables(part), seq_lens=seq_lens[part], q_indptr=None,
            max_q_len=0, out=out[part], tree_mask=None if call.tree_mask is None else call.tree_mask[part],
        )  # fmt: skip
        # A part of a GPU may have no room for all programs at once. How many there are changes no bit; one waits for nobody.
        if resident_or_none((__name__, some.q.shape), partial(mla.mla, some, piece=piece)) is None:
            mla.mla(some, piece=piece, ranges=1)


def _extend(call: AttentionCall, out: torch.Tensor, piece: int) -> None:
    """A prompt's queries as requests of their own, as many to one as rows of a tile: groups are counted from a request's last
    query, so that no group has keys that its request does not have. The first group's missing queries are computed of any
    others, and dropped."""
    q, indptr = call.q, call.q_indptr.long()  # type: ignore[union-attr]
    total, heads = q.shape[:2]
    bs = call.seq_lens.shape[0]
    each = max(1, 64 // heads)
    groups = torch.arange(total if each == 1 else total // each + bs, device=q.device)
    ends = ((indptr.diff() + (each - 1)) // each).cumsum(0)  # a request's groups end here
    request = torch.searchsorted(ends, groups, right=True).clamp_(max=bs - 1)
    later = (ends[request] - 1 - groups) * each  # queries of the request after the group's
    lens = torch.where(groups < ends[-1], call.seq_lens[request] - later, 0).clamp_(min=0).int()

    def tables(part: slice) -> torch.Tensor:
        return call.block_tables[request[part]]

    if each == 1:
        _launch(call, q[:, None], lens, tables, out[:, None], PROMPT_TILES, piece)
        return
    back = torch.arange(each - 1, -1, -1, device=q.device)
    rows = (indptr[request + 1] - 1 - later)[:, None] - back
    grouped = out.new_empty(len(groups), each, *out.shape[1:])
    _launch(call, q[rows.clamp_(0, total - 1)], lens, tables, grouped, PROMPT_TILES, piece)
    row = torch.arange(total, device=q.device)
    owner = torch.searchsorted(indptr[1:].contiguous(), row, right=True).clamp_(max=bs - 1)
    later = indptr[owner + 1] - 1 - row
    place = (ends[owner] - 1 - later // each) * each + (each - 1 - later % each)
    in_use = (row < indptr[-1])[:, None, None]
    out.copy_(torch.where(in_use, grouped.flatten(0, 1)[place.clamp_(0, len(groups) * each - 1)], 0))
