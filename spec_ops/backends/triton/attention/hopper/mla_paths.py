"""Trees in batch-invariant MLA by the Gluon kernel (`mla.py` with a `PIECE` and a tree mask): a node has the bits of the chain
that its path is.

A chain's bits are those of positions (`pieces.py`). A tree's node sees its ancestors in whatever slots they have, at positions
by depth. So blocks before the one of the tree's first key, the *tail*, are the request's own, and from there on they are those
of paths: `gather_paths_kernel`, which runs first, copies a path's keys, in order, into two blocks of its own, which hold zeros
after its end. Each path of a tile takes its turn over its two blocks; rows of other paths see none of their keys, which changes
nothing for them. One turn serves all rows whose own path is the beginning of its path. Any mask is served: what is called a
path here is any set of slots, in ascending order.

Blocks are walked in one sequence: the request's up to the tail, then two for each turn, at the tail and after it. So a block at
an even position comes at an even place, where the even warpgroup takes it, and an odd one at an odd place (`walk`). Where a
piece ends between the two, the sequence is walked twice from there on: the piece before sees the first block of each turn, the
one after it the second. Ranges, pieces and partial results are counted by the request's length, as without a tree: it has all
positions that a path can have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.deterministic.paths import existing, nth_bit
from spec_ops.backends.triton.attention.hopper.host import token_rows
from spec_ops.backends.triton.attention.mask import popcount
from spec_ops.backends.triton.runtime.launch import await_predecessors, launch

BLOCKS = 2  # of 64 keys: where up to 64 slots, from anywhere in a block on, can reach
WIDTH = 576
GATHERED = 8  # rows of a path that a program of `gather_paths_kernel` copies


@gluon.constexpr_function
def takes_turns(piece, mask_len):
    """Whether a kernel walks paths."""
    return piece > 0 and mask_len > 0


@gluon.constexpr_function
def queries_of_a_tile(q_len, heads):
    """The most queries whose rows are in one tile of 64, as a power of two. Not 32: see `deterministic/launcher.py`."""
    aligned = 64 % heads == 0 or heads % 64 == 0
    queries = min(max(64 // heads, 1) if aligned else 62 // heads + 2, q_len)
    places = 1 << (queries - 1).bit_length()
    return 64 if places == 32 else places


@gluon.constexpr_function
def plan_width(q_len, heads):
    """Numbers of a tile's plan: turns, doubled, and 1 more if any path reaches its second block; then of each turn the path
    (a query, counted over the batch), and of each query of the tile its turn times 128 and its depth."""
    return 1 + 2 * queries_of_a_tile(q_len, heads)


@triton.jit(do_not_specialize=["q_len", "tiles", "distance", "table_stride", "mask_stride"])
def gather_paths_kernel(
    cache, block_tables, seq_lens, tree_mask, plan, path_rows,
    q_len, tiles, distance, table_stride, mask_stride,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, MASK_LEN: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program copies `ROWS` of the 128 rows of a query's path to `path_rows [bs, q_len, 128, 576]`, if that takes a turn in
    a tile; one of them writes the tile's `plan [bs, tiles, plan_width]`. `distance`: of tokens, in steps of 8 numbers."""
    await_predecessors(PDL)
    b = tl.program_id(0)
    tile = tl.program_id(1) // QUERIES
    own = tl.program_id(1) % QUERIES
    seq_len = tl.load(seq_lens + b)
    first = tile * 64 // HEADS
    j = tl.arange(0, QUERIES)
    there = (first + j < q_len) & ((first + j) * HEADS < tile * 64 + 64)
    masks = tree_mask + b.to(tl.int64) * mask_stride + first
    paths = existing(tl.load(masks + j, mask=there, other=0), seq_len, MASK_LEN)
    depths = popcount(paths)
    differ = paths[:, None] ^ paths[None, :]
    begins = (differ == 0) | (paths.to(tl.uint64)[:, None] < (differ & -differ).to(tl.uint64))  # only in later bits
    # The longest path that begins with a query's: no other one begins with that.
    rank = depths * QUERIES + j
    longest = tl.max(tl.where(begins & there[None, :], rank[None, :], -1), 1)
    serves = (longest[:, None] == rank[None, :]) & there[:, None]
    needed = tl.max(serves.to(tl.int32), 0)
    turn = tl.cumsum(needed, 0) - 1
    prefix = tl.maximum(seq_len - MASK_LEN, 0)
    tail = prefix // 64
    reaches = tl.max(tl.where(there, prefix + depths, 0), 0) > (tail + 1) * 64
    if (own == 0) & (tl.program_id(2) == 0):
        p = plan + (b * tiles + tile) * (1 + 2 * QUERIES)
        tl.store(p, tl.sum(needed, 0) * 2 + reaches.to(tl.int32))
        tl.store(p + 1 + turn, b * q_len + first + j, mask=needed > 0)
        tl.store(p + 1 + j, 0, mask=j >= tl.sum(needed, 0))  # which are asked for ahead, and not used
        served = tl.sum(tl.where(serves, turn[None, :], 0), 1)
        tl.store(p + 1 + QUERIES + j, served * 128 + depths)

    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    takes = tl.sum(tl.where(j == own, needed, 0), 0) > 0
    # A query of several whole tiles is copied by its first.
    takes = takes & ((QUERIES > 1) | (tile * 64 == first * HEADS)) & ((tl.program_id(2) * ROWS < 64) | reaches)
    if takes & (seq_len > 0):
        word = tl.sum(tl.where(j == own, paths, 0), 0)
        n = tail * 64 + row
        valid = n < prefix + popcount(word)
        slot = tl.where(n < prefix, n, prefix + nth_bit(word, tl.maximum(n - prefix, 0)))
        page = tl.load(block_tables + b.to(tl.int64) * table_stride + slot // PAGE, mask=valid, other=0).to(tl.int64)
        source = (cache + (page * PAGE + slot % PAGE) * distance * 8)[:, None]
        target = (path_rows + ((b * q_len + first + own).to(tl.int64) * 128 + row) * 576)[:, None]
        values, rest = tl.arange(0, 512)[None, :], 512 + tl.arange(0, 64)[None, :]
        tl.store(target + values, tl.load(source + values, mask=valid[:, None], other=0.0))
        tl.store(target + rest, tl.load(source + rest, mask=valid[:, None], other=0.0))


def gathered(call: AttentionCall, tree_mask: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, box: int):
    """The plan and the rows of `gather_paths_kernel` as the attention kernel takes them, the rows by a descriptor of 64 x 64,
    or for pages that are read row by row (`box` 1) as they are; and the distance of two requests in the plan."""
    bs, q_len, heads, _ = call.q.shape
    tiles = triton.cdiv(q_len * heads, 64)
    queries, width = queries_of_a_tile(q_len, heads), plan_width(q_len, heads)
    cache = call.k_cache
    plan = torch.empty(bs, tiles, width, dtype=torch.int32, device=call.q.device)
    rows = cache.new_empty(bs * q_len * BLOCKS, 64, WIDTH)
    launch(
        gather_paths_kernel, (bs, tiles * queries, BLOCKS * 64 // GATHERED),
        cache, block_tables, seq_lens, tree_mask, plan, rows,
        q_len, tiles, cache.stride(1) // 8, block_tables.stride(0), tree_mask.stride(0),
        HEADS=heads, QUERIES=queries, MASK_LEN=call.mask_len, PAGE=cache.shape[1], ROWS=GATHERED,
        num_warps=4, early=True,
    )  # fmt: skip
    return plan, token_rows(rows, 1 if box == 1 else 64), tiles * width


def bytes_of(call: AttentionCall) -> int:
    """Of the keys that `gather_paths_kernel` copies for a request."""
    return call.q.shape[1] * BLOCKS * 64 * WIDTH * call.k_cache.element_size() if call.tree_mask is not None else 0


@gluon.jit
def tail_of(seq_len, MASK_LEN: gl.constexpr):
    """The position of a tree's first key, and its block."""
    prefix = gl.maximum(seq_len - MASK_LEN, 0)
    return prefix, prefix // 64


@gluon.jit
def turns_of(plan):
    """How many paths take turns in a tile, and whether any reaches its second block, as 0 or 1."""
    turns = gl.load(plan)
    return turns >> 1, turns & 1


@gluon.jit
def walk(piece, until, tail, turns, reaches, PIECE: gl.constexpr):
    """Of a piece, the blocks `[piece, until)`: where the walk from `piece` on ends, and from where on a block at an even place
    has no partner."""
    after = tail < piece  # by one: second blocks alone, or where there are none, one that nobody sees
    both = (reaches > 0) & (tail + 1 < piece + PIECE)
    stop = gl.where(tail < until, tail + 2 * turns - gl.where(both, 0, 1), until)
    stop = gl.where(after, tail + 2 * gl.where(reaches > 0, turns, 1), stop)
    # At odd places first blocks are partners of second ones.
    lonely = gl.where(both | ((tail & 1) == 1), stop, tail)
    return stop, gl.where(after, piece, lonely)


@gluon.jit
def has_partner(k, last, lonely, TREE: gl.constexpr):
    """Whether a block of the odd warpgroup comes with block `k`, of all up to `last`; `lonely`: of `walk`."""
    partner = k + 1 < last
    if TREE:
        partner = partner & (k < lonely)
    return partner


@gluon.jit
def turn_of(block, tail, piece, PIECE: gl.constexpr):
    """Whose turn it is at place `block`, the tail's or a later one; -1 if the block is of the next piece."""
    at = tail + ((block - tail) & 1)
    return gl.where(at < piece + PIECE, (block - tail) >> 1, -1)


@gluon.jit
def on_path(s, block, tail, prefix, piece, served, PIECE: gl.constexpr):
    """`s [rows, keys]` with -inf at keys of the block at place `block` that a row does not see; `served`: of the plan."""
    n = (tail + ((block - tail) & 1)) * 64 + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    near = gl.expand_dims(served >> 7 == turn_of(block, tail, piece, PIECE), 1)
    seen = near & (gl.expand_dims(n, 0) < gl.expand_dims(prefix + (served & 127), 1))
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def path_block(plan, block, tail, reaches):
    """Which of the gathered blocks comes at place `block`, if that is not before the tail; any of the path for one that nobody
    sees. Places up to two after the last may be asked for: the plan has room."""
    place = gl.maximum(block - tail, 0)
    return gl.load(plan + 1 + (place >> 1)) * 2 + gl.where(reaches > 0, place & 1, 0)
