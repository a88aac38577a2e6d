"""`torch.library.opcheck` and fake-against-real metadata for every operator registered in the namespace.

A sample generator draws one valid argument list in schema order from any source of integers, so the same generators serve the
fixed samples of opcheck and the random ones of hypothesis.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests.generate_tests import DEFAULT_TEST_UTILS

import spec_ops
from spec_ops.backends.squares import sums_of
from tests.helpers.groups import alone
from tests.helpers.mixtures import stored_stack
from tests.helpers.wrong_calls import CALLS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
INDEX = (torch.int32, torch.int64)
ATTENTION_STEPS = ("draft_decode", "target_verify", "draft_extend", "extend")


class Source:
    """Where a sample generator gets its choices from."""

    def __init__(self, integer: Callable[[int, int], int], device: str, fp8: bool | None = None) -> None:
        self.integer = integer
        self.device = device
        self.fp8 = fp8  # whether caches and weights are fp8; None: sometimes
        self.generator = torch.Generator().manual_seed(integer(0, 1000))

    def pick(self, *options: Any) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def cache_dtype(self, *options: torch.dtype) -> torch.dtype:
        fp8 = self.pick(False, True) if self.fp8 is None else self.fp8
        return FP8 if fp8 else self.pick(*options)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in one of four memory layouts; the last dimension stays contiguous."""
        tensor = tensor.to(self.device)
        layout = self.integer(0, 3)
        if layout == 1 and tensor.dim() > 1:  # a slice of something wider
            return tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)[..., : tensor.shape[-1]].copy_(tensor)
        if layout == 2 and tensor.dim() > 2:  # the first two dimensions swapped in memory
            return tensor.transpose(0, 1).contiguous().transpose(0, 1)
        return tensor

    def any_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `laid_out`, but the last dimension may be strided too: for tensors that are no caches."""
        tensor = self.laid_out(tensor)
        if tensor.dim() > 1 and self.integer(0, 3) == 0:
            return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        return tensor

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return self.any_layout(torch.rand(shape, generator=self.generator))

    def ids(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(dtype)

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


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


def pool_sample(s: Source, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, bs = s.integer(1, 4), s.integer(0, 3)
    table = s.any_layout(s.ids(1000, rows, context, dtype=torch.int32))
    dtype = s.pick(*INDEX)
    return table, s.to(s.ids(rows, bs, dtype=dtype)), s.to(s.ids(12, bs, dtype=dtype))


def page_table_sample(s: Source) -> tuple[Any, ...]:
    page_size = s.integer(1, 8)
    return (*pool_sample(s, 24), page_size, s.integer(-(-12 // page_size), -(-24 // page_size)))


def kv_indices_sample(s: Source) -> tuple[Any, ...]:
    table, rows, lens = pool_sample(s, 16)
    return table, rows, lens, int(lens.sum()) + s.integer(0, 5)


def draft_kv_indices_sample(s: Source, every_step: bool) -> tuple[Any, ...]:
    num_steps, topk, page_size = s.integer(1, 3), s.integer(1, 3), s.integer(1, 4)
    table, rows, lens = pool_sample(s, 12 + topk * (num_steps + 2 * page_size))
    capacity = topk * (int(lens.sum()) + lens.numel() * num_steps) + s.integer(0, 5)
    if every_step:
        return (table, rows, lens, num_steps, topk, page_size, capacity, s.integer(1, num_steps))
    return (table, rows, lens, s.integer(0, num_steps - 1), num_steps, topk, page_size, capacity)


def tree_parents(s: Source, bs: int, nodes: int) -> torch.Tensor:
    rows = [[-1, *(int(s.ids(node)) for node in range(1, nodes))] for _ in range(bs)]
    return s.to(torch.tensor(rows, dtype=torch.int64).reshape(bs, nodes))


def accept_greedy_sample(s: Source) -> tuple[Any, ...]:
    bs, nodes = s.integer(0, 3), s.integer(1, 6)
    tokens = [s.any_layout(s.ids(3, bs, nodes, dtype=s.pick(*INDEX))) for _ in range(2)]
    parents = s.pick(None, tree_parents(s, bs, nodes))
    return (*tokens, parents, nodes if parents is None else s.integer(1, nodes))


def accept_sampled_sample(s: Source) -> tuple[Any, ...]:
    bs, nodes, vocab = s.integer(0, 3), s.integer(1, 5), s.integer(2, 6)
    mode = s.pick("chain", "tree", "rejection", "reduced_vocabulary")
    draft_vocab = s.integer(1, vocab) if mode == "reduced_vocabulary" else vocab
    candidates = s.any_layout(s.ids(draft_vocab, bs, nodes, dtype=s.pick(*INDEX)))
    target_probs = s.any_layout(torch.softmax(s.normal(bs, nodes, vocab), -1))
    parents = tree_parents(s, bs, nodes) if mode == "tree" else None
    draft_probs, draft_to_target = None, None
    if mode in ("rejection", "reduced_vocabulary"):
        draft_probs = s.any_layout(torch.softmax(s.normal(bs, nodes - 1, draft_vocab), -1))
    if mode == "reduced_vocabulary":
        draft_to_target = s.to(torch.randperm(vocab, generator=s.generator)[:draft_vocab])
    path_len = s.integer(1, nodes) if mode == "tree" else nodes
    thresholds = (1.0, 1.0) if draft_probs is not None else s.pick((1.0, 1.0), (0.5, 0.7))
    uniforms = (s.uniform(bs, nodes), s.uniform(bs))
    return (candidates, target_probs, *uniforms, parents, draft_probs, draft_to_target, path_len, *thresholds)


def accept_sampled_logits_sample(s: Source) -> tuple[Any, ...]:
    bs, nodes, vocab = s.integer(0, 3), s.integer(1, 5), s.integer(2, 6)
    mode = s.pick("chain", "tree", "rejection", "reduced_vocabulary", "block")
    draft_vocab = s.integer(1, vocab) if mode == "reduced_vocabulary" else vocab
    temperature = s.to(s.ids(3, bs) / 2)
    target_logits = s.any_layout(s.normal(bs, nodes, vocab, dtype=s.pick(*FLOATS)))
    target = (target_logits, spec_ops.sampling_support(target_logits, temperature, s.pick(None, s.to(s.ids(vocab, bs)))))
    candidates = s.any_layout(s.ids(vocab, bs, nodes, dtype=s.pick(*INDEX)))
    parents = tree_parents(s, bs, nodes) if mode == "tree" else None
    draft: tuple[Any, ...] = (None, None, None)
    if mode in ("rejection", "reduced_vocabulary", "block"):
        draft_logits = s.any_layout(s.normal(bs, nodes - 1, draft_vocab, dtype=s.pick(*FLOATS)))
        draft = (draft_logits, spec_ops.sampling_support(draft_logits, temperature), None)
    if mode == "reduced_vocabulary":
        ids = torch.full((vocab,), -1)
        ids[torch.randperm(vocab, generator=s.generator)[:draft_vocab]] = torch.arange(draft_vocab)
        draft = (*draft[:2], s.to(ids))
    path_len = s.integer(1, nodes) if mode == "tree" else nodes
    thresholds = (1.0, 1.0) if draft[0] is not None else s.pick((1.0, 1.0), (0.5, 0.7))
    uniforms = (s.uniform(bs, nodes), s.uniform(bs))
    return (candidates, *target, *uniforms, temperature, parents, *draft, path_len, *thresholds, mode == "block")


def sampling_sample(s: Source) -> tuple[Any, ...]:
    bs, vocab = s.integer(0, 3), s.integer(1, 7)
    logits = s.any_layout(s.normal(*s.pick((bs, vocab), (bs, s.integer(0, 3), vocab)), dtype=s.pick(*FLOATS)))
    temperature = s.to(s.ids(3, bs) / 2)
    top_k = s.pick(None, s.to(s.ids(vocab + 1, bs, dtype=s.pick(*INDEX))))
    return logits, temperature, top_k, s.pick(None, s.uniform(bs)), s.pick(None, s.uniform(bs))


def sample_logits_sample(s: Source) -> tuple[Any, ...]:
    logits, *settings = sampling_sample(s)
    return logits, s.uniform(*logits.shape[:-1]), *settings


def sample_tokens_sample(s: Source) -> tuple[Any, ...]:
    shape = s.pick((), (s.integer(0, 3),), (s.integer(0, 3), 2), (2, 3, 2))
    return s.uniform(*shape, s.integer(1, 7)), s.uniform(*shape)


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


def select_draft_tokens_sample(s: Source) -> tuple[Any, ...]:
    bs, width = s.integer(0, 3), s.integer(1, 12)
    return s.uniform(bs, width), s.any_layout(s.ids(50, bs, width, dtype=s.pick(*INDEX))), s.integer(1, width)


def build_tree_sample(s: Source) -> tuple[Any, ...]:
    """A draft of two steps of width K, of which the K first candidates and some of their children are selected."""
    bs, topk = s.integer(0, 3), s.integer(1, 3)
    parent_list = torch.cat([torch.tensor([-1]), torch.arange(topk)]).expand(bs, -1)
    extra = s.integer(0, topk * topk)
    children = [torch.randperm(topk * topk, generator=s.generator)[:extra].sort().values + topk for _ in range(bs)]
    first = torch.arange(topk)
    selected = torch.stack([torch.cat([first, c]) for c in children]) if bs else torch.zeros(0, topk + extra, dtype=torch.int64)
    lens = s.to(s.ids(100, bs, dtype=s.pick(*INDEX)))
    return s.any_layout(parent_list), s.any_layout(selected), lens, topk


def with_out(name: str, s: Source) -> tuple[Any, ...]:
    kind, step = name.split("_", 1)
    q, cache, second, *rest = attention_sample(kind, step, s)
    v_dim = second.shape[-1] if kind == "mha" else second
    return q, cache, second, *rest, q.new_full((*q.shape[:-1], v_dim), 7.0)


def page_table_out_sample(s: Source) -> tuple[Any, ...]:
    *source, page_size, pages = page_table_sample(s)
    rows = source[1].shape[0] + s.integer(0, 2)
    return *source, page_size, s.to(torch.full((rows, pages + 3), -1, dtype=torch.int32))[:, s.pick(0, 2) :][:, :pages]


def full_mask_words_sample(s: Source) -> tuple[Any, ...]:
    lens, nodes = s.ids(9, s.integer(0, 3), dtype=s.pick(*INDEX)), s.integer(1, 8)
    total = int((nodes * (lens + nodes)).sum()) + s.integer(0, 5)
    return s.to(s.ids(2, total) > 0), s.to(lens), nodes


def lookup_drafts_sample(s: Source) -> tuple[Any, ...]:
    bs, width, max_ngram = s.integer(0, 3), s.integer(0, 12), s.integer(1, 4)
    tokens = s.any_layout(s.ids(2, bs, width, dtype=s.pick(*INDEX)))
    lens = s.to(s.ids(width + 1, bs, dtype=s.pick(*INDEX)))
    return tokens, lens, s.integer(1, 6), max_ngram, s.integer(1, max_ngram)


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
    "page_table_out": page_table_out_sample,
    "full_mask_words": full_mask_words_sample,
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
    "page_table": page_table_sample,
    "kv_indices": kv_indices_sample,
    "draft_kv_indices": lambda s: draft_kv_indices_sample(s, every_step=False),
    "draft_kv_indices_steps": lambda s: draft_kv_indices_sample(s, every_step=True),
    "accept_greedy": accept_greedy_sample,
    "accept_sampled": accept_sampled_sample,
    "accept_sampled_logits": accept_sampled_logits_sample,
    "sampling_support": sampling_sample,
    "sample_logits": sample_logits_sample,
    "sampling_probs": sampling_sample,
    "sample_tokens": sample_tokens_sample,
    "select_draft_tokens": select_draft_tokens_sample,
    "build_tree": build_tree_sample,
    "lookup_drafts": lookup_drafts_sample,
}


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload_name = name.partition(".")
    return getattr(getattr(torch.ops.spec_ops, packet), overload_name or "default")


def test_every_registered_op_has_samples():
    """The dispatcher's own list, so that an operator added anywhere in the package shows up here."""
    registered = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("spec_ops::")}
    assert {name.removesuffix(".default") for name in registered} == set(SAMPLES)


