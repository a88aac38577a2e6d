"""Fewer cases than a product: every pair of values of two parameters comes up in some case."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise_cases(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases that hold every pair of values of two different parameters, chosen greedily and always the same.

    Few defects need three parameters at once; those that do are what the tests with random cases look for.
    """
    columns = [list(column) for column in values]
    cases = list(itertools.product(*(range(len(column)) for column in columns)))

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    left: set[tuple[tuple[int, int], ...]] = set().union(*map(pairs, cases))
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        chosen.append(best)
    return [tuple(column[i] for column, i in zip(columns, case, strict=True)) for case in sorted(chosen)]


def pairwise(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over `pairwise_cases`."""
    cases = pairwise_cases(*parameters.values())
    return pytest.mark.parametrize(tuple(parameters), cases, ids=lambda value: str(value))
