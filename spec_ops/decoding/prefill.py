"""Pieces of prompts, as ragged extends: several short prompts together, or a part of a long one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from spec_ops.models.paged import PagedAttention, PagedKVCache


class PromptPiece(NamedTuple):
    """Tokens `[start, ends[i])` of prompts, the same `start` for all. They are whole prompts, or a part of one.

    Attributes:
        prompts: the whole prompts, token ids.
        rows: `[n]` int64, on the device, the rows of the bucket that they run in.
        tables: `[n, max_pages]` int32, their pages.
        start, ends: which tokens.
        backend: of the attention ops.
    """

    prompts: Sequence[Sequence[int]]
    rows: torch.Tensor
    tables: torch.Tensor
    start: int
    ends: list[int]
    backend: str

    @property
    def last(self) -> bool:
        """Whether the prompts end here."""
        return self.ends == [len(prompt) for prompt in self.prompts]

    @property
    def counts(self) -> list[int]:
        """Tokens of each prompt in this piece."""
        return [end - self.start for end in self.ends]

    def tokens(self, shift: int = 0, more: int = 0) -> torch.Tensor:
        """The tokens `[start + shift, ends[i] + shift)` of each prompt, and as many zeros after each as it lacks, and `more`.

        Returns:
            `[total]` int64.
        """
        rows = [prompt[self.start + shift : end + shift] for prompt, end in zip(self.prompts, self.ends, strict=True)]
        padded = [[*row, *[0] * (count + more - len(row))] for row, count in zip(rows, self.counts, strict=True)]
        return torch.tensor([token for row in padded for token in row], device="cpu").to(self.rows.device)

    def extend(self, cache: PagedKVCache, more: int = 0) -> tuple[torch.Tensor, PagedAttention, torch.Tensor]:
        """A ragged extend of a cache by these tokens, and `more` after the end of each prompt.

        Returns:
            positions `[total]`, the attention, and `[n]` int64 where the last token of each prompt is.
        """
        device, page_size, ends = self.rows.device, cache.page_size, [end + more for end in self.ends]
        counts = [end - self.start for end in ends]
        # On the CPU, whatever the default device is.
        positions = torch.cat([torch.arange(self.start, end, device="cpu") for end in ends]).to(device)
        request = torch.arange(len(ends), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu")).to(device)
        indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cpu").to(device)
        attention = PagedAttention(
            cache,
            "extend",
            self.tables,
            torch.tensor(ends, dtype=torch.int32, device="cpu").to(device),
            self.tables[request, positions // page_size].long() * page_size + positions % page_size,
            q_indptr=indptr,
            max_q_len=max(counts),
            backend=self.backend,
        )
        return positions, attention, indptr[1:].long() - 1


def pieces(
    prompts: Sequence[Sequence[int]], rows: torch.Tensor, tables: torch.Tensor, size: int, backend: str
) -> Iterator[PromptPiece]:
    """One piece if there are several prompts; those of at most `size` tokens if there is one."""
    lens = [len(prompt) for prompt in prompts]
    step = size if len(prompts) == 1 else max(lens)
    for start in range(0, max(lens), step):
        yield PromptPiece(prompts, rows, tables, start, [min(start + step, length) for length in lens], backend)
