"""Products of rows and weights of float8: where `lower_skinny_mm` puts `float8_mm`, and why not elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.backends.weight_format import BLOCK
from spec_ops.ops.linear import float8_mm_op
from spec_ops.passes.analysis.graph import insert, value
from spec_ops.passes.analysis.rounded_rows import FirstNodes, RoundedRows, first_of, rounded_rows, scaled_mm
from spec_ops.passes.analysis.stored_weights import NoFormatError, StoredWeight
from spec_ops.passes.base import PassResult


class Float8Products:
    """Of one graph, in its order.

    Args:
        graph: that is changed.
        result: what was done to it, and why not more.
    """

    def __init__(self, graph: fx.Graph, result: PassResult) -> None:
        self._graph, self._result = graph, result
        self._first: FirstNodes = {}  # so that rows of several products are rounded once

    def lower(self, node: fx.Node, bias: fx.Node | None, x: fx.Node, stored: StoredWeight, arch: int) -> bool:
        """Replace the `mm` or `addmm` at `node` of rows `x`, if these and the weight are both of float8.

        Where it stays, its rows become those that another product rounded before, if they are the same: `x` is not its operand
        any more.
        """
        if value(stored.data).dtype != torch.float8_e4m3fn or not _are_known(node, x):
            return False
        try:
            if rounded_rows(x) is None:
                return False
            if (first := first_of(x, self._first)) is not x:
                node.replace_input_with(x, first)
            rows = rounded_rows(first)
        except NoFormatError as error:
            self._result.refuse(node, f"float8_mm of {_shapes(node, x)}: {error}")
            return False
        return rows is not None and self._multiply(node, bias, first, rows, stored, arch)

    def lower_scaled_mm(self, node: fx.Node, arch: int) -> bool:
        """Replace the `_scaled_mm` at `node`."""
        x: Any = node.args[0]
        try:
            if not _are_known(node, x):
                raise NoFormatError("its sizes are not known while compiling")
            found = scaled_mm(node)
        except NoFormatError as error:
            self._result.refuse(node, f"float8_mm of {_shapes(node, x)}: {error}")
            return False
        if found is None:
            return False
        bias, rows, stored = found
        return self._multiply(node, bias, x, rows, stored, arch)

    def _multiply(
        self, node: fx.Node, bias: fx.Node | None, x: fx.Node, rows: RoundedRows, stored: StoredWeight, arch: int
    ) -> bool:
        m, n, k = _sizes(node, x)
        if m < hopper_tiles.FLOAT8_LEAST_ROWS:  # no refusal: other kernels are as fast for so few
            return False
        if reason := _refusal(node, bias, stored, (m, n, k), arch):
            self._result.refuse(node, f"float8_mm of {_shapes(node, x)}: {reason}")
            return False
        numbers, steps = rows.insert(self._graph, node, m, k, self._first)
        data, scale, *_ = stored.insert(self._graph, node)
        args = (numbers, steps, data, scale, bias, value(node).dtype)
        new = insert(self._graph, node, float8_mm_op, args, source=node)
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)
        self._result.did(new, f"float8_mm: {m} rows of 8 bits, weight {n} x {k} of 8 bits")
        return True


def _sizes(node: fx.Node, x: fx.Node) -> tuple[Any, Any, Any]:
    (m, k), n = value(x).shape, value(node).shape[1]
    return m, n, k


def _are_known(node: fx.Node, x: fx.Node) -> bool:
    return all(isinstance(size, int) for size in _sizes(node, x))


def _shapes(node: fx.Node, x: fx.Node) -> str:
    m, n, k = _sizes(node, x)
    return f"{m} x {k} and {k} x {n}"


def _refusal(node: fx.Node, bias: fx.Node | None, stored: StoredWeight, sizes: tuple[int, int, int], arch: int) -> str | None:
    """Why rows and weight of float8 are not multiplied as they are; None if they are."""
    m, n, k = sizes
    if (error := hopper_tiles.float8_mm_refusal(m, n, k, value(node).dtype, arch)) is not None:
        return str(error).removeprefix("float8_mm: ")
    if (dtype := value(stored.data).dtype) != torch.float8_e4m3fn:
        return f"its weight is {dtype}, not float8_e4m3fn"
    if stored.shape not in ((1, 1), (n, 1), (-(-n // BLOCK), k // BLOCK)):
        return f"its weight has scales of shape {list(stored.shape)}"
    return layout_refusal(node, bias, stored, value(node).dtype)


def layout_refusal(node: fx.Node, bias: fx.Node | None, stored: StoredWeight, dtype: torch.dtype) -> str | None:
    """Why kernels for weights of 8 and 4 bits do not take this one as it lies, or what is added to the product; None if they
    do."""
    data, n = value(stored.data), value(node).shape[1]
    row, column = data.stride()[::-1] if stored.flipped else data.stride()
    if column != 1 or row < data.shape[0 if stored.flipped else 1]:
        return "the weight's rows are not contiguous"
    if row % 16 or data.storage_offset() % 16:
        return "the weight's rows do not start at multiples of 16 bytes"
    if bias is not None and (node.kwargs or value(bias).shape != (n,) or value(bias).dtype != dtype):
        return "what is added is not a bias of the rows' dtype"
    return None
