"""Cases of `python -m benchmarks kernels`: the grid, and the inputs of each case over one shared KV pool."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernels.accuracy import visible_keys
from spec_ops.ops import attention
from spec_ops.ops.tree import MAX_TREE_TOKENS

KV_SCALE = 0.25  # of fp8 caches: a power of two, so that dequantized values are exact in bfloat16
ROTATE = 4  # buffer sets hold this many times the L2 cache together
MAX_SETS = 64
TREE_FROM = 16  # the default grid has tree masks from this q_len on


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of one attention layer."""

    kind: str  # "gqa" or "mla"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}" if self.kind == "gqa" else str(self.num_heads)

    @property
    def kv_row(self) -> int:
        """Cache elements per token."""
        return self.head_dim if self.kind == "mla" else self.num_kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def scale(self) -> float:
        # MLA: DeepSeek's 128 + 64 before absorption.
        return 1 / math.sqrt(192 if self.kind == "mla" else self.head_dim)


@dataclass(frozen=True)
class Batch:
    """Context lengths of a batch: all `low`, or log-uniform from `low` to `high` (the same draw in every run), but for one in
    the middle of `longest` tokens if that is not 0."""

    bs: int
    low: int
    high: int
    longest: int = 0

    def __str__(self) -> str:
        spread = f"-{self.high}" if self.low != self.high else ""
        return f"{self.bs}x{self.low}{spread}" + (f"+{self.longest}" if self.longest else "")

    @property
    def unequal(self) -> bool:
        return self.low != self.high or self.longest > 0

    @property
    def lengths(self) -> str:
        """In words, for a row."""
        if not self.unequal:
            return "equal"
        return f"log-uniform {self.low}-{self.high}" + (f", one {self.longest}" if self.longest else "")

    def lens(self) -> list[int]:
        rng = random.Random(0)
        bounds = math.log(self.low), math.log(self.high)
        lens = [round(math.exp(rng.uniform(*bounds))) for _ in range(self.bs)] if self.unequal else [self.low] * self.bs
        if self.longest:
            lens[self.bs // 2] = self.longest
        return lens

    def equalized(self) -> Batch:
        """The batch of equal lengths with the same total, to within `bs / 2` tokens."""
        mean = round(sum(self.lens()) / self.bs)
        return Batch(self.bs, mean, mean)


@dataclass(frozen=True)
class Case:
    """One call of the grid."""

    heads: Heads
    batch: Batch
    q_len: int
    mask: str  # "causal" or "tree"
    window: int = -1  # `window_left` of the ops: keys before a query's own that it sees; -1 for all

    def __str__(self) -> str:
        window = f" window {self.window}" if self.window >= 0 else ""
        return f"{self.heads.kind} {self.heads}:{self.heads.head_dim} {self.batch} q_len {self.q_len} {self.mask}{window}"

    def tokens(self) -> int:
        """Whose keys and values are read."""
        return sum(n if self.window < 0 else min(n, self.window + self.q_len) for n in self.batch.lens())

    @property
    def op(self) -> str:
        """Name of the public function: draft decoding for one query, verification for more."""
        prefix = "mha" if self.heads.kind == "gqa" else "mla"
        return f"{prefix}_{'draft_decode' if self.q_len == 1 else 'target_verify'}"


HEADS = (
    Heads("gqa", 32, 8, 128, 128),
    Heads("gqa", 64, 8, 64, 64),
    Heads("mla", 128, 1, 576, 512),
    Heads("mla", 16, 1, 576, 512),
)
BATCHES = ("1x4096", "1x81920", "8x8192", "8x81920", "64x8192", "32x512-65536")
Q_LENS = (1, 4, 16)
QUICK_BATCHES = ("1x4096", "8x8192")
QUICK_Q_LENS = (1, 16)


def parse_heads(text: str) -> Heads:
    """`"32/8"` or `"32/8:64"` (query heads, KV heads, head_dim) is GQA; `"128"` is MLA 512+64 with that many heads."""
    if not (match := re.fullmatch(r"(\d+)(?:/(\d+)(?::(\d+))?)?", text)):
        raise ValueError(f"--heads must look like 32/8, 32/8:128 (GQA) or 128 (MLA), got {text!r}")
    num_heads, num_kv_heads = int(match[1]), int(match[2] or 1)
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"--heads must have query heads divisible by KV heads, got {text!r}")
    if match[2] is None:
        return Heads("mla", num_heads, 1, 576, 512)
    known = {(h.num_heads, h.num_kv_heads): h.head_dim for h in HEADS if h.kind == "gqa"}
    dim = int(match[3] or known.get((num_heads, num_kv_heads), 128))
    if dim < 1:
        raise ValueError(f"--heads must have a positive head_dim, got {text!r}")
    return Heads("gqa", num_heads, num_kv_heads, dim, dim)


