"""Configurations of the model families shipped here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Protocol

KVRows = tuple[tuple[tuple[int, ...], ...], ...]


class CacheSizes(Protocol):
    """What a KV cache needs of a model's configuration."""

    @property
    def kv_rows(self) -> KVRows:
        """Per layer the shapes of what one token takes: `((kv_heads, head_dim), (kv_heads, v_head_dim))`, or for MLA one
        latent row `((kv_lora_rank + qk_rope_head_dim,),)`."""


class ModelSizes(CacheSizes, Protocol):
    """What the round needs of a model's configuration, whoever wrote the model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose *input* hidden states are handed to an EAGLE-3 draft; empty for none."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: pre-norm, RoPE, SwiGLU; GQA or absorbed MLA attention.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads: as in Llama.
        num_kv_heads, head_dim: GQA only.
        rope_scaling: Llama 3.1's stretched RoPE: factor, low and high frequency factor, original context; None for plain RoPE.
        sliding_window: keys visible behind a query, itself included (Hugging Face's convention); None for all.
        sliding_window_pattern: every so many layers one ignores the window and sees all keys, as in Gemma (6) and gpt-oss (2);
            None for none.
        attention_sinks: GQA only: each head has a learned logit in the softmax's denominator (gpt-oss).
        kv_lora_rank: latent width; above 0 makes the attention MLA with the four sizes below.
        q_lora_rank: width of the query's bottleneck; None for a direct projection.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: MLA head sizes.
        aux_layers: layers whose *input* hidden states are handed to an EAGLE-3 draft; empty for none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: tuple[float, float, float, float] | None = None
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    attention_sinks: bool = False
    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    aux_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig: `{name}` must be at least 1, got {getattr(self, name)}")
        if self.sliding_window_pattern is not None and (self.sliding_window is None or self.sliding_window_pattern < 2):
            raise ValueError(
                "ModelConfig: `sliding_window_pattern` must be at least 2 and needs `sliding_window`, "
                f"got {self.sliding_window_pattern} and {self.sliding_window}"
            )
        if self.attention_sinks and self.is_mla:
            raise ValueError("ModelConfig: `attention_sinks` is for GQA, got MLA")
        if self.is_mla:
            for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                if getattr(self, name) < 1:
                    raise ValueError(f"ModelConfig: `{name}` must be at least 1 for MLA, got {getattr(self, name)}")
        elif self.head_dim < 2 or self.head_dim % 2 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                "ModelConfig: `num_kv_heads` must divide `num_heads` and `head_dim` be even, "
                f"got {self.num_heads}, {self.num_kv_heads}, {self.head_dim}"
            )
        if any(not 0 <= layer < self.num_layers for layer in self.aux_layers):
            raise ValueError(f"ModelConfig: `aux_layers` must lie in [0, {self.num_layers}), got {self.aux_layers}")

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    def window(self, layer: int) -> int | None:
        """Keys visible behind a query of `layer`, itself included; None for all."""
        full = self.sliding_window_pattern is not None and (layer + 1) % self.sliding_window_pattern == 0
        return None if full else self.sliding_window

    @property
    def kv_rows(self) -> KVRows:
        if self.is_mla:
            return (((self.kv_lora_rank + self.qk_rope_head_dim,),),) * self.num_layers
        return (((self.num_kv_heads, self.head_dim),) * 2,) * self.num_layers

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> ModelConfig:
        known = {f.name for f in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"ModelConfig: unknown keys {sorted(unknown)}")
        scaling = values.get("rope_scaling")
        tuples = {"aux_layers": tuple(values.get("aux_layers", ())), "rope_scaling": tuple(scaling) if scaling else None}
        return cls(**{**values, **tuples})
