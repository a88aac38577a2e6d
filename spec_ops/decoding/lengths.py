"""How long the next round's chain is, when a generator chooses: from what recent rounds accepted, and from what rounds cost."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FORGET = 0.98  # of what is known about a draft position, at each new observation: about the last 50 count
TIMED, WARMING = 9, 3  # rounds of a length whose times count; rounds before them, which compile and record
ASSUMED_COST = 0.05  # of a draft step, as a share of a round without drafts, until rounds of two lengths were timed
ASSUMED_RATE, ASSUMED_WEIGHT = 0.7, 2.0  # at which a position is accepted of which nothing is known, and how firm that is
STATE_WEIGHT = 4.0  # observations of all requests count like so many of those that are in the same state
GAIN = 1.02  # another length is taken if it is better by so much
PROBE, LONGEST_PROBE = 32, 256  # rounds until the next longer chain is tried; doubled whenever that changed nothing


@dataclass
class _Position:
    """How often the draft at a position was accepted when all before it were. Old observations fade."""

    tried: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: bool) -> None:
        self.tried = self.tried * FORGET + 1
        self.accepted = self.accepted * FORGET + accepted

    def rate(self, assumed: float, weight: float) -> float:
        return (self.accepted + weight * assumed) / (self.tried + weight)


@dataclass
class Planned:
    """A round that is under way.

    Attributes:
        length: of its chain.
        hits: for each request whether the draft was right when its length was chosen.
    """

    length: int
    hits: Mapping[int, bool]


@dataclass
class _Times:
    """Seconds of a length's rounds, the first ones left out."""

    skipped: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=TIMED))

    def add(self, seconds: float) -> None:
        if self.skipped < WARMING:
            self.skipped += 1
        else:
            self.seconds.append(seconds)


