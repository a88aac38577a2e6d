"""One tile of attention: some query rows of a request and KV head over a stretch of its keys.

The online softmax is that of FlashAttention-2 (arXiv:2307.08691) in base 2; masks: `mask.py`.

Products say `input_precision="ieee"`, which concerns float32 alone: fused multiply-adds, one after the other along k, where the
default would be tf32. 16-bit operands compile to the same code with either.

Caches of e4m3 come in two forms. As themselves, where the products are `wgmma`: a block is converted on its way through
registers. For `mma.sync`, as int16: pairs of numbers. A register of its operands holds two keys of a column, which 8-bit
values reach byte by byte only, while pairs come as 16-bit numbers do (`ldmatrix`). The first numbers of two pairs then make
one operand and the second ones another, so that a product is two, of even and of odd columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.attention.mask import seen_by_any, visible

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def times(index, stride, WIDE: tl.constexpr):
    """How far `index` elements with that stride reach. Strides may be of any size: an index within a page or a request is
    multiplied in 64 bits where that is needed (`WIDE`), which takes registers, and every other one always."""
    return index.to(tl.int64) * stride if WIDE else index * stride


@triton.jit
def denominator(m, l, sinks, head, in_use, HAS_SINKS: tl.constexpr):
    """What to multiply an accumulator of maximum `m` and sum `l` with; zero for rows that saw nothing."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=in_use, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        top = tl.where(top == float("-inf"), 0.0, top)  # saw nothing, and a sink that takes nothing
        shrink = tl.exp2(m - top)
        total = l * shrink + tl.exp2(sink - top)
        return shrink / tl.where(total > 0, total, 1.0)
    else:
        return 1.0 / tl.where(l > 0, l, 1.0)


