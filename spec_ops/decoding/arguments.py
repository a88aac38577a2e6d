"""What a user passes to a generator, checked and made plain: prompts with their limits, stop tokens, how tokens are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from spec_ops._numbers import integer, is_integer, shown
from spec_ops.decoding.config import SpeculationConfig
from spec_ops.decoding.grammar import Grammars
from spec_ops.decoding.logits import LogitsFeatures, LogitsProcessor
from spec_ops.decoding.lookup import PromptLookup
from spec_ops.decoding.pages import PagePool
from spec_ops.decoding.sampling import SamplingParams
from spec_ops.decoding.state import MAX_STOP_TOKENS
from spec_ops.models.drafts import Draft
from spec_ops.models.target import PositionLimit, Ranks, Target


@dataclass(frozen=True)
class ArgumentNames:
    """What the caller calls the arguments of a generator, for messages that name them.

    Attributes:
        prompts: the prompts; `copies` rows in a row come from one of them.
        limits: what limits a prompt's new tokens, in words: "`max_new_tokens`".
        stop_tokens, stop_when: the arguments of these names.
    """

    prompts: str = "prompts"
    limits: str = "`max_new_tokens`"
    stop_tokens: str = "stop_tokens"
    stop_when: str = "stop_when"
    copies: int = 1

    def prompt(self, row: int) -> str:
        """The argument that row `row` came from."""
        return f"{self.prompts}[{row // self.copies}]"


@dataclass(frozen=True)
class Requests:
    """Checked arguments of one call.

    Attributes:
        prompts: the token ids of each request.
        limits: most new tokens of each.
        stop_tokens: ids that end a request.
        names: what the caller calls them.
    """

    prompts: list[list[int]]
    limits: list[int]
    stop_tokens: list[int]
    names: ArgumentNames = ArgumentNames()

    @cached_property
    def lengths(self) -> list[int]:
        """Most tokens of each request, prompt and new ones."""
        return [len(prompt) + limit for prompt, limit in zip(self.prompts, self.limits, strict=True)]

    def check_pages(self, pool: PagePool) -> None:
        """Raise a ValueError for a request that the whole pool could not hold."""
        for row, length in enumerate(self.lengths):
            if pool.needed(length) > pool.count:
                raise ValueError(
                    f"generate: `{self.names.prompt(row)}` plus {self.names.limits} must fit the Generator's num_pages="
                    f"{pool.count} pages of {pool.page_size} tokens, got {len(self.prompts[row])} + {self.limits[row]} tokens, "
                    f"which take {pool.needed(length)}"
                )

    def check_positions(self, limit: PositionLimit | None) -> None:
        """Raise a ValueError for a request that needs positions past `limit`. Its last new token is never run."""
        for row, (prompt, new) in enumerate(zip(self.prompts, self.limits, strict=True)):
            if limit is not None and len(prompt) + new - 1 > limit.count:
                raise ValueError(
                    f"generate: `{self.names.prompt(row)}` plus {self.names.limits} must be at most {limit.count + 1} tokens: "
                    f"the target has {limit.count} positions; {limit.reason}; got {len(prompt)} + {new}"
                )


def check_requests(
    prompts: Any, max_new_tokens: Any, stop_tokens: Any, vocab: int, max_seq_len: int, names: ArgumentNames | None = None
) -> Requests:
    """The arguments of `Generator.generate`, as lists of ints.

    Raises:
        ValueError: naming the argument.
    """
    names = names or ArgumentNames()
    rows = _rows(prompts)
    tokens = [_tokens(names.prompt(i), row, vocab) for i, row in enumerate(rows)]
    if is_integer(max_new_tokens):
        given = [max_new_tokens] * len(tokens)
    else:
        given = _entries("max_new_tokens", max_new_tokens, "an int, or a list with one for each prompt")
        if len(given) != len(tokens):
            raise ValueError(f"generate: `max_new_tokens` must have one entry per prompt ({len(tokens)}), got {len(given)}")
    limits = [integer("generate", "max_new_tokens", limit, 1) for limit in given]
    for i, (prompt, limit) in enumerate(zip(tokens, limits, strict=True)):
        if len(prompt) + limit > max_seq_len:
            raise ValueError(
                f"generate: `{names.prompt(i)}` plus {names.limits} must fit max_seq_len={max_seq_len}, "
                f"got {len(prompt)} + {limit}"
            )
    stops = _entries(names.stop_tokens, stop_tokens, "a list of token ids, () for none")
    if len(stops) > MAX_STOP_TOKENS:
        raise ValueError(f"generate: `{names.stop_tokens}` must hold at most {MAX_STOP_TOKENS} ids, got {len(stops)}")
    for token in stops:
        if not is_integer(token) or not 0 <= token < vocab:
            raise ValueError(f"generate: `{names.stop_tokens}` must hold token ids in [0, {vocab}), got {shown(token)}")
    return Requests(tokens, limits, [int(token) for token in stops], names)


@dataclass(frozen=True)
class TokenChoice:
    """How one call chooses tokens.

    Attributes:
        params: of each request.
        seeds: of each request, before they are hashed with its row; 0 where nothing is drawn.
        seed: the one seed that all rows which sample have in common, or that those without one drew; else None.
        sampled: whether any row samples.
        features: what rounds do to the target's logits; None for nothing.
        grammars: what requests must follow; None for nothing.
    """

    params: list[SamplingParams]
    seeds: list[int]
    seed: int | None
    sampled: bool
    features: LogitsFeatures | None
    grammars: Grammars | None = None


def check_sampling(
    sampling: Any,
    requests: Requests,
    vocab: int,
    logits_processor: LogitsProcessor | None = None,
    grammars: Grammars | None = None,
    ranks: Ranks | None = None,
) -> TokenChoice:
    """`sampling` and `logits_processor` of `Generator.generate` as one entry per prompt. Draws the seed that is missing; of
    `ranks` that share the target, rank 0 does.

    Raises:
        ValueError: naming the argument.
    """
    if logits_processor is not None and not callable(logits_processor):
        raise ValueError(f"generate: `logits_processor` must be a function, got {shown(logits_processor)}")
    count = len(requests.prompts)
    if sampling is None or isinstance(sampling, SamplingParams):
        same = sampling or SamplingParams()
        params, named = [same] * count, {"sampling": same}
    else:
        wanted = "`sampling` must be a SamplingParams, or a list with one per prompt"
        if not isinstance(sampling, Sequence) or isinstance(sampling, (str, bytes)):
            raise ValueError(f"generate: {wanted}, got {type(sampling).__name__}")
        for i, entry in enumerate(sampling):
            if not isinstance(entry, SamplingParams):
                raise ValueError(f"generate: `sampling[{i}]` must be a SamplingParams, got {type(entry).__name__}")
        if len(sampling) != count:
            raise ValueError(f"generate: {wanted} ({count}), got {len(sampling)}")
        params = list(sampling)
        named = {f"sampling[{i}]": entry for i, entry in enumerate(params)}
    for name, entry in named.items():
        entry.check_ids(vocab, name)
    given = {p.seed for p in params if p.temperature > 0}
    drawn = SamplingParams().drawn_seed() if None in given else None
    drawn = drawn if ranks is None or drawn is None else ranks.first(drawn)
    seeds = [0 if p.temperature == 0 else drawn if p.seed is None else p.seed for p in params]
    shared = drawn if drawn is not None else next(iter(given)) if len(given) == 1 else None
    features = LogitsFeatures.of(params, requests.stop_tokens, logits_processor)
    if grammars is not None:
        features = replace(features or LogitsFeatures(), bitmask=True)
    return TokenChoice(params, [seed or 0 for seed in seeds], shared, bool(given), features, grammars)


def _rows(prompts: Any) -> list[Any]:
    wanted = "generate: `prompts` must be a list of token id lists, one for each prompt"
    if isinstance(prompts, str):
        raise ValueError(f"{wanted}, got the text {shown(prompts)}: encode it first, `[tokenizer.encode(text)]`")
    if isinstance(prompts, Mapping):
        raise ValueError(f"{wanted}, got a mapping with keys {list(prompts)}: pass its `input_ids`, without their padding")
    rows = _entries("prompts", prompts, "a list of token id lists, one for each prompt")
    if rows and is_integer(rows[0]):
        raise ValueError(f"{wanted}, got one flat list of ids: pass `[prompt]` for a single prompt")
    return rows


def _tokens(name: str, prompt: Any, vocab: int) -> list[int]:
    wanted = f"generate: `{name}` must hold token ids in [0, {vocab}), at least one"
    if isinstance(prompt, str):
        raise ValueError(f"{wanted}, got the text {shown(prompt)}: encode it first, `tokenizer.encode(text)`")
    tokens = _entries(name, prompt, f"a list of token ids in [0, {vocab}), at least one")
    wrong = [token for token in tokens if not is_integer(token) or not 0 <= token < vocab]
    if wrong or not tokens:
        raise ValueError(f"{wanted}, got {shown(wrong)}")
    return [int(token) for token in tokens]


def _entries(name: str, values: Any, wanted: str) -> list[Any]:
    """The entries of an iterable; rows of a matrix stay tensors or arrays."""
    if isinstance(values, (torch.Tensor, np.ndarray)):
        if values.ndim > 0:
            return values.tolist() if values.ndim == 1 else list(values)
    elif isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)):
        return list(values)
    raise ValueError(f"generate: `{name}` must be {wanted}, got {shown(values)}")


def check_kinds(target: Any, draft: Any, config: Any) -> None:
    """Refuse models of another kind, swapped ones, and another kind of configuration."""
    if config is not None and not isinstance(config, SpeculationConfig):
        raise ValueError(f"Generator: `config` must be a SpeculationConfig, got {type(config).__name__}")
    for name, model, kind in (("target", target, Target), ("draft", draft, Draft)):
        if isinstance(model, kind) or (name == "draft" and (model is None or isinstance(model, PromptLookup))):
            continue
        hint = ""
        if hasattr(model, "generation_config"):
            hint = ": models of transformers need `spec_ops.integrations.transformers.TransformersGenerator`"
        elif isinstance(target, Draft):
            hint = ": are `target` and `draft` swapped?"
        elif isinstance(model, (list, tuple)):
            hint = ": prompts come after it, `generate(target, draft, prompts)`, where None is no draft"
        elif isinstance(model, Target):
            hint = ": a language model drafts as `StandaloneDraft(model)`"
        elif model is PromptLookup or isinstance(model, str):
            hint = ": drafts without a model are `PromptLookup()`"
        raise ValueError(
            f"Generator: `{name}` must be a {kind.__module__}.{kind.__qualname__}, got {type(model).__name__}{hint}"
        )
