"""Models that transformers has divided among processes: `from_pretrained(distributed_config=DistributedConfig(tp_size=N))`.

Its weights are DTensors, and its linear layers add up what ranks have computed by torch's functional collectives, as our own
shares do: in a compiled round the DTensors are gone, and the passes see the same graph.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from spec_ops.parallel import TensorParallel

_known: dict[str, TensorParallel] = {}  # by the name of the group: models of one world share its ranks


def ranks_of(model: nn.Module) -> TensorParallel | None:
    """The ranks that share `model`; None if no weight is divided.

    All of them must call it: the first call for a group lets them meet.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.tensor import DTensor

    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor) and any(map(_divides, p.placements))}
    if not meshes:
        return None
    if len(meshes) > 1 or (mesh := meshes.pop()).ndim > 1:
        raise ValueError(f"{type(model).__name__} must be divided along one dimension of ranks (`tp_size`), got {meshes}")
    group = mesh.get_group()
    name = group.group_name
    if name not in _known or _known[name].group is not group:
        _known[name] = TensorParallel(group)
    return _known[name]


def _divides(placement: object) -> bool:
    return not placement.is_replicate()  # type: ignore[attr-defined]