@triton.jit
def capped(s, qk_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Products after the soft cap, and what is still to be multiplied with them."""
    if HAS_SOFTCAP:
        x = s * qk_scale  # already divided by the cap; tanh from exp2
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        s = softcap * tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
        return s, 1.0
    else:
        return s, qk_scale


@triton.jit
def _pair_sums(p):
    """Sums of rows, halved level by level. Each level adds two numbers, and a + b is b + a: no layout changes a bit.

    The levels are bits of a key's index, in the order 5, 4, 0, 2, 1, 3: first those that a thread has of a product's result,
    then those of its neighbours in the warp, last the one that may be another warp's.
    """
    ROWS: tl.constexpr = p.shape[0]
    tl.static_assert(p.shape[1] <= 64)
    x = p
    if p.shape[1] >= 64:
        x = tl.sum(tl.reshape(x, [ROWS, 2, 32]), 1)
    if p.shape[1] >= 32:
        x = tl.sum(tl.reshape(x, [ROWS, 2, 16]), 1)
    x = tl.sum(tl.reshape(x, [ROWS, 8, 2]), 2)
    x = tl.sum(tl.reshape(x, [ROWS, 2, 2, 2]), 2)
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def row_sums(p, ORDERED: tl.constexpr, dtype: tl.constexpr):
    """Sums of weights `p [rows, keys]`.

    `tl.sum` adds in the order of `p`'s layout, and Triton chooses another layout in another loop. `ORDERED` has one order in
    every loop: `"pairs"`, or `"product"` with ones, which adds along keys in the order of the tensor cores.
    """
    if ORDERED == "pairs":
        return _pair_sums(p)
    elif ORDERED == "product":
        ones = tl.full([p.shape[1], 16], 1.0, dtype)
        return tl.max(tl.dot(p.to(dtype), ones, input_precision="ieee"), 1)
    else:
        return tl.sum(p, 1)


@triton.jit
def softmax_step(s, m, l, logit_scale, ORDERED: tl.constexpr, dtype: tl.constexpr):
    """One block of the online softmax: from logits `s [rows, keys]` to weights, and what scales the output so far. `ORDERED`,
    `dtype`: of `row_sums`."""
    m_new = tl.maximum(m, tl.max(s, 1) * logit_scale)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
    p = tl.exp2(s * logit_scale - shift[:, None])
    shrink = tl.exp2(m - shift)
    return p, m_new, l * shrink + row_sums(p, ORDERED, dtype), shrink[:, None]


@triton.jit
def _weights(
    s, m, l, n, masked, seq_len, position, words, qk_scale, softcap,
    MASK_LEN: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ORDERED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`softmax_step` of the keys that rows see."""
    s, logit_scale = capped(s, qk_scale, softcap, HAS_SOFTCAP)
    if masked:
        s = tl.where(visible(n, seq_len, position, words, MASK_LEN, WINDOW), s, float("-inf"))
    return softmax_step(s, m, l, logit_scale, ORDERED, dtype)


@triton.jit
def opaque_zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros that the compiler cannot write a second time.

    For a loop without iterations it would write them into the loop's accumulator, and that code may end up between the loop's
    last `wgmma` and the wait for it. ptxas then takes it for a write to an accumulator in use and serializes every `wgmma` of
    the kernel (its warning C7515), which makes it a quarter slower. `ahead.Resources.serialized` shows it.
    """
    zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    if INTERPRETED or ROWS < 64:  # `wgmma` has 64 rows
        return zeros
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [zeros], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def first_pages(table, first_key, last_key, seq_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """`attend`'s `page`: the page id of a tile's first block, or one for each of its keys if pages are smaller.

    To be loaded before the queries: turning those into an operand waits for them, and the first keys would wait once more.
    """
    if PAGE % BLOCK_N == 0:
        return tl.load(table + first_key // PAGE, mask=first_key < last_key, other=0)  # the table may have no columns
    else:
        n = first_key + tl.arange(0, BLOCK_N)
        return tl.load(table + n // PAGE, mask=n < seq_len, other=0)


@triton.jit
def operand(q, stored: tl.constexpr):
    """Queries in the dtype of products with keys that are `stored` in theirs.

    e4m3 becomes float16 in one instruction for two numbers, and bfloat16 in one more for each; either is exact. Queries in
    float16 differ from those in bfloat16 beyond 65504, which they are cut at, and below 2^-14, by at most 2^-25.
    """
    if q.dtype == tl.bfloat16 and (stored == tl.float8e4nv or stored == tl.int16):
        return tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    else:
        return q


@triton.jit
def columns(q, PAIRS: tl.constexpr):
    """Queries for `logits`: even and odd columns if keys are pairs, else all of them twice."""
    if PAIRS:
        return tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
    else:
        return q, q


@triton.jit
def _half(pairs, ODD: tl.constexpr, dtype: tl.constexpr):
    """The first or second numbers of pairs of e4m3. In assembly those of two pairs, which lie in one register of an operand."""
    if INTERPRETED:
        return (pairs >> (8 if ODD else 0)).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        ASM: tl.constexpr = (
            "{ .reg .b32 x; .reg .b16 even, odd; prmt.b32 x, $1, 0, 0x3120; mov.b32 {even, odd}, x; cvt.rn.f16x2.e4m3x2 $0, "
            + ("odd; }" if ODD else "even; }")
        )
        return tl.inline_asm_elementwise(ASM, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2).to(dtype)


@triton.jit
def read(x, dtype: tl.constexpr):
    """Keys or values as operands of products. Pairs stay what they are until then: operands have a layout of their own."""
    return x if x.dtype == tl.int16 else x.to(dtype)


@triton.jit
def logits(q, q_odd, k, s):
    """`s` (or nothing) plus the products of queries and keys."""
    if k.dtype == tl.int16:
        s = tl.dot(q, tl.trans(_half(k, False, q.dtype)), s, input_precision="ieee")
        return tl.dot(q_odd, tl.trans(_half(k, True, q.dtype)), s, input_precision="ieee")
    else:
        return tl.dot(q, tl.trans(k), s, input_precision="ieee")


@triton.jit
def outputs(p, v, acc, acc_odd, dtype: tl.constexpr):
    """Outputs so far plus weights times values; of pairs, even and odd columns."""
    p = p.to(dtype)
    if v.dtype == tl.int16:
        acc = tl.dot(p, _half(v, False, dtype), acc, input_precision="ieee")
        return acc, tl.dot(p, _half(v, True, dtype), acc_odd, input_precision="ieee")
    else:
        return tl.dot(p, v, acc, input_precision="ieee"), acc_odd


@triton.jit
def attend(
    q0, q1, k_cache, k_rest, v_cache, table, page, kv_head, first_key, last_key, seq_len, all_seen, position, words,
    first_seen, slots, qk_scale, softcap, k_stride_page, k_stride_token, k_stride_h, v_stride_page, v_stride_token, v_stride_h,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, MASK_LEN: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SHARED_KV: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    CLEAR: tl.constexpr, HOLES: tl.constexpr, WIDE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of rows over the keys `[first_key, last_key)` of one request and KV head.

    `first_key` is a multiple of `BLOCK_N`; keys before `all_seen` are seen by every row. `position`, `words`: of `query_rows`;
    `first_seen`, `slots`, `HOLES`: of `seen_by_any`; `WIDE`: of `times`; `ORDERED`: of `row_sums`. Returns each row's maximum
    (base 2), sum and unnormalized output.
    """
    stored: tl.constexpr = k_cache.dtype if TMA else k_cache.dtype.element_ty
    PAIRS: tl.constexpr = stored == tl.int16
    PER: tl.constexpr = 2 if PAIRS else 1  # numbers in one of the cache's
    SOME_UNSEEN: tl.constexpr = WINDOW >= 0 or HOLES
    q0, q0_odd = columns(operand(q0, stored), PAIRS)
    q1, q1_odd = columns(operand(q1, stored), PAIRS)
    d0 = tl.arange(0, D0 // PER)
    d1 = D0 // PER + tl.arange(0, D1 // PER) if D1 > 0 else d0
    dv = tl.arange(0, BLOCK_DV // PER)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = opaque_zeros(BLOCK_M, BLOCK_DV // PER)
    acc_odd = acc if PAIRS else 0.0
    # Page ids are loaded one block ahead: a load whose address depends on a load of the same iteration would take
    # pipeline stages from the keys and values.
    if TMA:
        # What lies after `seq_len` in a request's last page may be NaN, and zero times NaN is NaN. Either the loop clears such
        # values, or a partly filled block comes after it, and pays the latency of its loads.
        full = last_key if CLEAR else tl.minimum(last_key, seq_len // BLOCK_N * BLOCK_N)
        for start in tl.range(first_key, full, BLOCK_N, num_stages=STAGES):
            slot = page * PAGE + start % PAGE
            page = tl.load(table + (start + BLOCK_N) // PAGE, mask=start + BLOCK_N < last_key, other=0)
            n = start + tl.arange(0, BLOCK_N)
            k0 = read(k_cache.load([slot, kv_head * (D // PER)]), q0.dtype)
            s = logits(q0, q0_odd, k0, None)
            if D1 > 0:
                k1 = read(k_rest.load([slot, kv_head * (D // PER) + D0 // PER]), q0.dtype)
                s = logits(q1, q1_odd, k1, s)
            masked = (WINDOW >= 0) | (start + BLOCK_N > all_seen)
            p, m, l, shrink = _weights(
                s, m, l, n, masked, seq_len, position, words, qk_scale, softcap, MASK_LEN, WINDOW, HAS_SOFTCAP, ORDERED,
                q0.dtype,
            )  # fmt: skip
            acc = acc * shrink
            acc_odd = acc_odd * shrink if PAIRS else acc_odd
            v = k0 if SHARED_KV else read(v_cache.load([slot, kv_head * (DV // PER)]), q0.dtype)
            if CLEAR:
                unseen = start + BLOCK_N > (seq_len - MASK_LEN if HOLES else seq_len)
                if WINDOW >= 0:
                    unseen = unseen | (start < first_seen)
                if unseen:
                    valid = seen_by_any(n, first_seen, seq_len, slots, MASK_LEN, WINDOW, HOLES)
                    acc, acc_odd = outputs(p, tl.where(valid[:, None], v, 0), acc, acc_odd, q0.dtype)
                else:
                    acc, acc_odd = outputs(p, v, acc, acc_odd, q0.dtype)
            else:
                acc, acc_odd = outputs(p, v, acc, acc_odd, q0.dtype)
        if SOME_UNSEEN and not CLEAR:
            # Nor are the values of keys that no query sees cleared in that loop: their weights are 0. If the result is not a
            # number, one of them may be why, and all blocks go through the loop that clears. (With `max` alone Triton 3.7 fails
            # on sm_100: it follows the accumulator's layout to that vector, where a second reduction has none.)
            sums = tl.sum(acc + acc_odd if PAIRS else acc, 1)
            if tl.max(tl.cumsum((sums != sums).to(tl.int32), 0), 0) > 0:
                m = tl.full([BLOCK_M], float("-inf"), tl.float32)
                l = tl.zeros([BLOCK_M], tl.float32)
                acc = opaque_zeros(BLOCK_M, BLOCK_DV // PER)
                acc_odd = acc if PAIRS else 0.0
                full = first_key
                page = first_pages(table, first_key, last_key, seq_len, PAGE, BLOCK_N)
        # Otherwise one iteration at most: a loop, so that its keys and values are asked for together.
        for start in tl.range(full, last_key, BLOCK_N, num_stages=2):
            slot = page * PAGE + start % PAGE
            if SOME_UNSEEN:
                page = tl.load(table + (start + BLOCK_N) // PAGE, mask=start + BLOCK_N < last_key, other=0)
            n = start + tl.arange(0, BLOCK_N)
            valid = seen_by_any(n, first_seen, seq_len, slots, MASK_LEN, WINDOW, HOLES)
            k0 = read(k_cache.load([slot, kv_head * (D // PER)]), q0.dtype)
            if SHARED_KV:
                k0 = tl.where(valid[:, None], k0, 0)
            s = logits(q0, q0_odd, k0, None)
            if D1 > 0:
                k1 = read(k_rest.load([slot, kv_head * (D // PER) + D0 // PER]), q0.dtype)
                s = logits(q1, q1_odd, k1, s)
            p, m, l, shrink = _weights(
                s, m, l, n, True, seq_len, position, words, qk_scale, softcap, MASK_LEN, WINDOW, HAS_SOFTCAP, ORDERED, q0.dtype
            )
            acc = acc * shrink
            acc_odd = acc_odd * shrink if PAIRS else acc_odd
            v = k0 if SHARED_KV else tl.where(valid[:, None], read(v_cache.load([slot, kv_head * (DV // PER)]), q0.dtype), 0)
            acc, acc_odd = outputs(p, v, acc, acc_odd, q0.dtype)
    else:
        k_head = k_cache + kv_head.to(tl.int64) * k_stride_h
        v_head = v_cache + kv_head.to(tl.int64) * v_stride_h
        # From 0: where a loop begins at another value, Triton 3.7 sees no contiguous addresses and reads 2 bytes at a time.
        for walked in tl.range(0, last_key - first_key, BLOCK_N, num_stages=STAGES):
            start = first_key + walked
            n = start + tl.arange(0, BLOCK_N)
            valid = seen_by_any(n, first_seen, seq_len, slots, MASK_LEN, WINDOW, HOLES)
            k_row = k_head + page.to(tl.int64) * k_stride_page + times(n % PAGE, k_stride_token, WIDE)
            v_row = v_head + page.to(tl.int64) * v_stride_page + times(n % PAGE, v_stride_token, WIDE)
            if PAGE % BLOCK_N == 0:
                page = tl.load(table + (start + BLOCK_N) // PAGE, mask=start + BLOCK_N < last_key, other=0)
            else:
                page = tl.load(table + (n + BLOCK_N) // PAGE, mask=n + BLOCK_N < seq_len, other=0)
            k0 = tl.load(k_row[:, None] + d0[None, :], mask=valid[:, None], other=0.0)
            k0 = read(k0, q0.dtype)
            s = logits(q0, q0_odd, k0, None)
            if D1 > 0:
                k1 = tl.load(k_row[:, None] + d1[None, :], mask=valid[:, None] & (d1 < D // PER)[None, :], other=0.0)
                s = logits(q1, q1_odd, read(k1, q0.dtype), s)
            masked = (WINDOW >= 0) | (start + BLOCK_N > all_seen)
            p, m, l, shrink = _weights(
                s, m, l, n, masked, seq_len, position, words, qk_scale, softcap, MASK_LEN, WINDOW, HAS_SOFTCAP, ORDERED,
                q0.dtype,
            )  # fmt: skip
            acc = acc * shrink
            acc_odd = acc_odd * shrink if PAIRS else acc_odd
            if SHARED_KV:
                v = k0
            else:
                v = tl.load(v_row[:, None] + dv[None, :], mask=valid[:, None] & (dv < DV // PER)[None, :], other=0.0)
                v = read(v, q0.dtype)
            acc, acc_odd = outputs(p, v, acc, acc_odd, q0.dtype)
    return m, l, tl.interleave(acc, acc_odd) if PAIRS else acc
