"""Eager calls that repeat. What a call launches follows from the sizes of its tensors, not from where they lie; an engine makes
the same call in every layer, and a prompt does in its own.

Choosing a block shape, describing caches and Triton's own look-up of a binary take the host longer than a short kernel takes
the GPU. So `repeated` notes what a call launches, and a later call of the same sizes launches that with its own tensors. A
launcher has to say of what it makes besides its launches: results and scratch memory (`empty`), arrival counters. It must not
run torch's own ops on its tensors in place; copies that it makes of them are found out, and such a call is never repeated.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from spec_ops.backends.triton.runtime.contexts import make_context
from spec_ops.backends.triton.runtime.cooperative import resident_or_none
from spec_ops.backends.triton.runtime.counters import arrival_counters

MOST = 4096  # calls that are remembered; of ragged ones each number of tokens is another

Tensors = Sequence[torch.Tensor | None]


class _NotRepeatableError(Exception):
    """A launch has a tensor of which nobody said where it comes from."""


class _Made(NamedTuple):
    """A tensor that each call makes anew."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Place(NamedTuple):
    """Where a launch has a tensor of the call.

    Attributes:
        argument: which of its arguments. descriptor: a copy of the tensor descriptor without the tensor; None: the tensor
            itself.
        source: `"given"`, `"made"` or `"counters"`. number: which of them.
        start: its first number, in what is flat. dtype: as which it is read, where that is another one.
    """

    argument: int
    descriptor: Any
    source: str
    number: int
    start: int = 0
    dtype: torch.dtype | None = None


class _Start(NamedTuple):
    """A launch: `run(*arguments)` with the call's tensors in their places."""

    run: Callable[..., Any]
    arguments: list[Any]
    places: list[_Place]


class _Notes(threading.local):
    now: _Recorder | None = None
    paused: bool = False


_notes = _Notes()  # of this thread: calls in others have recorders of their own
_plans: dict[Hashable, _Plan | None] = {}


class _Recorder:
    """What one call does, while it runs."""

    def __init__(self, given: Tensors) -> None:
        self.given = given
        self.made: list[torch.Tensor] = []
        self.counters: list[tuple[torch.Tensor, int, str]] = []
        self.launches: list[tuple[Any, Any, tuple[int, ...], dict[str, Any]]] = []

    def plan(self, result: torch.Tensor | None) -> _Plan | None:
        """What a later call repeats; None if it would not be the same."""
        addresses = [t.data_ptr() for t in self.given if t is not None]
        if not self.launches or len(set(addresses)) < len(addresses):
            return None
        try:
            starts = [self._start(*launch) for launch in self.launches]
            found = None if result is None else self._result(result)
        except _NotRepeatableError:
            return None
        made = [_Made(tuple(t.shape), t.dtype) for t in self.made]
        counters = [(count, kernel) for _, count, kernel in self.counters]
        return _Plan(starts, made, counters, found)

    def _result(self, result: torch.Tensor) -> tuple[str, int]:
        for source, tensors in (("given", self.given), ("made", self.made)):
            for i, tensor in enumerate(tensors):
                if tensor is result:
                    return source, i
        raise _NotRepeatableError  # a view, for example: of other sizes

    def _start(self, kernel: Any, binary: Any, grid: tuple[int, ...], named: dict[str, Any]) -> _Start:
        if binary is None and isinstance(kernel, triton.JITFunction):
            raise _NotRepeatableError  # Triton has launched nothing
        arguments = [named.get(name, default) for name, default in _parameters(kernel.fn)]
        places = []
        for number, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                places.append(_Place(number, None, *self._source(argument)))
            elif isinstance(base := getattr(argument, "base", None), torch.Tensor):
                places.append(_Place(number, _with_base(argument, None), *self._source(base)))
            elif isinstance(argument, (tuple, list, dict)):
                raise _NotRepeatableError
        for place in places:
            arguments[place.argument] = None
        return _Start((kernel if binary is None else binary)[(*grid, 1, 1)[:3]], arguments, places)

    def _source(self, tensor: torch.Tensor) -> tuple[str, int, int, torch.dtype | None]:
        address = tensor.data_ptr()
        for i, given in enumerate(self.given):
            if given is not None and given.data_ptr() == address != 0:
                return "given", i, 0, None if given.dtype == tensor.dtype else tensor.dtype
        for i, made in enumerate(self.made):
            start = address - made.data_ptr()
            if 0 <= start < made.nbytes and made.dtype == tensor.dtype and (made.dim() == 1 or not start):
                return "made", i, start // made.itemsize, None
        for i, (counters, _, _) in enumerate(self.counters):
            if counters.data_ptr() == address:
                return "counters", i, 0, None
        raise _NotRepeatableError