def parse_batch(text: str) -> Batch:
    """`"8x8192"`: batch size and context; `"32x512-65536"`: lengths log-uniform between the two; `"48x500-2000+120000"`: but
    for one."""
    if not (match := re.fullmatch(r"(\d+)x(\d+)(?:-(\d+))?(?:\+([1-9]\d*))?", text)):
        raise ValueError(f"--case must look like 8x8192, 32x512-65536 or 48x500-2000+120000, got {text!r}")
    bs, low, high, longest = int(match[1]), int(match[2]), int(match[3] or match[2]), int(match[4] or 0)
    if bs < 1 or not 1 <= low <= high:
        raise ValueError(f"--case must have a batch size of at least 1 and rising positive lengths, got {text!r}")
    return Batch(bs, low, high, longest)


def select(
    kind: str | None,
    heads: Sequence[str] | None,
    batches: Sequence[str] | None,
    q_lens: Sequence[int] | None,
    masks: Sequence[str] | None,
    quick: bool,
    window: int = -1,
) -> list[Case]:
    """Every combination of the options given, the grid's own values standing in for the others.

    A batch of unequal lengths brings the equal one of the same total with it. Masks default to causal everywhere and tree from
    16 queries on.

    Raises:
        ValueError: naming the option: it cannot be read, or no kernel could take it, or nothing is left.
    """
    if kind not in (None, "gqa", "mla"):
        raise ValueError(f"--kind must be gqa or mla, got {kind!r}")
    chosen_heads = [h for h in (map(parse_heads, heads) if heads else HEADS) if kind in (None, h.kind)]
    if not chosen_heads:
        raise ValueError(f"--heads must include some of --kind {kind}, got {list(heads or ())}")
    chosen_batches = [parse_batch(text) for text in batches or (QUICK_BATCHES if quick else BATCHES)]
    chosen_q_lens = q_lens or (QUICK_Q_LENS if quick else Q_LENS)
    if unknown := set(masks or ()) - {"causal", "tree"}:
        raise ValueError(f"--mask must be causal or tree, got {sorted(unknown)}")
    longest = min(MAX_TREE_TOKENS, *(min(batch.lens()) for batch in chosen_batches))
    if bad := [q_len for q_len in chosen_q_lens if not 1 <= q_len <= longest]:
        raise ValueError(f"--q-len must lie in [1, {longest}] (at most 64 and the shortest context), got {bad}")
    every = [b for batch in chosen_batches for b in ([batch, batch.equalized()] if batch.unequal else [batch])]
    return [
        Case(head, batch, q_len, mask, window)
        for head, batch, q_len in itertools.product(
            dict.fromkeys(chosen_heads), dict.fromkeys(every), dict.fromkeys(chosen_q_lens)
        )
        for mask in dict.fromkeys(masks or (("causal", "tree") if q_len >= TREE_FROM else ("causal",)))
    ]


def random_tree(size: int, rng: random.Random) -> list[int]:
    """Words of a random tree: bit `j` of word `i` is set for node `i` and its ancestors. Node 63 sets the sign bit."""
    words = [1]
    for node in range(1, size):
        words.append(words[rng.randrange(node)] | 1 << node)
    return [word - (1 << 64) if word >> 63 else word for word in words]


@dataclass(frozen=True)
class Work:
    """The least a case must do: bytes read and written once, and floating-point operations."""

    bytes: int
    flops: int


