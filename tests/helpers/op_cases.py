"""Arguments for the ops that have Triton kernels, and the comparison of a kernel with the CPU reference, bit for bit.

The same cases run in Triton's interpreter (`tests/interpreter/test_ops.py`) and on a GPU (`tests/gpu/test_ops.py`). A case is
the op's arguments in the order of its schema, on CPU.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import torch

from tests.helpers import tree_oracle
from tests.helpers.exact import ALMOST_ONE
from tests.helpers.op_samples import SAMPLES
from tests.helpers.sample_source import Source

FP8 = torch.float8_e4m3fn
# (module of the kernels, module of the references): ops.
FAMILIES = {
    ("cache.append", "kv_cache"): ("append_kv", "append_mla_kv", "move_kv"),
    ("cache.indices", "kv_indices"): (
        "page_table",
        "page_table_out",
        "kv_indices",
        "draft_kv_indices",
        "draft_kv_indices_steps",
    ),
    ("tree.build", "tree"): ("select_draft_tokens", "build_tree"),
    ("tree.full_mask", "tree"): ("full_mask_words",),
    ("drafting.lookup", "lookup"): ("lookup_drafts",),
    ("sampling.accept", "accept"): ("accept_greedy", "accept_sampled"),
    ("sampling.accept", "sampling"): ("sample_tokens",),
}
OPS = {op: modules for modules, ops in FAMILIES.items() for op in ops}
Args = tuple[Any, ...]


def kernel(op: str) -> Callable:
    return getattr(importlib.import_module(f"spec_ops.backends.triton.{OPS[op][0]}"), op)


def reference(op: str) -> Callable:
    return getattr(importlib.import_module(f"spec_ops.ops.reference.{OPS[op][1]}"), op)


class Copy:
    """A copy of arguments on a device: the same strides and offsets in copies of the whole storages, each copied once."""

    def __init__(self, args: Args, device: str) -> None:
        self.device = device
        self.storages: dict[int, torch.Tensor] = {}
        self.args = self._copied(args)

    def _copied(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._copied(v) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.storages:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages[storage.data_ptr()] = raw.to(self.device, copy=True)
        place = self.storages[storage.data_ptr()].untyped_storage()
        empty = torch.empty(0, dtype=value.dtype, device=self.device)
        return empty.set_(place, value.storage_offset(), value.shape, value.stride())

    def bytes(self) -> list[torch.Tensor]:
        return [raw.cpu() for raw in self.storages.values()]


def check(op: str, args: Args, device: str, run: Callable | None = None) -> None:
    """`run` (default: the kernel) returns what the reference does, and leaves the arguments' bytes as it does."""
    expected, given = Copy(args, "cpu"), Copy(args, device)
    wanted, got = reference(op)(*expected.args), (run or kernel(op))(*given.args)
    compare(wanted, got, (op, args))
    for i, (a, b) in enumerate(zip(expected.bytes(), given.bytes(), strict=True)):
        assert torch.equal(a, b), f"{op}: storage {i} differs at bytes {(a != b).nonzero().flatten()[:8].tolist()}: {args}"


def compare(wanted: Any, got: Any, what: Any) -> None:
    wanted, got = ([x] if isinstance(x, torch.Tensor) else list(x or ()) for x in (wanted, got))
    assert len(wanted) == len(got), what
    for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
        assert b.dtype == a.dtype, (i, what)
        assert b.is_contiguous(), (i, what)
        assert torch.equal(a, b.cpu()), (i, a, b, what)


def sampled(op: str, seed: int, fp8: bool | None) -> Args:
    """opcheck's generators: small shapes, empty ones among them, in every layout."""
    return SAMPLES[op](Source(random.Random(f"{op}{seed}").randint, "cpu", fp8))


