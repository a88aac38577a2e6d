"""Which keys a query row sees: causal chains, tree bit masks, sliding windows by depth.

A key that no query of a request sees has weight 0 in every row. Its value still enters the products, where 0 * NaN is NaN, so
kernels clear it or do not load it (`seen_by_any`): pages before a window may belong to other requests, and slots of a tree to
branches that are dead.
"""

import triton
import triton.language as tl


@triton.jit
def popcount(x):
    """Number of set bits of an int64."""
    x = x.to(tl.uint64)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _in_tree(words, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr):
    """Tree masks without the bits from `MASK_LEN` on, which mean nothing. Only a window counts bits, and would notice them."""
    if WINDOW >= 0 and MASK_LEN > 0 and MASK_LEN < 64:
        words = words & ((1 << MASK_LEN) - 1)
    return words


@triton.jit
def _nearest(words, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr):
    """Tree masks without the ancestors that are more than `WINDOW` levels above a query: bits are in topological order."""
    if WINDOW >= 0:
        for _ in range(MASK_LEN - WINDOW - 1):
            words = tl.where(popcount(words) > WINDOW + 1, words & (words - 1), words)
    return words


@triton.jit
def _depth(words):
    """Level of a query in its tree: how many ancestors it has there."""
    return tl.maximum(popcount(words) - 1, 0)


@triton.jit
def query_rows(seq_len, query, q_len, words, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr):
    """What `visible` asks of rows: the position of each one's query, and its tree mask within the window.

    `query` is each row's query index of `q_len`; `words` its tree mask (looked at if `MASK_LEN` > 0: bit `j` is key `j` of the
    last `MASK_LEN` positions). `WINDOW` < 0 means none.
    """
    if MASK_LEN == 0:
        return seq_len - q_len + query, words
    else:
        words = _in_tree(words, MASK_LEN, WINDOW)
        return seq_len - MASK_LEN + _depth(words), _nearest(words, MASK_LEN, WINDOW)


@triton.jit
def visible(n, seq_len, position, words, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr):
    """`[rows, keys]` bool for key positions `n [keys]`; `position`, `words`: of `query_rows`."""
    if MASK_LEN == 0:
        seen = n[None, :] <= position[:, None]
        if WINDOW >= 0:
            seen = seen & (position[:, None] - n[None, :] <= WINDOW)
    else:
        bit = n - (seq_len - MASK_LEN)
        in_tree = (bit >= 0) & (bit < MASK_LEN)
        shift = tl.where(in_tree, bit, 0).to(tl.int64)
        chosen = ((words[:, None] >> shift[None, :]) & 1) != 0
        before = (bit < 0)[None, :]
        if WINDOW >= 0:
            before = before & (position[:, None] - n[None, :] <= WINDOW)
        seen = before | (in_tree[None, :] & chosen)
    return seen


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def seen_of_request(
    seq_len, masks, q_len, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr, HOLES: tl.constexpr
):  # fmt: skip
    """Of a request, for `seen_by_any`: the first key that any of its queries sees, and the slots of its tree that any sees, as
    bits; each looked at only where there is a window, or holes. `masks`: its tree masks, `q_len` of them."""
    first_seen = seq_len - (MASK_LEN if MASK_LEN > 0 else q_len) - WINDOW
    slots = 0
    if HOLES:
        i = tl.arange(0, 64)
        words = _in_tree(tl.load(masks + i, mask=i < q_len, other=0), MASK_LEN, WINDOW)
        slots = tl.reduce(_nearest(words, MASK_LEN, WINDOW), 0, _or)
        first_seen += tl.min(tl.where(i < q_len, _depth(words), MASK_LEN), 0)
    return first_seen, slots


@triton.jit
def seen_by_any(n, first_seen, seq_len, slots, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr, HOLES: tl.constexpr):
    """`[keys]` bool: the keys among `n [keys]` that any query of the request sees; `first_seen`, `slots`: of `seen_of_request`.
    `HOLES`: queries are some of the tree's nodes; where they are all, each slot is seen by its own."""
    seen = n < seq_len
    if WINDOW >= 0:
        seen = seen & (n >= first_seen)
    if HOLES:
        bit = n - (seq_len - MASK_LEN)
        shift = tl.minimum(tl.maximum(bit, 0), MASK_LEN - 1).to(tl.int64)
        seen = seen & ((bit < 0) | (((slots >> shift) & 1) != 0))
    return seen
