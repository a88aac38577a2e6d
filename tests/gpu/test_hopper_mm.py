"""Products with weights of 4 bits on Hopper (`linear/hopper_mm.py`), on a GPU: errors, graphs and dependent launches."""

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

import triton.language as tl  # noqa: E402

from spec_ops.backends.triton.linear.hopper_tiles import takes  # noqa: E402
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, recorded  # noqa: E402
from spec_ops.backends.weight_format import dequantized, weight_format  # noqa: E402
from spec_ops.ops.linear import skinny_mm_op  # noqa: E402
from tests.helpers.stored_weights import exact, stored  # noqa: E402

BF16 = torch.bfloat16
ROWS = (17, 32, 33, 64, 65, 128)
# Layers; columns that no tile divides; a single program; a tile that 112 programs share; as many tiles as programs (132); half
# a block at the end of k; few columns.
SHAPES = [
    *(("int4-128", *size, ROWS) for size in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1000, 1280))),
    *((kind, *size, ROWS) for kind in ("nvfp4", "mxfp4") for size in ((4096, 4096), (28672, 4096), (4096, 14336))),
    *((kind, 1000, 1280, (33, 100)) for kind in ("nvfp4", "mxfp4")),
    ("int4-128", 100, 128, (33,)),
    ("int4-128", 64, 14336, (128,)),
    ("int4-256", 4096, 4096, (64,)),
    *((kind, *size, ROWS) for kind in ("int4-32", "int4-64") for size in ((4096, 4096), (28672, 4096), (1000, 1280))),
    *((kind, 16896, 1024, (64,)) for kind in ("int4-128", "nvfp4", "mxfp4")),
    *((kind, 5120, 2880, ROWS) for kind in ("int4-32", "int4-64", "nvfp4", "mxfp4")),
    *((kind, 100, 64, (33, 128)) for kind in ("int4-64", "nvfp4", "mxfp4")),
    *((kind, 1536, 7168, (64, 128)) for kind in ("int4-128", "nvfp4", "mxfp4")),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(sum(shape) + seed), device="cuda")


def weight_of(kind: str, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor | None, ...]:
    return stored(randn(n, k, seed=seed), kind, BF16)


def kernel_of(*args: torch.Tensor | None) -> str:
    with recorded() as launches:
        skinny_mm_op(*args)
    (launched,) = launches
    return launched.kernel.fn.__name__


@pytest.mark.parametrize(("kind", "n", "k", "rows"), SHAPES)
def test_error_is_that_of_bfloat16(kind, n, k, rows):
    weight, *scales = weight_of(kind, n, k)
    full, bias = dequantized(weight, *scales).to(BF16).t(), randn(n).to(BF16)
    for m in rows:
        x = randn(m, k + 64).to(BF16)[:, 64:]  # rows farther apart than they are long
        taken = takes(m, n, k, weight_format("test", weight, *scales), BF16, scales[0].dtype)
        assert (kernel_of(x, weight, bias, *scales) == "hopper_mm_kernel") == taken
        want = exact(x, weight, *scales) + bias.double()
        errors = [
            (out.double() - want).square().mean().sqrt().item()
            for out in (skinny_mm_op(x, weight, bias, *scales), torch.addmm(bias, x, full))
        ]
        assert errors[0] <= 1.05 * errors[1], (m, errors)


def test_other_rows():
    """Rows that TMA cannot read are copied; a row's bits depend on no other row, not even one of NaN behind the last."""
    weight, *scales = weight_of("int4-128", 4096, 4096)
    bias, x = randn(4096).to(BF16), randn(24, 4096).to(BF16)
    want = skinny_mm_op(x, weight, bias, *scales)
    assert torch.equal(skinny_mm_op(x.t().contiguous().t(), weight, bias, *scales), want)
    assert torch.equal(skinny_mm_op(x[:20], weight, bias, *scales), want[:20])
    beside = torch.cat([x, torch.full_like(x, float("nan"))])
    assert torch.equal(skinny_mm_op(beside[:24], weight, bias, *scales), want)


