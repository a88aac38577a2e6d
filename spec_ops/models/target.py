"""Target models: the interface, and a reference model with Llama-type GQA or DeepSeek-type MLA."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from spec_ops.models.config import ModelConfig, ModelSizes
from spec_ops.models.layers import DecoderLayer, likeliest, rope_tables

_T = TypeVar("_T")


class TargetOutput(NamedTuple):
    """What a target's forward gives.

    Attributes:
        hidden: `[..., hidden_size]`, after the final norm: what the LM head reads.
        aux: `[..., len(aux_layers) * hidden_size]`, the inputs of `config.aux_layers` side by side; None without such layers.
    """

    hidden: torch.Tensor
    aux: torch.Tensor | None


class Ranks(Protocol):
    """The processes that share a model (`spec_ops.parallel.TensorParallel`): what generation asks of them."""

    rank: int
    size: int

    def agree(self, *values: torch.Tensor) -> list[torch.Tensor]: ...

    def first(self, value: _T) -> _T: ...

    def on_first(self, where: str, make: Callable[[], _T]) -> _T: ...

    def check_same(self, where: str, values: dict[str, Any]) -> None: ...

    def check_round(self, output: torch.Tensor) -> None: ...

    def guard(self, where: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class PositionLimit:
    """A model has positions `[0, count)` only; `reason` says what happens past them."""

    count: int
    reason: str


class Target(nn.Module):
    """What a round needs of a target model. It attends through an `attention` object, see `spec_ops.models.paged`.

    Attributes:
        config: sizes.
        embed: the embedding, which heads share. Its weight has the model's device and dtype.
        lm_head: the LM head, which heads may share.
        position_limit: how many positions the model has; None for no limit.
        ranks: the processes that share the model; None for a whole one.
    """

    config: ModelSizes
    embed: nn.Embedding
    lm_head: nn.Linear
    position_limit: PositionLimit | None = None
    ranks: Ranks | None = None

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention) -> TargetOutput:
        """Run the model.

        Args:
            tokens: int64, `[bs, q_len]`, or `[total_q]` in a ragged extend.
            positions: for RoPE, of the shape of `tokens`. Drafts that will not be emitted may lie past `position_limit`; their
                hidden states do not matter.
            attention: what the layers attend through, a `PagedAttention`.
        """
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., vocab_size]` for `hidden [..., hidden_size]`."""
        raise NotImplementedError

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens `[...]` int64 for `hidden [..., hidden_size]`."""
        return self.logits(hidden).argmax(-1)


class CausalLM(Target):
    """A decoder-only language model with random weights: GQA or MLA, as `config` says.

    Args:
        config: sizes.
    """

    config: ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=config.hidden_size**-0.5)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention) -> TargetOutput:
        x = self.embed(tokens)
        rope = rope_tables(positions, self.config)
        inputs = []
        for layer in self.layers:
            inputs.append(x)
            x = layer(x, rope, attention)
        aux = [inputs[index] for index in self.config.aux_layers]
        return TargetOutput(self.norm(x), torch.cat(aux, -1) if aux else None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return likeliest(self.lm_head, hidden)
