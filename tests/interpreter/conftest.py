"""These tests run Triton's interpreter, which is chosen when kernels are decorated: a process of its own, started with
`TRITON_INTERPRET=1 python -m pytest tests/interpreter` (`make test` does). Elsewhere they skip.

What the interpreter does without any effect, most of its time, is left out here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="needs Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/interpreter")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Every call of a device function patches `triton.language` again, as the launch already did; and integers are added twice
    to look for an overflow, which only `debug` would report."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: dict[frozenset[str], Any] = {}  # by the modules that a function sees, in the present launch

    @functools.cache
    def modules(fn: Any) -> frozenset[str]:
        return frozenset(value.__name__ for value in fn.__globals__.values() if inspect.ismodule(value))

    def patch_once(fn: Any) -> Any:
        key = modules(fn)
        if key not in patched:
            patched[key] = patch_lang(fn)
        return patched[key]

    def launch_once_patched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_once_patched)
        options = interpreter.interpreter_builder.options
        if not options.debug:
            patch.setattr(interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False))
        yield


@pytest.fixture
def products_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that add in one order. numpy's give a row other bits in another place of a matrix; tensor cores do not."""

    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[None, k, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
