"""The logits processors of transformers as steps of a round: penalties, n-grams, sequences, lengths.

Each computes what the class of `transformers.generation.logits_process` named in its docstring computes for a row without
padding, bit for bit on a CPU. Vectorized over rows and vocabulary; nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F

from spec_ops.integrations.transformers.steps import Rows, Step

# In a table of sequences: a place that every token matches, and one that none does. -1 is before the first token.
_ANY, _NEVER = -2, -3
_ALWAYS = 2**62


def _at_least(size: int, least: int = 1) -> int:
    """The next power of two: tables grow in steps, so that calls with a few words more share a compiled round."""
    return max(least, 1 << (size - 1).bit_length() if size > 0 else 1)


def _members(ids: Iterable[int], vocab_size: int) -> torch.Tensor:
    """`[vocab_size]` bool: the tokens `ids`. Ids outside the vocabulary are no tokens."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
    mask[[token for token in ids if 0 <= token < vocab_size]] = True
    return mask


class RepetitionPenalty(Step):
    """`RepetitionPenaltyLogitsProcessor`, and `EncoderRepetitionPenaltyLogitsProcessor` for `prompt_only`: logits of tokens
    that occurred are multiplied by the penalty where negative, else divided.

    Args:
        penalty: above 0.
        ignored: tokens of the prompt that do not count, less the prompt's length: 0 leaves out the prompt.
        prompt_only: only the prompt's tokens count.
    """

    penalty: torch.Tensor
    ignored: torch.Tensor

    def __init__(self, penalty: float, ignored: int = -_ALWAYS, *, prompt_only: bool = False) -> None:
        super().__init__(penalty=float(penalty), ignored=ignored)
        self.prompt_only = prompt_only

    @property
    def key(self) -> Hashable:
        return super().key, self.prompt_only

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        end = rows.prompt_lens if self.prompt_only else rows.lengths
        counted = (rows.position < end[:, None]) & (rows.position >= (rows.prompt_lens + self.ignored)[:, None])
        penalized = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return torch.where(rows.occurring(counted, scores.shape[-1]), penalized, scores)


class NoRepeatNGram(Step):
    """`NoRepeatNGramLogitsProcessor`, and `EncoderNoRepeatNGramLogitsProcessor` for `prompt_only`: no n-gram of the row, or of
    its prompt, occurs again.

    Args:
        size: of the n-grams, at least 1.
        prompt_only: only the prompt's n-grams count.
    """

    size: torch.Tensor
    compared: torch.Tensor

    def __init__(self, size: int, *, prompt_only: bool = False) -> None:
        compared = torch.arange(_at_least(size - 1, 4), device="cpu") < size - 1
        super().__init__(size=size, compared=compared)
        self.prompt_only = prompt_only

    @property
    def key(self) -> Hashable:
        return super().key, self.prompt_only

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        count = len(self.compared)
        end = rows.prompt_lens if self.prompt_only else rows.lengths
        newest, before = rows.newest(count), F.pad(rows.history, (count, 0), value=-1)
        ends_ngram = (rows.position >= self.size - 1) & (rows.position < end[:, None])
        for back in range(count):  # tokens before a position, beside those before the one that is next
            shifted = before[:, count - 1 - back : before.shape[1] - 1 - back]
            ends_ngram = ends_ngram & ((shifted == newest[:, back, None]) | ~self.compared[back])
        return scores.masked_fill(rows.occurring(ends_ngram, scores.shape[-1]), -torch.inf)


class _Sequences(Step):
    """A table of token sequences, of which the last token is concerned where the others have just been said."""

    prefixes: torch.Tensor  # [sequences, width], newest first

    def __init__(self, sequences: Sequence[Sequence[int]], **values: torch.Tensor) -> None:
        width = _at_least(max((len(sequence) - 1 for sequence in sequences), default=0), 2)
        prefixes = [[*sequence[-2::-1], *[_ANY] * (width - len(sequence) + 1)] for sequence in sequences]
        prefixes += [[_NEVER] * width] * (_at_least(len(sequences), 4) - len(sequences))
        super().__init__(prefixes=torch.tensor(prefixes, dtype=torch.int64, device="cpu"), **values)

    def matches(self, rows: Rows) -> torch.Tensor:
        """`[rows, sequences]` bool: all but the last token of the sequence have just been said."""
        newest = rows.newest(self.prefixes.shape[1])
        return ((self.prefixes == newest[:, None]) | (self.prefixes == _ANY)).all(-1)


