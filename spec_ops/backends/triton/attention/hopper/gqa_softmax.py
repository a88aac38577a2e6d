"""The softmax of `gqa.py` on blocks of products `[64, keys]`, in Gluon: steps of the online softmax.

A row lies with four threads, and each has a quarter of every row that it has a part of.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from spec_ops.backends.triton.attention.hopper.program import exp_shift


@gluon.jit
def row_max(s):
    """`gl.max(s, 1)`, in two steps: in one, a thread's numbers are a chain of dependent instructions."""
    parts = s.reshape([64, 4, s.shape[1] // 4])
    return gl.convert_layout(gl.max(gl.max(parts, 1), 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def thread_sums(p):
    """`[64, 4]`: what each of a row's four threads has of `gl.sum(p, 1)`."""
    return gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def scale_rows(x, factor):
    return x * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout)), 1)


@gluon.jit
def softmax_step(s, m, qk_scale):
    """Online softmax of a block: weights, maxima, and what to scale sums and output so far with."""
    m_new = gl.maximum(m, row_max(s) * qk_scale)
    shift = exp_shift(m_new)
    p = gl.exp2(s * qk_scale - gl.expand_dims(shift, 1))
    shrink = gl.exp2(m - shift)
    return p, m_new, shrink
