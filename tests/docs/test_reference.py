"""The API reference: every name that a package offers is on one of its pages, and has a docstring that says something."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
WRITTEN = re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in REFERENCE.glob("*.md")), re.M)
PACKAGES = ("decoding", "models", "parallel", "passes", "integrations.transformers")


def offered(package: str) -> dict[str, object]:
    module = importlib.import_module(f"spec_ops.{package}")
    return {name: getattr(module, name) for name in module.__all__}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package):
    there = {f"{thing.__module__}.{thing.__qualname__}" for thing in offered(package).values()}
    assert not sorted(there - set(WRITTEN))


def functions(name: str, thing: object) -> Iterator[tuple[str, Callable]]:
    """A function, or the public methods that a class defines."""
    if inspect.isfunction(thing):
        yield name, thing
    for method, function in vars(thing).items() if inspect.isclass(thing) else ():
        if inspect.isfunction(function) and not method.startswith("_"):
            yield f"{name}.{method}", getattr(thing, method)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_name_the_arguments(package):
    """Where there are several; one says itself what it is."""
    unnamed = {}
    for name, thing in offered(package).items():
        assert inspect.getdoc(thing), name
        for place, function in functions(name, thing):
            parameters = inspect.signature(function).parameters.values()
            arguments = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            text = inspect.getdoc(function) or ""
            missing = [a for a in arguments if a != "self" and not re.search(rf"\b{a}\b", text)]
            if missing and len(arguments) > 2:
                unnamed[place] = missing
    assert not unnamed


def test_attributes_are_named_one_by_one():
    """The site takes what follows the first of several names for their type."""
    together = []
    for place in WRITTEN:
        module, _, name = place.rpartition(".")
        text = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
        attributes = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", text, re.M)
        lines = attributes[1].splitlines() if attributes else []
        together += [f"{place}: {line.strip()}" for line in lines if re.match(r"    \w+(, \w+)+:", line)]
    assert not together
