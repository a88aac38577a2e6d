"""What is batch-invariant, what is replaced and what is refused; eagerly, and as nodes of a graph."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spec_ops
from spec_ops.backends.registry import BackendError, invariant_backend
from spec_ops.ops import invariance
from spec_ops.ops._library import INVARIANCE
from spec_ops.ops.eager_invariance import BatchInvariant
from spec_ops.ops.invariance import KEPT, NotInvariantError, judge, named_arguments
from spec_ops.ops.linear import skinny_mm_op
from spec_ops.ops.reference.invariant import _rounded_sum, fused_product

G = torch.Generator().manual_seed(0)
WEIGHT, DEEP = (torch.randn(shape, generator=G) for shape in ((80, 96), (4, 96, 33)))
BIAS = torch.randn(80, generator=G)

# Of rows `x [m, 96]`: a result with a row for each.
ROWWISE: dict[str, Any] = {
    "linear": lambda x: F.linear(x, WEIGHT.to(x.dtype)),
    "linear with a bias": lambda x: F.linear(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    "a product and a residual": lambda x: torch.addmm(x[:, :80], x, WEIGHT.to(x.dtype).t()),
    "a product and a bias of one row": lambda x: torch.addmm(BIAS.to(x.dtype)[None], x, WEIGHT.to(x.dtype).t()),
    "batched": lambda x: torch.einsum("mk,hkn->mhn", x, DEEP.to(x.dtype)),
    "rms_norm": lambda x: F.rms_norm(x, (96,), BIAS[:1].to(x.dtype).expand(96), 1e-6),
    "layer_norm": lambda x: F.layer_norm(x, (96,), None, None, 1e-6),
    "softmax": lambda x: x.float().softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mean over two dimensions": lambda x: x.view(-1, 8, 12).mean((1, 2), keepdim=True),
    "var": lambda x: x.var(-1),
    "silu": F.silu,
    "gelu": F.gelu,
    "in place": lambda x: x.clone().exp_().mul_(2.0),
    "cos": lambda x: x.float().cos() * x.unsqueeze(1).sin().squeeze(1),
    "argmax": lambda x: x.argmax(-1),
    "top-k": lambda x: x.topk(3, -1).values,
    "mantissas": lambda x: torch.frexp(x.float())[0],
    "a linear layer of each row": lambda x: torch.vmap(lambda row: F.linear(row, WEIGHT.to(x.dtype)))(x),
}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x if not x.is_floating_point() else x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ROWWISE)
def test_bits_of_rows(name, dtype):
    """Of 37 rows, each alone, and some of them: the same bits. And about what eager gives."""
    function = ROWWISE[name]
    x = torch.randn(37, 96, generator=G).to(dtype)
    with BatchInvariant():
        whole = function(x)
        for rows in (*(slice(i, i + 1) for i in (0, 5, 36)), slice(3, 6), slice(20, 37)):
            assert torch.equal(bits(function(x[rows])), bits(whole[rows])), rows
    want, error = function(x), {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(whole, want, rtol=error, atol=8 * error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_on_cuda(dtype):
    """What `F.rms_norm` calls there: one launch, with the bits of its parts; those where gradients need more, or in float64."""
    norm, x, weight = torch.ops.aten._fused_rms_norm.default, torch.randn(5, 7, 96, generator=G), torch.randn(96, generator=G)

    def run(x: torch.Tensor, weight: torch.Tensor | None, eps: float | None) -> Any:
        return BatchInvariant().__torch_dispatch__(norm, (), (x, [96], weight, eps))

    for eps, w in ((1e-5, weight), (None, weight.to(dtype)), (0.1, None)):
        out, nothing = run(x.to(dtype), w, eps)
        parts, rstd = run(x.to(dtype, copy=True).requires_grad_(), w, eps)
        assert nothing is None
        assert rstd.shape == (5, 7, 1)
        assert torch.equal(bits(out), bits(parts))
    assert run(x.double(), weight.double(), None)[1] is not None
    for empty in ((0, 7, 96), (3, 0)):  # rows, and what is normalized
        out, nothing = BatchInvariant().__torch_dispatch__(norm, (), (torch.empty(empty), empty[-1:], None, None))
        assert out.shape == empty
        assert nothing is None
    with pytest.raises(RuntimeError, match="invalid"):  # not norms of parts of a row
        BatchInvariant().__torch_dispatch__(norm, (), (x, [48], None, None))
    with pytest.raises(RuntimeError, match="mean"):
        run(x.int(), None, None)
    over_two = BatchInvariant().__torch_dispatch__(norm, (), (x, [7, 96], None, None))
    torch.testing.assert_close(over_two[0], F.rms_norm(x, (7, 96)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "transposed"), [(1, False), (17, False), (17, True)])
def test_products_of_which_each_has_its_own_matrix(n, transposed, dtype):
    """A matrix's place in a batch decides where it begins, and of one row or column how a stride is written."""
    a = torch.randn(9, 3, 97, generator=G).to(dtype)
    b = torch.randn((9, n, 97) if transposed else (9, 97, n), generator=G).to(dtype)
    b = b.transpose(1, 2) if transposed else b
    with BatchInvariant():
        whole, dots = torch.bmm(a, b), torch.einsum("bk,bk->b", a[:, 0], b[..., 0])
        for i in range(9):
            assert torch.equal(bits(torch.bmm(a[i : i + 1], b[i : i + 1].clone())), bits(whole[i : i + 1]))
            assert torch.equal(bits(torch.einsum("bk,bk->b", a[i : i + 1, 0], b[i : i + 1, :, 0])), bits(dots[i : i + 1]))
    torch.testing.assert_close(whole, torch.bmm(a, b), rtol=1e-2, atol=0.1 if dtype == torch.bfloat16 else 1e-4)


