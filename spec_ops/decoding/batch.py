"""The requests of one call: which of them wait, which row of the bucket each runs in, and what becomes of their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tqdm.auto import tqdm

from spec_ops._numbers import is_integer
from spec_ops.decoding.arguments import Requests
from spec_ops.decoding.grammar import Grammars
from spec_ops.decoding.pages import PagePool
from spec_ops.decoding.state import BROKEN, MASKED, RoundState
from spec_ops.decoding.stats import GenerationResult
from spec_ops.models.target import Ranks

OnTokens = Callable[[int, list[int]], None]
StopWhen = Callable[[int, list[int], int], int | None]

# Rounds that a prefill of short prompts takes, however many they are. All rows wait for it, so free ones may wait for others to
# join them. Compiled rounds are replayed graphs and prefills are not: two rounds of 70B parameters, ten of a small model.
PREFILL_ROUNDS, COMPILED_PREFILL_ROUNDS = 1, 4


class Admitted(NamedTuple):
    """A request that takes a row."""

    row: int
    request: int
    pages: list[int]


class Gained(NamedTuple):
    """What a round brought a request.

    Attributes:
        request: its index.
        tokens: how many, at least one.
        ended: whether the round ended it.
        draft_was_right: of a plain round between others: whether the draft that it did not verify was the token.
    """

    request: int
    tokens: int
    ended: bool
    draft_was_right: bool


def on_first(ranks: Ranks, stop_when: StopWhen, name: str) -> StopWhen:
    """Rank 0 decides, since a clock may. `name`: of the argument, for errors."""

    def decided(request: int, tokens: list[int], count: int) -> int | None:
        return ranks.on_first(f"generate: `{name}`", lambda: stop_when(request, tokens, count))

    return decided


class Batch:
    """Requests in order: a row whose request has ended takes the next one that waits.

    Args:
        requests: of the call.
        state: of the bucket.
        pool: pages of the caches.
        result: what is filled.
        on_tokens, stop_when: of the call.
        bar: counts emitted tokens.
        grammars: what requests must follow.
        compiled: whether rounds are.
    """

    def __init__(
        self,
        requests: Requests,
        state: RoundState,
        pool: PagePool,
        result: GenerationResult,
        on_tokens: OnTokens | None,
        stop_when: StopWhen | None,
        bar: tqdm,
        grammars: Grammars | None = None,
        compiled: bool = False,
    ) -> None:
        self._prefill_rounds = COMPILED_PREFILL_ROUNDS if compiled else PREFILL_ROUNDS
        self.requests, self.state, self.pool, self.result = requests, state, pool, result
        self.on_tokens, self.stop_when, self.bar, self.grammars = on_tokens, stop_when, bar, grammars
        self.waiting = deque(range(len(requests.prompts)))
        self.members: dict[int, Admitted] = {}  # by row
        self._row_rounds = self._ended = 0  # rounds that rows ran in, and requests that ended in them
        self._missed = 0  # rounds that rows were free and requests waited, since some were admitted

    def has_room(self) -> bool:
        """Whether the first of those that wait can begin."""
        return bool(self.waiting) and self._free_rows > 0 and self._pages() <= self.pool.free

    def should_admit(self) -> bool:
        """Whether free rows are filled now, or after other rows have become free.

        Waiting for one more row takes `1 / (running * rate)` rounds, of which each free row misses all; it saves every row a
        prefill. `rate`: how many requests end in a row's round, of those that have run. Where no row becomes free, waiting ends
        when it has cost a prefill. All this is counted, not timed, so that a call does the same every time.
        """
        if not self.has_room():
            return False
        free, running = self._free_rows, len(self.members)
        if not running or len(self.waiting) <= free:
            return True
        prefill = self._prefill_rounds * self.state.batch_size
        return free * self._row_rounds >= prefill * running * self._ended or self._missed >= prefill

    @property
    def _free_rows(self) -> int:
        return self.state.batch_size - len(self.members)

    def _pages(self) -> int:
        return self.pool.needed(self.requests.lengths[self.waiting[0]])

    def admit(self, tokens: int) -> list[Admitted]:
        """Give rows and pages to those that wait, in order, as long as there are some and prompts hold at most `tokens`
        together; to one at least."""
        self._missed = 0
        admitted: list[Admitted] = []
        rows = (row for row in range(self.state.batch_size) if row not in self.members)
        while self.has_room():
            tokens -= len(self.requests.prompts[self.waiting[0]])
            if admitted and tokens < 0:
                break
            member = Admitted(next(rows), self.waiting[0], self.pool.take(self._pages()))
            self.waiting.popleft()
            self.members[member.row] = member
            admitted.append(member)
        return admitted

    def emit(self, output: torch.Tensor, length: int | None = None) -> list[Gained]:
        """Hand out the tokens of a round: `output [bs, P + 2]`, on the host, as in `RoundState.output`. `length` is the
        length of its chain, if rounds differ in it."""
        stats = self.result.stats
        stats.rounds += 1
        self._row_rounds += len(self.members)
        if self.has_room():
            self._missed += self._free_rows
        if length is not None:
            stats.lengths[length] = stats.lengths.get(length, 0) + 1
        return self._emit_rows(output, list(self.members.values()), of_round=True, length=length)

    def emit_first(self, output: torch.Tensor, admitted: Sequence[Admitted]) -> None:
        """Hand out the tokens of a prefill."""
        self._emit_rows(output, admitted, of_round=False)

    def _emit_rows(
        self, output: torch.Tensor, members: Sequence[Admitted], of_round: bool, length: int | None = None
    ) -> list[Gained]:
        rows, gained = output.tolist(), []
        for member in members:
            *given, count, status = rows[member.row]
            kept, ended = self._emit(member, given[:count], status, of_round, length)
            if kept:
                gained.append(Gained(member.request, kept, ended, length == 0 and given[1] == given[0]))
        return gained

    def _emit(self, member: Admitted, new: list[int], status: int, of_round: bool, length: int | None) -> tuple[int, bool]:
        """Returns how many tokens were kept, and whether the request has ended."""
        request = member.request
        tokens = self.result.tokens[request]
        if status == BROKEN:
            raise RuntimeError(
                f"generate: nothing can be sampled for `{self.requests.names.prompt(request)}` after {len(tokens) + len(new)} "
                "new tokens: the target's logits hold a NaN or an infinity, or no finite number at all"
            )
        if status == MASKED:
            raise RuntimeError(
                f"generate: every token is masked for `{self.requests.names.prompt(request)}` after {len(tokens) + len(new)} "
                "new tokens: `suppress_tokens`, `bad_words_ids`, `min_new_tokens`, a bitmask and `logits_processor` leave none"
            )
        ended, kept = bool(status), None
        if self.grammars is not None:
            kept = self.grammars.kept(request, new)
            new = new[:kept]
        if new and self.stop_when is not None:
            keep = self.stop_when(request, tokens + new, len(new))
            if keep is not None:
                if not is_integer(keep) or not 0 <= keep <= len(new):
                    raise ValueError(
                        f"generate: `{self.requests.names.stop_when}` must return None or how many of the {len(new)} new "
                        f"tokens to keep, got {keep!r}"
                    )
                new, kept = new[:keep], keep
        if kept is not None and not ended:
            ended = True
            self.state.finished[member.row].fill_(True)  # the round under way may still emit for it: nobody listens
        if ended:
            # The round under way may still write to these pages: whatever comes to use them comes after it on the stream.
            self.pool.give_back(member.pages)
            del self.members[member.row]
            self._ended += 1
        if new:
            tokens.extend(new)
            self.result.stats.new_tokens += len(new)
            if of_round:
                self.result.stats.add_round(request, len(new), ended, length)
            self.bar.update(len(new))
            if self.on_tokens is not None:
                self.on_tokens(request, new)
        return len(new), ended
