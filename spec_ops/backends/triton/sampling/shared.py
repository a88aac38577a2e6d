"""Words in a program's shared memory, for which Triton has no operation: counters and sums that threads add to, and lists that
they append to. The order in which they come shows in the order of a list alone.

In the interpreter global memory stands for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
WIDTH = tl.constexpr(1 if triton.knobs.runtime.interpret else 4)  # of a word in what addresses count
FEW_WORDS = tl.constexpr(1536)  # what a program has that does not count values
MANY_WORDS = tl.constexpr(8192)  # and one that does: `bins.py` says for what


@triton.jit
def shared_words(stand_in, MANY: tl.constexpr):
    """Where a program's words are: an address in shared memory, or the interpreter's stand-in for it. To be called once."""
    if INTERPRETED:
        return stand_in + tl.program_id(0) * MANY_WORDS
    none = tl.full([], 0, tl.int32)
    if MANY:
        return tl.inline_asm_elementwise(
            "{ .shared .align 16 .b32 words[8192]; mov.u32 $0, words; }", "=r,r", [none], dtype=tl.int32, is_pure=False, pack=1
        )
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b32 words[1536]; mov.u32 $0, words; }", "=r,r", [none], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def clear_words(words, at):
    if INTERPRETED:
        tl.store(words + at, 0)
    else:
        tl.inline_asm_elementwise(
            "st.shared.u32 [$1], 0; mov.u32 $0, 0;", "=r,r", [words + at * WIDTH], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def add_one(words, at):
    if INTERPRETED:
        tl.atomic_add(words + at, 1)
    else:
        tl.inline_asm_elementwise(
            "red.shared.add.u32 [$1], 1; mov.u32 $0, 0;", "=r,r", [words + at * WIDTH], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def add_where(words, at, amounts, mask):
    if INTERPRETED:
        tl.atomic_add(words + at, amounts, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p red.shared.add.u32 [$1], $2; mov.u32 $0, 0; }", "=r,r,r,r",
            [words + at * WIDTH, amounts, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def read_words(words, at):
    if INTERPRETED:
        return tl.load(words + at)
    return tl.inline_asm_elementwise(
        "ld.shared.u32 $0, [$1];", "=r,r", [words + at * WIDTH], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def read_long(words, at):
    """int64 of two words."""
    if INTERPRETED:
        low = tl.load(words + at).to(tl.int64) & 0xFFFFFFFF
        return (tl.load(words + at + 1).to(tl.int64) << 32) | low
    return tl.inline_asm_elementwise(
        "ld.shared.b64 $0, [$1];", "=l,r", [words + at * WIDTH], dtype=tl.int64, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def append_tokens(list_at, room, counter, ids, value, mask):
    """Note tokens at the next places of a list in global memory, int64 each, as long as there is `room`: the float32 `value` in
    the upper half, the id in the lower. The word `counter` counts them all."""
    bits = value.to(tl.int32, bitcast=True)
    if INTERPRETED:
        to = tl.atomic_add(counter + ids * 0, 1, mask=mask)
        tl.store(list_at + to, (bits.to(tl.int64) << 32) | ids.to(tl.int64), mask=mask & (to < room))
    else:
        tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .u32 to; .reg .u64 at;
            setp.eq.s32 p, $6, 0;
            @p bra NONE;
            atom.shared.add.u32 to, [$3], 1;
            setp.ge.u32 p, to, $2;
            @p bra NONE;
            mad.wide.u32 at, to, 8, $1;
            st.global.v2.b32 [at], {$4, $5};
            NONE: mov.u32 $0, 0; }""",
            "=r,l,r,r,r,r,r", [list_at, room, counter, ids, bits, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def append_pairs(words, room, counter, first, second, mask):
    """As `append_tokens`, pairs of int64 in shared memory from `words` on."""
    if INTERPRETED:
        to = tl.atomic_add(counter + (first * 0).to(tl.int32), 1, mask=mask)
        mask = mask & (to < room)
        tl.store(words + to * 4, first.to(tl.int32), mask=mask)
        tl.store(words + to * 4 + 1, (first >> 32).to(tl.int32), mask=mask)
        tl.store(words + to * 4 + 2, second.to(tl.int32), mask=mask)
        tl.store(words + to * 4 + 3, (second >> 32).to(tl.int32), mask=mask)
    else:
        tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .u32 to;
            setp.eq.s32 p, $6, 0;
            @p bra NONE;
            atom.shared.add.u32 to, [$3], 1;
            setp.ge.u32 p, to, $2;
            @p bra NONE;
            mad.lo.u32 to, to, 16, $1;
            st.shared.v2.b64 [to], {$4, $5};
            NONE: mov.u32 $0, 0; }""",
            "=r,r,r,r,l,l,r", [words, room, counter, first, second, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
