"""Trees in batch-invariant attention: a node has the bits of the chain that its path is.

The arithmetic of a chain is that of positions: blocks of keys and chunks are cut there, and a block's numbers are added in the
order of positions. A tree's node sees its ancestors in whatever slots they have, at positions by depth: so where the tree
begins, keys are gathered in the order of its path. Blocks before that one are the same for all, and `tile.attend` walks them.

Rows of one tile lie on several paths. Each path takes its turn over the same few blocks, as many as the tree is deep, not as
it is wide; rows of other paths see none of its keys, which changes nothing for them (`kernels.py`). One turn serves all rows
whose own path is the beginning of its path, so that there are as many turns as the tile's queries have leaves, and a chain
takes one. Any mask is served: what is called a path here is any set of slots, in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.attention.mask import popcount
from spec_ops.backends.triton.attention.tile import capped, columns, logits, operand, outputs, read, softmax_step


@triton.jit
def existing(words, seq_len, MASK_LEN: tl.constexpr):
    """Tree masks whose bit 0 is the tree's first slot that exists, without bits from `MASK_LEN` on, which mean nothing."""
    if MASK_LEN < 64:
        words = words & ((1 << MASK_LEN) - 1)
    missing = tl.minimum(tl.maximum(MASK_LEN - seq_len, 0), 63)
    return (words.to(tl.uint64) >> missing.to(tl.uint64)).to(tl.int64)


@triton.jit
def _descend(counts, n, at, WIDTH: tl.constexpr):
    """One level of `nth_bit`: `counts` holds the set bits of each `WIDTH` bits."""
    here = ((counts >> at.to(tl.uint64)) & ((1 << WIDTH) - 1)).to(tl.int32)
    return tl.where(n >= here, n - here, n), tl.where(n >= here, at + WIDTH, at)


