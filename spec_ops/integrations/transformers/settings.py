"""The settings of transformers' `generate`: each is honoured, has no effect here, or is refused by name.

Names are those of `transformers.GenerationConfig`. A setting is off if it is None, empty or one of its neutral values:
`generate(..., repetition_penalty=1.0)` switches off what a checkpoint's `generation_config.json` asks for.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from spec_ops._numbers import integer, is_integer, number
from spec_ops.decoding import SamplingParams
from spec_ops.decoding.state import MAX_STOP_TOKENS
from spec_ops.integrations.transformers.logits import LogitsSettings, read_logits_settings
from spec_ops.ops.lookup import MAX_NGRAM
from spec_ops.ops.tree import MAX_TREE_TOKENS

# Transformers' defaults of settings that are honoured and not off when unset; 20 new tokens if nothing limits them.
_DEFAULTS: dict[str, Any] = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "num_return_sequences": 1}
_DEFAULT_NEW_TOKENS = 20
_FILTERS_OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

HONOURED = frozenset(
    {
        *_DEFAULTS,
        "max_length",
        "max_new_tokens",
        "max_time",
        "stop_strings",
        "pad_token_id",
        "eos_token_id",
        "return_dict_in_generate",
        "min_p",
        *(entry.name for entry in fields(LogitsSettings)),
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
    }
)

# The new tokens do not depend on these.
WITHOUT_EFFECT = frozenset(
    {
        # They belong to beam search, which `num_beams` asks for.
        "early_stopping",
        "length_penalty",
        "num_beam_groups",
        "diversity_penalty",
        "low_memory",
        # They say how transformers caches and compiles; rounds have a cache and a compiler of their own.
        "use_cache",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        # Sizes of transformers' drafting, which other settings ask for; most have a default that is not None.
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        # A log-softmax at the end changes no argmax and no probability.
        "renormalize_logits",
        # They start empty prompts and encoder-decoders, which are not supported.
        "bos_token_id",
        "decoder_start_token_id",
        "transformers_version",
    }
)

_SEARCH = "rounds decode each row on its own, by argmax or by sampling"
_DRAFTING = "`draft` and `config` say what is drafted"
_OUTPUTS = "rounds keep no scores, hidden states or attention weights"
_CACHES = (
    *("dynamic", "static", "offloaded", "offloaded_static", "paged", "sliding_window"),
    *("hybrid", "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked"),
)

# By name: neutral values besides None and empty ones, and why no other value is supported.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), _SEARCH),
    "penalty_alpha": ((0.0,), _SEARCH),
    "dola_layers": ((), _SEARCH),
    "constraints": ((), _SEARCH),
    "force_words_ids": ((), _SEARCH),
    "guidance_scale": ((1.0,), "rounds run the target on the prompts alone, and guidance on negative prompts too"),
    "watermarking_config": ((), "its lists of tokens come from a random generator that the host seeds for every token"),
    "token_healing": ((False,), "prompts are not changed"),
    "is_assistant": ((False,), _DRAFTING),
    "assistant_early_exit": ((0,), _DRAFTING),
    "assistant_ensemble_weight": ((), _DRAFTING),
    "speculation_type": ((), _DRAFTING),
    "use_mtp": ((False,), _DRAFTING),
    "cache_implementation": (_CACHES, "a quantized cache changes tokens; see `cache_dtype`"),
}
# These matter only where a dictionary is returned.
REFUSED_IN_OUTPUT: dict[str, tuple[tuple[Any, ...], str]] = {
    "output_attentions": ((False,), _OUTPUTS),
    "output_hidden_states": ((False,), _OUTPUTS),
    "output_scores": ((False,), _OUTPUTS),
    "output_logits": ((False,), _OUTPUTS),
}
# Arguments of `generate` that are not settings, and arguments that it passes on to the model.
_REFUSED_ARGUMENTS = {
    "inputs": "the prompts' argument is `input_ids`",
    "inputs_embeds": "rounds start from token ids",
    "position_ids": "positions count the real tokens of `attention_mask`",
    "token_type_ids": "rounds pass only token ids and positions to the model",
    "past_key_values": "the generator keeps a paged cache of its own",
    "cache": "the generator keeps a paged cache of its own",  # its name from transformers 5.24 on
    "prefix_allowed_tokens_fn": "it is called after each token, and a round verifies several: pass grammars as `matchers`",
    "negative_prompt_ids": "`guidance_scale` is not",
    "negative_prompt_attention_mask": "`guidance_scale` is not",
    "assistant_model": "the smaller model is the generator's `draft`",
    "assistant_tokenizer": "target and draft share a vocabulary",
    "synced_gpus": "a model must be on one device",
    "custom_generate": "the generator is the loop that decodes",
    "trust_remote_code": "no code is downloaded",
}


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of a call, as rounds take them.

    Attributes:
        sampling: temperature 0 unless `do_sample`; without what `logits` has.
        logits: what changes logits, and the filters that rounds do not have.
        stop_tokens: ids that end a row: `eos_token_id` as a list, without ids outside the vocabulary.
        pad_token_id: as set; with None, only the attention mask says what is padding.
        stop_strings: texts that end a row; empty for none.
        max_new_tokens: for all rows or one per row; None if only `max_length`, or nothing, limits them.
        max_length: most tokens of a row, its prompt included, with padding as in `generate`. `max_new_tokens` comes first.
        max_time: seconds after which no further round begins, or None.
        num_return_sequences: rows made of each prompt.
        return_dict: return a `SpeculativeOutput`.
        prompt_lookup_num_tokens, max_matching_ngram_size: tokens that prompt lookup drafts, and most last tokens that it
            compares; None where nothing is set.
    """

    sampling: SamplingParams
    logits: LogitsSettings
    stop_tokens: list[int]
    pad_token_id: int | None
    stop_strings: list[str]
    max_new_tokens: int | list[int] | None
    max_length: int | None
    max_time: float | None
    num_return_sequences: int
    return_dict: bool
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None

    @property
    def padding(self) -> int:
        """The id that fills up shorter rows: as in `generate`, the first end token where no padding token is set."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.stop_tokens[0] if self.stop_tokens else 0

    def new_tokens(self, length: int, max_positions: int | None = None) -> int | list[int]:
        """How many tokens a row may gain, counted as `generate` counts.

        Args:
            length: of the input, padding included.
            max_positions: the model's `max_position_embeddings`, which limits the default.

        Raises:
            ValueError: `max_length` leaves no room.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        most = self.max_length
        if most is None:
            most = min(length + _DEFAULT_NEW_TOKENS, max_positions or length + _DEFAULT_NEW_TOKENS)
            warnings.warn(
                f"generate: nothing limits the new tokens; the default is {most - length}. Pass `max_new_tokens`.", stacklevel=4
            )
        if most <= length:
            raise ValueError(f"generate: `max_length` must be above the input's {length} tokens, got {most}")
        return most - length

    @property
    def limit(self) -> str:
        """What `new_tokens` comes from, for messages."""
        if self.max_new_tokens is not None:
            return "`max_new_tokens`"
        return "the default of new tokens" if self.max_length is None else "its new tokens up to `max_length`"


