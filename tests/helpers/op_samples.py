"""Arguments of every operator that is registered: one valid list in schema order from any source of integers.

Tests draw fixed samples by seed, and random ones with hypothesis.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_ops.backends.squares import sums_of
from tests.helpers.decoding_samples import DECODING_SAMPLES
from tests.helpers.groups import alone
from tests.helpers.mixtures import stored_stack
from tests.helpers.sample_source import FLOATS, FP8, INDEX, Source

ATTENTION_STEPS = ("draft_decode", "target_verify", "draft_extend", "extend")


def attention_sample(kind: str, step: str, s: Source) -> tuple[Any, ...]:
    bs, kv_heads, page_size, dim = s.integer(0, 3), s.integer(1, 2), s.integer(1, 5), s.integer(2, 9)
    heads = s.integer(1, 3) * (kv_heads if kind == "mha" else 1)
    dtype = s.pick(*FLOATS)
    kv_dtype = s.cache_dtype(dtype)
    v_dim = s.integer(1, dim)
    pages, width = s.integer(1, 6), s.integer(1, 3)
    lens = s.ids(width * page_size + 1, bs, dtype=torch.int32)
    if kind == "mha":
        pool = [s.laid_out(s.normal(pages, page_size, kv_heads, d, dtype=kv_dtype)) for d in (dim, v_dim)]
        scales = (0.5, 2.0) if kv_dtype == FP8 else (1.0, 1.0)
    else:
        pool = [s.laid_out(s.normal(pages, page_size, dim, dtype=kv_dtype)), v_dim]
        scales = (0.5,) if kv_dtype == FP8 else (1.0,)
    if step == "extend":
        q_lens = s.ids(4, bs)
        total = int(q_lens.sum()) + s.integer(0, 2)
        q = s.laid_out(s.normal(total, heads, dim, dtype=dtype))
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), q_lens.cumsum(0)]).to(torch.int32)
        queries = (s.to(starts), s.integer(3, 5))
    else:
        q_len = s.integer(1, 4)
        q = s.laid_out(s.normal(bs, q_len, heads, dim, dtype=dtype))
        mask_len = s.integer(q_len, 8)
        words = torch.ones(bs, q_len, dtype=torch.int64) << s.ids(mask_len, bs, q_len)
        queries = s.pick((None, 0), (s.to(words), mask_len))
    csr = (torch.zeros(bs + 1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), lens.clone())
    optional = s.pick((None, None, None), (s.to(csr[0]), s.to(csr[1]), csr[2]))
    sinks = s.pick(None, s.to(s.normal(heads)))
    softmax = (0.3, s.pick(-1, 0, 2), sinks, s.pick(0.0, 4.0))
    bound = s.pick(None, width * page_size)
    tables = s.to(s.ids(pages, bs, width, dtype=torch.int32))
    return (q, *pool, tables, s.to(lens), *queries, *optional, *softmax, *scales, bound, "auto")


def distinct_slots(s: Source, capacity: int, n: int) -> torch.Tensor:
    """`n` different slots, some of them dropped."""
    slots = torch.randperm(capacity, generator=s.generator)[:n]
    return s.to(torch.where(torch.rand(n, generator=s.generator) < 0.3, -1, slots).to(s.pick(*INDEX)))


def append_kv_sample(s: Source) -> tuple[Any, ...]:
    pages, page_size, heads, dim, v_dim = (s.integer(1, 4) for _ in range(5))
    cache_dtype = s.cache_dtype(*FLOATS)
    dtype = s.pick(*FLOATS) if cache_dtype == FP8 else cache_dtype
    n = s.integer(0, pages * page_size)
    caches = [s.laid_out(s.normal(pages, page_size, heads, d, dtype=cache_dtype)) for d in (dim, v_dim)]
    rows = [s.any_layout(s.normal(n, heads, d, dtype=dtype)) for d in (dim, v_dim)]
    scales = (0.5, 2.0) if cache_dtype == FP8 else (1.0, 1.0)
    return (*caches, *rows, distinct_slots(s, pages * page_size, n), *scales)


def rope_append_kv_sample(s: Source) -> tuple[Any, ...]:
    k_cache, v_cache, k, v, slots, *scales = append_kv_sample(s)
    n, _, dim = k.shape
    dtype = k_cache.dtype if k_cache.dtype != FP8 else k.dtype
    pad = [torch.nn.functional.pad(x, (0, 1)) if dim < 2 else x for x in (k_cache.float(), k.float())]  # a pair to rotate
    k_cache, k = s.laid_out(pad[0].to(k_cache.dtype)), s.any_layout(pad[1].to(dtype))
    half = s.integer(1, k.shape[-1] // 2)
    q = s.any_layout(s.normal(n, s.integer(1, 9), k.shape[-1], dtype=dtype))
    angles = [s.any_layout(s.normal(n, half)) for _ in range(2)]
    norms = [s.to(s.normal(k.shape[-1], dtype=s.pick(*FLOATS))) if s.pick(False, True) else None for _ in range(2)]
    return (q, k, v.to(dtype), *angles, k_cache, v_cache, slots, *scales, *norms, s.pick(1e-6, 0.5))


def stored_weight(s: Source, n: int, k: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """A weight of 16, 8 or 4 bits, its scale, its zero, and perhaps its tensor's scale."""
    bits = 8 if s.fp8 else s.pick(16, 4) if s.fp8 is not None else s.pick(16, 8, 4)
    if bits == 16:
        return s.normal(n, k, dtype=dtype).to(s.device), None, None
    if bits == 8:
        scale = s.any_layout(s.normal(*s.pick((1, 1), (n, 1), (n, k // 64), (-(-n // 128), -(-k // 128))))) if n else None
        scale = s.to(s.normal(0, 1)) if scale is None else scale
        return s.to(s.normal(n, k, dtype=FP8)), scale, None
    packed = s.ids(256, n, k // 2, dtype=torch.int64).sub(128).to(torch.int8).to(s.device)
    if s.pick(False, False, True):
        return packed, s.any_layout(s.ids(144, n, k // 32, dtype=torch.uint8)), None
    if s.fp8 is not False and s.pick(False, True):
        return packed, s.any_layout(s.normal(n, k // 16, dtype=FP8)), None, s.pick(None, s.to(s.normal(1)))
    dtype = s.pick(*FLOATS)
    scale, zero = (s.any_layout(s.normal(n, k // s.pick(32, 64), dtype=dtype)) for _ in range(2))
    return packed, scale, zero if s.pick(False, True) and zero.shape == scale.shape else None


def skinny_mm_sample(s: Source) -> tuple[Any, ...]:
    m, n, k = s.integer(0, 5), s.integer(0, 70), 128 * s.integer(1, 3)
    dtype = s.pick(*FLOATS[1:])
    weight, *scales = stored_weight(s, n, k, dtype)
    x = s.any_layout(s.normal(m, k, dtype=dtype))
    return x, weight, s.any_layout(s.normal(n, dtype=dtype)) if s.pick(False, True) else None, *scales


def float8_mm_sample(s: Source) -> tuple[Any, ...]:
    if s.device != "cpu" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for sm_90")
    m, n, k = s.integer(0, 5), s.integer(0, 300), 128 * s.integer(1, 3)
    x, weight = (s.to(s.normal(rows, k, dtype=FP8)) for rows in (m, n))
    sizes = s.pick((1, 1), (m, 1), (m, k // 128)), s.pick((1, 1), (n, 1), (-(-n // 128), k // 128))
    x_scale, scale = (s.any_layout(s.normal(*size, dtype=s.pick(*FLOATS))) for size in sizes)
    bias = s.any_layout(s.normal(n, dtype=s.pick(*FLOATS))) if s.pick(False, True) else None
    return x, x_scale, weight, scale, bias, s.pick(*(FLOATS if s.device == "cpu" else FLOATS[1:]))


def dequantize_sample(s: Source) -> tuple[Any, ...]:
    n, k, scale = s.integer(0, 70), 128 * s.integer(1, 3), None
    while scale is None:  # not a plain weight
        weight, scale, *more = stored_weight(s, n, k, torch.bfloat16)
        s.fp8 = True if scale is None else s.fp8
    zero, tensor_scale = (*more, None)[:2]
    return weight.view(torch.uint8) if weight.dtype == torch.int8 else weight, scale, zero, tensor_scale, s.pick(*FLOATS)


def rounding_sample(s: Source, norm: bool) -> tuple[Any, ...]:
    """Rows, and how they are rounded."""
    dtype = s.pick(*(FLOATS if s.device == "cpu" else FLOATS[1:]))
    m, k = s.integer(0, 5), s.pick(s.integer(1, 70), 128 * s.integer(1, 3))
    columns = s.pick(k, 128 if k % 128 == 0 else k)
    step = s.to(s.normal(1, dtype=s.pick(*FLOATS)).abs() + 0.1) if s.pick(False, True) else None
    how = (columns, s.pick(torch.float32, dtype), s.pick(torch.float32, dtype), s.pick(0.0, 1e-30), s.pick(0.0, 0.5), step)
    x = s.laid_out(s.normal(m, k, dtype=dtype))
    return x, (s.to(s.normal(k, dtype=dtype)), 1e-5, s.integer(0, 2), *how) if norm else how


def round_rows_sample(s: Source) -> tuple[Any, ...]:
    x, how = rounding_sample(s, norm=False)
    return x, *how


def gated_round_rows_sample(s: Source) -> tuple[Any, ...]:
    x, how = rounding_sample(s, norm=False)
    return x, s.laid_out(s.normal(*x.shape, dtype=x.dtype)), s.pick("silu", "gelu", "gelu_tanh"), *how


def norm_round_rows_sample(s: Source) -> tuple[Any, ...]:
    x, how = rounding_sample(s, norm=True)
    return x, *how


def add_norm_round_rows_sample(s: Source) -> tuple[Any, ...]:
    x, how = rounding_sample(s, norm=True)
    return x, s.laid_out(s.normal(*x.shape, dtype=x.dtype)), *how


def batched_mm_sample(s: Source) -> tuple[Any, ...]:
    batch, m, n, k, dtype = s.integer(0, 3), s.integer(0, 5), s.integer(0, 40), s.integer(1, 70), s.pick(*FLOATS)
    a, b = (s.any_layout(s.normal(*shape, dtype=dtype)) for shape in ((batch, m, k), (batch, k, n)))
    return a, b, s.any_layout(s.normal(n, dtype=dtype)) if s.pick(False, True) else None


def row_sum_sample(s: Source) -> tuple[Any, ...]:
    return (s.any_layout(s.normal(s.integer(0, 5), s.integer(0, 70), dtype=s.pick(*FLOATS))),)


def rms_norm_sample(s: Source) -> tuple[Any, ...]:
    m, n, dtype = s.integer(0, 5), s.integer(1, 70), s.pick(*FLOATS)
    weight = s.any_layout(s.normal(n, dtype=dtype)) if s.pick(False, True) else None
    return s.any_layout(s.normal(m, n, dtype=dtype)), weight, 1e-5, s.pick(False, True)


def add_rms_norm_sample(s: Source) -> tuple[Any, ...]:
    x, *norm = rms_norm_sample(s)
    return x, s.any_layout(s.normal(*x.shape, dtype=x.dtype)), *norm


def add_skinny_mm_sample(s: Source) -> tuple[Any, ...]:
    x, weight, _, *stored = skinny_mm_sample(s)
    m, n = x.shape[0], weight.shape[0]
    return x, weight, s.any_layout(s.normal(m, n, dtype=x.dtype)), s.any_layout(s.normal(n, dtype=x.dtype)), *stored


def squares(s: Source, m: int, columns: int) -> torch.Tensor:
    return s.any_layout(s.normal(m, sums_of(columns)) ** 2)


def scaled_skinny_mm_sample(s: Source) -> tuple[Any, ...]:
    x, weight, bias, *stored = skinny_mm_sample(s)
    return x, weight, bias, squares(s, *x.shape), 1e-5, *stored


def scaled_silu_mul_sample(s: Source) -> tuple[Any, ...]:
    m, n, columns = s.integer(0, 5), s.integer(0, 70), s.integer(1, 100)
    both = s.laid_out(s.normal(m, 2 * n, dtype=s.pick(*FLOATS[1:])))
    gate, up = both.chunk(2, -1) if n else (both, both)
    return gate, s.pick(up, up.clone()), squares(s, m, columns), columns, 1e-5


def all_reduce_sample(s: Source) -> tuple[Any, ...]:
    """Floating point, since gradients are asked of it; integers are in `test_collectives.py`."""
    x = s.any_layout(s.normal(s.integer(0, 3), 16 * s.integer(1, 4), dtype=s.pick(*FLOATS[1:])))
    return x, "sum", alone(s.device)


def all_reduce_add_sample(s: Source) -> tuple[Any, ...]:
    x, _, group = all_reduce_sample(s)
    m, n = x.shape
    return x, s.any_layout(s.normal(m, n, dtype=x.dtype)), s.any_layout(s.normal(n, dtype=x.dtype)), group


def concatenate_sample(s: Source) -> tuple[Any, ...]:
    shape = [s.integer(1, 4) for _ in range(s.integer(1, 3))]
    dim, dtype = s.integer(0, len(shape) - 1), s.pick(*FLOATS)
    pieces = [s.any_layout(s.normal(*shape[:dim], s.integer(0, 4), *shape[dim + 1 :], dtype=dtype)) for _ in range(3)]
    return [piece.contiguous() for piece in pieces], dim


def append_mla_kv_sample(s: Source) -> tuple[Any, ...]:
    pages, page_size, rank, rope = (s.integer(1, 4) for _ in range(4))
    cache_dtype = s.cache_dtype(*FLOATS)
    dtype = s.pick(*FLOATS) if cache_dtype == FP8 else cache_dtype
    n = s.integer(0, pages * page_size)
    cache = s.laid_out(s.normal(pages, page_size, rank + rope, dtype=cache_dtype))
    rows = [s.any_layout(s.normal(n, d, dtype=dtype)) for d in (rank, rope)]
    return (cache, *rows, distinct_slots(s, pages * page_size, n), 0.5 if cache_dtype == FP8 else 1.0)


def move_kv_sample(s: Source) -> tuple[Any, ...]:
    pages, page_size = s.integer(1, 4), s.integer(1, 4)
    n, dtype = s.integer(0, pages * page_size), s.cache_dtype(*FLOATS)
    shapes = [(2, 4), (3,), (1, 2)][: s.integer(1, 3)]
    caches = [s.laid_out(s.normal(pages, page_size, *shape, dtype=dtype)) for shape in shapes]
    src, dst = (distinct_slots(s, pages * page_size, n) for _ in range(2))
    return caches, src, dst


def route_experts_sample(s: Source) -> tuple[Any, ...]:
    groups, size = s.integer(1, 4), s.integer(2, 5)
    top_groups = s.integer(1, groups)
    logits = s.any_layout(s.normal(s.integer(0, 4), groups * size, dtype=s.pick(*FLOATS)))
    bias = s.pick(None, s.to(s.normal(groups * size)))
    k, scoring = s.integer(1, size * top_groups), s.pick("softmax", "sigmoid", "none")
    return logits, bias, k, scoring, groups, top_groups, s.pick(False, True), s.pick(1.0, 2.5), s.pick(*FLOATS)


def moe_experts_sample(s: Source) -> tuple[Any, ...]:
    tokens, k, experts, hidden, inner = s.integer(0, 4), s.integer(0, 3), s.integer(1, 5), s.integer(1, 9), s.integer(1, 7)
    dtype, gated, transposed = s.pick(*FLOATS), s.pick(False, True), s.pick(False, True)
    rows = inner * (2 if gated else 1)
    first, second = (experts, rows, hidden), (experts, hidden, inner)
    if transposed:
        first, second = (experts, hidden, rows), (experts, inner, hidden)
    stacks = [s.any_layout(s.normal(*shape, dtype=dtype)) for shape in (first, second)]
    biases = s.pick((None, None), [s.any_layout(s.normal(experts, width, dtype=dtype)) for width in (rows, hidden)])
    ids = s.any_layout(s.ids(experts + 1, tokens, k, dtype=s.pick(*INDEX)) - 1)
    weights = s.any_layout(s.normal(tokens, k, dtype=s.pick(*FLOATS)))
    activation = s.pick("silu", "gelu", "gelu_tanh", "relu", "relu2")
    numbers = (s.pick(None, 0.5) if gated else None, 1.7 if activation == "silu" else 1.0, 1.0 if gated else 0.0)
    x = s.any_layout(s.normal(tokens, hidden, dtype=dtype))
    return x, ids, weights, *stacks, *biases, activation, gated, gated and s.pick(False, True), transposed, *numbers, None, None


def any_experts_sample(s: Source) -> tuple[Any, ...]:
    return (stored_experts_sample if s.fp8 else s.pick(moe_experts_sample, stored_experts_sample))(s)


def scaled_moe_experts_sample(s: Source) -> tuple[Any, ...]:
    args = any_experts_sample(s)
    return *args, squares(s, *args[0].shape), 1e-5


def add_moe_experts_sample(s: Source) -> tuple[Any, ...]:
    *args, sums, eps = scaled_moe_experts_sample(s)
    (tokens, hidden), dtype = args[0].shape, args[0].dtype
    residual, weight = s.any_layout(s.normal(tokens, hidden, dtype=dtype)), s.any_layout(s.normal(hidden, dtype=dtype))
    return *args, s.pick(sums, None), eps, residual, weight


def stored_experts_sample(s: Source) -> tuple[Any, ...]:
    """In 8 and 4 bits, with gate and up projection beside or between each other."""
    tokens, k, experts, parts = s.integer(0, 4), s.integer(0, 3), s.integer(1, 4), s.pick(1, 2)
    hidden, inner = 32 * s.integer(1, 5), 32 * s.integer(1, 5)
    x, ids = (
        s.any_layout(s.normal(tokens, hidden, dtype=s.pick(*FLOATS))),
        s.to(s.ids(experts, tokens, k, dtype=s.pick(*INDEX))),
    )
    kind = s.pick("block", "row", "expert") if s.fp8 else "MXFP4" if s.fp8 is not None else s.pick("block", "MXFP4")
    stacks = [0.1 * s.normal(experts, 2 * inner, hidden), 0.1 * s.normal(experts, hidden, inner)]
    (gate_up, first), (down, second) = (stored_stack(w.cpu(), kind, n) for w, n in zip(stacks, (parts, 1), strict=True))
    device = x.device
    form = ("silu", True, parts == 1, False, None, 1.0, 0.0)
    stored = [s.any_layout(t.to(device)) for t in (gate_up, down)]
    return x, ids, s.to(s.normal(tokens, k)), *stored, None, None, *form, first.to(device), second.to(device)


def with_out(name: str, s: Source) -> tuple[Any, ...]:
    kind, step = name.split("_", 1)
    q, cache, second, *rest = attention_sample(kind, step, s)
    v_dim = second.shape[-1] if kind == "mha" else second
    return q, cache, second, *rest, q.new_full((*q.shape[:-1], v_dim), 7.0)


SAMPLES: dict[str, Callable[[Source], tuple[Any, ...]]] = {
    **{
        f"{kind}_{step}{plan}": (lambda s, kind=kind, step=step: attention_sample(kind, step, s))
        for kind in ("mha", "mla")
        for step in ATTENTION_STEPS
        for plan in ("", ".host_plan")
    },
    **{
        f"{name}_out": (lambda s, name=name: with_out(name, s))
        for name in (f"{kind}_{step}" for kind in ("mha", "mla") for step in ATTENTION_STEPS)
    },
    "append_kv": append_kv_sample,
    "append_mla_kv": append_mla_kv_sample,
    "append_kv_lowered": append_kv_sample,
    "append_mla_kv_lowered": append_mla_kv_sample,
    "append_kv.by": lambda s: (*append_kv_sample(s), "reference"),
    "append_mla_kv.by": lambda s: (*append_mla_kv_sample(s), "reference"),
    "rope_append_kv": rope_append_kv_sample,
    "move_kv": move_kv_sample,
    "route_experts": route_experts_sample,
    "moe_experts": any_experts_sample,
    "scaled_moe_experts": scaled_moe_experts_sample,
    "add_moe_experts": add_moe_experts_sample,
    "skinny_mm": skinny_mm_sample,
    "float8_mm": float8_mm_sample,
    "dequantize": dequantize_sample,
    "round_rows": round_rows_sample,
    "gated_round_rows": gated_round_rows_sample,
    "norm_round_rows": norm_round_rows_sample,
    "add_norm_round_rows": add_norm_round_rows_sample,
    "batched_mm": batched_mm_sample,
    "row_sum": row_sum_sample,
    "rms_norm": rms_norm_sample,
    "add_rms_norm": add_rms_norm_sample,
    "add_skinny_mm": add_skinny_mm_sample,
    "scaled_skinny_mm": scaled_skinny_mm_sample,
    "scaled_silu_mul": scaled_silu_mul_sample,
    "concatenate": concatenate_sample,
    "all_reduce": all_reduce_sample,
    "all_reduce_add": all_reduce_add_sample,
    **DECODING_SAMPLES,
}


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload_name = name.partition(".")
    return getattr(getattr(torch.ops.spec_ops, packet), overload_name or "default")


# Seeds rather than single cases: each draws other dtypes, layouts, optional inputs and sizes, empty ones among them. Two for
# opcheck, of which one is traced, and one with fp8: of a fake the random samples below show more.
SEEDS = range(4)
WITH_FP8 = [name for name in SAMPLES if name.startswith(("mha", "mla", "append", "move", "rope", "moe")) or "skinny" in name]

ALWAYS_FP8 = ["dequantize", "float8_mm", "round_rows", "gated_round_rows", "norm_round_rows", "add_norm_round_rows"]


def sample(name: str, seed: int, device: str, fp8: bool) -> tuple[Any, ...]:
    """Of each argument of the op's schema; of those that the samples leave out the default."""
    args = SAMPLES[name](Source(random.Random(f"{name}{seed}").randint, device, fp8))
    return (*args, *(argument.default_value for argument in overload(name)._schema.arguments[len(args) :]))


def flat_tensors(arg: Any) -> list[torch.Tensor]:
    items = arg if isinstance(arg, (list, tuple)) else [arg]
    return [item for item in items if isinstance(item, torch.Tensor)]
