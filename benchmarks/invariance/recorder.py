"""The bits of logits, seen from inside of rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class LogitsRecorder(nn.Module):
    """A `logits_processor` that changes nothing, and keeps a number made of the bits of the logits of every token of a text.

    A row is known by its history. It counts if that is how a text of `texts` begins: drafts that are rejected do not. The
    number is a sum of products of integers, modulo 2^64, and so does not depend on an order.

    Args:
        prompts: no two begin with the same tokens, as many as the shortest has.
        length: most tokens of a request.
        vocab_size: of the logits.
        texts: prompts and what plain decoding gave. None for plain decoding itself, whose rows all count.

    Attributes:
        bits: `[prompts, length]` int64: at `n` for the logits after the first `n` tokens of a text; 0 where there were none.

    Raises:
        ValueError: two prompts begin alike.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], length: int, vocab_size: int, device: torch.device,
        texts: Sequence[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        shortest = min(map(len, prompts))
        if len({tuple(prompt[:shortest]) for prompt in prompts}) < len(prompts):
            raise ValueError(f"LogitsRecorder: `prompts` must differ in their first {shortest} tokens")
        padded = [[*text, *[-1] * (length - len(text))] for text in texts or prompts]
        factors = torch.randint(-(2**62), 2**62, (vocab_size,), generator=torch.Generator().manual_seed(0))
        for name, tensor in (
            ("heads", torch.tensor([prompt[:shortest] for prompt in prompts])),
            ("texts", torch.tensor(padded)),
            ("every", torch.tensor(texts is None)),
            ("factors", factors | 1),
            # One place more, where what does not count goes.
            ("bits_flat", torch.zeros(len(prompts) * length + 1, dtype=torch.int64)),
        ):
            self.register_buffer(name, tensor.to(device), persistent=False)
            torch._dynamo.mark_static_address(getattr(self, name))
        self.length = length

    @property
    def bits(self) -> torch.Tensor:
        return self.bits_flat[:-1].view(-1, self.length).cpu()

    def forward(self, logits: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        shortest = self.heads.shape[1]
        same = (history[:, None, :shortest] == self.heads).all(-1)
        request = torch.where(same, torch.arange(len(self.heads), device=history.device), 0).sum(-1)
        later = torch.arange(self.length, device=history.device) >= lengths[:, None]
        begins = ((history[:, : self.length] == self.texts[request]) | later).all(-1)
        counts = same.any(-1) & (begins | self.every) & (lengths < self.length)
        place = torch.where(counts, request * self.length + lengths, self.bits_flat.shape[0] - 1)
        made = (logits.contiguous().view(torch.int32).long() * self.factors).sum(-1)
        self.bits_flat.index_put_((place,), made)
        return logits