def test_without_it_rows_differ():
    """What all this is for: torch's own product of this row has other bits beside others."""
    g = torch.Generator().manual_seed(3)
    found = set()
    for _ in range(8):
        x, weight = torch.randn(8, 1024, generator=g), torch.randn(256, 1024, generator=g)
        found.add(torch.equal(F.linear(x, weight)[:1], F.linear(x[:1], weight)))
        with BatchInvariant():
            assert torch.equal(F.linear(x, weight)[:1], F.linear(x[:1], weight))
    assert False in found


def test_values_are_alike_wherever_they_stand():
    """More values than a thread takes, and a number that no vector divides."""
    x = torch.full((40_001,), 0.3712)
    with BatchInvariant():
        for function in (torch.exp, torch.sigmoid, torch.tanh, F.silu, torch.rsqrt, lambda x: x**1.7):
            assert torch.equal(function(x), function(x[:3])[:1].expand(40_001))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x.sum(0), r"aten.sum.dim_IntList is over dimension 0 of \[4, 96\], so that it mixes rows"),
        (lambda x: x.sum(), "aten.sum.default is over dimension 0 of"),
        (lambda x: x.amax(0), "aten.amax.default is over dimension 0 of"),
        (lambda x: x.cumsum(0), "aten.cumsum.default is not known to be batch-invariant"),
        (lambda x: x.new_zeros(3).index_add(0, torch.tensor([0, 0, 1, 2]), x[:, 0]), "aten.index_add"),
        (lambda x: x.index_put((torch.tensor([0, 0]),), x[:2], accumulate=True), "adds floats in any order"),
        (lambda x: F.conv1d(x[:, None], x[:1, None, :3]), "conv"),
        (lambda x: torch.addmm(x[:, :80], x, WEIGHT.t(), alpha=2.0), "with `beta` or `alpha`"),
        (lambda x: torch.rand_like(x), "aten.rand_like.default is not known"),
        (lambda x: torch.fft.fft(x), "aten._fft_r2c"),
    ],
)
def test_refused(function, text):
    x = torch.randn(4, 96, generator=G)
    with BatchInvariant(), pytest.raises(NotInvariantError, match=text):
        function(x)


def test_a_conversion_that_torch_does_not_decompose():
    """On CUDA with torch 2.11 an RMS norm ends in it."""
    op, x = torch.ops.aten.type_as.default, torch.zeros(2)
    assert judge(op, named_arguments(op, (x, x), {}), lambda operand: operand) == KEPT


def test_a_copy_keeps_its_layout():
    x = torch.randn(2, 3, 4, 5, generator=G)
    with BatchInvariant():
        assert x.transpose(1, 3).clone().stride() == x.transpose(1, 3).stride()
        assert x.clone(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)


def test_integers_may_be_added_in_any_order():
    x = torch.arange(12).view(3, 4)
    with BatchInvariant():
        assert x.sum().item() == 66
        assert x.cumsum(0)[-1].tolist() == [12, 15, 18, 21]
        assert (x > 3).any(0).all()


