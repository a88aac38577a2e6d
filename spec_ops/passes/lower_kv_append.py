"""Let Inductor fuse a KV append with the work that computes its rows.

    k = rope(k)                                     k = rope(k)
    append_kv(kc, vc, k, v, slots)          ->      append_kv_lowered(kc, vc, k, v, slots)

Our kernels take buffers: keys are rotated in one launch, written to memory, read again and appended in the next launch. The op
on the right is lowered to masked scatters in place (`row_scatter.py`), so that rotation, norm, quantization and scatter are one
kernel. That is a launch less per layer, and keys and values do not pass through memory in between.

The op is replaced only where this is certain to save a launch. Each row tensor must be computed by work that Inductor fuses, or
have the shape of one that is, so that both scatters become one kernel. Otherwise its scatter would be another launch. The cache
is not copied for it: it is mutated in place exactly where `append_kv` would have mutated it.

A layer of up to `MAX_ROWS` rows takes 1.0 to 1.6 us less (`benchmarks/results/h200-kv-append.json`, by
`benchmarks/kv_append.py`). More rows were not measured, and keep the op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from spec_ops.backends.call import FP8_DTYPES
from spec_ops.backends.registry import device_arch
from spec_ops.ops.kv_cache import append_kv_lowered, append_kv_op, append_mla_kv_lowered, append_mla_kv_op
from spec_ops.passes.analysis.buffers import is_computed
from spec_ops.passes.analysis.graph import AUTO_FUNCTIONALIZED, calls, mutated_input, value
from spec_ops.passes.base import GraphPass, PassContext, PassResult
from spec_ops.passes.row_scatter import register_lowerings

_LOWERED = {append_kv_op: append_kv_lowered, append_mla_kv_op: append_mla_kv_lowered}
_ROWS = {append_kv_op: ("k", "v"), append_mla_kv_op: ("c_kv", "k_rope")}
_CACHES = {append_kv_op: ("k_cache", "v_cache"), append_mla_kv_op: ("kv_cache",)}
MAX_ROWS = 128  # most rows measured: 32 requests of 4 tokens
E4M3_ARCH = 89  # the first architecture for which Triton converts to e4m3


class LowerKvAppend(GraphPass):
    name = "lower_kv_append"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        for node in calls(graph, AUTO_FUNCTIONALIZED):
            op: Any = node.args[0]
            if op not in _LOWERED or not _on_nvidia(node):
                continue
            if (reason := _obstacle(node, op, context)) is not None:
                result.refuse(node, f"{op._schema.name.removeprefix('spec_ops::')}: {reason}")
                continue
            register_lowerings()
            node.update_arg(0, _LOWERED[op])
            result.did(node, f"{' and '.join(_ROWS[op])} are computed and appended in one go")


def _on_nvidia(node: fx.Node) -> bool:
    """Only Triton code has masked stores. On the CPU there is nothing to report."""
    return torch.version.hip is None and value(node.kwargs["slots"]).device.type == "cuda"


def _obstacle(node: fx.Node, op: Any, context: PassContext) -> str | None:
    """Why the append at `node` keeps its kernel; None if it can be lowered."""
    call: dict[str, Any] = dict(node.kwargs)
    rows: dict[str, fx.Node] = {name: call[name] for name in _ROWS[op]}
    bases = [call[f"_{name}_base_index"] for name in _CACHES[op]]
    pools: list[fx.Node] = [call["_all_bases"][index] for index in bases]
    cache, slots = value(pools[0]), value(call["slots"])
    if not all(isinstance(size, int) for fake in (cache, slots, *map(value, rows.values())) for size in fake.shape):
        return "its sizes are not known while compiling"
    if slots.shape[0] > MAX_ROWS:
        return f"more than {MAX_ROWS} rows"
    arch = context.arch if context.arch is not None else device_arch(cache.device)
    if cache.dtype in FP8_DTYPES and (arch is None or arch < E4M3_ARCH):
        return f"Triton does not convert to {cache.dtype} on sm_{arch}"
    if any(mutated_input(pool) is None for pool in pools):
        return "the cache is made in this graph"
    if len(set(bases)) < len(bases):
        return "both caches are views of one tensor, so Inductor would write them one after the other"
    computed = {name: is_computed(source) for name, source in rows.items()}
    if not any(computed.values()):
        return f"{' and '.join(rows)} are buffers already: there is nothing to fuse"
    for name, source in rows.items():
        if computed[name]:
            continue
        alike = [n for n in rows if computed[n] and value(rows[n]).shape == value(source).shape]
        if not alike or len(pools) == 1:
            return f"nothing computes {name}, so its scatter would be a launch of its own"
        if slots.nbytes < inductor_config.score_fusion_memory_threshold:
            return f"Inductor fuses no kernels that share as little as {slots.nbytes} bytes of slots"
    return None
