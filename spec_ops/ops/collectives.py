"""Reductions over the ranks of a group: what the passes `lower_all_reduce` and `fuse_allreduce_norm` put in place of
`_c10d_functional.all_reduce`.

They have no public wrappers. Write `TensorParallel.all_reduce`, or torch's functional collectives; the passes know where these
kernels are faster. A group is named as torch.distributed does. On the CPU its own backend gathers the parts; on CUDA the ranks
write to one another's memory, which `TensorParallel` has set up (`backends/push.py`).
"""

from __future__ import annotations

import torch

from spec_ops.backends.squares import sums_of
from spec_ops.ops._library import define_op
from spec_ops.ops.reference import collectives as reference

__all__ = ["all_reduce_add_op", "all_reduce_op"]

_KERNELS = "spec_ops.backends.triton.collectives.push"


def _all_reduce_fake(x, reduce, group):
    return x.new_empty(x.shape)


# What the ranks' tensors `x` of one shape give together, contiguous and with the same bits on every rank. `reduce` is "sum", in
# float32 in the order of the ranks from +0.0 on, rounded once; or "max", of int64. On CUDA: sums of bfloat16 and float16 of a
# multiple of 16 bytes; anything else, and more bytes than `push.most_bytes` says, is a ValueError.
all_reduce_op = define_op(
    "all_reduce(Tensor x, str reduce, str group) -> Tensor",
    reference.all_reduce,
    _all_reduce_fake,
    cuda=f"{_KERNELS}:all_reduce",
    invariant=True,
)


def _all_reduce_add_fake(x, residual, norm_weight, group):
    m, n = x.shape
    return x.new_empty(m, n), x.new_empty(m, n), x.new_empty(m, sums_of(n), dtype=torch.float32)


# `y = all_reduce(x [m, n]) + residual [m, n]`, rounded as the one and as the other; `z = y * norm_weight [n]`; and `squares
# [m, sums_of(n)]` of y: see `add_skinny_mm` in `linear.py`, whose readers read these too. n is a multiple of 16 on CUDA.
all_reduce_add_op = define_op(
    "all_reduce_add(Tensor x, Tensor residual, Tensor norm_weight, str group) -> (Tensor y, Tensor z, Tensor squares)",
    reference.all_reduce_add,
    _all_reduce_add_fake,
    cuda=f"{_KERNELS}:all_reduce_add",
    invariant=True,
)
