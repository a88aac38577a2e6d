"""What lies between an expert's two products, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


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
