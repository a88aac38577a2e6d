"""`torch.cat` as an op of ours, for the pass `whole_concatenations`: Inductor computes it in one kernel."""

from __future__ import annotations

from spec_ops.ops._library import define_op
from spec_ops.ops.reference import concatenate as reference

concatenate = define_op(
    "concatenate(Tensor[] tensors, int dim) -> Tensor", reference.concatenate, reference.concatenate, invariant=True
)