def resolve_settings(
    generation_config: GenerationConfig,
    overrides: Mapping[str, Any] | None = None,
    *,
    vocab_size: int,
    seed: int | None = None,
) -> GenerationSettings:
    """The settings of a call: a model's `generation_config`, and the arguments that override it.

    Args:
        generation_config: of the model. Unset entries have transformers' defaults (`top_k` 50).
        overrides: arguments of the call. As in `generate`, None switches a setting off.
        vocab_size: of the target.
        seed: of sampling; None: each call draws one from torch's default CPU generator.

    Raises:
        TypeError: an argument that neither `generate` nor `GenerationConfig` knows.
        ValueError: naming the argument or setting: a wrong value, or one that is not supported, because of a reason.
    """
    given = {name: value for name, value in (overrides or {}).items() if not _is_switched_off(name, value)}
    known = vars(GenerationConfig())
    values = {**known, **_DEFAULTS, **set_values(generation_config)}
    for name in given:
        if name not in values:
            raise TypeError(f"generate: unexpected argument `{name}`, no setting of transformers' GenerationConfig either")
    values.update(given)
    settings = _read(values, vocab_size, seed)
    _refuse(values, known, settings)
    # For transformers' own checks and warnings, such as a temperature without sampling. It takes one limit for all rows.
    one = {"max_new_tokens": max(settings.max_new_tokens)} if isinstance(settings.max_new_tokens, list) else {}
    copy.deepcopy(generation_config).update(**{**given, **one})
    return settings


def set_values(config: GenerationConfig) -> dict[str, Any]:
    """The settings of `config` that are not None."""
    if not isinstance(config, GenerationConfig):
        raise TypeError(f"generate: `generation_config` must be a transformers.GenerationConfig, got {type(config).__name__}")
    return {name: value for name, value in vars(config).items() if not name.startswith("_") and value is not None}


def _token_ids(ids: Any, name: str = "eos_token_id") -> list[int]:
    """One id, or a list, 1-d array or 1-d tensor of ids, as a list; None gives an empty one.

    Raises:
        ValueError: naming the argument `name`.
    """
    if ids is None:
        return []
    values = ids.tolist() if isinstance(ids, (torch.Tensor, np.ndarray)) else ids
    values = [values] if is_integer(values) else values
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)) or not all(map(is_integer, values)):
        raise ValueError(f"generate: `{name}` must be a token id or a list of them, got {ids!r}")
    return [int(token) for token in values]