def test_our_ops():
    """An argument that decides is set; a named backend that is not batch-invariant is refused, one that is stays."""
    x, weight = torch.randn(9, 128, generator=G).bfloat16(), torch.randn(48, 128, generator=G).bfloat16()
    with BatchInvariant():
        assert torch.equal(skinny_mm_op(x, weight, None), skinny_mm_op(x, weight, None, invariant=True))
        assert torch.equal(skinny_mm_op(x, weight, None)[4:5], skinny_mm_op(x[4:5], weight, None))
    q, cache = torch.randn(1, 2, 4, 16, generator=G), torch.randn(2, 8, 4, 16, generator=G)
    tables, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    call = lambda **given: spec_ops.mha_target_verify(q, cache, cache, tables, lens, **given)  # noqa: E731
    with BatchInvariant():
        assert torch.equal(call(), call(backend="reference-deterministic"))
        with pytest.raises(NotInvariantError, match="mha_target_verify by the backend 'reference' is not batch-invariant"):
            call(backend="reference")
        with pytest.raises(NotInvariantError, match="sampling_probs is not batch-invariant"):
            spec_ops.sampling_probs(q[:, 0, 0], torch.ones(1))
    assert torch.equal(call(deterministic=True), call(backend="reference-deterministic"))


@pytest.mark.parametrize("name", [name for name in ROWWISE if name.startswith(("linear", "a product"))])
def test_products_with_weights_that_a_gpu_reads_once(name, monkeypatch):
    """On Hopper and newer these are `skinny_mm`'s, whose reference runs here."""
    calls = []
    monkeypatch.setattr(invariance, "invariant_weight", lambda right, arch: calls.append(right.shape) is None)
    function, x = ROWWISE[name], torch.randn(5, 96, generator=G)
    with BatchInvariant():
        whole = function(x)
        assert torch.equal(function(x[2:3]), whole[2:3])
    assert calls == [(96, 80)] * 2
    torch.testing.assert_close(whole, function(x), rtol=1e-5, atol=1e-4)


def test_every_op_is_declared():
    """What declares nothing is refused; the list is short, and each is here for a reason."""
    refused = {op._schema.name.split("::")[1] for op, declared in INVARIANCE.items() if declared is False}
    # Sums of float probabilities, which no round calls; and norms in products and mixtures, and products of float8, whose tiles
    # follow the rows, with the roundings that are for them alone.
    in_products = {"add_skinny_mm", "scaled_skinny_mm", "add_moe_experts", "scaled_moe_experts", "float8_mm"}
    roundings = {"round_rows", "gated_round_rows", "norm_round_rows", "add_norm_round_rows"}
    assert refused == {"accept_sampled", "sampling_probs", "sample_tokens"} | in_products | roundings
    assert set(map(str, INVARIANCE.values())) == {"True", "False", "backend", "invariant"}


def test_backends():
    assert invariant_backend(None) == "reference-deterministic"
    assert invariant_backend(90) == invariant_backend(120) == "triton-deterministic"
    with pytest.raises(BackendError, match="no batch-invariant attention backend runs on sm_75"):
        invariant_backend(75)


def test_float32_products_in_the_stated_order():
    """Against the C library's `fmaf`, one number at a time; some sums nearly cancel."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 300, generator=g), torch.randn(300, 9, generator=g)
    a[:, 1::2], b[1::2] = -a[:, ::2] * (1 + 2**-20), b[::2] * (1 + 2**-21)
    want = torch.zeros(8, 9)
    for i, j in itertools.product(range(8), range(9)):
        for k in range(300):
            want[i, j] = fmaf(a[i, k].item(), b[k, j].item(), want[i, j].item())
    assert torch.equal(fused_product(a, b), want)
    # A sum in float64 that lies halfway between two float32, and the exact one does not: rounded twice it would be 1.
    total = _rounded_sum(
        torch.tensor([1.0 + 2**-24, -1.0 - 2**-24], dtype=torch.float64), torch.tensor([2.0**-80, -(2.0**-80)]).double()
    )
    assert total.tolist() == [1 + 2**-23, -1 - 2**-23]
    # A sum that has left the range of float32 stays infinite; of opposite infinities there is none.
    factors = torch.tensor([[2.0, -2.0, 2.0], [1.0, 1.0, -torch.inf]])
    total = fused_product(torch.tensor([[3e38, 1.0]]), factors)
    torch.testing.assert_close(total, torch.tensor([[torch.inf, -torch.inf, torch.nan]]), equal_nan=True)
