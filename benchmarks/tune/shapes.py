"""What `python -m benchmarks tune` looks at: the classes of the table on one architecture, candidates for each, and the
cases by which candidates are compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.kernels.cases import TREE_FROM, Batch, Case, Heads
from spec_ops.backends.triton.attention.tuning import Config, Entry, fitted, head_parts, lookup
from spec_ops.ops.tree import MAX_TREE_TOKENS

DTYPE = torch.bfloat16  # of queries, and of caches but for fp8's
MAX_CANDIDATES = 24
PAGE_SIZE = 64  # of classes that hold any
BATCHES = (Batch(1, 4096, 4096), Batch(8, 1024, 1024), Batch(8, 8192, 8192), Batch(64, 8192, 8192))
RAGGED_BATCHES = BATCHES[:3]
PREFILL = 512  # new tokens per request of the ragged kernel's largest class
# The models' shapes that stand for a class. Above 128 the largest head that the kernels take.
HEADS = {64: Heads("gqa", 64, 8, 64, 64), 128: Heads("gqa", 32, 8, 128, 128), None: Heads("gqa", 16, 8, 256, 256)}
MLA_HEADS = {16: Heads("mla", 16, 1, 576, 512), None: Heads("mla", 128, 1, 576, 512)}


@dataclass(frozen=True)
class ShapeClass:
    """One class of the table on one architecture: its present entry, and how it is measured."""

    entry: Entry
    arch: int
    heads: Heads
    q_lens: tuple[int, ...]

    def __str__(self) -> str:
        return self.entry.class_name

    @property
    def rows(self) -> int:
        """Most query rows per (request, KV head) of its cases."""
        return max(self.q_lens) * self.heads.num_heads // self.heads.num_kv_heads

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the caches."""
        return torch.float8_e4m3fn if self.entry.kv_bytes == 1 else DTYPE

    @property
    def window(self) -> int:
        """`window_left` of its cases."""
        return -1 if self.entry.window is None else self.entry.window

    @property
    def page_size(self) -> int:
        """Of the caches of its cases."""
        return self.entry.page or PAGE_SIZE

    @property
    def present(self) -> Config:
        """What is launched now."""
        return self._fitted(self.entry.config)

    @property
    def hot(self) -> bool:
        """Whether a spill is not tolerated, as `attention_ahead.py` declares it."""
        return (self.entry.kernel, self.entry.attention) == ("split", "gqa")

    def cases(self) -> list[Case]:
        batches = BATCHES if self.entry.kernel == "split" else RAGGED_BATCHES
        trees = self.entry.kernel == "split"
        return [
            Case(self.heads, batch, q_len, "tree" if trees and q_len >= TREE_FROM else "causal", self.window)
            for q_len, batch in itertools.product(self.q_lens, batches)
        ]

    def _fitted(self, config: Config) -> Config:
        heads = self.heads
        return fitted(config, self.arch, heads.kind == "mla", heads.head_dim, heads.v_head_dim, self.kv_dtype.itemsize)

    def candidates(self) -> list[Config]:
        """The present config and those nearest to it, in halvings and doublings, stages and programs: `MAX_CANDIDATES` at most.

        Left out: what does not fit into shared memory; what would spill by its sums alone; numbers of programs for the ragged
        kernel, which does not count on them. A second run after `--write` looks around the new entry.
        """
        present = self.present
        small = min(128, max(16, 1 << (self.rows - 1).bit_length()))
        heights = {small, present.block_m} | ({small // 2, small // 4} if small >= 128 else set())
        widths = sorted({32, 64, 128, present.block_n})
        programs = range(1, 5) if self.entry.kernel == "split" else [present.programs]
        every = [
            replace(present, block_m=m, block_n=n, num_warps=warps, num_stages=stages, programs=resident)
            for m, n, warps, stages, resident in itertools.product(sorted(heights), widths, (1, 2, 4, 8), range(2, 5), programs)
        ]
        fitting = [fit for c in every if (fit := self._fitted(c)) == c]
        found = [c for c in fitting if c != present and self._sums_fit(c)]
        return [present, *sorted(found, key=lambda c: _distance(c, present))[: MAX_CANDIDATES - 1]]

    def _sums_fit(self, config: Config) -> bool:
        """Whether a thread's share of the output and of a block of weights leaves registers for addresses and softmax."""
        width = sum(head_parts(self.heads.v_head_dim)) + config.block_n
        return config.block_m * width / (32 * config.num_warps) <= 0.75 * config.max_registers


def _distance(a: Config, b: Config) -> float:
    doublings = ((a.block_m, b.block_m), (a.block_n, b.block_n), (a.num_warps, b.num_warps))
    steps = abs(a.num_stages - b.num_stages) + abs(a.programs - b.programs)
    return sum(abs(math.log2(x / y)) for x, y in doublings) + steps


def classes(entries: Sequence[Entry], arch: int) -> list[ShapeClass]:
    """Every class that calls on `arch` fall into, in the table's order."""
    here = [e for e in entries if e.arch[0] <= arch <= e.arch[1]]
    made: dict[str, ShapeClass] = {}
    for entry in here:
        kind = entry.kernel, entry.attention, entry.head_dim
        siblings = [e.rows for e in here if (e.kernel, e.attention, e.head_dim) == kind and e.rows]
        rows = entry.rows or 2 * max(siblings, default=8)
        gqa = HEADS.get(entry.head_dim, HEADS[None])
        heads = MLA_HEADS[16 if rows <= 16 else None] if entry.attention == "mla" else gqa
        group = heads.num_heads // heads.num_kv_heads
        q_lens: tuple[int, ...] = (max(1, min(rows // group, MAX_TREE_TOKENS)),)
        if entry.kernel == "ragged":
            q_lens = (PREFILL,) if entry.rows is None else q_lens
        elif rows == 16 and q_lens != (1,):
            q_lens = (1, *q_lens)  # decode and verify
        shape = ShapeClass(entry, arch, heads, q_lens)
        width, most = shape.heads.head_dim, shape.rows
        item = shape.kv_dtype.itemsize
        if lookup(entries, entry.kernel, entry.attention, arch, width, most, item, shape.window, shape.page_size) == entry:
            made[shape.entry.class_name] = shape
    return list(made.values())


def select(shapes: Sequence[ShapeClass], names: Sequence[str] | None) -> list[ShapeClass]:
    """Those whose name is one of `names` or, where none has that name, begins with it and a slash; all without `names`.

    Raises:
        ValueError: a name that no class has.
    """
    chosen: set[str] = set()
    for name in names or map(str, shapes):
        found = {str(shape) for shape in shapes if f"{shape}/".startswith(name.rstrip("/") + "/")}
        if not found:
            raise ValueError(f"must name a class or begin one, as in {[str(shape) for shape in shapes]}, got {name!r}")
        chosen |= {name} if name in found else found
    return [shape for shape in shapes if str(shape) in chosen]
