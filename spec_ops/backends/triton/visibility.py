"""Which keys a query row sees: causal chains, tree bit masks, sliding windows by depth."""

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
def visible(n, seq_len, query, q_len, words, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr):
    """`[rows, keys]` bool for key positions `n [keys]`.

    `query [rows]` is each row's query index of `q_len`; `words [rows]` its tree mask (read when `MASK_LEN` > 0: bit `j` is
    key `j` of the last `MASK_LEN` positions). `WINDOW` < 0 means none.
    """
    if MASK_LEN == 0:
        position = seq_len - q_len + query
        seen = n[None, :] <= position[:, None]
        if WINDOW >= 0:
            seen = seen & (position[:, None] - n[None, :] <= WINDOW)
    else:
        prefix = seq_len - MASK_LEN
        bit = n - prefix
        in_tree = (bit >= 0) & (bit < MASK_LEN)
        shift = tl.where(in_tree, bit, 0).to(tl.int64)
        chosen = ((words[:, None] >> shift[None, :]) & 1) != 0
        seen = (n < prefix)[None, :] | (in_tree[None, :] & chosen)
        if WINDOW >= 0:
            # Depth of a draft key as the query sees it: the query's ancestors before that key.
            before = (tl.full(shift.shape, 1, tl.int64) << shift) - 1
            ancestors = popcount(words[:, None] & before[None, :])
            depth = tl.where(in_tree[None, :], ancestors, bit[None, :])
            seen = seen & (popcount(words)[:, None] - 1 - depth <= WINDOW)
    return seen
