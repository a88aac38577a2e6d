"""Who holds which pages of the KV pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class PagePool:
    """Pages of a pool that requests share. The target's and the draft's cache use the same ids.

    A request gets, before it begins, all pages that it can come to need. So nothing that has begun ever waits for pages, and no
    set of requests can block itself.

    Args:
        count: pages of the pool.
        page_size: tokens per page.
        reserve: tokens past a request's length that a round writes.
    """

    def __init__(self, count: int, page_size: int, reserve: int) -> None:
        self.count, self.page_size, self.reserve = count, page_size, reserve
        self._free = deque(range(count))

    def needed(self, tokens: int) -> int:
        """Pages of a request of at most `tokens` tokens, prompt and new ones."""
        return -(-(tokens + self.reserve) // self.page_size)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` of the free pages."""
        assert count <= len(self._free)
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Pages that are no longer held."""
        self._free.extend(pages)
