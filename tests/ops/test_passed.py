"""Checks that a call has passed before."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spec_ops
from spec_ops import ops
from spec_ops.backends.registry import get_backend
from spec_ops.ops import _passed
from spec_ops.ops._passed import Passed


@pytest.fixture
def counted() -> tuple[Passed, list[tuple[Any, ...]]]:
    """Checks that note their calls."""
    calls: list[tuple[Any, ...]] = []

    def check(*values: Any) -> int:
        calls.append(values)
        if values[0] is None:
            raise ValueError("none")
        return len(calls)

    return Passed(check), calls


def test_the_same_facts_are_checked_once(counted) -> None:
    passed, calls = counted
    assert [passed(torch.rand(2, 3), 1.5, "auto") for _ in range(3)] == [1, 1, 1]
    assert len(calls) == 1


OTHERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "shape": lambda: (torch.rand(3, 2), torch.rand(4), 1),
    "strides": lambda: (torch.rand(3, 2).t(), torch.rand(4), 1),
    "dtype": lambda: (torch.rand(2, 3).half(), torch.rand(4), 1),
    "device": lambda: (torch.rand(2, 3, device="meta"), torch.rand(4), 1),
    "bool": lambda: (torch.rand(2, 3), torch.rand(4), True),
    "float": lambda: (torch.rand(2, 3), torch.rand(4), 1.0),
    "no tensor": lambda: (torch.rand(2, 3), None, 1),
    "a number": lambda: (torch.rand(2, 3), torch.rand(4), 2),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_facts_are_checked(counted, other: str) -> None:
    passed, calls = counted
    passed(torch.rand(2, 3), torch.rand(4), 1)
    passed(*OTHERS[other]())
    assert len(calls) == 2


def test_which_tensors_are_one_is_a_fact(counted) -> None:
    passed, calls = counted
    one, two, three = (torch.rand(2) for _ in range(3))
    for given in ((one, two, three), (one, one, two), (one, two, two), (one, two, one), (one, one, one)):
        passed(*given)
        passed(*[given[i] for i in range(3)])
    assert len(calls) == 5


def test_failures_are_not_remembered(counted) -> None:
    passed, calls = counted
    for _ in range(2):
        with pytest.raises(ValueError, match="none"):
            passed(None, 1)
    assert len(calls) == 2


def test_what_is_always_checked(counted) -> None:
    class Other(torch.Tensor):
        pass

    passed, calls = counted
    for _ in range(2):
        passed(torch.rand(2).as_subclass(Other))
        passed([1, 2])
    assert len(calls) == 4


def test_results_of_none_are_remembered() -> None:
    calls = []
    passed = Passed(lambda value: calls.append(value))
    assert [passed(1), passed(1)] == [None, None]
    assert calls == [1]


def test_no_more_than_fit(counted, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, _ = counted
    monkeypatch.setattr(_passed, "MOST", 3)
    for value in range(9):
        passed(value)
        assert len(passed._found) <= 3


def test_a_backend_that_is_gone_is_not_passed() -> None:
    reference = get_backend("reference")
    assert reference is not None
    spec_ops.register_backend(dataclasses.replace(reference, name="mine"))
    cache, rows = torch.zeros(2, 4, 1, 8), torch.zeros(1, 1, 1, 8)
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    try:
        ops.mha_draft_decode(rows, cache, cache.clone(), tables, lens, backend="mine")
    finally:
        spec_ops.backends.unregister_backend("mine")
    with pytest.raises(ValueError, match="mine"):
        ops.mha_draft_decode(rows, cache, cache.clone(), tables, lens, backend="mine")


def test_caches_that_are_one_are_refused_after_rows_that_are() -> None:
    """Keys that are values too are fine; a cache of both is not, in a call of the same sizes."""
    k_cache, v_cache, rows, slots = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), torch.rand(1, 1, 8), torch.zeros(1).long()
    ops.append_kv(k_cache, v_cache, rows, rows, slots)
    with pytest.raises(ValueError, match="`v_cache` must be another tensor"):
        ops.append_kv(k_cache, k_cache, rows, rows.clone(), slots)


def test_tensors_without_strides_are_for_the_checks_to_name(counted) -> None:
    passed, calls = counted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these are in beta
        sparse = torch.eye(2).to_sparse_csr()
    for _ in range(2):
        passed(sparse)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="none") as refused:
        passed(None, [sparse])
    assert refused.value.__context__ is None
