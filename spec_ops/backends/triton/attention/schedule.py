"""How paged attention is divided among programs, on the device: no host plan, no metadata kernel, no sync.

A *tile* is one (request, KV head, block of query rows); its KV is cut into blocks of `BLOCK_N` tokens. The blocks of all
requests, laid end to end, are divided into `ranges` of about equal size (stream-K, arXiv:2301.03598), so unequal lengths
balance by themselves; where it costs a block at most, ranges end with requests (`whole_ranges`). Each range is walked once per
(KV head, row block) by one program; programs of one range are neighbours in the grid and read the same pages at about the same
time. A tile that lies inside one range is finished there. Otherwise each of its ranges writes a partial result and announces it
(a counter per range); then its programs share the work of combining them, in the order of the ranges.
"""

import triton
import triton.language as tl


@triton.jit
def kv_blocks(seq_len, Q_SPAN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First block, and number of blocks, that any query of a request looks at.

    `Q_SPAN`: how many of the last positions the queries or the tree mask occupy.
    """
    end = tl.cdiv(tl.maximum(seq_len, 0), BLOCK_N)
    if WINDOW >= 0:
        first = tl.maximum(seq_len - Q_SPAN - WINDOW, 0) // BLOCK_N
        return first, end - first
    else:
        return end * 0, end


@triton.jit
def whole_ranges(counts, total, ranges):
    """A length of ranges, in blocks, with which every request's tiles end where a range ends, and how many ranges each request
    then has; length 0 if that would make the longest range more than one block longer than equal shares.

    A range that crosses from one request into another refills its pipeline and writes two partial results, which few and short
    requests feel most. The last range of a request may hold fewer blocks than the others, never none.
    """
    share = tl.maximum(tl.cdiv(total, ranges), 1)
    fewest = tl.cdiv(counts, share + 1)
    needed = tl.cdiv(counts, share)
    fits = tl.sum(needed, 0) <= ranges
    length = tl.where(fits, share, tl.where(tl.sum(fewest, 0) <= ranges, share + 1, 0))
    return length, tl.where(fits, needed, fewest)


@triton.jit
def range_start(index, total, ranges, ends, length):
    """Where range `index` of `ranges` begins among `total` blocks.

    With a `length`, that many blocks each. Otherwise equal shares, except that a start close to a request's end (`ends`,
    running block counts) moves there: a sliver of a tile would cost more than its blocks.
    """
    start = index * length
    if length == 0:
        share = total // ranges
        start = index * share + tl.minimum(index, total - share * ranges)
        tolerance = tl.minimum(share // 8, 4)
        end = tl.max(tl.where(ends <= start + tolerance, ends, 0), 0)
        start = tl.where((end >= start - tolerance) & (index > 0), end, start)
    return start


@triton.jit
def range_of(block, total, ranges, ends, length):
    """The range that holds `block`: the largest `r` with `range_start(r) <= block`."""
    guess = block // tl.maximum(length, 1)
    if length == 0:
        share = total // ranges
        longer = (total - share * ranges) * (share + 1)  # blocks in ranges of one block more
        guess = tl.where(block < longer, block // (share + 1), total - share * ranges + (block - longer) // share)
        guess += (range_start(guess + 1, total, ranges, ends, length) <= block).to(tl.int32)
        guess -= (range_start(guess, total, ranges, ends, length) > block).to(tl.int32)
    return guess


@triton.jit
def pick(vector, index, SIZE: tl.constexpr):
    """`vector[index]` for a vector held in registers."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, vector, 0), 0)