def test_int4_without_zero_points():
    weight, scale, _ = weight_of("int4-128", 4096, 4096)
    x = randn(64, 4096).to(BF16)
    assert kernel_of(x, weight, None, scale) == "hopper_mm_kernel"
    want = exact(x, weight, scale)
    rounded = x @ dequantized(weight, scale).to(BF16).t()
    errors = [(out.double() - want).square().mean().sqrt() for out in (skinny_mm_op(x, weight, None, scale), rounded)]
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_scales_that_are_no_words(kind, m):
    """Rows of scales that start at any byte are read one by one, with the same bits."""
    weight, scale, *rest = weight_of(kind, 1536, 1024)
    x, groups = randn(m, 1024).to(BF16), scale.shape[1]
    want = skinny_mm_op(x, weight, None, scale, *rest)
    wide = torch.full((1536, groups + 1), 255, dtype=torch.uint8, device="cuda").view(scale.dtype)  # NaN beside them
    for apart in (wide[:, :-1], wide[:, 1:], torch.empty_like(scale.t(), memory_format=torch.contiguous_format).t()):
        apart.view(torch.uint8).copy_(scale.view(torch.uint8))
        assert torch.equal(skinny_mm_op(x, weight, None, apart, *rest), want)


@pytest.mark.parametrize(
    ("kind", "m"), [*(("int4-128", m) for m in (32, 64, 128)), *((kind, m) for kind in ("nvfp4", "mxfp4") for m in (64, 128))]
)
def test_chains_in_a_graph(kind, m):
    """Each product reads the last one's result, and is launched while that one runs. It leaves the counters as it found
    them."""
    weights = [stored(randn(4096, 4096, seed=seed) / 64, kind, BF16) for seed in range(4)]  # results as large as rows
    bias, first = torch.zeros(4096, device="cuda", dtype=BF16), randn(m, 4096).to(BF16)

    def run(after_each=lambda: None) -> list[torch.Tensor]:
        made = [first]
        for i in range(24):
            weight, *scales = weights[i % 4]
            made.append(skinny_mm_op(made[-1], weight, bias, *scales))
            after_each()
        return made[1:]

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


@triton.jit
def copy_kernel(source, to, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_predecessors(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + at, tl.load(source + at, mask=at < N), mask=at < N)


def overwrite(to: torch.Tensor, source: torch.Tensor) -> None:
    """`to.copy_(source)` by a kernel that lets the next one begin: `copy_` is none (a graph's node for memory), and no kernel
    begins before it has ended. All of its programs are on the GPU at once, or the next one would begin after most of them."""
    assert to.stride() == source.stride()
    block = 8192
    with device_guard(to):
        launch(
            copy_kernel, (triton.cdiv(to.numel(), block),), source, to, to.numel(), BLOCK=block, num_warps=4, early=True
        )  # fmt: skip


def test_a_weight_that_the_kernel_before_wrote():
    """The weight is asked for before that kernel has ended, and read after."""
    weights = [weight_of("int4-128", 4096, 4096, seed) for seed in range(2)]
    bias, x = torch.zeros(4096, device="cuda", dtype=BF16), randn(64, 4096).to(BF16)
    want = [skinny_mm_op(x, weight, bias, *scales) for weight, *scales in weights]
    ours = [tensor.clone() for tensor in weights[0]]

    def run() -> list[torch.Tensor]:
        made = []
        for i in range(20):
            for mine, given in zip(ours[::-1], weights[i % 2][::-1], strict=True):
                overwrite(mine, given)
            made.append(skinny_mm_op(x, ours[0], bias, *ours[1:]))
        return made

    run()  # modules are loaded outside of a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(10):
        graph.replay()
        assert all(torch.equal(result, want[i % 2]) for i, result in enumerate(got))


def test_results_repeat():
    """Whoever is last to arrive: sums are in the order of k."""
    for kind, m, n, k in (
        ("int4-128", 32, 4096, 4096), ("int4-128", 128, 64, 14336), ("nvfp4", 64, 4096, 14336), ("mxfp4", 128, 1536, 7168),
    ):  # fmt: skip
        weight, *scales = weight_of(kind, n, k)
        x, bias = randn(m, k).to(BF16), randn(n).to(BF16)
        first = skinny_mm_op(x, weight, bias, *scales)
        assert all(torch.equal(first, skinny_mm_op(x, weight, bias, *scales)) for _ in range(100))
