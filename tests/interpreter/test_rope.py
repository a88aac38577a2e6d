"""`rope_append_kv` in Triton's interpreter, bit for bit as the reference in float32 (the interpreter truncates to bfloat16)."""

from __future__ import annotations

import pytest
import torch

from spec_ops.backends.triton.cache import rope_append as rope
from spec_ops.ops.reference import rope as reference
from tests.helpers.op_cases import Copy

PAGES, PAGE = 5, 8


def heads_of(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalized and rotated, in float64."""
    x, half = x.double(), cos.shape[1]
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("normed", ["queries and keys", "queries", "keys"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "half"), [(4, 2, 16, 8), (9, 3, 32, 16), (12, 10, 12, 4), (8, 1, 6, 3), (1, 1, 2, 1)]
)
def test_norms(heads, kv_heads, dim, half, normed):
    """Against float64. The weight has another dtype than the rows; a head of zeros stays zero."""
    g = torch.Generator().manual_seed(heads * dim)
    slots = torch.tensor([3, -1, 17, 0])
    q, k, v = (torch.randn(4, h, dim, generator=g) * 3 for h in (heads, kv_heads, kv_heads))
    q[1, 0] = 0
    k_cache, v_cache = (torch.zeros(PAGES, PAGE, kv_heads, dim) for _ in range(2))
    angle = torch.randn(4, half, generator=g)
    q_norm, k_norm = (torch.randn(dim, generator=g).half() for _ in range(2))
    given = q_norm if "queries" in normed else None, k_norm if "keys" in normed else None
    got = rope.rope_append_kv(q, k, v, angle.cos(), angle.sin(), k_cache, v_cache, slots, 1.0, 1.0, *given, 1e-5)
    for weight, x, out in ((given[0], q, got), (given[1], k[slots >= 0], k_cache.flatten(0, 1)[slots[slots >= 0]])):
        rows = slice(None) if x is q else slots >= 0
        cos, sin = angle.cos()[rows], angle.sin()[rows]
        want = reference.rotate(x, cos, sin).double() if weight is None else heads_of(x, cos, sin, weight, 1e-5)
        # Some ten float32 operations on values of up to a few units; without the norm they are three times as large.
        torch.testing.assert_close(out.double(), want, rtol=0, atol=3e-6)
    assert not got[1, 0].any()
    assert torch.equal(v_cache.flatten(0, 1)[slots[slots >= 0]], v[slots >= 0])


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim", "half"),
    [(4, 2, 16, 16, 8), (9, 3, 32, 24, 16), (12, 10, 12, 12, 4), (8, 1, 6, 4, 3), (1, 1, 2, 1, 1)],
)
def test_like_the_reference(heads, kv_heads, dim, v_dim, half, strided):
    """More heads than a block holds, values narrower than keys, a part that does not rotate, sizes that are no power of two;
    dropped rows; queries, keys and values as slices of one projection, caches as layers of one pool."""
    g = torch.Generator().manual_seed(heads * dim)
    slots = torch.tensor([3, -1, PAGES * PAGE - 1, 0, -(2**31), 17])
    n = len(slots)
    if strided:
        sizes = [heads * dim, kv_heads * dim, kv_heads * v_dim]
        parts = torch.randn(n, sum(sizes), generator=g).split(sizes, 1)
        q, k, v = (part.unflatten(1, (-1, d)) for part, d in zip(parts, (dim, dim, v_dim), strict=True))
        pool = torch.randn(PAGES + 1, 2, PAGE, kv_heads, dim, generator=g)[1:]  # a row before the first slot
        k_cache, v_cache = pool[:, 0], pool[:, 1, ..., :v_dim]
        cos, sin = torch.randn(n, 2, half, generator=g).unbind(1)
    else:
        q, k, v = (torch.randn(n, h, d, generator=g) for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim)))
        k_cache, v_cache = (torch.randn(PAGES, PAGE, kv_heads, d, generator=g) for d in (dim, v_dim))
        cos, sin = (torch.randn(n, half, generator=g) for _ in range(2))
    args = (q, k, v, cos, sin, k_cache, v_cache, slots, 1.0, 1.0)
    ours, theirs = Copy(args, "cpu"), Copy(args, "cpu")
    got, want = rope.rope_append_kv(*ours.args), reference.rope_append_kv(*theirs.args)
    assert got.is_contiguous()
    assert torch.equal(got, want)
    for mine, expected in zip(ours.bytes(), theirs.bytes(), strict=True):
        assert torch.equal(mine, expected)


def test_keys_are_rounded_before_they_are_quantized():
    """To float16, which makes a tie between two numbers of the cache, 1.125 and 1.25, out of what is a little less."""
    k = torch.full((1, 2, 8), 1.1875).half()
    cache = torch.zeros(PAGES, PAGE, 2, 8).to(torch.float8_e4m3fn)
    cos, sin = torch.full((1, 3), 1 - 2.0**-13), torch.zeros(1, 3)
    args = (k, k, k, cos, sin, cache, cache.clone(), torch.tensor([9]), 1.0, 1.0)
    rope.rope_append_kv(*args)
    for stored in (args[5], args[6]):
        assert (stored.flatten(0, 1)[9].float() == 1.25).all()


def test_no_rows():
    empty = torch.zeros(0, 2, 4)
    cache = torch.zeros(1, 4, 2, 4)
    out = rope.rope_append_kv(
        empty, empty, empty, *[torch.zeros(0, 2)] * 2, cache, cache.clone(), torch.zeros(0).long(), 1.0, 1.0
    )
    assert out.shape == (0, 2, 4)
