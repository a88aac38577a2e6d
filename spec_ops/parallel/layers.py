"""The LM head whose vocabulary is divided among ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spec_ops.models.layers import DividedHead
from spec_ops.parallel.group import TensorParallel

_LARGEST = torch.iinfo(torch.int32).max


class VocabParallelHead(DividedHead):
    """An LM head of which a rank holds the rows of its share of the vocabulary.

    The shares are of one size. Where that does not divide the vocabulary, the last rows of the last ranks are padding.

    Args:
        hidden_size: columns.
        vocab_size: tokens of all ranks together.
        ranks: who shares them.
    """

    first: torch.Tensor
    padding: torch.Tensor | None

    def __init__(self, hidden_size: int, vocab_size: int, ranks: TensorParallel) -> None:
        rows = -(-vocab_size // ranks.size)
        super().__init__(hidden_size, rows, bias=False)
        self.vocab_size, self.ranks = vocab_size, ranks
        # Numbers that depend on the rank are buffers, so that all ranks compile one and the same graph.
        first = rows * ranks.rank
        self.register_buffer("first", torch.tensor(first, device="cpu"), persistent=False)
        padding = None
        if rows * ranks.size != vocab_size:
            padding = torch.arange(first, first + rows, device="cpu") >= vocab_size
        self.register_buffer("padding", padding, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """All logits `[..., vocab_size]` on every rank."""
        return self.ranks.gather(super().forward(hidden))[..., : self.vocab_size]

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens `[...]` int64; ranks exchange 8 bytes a row.

        The lowest id wins a tie and NaN is above all numbers, as in `torch.argmax`.
        """
        logits = F.linear(hidden, self.weight)
        if self.padding is not None:
            logits = logits.masked_fill(self.padding, -torch.inf)
        return likeliest_of_shares(logits, self.first, self.ranks)


def likeliest_of_shares(logits: torch.Tensor, first: torch.Tensor, ranks: TensorParallel) -> torch.Tensor:
    """The likeliest tokens `[...]` int64 over the logits of all ranks. They exchange 8 bytes a row.

    Args:
        logits: `[..., n]` of this rank's share of the vocabulary, at most 32 bits each; `n` may be 0 if other ranks have more.
        first: int64, the token of the first of them.
        ranks: who shares the vocabulary, in its order.
    """
    if logits.shape[-1]:
        ids = logits.argmax(-1)
        keys = pack(logits.gather(-1, ids[..., None])[..., 0], ids + first)
    else:
        keys = first.new_full(logits.shape[:-1], torch.iinfo(torch.int64).min)
    return unpack_ids(ranks.largest(keys))


def pack(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Keys of which the largest has the largest value, and among equal ones the lowest id.

    Args:
        values: floating point, at most 32 bits. -0.0 equals 0.0, and NaN is above all.
        ids: int64 of the same shape, in [0, 2**31).

    Returns:
        int64: the value's bits, in an order of signed integers, above the complement of the id.
    """
    bits = (values.float() + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _LARGEST, bits)
    ordered = torch.where(values.isnan(), _LARGEST, ordered)
    return (ordered.to(torch.int64) << 32) | (_LARGEST - ids)


def unpack_ids(keys: torch.Tensor) -> torch.Tensor:
    """The ids in keys of `pack`."""
    return _LARGEST - (keys & _LARGEST)