class SequenceBias(_Sequences):
    """`SequenceBiasLogitsProcessor`: a bias on the token that would complete a sequence. A sequence of one token is always to
    be completed. Biases of one token are added in the order in which transformers adds them, on every device.

    Args:
        biases: by sequence, each of at least one token of the vocabulary.
        vocab_size: of the target.
    """

    bias: torch.Tensor
    tokens: torch.Tensor
    table: torch.Tensor

    def __init__(self, biases: Mapping[tuple[int, ...], float], vocab_size: int) -> None:
        lengths = list(dict.fromkeys([1, *map(len, biases)]))  # transformers goes length by length
        sequences = sorted(biases, key=lambda sequence: lengths.index(len(sequence)))
        by_token: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            by_token.setdefault(sequence[-1], []).append(index)
        none = _at_least(len(sequences), 4)  # the column of a sum's missing terms
        terms = _at_least(max(map(len, by_token.values()), default=0), 4)
        table = [[*indices, *[none] * (terms - len(indices))] for indices in by_token.values()]
        spare = _at_least(len(by_token), 4) - len(by_token)
        bias = [biases[sequence] for sequence in sequences] + [0.0] * (none - len(sequences))
        super().__init__(
            sequences,
            bias=torch.tensor(bias, dtype=torch.float32, device="cpu"),
            tokens=torch.tensor([*by_token, *[vocab_size] * spare], dtype=torch.int64, device="cpu"),
            table=torch.tensor([*table, *[[none] * terms] * spare], dtype=torch.int64, device="cpu"),
        )

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        terms = F.pad(torch.where(self.matches(rows), self.bias, 0.0), (0, 1))
        total = terms[:, self.table[:, 0]]
        for place in range(1, self.table.shape[1]):
            total = total + terms[:, self.table[:, place]]
        added = scores.new_zeros(scores.shape[0], scores.shape[1] + 1)
        return scores + added.scatter(1, self.tokens.expand(len(scores), -1), total)[:, :-1]


class NoBadWords(_Sequences):
    """`NoBadWordsLogitsProcessor`: no sequence is completed.

    Args:
        words: sequences of at least one token of the vocabulary.
        vocab_size: of the target.
    """

    last: torch.Tensor

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        last = [word[-1] for word in words] + [vocab_size] * (_at_least(len(words), 4) - len(words))
        super().__init__(words, last=torch.tensor(last, dtype=torch.int64, device="cpu"))

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        count = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.int32, device=scores.device)
        # Integers, so that a GPU's order of additions does not matter.
        banned = count.index_add(1, self.last, self.matches(rows).to(torch.int32))[:, :-1] > 0
        return torch.where(banned, scores - torch.inf, scores)


class Suppress(Step):
    """`MinLengthLogitsProcessor`, `MinNewTokensLengthLogitsProcessor`, `SuppressTokensLogitsProcessor` and
    `SuppressTokensAtBeginLogitsProcessor`: tokens that cannot come while `begin <= emitted tokens < end`.

    Args:
        ids: the tokens.
        vocab_size: of the target.
        begin, end: counts of emitted tokens.
    """

    tokens: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor

    def __init__(self, ids: Iterable[int], vocab_size: int, begin: int = 0, end: int = _ALWAYS) -> None:
        super().__init__(tokens=_members(ids, vocab_size), begin=begin, end=end)

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        now = (rows.new >= self.begin) & (rows.new < self.end)
        return scores.masked_fill(now[:, None] & self.tokens, -torch.inf)


class Force(Step):
    """`ForcedBOSTokenLogitsProcessor` and `ForcedEOSTokenLogitsProcessor`: after `at` emitted tokens, only `ids` can come.

    Args:
        ids: tokens of the vocabulary.
        vocab_size: of the target.
        at: a count of emitted tokens; a negative one is never reached.
    """

    tokens: torch.Tensor
    at: torch.Tensor

    def __init__(self, ids: Iterable[int], vocab_size: int, at: int) -> None:
        super().__init__(tokens=_members(ids, vocab_size), at=at)

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        forced = torch.where(self.tokens, 0.0, -torch.inf)
        return torch.where((rows.new == self.at)[:, None], forced, scores)


class RemoveInvalid(Step):
    """`InfNanRemoveLogitsProcessor`: NaN becomes 0, an infinity the largest finite number of its sign."""

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        return torch.nan_to_num(scores, nan=0.0)


class ExponentialDecay(Step):
    """`ExponentialDecayLengthPenalty`: logits of end tokens grow with the length.

    Args:
        start: emitted tokens after which they grow.
        factor: by which, for each token.
        ids: end tokens.
        vocab_size: of the target.
        limit: most tokens that a row emits.
    """

    tokens: torch.Tensor
    growth: torch.Tensor
    start: torch.Tensor

    def __init__(self, start: int, factor: float, ids: Iterable[int], vocab_size: int, limit: int) -> None:
        counts = range(_at_least(limit + max(0, -start)) + 1)
        growth = torch.tensor([_power(factor, count) - 1 for count in counts], dtype=torch.float32, device="cpu")
        super().__init__(tokens=_members(ids, vocab_size), growth=growth, start=start)

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        growth = self.growth[(rows.new - self.start).clamp(0, len(self.growth) - 1)]  # growth[0] is 0
        grown = scores + scores.abs() * growth[:, None]
        return torch.where(self.tokens & scores.isfinite() & (rows.new > self.start)[:, None], grown, scores)


def _power(factor: float, exponent: int) -> float:
    try:
        return pow(float(factor), exponent)
    except OverflowError:
        return float("inf")


class Normalize(Step):
    """`LogitNormalization`: log-probabilities."""

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        return scores.log_softmax(-1)
