"""Argument checks shared by the public wrappers.

Every message has the same three parts: which op and argument, what was expected, what came. Everything checked here is
metadata (rank, shape, dtype, device, Python numbers), hence a constant under `torch.compile`: the checks cost nothing in
a compiled graph and are never skipped while tracing. Values that live in tensors are checked only by the CPU reference.

Dynamo interprets every bytecode of a check at every call of every layer, and a warm start of `torch.compile` is mostly that.
Hence no generators, no `enumerate` (Dynamo runs a Python version of it) and no work for a message that is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_true

from spec_ops.backends.call import FP8_DTYPES

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


class Checker:
    """Checks for one call of one op; `op` prefixes every message."""

    __slots__ = ("op",)

    def __init__(self, op: str) -> None:
        self.op = op

    def fail(self, arg: str, expected: str, got: object, error: type[Exception] = ValueError) -> NoReturn:
        raise error(f"{self.op}: `{arg}` must be {expected}, got {got}")

    def tensor(
        self,
        arg: str,
        value: object,
        *,
        rank: int | tuple[int, ...] | None = None,
        dtypes: tuple[torch.dtype, ...] | None = None,
        device: torch.device | None = None,
        shape: Sequence[int | None] | None = None,
    ) -> None:
        """`shape` entries that are None are free; its length implies the rank."""
        if not isinstance(value, torch.Tensor):
            self.fail(arg, "a torch.Tensor", type(value).__name__, TypeError)
        if shape is not None:
            if value.dim() != len(shape):
                self._wrong_rank(arg, value, (len(shape),))
            for wanted, size in zip(shape, value.shape, strict=True):
                if wanted is not None and wanted != size:
                    self._wrong_shape(arg, value, shape)
        elif rank is not None and (value.dim() != rank if isinstance(rank, int) else value.dim() not in rank):
            self._wrong_rank(arg, value, (rank,) if isinstance(rank, int) else rank)
        if dtypes is not None and value.dtype not in dtypes:
            self.fail(arg, "of dtype " + " or ".join(_name(d) for d in dtypes), _name(value.dtype), TypeError)
        if device is not None and value.device != device:
            self.fail(arg, f"on device {device}", f"device {value.device}")

    def _wrong_rank(self, arg: str, value: torch.Tensor, ranks: tuple[int, ...]) -> NoReturn:
        self.fail(arg, f"a tensor of rank {' or '.join(str(r) for r in ranks)}", f"shape {tuple(value.shape)}")

    def _wrong_shape(self, arg: str, value: torch.Tensor, shape: Sequence[int | None]) -> NoReturn:
        axis = next(i for i, size in enumerate(shape) if size is not None and value.shape[i] != size)
        wanted = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
        self.fail(arg, f"of shape {wanted}", f"shape {tuple(value.shape)} (dimension {axis} differs)")

    def optional_tensor(self, arg: str, value: object, **kwargs) -> None:
        if value is not None:
            self.tensor(arg, value, **kwargs)

    def integer(self, arg: str, value: object, low: int, high: int | None = None) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            self.fail(arg, "an int", type(value).__name__, TypeError)
        # A length read from the device (`.item()` under torch.compile) is a symbol without a value: nothing to check yet.
        if not guard_or_true(value >= low) or (high is not None and not guard_or_true(value <= high)):
            wanted = f"in [{low}, {high}]" if high is not None else f"at least {low}"
            self.fail(arg, f"an int {wanted}", value)

    def number(self, arg: str, value: object, *, low: float, inclusive: bool = False) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(arg, "a Python number", type(value).__name__, TypeError)
        if not (value >= low if inclusive else value > low) or value == float("inf"):
            self.fail(arg, f"finite and {'at least' if inclusive else 'above'} {low}", value)

    def scale(self, arg: str, value: float | None, cache_arg: str, cache_dtype: torch.dtype) -> float:
        """Dequantization scale of a cache: required for fp8, refused otherwise. Returns the factor to apply."""
        if cache_dtype in FP8_DTYPES:
            if value is None:
                self.fail(arg, f"given, since `{cache_arg}` is {_name(cache_dtype)}", "None")
            self.number(arg, value, low=0.0)
            return float(value)  # type: ignore[arg-type]
        if value is not None:
            self.fail(arg, f"None, since `{cache_arg}` is not fp8 but {_name(cache_dtype)}", value)
        return 1.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
