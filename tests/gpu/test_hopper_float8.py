"""Products of rows and weights of float8 on Hopper (`linear/hopper_float8.py`), on a GPU: errors, graphs and launches."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for sm_90"
    ),
]

from spec_ops.backends.float8_rows import dequantized_rows  # noqa: E402
from spec_ops.backends.triton.linear.hopper_tiles import choose_parts  # noqa: E402
from spec_ops.backends.triton.runtime import counters  # noqa: E402
from spec_ops.backends.triton.runtime.launch import recorded  # noqa: E402
from spec_ops.backends.weight_format import dequantized, weight_format  # noqa: E402
from spec_ops.ops.linear import float8_mm_op, skinny_mm_op  # noqa: E402

F8, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
ROWS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128)
# Layers; columns that no tile divides; a single program; a tile that 28 programs share; as many tiles as programs (132); equal
# shares of 140 tiles.
SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336), (1000, 1280), (100, 128), (64, 14336), (132 * 128, 1024), (8960, 1024))
KINDS = {"rows": ("row", "row"), "blocks": ("block", "block"), "tensors": ("all", "all"), "mixed": ("block", "row")}


def generator(*shape: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(sum(shape))


def numbers(m: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, k, generator=generator(m, k, seed), device="cuda").to(F8)


def scales(*shape: int) -> torch.Tensor:
    """Of different sizes: no sum is near to what one of another row or block would be."""
    return torch.rand(shape, generator=generator(*shape), device="cuda") * 4 + 0.1


def scale_of(kind: str, rows: int, k: int, of_weight: bool) -> torch.Tensor:
    if kind == "all":
        return scales(1, 1)
    if kind == "row":
        return scales(rows, 1)
    return scales(-(-rows // 128), k // 128) if of_weight else scales(k // 128, rows).t()


def operands(kind: str, m: int, n: int, k: int) -> list[torch.Tensor]:
    of_rows, of_weight = KINDS[kind]
    return [numbers(m, k), scale_of(of_rows, m, k, False), numbers(n, k, 1), scale_of(of_weight, n, k, True)]


def loss(out: torch.Tensor, want: torch.Tensor) -> float:
    return (out.double() - want).square().mean().sqrt().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_error_is_that_of_bfloat16(n, k, kind):
    x, x_scale, weight, scale = operands(kind, max(ROWS), n, k)
    x = torch.cat([numbers(max(ROWS), 128, 2), x], 1)[:, 128:]  # rows farther apart than they are long
    bias = scales(n) * 4
    full = dequantized(weight, scale)
    for m in ROWS:
        rows, of_rows = x[:m], x_scale if x_scale.numel() == 1 else x_scale[:m]
        wide = dequantized_rows(rows, of_rows)
        for dtype, b in ((BF16, bias.to(BF16)), (FP16, None)) if m in (9, 128) else ((BF16, bias),):
            want = wide.double() @ full.double().t() + (0 if b is None else b.double())
            rounded = wide.to(BF16).float() @ full.to(BF16).float().t() + (0 if b is None else b.float())
            got = float8_mm_op(rows, of_rows, weight, scale, b, dtype)
            assert got.dtype == dtype
            assert loss(got, want) <= 1.05 * loss(rounded.to(dtype), want), (m, dtype)


def test_other_rows():
    """A row's bits depend on no other row of its tile, not even one of NaN behind the last; strides of scales do not count."""
    for kind in ("rows", "blocks"):
        x, x_scale, weight, scale = operands(kind, 24, 4096, 4096)
        want = float8_mm_op(x, x_scale, weight, scale, None, BF16)
        assert torch.equal(float8_mm_op(x[:20], x_scale[:20], weight, scale, None, BF16), want[:20])
        beside = torch.cat([x, torch.full_like(x.float(), float("nan")).to(F8)])
        assert torch.equal(float8_mm_op(beside[:24], x_scale, weight, scale, None, BF16), want)
        apart = torch.stack([x_scale, x_scale], 2)[..., 0]
        assert torch.equal(float8_mm_op(x, apart, weight, scale.t().contiguous().t(), None, BF16), want)
        for dtype in (BF16, FP16):
            of16 = float8_mm_op(x, x_scale.to(dtype), weight, scale.to(dtype), None, BF16)
            assert torch.equal(of16, float8_mm_op(x, x_scale.to(dtype).float(), weight, scale.to(dtype).float(), None, BF16))