class LengthChooser:
    """Chooses the chain length with the most expected tokens per second.

    A round of length `n` is expected to bring `1 + r1 + r1 r2 + ... + r1...rn` tokens to a request, where `rk` is the rate at
    which the draft at position `k` was accepted lately, given those before it. The rates of requests whose first draft was
    right in the last round are kept apart from the others': quoted text comes in stretches. What a round costs is measured, by
    the median of its last times, or given; a longer chain never costs less. Lengths that were not run yet lie on a line through
    those that were.

    Everything is known one round late, as outputs are read, so the host never waits. Now and then the next longer chain is
    tried, since short ones say nothing about what would follow.

    Args:
        lengths: chain lengths in order.
        draft_cost: of `SpeculationConfig`.
        sees_first: whether rounds of length 0 say if their draft was right. Drafts that are drawn seldom equal the target's own
            draw, though they would often be accepted, so these say nothing.
    """

    def __init__(self, lengths: Sequence[int], draft_cost: float | None = None, *, sees_first: bool = True) -> None:
        self.lengths, self.draft_cost, self.sees_first = tuple(lengths), draft_cost, sees_first
        self._positions = {state: [_Position() for _ in range(lengths[-1])] for state in (None, False, True)}  # None: of all
        self._times = {length: _Times() for length in lengths}
        self._hits: dict[int, bool] = {}
        # Short enough to cost little where nothing is accepted, and to say something about several positions.
        self._current = self.lengths[len(self.lengths) // 2]
        self._since_probe, self._probe_after = 0, PROBE

    def begin(self) -> None:
        """Forget the requests of the call before."""
        self._hits.clear()

    def plan(self, requests: Sequence[int]) -> Planned:
        """The length of the next round, for these requests."""
        hits = {request: self._hits.get(request, True) for request in requests}
        right, costs = sum(hits.values()) / max(len(hits), 1), self.costs()
        both = zip(self.expected_tokens(False), self.expected_tokens(True), strict=True)
        tokens = [wrong + right * (after_hit - wrong) for wrong, after_hit in both]
        best = max(self.lengths, key=lambda length: tokens[length] / costs[length])
        if tokens[best] / costs[best] <= GAIN * tokens[self._current] / costs[self._current]:
            best = self._current
        if best != self._current:
            self._current, self._since_probe, self._probe_after = best, 0, PROBE
        self._since_probe += 1
        if self._since_probe <= self._probe_after or best == self.lengths[-1]:
            return Planned(best, hits)
        self._since_probe, self._probe_after = 0, min(2 * self._probe_after, LONGEST_PROBE)
        longer = self.lengths[self.lengths.index(best) + 1]
        known = max(best, int(self.sees_first))  # of what follows, the best is possible
        path = tokens[known] - tokens[known - 1] if known else 1.0
        possible = tokens[known] + path * (longer - known)
        return Planned(longer if possible / costs[longer] > tokens[best] / costs[best] else best, hits)

    def expected_tokens(self, hit: bool) -> list[float]:
        """By length from 0 to the longest, for a request whose first draft was right in the last round, or was not."""
        expected, path, assumed = [1.0], 1.0, ASSUMED_RATE
        for everyone, own in zip(self._positions[None], self._positions[hit], strict=True):
            # A position of which nothing is known is taken to be like the one before it.
            assumed = everyone.rate(assumed, ASSUMED_WEIGHT)
            path *= own.rate(assumed, STATE_WEIGHT)
            expected.append(expected[-1] + path)
        return expected

    def costs(self) -> dict[int, float]:
        """What a round of each length takes, in any unit."""
        if self.draft_cost is not None:
            return {length: 1 + self.draft_cost * length for length in self.lengths}
        known = _rising({length: times.seconds for length, times in self._times.items() if times.seconds})
        base, slope = _line(known)
        return {length: known.get(length, base + slope * length) for length in self.lengths}

    def observe(self, planned: Planned, accepted: Mapping[int, int], ended: Mapping[int, bool], seconds: float | None) -> None:
        """Learn from a round that was read.

        Args:
            planned: the round.
            accepted: drafts that were accepted, for each request that gained tokens; for a round of length 0, 1 if its draft,
                which was not verified, was right, and nothing where that is not known.
            ended: whether the round ended the request: what it accepted is then cut.
            seconds: how long it took; None if that is not known.
        """
        if seconds is not None:
            self._times[planned.length].add(seconds)
        length = max(planned.length, 1)
        for request, count in accepted.items():
            for state in (None, planned.hits.get(request, True)):
                positions = self._positions[state]
                for position in positions[:count]:
                    position.add(True)
                if count < length and not ended[request]:
                    positions[count].add(False)
            if ended[request]:
                self._hits.pop(request, None)
            else:
                self._hits[request] = count > 0


def _rising(seconds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """The median for each length, in order, made to rise: neighbours that fall share their mean (isotonic regression, weighted
    by how many were timed). So a length that was timed a few times on a busy machine is not shunned for ever."""
    pools: list[tuple[float, int, list[int]]] = []
    for length, times in seconds.items():
        cost, weight, lengths = statistics.median(times), len(times), [length]
        while pools and pools[-1][0] > cost:
            before, more, others = pools.pop()
            cost = (cost * weight + before * more) / (weight + more)
            weight, lengths = weight + more, others + lengths
        pools.append((cost, weight, lengths))
    return {length: cost for cost, _, lengths in pools for length in lengths}


def _line(known: Mapping[int, float]) -> tuple[float, float]:
    """Base and slope of the costs by length, by least squares; with one point or none, as assumed. No length is free."""
    if not known:
        return 1.0, ASSUMED_COST
    if len(known) == 1:
        ((length, cost),) = known.items()
        base = cost / (1 + ASSUMED_COST * length)
        return base, ASSUMED_COST * base
    slope, base = statistics.linear_regression(list(known), list(known.values()))
    slope = max(slope, 0.0)
    return max(base, min(known.values()) / 2), slope