def end_tokens(ids: Any, vocab_size: int, name: str = "eos_token_id") -> list[int]:
    """The ids that end a row. Ids outside the vocabulary, such as -1 for none, end nothing and are left out with a warning.

    Raises:
        ValueError: naming the argument `name`: no ids, or more than `MAX_STOP_TOKENS`.
    """
    ends = _token_ids(ids, name)
    if unknown := [token for token in ends if not 0 <= token < vocab_size]:
        warnings.warn(
            f"generate: `{name}` holds {unknown}, which ends nothing: the model knows tokens 0 to {vocab_size - 1}",
            stacklevel=6,
        )
        ends = [token for token in ends if 0 <= token < vocab_size]
    if len(ends) > MAX_STOP_TOKENS:
        raise ValueError(f"generate: `{name}` must hold at most {MAX_STOP_TOKENS} ids, got {len(ends)}")
    return ends


def _is_switched_off(name: str, value: Any) -> bool:
    """Whether `name` is an argument that is not supported, and is switched off. Raises a ValueError if it is not off."""
    if name not in _REFUSED_ARGUMENTS:
        return False
    if not _is_off(value, (False,)):
        raise ValueError(f"generate: `{name}` is not supported, because {_REFUSED_ARGUMENTS[name]}")
    return True


def _refuse(values: dict[str, Any], known: dict[str, Any], settings: GenerationSettings) -> None:
    tables = dict(REFUSED)
    if settings.return_dict:
        tables.update(REFUSED_IN_OUTPUT)
    found = HONOURED | WITHOUT_EFFECT | REFUSED.keys() | REFUSED_IN_OUTPUT.keys()
    # What a later release of transformers adds. Entries that transformers does not know are ignored, as in its `generate`.
    for name in known.keys() - found:
        if not name.startswith("_"):
            tables[name] = ((known[name],), "this release of spec_ops does not know it")
    for name, (neutral, reason) in tables.items():
        value = values.get(name)
        if not _is_off(value, neutral):
            off = neutral[0] if neutral and name != "cache_implementation" else None
            raise ValueError(
                f"generate: `{name}` must be {off}, got {value!r}: not supported, because {reason}. If the model's "
                f"generation_config sets it, `{name}={off}` as an argument switches it off"
            )


def _is_off(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None or (isinstance(value, (str, list, tuple, dict)) and not value):
        return True
    return not isinstance(value, (torch.Tensor, np.ndarray)) and value in neutral


def _read(values: dict[str, Any], vocab: int, seed: int | None) -> GenerationSettings:
    pads = _token_ids(values["pad_token_id"], "pad_token_id")
    if len(pads) > 1:
        raise ValueError(f"generate: `pad_token_id` must be one token id, got {values['pad_token_id']!r}")
    sampling, ends = _sampling(values, seed), end_tokens(values["eos_token_id"], vocab)
    return GenerationSettings(
        sampling,
        read_logits_settings(values, vocab, ends, sampling.temperature > 0),
        ends,
        pads[0] if pads else None,
        _strings(values["stop_strings"]),
        _limits(values["max_new_tokens"]),
        None if values["max_length"] is None else _count("max_length", values["max_length"]),
        _seconds(values["max_time"]),
        _count("num_return_sequences", 1 if values["num_return_sequences"] is None else values["num_return_sequences"]),
        _switch("return_dict_in_generate", values["return_dict_in_generate"]),
        _count_or_none("prompt_lookup_num_tokens", values["prompt_lookup_num_tokens"], MAX_TREE_TOKENS - 1),
        _count_or_none("max_matching_ngram_size", values["max_matching_ngram_size"], MAX_NGRAM),
    )


def _sampling(values: dict[str, Any], seed: int | None) -> SamplingParams:
    if not _switch("do_sample", values["do_sample"]):
        return SamplingParams(seed=seed)
    # None leaves a filter out, as in `generate`.
    chosen = {name: off if values[name] is None else values[name] for name, off in _FILTERS_OFF.items()}
    number("generate", "temperature", chosen["temperature"], "above 0 with `do_sample=True`", lambda value: value > 0)
    return SamplingParams(**chosen, seed=seed)


def _limits(value: Any) -> int | list[int] | None:
    """`max_new_tokens`: one, or a list, 1-d array or tensor with one per row."""
    if value is None:
        return None
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
        return [_count("max_new_tokens", limit) for limit in value]
    return _count("max_new_tokens", value)


def _count(name: str, value: Any) -> int:
    return integer("generate", name, value, 1)


def _count_or_none(name: str, value: Any, most: int) -> int | None:
    return None if value is None else integer("generate", name, value, 1, most)


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    return number("generate", "max_time", value, "a number of seconds", lambda seconds: seconds >= 0)


def _strings(value: Any) -> list[str]:
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, Iterable) or not all(isinstance(string, str) for string in strings):
        raise ValueError(f"generate: `stop_strings` must be a string or a list of them, got {value!r}")
    return list(strings)


def _switch(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"generate: `{name}` must be True or False, got {value!r}")
    return bool(value)
