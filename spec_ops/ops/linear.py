"""A linear layer over a few rows: what the pass `lower_skinny_mm` puts in place of `aten.mm` and `aten.addmm`.

It has no public wrapper. Write `torch.nn.functional.linear`; the pass knows where this op's kernel is the faster one.
"""

from __future__ import annotations

from spec_ops.ops._library import define_op
from spec_ops.ops.reference import linear as reference


def _skinny_mm_fake(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


# `x [m, k] @ weight [n, k]^T + bias [n]`, summed in float32, as a contiguous `[m, n]` of the dtype of `x`. On CUDA: bfloat16 or
# float16, m up to 64, k a multiple of 64, rows of `weight` contiguous and aligned to 16 bytes; anything else is a ValueError.
skinny_mm_op = define_op(
    "skinny_mm(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference.skinny_mm,
    _skinny_mm_fake,
    cuda="spec_ops.backends.triton.linear:skinny_mm",
)
