"""Memory of the ranks of one host that all of them write to, for the kernels of `triton/collectives`.

It is allocated and exchanged when ranks meet (`connect`), before anything is compiled: torch's symmetric memory allows neither
while a CUDA graph is captured. https://docs.pytorch.org/docs/stable/symmetric_memory.html
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

PROGRAMS = 256  # most of a launch
STATE = 2 * PROGRAMS + 4  # words of `state`, of a multiple of 16 bytes
# Bytes up to which every rank writes all of its part to all others ("one-shot"), by the number of ranks. With more of either
# the links' bandwidth decides: then each rank adds up a share of the sum, and writes that to the others ("two-shot"). Measured
# on H200 for 2 and 4 ranks (docs/notebook/collectives.md), and computed from that for 8.
ONE_SHOT_BYTES = {2: 2 << 20, 4: 256 << 10, 8: 96 << 10}
MOST_BYTES = {2: 2 << 20, 4: 8 << 20, 8: 2 << 20}  # of a sum: more are NCCL's
LEAST_ARCH = 90
LOOKS_A_SECOND = 3_500_000  # most of a waiting program at its buffer: one takes 314 ns with 2 ranks, 499 with 8 (H200)
DTYPES = {"sum": (torch.bfloat16, torch.float16), "max": (torch.int64,)}


@dataclass(frozen=True)
class PushWorkspace:
    """What the kernels of one rank need.

    Attributes:
        rank, size: of the group.
        slot_bytes: of what one rank writes to another in a call.
        one_shot_bytes: of a sum, up to which it is all of a rank's part.
        addresses: `[size + 1]` int64 on the device: of each rank's buffers as this process sees them, and of `failed`.
        state: `[ranks of this process, STATE]` int32 on the device: turns, words left by the previous call, whether a call
            failed.
        failed: `[1]` int32 that the host reads, and the device writes 1 to when a rank did not come.
        looks: how often a program looks at its buffer before it gives up.
        memory: what must not be freed.
    """

    rank: int
    size: int
    slot_bytes: int
    one_shot_bytes: int
    addresses: torch.Tensor
    state: torch.Tensor
    failed: torch.Tensor
    looks: int
    memory: Any = None

    def check(self, op: str, dtype: torch.dtype, reduce: str, num_bytes: int) -> None:
        """
        Raises:
            ValueError: the kernels do not reduce such a tensor.
        """
        most = {"sum": max(self.slot_bytes, self.slot_bytes * self.size // 2), "max": self.slot_bytes // 2}
        if reason := refusal(dtype, reduce, num_bytes, most.get(reduce, 0)):
            raise ValueError(f"{op}: `x` {reason}")


def refusal(dtype: torch.dtype, reduce: str, num_bytes: int, most: int) -> str | None:
    """Why the kernels do not reduce a tensor; None if they do."""
    if reduce not in DTYPES or dtype not in DTYPES[reduce]:
        known = "; ".join(f"{name}: {', '.join(map(str, dtypes))}" for name, dtypes in DTYPES.items())
        return f"and `reduce` must be one of {known}, got {reduce} of {dtype}"
    if num_bytes % 16 and reduce == "sum":
        return f"must be of a multiple of 16 bytes, got {num_bytes}"
    return f"must be of at most {most} bytes, got {num_bytes}" if num_bytes > most else None


def most_bytes(size: int, reduce: str = "sum") -> int | None:
    """Bytes of a call up to which the kernels are for so many ranks; None if they are not."""
    if size not in MOST_BYTES:
        return None
    return _slot_bytes(size) // 2 if reduce == "max" else MOST_BYTES[size]  # a key travels with 8 bytes beside it


def _slot_bytes(size: int) -> int:
    """Two shares of a sum lie in a slot: what a rank is given of its own share, and the sum of another's."""
    return max(ONE_SHOT_BYTES[size], 2 * MOST_BYTES[size] // size)


_workspaces: dict[tuple[str, torch.device], PushWorkspace] = {}  # by the name of the group and the device of the memory


def workspace_of(op: str, group: str, device: torch.device) -> PushWorkspace:
    """The workspace that the ranks of `group` share, for tensors on `device`.

    Raises:
        ValueError: they have none, or on another device.
    """
    if (group, device) in _workspaces:
        return _workspaces[group, device]
    if devices := [where for name, where in connected() if name == group]:
        raise ValueError(f"{op}: `x` must be on {' or '.join(devices)}, where {group!r} has its memory, got {device}")
    raise ValueError(
        f"{op}: `group` must be one whose ranks can write to one another's memory, and that a TensorParallel was made of, "
        f"got {group!r}"
    )


def connected() -> tuple[tuple[str, str], ...]:
    """The names of the groups that have a workspace, each with its device, such as `"cuda:0"`."""
    return tuple(sorted((name, str(device)) for name, device in _workspaces))


def connect(group: Any, device: torch.device, seconds: float) -> PushWorkspace:
    """Allocate this rank's buffers and exchange their addresses; all ranks must call it. Once for a group.

    Args:
        group: a `torch.distributed.ProcessGroup` of 2, 4 or 8 ranks, one GPU each, of one host with peer access.
        device: this rank's, with its index, and the current one.
        seconds: that a kernel waits for the other ranks, at least.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # not used here, and setting it up fails on some machines
    import torch.distributed._symmetric_memory as symmetric

    name, size = group.group_name, group.size()
    if (name, device) in _workspaces:
        return _workspaces[name, device]
    slot = _slot_bytes(size)
    words = 3 * size * slot // 4
    buffers = symmetric.empty(words, dtype=torch.int32, device=device)
    handle = symmetric.rendezvous(buffers, group)
    buffers.zero_()
    failed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    addresses = torch.tensor([*handle.buffer_ptrs, failed.data_ptr()], dtype=torch.int64).to(device)
    state = torch.zeros(1, STATE, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    handle.barrier()  # nobody writes to a buffer that is still to be zeroed
    torch.cuda.synchronize(device)
    looks = min(int(seconds * LOOKS_A_SECOND), 2**31 - 1)
    made = PushWorkspace(group.rank(), size, slot, ONE_SHOT_BYTES[size], addresses, state, failed, looks, (buffers, handle))
    return _workspaces.setdefault((name, device), made)


def without_others(group: str, size: int, device: torch.device) -> PushWorkspace:
    """Buffers of the first of `size` ranks whose writes to another come back as that one's part, to time its rounds alone."""
    if (group, device) in _workspaces:
        return _workspaces[group, device]
    slot = _slot_bytes(size)
    buffers = torch.zeros(3 * size * slot // 4, dtype=torch.int32, device=device)
    failed = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    # Rank 0 writes to slot 0 of every rank: slot `rank` of its own buffer.
    pointers = [buffers.data_ptr() + rank * slot for rank in range(size)]
    addresses = torch.tensor([*pointers, failed.data_ptr()], dtype=torch.int64).to(device)
    state = torch.zeros(1, STATE, dtype=torch.int32, device=device)
    made = PushWorkspace(0, size, slot, ONE_SHOT_BYTES[size], addresses, state, failed, LOOKS_A_SECOND, buffers)
    return _workspaces.setdefault((group, device), made)


def of_one_process(size: int, device: torch.device, slot: int, looks: int, one_shot: int | None = None) -> PushWorkspace:
    """All ranks in one process and on one device: to try the kernels without a second GPU.

    Args:
        slot: its bytes. one_shot: see `PushWorkspace.one_shot_bytes`; default `slot`.
    """
    buffers = torch.zeros(size, 3 * size * slot // 4, dtype=torch.int32, device=device)
    failed = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    pointers = [row.data_ptr() for row in buffers]
    addresses = torch.tensor([*pointers, failed.data_ptr()], dtype=torch.int64).to(device)
    state = torch.zeros(size, STATE, dtype=torch.int32, device=device)
    return PushWorkspace(0, size, slot, slot if one_shot is None else one_shot, addresses, state, failed, looks, buffers)
