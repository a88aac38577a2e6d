"""The models that `python -m benchmarks round` measures, with random weights: only their sizes matter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from spec_ops.models import CausalLM, Draft, Eagle3Draft, MixtureConfig, ModelConfig, MTPDraft, Target


@dataclass(frozen=True)
class Shape:
    """A target and its draft.

    Attributes:
        label: of the rows.
        target: sizes; `aux_layers` are set by `with_layers`.
        draft_vocab: of an EAGLE-3 head of the target's width; None for an MTP/NextN layer of the target's kind.
        about: what differs from the model it stands for.
        family: of transformers' dense GQA models, for the round of a model of transformers.
    """

    label: str
    target: ModelConfig
    draft_vocab: int | None
    about: str
    family: str = "Llama"

    @property
    def draft(self) -> str:
        return "nextn" if self.draft_vocab is None else "eagle3"

    def with_layers(self, layers: int | None) -> Shape:
        """The same with another number of layers in the target (None: as it is)."""
        count = layers or self.target.num_layers
        # Where EAGLE-3 heads are trained to look: early, in the middle, late.
        places = (2, count // 2, count - 3) if self.draft_vocab is not None else ()
        aux = tuple(min(max(place, 0), count - 1) for place in places)
        return replace(self, target=replace(self.target, num_layers=count, aux_layers=aux))

    def head(self) -> ModelConfig:
        """Sizes of the draft: one layer like the target's; an EAGLE-3 head's sees everything and has no sinks."""
        if self.draft_vocab is None:
            mixture = self.target.mixture and replace(self.target.mixture, first_dense=0)
            return replace(self.target, num_layers=1, aux_layers=(), mixture=mixture)
        plain = {"mixture": None, "sliding_window": None, "sliding_window_pattern": None, "attention_sinks": False}
        return replace(self.target, num_layers=1, aux_layers=(), **plain)  # type: ignore[arg-type]

    def build(self, device: torch.device | str, dtype: torch.dtype) -> tuple[CausalLM, Draft]:
        """Target and draft with fresh weights; on "meta" they take no memory."""
        with _fresh_weights(device, dtype):
            target = CausalLM(self.target)
        return target, self.build_draft(target, device, dtype)

    def build_draft(self, target: Target, device: torch.device | str, dtype: torch.dtype) -> Draft:
        """A draft with fresh weights for a target, which may be a rank's share."""
        with _fresh_weights(device, dtype):
            if self.draft_vocab is None:
                return MTPDraft(self.head(), target)
            return Eagle3Draft(self.head(), target, torch.arange(self.draft_vocab))


@contextmanager
def _fresh_weights(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(default)


def touched_experts(mixture: MixtureConfig, tokens: int) -> float:
    """How many experts of a layer `tokens` tokens go to on average, if every set of experts is as likely."""
    return mixture.num_experts * (1 - (1 - mixture.experts_per_token / mixture.num_experts) ** tokens)


LLAMA_8B = Shape(
    "llama-3.1-8b-shape",
    ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
    ),
    draft_vocab=32000,
    about="Llama-3.1-8B with an EAGLE-3 head",
)
LLAMA_70B = Shape(
    "llama-3.3-70b-shape",
    replace(LLAMA_8B.target, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
    draft_vocab=32000,
    about="Llama-3.3-70B with an EAGLE-3 head",
)
QWEN3_8B = Shape(
    "qwen3-8b-shape",
    ModelConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    draft_vocab=32000,
    about="Qwen3-8B with an EAGLE-3 head; our own model has no norms of queries and keys",
    family="Qwen3",
)
MISTRAL_7B = Shape(
    "mistral-7b-shape",
    ModelConfig(
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
    ),
    draft_vocab=32000,
    about="Mistral-7B-v0.3 with an EAGLE-3 head",
    family="Mistral",
)
MLA_STACK = Shape(
    "deepseek-v3-width",
    ModelConfig(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_layers=4,
        num_heads=128,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rms_norm_eps=1e-6,
    ),
    draft_vocab=None,
    about="DeepSeek-V3's width, with 4 dense layers instead of 61 of which 58 are mixtures, and a dense NextN layer",
)
GPT_OSS = Shape(
    "gpt-oss-20b-type",
    ModelConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=4 * 2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=150000.0,
        sliding_window=128,
        sliding_window_pattern=2,
        attention_sinks=True,
    ),
    draft_vocab=32000,
    about="gpt-oss-20b with sinks and windows, and an EAGLE-3 head; the MLP is dense and as wide as a token's 4 experts, so a "
    "batch reads the weights of 4 experts a layer where the mixture reads up to 32",
)
TINY = Shape(
    "tiny",
    ModelConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        sliding_window=128,
        sliding_window_pattern=2,
        attention_sinks=True,
    ),
    draft_vocab=40,
    about="to try the benchmark on any machine",
)
QWEN3_30B = Shape(
    "qwen3-30b-a3b",
    ModelConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        mixture=MixtureConfig(num_experts=128, experts_per_token=8, intermediate_size=768),
    ),
    draft_vocab=32000,
    about="Qwen3-30B-A3B without the norms of queries and keys, and an EAGLE-3 head",
)
GPT_OSS_EXPERTS = replace(
    GPT_OSS,
    label="gpt-oss-20b",
    target=replace(
        GPT_OSS.target,
        intermediate_size=2880,
        mixture=MixtureConfig(32, 4, intermediate_size=2880, biases=True, limit=7.0, alpha=1.702, beta=1.0),
    ),
    about="gpt-oss-20b with its experts, sinks and windows, and an EAGLE-3 head",
)
MLA_EXPERTS = replace(
    MLA_STACK,
    label="deepseek-v3-mixtures",
    target=replace(
        MLA_STACK.target,
        mixture=MixtureConfig(
            256, 8, intermediate_size=2048, shared_intermediate_size=2048, scoring="sigmoid", correction_bias=True, groups=8,
            top_groups=4, scale=2.5,
        ),
    ),
    about="4 of DeepSeek-V3's 58 mixture layers, and a NextN layer that is a mixture too",
)  # fmt: skip
TINY_EXPERTS = replace(
    TINY,
    label="tiny-experts",
    target=replace(TINY.target, mixture=MixtureConfig(16, 4, intermediate_size=32)),
)
SHAPES = {
    "llama-8b": LLAMA_8B,
    "llama-70b": LLAMA_70B,
    "qwen3-8b": QWEN3_8B,
    "mistral-7b": MISTRAL_7B,
    "mla-stack": MLA_STACK,
    "gpt-oss": GPT_OSS,
    "qwen3-30b-a3b": QWEN3_30B,
    "gpt-oss-experts": GPT_OSS_EXPERTS,
    "mla-experts": MLA_EXPERTS,
    "tiny": TINY,
    "tiny-experts": TINY_EXPERTS,
}
