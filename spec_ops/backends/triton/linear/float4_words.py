"""4-bit floats where each warp has a chunk of k, eight a word, in an order of k that costs few instructions.

Such kernels are bound by instructions, most of all by those of integers, of which a multiprocessor does half as many as of
floats. So the eight numbers of a word are taken apart where they lie: numbers i and i + 4 are in the two halves of a word, one
mask for both, and a multiplication puts copies of them where the sign and where the rest of a bfloat16 is (`float4.py`).

The order of k is that of `words.py`: with a chunk of 128 of k a thread has the 32 numbers of a scale of MXFP4, or of two of
NVFP4.

A number is left times 2^-126, and a scale takes that back. A scale of MXFP4 is `2^126 / WORD_REST` times what it is, of which
the sum takes the rest; exact for scales up to 2^6. A greater one is infinite, so that its sums are no numbers, and those are
computed again with two factors (`EXACT`). float16 has always two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.linear.float4 import UNITS, interpreted_scale, load_float4_scales, scale_pairs
from spec_ops.backends.triton.linear.quantized import INTERPRETED
from spec_ops.backends.triton.linear.words import load_rows, pair_numbers, word_rows

WORD_REST = tl.constexpr(2.0**5)
GREATEST = tl.constexpr(133)  # the byte of 2^6


def _pairs(kind: str, odd: bool, unit: bool) -> str:
    """PTX: `$0`, numbers i and i + 4 of the word `$1` times the pair `$2`."""
    if kind == "bf16":
        mask, factor = (0x00F000F0, 0x104) if odd else (0x000F000F, 0x1040)
        steps = [f"and.b32 p, $1, 0x{mask:08X}", f"mul.lo.u32 p, p, 0x{factor:X}", "and.b32 p, p, 0x81C081C0"]
        names = "p, unit"
    else:
        steps = [f"shl.b32 rest, $1, {5 if odd else 9}", "and.b32 rest, rest, 0x0E000E00", f"shl.b32 p, $1, {8 if odd else 12}"]
        steps += ["lop3.b32 p, p, 0x80008000, rest, 0xEA"]  # (a & b) | c
        names = "p, rest, unit"
    steps += [f"mov.b32 unit, 0x{UNITS[kind] * 0x10001:08X}", f"mul.rn.{kind}x2 p, p, unit"] * unit
    return f"{{ .reg .b32 {names}; {'; '.join(steps)}; mul.rn.{kind}x2 $0, p, $2; }}"


# i = 0 and i = 1; with a word that is shifted by 8, i = 2 and i = 3.
_EVEN, _EVEN_EXACT = (tl.constexpr(_pairs("bf16", False, unit)) for unit in (False, True))
_ODD, _ODD_EXACT = (tl.constexpr(_pairs("bf16", True, unit)) for unit in (False, True))
_EVEN_FP16, _EVEN_FP16_EXACT = (tl.constexpr(_pairs("f16", False, unit)) for unit in (False, True))
_ODD_FP16, _ODD_FP16_EXACT = (tl.constexpr(_pairs("f16", True, unit)) for unit in (False, True))

# The scale of a byte twice: as it is; or as 2^(byte - 126), infinite from 254 on (255 plus one would be the sign), times 2^120.
_SCALE_EXACT = tl.constexpr("{ .reg .b32 p; mul.lo.u32 p, $1, 0x00800080; max.u32 $0, p, 0x00400040; }")
_SCALE = tl.constexpr(
    "{ .reg .b32 p, unit; min.u32 p, $1, 254; mad.lo.u32 p, p, 0x00800080, 0x00800080; mov.b32 unit, 0x7B807B80; "
    "mul.rn.bf16x2 $0, p, unit; }"
)


@triton.jit
def _interpreted_pair(word, one, dtype: tl.constexpr, MX: tl.constexpr):
    """What the assembly gives for number 0 and number 4 of `word` times `one`."""
    BITS: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
    UNIT: tl.constexpr = (2.0**126 if dtype == tl.bfloat16 else 2.0**14) if MX else 1.0
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
    """The numbers `[chunks, n, k]` of `words [chunks, n, k / 8]`, k in the order of `words.py`, times `scale [chunks, n,
    groups]` as it is stored; of NVFP4 divided by `NV_REST`. Of MXFP4, unless `EXACT`, divided by `WORD_REST`, and no numbers if
    `scale` is above `GREATEST`."""
    C: tl.constexpr = words.shape[0]
    N: tl.constexpr = words.shape[1]
    MX: tl.constexpr = scale.dtype == tl.uint8
    GROUPS: tl.constexpr = scale.shape[2]
    parts = tl.reshape(words, [C, N, GROUPS, words.shape[2] // GROUPS])
    upper = parts >> 8
    if INTERPRETED:
        one = interpreted_scale(scale, dtype)
        if MX and not EXACT:
            one = tl.where(scale > GREATEST, float("inf"), one.to(tl.float32) / WORD_REST).to(dtype)
        one = tl.expand_dims(one, -1)
        # Pairs 0 and 2; then 1 and 3.
        first = tl.join(_interpreted_pair(parts, one, dtype, MX), _interpreted_pair(upper, one, dtype, MX))
        second = tl.join(_interpreted_pair(parts >> 4, one, dtype, MX), _interpreted_pair(upper >> 4, one, dtype, MX))
    else:
        if MX and dtype == tl.bfloat16:
            one = tl.inline_asm_elementwise(
                _SCALE_EXACT if EXACT else _SCALE, "=r,r", [scale.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
            )  # fmt: skip
        else:
            tl.static_assert(EXACT or not MX)
            one = scale_pairs(scale, dtype)
        one = tl.expand_dims(one, -1)
        UNIT: tl.constexpr = MX and EXACT
        BF16: tl.constexpr = dtype == tl.bfloat16
        EVEN: tl.constexpr = (_EVEN_EXACT if UNIT else _EVEN) if BF16 else (_EVEN_FP16_EXACT if UNIT else _EVEN_FP16)
        ODD: tl.constexpr = (_ODD_EXACT if UNIT else _ODD) if BF16 else (_ODD_FP16_EXACT if UNIT else _ODD_FP16)
        first = tl.join(_assembled(EVEN, parts, one), _assembled(EVEN, upper, one))
        second = tl.join(_assembled(ODD, parts, one), _assembled(ODD, upper, one))
    return pair_numbers(first, second, dtype)


@triton.jit
def any_not_finite(sums):
    """Whether any of `sums` is infinite or NaN."""
    return tl.max(tl.max(sums.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0) >= 0x7F800000


@triton.jit
def _sums(
    x, x_stride, weight, scale, scale_row, scale_column, tile, first, end, n, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype if x_stride is None else x.dtype.element_ty
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    sums = tl.zeros([CHUNKS, BLOCK_N, BLOCK_M], tl.float32)
    # Asked for a block ahead, as in `quantized_products`.
    s = load_float4_scales(scale, scale_row, scale_column, n, first * CHUNKS, N, K, CHUNK, CHUNKS, COLUMNS, CHUNK)
    for block in tl.range(first, end, num_stages=STAGES):
        rows = word_rows(load_rows(x, x_stride, block, M, K, BLOCK_M, CHUNKS, CHUNK), False)
        columns = word_numbers(weight.load([block * CHUNKS, tile * BLOCK_N, 0]), s, dtype, EXACT)
        sums = tl.dot(columns, rows, sums)
        s = load_float4_scales(scale, scale_row, scale_column, n, (block + 1) * CHUNKS, N, K, CHUNK, CHUNKS, COLUMNS, CHUNK)
    return tl.sum(sums, 0)


@triton.jit
def float4_word_products(
    x, x_stride, weight, scale, scale_row, scale_column, tile, first, end, n, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_N, BLOCK_M]` sums over blocks `first` to `end` of k, before `rest_of`; `weight` is a descriptor of words."""
    dtype: tl.constexpr = x.dtype if x_stride is None else x.dtype.element_ty
    AGAIN: tl.constexpr = scale.dtype.element_ty == tl.uint8 and (dtype == tl.bfloat16 or INTERPRETED)
    acc = _sums(
        x, x_stride, weight, scale, scale_row, scale_column, tile, first, end, n, M, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, STAGES, COLUMNS, not AGAIN,
    )  # fmt: skip
    if AGAIN:
        acc *= WORD_REST
        if any_not_finite(acc):
            acc = _sums(
                x, x_stride, weight, scale, scale_row, scale_column, tile, first, end, n, M, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, CHUNK, 1, COLUMNS, True,
            )  # fmt: skip
    return acc
