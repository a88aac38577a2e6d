"""Engines replace functions of `triton`'s: no kernel may call one that they do."""

from __future__ import annotations

import importlib
import os
import pkgutil

import pytest

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels have no sources")

import spec_ops.backends.triton as package  # noqa: E402


def functions():
    """Every `@triton.jit` and Gluon function of the package, by its place."""
    found = {}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, triton.JITFunction):
                found[f"{value.fn.__module__}.{value.__name__}"] = value
    return found


@triton.jit
def of_triton(x, N: triton.language.constexpr):
    return x + triton.next_power_of_2(N)


def plain_next_power_of_2(n: int) -> int:
    """As in SGLang's `srt/utils/common.py`."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


def test_kernels_compile_where_sglang_has_replaced_next_power_of_2(monkeypatch):
    """Triton refuses a plain function when it reads a kernel's source, to compute its cache key."""
    known = functions()
    assert len(known) > 150
    monkeypatch.setattr(triton, "next_power_of_2", plain_next_power_of_2)
    refused = [place for place, function in (known | {"of_triton": of_triton}).items() if not readable(function)]
    assert refused == ["of_triton"]


def readable(function) -> bool:
    try:
        return bool(type(function)(function.fn).cache_key)  # anew: a key is computed once
    except RuntimeError as error:
        if "Unsupported function referenced" not in str(error):
            raise
        return False
