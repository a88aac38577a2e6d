"""Configurations of the model families shipped here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, NamedTuple, Protocol

from spec_ops.models.fields import FieldError, Fields

KVRows = tuple[tuple[tuple[int, ...], ...], ...]


class LayerAttention(NamedTuple):
    """What of a layer's attention decides which kernels can run it, besides its rows in the cache.

    Attributes:
        num_heads: query heads.
        v_head_dim: width of a head's result, of MLA `kv_lora_rank`.
        window, sinks, softcap: whether it has a sliding window, attention sinks, a soft cap.
    """

    num_heads: int
    v_head_dim: int
    window: bool = False
    sinks: bool = False
    softcap: bool = False


class CacheSizes(Protocol):
    """What a KV cache needs to know of a model."""

    @property
    def kv_rows(self) -> KVRows:
        """For each layer the shapes of a token's rows: `((kv_heads, head_dim), (kv_heads, v_head_dim))`, or for MLA one latent
        row, `((kv_lora_rank + qk_rope_head_dim,),)`."""


class ModelSizes(CacheSizes, Protocol):
    """What a round needs to know of a model, whoever wrote it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose *input* hidden states are handed to an EAGLE-3 draft; empty for none."""


@dataclass(frozen=True)
class MixtureConfig:
    """Layers whose MLP is a mixture of experts, see `spec_ops.route_experts` and `spec_ops.moe_experts`.

    Attributes:
        num_experts: of a layer, at most 1024.
        experts_per_token: that a token goes to, at most 32.
        intermediate_size: width of an expert.
        shared_intermediate_size: width of an expert that every token goes to besides (DeepSeek); 0 for none.
        first_dense: how many layers at the beginning have a plain MLP.
        scoring: `"softmax"` or `"sigmoid"`.
        correction_bias: whether a learned bias takes part in the choice of experts (DeepSeek-V3, GLM-4).
        groups: in how many groups the experts lie.
        top_groups: of how many groups a token's experts come.
        renormalize: divide a token's weights by their sum.
        scale: what weights are multiplied with.
        biases: whether the router and the experts have biases (gpt-oss).
        limit: the clamp of the experts' activation; None for none.
        alpha: SiLU is `g * sigmoid(alpha * g)`.
        beta: added to the up projection.
        local_experts: how many of the experts a rank holds where ranks share them by expert; 0 for all.

    Raises:
        FieldError: a value of another type or out of range, by name.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    first_dense: int = 0
    scoring: str = "softmax"
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    biases: bool = False
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    local_experts: int = 0

    def __post_init__(self) -> None:
        check = Fields(vars(self), _mixture_error)
        for name in ("num_experts", "experts_per_token", "intermediate_size", "groups", "top_groups"):
            check.integer(name)
        for name in ("shared_intermediate_size", "first_dense", "local_experts"):
            check.integer(name, 0)
        for name in ("correction_bias", "renormalize", "biases"):
            check.flag(name)
        for name in ("scale", "alpha"):
            check.positive(name)
        check.positive("limit", None)
        if self.beta != 0:
            check.positive("beta")
        if self.num_experts > 1024:
            raise check.error("num_experts", f"must be at most 1024, got {self.num_experts}")
        if check.text("scoring") not in ("softmax", "sigmoid"):
            raise check.error("scoring", f"must be 'softmax' or 'sigmoid', got {self.scoring!r}")
        if self.local_experts and self.num_experts % self.local_experts:
            raise check.error("local_experts", f"must divide `num_experts` {self.num_experts}, got {self.local_experts}")
        if self.num_experts % self.groups:
            raise check.error("groups", f"must divide `num_experts` {self.num_experts}, got {self.groups}")
        if self.correction_bias and self.groups > 1 and self.num_experts == self.groups:
            raise check.error("groups", f"must have two experts each with `correction_bias`, got {self.groups} groups of one")
        if self.top_groups > self.groups:
            raise check.error("top_groups", f"must be at most `groups` {self.groups}, got {self.top_groups}")
        most = min(32, self.num_experts // self.groups * self.top_groups)
        if self.experts_per_token > most:
            raise check.error("experts_per_token", f"must be at most {most}, got {self.experts_per_token}")


def _mixture_error(field: str, problem: str) -> FieldError:
    return FieldError("MixtureConfig", field, problem)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: pre-norm, RoPE, SwiGLU or a mixture of experts; GQA or absorbed MLA attention.

    Attributes:
        vocab_size: width of the LM head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: GQA only; divides `num_heads`.
        head_dim: GQA only; even.
        rope_theta: base of RoPE's frequencies.
        rope_scaling: Llama 3.1's scaling of RoPE: factor, low and high frequency factor, original context; None for plain RoPE.
        rms_norm_eps: of every norm.
        sliding_window: keys that a query sees, its own included (the convention of transformers); None for all.
        sliding_window_pattern: one layer of so many ignores the window and sees all keys, as in Gemma (6) and gpt-oss (2); None
            for no such layer.
        attention_sinks: GQA only: each head has a learned logit in the softmax's denominator (gpt-oss).
        kv_lora_rank: width of the latent rows; above 0 the attention is MLA, with the four sizes below.
        q_lora_rank: width of the query's bottleneck; None for a direct projection.
        qk_nope_head_dim: MLA: a head's part without RoPE.
        qk_rope_head_dim: MLA: a head's part with RoPE; even.
        v_head_dim: MLA: a head's values.
        aux_layers: layers whose *input* hidden states are handed to an EAGLE-3 draft; empty for none.
        mixture: of the layers that are mixtures of experts; None for none.

    Raises:
        FieldError: a value of another type or out of range, by name.
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
    mixture: MixtureConfig | None = None

    def __post_init__(self) -> None:
        check = Fields(vars(self), _error)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            check.integer(name)
        for name in ("kv_lora_rank", "num_kv_heads", "head_dim"):
            check.integer(name, 0)
        if check.flag("attention_sinks") and self.is_mla:
            raise check.error("attention_sinks", "is for GQA, got MLA")
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check.integer(name, 1 if self.is_mla else 0)
        for name in ("q_lora_rank", "sliding_window"):
            check.integer(name, default=None)
        for name in ("rope_theta", "rms_norm_eps"):
            check.positive(name)
        if check.integer("sliding_window_pattern", 2, default=None) is not None and self.sliding_window is None:
            raise check.error("sliding_window_pattern", f"needs `sliding_window`, got {self.sliding_window_pattern} without")
        if self.is_mla:
            if self.qk_rope_head_dim % 2:
                raise check.error("qk_rope_head_dim", f"must be even, got {self.qk_rope_head_dim}")
        elif self.head_dim < 2 or self.head_dim % 2:
            raise check.error("head_dim", f"must be even and at least 2, got {self.head_dim}")
        elif self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise check.error("num_kv_heads", f"must divide `num_heads` {self.num_heads}, got {self.num_kv_heads}")
        if any(not 0 <= layer < self.num_layers for layer in check.integers("aux_layers")):
            raise check.error("aux_layers", f"must lie in [0, {self.num_layers}), got {self.aux_layers}")
        if self.rope_scaling is not None:
            self._check_rope_scaling(check)
        if self.mixture is not None and not isinstance(self.mixture, MixtureConfig):
            raise check.error("mixture", f"must be a MixtureConfig, got {self.mixture!r:.80}")

    def _check_rope_scaling(self, check: Fields) -> None:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_context")
        if not isinstance(self.rope_scaling, tuple) or len(self.rope_scaling) != len(names):
            raise check.error("rope_scaling", f"must be {', '.join(names)}; got {self.rope_scaling!r}")
        values = Fields(dict(zip(names, self.rope_scaling, strict=True)), _error, "rope_scaling")
        _, low, high, _ = (values.positive(name) for name in names)
        if low >= high:
            raise values.error("low_freq_factor", f"must be below `high_freq_factor` {high:g}, got {low:g}")

    @property
    def is_mla(self) -> bool:
        """Whether the attention is MLA, else GQA."""
        return self.kv_lora_rank > 0

    def is_mixture(self, layer: int) -> bool:
        """Whether the MLP of `layer` is a mixture of experts."""
        return self.mixture is not None and layer >= self.mixture.first_dense

    def window(self, layer: int) -> int | None:
        """Keys that a query of `layer` sees, its own included; None for all."""
        full = self.sliding_window_pattern is not None and (layer + 1) % self.sliding_window_pattern == 0
        return None if full else self.sliding_window

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        """Of each layer."""
        width = self.kv_lora_rank if self.is_mla else self.head_dim
        windows = (self.window(layer) is not None for layer in range(self.num_layers))
        return tuple(LayerAttention(self.num_heads, width, window, self.attention_sinks) for window in windows)

    @property
    def kv_rows(self) -> KVRows:
        if self.is_mla:
            return (((self.kv_lora_rank + self.qk_rope_head_dim,),),) * self.num_layers
        return (((self.num_kv_heads, self.head_dim),) * 2,) * self.num_layers

    def to_dict(self) -> dict:
        """The attributes by name, as JSON can store them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The configuration that `to_dict` gave, also after JSON made lists of its tuples.

        Raises:
            FieldError: naming a field that is unknown, missing or wrong.
        """
        _check_names(cls, values, _error)
        as_tuples: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        if isinstance(mixture := values.get("mixture"), Mapping):
            _check_names(MixtureConfig, mixture, _mixture_error)
            as_tuples["mixture"] = MixtureConfig(**mixture)
        return cls(**as_tuples)


def _check_names(cls: type, values: Mapping[str, Any], error: Callable[[str, str], FieldError]) -> None:
    if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
        raise error(unknown[0], "is unknown")
    if missing := [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]:
        raise error(missing[0], "is missing")


def _error(field: str, problem: str) -> FieldError:
    return FieldError("ModelConfig", field, problem)
