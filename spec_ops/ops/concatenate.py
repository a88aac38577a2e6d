"""`torch.cat` as an op of ours, for the pass `whole_concatenations`: Inductor computes it in one kernel."""

from __future__ import annotations

import torch

from spec_ops.ops._library import define_op


def _cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(tensors, dim)


concatenate = define_op("concatenate(Tensor[] tensors, int dim) -> Tensor", _cat, _cat)
