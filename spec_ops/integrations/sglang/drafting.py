"""All steps of a draft: one page table for them all, and a row of lengths for each.

SGLang runs step `i` under `attn_backends[i]`. A chain's step `i` attends `L + i + 1` tokens. A tree has its branches side by
side: branch `t` of `K` writes slots `L + t * S` to `L + t * S + S - 1` of `S` steps (SGLang's layout for pages of 1), so that a
step attends the last `K * S` positions by a mask, the same for every request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spec_ops.integrations.sglang.attention import Attended, Lengths, SpecOpsAttention


def tree_words(topk: int, num_steps: int, step: int) -> list[int]:
    """Of each branch in draft step `step`: its own positions up to this step, among `topk * num_steps`; as int64."""
    words = [((1 << (step + 1)) - 1) << (branch * num_steps) for branch in range(topk)]
    return [word - (1 << 64) if word >> 63 else word for word in words]


class SpecOpsDraftSteps:
    """What SGLang calls a multi-step draft backend.

    Args:
        runner: the draft's `ModelRunner`.
        topk: branches, K. num_steps: S, of which all but the last attend.
        make: a backend for one step.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, num_steps: int, make: Callable[[Any], SpecOpsAttention]) -> None:
        self.topk, self.speculative_num_steps = topk, num_steps
        self.attn_backends = [make(runner) for _ in range(num_steps - 1)]
        for backend in self.attn_backends:
            # Metadata come from here; SGLang initializes a step's backend itself in some of its paths.
            backend.init_forward_metadata = lambda forward_batch: None  # type: ignore[method-assign]
        first = self.attn_backends[0]
        self.max_context_len, self.device = first.max_context_len, first.device
        span = topk * num_steps
        ahead = [span] * (num_steps - 1) if topk > 1 else list(range(1, num_steps))
        self._lengths = Lengths(first.req_to_token, first.page_size, ahead)
        self._words: torch.Tensor | None = None
        if topk > 1:
            words = [tree_words(topk, num_steps, step) for step in range(num_steps - 1)]
            self._words = torch.tensor(words, dtype=torch.int64, device=first.req_to_token.device)

    def _bind(self, tables: torch.Tensor, lens: torch.Tensor) -> None:
        for step, backend in enumerate(self.attn_backends):
            attended = Attended("draft_decode", tables, lens[step], self.topk)
            if self._words is not None:
                words = self._words[step].expand(len(tables), -1)
                attended = attended._replace(tree_mask=words, mask_len=self.topk * self.speculative_num_steps)
            backend.forward_metadata = attended

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """For steps without a graph."""
        if not forward_batch.forward_mode.is_idle():
            self._bind(*self._lengths.made(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._lengths.keep(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Tables and lengths are written in the graph."""
        if in_capture:
            self._bind(*self._lengths.kept(forward_batch.batch_size))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        tables, lens = self._lengths.kept(forward_batch.batch_size)
        self._lengths.write(tables, lens, forward_batch)
