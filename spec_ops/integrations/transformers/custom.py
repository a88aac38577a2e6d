"""`logits_processor` of `generate`: processors of transformers as steps, and functions of a caller.

transformers calls a processor with `input_ids [bs, length]` and `scores [bs, V]`, one position of all rows at a time. A round
has several positions of a row at once, and rows of different lengths; there is no such `input_ids`. Processors of transformers
that are known here are replaced by steps. Others run if they read no `input_ids`: they get an object that cannot be read.
Functions of `(logits, history, lengths)` read the text, see `spec_ops.decoding.Generator.generate`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.generation import logits_process as theirs

from spec_ops._numbers import shown
from spec_ops.decoding.logits import names_prompt_lens
from spec_ops.integrations.transformers import processors as change
from spec_ops.integrations.transformers import warpers as cut
from spec_ops.integrations.transformers.logits import Call, Listed
from spec_ops.integrations.transformers.steps import Rows, Step

_REWRITE = "write it as a function of (logits, history, lengths), see `spec_ops.decoding.Generator.generate`"


def read_processors(processors: Any, call: Call, device: torch.device) -> Listed:
    """The steps of the argument `logits_processor`, each with the class that it stands for.

    Args:
        processors: a `LogitsProcessorList`, or a list of callables.
        call: what steps depend on.
        device: of the target.

    Raises:
        ValueError: naming `logits_processor`, or its entry that is not supported, because of a reason.
    """
    if processors is None:
        return []
    if not isinstance(processors, (list, tuple)) or not all(map(callable, processors)):
        raise ValueError(f"generate: `logits_processor` must be a LogitsProcessorList, got {shown(processors)}")
    distinct = [p for i, p in enumerate(processors) if not any(p is other for other in processors[:i])]
    return [(type(p), _step(p, f"`logits_processor[{i}]` ({_name(p)})", call, device)) for i, p in enumerate(distinct)]


def _name(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def _step(processor: Any, name: str, call: Call, device: torch.device) -> Step:
    make = _KNOWN.get(type(processor))
    if make is not None:
        try:
            step = make(processor, call)
        except (IndexError, ValueError) as error:
            raise ValueError(f"generate: {name} {error}") from error
        if step is not None:
            return step
    arity = _arity(processor)
    if arity == 3:
        return FunctionOfHistory(processor)
    if arity != 2:
        raise ValueError(f"generate: {name} must be a function of (input_ids, scores), or of (logits, history, lengths)")
    _check_scores_function(processor, name, call.vocab_size, device)
    return FunctionOfScores(processor)


def _arity(processor: Any) -> int:
    """How many arguments a call must have, `prompt_lens` left out; 2 if its signature is unknown."""
    try:
        parameters = inspect.signature(processor.forward if isinstance(processor, nn.Module) else processor).parameters
    except (TypeError, ValueError):
        return 2
    needed = [p for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len([p for p in needed if p.name != "prompt_lens"])


class FunctionOfHistory(Step):
    """A function of `(logits, history, lengths)`, and `prompt_lens` if it has such a parameter."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function, self.names_prompt_lens = function, names_prompt_lens(function)

    @property
    def key(self) -> Hashable:
        return type(self), id(self.function)

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        named = {"prompt_lens": rows.prompt_lens} if self.names_prompt_lens else {}
        return self.function(scores, rows.history, rows.lengths, **named)


class FunctionOfScores(FunctionOfHistory):
    """A processor of `(input_ids, scores)` that does not read `input_ids`."""

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        return self.function(_UNREADABLE, scores.clone())  # processors may write into their scores


class _Read(Exception):
    """A processor looked at `input_ids`."""


class _Unreadable:
    """`input_ids` for processors that do not read them. Whatever is done with it raises, also in a round."""

    def _refuse(self, *_arguments: Any, **_named: Any) -> NoReturn:
        raise _Read("generate: a processor of `logits_processor` reads `input_ids`, which rounds do not have")

    __getattr__ = __getitem__ = __len__ = __iter__ = __eq__ = __ne__ = __bool__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, *_arguments: Any) -> NoReturn:
        raise _Read("generate: a processor of `logits_processor` reads `input_ids`, which rounds do not have")


_UNREADABLE = _Unreadable()