@pytest.mark.parametrize("kind", ["rows", "blocks"])
@pytest.mark.parametrize("m", [4, 32, 64, 128])
def test_chains_in_a_graph(kind, m):
    """Each product reads the last one's result, rounded, and is launched while that is written. It leaves the counters as it
    found them."""
    x, x_scale, *_ = operands(kind, m, 4096, 4096)
    weights = [(numbers(4096, 4096, seed), operands(kind, m, 4096, 4096)[3] / 256) for seed in range(4)]

    def run(after_each=lambda: None) -> list[torch.Tensor]:
        made, rows = [], x
        for i in range(16):
            made.append(float8_mm_op(rows, x_scale, *weights[i % 4], None, BF16))
            rows = (made[-1].float() / made[-1].float().square().mean().sqrt()).to(F8)
            after_each()
        return made

    want = [result.clone() for result in run(torch.cuda.synchronize)]
    assert all(result.isfinite().all() and result.any() for result in want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(10):
        for result in got:
            result.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    torch.cuda.synchronize()
    ours = [found for (kernel, *_), found in counters._sets.items() if kernel == "hopper_float8"]
    assert ours
    assert not any(found.any() for found in ours)


def test_one_after_the_other():
    """No kernel lies between them: each is launched while the last one runs, and shares its counters."""
    given = [operands(kind, m, 4096, 4096) for kind in ("rows", "blocks") for m in (8, 128)]
    want = [float8_mm_op(*args, None, BF16) for args in given]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [float8_mm_op(*given[i % 4], None, BF16) for i in range(40)]
    for _ in range(10):
        graph.replay()
        assert all(torch.equal(result, want[i % 4]) for i, result in enumerate(got))


def test_results_repeat():
    """Whoever is last to arrive: sums are in the order of k."""
    for kind, m, n, k in (("rows", 32, 4096, 4096), ("blocks", 128, 64, 14336), ("blocks", 64, 4096, 14336)):
        given = operands(kind, m, n, k)
        first = float8_mm_op(*given, None, BF16)
        assert all(torch.equal(first, float8_mm_op(*given, None, BF16)) for _ in range(100))


def names_of(*args: torch.Tensor | None) -> list[str]:
    with recorded() as launches:
        skinny_mm_op(*args)
    return [launched.kernel.fn.__name__ for launched in launches]


@pytest.mark.parametrize("kind", ["rows", "blocks", "tensors"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_of_bfloat16_in_two_parts(n, k, kind):
    """Rows are not rounded: the error is below that of a product with the weight in bfloat16. Also where a row has numbers of
    very different sizes."""
    _, _, weight, scale = operands(kind, 1, n, k)
    full, bias = dequantized(weight, scale), (scales(n) * 4).to(BF16)
    x = torch.randn(128, k + 64, generator=generator(n, k), device="cuda")[:, 64:] * torch.logspace(-3, 3, k, device="cuda")
    x = (
        x[:, torch.randperm(k, generator=generator(k), device="cuda")] * torch.logspace(-9, 9, 128, device="cuda")[:, None]
    ).to(BF16)
    for m in (33, 64, 65, 96, 127, 128):
        rows = x[:m]
        stored = weight_format("test", weight, scale, None)
        apart = choose_parts(m, n, k, stored, BF16, 132) is not None
        wanted = ["row_parts_kernel", "hopper_float8_kernel"] if apart else ["skinny_mm_kernel"]
        assert names_of(rows, weight, bias, scale) == wanted
        want = rows.double() @ full.double().t() + bias.double()
        got = skinny_mm_op(rows, weight, bias, scale).double()
        usual = torch.addmm(bias, rows, full.to(BF16).t()).double()
        off = [(out - want).square().mean(1).sqrt() for out in (got, usual)]
        assert (off[0] <= 1.05 * off[1]).all(), (m, (off[0] / off[1]).max())


def test_parts_of_other_rows():
    """A row's bits depend on no other row, nor on what lies in memory beyond the last; rows that are not finite give nothing
    that is."""
    _, _, weight, scale = operands("rows", 1, 6144, 4096)
    x = torch.randn(128, 4096, generator=generator(1), device="cuda").to(BF16)
    want = skinny_mm_op(x, weight, None, scale)
    torch.full((1 << 22,), float("nan"), device="cuda")  # where parts are going to lie
    assert torch.equal(skinny_mm_op(x[:100], weight, None, scale), want[:100])
    assert torch.equal(skinny_mm_op(x.t().contiguous().t(), weight, None, scale), want)
    odd = x.clone()
    odd[5, 7], odd[70, 9], odd[90] = float("nan"), float("inf"), 0
    got = skinny_mm_op(odd, weight, None, scale)
    assert not got[[5, 70]].isfinite().any()
    assert not got[90].any()
    fine = [i for i in range(128) if i not in (5, 70, 90)]
    assert torch.equal(got[fine], want[fine])


def test_parts_in_a_graph():
    """Rows are taken apart by a kernel that is launched while the last product runs, and so is the product."""
    weights = [operands("blocks", 1, 8192, 8192)[2:] for _ in range(2)]
    x = torch.randn(128, 8192, generator=generator(2), device="cuda").to(BF16)
    assert choose_parts(128, 8192, 8192, weight_format("test", *weights[0], None), BF16, 132) is not None

    def run() -> list[torch.Tensor]:
        made = [x]
        for i in range(12):
            out = skinny_mm_op(made[-1], weights[i % 2][0], None, weights[i % 2][1])
            made.append(out / out.float().square().mean().sqrt().to(BF16))
        return made[1:]

    want = [result.clone() for result in run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(10):
        for result in got:
            result.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