@triton.jit
def nth_bit(word, n):
    """Where set bit number `n`, from 0, of an int64 is; anywhere in [0, 64) if there are no more than `n`."""
    word = word.to(tl.uint64)
    twos = word - ((word >> 1) & 0x5555555555555555)
    fours = (twos & 0x3333333333333333) + ((twos >> 2) & 0x3333333333333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    sixteens = (eights + (eights >> 8)) & 0x00FF00FF00FF00FF
    halves = (sixteens + (sixteens >> 16)) & 0x0000FFFF0000FFFF
    n, at = _descend(halves, n, n * 0, 32)
    n, at = _descend(sixteens, n, at, 16)
    n, at = _descend(eights, n, at, 8)
    n, at = _descend(fours, n, at, 4)
    n, at = _descend(twos, n, at, 2)
    n, at = _descend(word, n, at, 1)
    return at


@triton.jit
def turns(words, in_use, masks, first, q_len, seq_len, MASK_LEN: tl.constexpr, QUERIES: tl.constexpr):
    """Which paths take turns for a tile of rows.

    `words`: of `existing`, of each row. `first`: the tile's first query, of which it holds at most `QUERIES`; `masks`: the
    request's `q_len` tree masks. Returns each query's mask and its turn (-1: none), the number of turns, and the turn that
    serves each row (-1: rows not in use).
    """
    j = tl.arange(0, QUERIES)
    paths = existing(tl.load(masks + first + j, mask=first + j < q_len, other=0), seq_len, MASK_LEN)
    differ = words[:, None] ^ paths[None, :]
    begins = (differ == 0) | (words.to(tl.uint64)[:, None] < (differ & -differ).to(tl.uint64))  # only in later bits
    # The longest path that begins with a row's: no other one begins with that.
    rank = popcount(paths) * QUERIES + j
    longest = tl.max(tl.where(begins & in_use[:, None], rank[None, :], -1), 1)
    serves = longest[:, None] == rank[None, :]
    needed = tl.max(serves.to(tl.int32), 0)
    turn = tl.where(needed > 0, tl.cumsum(needed, 0) - 1, -1)
    owner = tl.where(in_use, tl.sum(tl.where(serves, turn[None, :], 0), 1), -1)
    return paths, turn, tl.sum(needed, 0), owner


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def levels_seen(turn, owner, prefix, position, stop, WINDOW: tl.constexpr):
    """Of each query's path, which levels of the tree its turn's rows see, as bits: between the windows of rows at different
    depths lie keys that none of them sees, whose slots may hold anything."""
    first = tl.maximum(position - prefix - WINDOW, 0).to(tl.uint64)  # at most 63
    hidden = 64 - (stop - prefix)
    every = tl.full(stop.shape, -1, tl.int64).to(tl.uint64)
    levels = (every << first) & (every >> tl.minimum(hidden, 63).to(tl.uint64))
    levels = tl.where(hidden < 64, levels.to(tl.int64), 0)
    return tl.reduce(tl.where((turn >= 0)[None, :] & (owner[:, None] == turn[None, :]), levels[:, None], 0), 0, _or)


@triton.jit
def attend_paths(
    q0, q1, tree, table, kv_head, first_key, last_key, first_seen, position, qk_scale, softcap, m, l, acc,
    k_stride_page, k_stride_token, k_stride_h, v_stride_page, v_stride_token, v_stride_h,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SHARED_KV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """`tile.attend` goes on, over the positions `[first_key, last_key)`, in each of which a path has a key of its own.

    `tree`: the caches as pointers, the position of the tree's first key, the results of `turns`, and the position after each
    row's last key; `levels_seen`. With a window, keys before `first_seen` are seen by no row. `m`, `l`, `acc`, and the
    results: as of `attend`, and so is `ORDERED`.
    """
    k_rows, v_rows, prefix, paths, turn, count, owner, stop, near = tree
    PAIRS: tl.constexpr = k_rows.dtype.element_ty == tl.int16
    PER: tl.constexpr = 2 if PAIRS else 1  # numbers in one of the cache's
    q0, q0_odd = columns(operand(q0, k_rows.dtype.element_ty), PAIRS)
    q1, q1_odd = columns(operand(q1, k_rows.dtype.element_ty), PAIRS)
    d0 = tl.arange(0, D0 // PER)
    d1 = D0 // PER + tl.arange(0, D1 // PER) if D1 > 0 else d0
    dv = tl.arange(0, BLOCK_DV // PER)
    acc_odd = 0.0
    if PAIRS:
        acc, acc_odd = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_DV // 2, 2]))
    k_head = k_rows + kv_head.to(tl.int64) * k_stride_h
    v_head = v_rows + kv_head.to(tl.int64) * v_stride_h
    blocks = tl.cdiv(tl.maximum(last_key - first_key, 0), BLOCK_N)
    for step in tl.range(0, blocks * count, num_stages=STAGES):
        path = step // blocks
        n = first_key + (step % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        word = tl.sum(tl.where(turn == path, paths, 0), 0)
        valid = n < prefix + popcount(word)
        if WINDOW >= 0:
            levels = tl.sum(tl.where(turn == path, near, 0), 0).to(tl.uint64)
            at = tl.minimum(tl.maximum(n - prefix, 0), 63).to(tl.uint64)
            valid = valid & tl.where(n < prefix, n >= first_seen, ((levels >> at) & 1) != 0)
        slot = tl.where(n < prefix, n, prefix + nth_bit(word, tl.maximum(n - prefix, 0)))
        page = tl.load(table + slot // PAGE, mask=valid, other=0).to(tl.int64)
        k_row = k_head + page * k_stride_page + (slot % PAGE).to(tl.int64) * k_stride_token
        v_row = v_head + page * v_stride_page + (slot % PAGE).to(tl.int64) * v_stride_token
        k0 = read(tl.load(k_row[:, None] + d0[None, :], mask=valid[:, None], other=0.0), q0.dtype)
        s = logits(q0, q0_odd, k0, None)
        if D1 > 0:
            k1 = tl.load(k_row[:, None] + d1[None, :], mask=valid[:, None] & (d1 < D // PER)[None, :], other=0.0)
            s = logits(q1, q1_odd, read(k1, q0.dtype), s)
        s, logit_scale = capped(s, qk_scale, softcap, HAS_SOFTCAP)
        seen = (owner == path)[:, None] & (n[None, :] < stop[:, None])
        if WINDOW >= 0:
            seen = seen & (position[:, None] - n[None, :] <= WINDOW)
        p, m, l, shrink = softmax_step(tl.where(seen, s, float("-inf")), m, l, logit_scale, ORDERED, q0.dtype)
        acc = acc * shrink
        acc_odd = acc_odd * shrink if PAIRS else acc_odd
        if SHARED_KV:
            v = k0
        else:
            v = tl.load(v_row[:, None] + dv[None, :], mask=valid[:, None] & (dv < DV // PER)[None, :], other=0.0)
            v = read(v, q0.dtype)
        acc, acc_odd = outputs(p, v, acc, acc_odd, q0.dtype)
    return m, l, tl.interleave(acc, acc_odd) if PAIRS else acc
