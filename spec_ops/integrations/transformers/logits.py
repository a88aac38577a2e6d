"""Settings of `generate` that change logits, and what a round is given for them.

What `SamplingParams` has goes there. Where a call asks for more, all that changes its logits becomes steps, in the order in
which transformers builds its list of processors: some do not commute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as theirs

from spec_ops._numbers import integer, is_integer, is_number, number, shown
from spec_ops.decoding import SamplingParams
from spec_ops.integrations.transformers import processors as change
from spec_ops.integrations.transformers import warpers as cut
from spec_ops.integrations.transformers.steps import Step, Truncation

# As in transformers: a processor in `logits_processor` replaces one of the same class that a setting has made.
Listed = list[tuple[type | None, Step]]


@dataclass(frozen=True)
class LogitsSettings:
    """Settings named as in `transformers.GenerationConfig`, with values that mean off where they are off.

    The last four are on in sampling alone.
    """

    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    encoder_repetition_penalty: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0
    min_new_tokens: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0


@dataclass(frozen=True)
class Call:
    """What steps depend on besides their settings.

    Attributes:
        vocab_size: of the target.
        ends: the ids of `eos_token_id`.
        stops: the ids that end rows: others where a stopping criterion names them.
        length: of the input, padding included.
        limits: new tokens of each row.
        configured: the same by the settings alone, where a stopping criterion sets another limit.
    """

    vocab_size: int
    ends: tuple[int, ...]
    stops: tuple[int, ...]
    length: int
    limits: tuple[int, ...]
    configured: tuple[int, ...]


def read_logits_settings(values: Mapping[str, Any], vocab_size: int, ends: Sequence[int], sampled: bool) -> LogitsSettings:
    """The settings of a call, checked.

    Args:
        values: of all settings, by name.
        vocab_size: of the target.
        ends: the ids of `eos_token_id`.
        sampled: `do_sample`.

    Raises:
        ValueError: naming the setting.
    """

    def read(name: str, wanted: str, fits: Any, off: Any) -> Any:
        return off if values.get(name) is None else number("generate", name, values[name], wanted, fits)

    def count(name: str) -> int:
        return 0 if values.get(name) is None else integer("generate", name, values[name], 0, 2**31 - 1)

    def listed(name: str) -> tuple[int, ...]:
        """Ids outside the vocabulary stand for no token, as in `generate`."""
        ids = () if values.get(name) is None else _ids(name, values[name], "a list of token ids")
        return tuple(token for token in ids if 0 <= token < vocab_size)

    def inside(name: str) -> tuple[int, ...]:
        value = values.get(name)
        if value is None or (isinstance(value, (list, tuple)) and not value):
            return ()
        return _known(name, _ids(name, [value] if is_integer(value) else value, "a token id or a list of them"), vocab_size)

    above_0 = ("a finite number above 0", lambda value: 0 < value < math.inf)
    zero_to_1 = ("a number in [0, 1]", lambda value: 0 <= value <= 1)
    positive_to_1 = ("a number in (0, 1]", lambda value: 0 < value <= 1)
    forced = inside("forced_bos_token_id")
    if len(forced) > 1:
        raise ValueError(f"generate: `forced_bos_token_id` must be one token id, got {values['forced_bos_token_id']!r}")
    decay = _decay(values.get("exponential_decay_length_penalty"), ends)
    filters: dict[str, Any] = {}
    if sampled:
        filters = {
            "top_h": read("top_h", *positive_to_1, None),
            "typical_p": read("typical_p", *positive_to_1, 1.0),
            "epsilon_cutoff": read("epsilon_cutoff", *zero_to_1, 0.0) % 1.0,
            "eta_cutoff": read("eta_cutoff", *zero_to_1, 0.0) % 1.0,
        }
    invalid = values.get("remove_invalid_values")
    if invalid is not None and not isinstance(invalid, (bool, np.bool_)):
        raise ValueError(f"generate: `remove_invalid_values` must be True or False, got {invalid!r}")
    return LogitsSettings(
        sequence_bias=tuple(_biases(values.get("sequence_bias"), vocab_size).items()),
        encoder_repetition_penalty=read("encoder_repetition_penalty", *above_0, 1.0),
        repetition_penalty=read("repetition_penalty", *above_0, 1.0),
        no_repeat_ngram_size=count("no_repeat_ngram_size"),
        encoder_no_repeat_ngram_size=count("encoder_no_repeat_ngram_size"),
        bad_words_ids=_bad_words(values.get("bad_words_ids"), vocab_size, ends),
        min_length=count("min_length"),
        min_new_tokens=None if values.get("min_new_tokens") is None else count("min_new_tokens"),
        forced_bos_token_id=forced[0] if forced else None,
        forced_eos_token_id=inside("forced_eos_token_id"),
        remove_invalid_values=bool(invalid),
        exponential_decay_length_penalty=decay,
        suppress_tokens=listed("suppress_tokens"),
        begin_suppress_tokens=listed("begin_suppress_tokens"),
        **filters,
    )


def plan_logits(
    settings: LogitsSettings, sampling: SamplingParams, given: Listed, call: Call
) -> tuple[SamplingParams, list[Step]]:
    """What a round is given: its parameters, and steps for what these do not have.

    Args:
        settings: of the call.
        sampling: temperature, top-k, top-p, min-p and seed of the call.
        given: the steps of its `logits_processor`.
        call: what else they depend on.

    Raises:
        ValueError: `forced_eos_token_id` with limits that differ.
    """
    least = settings.min_length - call.length if settings.min_new_tokens is None else settings.min_new_tokens
    least = max(0, least) if call.ends else 0
    filters = _filters(settings, sampling, call.vocab_size)
    in_round = LogitsSettings(
        sequence_bias=tuple((ids, bias) for ids, bias in settings.sequence_bias if len(ids) == 1 and math.isfinite(bias)),
        repetition_penalty=settings.repetition_penalty,
        bad_words_ids=settings.bad_words_ids,
        min_length=settings.min_length,
        min_new_tokens=settings.min_new_tokens,
        suppress_tokens=settings.suppress_tokens,
        **{name: getattr(settings, name) for name in ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")},
    )
    if filters:
        sampling = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    if settings == in_round and not given and (not least or set(call.ends) == set(call.stops)):
        sampling = replace(
            sampling,
            repetition_penalty=settings.repetition_penalty,
            logit_bias={ids[0]: bias for ids, bias in settings.sequence_bias} or None,
            min_new_tokens=least,
            bad_words_ids=settings.bad_words_ids,
            suppress_tokens=settings.suppress_tokens,
        )
        return sampling, filters
    return sampling, [*_merged(_changes(settings, least, call), given), *filters]


def _changes(settings: LogitsSettings, least: int, call: Call) -> Listed:
    """The steps of settings that are on, in the order of `GenerationMixin._get_logits_processor`."""
    vocab = call.vocab_size
    made: Listed = []

    def add(kind: type, step: Step) -> None:
        made.append((kind, step))

    if settings.sequence_bias:
        add(theirs.SequenceBiasLogitsProcessor, change.SequenceBias(dict(settings.sequence_bias), vocab))
    if settings.encoder_repetition_penalty != 1.0:
        rewarded = change.RepetitionPenalty(1 / settings.encoder_repetition_penalty, prompt_only=True)
        add(theirs.EncoderRepetitionPenaltyLogitsProcessor, rewarded)
    if settings.repetition_penalty != 1.0:
        add(theirs.RepetitionPenaltyLogitsProcessor, change.RepetitionPenalty(settings.repetition_penalty))
    if settings.no_repeat_ngram_size:
        add(theirs.NoRepeatNGramLogitsProcessor, change.NoRepeatNGram(settings.no_repeat_ngram_size))
    if settings.encoder_no_repeat_ngram_size:
        of_prompt = change.NoRepeatNGram(settings.encoder_no_repeat_ngram_size, prompt_only=True)
        add(theirs.EncoderNoRepeatNGramLogitsProcessor, of_prompt)
    if settings.bad_words_ids:
        add(theirs.NoBadWordsLogitsProcessor, change.NoBadWords(settings.bad_words_ids, vocab))
    if least:  # `min_new_tokens` gives both: one of them may be replaced
        add(theirs.MinLengthLogitsProcessor, change.Suppress(call.ends, vocab, end=least))
    if least and settings.min_new_tokens:
        add(theirs.MinNewTokensLengthLogitsProcessor, change.Suppress(call.ends, vocab, end=least))
    if settings.forced_bos_token_id is not None:
        add(theirs.ForcedBOSTokenLogitsProcessor, change.Force([settings.forced_bos_token_id], vocab, 1 - call.length))
    if settings.forced_eos_token_id:
        if len(set(call.configured)) > 1:
            raise ValueError(
                "generate: `forced_eos_token_id` needs one `max_new_tokens` for all rows, got "
                f"{shown(list(call.configured))}: the limits of single rows are not known where logits change"
            )
        last = change.Force(settings.forced_eos_token_id, vocab, call.configured[0] - 1)
        add(theirs.ForcedEOSTokenLogitsProcessor, last)
    if settings.remove_invalid_values:
        add(theirs.InfNanRemoveLogitsProcessor, change.RemoveInvalid())
    if settings.exponential_decay_length_penalty is not None:
        start, factor = settings.exponential_decay_length_penalty
        decay = change.ExponentialDecay(start, factor, call.ends, vocab, max(call.limits))
        add(theirs.ExponentialDecayLengthPenalty, decay)
    if settings.suppress_tokens:
        add(theirs.SuppressTokensLogitsProcessor, change.Suppress(settings.suppress_tokens, vocab))
    if settings.begin_suppress_tokens:
        begin = int(call.length == 1 and settings.forced_bos_token_id is not None)
        first = change.Suppress(settings.begin_suppress_tokens, vocab, begin, begin + 1)
        add(theirs.SuppressTokensAtBeginLogitsProcessor, first)
    return made


def _merged(made: Listed, given: Listed) -> list[Step]:
    """As `GenerationMixin._merge_criteria_processor_list` merges them."""
    merged = [next(((kind, step) for kind, step in given if kind is made_kind), (made_kind, own)) for made_kind, own in made]
    steps = [step for _, step in merged]
    return steps + [step for _, step in given if not any(step is other for other in steps)]


def _filters(settings: LogitsSettings, sampling: SamplingParams, vocab_size: int) -> list[Step]:
    """All filters of sampling, where one of them is not the round's own; else none."""
    special: list[Step] = []
    if settings.typical_p < 1.0:
        special.append(cut.Typical(settings.typical_p))
    if settings.epsilon_cutoff > 0:
        special.append(cut.Epsilon(settings.epsilon_cutoff))
    if settings.eta_cutoff > 0:
        special.append(cut.Eta(settings.eta_cutoff))
    if not special and settings.top_h is None:
        return []
    steps: list[Step] = [] if settings.top_h is None else [cut.TopH(settings.top_h, vocab_size)]
    if sampling.top_k > 0:
        steps.append(cut.TopK(sampling.top_k, vocab_size))
    if sampling.top_p < 1.0:
        steps.append(cut.TopP(sampling.top_p))
    if sampling.min_p > 0:
        steps.append(cut.MinP(sampling.min_p))
    return [Truncation(sampling.temperature, [*steps, *special])]


