"""The state that a batch of requests carries from one round to the next, in static device buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from spec_ops.ops.sampling import ALL_MASKED

MAX_STOP_TOKENS = 8
# Status in `output`: nothing could be drawn from the target's distribution; every token was masked.
BROKEN, MASKED = 2, 3  # after a token of -1, and of `ALL_MASKED`


class RoundState(nn.Module):
    """Buffers of one batch bucket. Their addresses are fixed: a round takes no arguments, and CUDA graphs may mutate them.

    Args:
        batch_size: rows of the bucket, `bs`.
        max_pages: width of the page tables.
        max_len: most tokens of a request, prompt and new ones.
        path_len: most tokens that a round emits, `P`.
        topk: width `K` of the draft tree.
        draft_hidden, draft_vocab: the draft's hidden size and the width of its logits, `Vd`.
        hidden_dtype: dtype of `draft_hidden` and `draft_logits`.
        device: of all buffers.

    Attributes:
        block_tables: `[bs, max_pages]` int32, the pages of each request; the same ids in the target's and the draft's cache.
        committed_lens: `[bs]` int32, tokens whose target KV is final; `last_token` is not among them.
        last_token: `[bs]` int64, the newest token, root of the next verification.
        tokens: `[bs, max_len + P]` int64, the history: prompt and emitted tokens, of which a request has `committed_lens + 1`,
            `last_token` being the last. What stands after them means nothing.
        finished: `[bs]` bool, padding rows and requests that have ended. They write nothing and emit nothing.
        max_lens: `[bs]` int32, length (prompt and new tokens) at which a request ends.
        stop_tokens: `[bs, MAX_STOP_TOKENS]` int64, padded with -1.
        draft_tokens: `[bs, K]` int64, the first drafts of the next round.
        draft_scores: `[bs, K]` float32, their log-probabilities.
        draft_logits: `[bs, Vd]`, what the first draft was sampled from (sampled chains only).
        draft_support: `[bs, 3]` int64, of `draft_logits` (see `sampling_support`).
        draft_hidden: `[bs, hidden]`, the draft's hidden state that gave the first drafts.
        temperature: `[bs]` float32; 0 is greedy.
        top_k: `[bs]` int32; 0 keeps all tokens.
        top_p: `[bs]` float32; 1 keeps all tokens.
        min_p: `[bs]` float32; 0 keeps all tokens.
        seeds: `[bs]` int64.
        output: `[bs, P + 2]` int64, packed so that the host reads one tensor: the tokens that the last round emitted (-1 past
            their count, but for the draft that a plain round between others leaves in place 1), their count, and the request's
            status: 0 goes on, 1 finished, `BROKEN` no token could be drawn, `MASKED` every token was masked.
    """

    block_tables: torch.Tensor
    committed_lens: torch.Tensor
    last_token: torch.Tensor
    tokens: torch.Tensor
    finished: torch.Tensor
    max_lens: torch.Tensor
    stop_tokens: torch.Tensor
    draft_tokens: torch.Tensor
    draft_scores: torch.Tensor
    draft_logits: torch.Tensor
    draft_support: torch.Tensor
    draft_hidden: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    output: torch.Tensor

    def __init__(
        self,
        batch_size: int,
        max_pages: int,
        *,
        max_len: int,
        path_len: int,
        topk: int = 1,
        draft_hidden: int = 1,
        draft_vocab: int = 1,
        hidden_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "block_tables": ((max_pages,), torch.int32),
            "committed_lens": ((), torch.int32),
            "last_token": ((), torch.int64),
            "tokens": ((max_len + path_len,), torch.int64),
            "finished": ((), torch.bool),
            "max_lens": ((), torch.int32),
            "stop_tokens": ((MAX_STOP_TOKENS,), torch.int64),
            "draft_tokens": ((topk,), torch.int64),
            "draft_scores": ((topk,), torch.float32),
            "draft_logits": ((draft_vocab,), hidden_dtype),
            "draft_support": ((3,), torch.int64),
            "draft_hidden": ((draft_hidden,), hidden_dtype),
            "temperature": ((), torch.float32),
            "top_k": ((), torch.int32),
            "top_p": ((), torch.float32),
            "min_p": ((), torch.float32),
            "seeds": ((), torch.int64),
            "output": ((path_len + 2,), torch.int64),
        }
        for name, (tail, dtype) in shapes.items():
            buffer = torch.zeros(batch_size, *tail, dtype=dtype, device=device)
            torch._dynamo.mark_static_address(buffer)
            self.register_buffer(name, buffer, persistent=False)
        self._extra: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.clear()

    def extra_buffer(self, name: str, tail: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The static buffer `[bs, *tail]` of this name and `dtype`, made when first asked for. `clear` leaves it alone."""
        if (name, tail) not in self._extra:
            buffer = torch.zeros(self.batch_size, *tail, dtype=dtype, device=self.tokens.device)
            torch._dynamo.mark_static_address(buffer)
            self._extra[name, tail] = buffer
        return self._extra[name, tail]

    def clear(self) -> None:
        """Make every row padding."""
        for buffer in self.buffers():
            buffer.zero_()
        self.finished.fill_(True)
        self.stop_tokens.fill_(-1)
        self.top_p.fill_(1.0)

    @contextlib.contextmanager
    def only(self, rows: torch.Tensor) -> Iterator[None]:
        """Inside, all other rows are as padding: they write nothing, and keep what they carry to the next round.

        Args:
            rows: `[bs]` bool.
        """
        drafts = ("draft_tokens", "draft_scores", "draft_logits", "draft_support", "draft_hidden")
        carried = ("finished", "last_token", "committed_lens", *drafts)
        before = [(buffer, buffer.clone()) for buffer in map(self.get_buffer, carried)]
        self.finished.logical_or_(~rows)
        yield
        for buffer, old in before:
            buffer.copy_(torch.where(rows.view(-1, *[1] * (buffer.dim() - 1)), buffer, old))

    def slots(self, positions: torch.Tensor, page_size: int, keep: torch.Tensor) -> torch.Tensor:
        """KV slots of tokens.

        Args:
            positions: `[bs, n]` integers, in the sequence.
            page_size: of the caches.
            keep: bool that broadcasts to `[bs, n]`.

        Returns:
            `[bs, n]` integers; -1 where `keep` is false.
        """
        pages = self.block_tables.gather(1, (positions // page_size).clamp(0, self.block_tables.shape[1] - 1).long())
        return torch.where(keep, pages * page_size + positions % page_size, -1)

    def commit(self, tokens: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """Emit tokens, and advance the state.

        Args:
            tokens: `[bs, P]` int64. The last one to emit may be -1, where nothing could be drawn, or `ALL_MASKED`: it is not
                emitted, and ends the request.
            lens: `[bs]` int32, how many to emit at most. A stop token and the length limit cut them.

        Returns:
            `[bs]` int32: how many tokens were emitted (0 for finished rows).
        """
        active = ~self.finished
        place = torch.arange(tokens.shape[1], device=tokens.device)
        final = tokens.gather(1, (lens - 1).long()[:, None])[:, 0]
        broken = active & (final < 0)
        lens = torch.where(broken, lens - 1, lens)
        stop = (tokens[:, :, None] == self.stop_tokens[:, None, :]).any(-1) & (tokens >= 0)
        before_stop = torch.where(stop, place, tokens.shape[1]).amin(1) + 1
        room = self.max_lens - (self.committed_lens + 1)
        count = torch.minimum(torch.minimum(lens, before_stop.to(torch.int32)), room)
        ended = (before_stop <= count) | (room <= count)
        broken = broken & ~ended
        count = torch.where(active, count, 0)
        emitted = torch.where(place < count[:, None], tokens, -1)
        last = tokens.gather(1, (count - 1).clamp(min=0).long()[:, None])[:, 0]
        row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        # Also where nothing is emitted: the -1 after a history means nothing, and every index is written once. A round that is
        # run past the longest text, to time it, writes at the end.
        index = (self.committed_lens.long()[:, None] + 1 + place).clamp(max=self.tokens.shape[1] - 1)
        self.tokens.index_put_((row, index), emitted)
        emitted = F.pad(emitted, (0, self.output.shape[1] - 2 - tokens.shape[1]), value=-1)  # the prefill emits one token
        finished = ended | broken | ~active
        status = torch.where(broken, torch.where(final == ALL_MASKED, MASKED, BROKEN), finished.long())
        self.output.copy_(torch.cat([emitted, torch.stack([count.long(), status], 1)], 1))
        self.last_token.copy_(torch.where(count > 0, last, self.last_token))
        self.committed_lens.add_(count)
        self.finished.copy_(finished)
        return count
