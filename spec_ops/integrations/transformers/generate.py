"""`speculative_generate`: models of transformers, decoded by rounds, with the arguments of their own `generate`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from spec_ops.decoding import GenerationStats, Generator, PromptLookup, SamplingParams, SpeculationConfig
from spec_ops.decoding.arguments import ArgumentNames, check_requests
from spec_ops.decoding.buckets import MAX_PROCESSORS
from spec_ops.decoding.drafter import draft_model
from spec_ops.decoding.grammar import Grammars, Matcher, check_matchers
from spec_ops.integrations.transformers.custom import read_processors
from spec_ops.integrations.transformers.drafting import check_drafting, draft_of_call, named_draft
from spec_ops.integrations.transformers.logits import Call, plan_logits
from spec_ops.integrations.transformers.model import TransformersModel
from spec_ops.integrations.transformers.probe import Argument
from spec_ops.integrations.transformers.prompts import Prompts, read_prompts
from spec_ops.integrations.transformers.settings import GenerationSettings, resolve_settings, set_values
from spec_ops.integrations.transformers.steps import Pipeline, Step
from spec_ops.integrations.transformers.stopping import Criterion, replace_settings, stop_when
from spec_ops.models.drafts import Draft, Eagle3Draft, StandaloneDraft
from spec_ops.models.paged import DEFAULT_PAGE_SIZE

_TARGET, _DRAFT = (Argument("TransformersGenerator", name) for name in ("target", "draft"))


@dataclass
class SpeculativeOutput:
    """What `return_dict_in_generate=True` returns.

    Attributes:
        sequences: `[bs, prompt + longest]` int64 as from `model.generate`: the input as it came, then the new tokens, padded.
        tokens: the new tokens of each row, without padding.
        stats: rounds, tokens, seconds, accept length.
        seed: the seed of sampling; None for greedy decoding.
    """

    sequences: torch.Tensor
    tokens: list[list[int]]
    stats: GenerationStats
    seed: int | None = None


class TransformersGenerator:
    """Decodes with models of transformers. Keep it for more than one call: caches, compiled rounds and CUDA graphs are reused.

    While it is open, the models attend through these ops, and their own `generate` needs a `SpecCache`. `close()`, or leaving
    the `with` block, gives them their own attention back; a model of several generators gets it from the last one.

    Args:
        target: a causal language model of transformers, whose attention implementation becomes `"spec_ops"`; or a
            `TransformersModel`, as `load_eagle3` returns, which only its own `close()` restores.
        draft: a smaller model of transformers with the same vocabulary, a head (`load_eagle3`, `MTPDraft`), a `PromptLookup`,
            which "prompt-lookup" stands for too, or None for plain decoding.
        config: draft steps, and width of the draft tree (1: a chain).
        compile: compile a round of draft and target for each batch bucket (CUDA graphs on a GPU). Default: on a GPU.
        options: `max_batch_size`, `max_seq_len`, `page_size`, `cache_dtype`, `backend`, `prefill_backend`, `invariant`
            of `Generator`.

    Attributes:
        target: the `TransformersModel`.
        generator: the `spec_ops.decoding.Generator` underneath.

    Raises:
        TypeError, ValueError: naming the argument, and what of the models does not fit.
    """

    def __init__(
        self,
        target: PreTrainedModel | TransformersModel,
        draft: PreTrainedModel | Draft | PromptLookup | str | None = None,
        config: SpeculationConfig | None = None,
        *,
        compile: bool | None = None,
        **options: Any,
    ) -> None:
        with ExitStack() as made:  # closes what was made if anything below fails
            if not isinstance(target, TransformersModel):
                target = TransformersModel(target, argument=_TARGET)
                made.callback(target.close)
            self.target = target
            own = named_draft(draft)
            if own is not None and not isinstance(own, (Draft, PromptLookup)):
                model = TransformersModel(own, argument=_DRAFT)
                made.callback(model.close)
                own = StandaloneDraft(model)
            if isinstance(draft_model(own), Eagle3Draft) and not self.target.config.aux_layers:
                raise ValueError(
                    f"{_TARGET} must be the one that `load_eagle3` returned with the head: it knows which layers to watch"
                )
            compile = self.target.embed.weight.is_cuda if compile is None else compile
            self.generator = Generator(self.target, own, config, compile=compile, **options)
            self._pipelines: dict[Hashable, Pipeline] = {}
            self._made = made.pop_all()

    def close(self) -> None:
        """Give the models their own attention implementation back. Calling it again does nothing."""
        self._made.close()

    def __enter__(self) -> TransformersGenerator:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def generate(
        self,
        input_ids: torch.Tensor | Sequence[Sequence[int]],
        attention_mask: torch.Tensor | Sequence[Sequence[int]] | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Callable[..., torch.Tensor]] | None = None,
        matchers: Sequence[Matcher | None] | None = None,
        stopping_criteria: Sequence[Criterion] | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        progress: bool = False,
        **settings: Any,
    ) -> torch.Tensor | SpeculativeOutput:
        """Continue every row of `input_ids`, as `model.generate` does.

        Args:
            input_ids: `[bs, length]` integers, padded on the left or the right; or a list of token id lists of any lengths.
            attention_mask: `[bs, length]`, non-zero for real tokens; default as in `generate`: from `pad_token_id` if that is
                set, occurs and is no end token, else all tokens are real.
            generation_config: settings that come before the target's own.
            logits_processor: what else changes the target's logits, after the settings and before sampling filters: processors
                of transformers, as a rule those that a setting makes; functions of `(input_ids, scores)` that do not read
                `input_ids`; functions of `(logits, history, lengths)`, see `spec_ops.decoding.Generator.generate`. Keep such
                functions: another one is compiled anew.
            matchers: a grammar matcher, such as `xgrammar.GrammarMatcher`, or None for each returned row, see
                `spec_ops.decoding.Generator.generate`.
            stopping_criteria: of transformers. Each is called for one row at a time, after each of its new tokens, with
                `input_ids [1, length]` (prompt with its padding, and new tokens) on the device of the argument, and with no
                scores. On a GPU criteria run on a CUDA stream of their own, next to the following round, and the host waits for
                their result; prompts on the CPU spare the copy. A row that ended is padded, also where no end token is set.
            tokenizer: for `stop_strings`.
            seed: of sampling; a run repeats with it. Row `i` draws from a hash of the seed and `i`. Default: each call draws
                one from torch's default CPU generator, so that `torch.manual_seed` governs it.
            streamer: for batch size 1 only; gets the prompt, then new tokens as rounds emit them.
            progress: show a progress bar, and say when a round is being compiled.
            settings: those of `transformers.GenerationConfig`. They come before `generation_config`, and that before the
                target's own. None or its neutral value switches a setting off. Honoured are `max_new_tokens` (also one per
                row), `max_length`, `max_time`, `eos_token_id` (at most 8 ids), `pad_token_id`, `stop_strings`, `do_sample`,
                `num_return_sequences`, `return_dict_in_generate`, and all that changes logits but `guidance_scale` and
                `watermarking_config`. As in `generate`, nothing set means 20 new tokens and a `top_k` of 50, and decoding
                without `do_sample` is greedy, whatever `temperature` says. Lengths count padding, as in `generate`; penalties
                and sequences do not see it.

        Returns:
            As `model.generate`: `[bs * num_return_sequences, length + longest]` int64, on the device of `input_ids` (for lists,
            the CPU); or a `SpeculativeOutput`.

        Raises:
            ValueError: naming the argument, or a setting that changes what `model.generate` returns and is not supported.
            TypeError: an argument that does not exist.
            RuntimeError: see `spec_ops.decoding.Generator.generate`.
        """
        call = _read_call(
            self.target,
            input_ids,
            attention_mask,
            generation_config=generation_config,
            logits_processor=logits_processor,
            matchers=matchers,
            stopping_criteria=stopping_criteria,
            tokenizer=tokenizer,
            seed=seed,
            streamer=streamer,
            progress=progress,
            **settings,
        )
        check_drafting(self.generator, call.settings)
        return self._run(call)

    def _run(self, call: _Call) -> torch.Tensor | SpeculativeOutput:
        streamer, prompts = call.streamer, call.prompts
        if streamer is not None:
            streamer.put(prompts.ids.cpu())
        names = ArgumentNames(
            "input_ids", call.settings.limit, "eos_token_id", "stopping_criteria", call.settings.num_return_sequences
        )
        generator = self.generator
        vocab_size = self.target.config.vocab_size
        requests = check_requests(
            prompts.rows, call.limits, call.settings.stop_tokens, vocab_size, generator.max_seq_len, names
        )
        pipeline = self._pipeline(call.steps)
        result = generator._run(
            requests,
            call.sampling,
            None if streamer is None else lambda _, new: streamer.put(torch.tensor(new, device="cpu")),
            stop_when(call.settings, call.criteria, call.tokenizer, prompts),
            call.progress,
            pipeline,
            None if pipeline is None else partial(pipeline.load, call.steps),
            call.grammars,
        )
        if streamer is not None:
            streamer.end()
        longest = max(map(len, result.tokens))
        padded = torch.tensor([row + [prompts.padding] * (longest - len(row)) for row in result.tokens], device="cpu")
        sequences = torch.cat([prompts.ids, padded.to(prompts.ids.device)], 1)
        return (
            SpeculativeOutput(sequences, result.tokens, result.stats, result.seed) if call.settings.return_dict else sequences
        )

    def _pipeline(self, steps: list[Step]) -> Pipeline | None:
        """The pipeline whose buffers take the numbers of `steps`, and whose rounds may be compiled already."""
        if not steps:
            return None
        key = tuple(step.key for step in steps)
        # To the end: the generator forgets the rounds of those that have not been used for longest.
        pipeline = self._pipelines.pop(key, None) or Pipeline(steps, self.generator.device)
        self._pipelines[key] = pipeline
        if len(self._pipelines) > MAX_PROCESSORS:
            del self._pipelines[next(iter(self._pipelines))]
        return pipeline


def speculative_generate(
    target: PreTrainedModel | TransformersModel,
    draft: PreTrainedModel | Draft | PromptLookup | str | None,
    input_ids: torch.Tensor | Sequence[Sequence[int]],
    attention_mask: torch.Tensor | Sequence[Sequence[int]] | None = None,
    *,
    config: SpeculationConfig | None = None,
    compile: bool | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
    cache_dtype: torch.dtype | None = None,
    backend: str = "auto",
    prefill_backend: str | None = None,
    invariant: bool = False,
    **arguments: Any,
) -> torch.Tensor | SpeculativeOutput:
    """Decode once. For more than one call, keep a `TransformersGenerator`: it reuses caches and compiled rounds.

    In float32, greedy tokens are those of `target.generate`. In bfloat16 and float16 sums round differently, and where two
    tokens are nearly tied, either may come out; with `invariant=True` always that which plain decoding here would give. Sampled
    tokens follow the target's distribution and repeat with `seed`. Afterwards the models have their own attention
    implementation again.

    Args:
        target, draft, config, compile, page_size, cache_dtype, backend, prefill_backend, invariant: see
            `TransformersGenerator`. Without a draft, `prompt_lookup_num_tokens` asks for prompt lookup, as in `generate`.
        input_ids, attention_mask, arguments: see `TransformersGenerator.generate`.

    Returns:
        As `TransformersGenerator.generate`.

    Raises:
        TypeError, ValueError, RuntimeError: see `TransformersGenerator` and its `generate`.
    """
    with ExitStack() as made:
        if not isinstance(target, TransformersModel):
            target = TransformersModel(target, argument=_TARGET)
            made.callback(target.close)
        call = _read_call(target, input_ids, attention_mask, **arguments)
        draft, config = draft_of_call(draft, config, call.settings)
        generator = TransformersGenerator(
            target,
            draft,
            config,
            compile=compile,
            max_batch_size=min(len(call.limits), 32),
            max_seq_len=max(len(row) + limit for row, limit in zip(call.prompts.rows, call.limits, strict=True)),
            page_size=page_size,
            cache_dtype=cache_dtype,
            backend=backend,
            prefill_backend=prefill_backend,
            invariant=invariant,
        )
        made.callback(generator.close)
        return generator._run(call)


@dataclass(frozen=True)
class _Call:
    """The arguments of one call, checked. Row `i` of `prompts` may gain `limits[i]` tokens. `sampling` and `steps` are what the
    settings do to logits."""

    prompts: Prompts
    limits: list[int]
    settings: GenerationSettings
    sampling: SamplingParams
    steps: list[Step]
    grammars: Grammars | None
    criteria: list[Criterion]
    tokenizer: Any
    streamer: BaseStreamer | None
    progress: bool


def _read_call(
    target: TransformersModel,
    input_ids: Any,
    attention_mask: Any,
    *,
    generation_config: GenerationConfig | None = None,
    logits_processor: Any = None,
    matchers: Any = None,
    stopping_criteria: Sequence[Criterion] | None = None,
    tokenizer: Any = None,
    seed: int | None = None,
    streamer: BaseStreamer | None = None,
    progress: bool = False,
    **overrides: Any,
) -> _Call:
    """Check the arguments of `TransformersGenerator.generate`, before anything runs."""
    model_config: Any = target.decoder.config
    if generation_config is not None:
        known = vars(GenerationConfig())  # checkpoints' configurations hold other entries too, which `generate` ignores
        overrides = {**{name: value for name, value in set_values(generation_config).items() if name in known}, **overrides}
    elif misplaced := model_config._get_generation_parameters():
        raise ValueError(f"generate: settings must be in the target's `generation_config`, its `config` holds {misplaced}")
    settings = resolve_settings(target.generation_config, overrides, vocab_size=target.config.vocab_size, seed=seed)
    # As in `generate`, prompts and padding go by the settings, also where a criterion stands for one of them.
    prompts = read_prompts(input_ids, attention_mask, settings)
    if settings.max_length is not None:  # without room it is an error, also where a criterion stands for it
        settings.new_tokens(prompts.ids.shape[1])
    given = [] if stopping_criteria is None else stopping_criteria
    configured, length = settings, prompts.ids.shape[1]
    settings, criteria = replace_settings(settings, given, length, target.config.vocab_size)
    max_positions = getattr(model_config, "max_position_embeddings", None)
    limits = settings.new_tokens(length, max_positions)
    count = len(prompts.rows) // settings.num_return_sequences
    if isinstance(limits, int):
        limits = [limits] * count
    elif len(limits) != count:
        raise ValueError(f"generate: `max_new_tokens` must have one entry per row of `input_ids` ({count}), got {len(limits)}")
    limits = [limit for limit in limits for _ in range(settings.num_return_sequences)]
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise ValueError(f"generate: `streamer` must have `put` and `end`, as transformers' have, got {streamer!r}")
    if streamer is not None and len(limits) != 1:
        raise ValueError(f"generate: `streamer` needs batch size 1, got {len(limits)}")
    configured_limits = tuple(limits)
    if configured.logits.forced_eos_token_id and configured.max_new_tokens != settings.max_new_tokens:
        before = configured.new_tokens(length, max_positions)
        configured_limits = (before,) if isinstance(before, int) else tuple(before)
    facts = Call(
        target.config.vocab_size,
        tuple(configured.stop_tokens),
        tuple(settings.stop_tokens),
        length,
        tuple(limits),
        configured_limits,
    )
    processors = read_processors(logits_processor, facts, target.embed.weight.device)
    sampling, steps = plan_logits(settings.logits, settings.sampling, processors, facts)
    grammars = check_matchers(matchers, len(limits))
    return _Call(prompts, limits, settings, sampling, steps, grammars, criteria, tokenizer, streamer, progress)