# Seeds rather than single cases: each draws other dtypes, layouts, optional inputs and sizes, empty ones among them. Two for
# opcheck, of which one is traced, and one with fp8: of a fake the random samples below show more.
SEEDS = range(4)
WITH_FP8 = [name for name in SAMPLES if name.startswith(("mha", "mla", "append", "move", "rope", "moe")) or "skinny" in name]

ALWAYS_FP8 = ["dequantize", "float8_mm", "round_rows", "gated_round_rows", "norm_round_rows", "add_norm_round_rows"]


def sample(name: str, seed: int, device: str, fp8: bool) -> tuple[Any, ...]:
    """Of each argument of the op's schema; of those that the samples leave out the default."""
    args = SAMPLES[name](Source(random.Random(f"{name}{seed}").randint, device, fp8))
    return (*args, *(argument.default_value for argument in overload(name)._schema.arguments[len(args) :]))


TRACING = "test_aot_dispatch_dynamic"


def utilities(*left_out: str) -> list[str]:
    """Opcheck's tests but these."""
    assert set(left_out) <= set(DEFAULT_TEST_UTILS)
    return [name for name in DEFAULT_TEST_UTILS if name not in left_out]


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name, seed, device):
    """To trace, forward and backward with sizes as symbols, is nearly all of the time: once an op."""
    left_out = () if seed == 0 else (TRACING,)
    left_out += ("test_schema",) if name in ALWAYS_FP8 else ()  # as in the next test
    torch.library.opcheck(overload(name), sample(name, seed, device, fp8=False), test_utils=utilities(*left_out))


