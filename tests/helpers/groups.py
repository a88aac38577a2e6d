"""Groups of ranks in one process."""

from __future__ import annotations

import datetime
import functools

import torch
from torch._C._distributed_c10d import HashStore, ProcessGroup, ProcessGroupGloo, _register_process_group

from spec_ops.backends import push
from spec_ops.parallel.fake import fake_group

_KEPT: list[ProcessGroup] = []  # torch knows a group by its name for as long as it lives


@functools.cache
def alone(device: str) -> str:
    """The name of a group of this process only. torch.distributed stays uninitialized."""
    name, store = f"alone on {device}", HashStore()
    group = ProcessGroup(store, 0, 1)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    gloo = ProcessGroupGloo(store, 0, 1, datetime.timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name(name)
    _register_process_group(name, group)
    _KEPT.append(group)
    if device != "cpu":
        made = push.of_one_process(1, torch.device(device), 1 << 16, 1_000_000)
        push._workspaces[name, made.state.device] = made
    return name


def pretended(size: int) -> str:
    """The name of a group of `size` ranks, of which this process is the first and nobody the others: for graphs, not to run."""
    return fake_group(size, 0).group_name
