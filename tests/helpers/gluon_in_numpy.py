"""Gluon kernels for Hopper in numpy: the functions of a kernel as they are, with stand-ins for what they call.

Gluon runs on a GPU alone. Here each partition of each program is a thread, shared memory is an array full of NaN, and barriers
have the phases, arrivals and bytes of mbarriers: who waits for what never comes fails, as does who reads before it is written.
Copies and products are done at once, products in float32, one key after the other. Threads are held up at random.
"""

from __future__ import annotations

import random
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

PATIENCE = 60.0  # seconds


class Array(np.ndarray):
    """What a Triton value is: a number too has `to` and `type`."""

    type = SimpleNamespace(layout=None)

    def __array_wrap__(self, array, context=None, return_scalar=False):
        return np.asarray(array).view(Array)

    def __getitem__(self, key):
        return np.asarray(super().__getitem__(key)).view(Array)

    def __mul__(self, other):
        return super().__mul__(getattr(other, "value", other))  # of a constexpr

    def __iadd__(self, other):
        return self + other  # a new value: others hold the old one

    def to(self, dtype):
        return self.astype(dtype)


def value(x: Any) -> Any:
    return np.asarray(x).view(Array)


class Pointer:
    """Into a flat array, at one place or at many."""

    def __init__(self, array: np.ndarray, at: Any = 0) -> None:
        self.array, self.at = array, value(at)
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.array, self.at.astype(np.int64) + steps)

    def there(self, mask: Any) -> tuple[Any, Any]:
        at, mask = np.broadcast_arrays(self.at, True if mask is None else mask)
        assert ((at[mask] >= 0) & (at[mask] < len(self.array))).all()
        return np.where(mask, at, 0), mask


class Descriptor:
    """Of a matrix in global memory, or of several, by TMA."""

    layout = None

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, array.dtype


def in_numpy(x: Any) -> Any:
    """What a launch hands to a kernel, as the kernel takes it here."""
    if isinstance(x, TensorDescriptor):
        return Descriptor(torch.as_strided(x.base, tuple(x.shape), tuple(x.strides)).numpy())
    if isinstance(x, torch.Tensor):
        return Pointer(torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize - x.storage_offset(),), (1,)).numpy())
    return np.float32(x) if isinstance(x, float) else x


class Shared:
    """`[n, rows, columns]` of shared memory, or one of those, as chunks of 64 columns: swizzled, they lie one after another."""

    def __init__(self, chunks: np.ndarray, whole: bool, turned: bool = False) -> None:
        self.chunks, self.whole, self.turned = chunks, whole, turned  # [n, chunks, rows, 64], or without n
        self.dtype, self.layout = chunks.dtype, None

    @property
    def shape(self) -> tuple[int, ...]:
        *n, chunks, rows, columns = self.chunks.shape
        return (*n, rows, chunks * columns)

    def index(self, i: Any) -> Shared:
        assert not self.whole
        return Shared(self.chunks[int(i)], True)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.chunks[:, start : start + length], True)

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.chunks, True, not self.turned)

    def _reinterpret(self, dtype, shape, layout) -> Shared:
        assert shape[-1] == 64
        return Shared(self.chunks.reshape(shape[0], 1, *shape[1:]), False)

    def load(self, layout=None) -> Any:
        rows = np.concatenate(list(self.chunks), axis=1)
        return value(rows.T if self.turned else rows)

    def store(self, x: Any) -> None:
        self.chunks[:] = np.split(np.asarray(x), len(self.chunks), axis=1)


