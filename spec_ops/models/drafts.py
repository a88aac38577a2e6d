"""Draft models: an EAGLE-3 head, an MTP/NextN layer, and a standalone language model.

A round drives all three through one interface, `Draft`. The row of a draft at KV slot `p` reads one token and predicts the one
after it. `token_offset` says which token it reads:

* 0 (EAGLE-3, MTP): row `p` joins the target's features of position `p` with token `p + 1`;
* 1 (standalone): row `p` reads token `p`, so that the draft's slots run one ahead of the target's.
"""

from __future__ import annotations

import torch
from torch import nn

from spec_ops.models.config import ModelConfig, ModelSizes
from spec_ops.models.layers import GQA, MLP, DecoderLayer, likeliest, rope_tables
from spec_ops.models.target import Ranks, Target, TargetOutput


class Draft(nn.Module):
    """What a round needs of a draft model.

    Attributes:
        config: sizes of the draft's own layers and KV cache.
        token_offset: see the module docstring.
        draft_to_target: `[draft_vocab]` int64 map of a reduced vocabulary to target ids, or None.
        ranks: the processes that share the draft; None where each runs a whole one.
        reads: what `encode` takes of the target: the width of a hidden state, and of how many `aux_layers` it has them side by
            side, 0 for the last hidden state alone. None if that does not matter.
    """

    config: ModelSizes
    token_offset = 0
    reads: tuple[int, int] | None = None
    ranks: Ranks | None = None
    draft_to_target: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("draft_to_target", None)

    @property
    def draft_vocab_size(self) -> int:
        """Width of `logits`."""
        return self.config.vocab_size if self.draft_to_target is None else self.draft_to_target.shape[0]

    def encode(self, output: TargetOutput) -> torch.Tensor:
        """The hidden input `[..., hidden_size]` of `forward`, from the target's output for the same tokens."""
        raise NotImplementedError

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attention) -> torch.Tensor:
        """Run the draft.

        Args:
            tokens: target ids, `[bs, q_len]`, or `[total_q]` in a ragged extend.
            hidden: `[..., hidden_size]` for each of them, from `encode` or from the draft step before.
            positions: for RoPE, of the shape of `tokens`.
            attention: what the layers attend through, a `PagedAttention`.

        Returns:
            `[..., hidden_size]`: what `logits` and the next draft step take.
        """
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., draft_vocab]` for the result of `forward`."""
        raise NotImplementedError

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest draft ids `[...]` int64 for the result of `forward`."""
        return self.logits(hidden).argmax(-1)

    def to_target(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target ids of the draft ids `tokens`."""
        return tokens if self.draft_to_target is None else self.draft_to_target[tokens]

    def target_to_draft(self) -> torch.Tensor | None:
        """`[vocab_size]` int64: the draft ids of the target's tokens, -1 for those that a reduced vocabulary lacks; None for a
        whole one. Made anew by every call: loading a checkpoint replaces `draft_to_target`."""
        ids = self.draft_to_target
        if ids is None:
            return None
        places = ids.new_full((self.config.vocab_size,), -1)
        return places.scatter(0, ids, torch.arange(len(ids), device=ids.device))

    def own_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict without the modules that are shared with the target."""
        return self.state_dict()


def vocabulary_problem(draft_to_target: torch.Tensor, vocab_size: int) -> str | None:
    """What is wrong with a map of draft ids to target ids; None if nothing is. Values on the meta device are not checked.

    Two draft ids of one target id would give it two probabilities, and rejection sampling would compare only one of them.
    """
    kind = f"{str(draft_to_target.dtype).removeprefix('torch.')} {list(draft_to_target.shape)}"
    if draft_to_target.dim() != 1 or draft_to_target.dtype != torch.int64 or draft_to_target.numel() == 0:
        return f"must be int64 of shape [draft_vocab], got {kind}"
    if draft_to_target.is_meta or isinstance(draft_to_target, torch._subclasses.FakeTensor):
        return None
    low, high = int(draft_to_target.min()), int(draft_to_target.max())
    if low < 0 or high >= vocab_size:
        return f"must hold ids in [0, {vocab_size}), got {low} to {high}"
    ids, counts = draft_to_target.unique(return_counts=True)
    if ids.numel() < draft_to_target.numel():
        return f"must hold different ids, got {int(ids[counts.argmax()])} {int(counts.max())} times"
    return None


class Eagle3Draft(Draft):
    """EAGLE-3 head (arXiv:2503.01840), or EAGLE-3.1 (arXiv:2605.09992). `fc` fuses three hidden states of the target, the
    attention of the first layer reads token embedding and hidden state side by side, and the LM head mostly covers a reduced
    vocabulary.

    Args:
        config: of the head: GQA, with the target's hidden size. Layers after the first are plain decoder layers, as in vLLM.
        target: its embedding is shared, and its `aux_layers` give the features.
        draft_to_target: `[draft_vocab]` int64, distinct target ids; None if the head covers the whole vocabulary.
        norm_before_residual: whether the first layer's residual is the normalized hidden state, as in heads trained by
            `speculators`.
        norm_before_fc: whether the target's hidden states go through one norm, side by side, before `fc`.
        fc_norm: whether each of them goes through a norm of its own before `fc` (EAGLE-3.1).
        norm_output: whether the next draft step reads the hidden state after the final norm (EAGLE-3.1) or the one before it.

    Raises:
        ValueError: naming the argument that does not fit the target.
    """

    config: ModelConfig

    def __init__(
        self,
        config: ModelConfig,
        target: Target,
        draft_to_target: torch.Tensor | None,
        *,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__()
        if not target.config.aux_layers:
            raise ValueError("Eagle3Draft: `target` must have `aux_layers`, got none")
        if config.hidden_size != target.config.hidden_size or config.is_mla:
            raise ValueError(
                f"Eagle3Draft: `config` must be GQA layers of the target's hidden size {target.config.hidden_size}, got "
                f"{'MLA' if config.is_mla else 'GQA'} layers of {config.hidden_size}"
            )
        if draft_to_target is None and config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"Eagle3Draft: `draft_to_target` must map the head's vocabulary of {config.vocab_size} to the target's of "
                f"{target.config.vocab_size}, got None"
            )
        if draft_to_target is not None and (problem := vocabulary_problem(draft_to_target, target.config.vocab_size)):
            raise ValueError(f"Eagle3Draft: `draft_to_target` {problem}")
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.norm_before_residual, self.norm_output = config, norm_before_residual, norm_output
        self.embed = target.embed
        count = len(target.config.aux_layers)
        self.reads = hidden, count
        self.input_norm = nn.RMSNorm(hidden * count, eps=eps) if norm_before_fc else None
        self.fc_norm = nn.ModuleList(nn.RMSNorm(hidden, eps=eps) for _ in range(count)) if fc_norm else None
        self.fc = nn.Linear(hidden * count, hidden, bias=False)
        self.embed_norm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.attention = GQA(config, 0, input_size=2 * hidden)
        self.post_norm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = MLP(config)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(1, config.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=eps)
        vocab = config.vocab_size if draft_to_target is None else draft_to_target.shape[0]
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.draft_to_target = None if draft_to_target is None else draft_to_target.clone()

    def encode(self, output: TargetOutput) -> torch.Tensor:
        aux = output.aux
        assert aux is not None
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.chunk(len(self.fc_norm), -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux)

    def forward(self, tokens, hidden, positions, attention):
        rope = rope_tables(positions, self.config)
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.embed_norm(self.embed(tokens)), normed], -1)
        hidden = (normed if self.norm_before_residual else hidden) + self.attention(x, rope, attention)
        hidden = hidden + self.mlp(self.post_norm(hidden))
        for layer in self.layers:
            hidden = layer(hidden, rope, attention)
        return self.norm(hidden) if self.norm_output else hidden

    def logits(self, hidden):
        return self.lm_head(hidden if self.norm_output else self.norm(hidden))

    def argmax(self, hidden):
        return likeliest(self.lm_head, hidden if self.norm_output else self.norm(hidden))

    def own_state_dict(self):
        return {name: value for name, value in self.state_dict().items() if not name.startswith("embed.")}


class MTPDraft(Draft):
    """Multi-token-prediction (NextN) layer (DeepSeek-V3, arXiv:2412.19437). Embedding and the target's hidden state are
    normalized and projected together, and go through one decoder layer. Embedding and LM head are the target's.

    Args:
        config: of the layer: one layer, with the target's hidden size and vocabulary.
        target: its embedding and LM head are shared.

    Raises:
        ValueError: a `config` that does not fit the target.
    """

    config: ModelConfig

    def __init__(self, config: ModelConfig, target: Target) -> None:
        super().__init__()
        if (config.hidden_size, config.vocab_size, config.num_layers) != (
            target.config.hidden_size,
            target.config.vocab_size,
            1,
        ):
            raise ValueError("MTPDraft: `config` must be one layer of the target's hidden size and vocabulary")
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.reads = config, (hidden, 0)
        self.embed, self.lm_head = target.embed, target.lm_head
        self.enorm = nn.RMSNorm(hidden, eps=eps)
        self.hnorm = nn.RMSNorm(hidden, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = DecoderLayer(config, 0)
        self.norm = nn.RMSNorm(hidden, eps=eps)

    def encode(self, output: TargetOutput) -> torch.Tensor:
        return output.hidden

    def forward(self, tokens, hidden, positions, attention):
        x = self.eh_proj(torch.cat([self.enorm(self.embed(tokens)), self.hnorm(hidden)], -1))
        return self.norm(self.layer(x, rope_tables(positions, self.config), attention))

    def logits(self, hidden):
        return self.lm_head(hidden)

    def argmax(self, hidden):
        return likeliest(self.lm_head, hidden)

    def own_state_dict(self):
        shared = ("embed.", "lm_head.")
        return {name: value for name, value in self.state_dict().items() if not name.startswith(shared)}


class StandaloneDraft(Draft):
    """A small language model with the target's vocabulary. It does not use the target's features.

    Args:
        model: the language model.
    """

    token_offset = 1

    def __init__(self, model: Target) -> None:
        super().__init__()
        self.config = model.config
        self.model = model

    def encode(self, output: TargetOutput) -> torch.Tensor:
        # Only the shape matters: the round carries one hidden row per request for every kind of draft.
        return output.hidden.new_zeros(*output.hidden.shape[:-1], self.config.hidden_size)

    def forward(self, tokens, hidden, positions, attention):
        return self.model(tokens, positions, attention).hidden

    def logits(self, hidden):
        return self.model.logits(hidden)

    def argmax(self, hidden):
        return self.model.argmax(hidden)
