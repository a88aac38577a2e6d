"""What Inductor keeps in memory, and what it computes in the kernel of a reader."""

from __future__ import annotations

import operator
from typing import Any

import torch

from spec_ops.passes.analysis.rows import RESHAPES, is_pointwise

aten = torch.ops.aten

_VIEWS = RESHAPES | {
    aten.permute.default, aten.transpose.int, aten.t.default, aten.select.int, aten.slice.Tensor, aten.expand.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.as_strided.default, aten.alias.default,
    operator.getitem,
}  # fmt: skip
_INLINED = {aten.index.Tensor, aten.embedding.default, aten.gather.default, aten.constant_pad_nd.default}


def is_computed(node: Any) -> bool:
    """Whether Inductor computes the rows in a kernel that it can extend by a scatter: views of pointwise work. Anything else is
    a buffer: an input, a product, the result of an op of ours."""
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]
    if node.target is aten.cat.default:
        return any(map(is_computed, node.args[0]))
    return node.op == "call_function" and (node.target in _INLINED or is_pointwise(node.target))