class Rows:
    """`[n, rows]` of shared memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def index(self, i: Any) -> Rows:
        return Rows(self.array[int(i)])

    def load(self, layout=None) -> Any:
        return value(self.array.copy())

    def store(self, x: Any) -> None:
        self.array[:] = x


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more have arrived than were expected"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Machine:
    """Runs programs; `into` puts its stand-ins into the modules of a kernel."""

    def __init__(self, seed: int = 0) -> None:
        self.changed = threading.Condition()
        self.failed: list[BaseException] = []
        self.here = threading.local()
        self.random = random.Random(seed)

    def into(self, monkeypatch, *modules: ModuleType) -> None:
        stand_ins = {
            "gl": self._language(), "mbarrier": self._mbarrier(), "fence_async_shared": lambda: None, "opaque_zero": lambda: 0,
            "tma": SimpleNamespace(async_copy_global_to_shared=self._copy_box), "warpgroup_mma": self._product,
            "async_copy": SimpleNamespace(async_copy_global_to_shared=self._copy_rows, mbarrier_arrive=self._copied),
            "warpgroup_mma_wait": lambda count, tokens: tuple(tokens) if len(tokens) > 1 else tokens[0],
            "barrier": lambda: None, "await_predecessors": lambda pdl: None,
        }  # fmt: skip
        for module in modules:
            for name, found in list(vars(module).items()):
                if name in stand_ins:
                    monkeypatch.setattr(module, name, stand_ins[name])
                elif isinstance(found, JITFunction):
                    monkeypatch.setattr(module, name, found.fn)

    def run(self, kernel: Any, programs: int, *args: Any, **kwargs: Any) -> None:
        """All programs at once."""

        def program(index: int) -> None:
            self.here.index = index
            kernel(*args, **kwargs)

        self._together([lambda i=i: program(i) for i in range(programs)])

    def _together(self, calls: list[Any]) -> None:
        def guarded(call: Any) -> None:
            try:
                with np.errstate(all="ignore"):
                    call()
            except BaseException as error:
                with self.changed:
                    self.failed.append(error)
                    self.changed.notify_all()

        threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]

    def _stumble(self) -> None:
        if self.random.random() < 0.02:
            time.sleep(self.random.random() * 2e-3)

    def _mbarrier(self) -> SimpleNamespace:
        def init(bar: Barrier, count: int) -> None:
            bar.count = bar.pending = int(count)

        def arrive(bar: Barrier, count: int = 1, pred: Any = True, bytes: int = 0) -> None:
            self._stumble()
            if pred:
                with self.changed:
                    bar.bytes += bytes
                    bar.pending -= count
                    bar.settle()
                    self.changed.notify_all()

        def wait(bar: Barrier, phase: Any, pred: Any = True) -> None:
            self._stumble()
            if not pred:
                return
            with self.changed:
                there = self.changed.wait_for(lambda: self.failed or bar.phase != int(phase), PATIENCE)
            if self.failed or not there:
                raise RuntimeError("stopped" if self.failed else "waited for what did not come")

        return SimpleNamespace(
            init=init,
            arrive=arrive,
            wait=wait,
            expect=lambda bar, bytes: arrive(bar, bytes=int(bytes)),
            MBarrierLayout=lambda: None,
        )

    def _copy_box(self, rows: Descriptor, at: list[Any], bar: Barrier, to: Shared) -> None:
        self._stumble()
        box = np.zeros(to.chunks.shape[1:], rows.dtype)
        found = rows.array
        for axis, (start, length) in enumerate(zip(map(int, at), box.shape, strict=True)):
            assert start >= 0
            found = found[(slice(None),) * axis + (slice(start, start + length),)]
        box[tuple(map(slice, found.shape))] = found
        to.chunks[0] = box
        with self.changed:
            bar.bytes -= box.nbytes
            bar.settle()
            self.changed.notify_all()

    def _copy_rows(self, to: Shared, rows: Pointer) -> None:
        self._stumble()
        to.chunks[0] = self._load(rows)

    def _copied(self, bar: Barrier, increment_count: bool) -> None:
        self._mbarrier().arrive(bar, count=128)

    @staticmethod
    def _product(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = True) -> Any:
        left, right = (np.asarray(x.load() if isinstance(x, Shared) else x, np.float32) for x in (a, b))
        total = np.array(acc, np.float32) if use_acc else np.zeros_like(acc)
        if not use_acc or left.shape[1] > 64 or total.shape[1] == 64:  # logits: the order of numbers in a row is nobody's
            return value((total + left.astype(np.float64) @ right).astype(np.float32))
        for k in range(left.shape[1]):
            total += left[:, k : k + 1] * right[k]
        return value(total)

    @staticmethod
    def _load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Any:
        at, mask = pointer.there(mask)
        return value(np.where(mask, pointer.array[at], np.asarray(other, pointer.array.dtype)))

    @staticmethod
    def _store(pointer: Pointer, x: Any, mask: Any = None) -> None:
        at, mask = pointer.there(mask)
        pointer.array[at[mask]] = np.broadcast_to(x, at.shape)[mask]

    def _atomic_add(self, pointer: Pointer, x: Any, sem: str, scope: str) -> Any:
        if not np.any(x):
            if self.failed:
                raise RuntimeError("stopped")
            time.sleep(1e-4)
        with self.changed:
            old = value(pointer.array[int(pointer.at)])
            pointer.array[int(pointer.at)] += x
        return old

    def _language(self) -> SimpleNamespace:
        def shared(dtype, shape, layout):
            if dtype is np.int64:
                bars = [Barrier() for _ in range(int(shape[0]))]
                return SimpleNamespace(index=lambda i: bars[int(i)])
            if len(shape) == 2:
                return Rows(np.full(shape, np.nan, dtype))
            n, rows, columns = shape
            return Shared(np.full((n, columns // 64, rows, 64), np.nan, dtype), False)

        def expand_dims(x, axis):
            return Pointer(x.array, np.expand_dims(x.at, axis)) if isinstance(x, Pointer) else value(np.expand_dims(x, axis))

        def wrapped(function):
            return lambda *args: value(function(*args))

        return SimpleNamespace(
            int32=np.int32, int64=np.int64, float32=np.float32, constexpr=None,
            BlockedLayout=lambda *a: None, SliceLayout=lambda *a: None, NVMMASharedLayout=language.NVMMASharedLayout,
            NVMMADistributedLayout=lambda *a: None, DotOperandLayout=lambda *a: None, DistributedLinearLayout=lambda *a: None,
            allocate_shared_memory=shared, warp_specialize=lambda parts, warps, registers: self._together(
                [lambda f=f, args=args: f(*args) for f, args in parts]
            ),
            program_id=lambda axis: value(np.int32(self.here.index)), static_range=range, cdiv=lambda x, y: -(-x // y),
            arange=lambda start, stop, layout: value(np.arange(start, stop, dtype=np.int32)),
            full=lambda shape, x, dtype, layout: value(np.full(shape, x, dtype)),
            zeros=lambda shape, dtype, layout: value(np.zeros(shape, dtype)), zeros_like=wrapped(np.zeros_like),
            convert_layout=lambda x, layout: x, expand_dims=expand_dims, where=wrapped(np.where),
            maximum=wrapped(np.maximum), minimum=wrapped(np.minimum), exp2=wrapped(np.exp2),
            max=wrapped(np.max), sum=wrapped(lambda x, axis: np.sum(x, axis, dtype=x.dtype)),
            reduce=lambda x, axis, combine: value(np.bitwise_or.reduce(x, axis)),
            associative_scan=lambda x, axis, combine: value(np.cumsum(x)),
            load=self._load, store=self._store, atomic_add=self._atomic_add,
        )  # fmt: skip
