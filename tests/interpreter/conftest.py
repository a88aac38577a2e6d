"""These tests run Triton's interpreter, which is chosen when kernels are decorated: a process of its own, started with
`TRITON_INTERPRET=1 python -m pytest tests/interpreter` (`make test-all` does). Elsewhere they skip.

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
    """Every call of a device function patches `triton.language` again, as the launch already did; integers are added twice to
    look for an overflow, which only `debug` would report; and each tensor builds its type and its shape anew."""
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
        remember_types(patch, interpreter)
        yield


def remember_types(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """What types and tensors are made of is made once for every element type and shape: nobody changes it."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    numpy_type, block_type, tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast
    numpy_types: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[tuple[int, ...], dict[str, Any]] = {}

    def numpy_type_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(dtype)
        return numpy_types[name]

    def block_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[size.value if isinstance(size, core.constexpr) else size for size in shape])
        if key not in blocks:
            block_type(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in tensors:
            tensor(self, handle, type)
            tensors[key] = dict(vars(self))
        vars(self).update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    def broadcast_others(self: Any, a: Any, b: Any) -> tuple[Any, Any]:
        blocks = a.type.is_block(), b.type.is_block()
        same = not any(blocks) or (all(blocks) and [*a.type.shape] == [*b.type.shape])
        return (a, b) if same else broadcast(self, a, b)

    def cast_others(self: Any, given: Any, to: Any, *rounding: Any, **named: Any) -> Any:
        return given if given.type.scalar is to.scalar else cast(self, given, to, *rounding, **named)

    patch.setattr(interpreter, "_get_np_dtype", numpy_type_once)
    patch.setattr(core.block_type, "__init__", block_type_once)
    patch.setattr(core.tensor, "__init__", tensor_once)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_others)
    patch.setattr(TritonSemantic, "cast", cast_others)


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
