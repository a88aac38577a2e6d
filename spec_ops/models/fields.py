"""Values of configurations, checked by type and range.

Python takes what JSON got wrong: the string `"false"` is true, and `True` is the number 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from spec_ops._numbers import is_integer, is_number

_REQUIRED: Any = object()


class FieldError(ValueError):
    """A value of a configuration is not what it must be.

    Attributes:
        field: its name.
        problem: what is wrong with it.
    """

    def __init__(self, owner: str, field: str, problem: str) -> None:
        super().__init__(f"{owner}: `{field}` {problem}")
        self.field, self.problem = field, problem


class Fields:
    """Reads `values` by type. A value of None counts as missing, as in the configurations of transformers.

    Args:
        values: the fields.
        fail: makes the exception to raise from a field's name and what is wrong with its value.
        section: name of the object that holds the fields; it precedes their names in messages.
    """

    def __init__(self, values: Mapping[str, Any], fail: Callable[[str, str], Exception], section: str = "") -> None:
        self.values, self.fail, self.section = values, fail, section

    def error(self, name: str, problem: str) -> Exception:
        return self.fail(f"{self.section}.{name}" if self.section else name, problem)

    def _read(self, name: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        value = self.values.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if value is None or not fits(value):
            raise self.error(name, f"must be {expected}, got {'nothing' if name not in self.values else repr(value)}")
        return value

    def integer(self, name: str, least: int | None = 1, default: Any = _REQUIRED) -> Any:
        """An integer of at least `least`; of any sign if that is None."""
        wanted = "an integer" if least is None else f"an integer of at least {least}"
        return self._read(name, default, wanted, lambda v: is_integer(v) and (least is None or v >= least))

    def integers(self, name: str, default: Any = _REQUIRED) -> Any:
        def fits(value: Any) -> bool:
            return isinstance(value, list | tuple) and all(map(is_integer, value))

        found = self._read(name, default, "a list of integers", fits)
        return found if found is default else tuple(found)

    def positive(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite number above 0, as a float."""
        found = self._read(name, default, "a positive number", lambda v: is_number(v) and 0 < v < math.inf)
        return found if found is default else float(found)

    def flag(self, name: str, default: Any = False) -> Any:
        return self._read(name, default, "true or false", lambda value: isinstance(value, bool))

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        return self._read(name, default, "a string", lambda value: isinstance(value, str))

    def texts(self, name: str, default: Any = _REQUIRED) -> Any:
        def fits(value: Any) -> bool:
            return isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)

        return self._read(name, default, "a list of strings", fits)

    def inner(self, name: str, default: Any = _REQUIRED) -> Fields:
        """The object `name`; `default`, such as `{}`, stands in for a missing one."""
        found = self._read(name, default, "an object", lambda value: isinstance(value, Mapping))
        return Fields(found, self.fail, f"{self.section}.{name}" if self.section else name)
