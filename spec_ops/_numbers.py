"""Numbers that users pass: what counts as an integer or a real number, and the errors for everything else."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer of Python or numpy. A bool is not, nor is a tensor."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether `value` is a real number of Python or numpy. A bool is not, nor is a tensor."""
    return isinstance(value, Real) and not isinstance(value, bool)


def integer(where: str, name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int in `[low, high]`.

    Args:
        where: what was called, the message's first word.
        name: of the argument.

    Raises:
        ValueError: naming the argument: a float, a bool, a tensor, or out of range.
    """
    wanted = f"an int of at least {low}" if high is None else f"an int in [{low}, {high}]"
    if not is_integer(value) or value < low or (high is not None and value > high):
        raise ValueError(f"{where}: `{name}` must be {wanted}, got {shown(value)}")
    return int(value)


def number(where: str, name: str, value: Any, wanted: str, fits: Callable[[float], bool]) -> float:
    """`value` as a float for which `fits` is true; `wanted` describes such numbers.

    Raises:
        ValueError: naming the argument: no number, or not one that fits.
    """
    if not is_number(value) or not fits(float(value)):
        raise ValueError(f"{where}: `{name}` must be {wanted}, got {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    """`value` for a message, cut to a line."""
    text = repr(value[:8] if isinstance(value, list) else value)
    return text if len(text) <= 80 else text[:77] + "..."
