"""Numbers of MXFP4 as the kernels for few tokens take them: eight a word, in an order of k that costs few instructions.

Those kernels are bound by instructions, most of all by those of integers, of which a multiprocessor does half as many as of
floats. So the eight numbers of a word are taken apart where they lie: numbers i and i + 4 are in the two halves of a word, one
mask for both, and a multiplication puts copies of them where the sign and where the rest of a bfloat16 is (`linear/float4.py`).

The order of k is that of `linear/words.py`: with a chunk of 128 of k a thread has all 32 numbers of a scale.

A number is left times 2^-126, and a scale takes that back: it is `2^126 / WORD_REST` times what it is, of which the sum takes
the rest. That is exact for scales up to 2^6. A greater one is infinite, so that its sums are no numbers, and those are computed
again with two factors (`EXACT`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.linear.quantized import INTERPRETED
from spec_ops.backends.triton.linear.words import pair_numbers

WORD_REST = tl.constexpr(2.0**5)
GREATEST = tl.constexpr(133)  # the byte of 2^6


def _pairs(mask: int, factor: int, exact: bool) -> str:
    """PTX: `$0`, numbers i and i + 4 of the word `$1` times the pair `$2`."""
    steps = [f"and.b32 p, $1, 0x{mask:08X}", f"mul.lo.u32 p, p, 0x{factor:X}", "and.b32 p, p, 0x81C081C0"]
    steps += ["mov.b32 unit, 0x7E807E80", "mul.rn.bf16x2 p, p, unit"] * exact  # 2^126
    return f"{{ .reg .b32 p, unit; {'; '.join(steps)}; mul.rn.bf16x2 $0, p, $2; }}"


# i = 0 and i = 1; with a word that is shifted by 8, i = 2 and i = 3.
_EVEN, _EVEN_EXACT = (tl.constexpr(_pairs(0x000F000F, 0x1040, exact)) for exact in (False, True))
_ODD, _ODD_EXACT = (tl.constexpr(_pairs(0x00F000F0, 0x104, exact)) for exact in (False, True))

# The scale of a byte twice: as it is; or as 2^(byte - 126) of which 255 is infinite, times 2^120.
_SCALE_EXACT = tl.constexpr("{ .reg .b32 p; mul.lo.u32 p, $1, 0x00800080; max.u32 $0, p, 0x00400040; }")
_SCALE = tl.constexpr(
    "{ .reg .b32 p, unit; mad.lo.u32 p, $1, 0x00800080, 0x00800080; mov.b32 unit, 0x7B807B80; mul.rn.bf16x2 $0, p, unit; }"
)


@triton.jit
def _interpreted_pair(word, scale, dtype: tl.constexpr, EXACT: tl.constexpr):
    """What the assembly gives for number 0 and number 4 of `word`; `scale`: bytes."""
    BITS: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
    UNIT: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
    one = tl.maximum(scale.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
    if not EXACT:
        one = tl.where(scale > GREATEST, float("inf"), one / WORD_REST)
    one = one.to(dtype)
    both = word & 0x000F000F
    both = ((both & 0x00070007) << BITS) | ((both & 0x00080008) << 12)
    low = (both.to(tl.int16).to(dtype, bitcast=True) * UNIT).to(dtype) * one
    high = ((both >> 16).to(tl.int16).to(dtype, bitcast=True) * UNIT).to(dtype) * one
    wide = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return wide | (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def _assembled(CODE: tl.constexpr, word, scale):
    return tl.inline_asm_elementwise(CODE, "=r,r,r", [word, scale], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def word_numbers(words, scale, dtype: tl.constexpr, EXACT: tl.constexpr):
    """The numbers `[chunks, n, k]` of `words [chunks, n, k / 8]`, k in the order of `linear/words.py`, times `scale [chunks, n,
    k / 32]` as it is stored. Unless `EXACT` divided by `WORD_REST`, and no numbers if `scale` is above `GREATEST`."""
    C: tl.constexpr = words.shape[0]
    N: tl.constexpr = words.shape[1]
    W: tl.constexpr = scale.shape[2]
    parts = tl.reshape(words, [C, N, W, 4])
    upper = parts >> 8
    if INTERPRETED:
        one = tl.expand_dims(scale, -1)
        # Pairs 0 and 2; then 1 and 3.
        first = tl.join(_interpreted_pair(parts, one, dtype, EXACT), _interpreted_pair(upper, one, dtype, EXACT))
        second = tl.join(_interpreted_pair(parts >> 4, one, dtype, EXACT), _interpreted_pair(upper >> 4, one, dtype, EXACT))
    else:
        tl.static_assert(dtype == tl.bfloat16)
        one = tl.inline_asm_elementwise(
            _SCALE_EXACT if EXACT else _SCALE, "=r,r", [scale.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
        one = tl.expand_dims(one, -1)
        EVEN: tl.constexpr = _EVEN_EXACT if EXACT else _EVEN
        ODD: tl.constexpr = _ODD_EXACT if EXACT else _ODD
        first = tl.join(_assembled(EVEN, parts, one), _assembled(EVEN, upper, one))
        second = tl.join(_assembled(ODD, parts, one), _assembled(ODD, upper, one))
    return pair_numbers(first, second, dtype)


@triton.jit
def any_not_finite(sums):
    """Whether any of `sums` is infinite or NaN."""
    return tl.max(tl.max(sums.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0) >= 0x7F800000
