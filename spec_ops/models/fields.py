"""Values of configurations, checked by type and range: what JSON calls `"false"` is a string, and true."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

REQUIRED: Any = object()


class FieldError(ValueError):
    """A value of a configuration that is not what it must be: `field`, and the `problem` with it."""

    def __init__(self, owner: str, field: str, problem: str) -> None:
        super().__init__(f"{owner}: `{field}` {problem}")
        self.field, self.problem = field, problem


class Fields:
    """Reads `values` by type. None is as good as a missing value, as in the configurations of transformers.

    Args:
        fail: makes the exception of a field's name and what is wrong with it.
        section: name of the object that holds the values, for the fields' names.
    """

    def __init__(self, values: Mapping[str, Any], fail: Callable[[str, str], Exception], section: str = "") -> None:
        self.values, self.fail, self.section = values, fail, section

    def error(self, name: str, problem: str) -> Exception:
        return self.fail(f"{self.section}.{name}" if self.section else name, problem)

    def _read(self, name: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        value = self.values.get(name)
        if value is None and default is not REQUIRED:
            return default
        if value is None or not fits(value):
            raise self.error(name, f"must be {expected}, got {'nothing' if name not in self.values else repr(value)}")
        return value

    def integer(self, name: str, least: int = 1, default: Any = REQUIRED) -> Any:
        return self._read(name, default, f"an integer of at least {least}", lambda v: _is(Integral, v) and v >= least)

    def integers(self, name: str, default: Any = REQUIRED) -> Any:
        def fits(value: Any) -> bool:
            return isinstance(value, list | tuple) and all(_is(Integral, v) for v in value)

        found = self._read(name, default, "a list of integers", fits)
        return found if found is default else tuple(found)

    def positive(self, name: str, default: Any = REQUIRED) -> Any:
        """A finite number above 0, as a float."""
        found = self._read(name, default, "a positive number", lambda v: _is(Real, v) and 0 < v < math.inf)
        return found if found is default else float(found)

    def flag(self, name: str, default: Any = False) -> Any:
        return self._read(name, default, "true or false", lambda value: isinstance(value, bool))

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        return self._read(name, default, "a string", lambda value: isinstance(value, str))

    def texts(self, name: str, default: Any = REQUIRED) -> Any:
        def fits(value: Any) -> bool:
            return isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)

        return self._read(name, default, "a list of strings", fits)

    def inner(self, name: str, default: Any = REQUIRED) -> Fields:
        """The object `name`; `default`, such as `{}`, stands in for a missing one."""
        found = self._read(name, default, "an object", lambda value: isinstance(value, Mapping))
        return Fields(found, self.fail, f"{self.section}.{name}" if self.section else name)


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)  # bool is a subclass of int
