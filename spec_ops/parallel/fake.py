"""A rank without the others: torch's fake process groups, whose collectives send nothing."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# Some builds of torch have none.
c10d: Any = getattr(torch._C, "_distributed_c10d", None)


def fake_group(size: int, rank: int) -> dist.ProcessGroup:
    """A group of which this process is rank `rank`, and nobody the others. The process joins no world."""
    name = f"fake {rank} of {size}"
    group: Any = _unnamed(size, rank)
    try:
        c10d._resolve_process_group(name)
    except RuntimeError:  # a new one, or a world has ended, which takes all names with it
        group._set_group_name(name)
        c10d._register_process_group(name, group)
    return group


@functools.cache  # torch does not keep a group that it knows by its name
def _unnamed(size: int, rank: int) -> dist.ProcessGroup:
    group = c10d.ProcessGroup(c10d.HashStore(), rank, size)
    backend = c10d.FakeProcessGroup._create_internal(rank, size, c10d.FakeProcessGroup.Options())
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), c10d.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)
    return group


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether the group's collectives send nothing; also one of `init_process_group("fake")`."""
    return any(isinstance(group._get_backend(device), c10d.FakeProcessGroup) for device in group._device_types)


@contextlib.contextmanager
def first_of(size: int) -> Iterator[None]:
    """Inside, this process takes itself for the first of `size` that torchrun has started."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    with mock.patch.dict(os.environ, started | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}):
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()
