"""How a graph rounds rows to float8, from the rows to the numbers: what `round_rows` computes alike.

    step = div(amax(abs(rows), [-1], True), 448)                          each of these in float32 or in the rows' dtype
    step = clamp_min(step, least), or where(eq(step, 0), zero, step)
    numbers = convert(clamp(div(rows, step), -448, 448), float8_e4m3fn)

or with one `step` that is an input of the graph. (`rounded_rows.py` finds rows of float8 however they came about.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from spec_ops.backends.float8_rows import FLOAT8_MAX
from spec_ops.passes.analysis.graph import arg, value
from spec_ops.passes.analysis.rows import RESHAPES
from spec_ops.passes.analysis.stored_weights import is_stored

aten, prims = torch.ops.aten, torch.ops.prims
_CONVERT = prims.convert_element_type.default


class NotARoundingError(Exception):
    """Why numbers of float8 are not what `round_rows` computes."""


class Rounding(NamedTuple):
    """How rows become numbers and steps.

    Attributes:
        rows: that are rounded, in any shape.
        columns: that share a step; 0 where one is given.
        step_dtype, quotient_dtype, least, zero: see `spec_ops.ops.rounding`.
        given: the step that all rows share, an input of the graph; None if each group has its own.
        numbers, steps: the last nodes of both, which others read.
        inside: the nodes that read the rows, and those between.
    """

    rows: fx.Node
    columns: int
    step_dtype: torch.dtype
    quotient_dtype: torch.dtype
    least: float
    zero: float
    given: fx.Node | None
    numbers: fx.Node
    steps: fx.Node
    inside: set[fx.Node]

    def __str__(self) -> str:
        return "a step that is given" if self.given is not None else f"a step for {self.columns} columns"


def rounding_of(numbers: Any, steps: Any) -> Rounding:
    """The rounding whose results are `numbers` and `steps`, in any shape.

    Raises:
        NotARoundingError: they come about in another way.
    """
    inside: set[fx.Node] = set()
    numbers, steps = _wide(numbers, set()), _wide(steps, set())
    if numbers.target is not _CONVERT or value(numbers).dtype != torch.float8_e4m3fn:
        raise NotARoundingError(f"numbers of float8 come from {numbers.target}")
    quotient, clamped, dtype = _without_clamps(numbers.args[0], inside)
    if quotient.target is not aten.div.Tensor or not all(isinstance(part, fx.Node) for part in quotient.args):
        raise NotARoundingError(f"they are computed by {quotient.target}, not as rows over their steps")
    rows = _wide(quotient.args[0], inside)
    if _wide(quotient.args[1], set()) is not steps:
        raise NotARoundingError("they are divided by other steps than multiply them")
    inside |= {numbers, quotient}
    if value(steps).numel() == 1 and is_stored(given := _of_any_dtype(steps)):
        if not clamped:
            raise NotARoundingError(f"they are not cut off at {FLOAT8_MAX:g}, and their step is given")
        step_dtype = _narrowest([value(node).dtype for node in _converts(steps)])
        columns, least, zero = 0, 0.0, 0.0
    else:
        given = None
        inside.add(steps)
        columns, step_dtype, least, zero, inner = _steps(steps, inside)
        if inner is not rows:
            if inner.target is not _CONVERT or inner.args[0] is not rows:
                raise NotARoundingError("their steps are not those of the same rows")
            inside.add(rows := inner)  # before rows became float32 again, which Inductor has left out
        of_step = value(quotient).shape
        if value(quotient.args[1]).shape != (*of_step[:-1], 1) or of_step[-1] != columns:
            raise NotARoundingError("steps are spread over other columns than they are of")
    return Rounding(rows, columns, step_dtype, dtype, least, zero, given, numbers, steps, inside)


def _wide(node: Any, inside: set[fx.Node]) -> Any:
    """`node` without reshapes and conversions from 16 bits to float32, which `inside` has then."""
    while node.op == "call_function" and (node.target in RESHAPES or _widens(node)):
        inside.add(node)
        node = node.args[0]
    return node


def _narrowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """To what values are rounded that have each of `dtypes` in turn.

    Raises:
        NotARoundingError: to more than one dtype, or to integers.
    """
    found = set(dtypes) - {torch.float32, torch.float64}
    if len(found) > 1 or not all(dtype.is_floating_point for dtype in found):
        raise NotARoundingError(f"they are rounded to {' and '.join(sorted(map(str, found)))} on the way")
    return found.pop() if found else torch.float32


def _widens(node: fx.Node) -> bool:
    """Whether `node` converts to a float of more bits, or of as many and the same dtype."""
    if node.target is not _CONVERT:
        return False
    source, dtype = value(node.args[0]).dtype, value(node).dtype
    return source == dtype or (dtype == torch.float32 and source in (torch.bfloat16, torch.float16))


def _converts(node: Any) -> list[fx.Node]:
    """The conversions between `node` and an input of the graph."""
    found = []
    while node.op == "call_function":
        if node.target is _CONVERT:
            found.append(node)
        node = node.args[0]
    return found


def _of_any_dtype(node: Any) -> Any:
    while node.op == "call_function" and (node.target in RESHAPES or node.target is _CONVERT):
        node = node.args[0]
    return node


def _without_clamps(node: Any, inside: set[fx.Node]) -> tuple[Any, bool, torch.dtype]:
    """What is cut off at the greatest numbers of float8, whether it is at both ends, and the dtype that it is rounded to.
    (Those numbers are in all dtypes: it does not matter which comes first.)"""
    ends: set[float] = set()
    dtypes = [value(node).dtype]
    while True:
        low = high = None
        if node.target is aten.clamp.default:
            low, high = arg(node, "min"), arg(node, "max")
        elif node.target is aten.clamp_min.default:
            low = node.args[1]
        elif node.target is aten.clamp_max.default:
            high = node.args[1]
        elif node.target is not _CONVERT and node.target not in RESHAPES:
            return node, ends == {-FLOAT8_MAX, FLOAT8_MAX}, _narrowest(dtypes)
        if low not in (None, -FLOAT8_MAX) or high not in (None, FLOAT8_MAX):
            raise NotARoundingError(f"they are cut off at {high if low is None else low}")
        ends |= {end for end in (low, high) if end is not None}
        inside.add(node)
        node = node.args[0]
        dtypes.append(value(node).dtype)


def _steps(node: Any, inside: set[fx.Node]) -> tuple[int, torch.dtype, float, float, Any]:
    """Columns that share a step, the dtype in which it is rounded, what stands in for small ones and for 0, and the rows."""
    zero = least = 0.0
    if node.target is aten.where.self:
        same, other, step = node.args
        number = _number(other)
        if same.target is not aten.eq.Scalar or same.args[0] is not step or same.args[1] != 0 or number is None:
            raise NotARoundingError("steps are chosen by something other than whether they are 0")
        zero = _rounded(number, value(node).dtype)
        inside |= {same, step}
        node = step
    node = _wide(node, inside)
    if node.target is aten.clamp_min.default:
        if not isinstance(node.args[1], (int, float)):
            raise NotARoundingError("the least step is not known while compiling")
        least = _rounded(node.args[1], value(node).dtype)
        inside.add(node)
        node = _wide(node.args[0], inside)
    divides = node.target is aten.div.Tensor and node.args[1] == FLOAT8_MAX
    times = node.target is aten.mul.Tensor and isinstance(node.args[1], float) and math.isclose(node.args[1] * FLOAT8_MAX, 1)
    if not (divides or times) or node.kwargs:
        raise NotARoundingError(f"steps are computed by {node.target}, not as the greatest magnitude over {FLOAT8_MAX:g}")
    step_dtype = value(node).dtype
    inside.add(node)
    greatest = _wide(node.args[0], inside)
    if greatest.target is not aten.amax.default:
        raise NotARoundingError("steps are not those of the greatest magnitudes")
    magnitudes: Any = greatest.args[0]
    if arg(greatest, "dim") not in ([-1], [value(magnitudes).dim() - 1]):
        raise NotARoundingError("a step is not of columns of one row")
    columns = value(magnitudes).shape[-1]
    inside.add(greatest)
    magnitudes = _wide(magnitudes, inside)
    if magnitudes.target is not aten.abs.default:
        raise NotARoundingError("steps are not those of the greatest magnitudes")
    inside.add(magnitudes)
    return columns, step_dtype, least, zero, _wide(magnitudes.args[0], inside)


def _rounded(number: float, dtype: torch.dtype) -> float:
    """The number as a step of `dtype` can be."""
    return torch.tensor(number, dtype=dtype).item()


def _number(node: Any) -> float | None:
    """What a constant of one number is."""
    if isinstance(node, fx.Node) and node.target is aten.scalar_tensor.default:
        number = node.args[0]
    elif isinstance(node, fx.Node):
        number = node.args[1] if node.target is aten.full.default else None
    else:
        number = node
    return float(number) if isinstance(number, (int, float)) else None
