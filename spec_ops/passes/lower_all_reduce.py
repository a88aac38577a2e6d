"""Add up few rows of several ranks by a kernel that writes into the other ranks' memory.

    all = _c10d_functional.all_reduce(part, "sum", group)     ->     spec_ops.all_reduce(part, "sum", group)
    wait_tensor(all)

A sum of a decode step is 8 to 256 KB, and NCCL takes 12 to 14 us for it inside a CUDA graph, whatever its size: as long as
reading the weights of a small layer. Our kernel sends every rank's part to all others at once
(`backends/triton/collectives/push.py`), and so it does for the maximum of int64 keys, by which ranks agree on tokens. Of a
larger sum, as of many rows, each rank adds up a share.

NCCL keeps sums of more bytes than `backends/push.py` has for so many ranks, of numbers of ranks other than 2, 4 and 8, of
float32, and between ranks that cannot write to one another's memory: on several hosts, or without peer access.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from spec_ops.backends import push
from spec_ops.backends.registry import device_arch
from spec_ops.ops.collectives import all_reduce_op
from spec_ops.passes.analysis.graph import calls, insert, num_ranks, value
from spec_ops.passes.base import GraphPass, PassContext, PassResult


class LowerAllReduce(GraphPass):
    name = "lower_all_reduce"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        if not dist.is_available():
            return
        c10d = torch.ops._c10d_functional
        for node in calls(graph, c10d.all_reduce.default):
            x, reduce, group = node.args
            fake = value(x)
            arch = context.arch if context.arch is not None else device_arch(fake.device)
            if arch is None:
                continue
            what = f"{reduce} over ranks of {list(fake.shape)}"
            waits = [user for user in node.users if user.target is c10d.wait_tensor.default]
            if len(node.users) != 1 or not waits:
                result.refuse(node, f"{what}: something other than one wait_tensor reads it")
                continue
            if reason := _refusal(fake, reduce, group, arch, planned=context.arch is not None):
                result.refuse(node, f"{what}: {reason}")
                continue
            (wait,) = waits
            wait.replace_all_uses_with(insert(graph, wait, all_reduce_op, (x, reduce, group), source=node))
            result.did(node, what)


def _refusal(fake: torch.Tensor, reduce: Any, group: Any, arch: int, *, planned: bool) -> str | None:
    """Why NCCL keeps it. `planned`: for a machine that is not this one, whose GPUs are taken to see one another's memory."""
    if not all(isinstance(size, int) for size in fake.shape):
        return "its sizes are not known while compiling"
    if arch < push.LEAST_ARCH:
        return f"no figures for sm_{arch}"
    ranks = num_ranks(group)
    if (most := push.most_bytes(ranks, reduce)) is None:
        return f"no figures for {ranks} ranks"
    if reason := push.refusal(fake.dtype, reduce, fake.numel() * fake.element_size(), most):
        return f"a kernel's `x` {reason}"
    if not planned and (group, str(fake.device)) not in push.connected():
        return "the ranks cannot write to one another's memory"
    return None
