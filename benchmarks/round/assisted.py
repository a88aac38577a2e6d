"""transformers' own assisted generation on the same shapes: one request, a one-layer assistant, random weights."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.round.measure import RoundCase
from spec_ops.models import ModelConfig

NEW_TOKENS = 12  # random weights accept almost nothing, so as many target forwards; each takes 200 ms


def assistant_config(target: ModelConfig) -> ModelConfig:
    """One layer like the target's that sees everything, as in our EAGLE-3 heads. One with a window fails in transformers 5.17
    once the text is longer: between its PRs #47447 and #48280 an assistant's mask had fewer columns than its cache had keys."""
    return replace(target, num_layers=1, aux_layers=(), sliding_window=None, sliding_window_pattern=None)


def transformers_config(config: ModelConfig, family: str = "Llama") -> Any:
    """The transformers configuration of the same sizes: DeepSeek-V3 with dense layers, gpt-oss with as many experts as a token
    has, or a dense GQA model of `family`.

    Raises:
        ValueError: the layers are mixtures, whose floor is counted for our models alone.
    """
    import transformers

    if config.mixture is not None:
        raise ValueError("round: shapes with mixtures of experts are not measured through transformers")
    layers = config.num_layers
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": 2**20,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if config.is_mla:
        names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes: dict[str, Any] = {name: getattr(config, name) for name in names}
        dense: dict[str, Any] = {"num_key_value_heads": config.num_heads, "first_k_dense_replace": layers}
        return transformers.DeepseekV3Config(**common, **sizes, **dense)
    heads: dict[str, Any] = {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    if config.attention_sinks:
        experts = 4
        wide = {"intermediate_size": config.intermediate_size // experts, "num_local_experts": experts}
        # Without layers that have one it must still be a number; it counts for "sliding_attention" alone.
        window = {"sliding_window": config.sliding_window or 128, "num_experts_per_tok": experts}
        kinds = ["full_attention" if config.window(i) is None else "sliding_attention" for i in range(layers)]
        return transformers.GptOssConfig(**common | wide | window | heads, layer_types=kinds)
    # Mistral has a window unless told otherwise.
    unlimited: dict[str, Any] = {} if family == "Llama" else {"sliding_window": None}
    return getattr(transformers, f"{family}Config")(**common, **heads, **unlimited)


class AssistedRound:
    """A target and an assistant of one layer, warmed up; `rows` is as in `CompiledRound`."""

    compile_s = None

    def __init__(self, case: RoundCase) -> None:
        if case.batch_size != 1:
            raise ValueError(f"assisted: transformers assists one request at a time, got batch size {case.batch_size}")
        self.case, target = case, case.shape.target
        self.configs = (target, assistant_config(target))
        self.target, self.assistant = map(self._model, self.configs)
        settings = self.assistant.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = case.steps, "constant"
        settings.assistant_confidence_threshold = 0.0  # always drafts as many
        self._generate(16, 3)

    def _model(self, config: ModelConfig) -> Any:
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, self.case.dtype)
        with torch.device(self.case.device):
            return AutoModelForCausalLM.from_config(transformers_config(config), dtype=dtype).eval()

    @torch.no_grad()
    def _generate(self, context: int, new_tokens: int) -> list[float]:
        """Seconds from each target forward to the next, the prompt's left out."""
        starts: list[float] = []

        def note(*_: Any) -> None:
            if self.case.device == "cuda":
                torch.cuda.synchronize()
            starts.append(time.perf_counter())

        prompt = torch.randint(self.case.shape.target.vocab_size, (1, context), device=self.case.device)
        hook = self.target.register_forward_pre_hook(note)
        try:
            self.target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                assistant_model=self.assistant,
                max_new_tokens=new_tokens,
                do_sample=False,
            )
            note()
        finally:
            hook.remove()
        return [after - before for before, after in itertools.pairwise(starts[1:])]

    def floor_bytes(self, context: int) -> tuple[int, int]:
        """Bytes of weights and KV, counted as for our rounds: the target's once, the assistant's once per draft token. For MLA
        the KV is the latent, although transformers caches keys and values of every head."""
        case, (target, assistant) = self.case, self.configs

        def size(model: Any) -> int:
            embed = model.get_input_embeddings().weight
            return sum(p.numel() * p.element_size() for p in model.parameters()) - embed.numel() * embed.element_size()

        def kv(config: ModelConfig) -> int:
            seen = [min(context, config.window(i) or context) for i in range(config.num_layers)]
            row = sum(torch.Size(shape).numel() for shape in config.kv_rows[0])
            return sum(seen) * row * getattr(torch, case.dtype).itemsize

        weights = size(self.target) + case.steps * size(self.assistant)
        return weights, kv(target) + case.steps * kv(assistant)

    def rows(self) -> Iterator[dict[str, Any]]:
        for context in self.case.contexts:
            seconds = self._generate(context, NEW_TOKENS)
            row = self.case.row(context, statistics.median(seconds) * 1e3, self.floor_bytes(context))
            yield row | {"backend": "transformers", "passes": False}