class _Plan:
    """The launches of a call."""

    def __init__(
        self, starts: list[_Start], made: list[_Made], counters: list[tuple[int, str]], result: tuple[str, int] | None
    ) -> None:
        self.starts, self.made, self.counters, self.result = starts, made, counters, result

    def __call__(self, given: Tensors, device: torch.device) -> Any:
        make_context(device.index)
        sources: dict[str, Any] = {
            "given": given,
            "made": [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.made],
            "counters": [arrival_counters(device, count, kernel) for count, kernel in self.counters],
        }
        for run, template, places in self.starts:
            arguments = template.copy()
            for argument, descriptor, source, number, start, dtype in places:
                tensor = sources[source][number]
                if start:
                    tensor = tensor[start:]
                elif dtype is not None:
                    tensor = tensor.view(dtype)
                arguments[argument] = tensor if descriptor is None else _with_base(descriptor, tensor)
            run(*arguments)
        return None if self.result is None else sources[self.result[0]][self.result[1]]


@functools.cache
def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Their names and defaults: Python takes 100 us to read them."""
    return [(name, parameter.default) for name, parameter in inspect.signature(function).parameters.items()]


def _with_base(descriptor: Any, base: torch.Tensor | None) -> Any:
    """A copy of a tensor descriptor for another tensor of the same sizes, without Triton's checks of them."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(descriptor.__dict__, base=base)
    return made


def repeated(what: Hashable, given: Tensors, device: torch.device, run: Callable[[], Any]) -> Any:
    """`run()`, or the launches that it made when it was called with tensors of the same sizes.

    Args:
        what: the launcher, and all numbers and names that it looks at.
        given: all tensors that `run` looks at, by place; result tensors of the caller among them.
        device: theirs, and the current one if it is a GPU.
    """
    if _notes.paused or _notes.now is not None or knobs.runtime.add_stages_inspection_hook is not None:
        return run()
    sizes = [None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16, t.storage_offset() % 2) for t in given]
    # Triton compiles for the settings that it has when it launches.
    key = (what, device, knobs.runtime.debug, knobs.compilation.instrumentation_mode, *sizes)
    plan = _plans.get(key)
    if plan is not None:
        # In a part of the GPU that has no room for its grid the launcher chooses another kernel.
        done = resident_or_none(key, lambda: (plan(given, device),))
        return run() if done is None else done[0]
    if key in _plans:
        return run()
    recorder = _Recorder(given)
    _notes.now = recorder
    try:
        result = run()
    finally:
        _notes.now = None
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = recorder.plan(result)
    return result


def pause(paused: bool) -> None:
    """Whether this thread's calls are left alone: launches are noted for other purposes, and do not happen."""
    _notes.paused = paused


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty`, for results and scratch memory of a call that may be `repeated`."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if _notes.now is not None:
        _notes.now.made.append(made)
    return made


def counted(device: torch.device, count: int, kernel: str) -> torch.Tensor:
    """`arrival_counters`, of a call that may be `repeated`."""
    counters = arrival_counters(device, count, kernel)
    if _notes.now is not None:
        _notes.now.counters.append((counters, count, kernel))
    return counters


def launched(kernel: Any, binary: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Notes a launch for the call that is running.

    Args:
        binary: what Triton launched; None: `kernel` is interpreted, or Triton launched nothing.
    """
    if _notes.now is not None:
        if hasattr(binary, "result"):  # inside of an `AsyncCompileMode`, Triton 3.7 promises one
            binary = binary.result()
        given = dict(zip(kernel.arg_names, args, strict=False)) | {n: v for n, v in named.items() if n in kernel.arg_names}
        _notes.now.launches.append((kernel, binary, grid, given))