def _biases(value: Any, vocab_size: int) -> dict[tuple[int, ...], float]:
    """`sequence_bias`: a dict, or a list of pairs as a configuration file has them."""
    wanted = "a dict of token id tuples to biases, or a list of [token ids, bias]"
    if value is None:
        return {}
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        raise ValueError(f"generate: `sequence_bias` must be {wanted}, got {shown(value)}")
    biases = {}
    for ids, bias in pairs:
        if not is_number(bias) or math.isnan(bias):
            raise ValueError(f"generate: `sequence_bias` must have numbers as biases, got {shown(bias)} for {shown(ids)}")
        biases[_known("sequence_bias", _ids("sequence_bias", ids, wanted), vocab_size)] = float(bias)
    if () in biases:
        raise ValueError(f"generate: `sequence_bias` must be {wanted}, got an empty sequence")
    return biases


def _bad_words(value: Any, vocab_size: int, ends: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """`bad_words_ids` without end tokens, which `generate` leaves out."""
    wanted = "a list of non-empty token id lists"
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"generate: `bad_words_ids` must be {wanted}, got {shown(value)}")
    words = [_known("bad_words_ids", _ids("bad_words_ids", word, wanted), vocab_size) for word in value]
    if not all(words):
        raise ValueError(f"generate: `bad_words_ids` must be {wanted}, got an empty one")
    return tuple(dict.fromkeys(word for word in words if len(word) > 1 or word[0] not in ends))


def _decay(value: Any, ends: Sequence[int]) -> tuple[int, float] | None:
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return None
    pair = isinstance(value, (list, tuple)) and len(value) == 2
    if not pair or not is_integer(value[0]) or not is_number(value[1]) or not math.isfinite(value[1]):
        raise ValueError(
            "generate: `exponential_decay_length_penalty` must be an int (tokens before it begins) and a finite number "
            f"(the factor), got {shown(value)}"
        )
    if not ends:
        raise ValueError("generate: `exponential_decay_length_penalty` needs `eos_token_id`, got none")
    return int(value[0]), float(value[1])


def _ids(name: str, values: Any, wanted: str) -> tuple[int, ...]:
    if isinstance(values, (torch.Tensor, np.ndarray)) and values.ndim == 1:
        values = values.tolist()
    if not isinstance(values, (list, tuple, set, frozenset, range)) or not all(map(is_integer, values)):
        raise ValueError(f"generate: `{name}` must be {wanted}, got {shown(values)}")
    return tuple(map(int, values))


def _known(name: str, ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"generate: `{name}` must hold token ids in [0, {vocab_size}), got {shown(wrong)}")
    return ids