class Pool:
    """The KV cache that all cases of one `Heads` share, filled with normal random numbers, and a random order of its pages.

    Attributes:
        caches: `(k_cache, v_cache)`, or `(kv_cache,)` for MLA, shaped as the ops want them.
    """

    def __init__(
        self, heads: Heads, num_pages: int, page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.heads, self.page_size, self.dtype, self.kv_dtype, self.device = heads, page_size, dtype, kv_dtype, device
        rows = (num_pages, page_size)
        shapes = (
            [(*rows, heads.num_kv_heads, heads.head_dim), (*rows, heads.num_kv_heads, heads.v_head_dim)]
            if heads.kind == "gqa"
            else [(*rows, heads.head_dim)]
        )
        self.kv_scale = KV_SCALE if kv_dtype.itemsize == 1 else None
        self.caches = tuple(torch.empty(shape, dtype=kv_dtype, device=device) for shape in shapes)
        g = torch.Generator(device).manual_seed(0)
        for cache in self.caches:
            for part in cache.split(4096):  # fp8 has no normal_: it goes through a copy, of bounded size
                part.copy_(torch.randn(part.shape, generator=g, dtype=dtype, device=device) / (self.kv_scale or 1.0))
        self.order = torch.randperm(num_pages, generator=g, dtype=torch.int32, device=device)

    def rows(self, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense keys and values of `table [..., pages]`, `[..., length, kv_heads, dim]` each, dequantized to queries' dtype."""
        pages = table[..., : math.ceil(length / self.page_size)].long()
        dense = [cache[pages].flatten(table.dim() - 1, table.dim()).narrow(table.dim() - 1, 0, length) for cache in self.caches]
        if self.kv_scale is not None:
            dense = [x.to(self.dtype) * self.kv_scale for x in dense]
        if self.heads.kind == "gqa":
            return dense[0], dense[1]
        keys = dense[0].unsqueeze(-2)
        return keys, keys[..., : self.heads.v_head_dim]


def pages_needed(case: Case, page_size: int) -> int:
    return sum(math.ceil(n / page_size) for n in case.batch.lens())


def num_sets(case: Case, itemsize: int, l2_bytes: int) -> int:
    """How many buffer sets to rotate among so that none is found in L2; one that is several times its size needs no second."""
    kv_bytes = case.tokens() * case.heads.kv_row * itemsize
    return min(max(1, math.ceil(ROTATE * l2_bytes / kv_bytes)), MAX_SETS)


class Problem:
    """Inputs of one case: `sets` sets of queries and of disjoint, randomly ordered pages; lengths and tree are shared.

    Attributes:
        q: per set `[bs, q_len, heads, head_dim]`. tables: per set `[bs, pages]` int32.
    """

    def __init__(self, case: Case, pool: Pool, sets: int) -> None:
        self.case, self.pool = case, pool
        heads, device, size = case.heads, pool.device, pool.page_size
        self.lens = case.batch.lens()
        self.seq_lens_cpu = torch.tensor(self.lens, dtype=torch.int32)
        self.seq_lens = self.seq_lens_cpu.to(device)
        self.tree_mask = None
        if case.mask == "tree":
            rng = random.Random(1)
            words = [random_tree(case.q_len, rng) for _ in self.lens]
            self.tree_mask = torch.tensor(words, dtype=torch.int64, device=device)
        shape = (len(self.lens), case.q_len, heads.num_heads, heads.head_dim)
        g = torch.Generator(device).manual_seed(1)
        self.q = [torch.randn(shape, generator=g, dtype=pool.dtype, device=device) for _ in range(sets)]
        counts = torch.tensor([math.ceil(n / size) for n in self.lens], device=device)
        live = torch.arange(int(counts.max()), device=device) < counts[:, None]
        self.tables = []
        for order in pool.order[: sets * int(counts.sum())].chunk(sets):
            table = torch.zeros(live.shape, dtype=torch.int32, device=device)
            table[live] = order
            self.tables.append(table)
        self.kv_indptr = torch.nn.functional.pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        positions = torch.arange(live.shape[1] * size, device=device, dtype=torch.int32)
        in_use = positions < self.seq_lens[:, None]
        self.kv_indices = [
            (table.repeat_interleave(size, 1) * size + positions % size)[in_use].contiguous() for table in self.tables
        ]

    def call(self, index: int, backend: str) -> torch.Tensor:
        """The public function on buffer set `index`, given every optional input that some kernel might read."""
        case, pool = self.case, self.pool
        heads = case.heads
        arguments: dict = {
            "tree_mask": self.tree_mask,
            "kv_indptr": self.kv_indptr,
            "kv_indices": self.kv_indices[index],
            "seq_lens_cpu": self.seq_lens_cpu,
            "max_seq_len": max(self.lens),
            "scale": heads.scale,
            "window_left": case.window,
            "backend": backend,
        }
        if heads.kind == "gqa":
            arguments |= {"k_scale": pool.kv_scale, "v_scale": pool.kv_scale}
            own: tuple = ()
        else:
            arguments |= {"kv_scale": pool.kv_scale}
            own = (heads.v_head_dim,)
        function = getattr(attention, case.op)
        return function(self.q[index], *pool.caches, *own, self.tables[index], self.seq_lens, **arguments)

    def visible(self, b: int) -> torch.Tensor:
        """`[q_len, length]` bool: which keys the queries of request `b` see."""
        words = None if self.tree_mask is None else self.tree_mask[b]
        return visible_keys(self.lens[b], self.case.q_len, words, self.pool.device, self.case.window)

    def work(self) -> Work:
        case, heads = self.case, self.case.heads
        pairs = sum(int(self.visible(b).sum()) for b in range(len(self.lens)))
        item = self.pool.dtype.itemsize
        kv = case.tokens() * heads.kv_row * self.pool.kv_dtype.itemsize
        rows = len(self.lens) * case.q_len * heads.num_heads * (heads.head_dim + heads.v_head_dim)
        return Work(kv + rows * item, 2 * pairs * heads.num_heads * (heads.head_dim + heads.v_head_dim))