def _check_scores_function(processor: Any, name: str, vocab_size: int, device: torch.device) -> None:
    """Refuse what a round would call wrongly: on three rows together, and on each alone, as nothing says how many there are."""
    scores = torch.randn(3, vocab_size, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(device)

    def called(given: torch.Tensor) -> torch.Tensor:
        try:
            out = processor(_UNREADABLE, given.clone())
        except _Read:
            raise ValueError(f"generate: {name} is not supported, because it reads `input_ids`: {_REWRITE}") from None
        except Exception as error:
            raise ValueError(
                f"generate: {name} cannot be called with scores of shape {list(given.shape)}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(out, torch.Tensor) or out.shape != given.shape or out.dtype != given.dtype:
            got = f"{out.dtype} of shape {list(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
            raise ValueError(f"generate: {name} must return scores as it gets them, float32 {list(given.shape)}, got {got}")
        return out

    with torch.no_grad():
        together, again = called(scores), called(scores)
        alone = torch.cat([called(row[None]) for row in scores])
    if not torch.allclose(together, again, rtol=0, atol=0, equal_nan=True):
        raise ValueError(f"generate: {name} is not supported, because it gives another result for the same scores")
    # A sum over the vocabulary may be split in another way for another number of rows.
    if not torch.allclose(together, alone, rtol=1e-4, atol=1e-4, equal_nan=True):
        raise ValueError(f"generate: {name} is not supported, because what a row gets depends on the other rows: {_REWRITE}")


def _ends(processor: Any) -> list[int]:
    return processor.eos_token_id.tolist()


def _check_known(ids: Sequence[int], vocab_size: int) -> None:
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"must hold token ids in [0, {vocab_size}), got {shown(wrong)}")


def _repetition(p: Any, call: Call) -> Step | None:
    if isinstance(p.prompt_ignore_length, torch.Tensor):
        raise ValueError("is not supported, because its `prompt_ignore_length` is a tensor: padding is left out anyway")
    return change.RepetitionPenalty(p.penalty, (p.prompt_ignore_length or 0) - call.length)


def _sequence_bias(p: Any, call: Call) -> Step | None:
    _check_known([token for sequence in p.sequence_bias for token in sequence], call.vocab_size)
    if any(math.isnan(bias) for bias in p.sequence_bias.values()):
        raise ValueError("must have numbers as biases, got nan")
    return change.SequenceBias(p.sequence_bias, call.vocab_size)


def _bad_words(p: Any, call: Call) -> Step | None:
    _check_known([token for sequence in p.sequence_bias for token in sequence], call.vocab_size)
    return change.NoBadWords(list(p.sequence_bias), call.vocab_size)


def _force(ids: Sequence[int], at: int, call: Call) -> Step:
    _check_known(ids, call.vocab_size)
    return change.Force(ids, call.vocab_size, at)


def _decay(p: Any, call: Call) -> Step | None:
    _check_known(_ends(p), call.vocab_size)
    start = p.regulation_start - call.length
    return change.ExponentialDecay(start, p.regulation_factor, _ends(p), call.vocab_size, max(call.limits))


def _min_length(p: Any, call: Call) -> Step | None:
    return change.Suppress(_ends(p), call.vocab_size, end=p.min_length - call.length)


def _min_new_tokens(p: Any, call: Call) -> Step | None:
    return change.Suppress(_ends(p), call.vocab_size, end=p.min_new_tokens + p.prompt_length_to_skip - call.length)


def _begin_suppress(p: Any, call: Call) -> Step | None:
    begin = p.begin_index - call.length
    return change.Suppress(p.begin_suppress_tokens.tolist(), call.vocab_size, begin, begin + 1)


def _filter(make: Callable[[Any, Call], Step]) -> Callable[[Any, Call], Step | None]:
    """With another `filter_value`, or more tokens to keep, the class itself runs: it reads scores alone."""

    def filtered(p: Any, call: Call) -> Step | None:
        plain = p.filter_value == -math.inf and getattr(p, "min_tokens_to_keep", 1) == 1
        return make(p, call) if plain else None

    return filtered


# What makes the step of a processor; None where the processor itself is to be called.
_KNOWN: dict[type, Callable[[Any, Call], Step | None]] = {
    theirs.RepetitionPenaltyLogitsProcessor: _repetition,
    theirs.NoRepeatNGramLogitsProcessor: lambda p, call: change.NoRepeatNGram(p.ngram_size),
    theirs.SequenceBiasLogitsProcessor: _sequence_bias,
    theirs.NoBadWordsLogitsProcessor: _bad_words,
    theirs.MinLengthLogitsProcessor: _min_length,
    theirs.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    theirs.ForcedBOSTokenLogitsProcessor: lambda p, call: _force([p.bos_token_id], 1 - call.length, call),
    theirs.ForcedEOSTokenLogitsProcessor: lambda p, call: _force(_ends(p), p.max_length - 1 - call.length, call),
    theirs.InfNanRemoveLogitsProcessor: lambda p, call: change.RemoveInvalid(),
    theirs.ExponentialDecayLengthPenalty: _decay,
    theirs.SuppressTokensLogitsProcessor: lambda p, call: change.Suppress(p.suppress_tokens.tolist(), call.vocab_size),
    theirs.SuppressTokensAtBeginLogitsProcessor: _begin_suppress,
    theirs.LogitNormalization: lambda p, call: change.Normalize(),
    theirs.TemperatureLogitsWarper: lambda p, call: cut.Temperature(p.temperature),
    theirs.TopKLogitsWarper: _filter(lambda p, call: cut.TopK(p.top_k, call.vocab_size)),
    theirs.TopPLogitsWarper: _filter(lambda p, call: cut.TopP(p.top_p)),
    theirs.MinPLogitsWarper: _filter(lambda p, call: cut.MinP(p.min_p)),
    theirs.TopHLogitsWarper: _filter(lambda p, call: cut.TopH(p.top_h, call.vocab_size, p.top_n)),
    theirs.TypicalLogitsWarper: _filter(lambda p, call: cut.Typical(p.mass)),
    theirs.EpsilonLogitsWarper: _filter(lambda p, call: cut.Epsilon(p.epsilon)),
    theirs.EtaLogitsWarper: _filter(lambda p, call: cut.Eta(float(p.epsilon))),
}
