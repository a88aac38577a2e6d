"""The round as one writes it before thinking about kernels, over the weights and caches of a `Generator`.

Every attention call gets a page table, kv-indices and lengths of its own, on the host too, and the longest length as a Python
number; RoPE is plain PyTorch beside the append; the extend is a ragged prefill, and computes logits of every row although one
is used. `examples/naive_round.py` shows the same on a tiny model, with trees. What the graph passes make of it is measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spec_ops import ops
from spec_ops.decoding import Generator
from spec_ops.models import PagedAttention, PagedKVCache
from spec_ops.models.layers import rotary


class NaiveAttention(PagedAttention):
    """RoPE by itself, then the append."""

    def mha(self, layer, q, k, v, *, rope=None, **softmax):
        if rope is not None:
            q, k = rotary(q, rope), rotary(k, rope)
        return super().mha(layer, q, k, v, **softmax)


class NaiveRound(nn.Module):
    """Greedy chains for drafts that pair features at `p` with token `p + 1` (EAGLE-3, MTP).

    Args:
        generator: made with a draft; its state for `batch_size` must hold the block tables that all rounds will use.
        batch_size: requests, one of the generator's buckets.
    """

    req_to_token: torch.Tensor
    requests: torch.Tensor

    def __init__(self, generator: Generator, batch_size: int) -> None:
        super().__init__()
        draft, cache, config = generator.draft, generator.draft_cache, generator.config
        if draft is None or cache is None or draft.token_offset != 0 or config.topk != 1:
            raise ValueError("NaiveRound: `generator` must draft chains with an EAGLE-3 or MTP draft")
        self.target, self.draft, self.steps = generator.target, draft, config.num_steps
        self.target_cache, self.draft_cache, self.state = generator.target_cache, cache, generator._state(batch_size)
        self.page_size, self.backend = generator.page_size, generator.backend
        tables = self.state.block_tables
        place = torch.arange(self.page_size, dtype=torch.int32, device=tables.device)
        tokens = (tables[:, :, None] * self.page_size + place).flatten(1)
        for name, buffer in (("req_to_token", tokens), ("requests", torch.arange(batch_size, device=tables.device))):
            torch._dynamo.mark_static_address(buffer)
            self.register_buffer(name, buffer, persistent=False)

    def attention(self, cache: PagedKVCache, step: str, lens: torch.Tensor, rows: torch.Tensor, **options) -> PagedAttention:
        """Everything that any kernel might read, for every call anew; `rows [bs, n]` are the slots written."""
        table = ops.page_table(self.req_to_token, self.requests, lens, self.page_size)
        slots = self.req_to_token[self.requests[:, None], rows]
        if "kv_indices" not in options:
            options["kv_indptr"], options["kv_indices"] = ops.kv_indices(self.req_to_token, self.requests, lens)
        host: dict[str, Any] = {"seq_lens_cpu": lens.cpu(), "max_seq_len": lens.max().item()}
        return NaiveAttention(cache, step, table, lens, slots, backend=self.backend, **host, **options)

    def draft_step(self, step: int, token: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next draft token `[bs]`, and the hidden state behind it."""
        committed = self.state.committed_lens
        position = (committed + step)[:, None]
        indptr, indices = ops.draft_kv_indices(self.req_to_token, self.requests, committed, step, self.steps, 1, self.page_size)
        lens = committed + step + 1
        attention = self.attention(self.draft_cache, "draft_decode", lens, position, kv_indptr=indptr, kv_indices=indices)
        hidden = self.draft(token[:, None], hidden[:, None], position, attention)[:, 0]
        _, best = torch.log_softmax(self.draft.logits(hidden), -1).topk(1)
        return self.draft.to_target(best[:, 0]), hidden

    @torch.no_grad()
    def forward(self) -> None:
        state, length = self.state, self.steps + 1
        tokens, hidden = [state.draft_tokens[:, 0]], state.draft_hidden
        for step in range(self.steps - 1):
            token, hidden = self.draft_step(step, tokens[-1], hidden)
            tokens.append(token)
        candidates = torch.stack([state.last_token, *tokens], 1)
        rows = state.committed_lens[:, None] + torch.arange(length, device=candidates.device)

        attention = self.attention(self.target_cache, "target_verify", state.committed_lens + length, rows)
        output = self.target(candidates, rows, attention)
        accepted = ops.accept_greedy(candidates, self.target.logits(output.hidden).argmax(-1), path_len=length)

        lens = state.committed_lens + length
        indptr = torch.arange(len(lens) + 1, dtype=torch.int32, device=lens.device) * length
        attention = self.attention(self.draft_cache, "extend", lens, rows, q_indptr=indptr, max_q_len=length)
        inputs = (accepted.tokens.clamp(min=0).flatten(), self.draft.encode(output).flatten(0, 1), rows.flatten())
        hidden = self.draft(*inputs, attention).unflatten(0, (-1, length))
        log_probs = torch.log_softmax(self.draft.logits(hidden), -1)
        request, row = torch.arange(len(lens), device=lens.device), (accepted.lens - 1).long()
        _, best = log_probs[request, row].topk(1)
        state.draft_hidden.copy_(hidden[request, row])
        state.draft_tokens.copy_(self.draft.to_target(best))
        state.last_token.copy_(accepted.tokens.gather(1, row[:, None])[:, 0])
        state.committed_lens.add_(accepted.lens)