class Rng(random.Random):
    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.getrandbits(32)))

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=torch.Generator().manual_seed(self.getrandbits(32)))

    def distinct(self, high: int, n: int) -> torch.Tensor:
        return torch.randperm(high, generator=torch.Generator().manual_seed(self.getrandbits(32)))[:n]

    def index_dtype(self) -> torch.dtype:
        return self.choice([torch.int32, torch.int64])


def cache(rng: Rng, pages: int, page_size: int, row: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A cache of random bytes, NaN among them, in one of the layouts that engines use."""
    size = torch.empty((), dtype=dtype).element_size()

    def pool(*shape: int) -> torch.Tensor:
        return rng.ints(256, *shape[:-1], shape[-1] * size).to(torch.uint8).view(dtype)

    layout = rng.choice(["plain", "layer", "token-major layers", "heads first", "part of a row"])
    if layout == "layer":
        return pool(3, pages, page_size, *row)[1]
    if layout == "token-major layers":
        return pool(pages, page_size, 3, *row)[:, :, 1]
    if layout == "heads first" and len(row) == 2:
        return pool(pages, row[0], page_size, row[1]).transpose(1, 2)
    if layout == "part of a row":
        return pool(pages, page_size, *row[:-1], row[-1] + 16)[..., 8 : 8 + row[-1]]
    return pool(pages, page_size, *row)


def slots(rng: Rng, capacity: int, n: int) -> torch.Tensor:
    """Distinct slots, the last one and -1 among them."""
    found = torch.where(rng.ints(4, n) == 0, -1, rng.distinct(capacity, n))
    if n and capacity - 1 not in found:
        found[rng.randrange(n)] = capacity - 1
    return found.to(rng.index_dtype())


def rows_for(rng: Rng, cache_dtype: torch.dtype, shape: tuple[int, ...], exact: bool) -> tuple[torch.Tensor, float]:
    """`(values, scale)`. `exact`: only values that e4m3 holds after scaling, or beyond its range: the interpreter converts by
    software of its own, which rounds ties up and loses carries (`_convert_float`); a GPU's rounding is the hardware's."""
    if cache_dtype != FP8:
        return rng.tensor(*shape).to(cache_dtype), 1.0
    dtype = rng.choice([torch.float32, torch.bfloat16])
    if not exact:
        return (rng.tensor(*shape) * rng.choice([0.01, 1.0, 100.0])).to(dtype), rng.choice([1.0, 0.5, 0.013, 3.7])
    codes = rng.ints(127, *shape) + 128 * rng.ints(2, *shape)  # codes 127 and 255 are NaN
    values = codes.to(torch.uint8).view(FP8).float()
    scale = rng.choice([1.0, 0.25, 8.0])
    return torch.where(rng.ints(9, *shape) == 0, 600 * scale * values.sign(), values * scale).to(dtype), scale


def append_kv(rng: Rng, exact_fp8: bool) -> Args:
    page_size, dtype = rng.choice([1, 16, 64]), rng.choice([torch.float32, torch.bfloat16, torch.float16, FP8])
    n, heads = rng.choice([1, 2, 5, 17]), rng.choice([1, 2, 3])
    k_dim, v_dim = rng.choice([(8, 8), (64, 64), (24, 8), (96, 96), (16, 128)])
    pages = -(-(n + 3) // page_size) + 1
    (k, k_scale), (v, v_scale) = (rows_for(rng, dtype, (n, heads, d), exact_fp8) for d in (k_dim, v_dim))
    if rng.random() < 0.3:  # a part of a fused projection
        k = torch.cat([k, k], 1)[:, heads:]
    v = v.to(k.dtype)
    caches = (cache(rng, pages, page_size, (heads, d), dtype) for d in (k_dim, v_dim))
    return *caches, k, v, slots(rng, pages * page_size, n), k_scale, v_scale


def append_mla_kv(rng: Rng, exact_fp8: bool) -> Args:
    page_size, dtype = rng.choice([1, 16, 64]), rng.choice([torch.float32, torch.bfloat16, torch.float16, FP8])
    n, (rank, rope) = rng.choice([1, 2, 5, 17]), rng.choice([(32, 8), (48, 16), (16, 0), (512, 64)])
    pages = -(-(n + 3) // page_size) + 1
    rows, scale = rows_for(rng, dtype, (n, rank + rope), exact_fp8)
    place = cache(rng, pages, page_size, (rank + rope,), dtype)
    return place, rows[:, :rank], rows[:, rank:], slots(rng, pages * page_size, n), scale


def move_kv(rng: Rng, exact_fp8: bool) -> Args:
    """Random sources and destinations overlap in chains, cycles and fans; one kind of row, or several."""
    n, page_size = rng.choice([1, 2, 7, 16, 17, 40, 65]), rng.choice([1, 16, 64])
    pages = -(-(n + 3) // page_size) + 1
    kinds = [((2, 16), torch.bfloat16), ((2, 8), torch.bfloat16), ((24,), torch.float32), ((3, 2, 4), FP8)]
    if rng.random() < 0.4:  # layers of one pool, more than are picked among at once
        caches = list(rng.tensor(rng.choice([1, 4, 35]), pages, page_size, 2, 16).bfloat16().unbind(0))
    else:
        caches = [cache(rng, pages, page_size, *kind) for kind in rng.choices(kinds, k=5)]
    src, dst = (slots(rng, pages * page_size, n) for _ in range(2))
    if rng.random() < 0.3:
        src = src.roll(1)  # a repeated source
        src[-1] = src[0]
    return caches, src, dst.to(rng.index_dtype())


def lengths(rng: Rng, bs: int, page_size: int, most: int) -> torch.Tensor:
    edges = [0, 1, page_size - 1, page_size, page_size + 1, most, rng.randint(0, most)]
    return torch.tensor([min(rng.choice(edges), most) for _ in range(bs)], dtype=rng.index_dtype())


def pool(rng: Rng, width: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    bs, rows = rng.choice([1, 2, 5]), 6
    table = rng.ints(2**31 - 1, rows, width + 3).to(torch.int32)[:, rng.choice([0, 3]) :][:, :width]
    return table, rng.distinct(rows, bs).to(rng.index_dtype()), bs


def page_table(rng: Rng, exact_fp8: bool) -> Args:
    page_size, width = rng.choice([1, 16, 64]), rng.choice([65, 130, 1500])
    table, rows, bs = pool(rng, width)
    pages = rng.randint(1, -(-width // page_size))
    return table, rows, lengths(rng, bs, page_size, min(width, pages * page_size)), page_size, pages


def page_table_out(rng: Rng, exact_fp8: bool) -> Args:
    """Into the first rows of a buffer whose rows are longer."""
    *source, page_size, pages = page_table(rng, exact_fp8)
    out = torch.full((source[1].shape[0] + rng.choice([0, 3]), pages + 5), -1, dtype=torch.int32)
    return *source, page_size, out[:, rng.choice([0, 5]) :][:, :pages]


def full_mask_words(rng: Rng, exact_fp8: bool) -> Args:
    nodes, bs = rng.choice([1, 2, 5, 8, 33, 64]), rng.choice([1, 2, 5])
    lens = lengths(rng, bs, 64, 200)
    total = int((nodes * (lens + nodes)).sum()) + rng.choice([0, 100])
    return rng.ints(2, total) > 0, lens, nodes


def kv_indices(rng: Rng, exact_fp8: bool) -> Args:
    table, rows, bs = pool(rng, rng.choice([65, 1500]))
    lens = lengths(rng, bs, 64, table.shape[1])
    return table, rows, lens, int(lens.sum()) + rng.choice([0, 1, 1500])


def drafts(rng: Rng) -> Args:
    page_size, topk, steps = rng.choice([1, 16, 64]), rng.choice([1, 2, 8]), rng.choice([1, 3])
    room = topk * (steps + 2 * page_size)
    table, rows, bs = pool(rng, room + rng.choice([70, 1100]))
    lens = lengths(rng, bs, page_size, table.shape[1] - room)
    capacity = topk * (int(lens.sum()) + bs * steps) + rng.choice([0, 1, 1500])
    return table, rows, lens, steps, topk, page_size, capacity


def draft_kv_indices(rng: Rng, exact_fp8: bool) -> Args:
    *source, steps, topk, page_size, capacity = drafts(rng)
    return *source, rng.randrange(steps), steps, topk, page_size, capacity


def draft_kv_indices_steps(rng: Rng, exact_fp8: bool) -> Args:
    *source, steps, topk, page_size, capacity = drafts(rng)
    return *source, steps, topk, page_size, capacity, rng.randint(1, steps)


SHAPES = [(1, 1), (1, 7), (1, 63), (2, 3), (4, 4), (8, 1), (8, 9)]  # top-k, steps


def draft_batch(rng: Rng) -> tuple[int, list[tree_oracle.Draft]]:
    topk, steps = rng.choice(SHAPES)
    return topk, [tree_oracle.draft(rng, topk, steps, topk + 20) for _ in range(rng.choice([1, 3]))]


def select_draft_tokens(rng: Rng, exact_fp8: bool) -> Args:
    _, batch = draft_batch(rng)
    scores = torch.tensor([d.scores for d in batch])
    kind = rng.choice(["ties", "logs", "any", "special"])
    if kind == "logs":
        scores = scores.log()
    elif kind != "ties":
        scores = rng.tensor(*scores.shape)
    if kind == "special":
        values = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40])
        scores = torch.where(rng.ints(2, *scores.shape) == 0, values[rng.ints(8, *scores.shape)], scores)
    tokens = torch.tensor([d.tokens for d in batch], dtype=rng.index_dtype())
    most = min(scores.shape[1], 63)
    return scores, tokens, rng.choice([1, most, rng.randint(1, most)])


def build_tree(rng: Rng, exact_fp8: bool) -> Args:
    topk, batch = draft_batch(rng)
    most = min(len(batch[0].scores), 63)
    count = rng.choice([most, rng.randint(1, most)])
    selected = torch.tensor([tree_oracle.select(d.scores, count) for d in batch])
    lens = rng.ints(100_000, len(batch)).to(rng.index_dtype())
    parent_list = torch.tensor([d.parent_list for d in batch])
    parent_list[:, 0] = rng.randrange(topk)  # not looked at
    if parent_list.shape[1] == 1:  # drafts of one step: nothing is
        parent_list = rng.ints(topk, len(batch), rng.choice([0, 1, 7]))
    return parent_list, selected, lens, topk


def lookup_drafts(rng: Rng, exact_fp8: bool) -> Args:
    """Texts of a few tokens, or of a part that comes again; lengths at the edges of blocks and parts."""
    bs, width, vocab = rng.choice([1, 2, 5]), rng.choice([1, 7, 64, 129, 700]), rng.choice([1, 2, 3, 50])
    tokens = rng.ints(vocab, bs, width)
    if rng.random() < 0.5:
        period = rng.randint(1, width)
        tokens = torch.where(rng.ints(20, bs, width) == 0, tokens, tokens[:, torch.arange(width) % period])
    edges = [0, 1, 2, 64, 65, 128, 129, width, rng.randint(0, width)]
    lens = torch.tensor([min(rng.choice(edges), width) for _ in range(bs)], dtype=rng.index_dtype())
    max_ngram = rng.choice([1, 2, 5, 64])
    return tokens.to(rng.index_dtype()), lens, rng.choice([1, 3, 8, 63]), max_ngram, rng.choice([1, 2, 5][:max_ngram])


def walk(rng: Rng, vocab: int) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    bs, nodes = rng.choice([1, 2, 5]), rng.choice([1, 2, 4, 8, 33, 64])
    candidates = rng.ints(vocab, bs, nodes).to(rng.index_dtype())
    if rng.random() < 0.4:
        return candidates, None, nodes
    parents = torch.tensor([tree_oracle.random_parents(rng, nodes) for _ in range(bs)])
    return candidates, parents, rng.randint(1, min(nodes, 9))


def accept_greedy(rng: Rng, exact_fp8: bool) -> Args:
    candidates, parents, path_len = walk(rng, rng.choice([1, 3, 50]))
    right = candidates.roll(-1, 1)  # what accepts a whole chain
    target = torch.where(rng.ints(5, *candidates.shape) == 0, rng.ints(50, *candidates.shape), right)
    if rng.random() < 0.2:
        candidates[rng.ints(3, *candidates.shape) == 0] = -1  # no draft there
    candidates[:, 0] = -1  # padding may hold it; the root's own token is not looked at
    return candidates, target.to(rng.index_dtype()), parents, path_len


def uniforms(rng: Rng, *shape: int) -> torch.Tensor:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    edge = torch.tensor([0.0, ALMOST_ONE])[rng.ints(2, *shape)]
    return torch.where(rng.ints(6, *shape) == 0, edge, values)


def dyadic(rng: Rng, *shape: int) -> torch.Tensor:
    """Distributions in 64ths: sums are exact, and uniforms in 128ths often equal them."""
    return torch.nn.functional.one_hot(rng.ints(shape[-1], *shape[:-1], 64), shape[-1]).sum(-2) / 64


def accept_sampled(rng: Rng, exact_fp8: bool) -> Args:
    vocab, heat = rng.choice([1, 6, 6, 50, 513]), rng.choice([1.0, 5.0, 20.0])
    candidates, parents, path_len = walk(rng, vocab)
    bs, nodes = candidates.shape
    target = torch.softmax(rng.tensor(bs, nodes, vocab) * heat, -1)
    if rng.random() < 0.3:
        target = torch.nn.functional.one_hot(candidates.long().roll(-1, 1), vocab).float()
    coins = uniforms(rng, bs, nodes), uniforms(rng, bs)
    exact = vocab == 6 and rng.random() < 0.7
    if exact:
        target, coins = dyadic(rng, bs, nodes, vocab), (rng.ints(128, bs, nodes) / 128, rng.ints(128, bs) / 128)
    if rng.random() < 0.2:
        candidates[rng.ints(3, *candidates.shape) == 0] = -1  # no draft there
    candidates[:, 0] = -1
    if parents is not None or rng.random() < 0.3:
        thresholds = rng.choice([(1.0, 1.0), (0.25, 1.0), (1.0, 0.5), (0.3, 0.7)])
        return candidates, target, *coins, parents, None, None, path_len, *thresholds
    ids = rng.distinct(vocab, rng.randint(1, vocab)) if rng.random() < 0.5 else None
    draft = torch.softmax(rng.tensor(bs, nodes - 1, vocab if ids is None else len(ids)) * heat, -1)
    if exact:
        draft = dyadic(rng, *draft.shape)
    elif ids is None and rng.random() < 0.3:  # near the target: long accepted paths, and residuals of rounding errors
        draft = target[:, :-1] * (1 + 1e-7)
    return candidates, target, *coins, None, draft, ids, path_len, 1.0, 1.0


def sample_tokens(rng: Rng, exact_fp8: bool) -> Args:
    shape = rng.choice([(1,), (5,), (2, 3)])
    probs = torch.softmax(rng.tensor(*shape, rng.choice([1, 7, 64, 513])) * rng.choice([1.0, 20.0]), -1)
    probs = torch.where(rng.ints(3, *probs.shape) == 0, 0.0, probs)  # not normalized; sometimes all zero
    if probs.shape[-1] == 7:
        return dyadic(rng, *probs.shape), rng.ints(128, *shape) / 128
    return probs, uniforms(rng, *shape)


CASES: dict[str, Callable[[Rng, bool], Args]] = {op: globals()[op] for op in OPS}
