"""Logits as integers: keys that order tokens, and fixed-point weights whose sums are exact.

A token's weight is `exp((logit - top) / temperature)` in units of 2**-44, truncated. Here it is `exp2((logit - top) * scale)`
with `scale = log2(e) / temperature`: exp is exp2 of a product anyway, and a correctly rounded division takes as long as all the
rest, in every pass. Equal logits have equal weights, and the largest one has exactly `ONE`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ONE = tl.constexpr(1 << 44)  # weight of the most likely token
UNIFORM_BITS = tl.constexpr(24)
KEY_OUTSIDE = tl.constexpr(-(1 << 31))  # below every token's key
NOTHING_CUT = tl.constexpr(-(1 << 63))  # below every token's place
BEYOND = tl.constexpr((1 << 63) - 1)  # above every token's place
LOWEST = tl.constexpr(0x7FFFFFFF)
MASKED_LAST = tl.constexpr(-2)  # of a row without a token: `last` of its support

# Low bits of a float32 that no value of the dtype uses.
KEY_SHIFT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def logit_key(logits, SHIFT: tl.constexpr):
    """int32 that orders float32 values as `<` does, both zeros alike; NaN anywhere. Values of 16 bits have neighbouring keys if
    they are neighbours."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def key_logit(key, SHIFT: tl.constexpr):
    """The float32 value of an int32 key."""
    filled = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (filled ^ ((filled >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def infinite_keys(SHIFT: tl.constexpr):
    """Keys of -inf and of inf."""
    inf = tl.full([], 0x7F800000, tl.int32)
    return (-1 - inf) >> SHIFT, inf >> SHIFT


@triton.jit
def token_place(key, ids):
    """int64 that orders the tokens of a row from the least to the most likely; of equal logits the lower id is the higher."""
    return (key.to(tl.int64) << 32) + (LOWEST - ids.to(tl.int64))


@triton.jit
def place_id(place):
    return (place & LOWEST) ^ LOWEST


@triton.jit
def weight_scale(temperature):
    """Positive and finite for every temperature above 0: 0 times infinity is no number."""
    return tl.minimum(tl.maximum(1.4426950408889634 / temperature, 1.1754944e-38), 3.4028234e38)


@triton.jit
def relative(logits, top, scale):
    """Probability over that of the largest logit."""
    return tl.exp2((logits - top) * scale)


@triton.jit
def weight_parts(logits, top, scale):
    """A weight as `high * 2**22 + low`, both int32: `0 <= high <= 2**22`, `-2**21 <= low <= 2**21`. Sums of 511 fit.

    Sums of float32 that round to integers stand for conversions, which take a GPU as long as four of them, to int64 eight.
    """
    scaled = relative(logits, top, scale) * 4194304.0
    rounded = scaled + 8388608.0  # 2**23: the last bit is worth 1, and the low bits are the integer's
    rest = (scaled - (rounded - 8388608.0)) * 4194304.0  # exact
    nearest = rest + 12582912.0  # 1.5 * 2**23, also of negative ones
    low = nearest.to(tl.int32, bitcast=True) - 0x4B400000 - (nearest - 12582912.0 > rest).to(tl.int32)
    return rounded.to(tl.int32, bitcast=True) - 0x4B000000, low


@triton.jit
def whole_weight(high, low):
    """int64 of the two parts of weights, or of sums of them."""
    return (high.to(tl.int64) << 22) + low


@triton.jit
def fixed_weight(logits, top, scale):
    high, low = weight_parts(logits, top, scale)
    return whole_weight(high, low)


@triton.jit
def draw_level(uniform, total):
    """`floor(u * total)`; the product has up to 88 bits."""
    coin = (uniform * 16777216.0).to(tl.int64)
    coin = tl.minimum(tl.maximum(coin, 0), 16777215)
    return (total >> UNIFORM_BITS) * coin + (((total & 16777215) * coin) >> UNIFORM_BITS)


@triton.jit
def support_of(logits, stride, support, temperature, SHIFT: tl.constexpr):
    """Of a row: largest logit, scale, place of the least likely kept token, total; `support`: its three integers."""
    top_id = tl.load(support)
    last = tl.load(support + 1)
    total = tl.load(support + 2)
    top = tl.load(logits + top_id * stride).to(tl.float32)
    bound = tl.load(logits + tl.maximum(last, 0) * stride).to(tl.float32)
    least = tl.where(last < 0, NOTHING_CUT, token_place(logit_key(bound, SHIFT), last))
    return top, weight_scale(temperature), least, total


@triton.jit
def kept_weight(logits, ids, top, scale, least, SHIFT: tl.constexpr):
    """Weights of tokens by their logits; 0 for those that are cut."""
    kept = token_place(logit_key(logits, SHIFT), ids) >= least
    return tl.where(kept, fixed_weight(logits, top, scale), 0)
