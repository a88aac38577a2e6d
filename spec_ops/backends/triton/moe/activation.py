"""What lies between an expert's two products, in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.linear.words import word_place


@triton.jit
def activated(values, alpha, ACTIVATION: tl.constexpr):
    """`ACTIVATION`: a name of `spec_ops.ops.moe.ACTIVATIONS`."""
    if ACTIVATION == "silu":
        return values * tl.sigmoid(alpha * values)
    elif ACTIVATION == "gelu":
        return 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # tanh(z) = 2 * sigmoid(2z) - 1, which neither overflows nor needs a library.
        inner = 0.7978845608028654 * (values + 0.044715 * values * values * values)
        return values * tl.sigmoid(2.0 * inner)
    else:
        positive = tl.where(values > 0, values, values * 0.0)  # NaN stays NaN
        return positive * positive if ACTIVATION == "relu2" else positive


@triton.jit
def gated(gate, up, limit, alpha, beta, ACTIVATION: tl.constexpr):
    """`limit`: None for none."""
    if limit is not None:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return activated(gate, alpha, ACTIVATION) * (up + beta)


@triton.jit
def load_bias(
    bias, expert, n, inner, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, UP: tl.constexpr
):  # fmt: skip
    """Columns `n` of an expert's bias, of the up projection if `UP` is 1."""
    at = (2 * n + UP if INTERLEAVED else UP * inner + n) if GATED else n
    return tl.load(bias + expert.to(tl.int64) * (2 * inner if GATED else inner) + at, mask=n < inner, other=0.0)


@triton.jit
def store_activated(
    acc, other, gate_bias, up_bias, rstd, mine, share, rank, n, h, inner, limit, alpha, beta,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Sums `acc` and `other` over all of k become columns `n` of part `rank` of `h`: activations times the router's weight,
    zeros where a token does not go to the expert. `rstd [1, BLOCK_M]` or None scales rows; biases: of `load_bias`, or None;
    `mine`, `share [BLOCK_M, ..]`: which of the tokens' experts it is, and their weights. `ORDERED`: as in `word_rows`."""
    if rstd is not None:
        acc *= rstd
        other *= rstd
    if GATED and INTERLEAVED:
        acc, other = tl.split(tl.permute(tl.reshape(acc, [BLOCK_N, 2, BLOCK_M]), (0, 2, 1)))
    if gate_bias is not None:
        acc += gate_bias.to(tl.float32)[:, None]
        if GATED:
            other += up_bias.to(tl.float32)[:, None]
    acc = gated(acc, other, limit, alpha, beta, ACTIVATION) if GATED else activated(acc, alpha, ACTIVATION)
    goes = tl.max(mine.to(tl.int32), 1) > 0
    weight = tl.sum(tl.where(mine, share, 0.0), 1)
    acc = tl.where(goes[None, :], acc * weight[None, :], 0.0)
    m = tl.arange(0, BLOCK_M)
    place = word_place(n) if ORDERED else n
    to = h + (rank * BLOCK_M + m).to(tl.int64)[None, :] * inner + place[:, None]
    tl.store(to, acc.to(h.dtype.element_ty), mask=(n < inner)[:, None])
