"""Target models: Llama-type GQA and DeepSeek-type MLA, chosen by the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from spec_ops.models.config import ModelConfig, ModelSizes
from spec_ops.models.layers import DecoderLayer, rope_tables


class TargetOutput(NamedTuple):
    """`hidden [..., hidden_size]`: after the final norm, what the LM head reads. `aux`: the inputs of `config.aux_layers` side
    by side, `[..., len(aux_layers) * hidden_size]`, or None."""

    hidden: torch.Tensor
    aux: torch.Tensor | None


@dataclass(frozen=True)
class PositionLimit:
    """Positions `[0, count)` are all that a model has; `reason` says what is beyond."""

    count: int
    reason: str


class Target(nn.Module):
    """What the round needs of a target model; it attends through an `attention` object (see `models.paged`)."""

    config: ModelSizes
    embed: nn.Embedding
    lm_head: nn.Linear
    position_limit: PositionLimit | None = None

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention) -> TargetOutput:
        """`tokens`, `positions`: `[bs, q_len]`, or `[total_q]` for a ragged extend. Positions past `position_limit` come
        too, of drafts that will not be emitted: any hidden states will do."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., vocab_size]` from `[..., hidden_size]`."""
        raise NotImplementedError


class CausalLM(Target):
    """A decoder-only language model."""

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
