"""`speculative_generate`: transformers models decoded by our round, with `generate`'s arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from spec_ops.decoding import GenerationStats, Generator, SamplingParams, SpeculationConfig
from spec_ops.decoding.generate import StopWhen
from spec_ops.integrations.transformers.model import TransformersModel
from spec_ops.models.drafts import Draft, Eagle3Draft, StandaloneDraft

# Settings of a model's generation_config that change what it generates and that the round does not compute, with the value
# (besides None) that switches each off. The first group matters for sampling only.
_SAMPLING_UNSUPPORTED = {"min_p": 0, "top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
_UNSUPPORTED = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
}


@dataclass
class SpeculativeOutput:
    """What `return_dict_in_generate=True` returns.

    Attributes:
        sequences: `[bs, prompt + longest]` int64 as from `model.generate`: the input as it came, then the new tokens, padded.
        tokens: the new tokens of each row, without padding.
        stats: rounds, tokens, seconds, accept length.
    """

    sequences: torch.Tensor
    tokens: list[list[int]]
    stats: GenerationStats


class TransformersGenerator:
    """Decodes with transformers models. Keep it for more than one call: pools, compiled rounds and CUDA graphs are reused.

    Args:
        target: causal language model of transformers, or one already prepared (`load_eagle3` returns one). Its attention
            implementation becomes `"spec_ops"`.
        draft: a smaller model of transformers with the same vocabulary, one of our heads (`load_eagle3`, `MTPDraft`), or None
            for plain decoding.
        config: steps, and the width of the tree (1: a chain).
        compile: compile draft and target into one round per batch bucket (CUDA graphs on a GPU). Default: on a GPU.
        options: `max_batch_size`, `max_seq_len`, `page_size`, `cache_dtype`, `backend`, `prefill_backend` of `Generator`.

    Raises:
        TypeError, ValueError: naming the argument and what of the models does not fit.
    """

    def __init__(
        self,
        target: PreTrainedModel | TransformersModel,
        draft: PreTrainedModel | Draft | None = None,
        config: SpeculationConfig | None = None,
        *,
        compile: bool | None = None,
        **options: Any,
    ) -> None:
        self.target = target if isinstance(target, TransformersModel) else TransformersModel(target)
        if draft is not None and not isinstance(draft, Draft):
            draft = StandaloneDraft(TransformersModel(draft))
        if isinstance(draft, Eagle3Draft) and not self.target.config.aux_layers:
            raise ValueError(
                "`target` must be the one that `load_eagle3` returned with the head: it knows which layers to watch"
            )
        compile = self.target.embed.weight.is_cuda if compile is None else compile
        self.generator = Generator(self.target, draft, config, compile=compile, **options)

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | Sequence[int] = 128,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        streamer: BaseStreamer | None = None,
        return_dict_in_generate: bool = False,
        progress: bool = False,
    ) -> torch.Tensor | SpeculativeOutput:
        """Continue every row of `input_ids`.

        Args:
            input_ids: `[bs, length]` integers, padded on the left or the right.
            attention_mask: `[bs, length]`, non-zero for real tokens; default as in `generate`: from `pad_token_id` if that
                occurs and is no end token, else all tokens are real.
            max_new_tokens: for all rows, or one per row.
            eos_token_id: ids that end a row (at most 8), `()` for none. This and the following arguments up to `top_p` default
                to the target's `generation_config`, then to transformers' defaults (`top_k` 50).
            stop_strings: end a row with the token that completes one of these; needs `tokenizer`.
            do_sample: False is greedy decoding, whatever `temperature` says.
            seed: of sampling; row `i` uses `seed + i`.
            streamer: batch size 1 only; gets the prompt, then new tokens as rounds emit them.
            progress: show a progress bar, and say when a round is being compiled.

        Returns:
            As `model.generate`: `[bs, length + longest]` int64; or a `SpeculativeOutput`.

        Raises:
            ValueError: naming the argument, or a setting of the target's `generation_config` that the round does not compute.
        """
        model_config = self.target.generation_config
        sampling = _sampling(model_config, do_sample, temperature, top_k, top_p, seed)
        stops = token_ids(model_config.eos_token_id if eos_token_id is None else eos_token_id)
        pad = model_config.pad_token_id if pad_token_id is None else pad_token_id
        pad = stops[0] if pad is None and stops else pad or 0
        prompts = _prompts(input_ids, attention_mask, pad, stops)
        if streamer is not None:
            if len(prompts) != 1:
                raise ValueError(f"generate: `streamer` needs batch size 1, got {len(prompts)}")
            streamer.put(input_ids.cpu())
        strings = model_config.stop_strings if stop_strings is None else stop_strings
        result = self.generator.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            stop_tokens=stops,
            sampling=sampling,
            on_tokens=None if streamer is None else lambda _, new: streamer.put(torch.tensor(new)),
            stop_when=_stop_when(strings, tokenizer, prompts) if strings else None,
            progress=progress,
        )
        if streamer is not None:
            streamer.end()
        longest = max(map(len, result.tokens))
        padded = [row + [pad] * (longest - len(row)) for row in result.tokens]
        sequences = torch.cat([input_ids, torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)], 1)
        return SpeculativeOutput(sequences, result.tokens, result.stats) if return_dict_in_generate else sequences


def speculative_generate(
    target: PreTrainedModel | TransformersModel,
    draft: PreTrainedModel | Draft | None,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    config: SpeculationConfig | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    compile: bool | None = None,
    page_size: int = 16,
    cache_dtype: torch.dtype | None = None,
    backend: str = "auto",
    prefill_backend: str | None = None,
    **arguments: Any,
) -> torch.Tensor | SpeculativeOutput:
    """Decode once; `TransformersGenerator` is the thing to keep for more than one call.

    Greedy tokens are exactly those of `target.generate`; sampled ones follow the target's distribution and repeat with `seed`.
    The models' attention implementation is as before afterwards.

    Args:
        target, draft, config, compile, page_size, cache_dtype, backend, prefill_backend: see `TransformersGenerator`.
        input_ids, attention_mask, max_new_tokens, arguments: see `TransformersGenerator.generate`.
    """
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"generate: `input_ids` must be of shape [bs, length], got {tuple(input_ids.shape)}")
    models = [model for model in (target, draft) if isinstance(model, PreTrainedModel)]
    before = [model.config._attn_implementation for model in models]
    try:
        most = max_new_tokens if isinstance(max_new_tokens, int) else max(max_new_tokens, default=1)
        generator = TransformersGenerator(
            target,
            draft,
            config,
            compile=compile,
            max_batch_size=min(input_ids.shape[0], 32),
            max_seq_len=input_ids.shape[1] + max(most, 1),
            page_size=page_size,
            cache_dtype=cache_dtype,
            backend=backend,
            prefill_backend=prefill_backend,
        )
        return generator.generate(input_ids, attention_mask, max_new_tokens=max_new_tokens, **arguments)
    finally:
        for model, name in zip(models, before, strict=True):
            model.set_attn_implementation(name)


def _sampling(config: GenerationConfig, do_sample, temperature, top_k, top_p, seed: int) -> SamplingParams:
    sampled = config.do_sample if do_sample is None else do_sample
    unsupported = {**_UNSUPPORTED, **(_SAMPLING_UNSUPPORTED if sampled else {})}
    for name, off in unsupported.items():
        value = getattr(config, name, None)
        if value is not None and value != off:
            raise ValueError(f"generate: `generation_config.{name}` must be {off} for speculative decoding, got {value}")
    if not sampled:
        return SamplingParams(seed=seed)

    def choose(given, name: str, default):
        value = getattr(config, name, None) if given is None else given
        return default if value is None else value

    temperature = choose(temperature, "temperature", 1.0)
    if temperature <= 0:
        raise ValueError(f"generate: `temperature` must be above 0 with `do_sample=True`, got {temperature}")
    return SamplingParams(temperature, choose(top_k, "top_k", 50), choose(top_p, "top_p", 1.0), seed)


def token_ids(ids: int | Sequence[int] | torch.Tensor | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else [int(token) for token in ids]


def _prompts(ids: torch.Tensor, mask: torch.Tensor | None, pad: int, stops: list[int]) -> list[list[int]]:
    """The rows of `ids` without their padding."""
    if ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point():
        raise ValueError(f"generate: `input_ids` must be integers of shape [bs, length], got {ids.dtype} {tuple(ids.shape)}")
    if mask is None:
        infer = pad not in stops and bool((ids == pad).any())
        mask = ids != pad if infer else torch.ones_like(ids)
    if mask.shape != ids.shape:
        raise ValueError(f"generate: `attention_mask` must be of shape {list(ids.shape)}, got {list(mask.shape)}")
    real = mask.bool()
    starts = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]  # runs of real tokens
    if bool((starts != 1).any()):
        row = int((starts != 1).nonzero()[0])
        raise ValueError(
            f"generate: `attention_mask` must show one run of tokens per row, padded on the left or the right; row {row} has "
            f"{int(starts[row])}"
        )
    return [row[keep].tolist() for row, keep in zip(ids.cpu(), real.cpu(), strict=True)]


def _stop_when(strings: str | Sequence[str], tokenizer: Any, prompts: list[list[int]]) -> StopWhen:
    if tokenizer is None:
        raise ValueError("generate: `stop_strings` needs `tokenizer`, got None")
    criteria = StopStringCriteria(tokenizer, [strings] if isinstance(strings, str) else list(strings))

    def stop_when(request: int, tokens: list[int], count: int) -> int | None:
        text = torch.tensor([prompts[request] + tokens])
        for new in range(1, count + 1):
            if criteria(text[:, : text.shape[1] - count + new], None):
                return new
        return None

    return stop_when
