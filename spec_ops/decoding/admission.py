"""Requests take rows between rounds: their rows are filled, and their prompts run through target and draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_ops.decoding.arguments import TokenChoice
from spec_ops.decoding.batch import Admitted, Batch
from spec_ops.decoding.buckets import Buckets
from spec_ops.decoding.drafter import agreed
from spec_ops.decoding.logits import LogitsChanges
from spec_ops.decoding.prefill import pieces
from spec_ops.decoding.random import row_seeds
from spec_ops.decoding.round import commit_next
from spec_ops.decoding.state import MAX_STOP_TOKENS


def begin(
    batch: Batch, choice: TokenChoice, changes: LogitsChanges | None, buckets: Buckets, chunk_size: int, backend: str
) -> None:
    """Run the prompts of those that wait and have room through the models, as many as make one forward.

    Args:
        changes: to the target's logits, of the batch's rounds.
        chunk_size: most tokens of one forward.
        backend: of the ragged extends.
    """
    admitted = batch.admit(chunk_size)
    _load(batch, admitted, choice, changes)
    if choice.grammars is not None and changes is not None:
        choice.grammars.fill(changes.bitmask, [(member.row, member.request) for member in admitted])
    _prefill(batch, admitted, choice, changes, buckets, chunk_size, backend)
    batch.emit_first(batch.state.output.cpu(), admitted)


def _load(batch: Batch, admitted: Sequence[Admitted], choice: TokenChoice, changes: LogitsChanges | None) -> None:
    """Fill the rows of the requests with pages, limits and sampling parameters."""
    state, stops = batch.state, batch.requests.stop_tokens
    device, max_pages = state.tokens.device, state.block_tables.shape[1]
    members = [member.request for member in admitted]
    prompts = [batch.requests.prompts[i] for i in members]
    count, lens = len(members), [len(prompt) for prompt in prompts]
    rows = torch.tensor([member.row for member in admitted], device="cpu").to(device)

    def put(buffer: torch.Tensor, values) -> None:
        buffer.index_copy_(0, rows, torch.as_tensor(values, dtype=buffer.dtype, device="cpu").to(device))

    put(state.block_tables, [_padded(member.pages, max_pages, 0) for member in admitted])
    put(state.max_lens, [batch.requests.lengths[i] for i in members])
    put(state.stop_tokens, [_padded(stops, MAX_STOP_TOKENS, -1)] * count)
    params = [choice.params[i] for i in members]
    for name in ("temperature", "top_k", "top_p", "min_p"):
        put(getattr(state, name), [getattr(p, name) for p in params])
    if choice.sampled:
        put(state.seeds, row_seeds([choice.seeds[i] for i in members], members))
    put(state.finished, [False] * count)
    put(state.tokens, [_padded(prompt, state.tokens.shape[1], -1) for prompt in prompts])
    put(state.last_token, [prompt[-1] for prompt in prompts])
    # All prompt tokens but the last one are committed, so that the prefill's `commit` adds the first new token after it.
    put(state.committed_lens, [length - 1 for length in lens])
    if changes is not None:
        changes.load(rows, params, prompts)


def _prefill(
    batch: Batch,
    admitted: Sequence[Admitted],
    choice: TokenChoice,
    changes: LogitsChanges | None,
    buckets: Buckets,
    chunk_size: int,
    backend: str,
) -> None:
    """Run prompts through target and draft, a long one in pieces. Emits each request's first token, and drafts the first
    tokens of its first round."""
    state = batch.state
    prompts = [batch.requests.prompts[member.request] for member in admitted]
    rows = torch.tensor([member.row for member in admitted], device="cpu").to(state.tokens.device)
    drafter = buckets.drafter(state.batch_size, choice.sampled)
    with buckets.eagerly(), state.only(torch.zeros_like(state.finished).index_fill_(0, rows, True)):
        for piece in pieces(prompts, rows, state.block_tables[rows], chunk_size, backend):
            positions, attention, last = piece.extend(buckets.target_cache)
            output = buckets.target(piece.tokens(), positions, attention)
            if piece.last:
                hidden = output.hidden.new_zeros(state.batch_size, output.hidden.shape[-1])
                hidden[rows] = output.hidden[last]
                commit_next(buckets.target, hidden, state, choice.sampled, changes)
            if drafter is not None:
                drafter.prefill(piece, output)
    drafts = buckets.held_drafts(state.batch_size, choice)
    if drafts is not None and drafter is not None:
        with buckets.eagerly():
            drafts.hold(agreed(buckets.target, drafter))  # of all rows: those that had drafts get the same ones again


def _padded(values: Sequence[int], length: int, padding: int) -> list[int]:
    return [*values, *[padding] * (length - len(values))]
