"""How Inductor computes a lowered KV append: scatters that fuse with whatever computes their rows.

`append_kv_lowered` and `append_mla_kv_lowered` compute the same as the append ops. For the append ops Inductor calls a kernel.
For these two it generates code: a scatter in place for each row tensor, whose store is masked where the slot is negative.
Inductor's IR has no masked store, but Triton's code generator adds the mask of an `ops.masked` region to every access inside,
stores included. So the store is put into such a region. C++ code has no masked stores, so these ops are lowered for CUDA only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spec_ops.backends.call import FP8_DTYPES
from spec_ops.ops.kv_cache import append_kv_lowered, append_mla_kv_lowered


@functools.cache
def register_lowerings() -> None:
    """Tell Inductor how to generate code for the two ops. Not at import, since Inductor takes a second to import."""
    from torch._inductor import lowering

    def append_kv(k_cache, v_cache, k, v, slots, k_scale, v_scale) -> None:
        _scatter(k_cache, k, slots, k_scale)
        _scatter(v_cache, v, slots, v_scale)

    def append_mla_kv(kv_cache, c_kv, k_rope, slots, kv_scale) -> None:
        _scatter(kv_cache, c_kv, slots, kv_scale)
        _scatter(kv_cache, k_rope, slots, kv_scale, column=c_kv.get_size()[1])

    lowering.register_lowering(append_kv_lowered, type_promotion_kind=None)(append_kv)
    lowering.register_lowering(append_mla_kv_lowered, type_promotion_kind=None)(append_mla_kv)


def _scatter(cache: Any, rows: Any, slots: Any, scale: float, column: int = 0) -> None:
    """`cache[slots[i], ..., column + d] = rows[i, ..., d]` where `slots[i] >= 0`, in place; all are Inductor's IR nodes."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V, ops
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    cache.realize()
    rows = _stored(rows, scale, cache.get_dtype())
    # The rows get a buffer of their own, which the scatter's kernel computes: its loads need not wait for the slot, and rows
    # that are computed from the same cache are computed before it changes (pytorch#138908).
    rows = ir.TensorBox(ir.ExternKernel.copy_input(rows)) if _is_buffer(rows) else rows
    rows.realize()
    pages, page_size = cache.get_size()[:2]
    load_row, load_slot = rows.make_loader(), slots.make_loader()

    class RowScatter(ir.Scatter):
        def store_output(self, output_name: str | None, indexer: Callable, index: Sequence[Any]) -> Any:
            slot = ops.to_dtype(load_slot(index[:1]), torch.int64)  # pools have more than 2^31 elements
            place = ops.indirect_indexing(slot, pages * page_size, check=False, wrap_neg=False)
            rest = [*index[1:-1], index[-1] + column]
            to = indexer([FloorDiv(place, page_size), ModularIndexing(place, 1, page_size), *rest])

            def store() -> Any:
                row = load_row(index)
                ops.store(output_name or "unnamed", to, row)
                return row

            return ops.masked(ops.ge(slot, ops.constant(0, torch.int64)), store, 0.0)

    scatter = RowScatter(
        device=cache.get_device(),
        dtype=cache.get_dtype(),
        inner_fn=load_row,
        ranges=list(rows.get_size()),
        output_indexer=lambda index: index,  # `store_output` does it
        scatter_mode=None,
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(cache), data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)


def _is_buffer(rows: Any) -> bool:
    from torch._inductor import ir

    return ir.is_storage_and_layout(rows)


def _stored(rows: Any, scale: float, dtype: torch.dtype) -> Any:
    """`rows` in the dtype of the cache, by the arithmetic of the append kernels."""
    from torch._inductor import ir
    from torch._inductor.virtualized import ops

    if dtype not in FP8_DTYPES:
        return rows
    load, row_dtype, limit = rows.make_loader(), rows.get_dtype(), torch.finfo(dtype).max

    def quantized(index: Sequence[Any]) -> Any:
        # Fused code keeps float32, but the append kernels quantize values that were rounded to the rows' dtype.
        row = ops.to_dtype(load(index), row_dtype, use_compute_types=False)
        row = ops.to_dtype(row, torch.float32)
        if math.frexp(scale)[0] == 0.5:  # a power of two
            row = ops.mul(row, ops.constant(1 / scale, torch.float32))
        else:  # Triton's `/` is approximate, and can decide a tie between two e4m3 values
            divide = "div.rn.f32 $0, $1, $2;"
            row = ops.inline_asm_elementwise(row, ops.constant(scale, torch.float32), asm=divide, constraints="=f,f,f")
        row = ops.minimum(ops.maximum(row, ops.constant(-limit, torch.float32)), ops.constant(limit, torch.float32))
        return ops.to_dtype(row, dtype)

    return ir.Pointwise.create(device=rows.get_device(), dtype=dtype, inner_fn=quantized, ranges=list(rows.get_size()))
