"""`tile.attend` where a block of keys lies in several pages, and a tensor descriptor reads each of them: a *box*.

Boxes are parts of a block with products of their own; what the online softmax does once a block is done once for all of them.
For few rows and one warp, whose weights become an operand where they are.
"""

import triton
import triton.language as tl

from spec_ops.backends.triton.attention.mask import seen_by_any, visible
from spec_ops.backends.triton.attention.tile import capped, logits, outputs, read


@triton.jit
def box_pages(table, key, last_key, seq_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of the block that begins at `key`; page 0 from `last_key` on, and from `seq_len` on, where the table may end."""
    end = tl.minimum(last_key, seq_len)
    pages = ()
    for i in tl.static_range(BLOCK_N // PAGE):
        first = key + i * PAGE
        pages += (tl.load(table + first // PAGE, mask=first < end, other=0),)  # type: ignore[assignment]
    return pages


@triton.jit
def attend_boxes(
    q, k_cache, v_cache, table, pages, kv_head, first_key, last_key, seq_len, all_seen, position, words,
    first_seen, slots, qk_scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """As `tile.attend`, with `box_pages` of the first block."""
    BOXES: tl.constexpr = BLOCK_N // PAGE
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    for start in tl.range(first_key, last_key, BLOCK_N, num_stages=STAGES):
        masked = (WINDOW >= 0) | (start + BLOCK_N > all_seen)
        s = ()
        for i in tl.static_range(BOXES):
            k = read(k_cache.load([pages[i] * PAGE, kv_head * D]), q.dtype)
            x, logit_scale = capped(logits(q, q, k, None), qk_scale, softcap, HAS_SOFTCAP)
            if masked:
                n = start + i * PAGE + tl.arange(0, PAGE)
                x = tl.where(visible(n, seq_len, position, words, MASK_LEN, WINDOW), x, float("-inf"))
            s += (x,)  # type: ignore[assignment]
        most = s[0]  # type: ignore[misc]
        for i in tl.static_range(1, BOXES):
            most = tl.maximum(most, s[i])
        m_new = tl.maximum(m, tl.max(most, 1) * logit_scale)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
        shrink = tl.exp2(m - shift)
        m = m_new
        acc = acc * shrink[:, None]
        sums = tl.zeros([BLOCK_M, PAGE], tl.float32)
        unseen = start + BLOCK_N > (seq_len - MASK_LEN if HOLES else seq_len)
        if WINDOW >= 0:
            unseen = unseen | (start < first_seen)
        for i in tl.static_range(BOXES):
            p = tl.exp2(s[i] * logit_scale - shift[:, None])
            sums += p
            v = read(v_cache.load([pages[i] * PAGE, kv_head * DV]), q.dtype)
            if unseen:
                n = start + i * PAGE + tl.arange(0, PAGE)
                valid = seen_by_any(n, first_seen, seq_len, slots, MASK_LEN, WINDOW, HOLES)
                acc, _ = outputs(p, tl.where(valid[:, None], v, 0), acc, acc, q.dtype)
            else:
                acc, _ = outputs(p, v, acc, acc, q.dtype)
        l = l * shrink + tl.sum(sums, 1)
        pages = box_pages(table, start + BLOCK_N, last_key, seq_len, PAGE, BLOCK_N)
    return m, l, acc