@pytest.mark.parametrize("seed", SEEDS[2:3])
@pytest.mark.parametrize("name", WITH_FP8)
def test_opcheck_fp8(name, seed, device):
    """Without opcheck's `test_schema`, whose torch.allclose has no fp8 kernel; the next test does its work."""
    torch.library.opcheck(overload(name), sample(name, seed, device, fp8=True), test_utils=utilities("test_schema", TRACING))


def flat_tensors(arg: Any) -> list[torch.Tensor]:
    items = arg if isinstance(arg, (list, tuple)) else [arg]
    return [item for item in items if isinstance(item, torch.Tensor)]


def stored_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "fp8"), [*((name, False) for name in SAMPLES), *((name, True) for name in WITH_FP8)])
def test_schema_tells_what_is_written(name, fp8, seed, device):
    """Byte for byte: an argument changes only if the schema says so, and no output shares an input's memory."""
    args = sample(name, seed, device, fp8)
    schema = overload(name)._schema
    before = [[stored_bytes(t) for t in flat_tensors(arg)] for arg in args]
    outputs = flat_tensors(overload(name)(*args))
    for argument, arg, was in zip(schema.arguments, args, before, strict=True):
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor, bytes_before in zip(flat_tensors(arg), was, strict=True):
            assert written or torch.equal(stored_bytes(tensor), bytes_before), argument.name
            for out in outputs:
                shared = out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                assert not shared or out.untyped_storage().nbytes() == 0, argument.name


