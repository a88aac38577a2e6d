"""What one call of `generate` counts: rounds, tokens, seconds, and how many drafts were accepted."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field


@dataclass(repr=False)
class GenerationStats:
    """Counts over one `generate` call.

    A round that a stop token, a limit or `stop_when` cut counts with the tokens that it emitted, here and in the histograms, so
    that histograms add up to `request_rounds` and to the tokens of decoding. A request has at most one such round, its last.

    Attributes:
        rounds: forwards of the target after prefill; one for all requests of a batch.
        request_rounds: the same, counted for each request that gained tokens.
        new_tokens: tokens emitted, the prefill's first tokens included.
        requests: number of prompts.
        seconds: wall time of prefill and decoding, time to compile included.
        decode_seconds: wall time of decoding alone.
        histograms: a list per prompt of `P` counts, where `P` is the most tokens that a round emits (`config.path_len`; 1 for
            plain decoding): `histograms[i][n - 1]` rounds brought request `i` `n` tokens.
        last_lengths: per prompt the tokens of the round that ended the request; 0 if the prefill's token did, or if nothing of
            the last round was kept.
        lengths: how many rounds drafted how many tokens, where a generator chooses that (`SpeculationConfig.lengths`).
        complete: `P` counts for such rounds: `complete[n - 1]` times all `n - 1` drafts of a chain were accepted that was not
            the longest. Nothing is known of what a longer one would have brought.
    """

    rounds: int = 0
    request_rounds: int = 0
    new_tokens: int = 0
    requests: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0
    histograms: list[list[int]] = field(default_factory=list)
    last_lengths: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, requests: int, path_len: int) -> GenerationStats:
        """Nothing counted yet, for rounds of at most `path_len` tokens."""
        histograms = [[0] * path_len for _ in range(requests)]
        return cls(requests=requests, histograms=histograms, last_lengths=[0] * requests, complete=[0] * path_len)

    def add_round(self, request: int, tokens: int, ended: bool, length: int | None = None) -> None:
        """Count a round in which `request` gained `tokens`, at least one, and perhaps `ended`. `length` is the length of
        its chain, if rounds differ in it."""
        self.request_rounds += 1
        self.histograms[request][tokens - 1] += 1
        if ended:
            self.last_lengths[request] = tokens
        elif length is not None and tokens == length + 1 < len(self.complete):
            self.complete[tokens - 1] += 1

    @property
    def accept_length(self) -> float:
        """Accept length: tokens that a request gains per round, on average."""
        return (self.new_tokens - self.requests) / self.request_rounds if self.request_rounds else 0.0

    @property
    def accept_lengths(self) -> list[float]:
        """Accept length of each request; 0 for one without a round."""
        return [sum(n * c for n, c in enumerate(row, 1)) / sum(row) if any(row) else 0.0 for row in self.histograms]

    @property
    def histogram(self) -> list[int]:
        """The sum of `histograms`: `histogram[n - 1]` times a request gained `n` tokens in a round."""
        return [sum(counts) for counts in zip(*self.histograms, strict=True)]

    @property
    def acceptance_rates(self) -> list[float]:
        """Acceptance rate per draft position, `P - 1` numbers: the probability that a round accepts its first `k` drafts (in a
        tree: a path to depth `k`), for `k` from 1. A full round ends with a token of the target's own, so the rates of rounds
        that nothing cut add up to `accept_length - 1`.

        A round that ended its request with `n` tokens shows that its first `n - 1` drafts were accepted, and nothing of the
        others; dropping it, or taking the others for rejected, would bias the rates of short texts. The same holds for a chain
        shorter than the longest whose drafts were all accepted. So the rates are Kaplan and Meier's product-limit estimate
        (J. Am. Stat. Assoc. 53, 1958). NaN for positions that no round tells anything about.
        """
        histogram, rates, rate = self.histogram, [], 1.0
        reached = list(itertools.accumulate(reversed(histogram)))[::-1]  # rounds of at least n tokens
        for n in range(1, len(histogram)):
            tried = reached[n - 1] - self.last_lengths.count(n) - (self.complete[n - 1] if self.complete else 0)
            if rate:
                rate *= reached[n] / tried if tried else math.nan
            rates.append(rate)
        return rates

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed over the whole batch, without the prefill and its tokens."""
        return (self.new_tokens - self.requests) / self.decode_seconds if self.decode_seconds else 0.0

    def __repr__(self) -> str:
        rates = ", ".join(f"{rate:.2f}" for rate in self.acceptance_rates)
        return (
            f"GenerationStats(requests={self.requests}, new_tokens={self.new_tokens}, rounds={self.rounds}, "
            f"accept_length={self.accept_length:.2f}, acceptance_rates=[{rates}], histogram={self.histogram}, "
            f"tokens_per_second={self.tokens_per_second:.1f}, seconds={self.seconds:.2f})"
        )


@dataclass
class GenerationResult:
    """What `generate` returns.

    Attributes:
        tokens: `tokens[i]` are the new tokens of prompt `i`, a stop token included if one ended it.
        stats: counts and times.
        seed: the seed of sampling; `SamplingParams(seed=...)` repeats the run with it. With several `SamplingParams`, the one
            that those without a seed drew, or that all have in common, else None. None for greedy decoding.
    """

    tokens: list[list[int]]
    stats: GenerationStats = field(default_factory=GenerationStats)
    seed: int | None = None
