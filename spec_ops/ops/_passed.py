"""Eager calls whose arguments have passed their checks before, by all that the checks look at.

Checks cost an eager call some 20 us, and an engine makes the same call in every layer of every step, on other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from spec_ops.backends.registry import forgotten_with_selections

MOST = 4096  # calls that are remembered
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Passed:
    """What the checks of an op found, by the facts of a call: sizes, strides, dtypes and devices of tensors, which of them are
    one, and everything else. Not for calls that Dynamo traces: callers hand it `check` itself, which costs it less.

    Args:
        check: takes an op's arguments; raises, or returns what its callers need. It must not look at numbers in tensors, nor at
            where they lie.
    """

    def __init__(self, check: Callable[..., Any]) -> None:
        self._check = check
        self._found: dict[Hashable, Any] = {}
        forgotten_with_selections(self._found.clear)  # checks know the names of backends

    def __call__(self, *values: Any) -> Any:
        """`check(*values)`, or what it returned for a call with these facts."""
        try:
            key = _facts(values)
            found = self._found.get(key, self)
        except (TypeError, RuntimeError):  # a list, or a tensor without strides, for the checks to name
            key = None
        if key is None:
            return self._check(*values)
        if found is self:
            found = self._check(*values)
            if len(self._found) >= MOST:
                self._found.clear()
            self._found[key] = found
        return found


def _facts(values: tuple[Any, ...]) -> tuple | None:
    """None with a tensor of another class, for example a fake one while something traces."""
    facts: list[object] = []
    places: dict[int, int] = {}
    for value in values:
        if type(value) in _PLAIN:
            place = places.setdefault(id(value), len(places))
            facts.append((value.shape, value.stride(), value.dtype, value.device, place))
        elif isinstance(value, torch.Tensor):
            return None
        else:
            facts += (type(value), value)  # 1 is True, and 1.0, to a dictionary
    return tuple(facts)