def metadata(result: Any) -> list[tuple[Any, ...]]:
    """Shape, dtype, device and the strides that mean something: a dimension of size 1 has none, nor has an empty tensor."""
    results = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
    return [
        (
            tuple(r.shape),
            r.dtype,
            r.device.type,
            [stride for size, stride in zip(r.shape, r.stride(), strict=True) if size > 1] if r.numel() else None,
        )
        for r in results
    ]


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_fake_agrees_with_real(name, data, device):
    """Inductor allocates and indexes by the fake's strides: a real result laid out otherwise would be read wrongly."""
    args = SAMPLES[name](Source(lambda low, high: data.draw(st.integers(low, high)), device))
    mode = FakeTensorMode()

    def fake(arg):
        if isinstance(arg, list):
            return [fake(item) for item in arg]
        return mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg

    faked = [fake(arg) for arg in args]
    real = overload(name)(*args)
    with mode:
        assert metadata(overload(name)(*faked)) == metadata(real)


# Converters from and to SGLang's FULL_MASK work on host lengths, and one looks at values: they are not for compiled code.
@pytest.mark.parametrize("name", [name for name in CALLS if "full_mask" not in name])
def test_public_functions_compile_with_dynamic_shapes(name):
    """Validation must not break the graph, nor reject or specialize wrongly when sizes are symbols; caches end up the same."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        call = CALLS[name]()
        function = getattr(spec_ops, name)
        if compiled:
            function = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        results.append([*flat_tensors(function(**call)), *(t for value in call.values() for t in flat_tensors(value))])
    assert len(results[0]) == len(results[1]) > 0
    for eager, got in zip(*results, strict=True):
        assert torch.equal(eager, got)
