"""Grammars: a matcher on the host says which tokens may come next, at every position that a round verifies.

The masks of a verification depend on its drafts. So rounds that follow grammars draft for the next round at their end
(`SpeculativeRound(ahead=True)`): the host reads tokens and drafts together, fills the masks, and replays. The graph itself has
no sync; only the matchers run between two replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from spec_ops._numbers import shown
from spec_ops.decoding.draft import HeldDrafts

_METHODS = ("accept_token", "rollback", "fill_next_token_bitmask", "is_terminated")


class Matcher(Protocol):
    """What a grammar matcher has to do. The names are those of `xgrammar.GrammarMatcher`, which can be passed as it is."""

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token. False, and no change, if the grammar does not allow it here."""

    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back."""

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> Any:
        """Write the tokens that may come next to `bitmask[index]`: bit `t % 32` of word `t // 32`, int32, 1 for allowed."""

    def is_terminated(self) -> bool:
        """Whether nothing may follow."""


class Grammars:
    """The matchers of one call, in step with the tokens that requests have emitted.

    Args:
        matchers: by request; a request without one may say anything.
        name: the argument that they came from, for messages.
    """

    def __init__(self, matchers: Mapping[int, Matcher], name: str = "matchers") -> None:
        self.matchers, self.name = matchers, name
        self._masks: torch.Tensor | None = None

    def kept(self, request: int, tokens: Sequence[int]) -> int | None:
        """Advance by the tokens that a request has emitted.

        Returns:
            How many of them there are up to the end of its grammar; None before that end.

        Raises:
            RuntimeError: the matcher refuses a token that its own mask allowed.
        """
        matcher = self.matchers.get(request)
        if matcher is None:
            return None
        for count, token in enumerate(tokens, 1):
            if not matcher.accept_token(token):
                raise RuntimeError(
                    f"generate: `{self.name}[{request}]` refused token {token}, which its bitmask allowed: a matcher serves "
                    "one request, and begins in its first state"
                )
            if matcher.is_terminated():
                return count
        return None

    def fill(self, bitmask: torch.Tensor, requests: Iterable[tuple[int, int]], drafts: HeldDrafts | None = None) -> None:
        """Write the masks of what is verified next.

        Args:
            bitmask: `[bs, D, words]` int32 on the device, see `LogitsChanges`.
            requests: `(row, request)` of those that run.
            drafts: the tokens to verify. None for a prefill, or plain decoding: only what follows the newest token is masked.
        """
        candidates = parents = None
        if drafts is not None:
            drafted = drafts.read()
            candidates = drafted.candidates.tolist()
            parents = None if drafted.parents is None else drafted.parents.tolist()
        if self._masks is None:
            self._masks = torch.empty(bitmask.shape, dtype=torch.int32, device="cpu", pin_memory=bitmask.is_cuda)
        masks = self._masks.fill_(-1)
        for row, request in requests:
            matcher = self.matchers.get(request)
            if matcher is None:
                continue
            tokens = [] if candidates is None else candidates[row][1:]
            _fill_tree(matcher, tokens, range(len(tokens)) if parents is None else parents[row][1:], masks[row])
        bitmask.copy_(masks, non_blocking=True)  # the next ones are written after the round that reads these has been read


def _fill_tree(matcher: Matcher, drafts: Sequence[int], parents: Sequence[int], bitmask: torch.Tensor) -> None:
    """The masks of one request: `drafts[i]` is the token of node `i + 1`, and `parents[i]` its parent. The mask of a node is of
    what follows it. After a draft that the grammar refuses, or that ends it, nothing is masked: nothing after it is emitted."""
    children: list[list[int]] = [[] for _ in range(len(drafts) + 1)]
    for node, parent in enumerate(parents, 1):
        children[parent].append(node)

    def visit(node: int) -> None:
        if matcher.is_terminated():
            return
        matcher.fill_next_token_bitmask(bitmask, node)
        for child in children[node]:
            if drafts[child - 1] >= 0 and matcher.accept_token(drafts[child - 1]):
                visit(child)
                matcher.rollback(1)

    visit(0)


def check_matchers(matchers: Any, count: int) -> Grammars | None:
    """`matchers` of `Generator.generate`; None if no request has one.

    Raises:
        ValueError: naming the argument.
    """
    if matchers is None:
        return None
    wanted = f"`matchers` must be a list with a grammar matcher or None per prompt ({count})"
    if not isinstance(matchers, Sequence) or isinstance(matchers, (str, bytes)):
        raise ValueError(f"generate: {wanted}, got {shown(matchers)}")
    if len(matchers) != count:
        raise ValueError(f"generate: {wanted}, got {len(matchers)}")
    given = {i: matcher for i, matcher in enumerate(matchers) if matcher is not None}
    seen: dict[int, int] = {}
    for i, matcher in given.items():
        if lacking := [name for name in _METHODS if not callable(getattr(matcher, name, None))]:
            raise ValueError(
                f"generate: `matchers[{i}]` must have the methods of xgrammar's GrammarMatcher, {lacking} are missing"
            )
        if id(matcher) in seen:
            raise ValueError(f"generate: `matchers[{i}]` must not be `matchers[{seen[id(matcher)]}]`: each serves one request")
        seen[id(matcher)] = i
    return Grammars(given) if given else None
