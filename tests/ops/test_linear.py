"""`skinny_mm`: launches that fit, and on a GPU its results, repeats and CUDA graphs."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what is launched")

from spec_ops.backends.triton.linear import norm as norm_linear  # noqa: E402
from spec_ops.backends.triton.linear import skinny_mm as linear  # noqa: E402
from spec_ops.backends.triton.linear import tiles  # noqa: E402
from spec_ops.backends.triton.runtime import ahead  # noqa: E402
from spec_ops.ops.linear import skinny_mm_op  # noqa: E402
from spec_ops.passes import lower_skinny_mm  # noqa: E402
from tests.helpers.selection import covering, parametrize_pairs, product_facts  # noqa: E402

GPU = pytest.mark.gpu
SHAPES = [(6144, 4096), (4096, 4096), (2880, 4096), (5120, 2880), (1536, 7168), (100, 64), (1000, 576)]


@pytest.mark.parametrize("arch", [90, 100, 103, 120])
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (128256, 4096), (1, 16384)])
def test_every_size_has_a_config_that_fits(n, k, arch):
    for m in range(1, tiles.MAX_ROWS + 1):
        for sms in (1, 84, 132, 188):
            config = tiles.choose(m, n, k, sms, arch)
            blocks = -(-k // config.block_k)
            assert config.block_m >= m
            assert 1 <= config.splits <= blocks  # no program without work
            # wgmma and tcgen05 take a buffer more
            buffers = config.num_stages - (config.block_n < 64 or arch == 120)
            assert buffers >= min(2, blocks)
            one = 2 * config.block_k * (config.block_n + config.block_m)
            assert config.programs * (buffers * one + 1024) <= ahead.SHARED_LIMIT[arch] + 1024


@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "num_stages", "programs"),
    [
        (1, 6144, 4096, 1, 7, 3),
        (16, 6144, 4096, 1, 5, 3),
        (8, 4096, 4096, 1, 10, 2),
        (16, 2880, 4096, 2, 5, 3),
        (4, 1536, 7168, 4, 7, 3),
    ],
)
def test_what_the_measured_rule_relies_on(m, n, k, splits, num_stages, programs):
    """On 132 multiprocessors, as in `benchmarks/results/h200-skinny-mm.json`."""
    tile = (8 if m <= 8 else 16, 16, 256, 4)
    assert tiles.choose(m, n, k, 132, 90) == tiles.Config(*tile, splits, num_stages, programs, True)


def test_the_pass_asks_for_whole_blocks():
    assert all(lower_skinny_mm.BLOCK_K % tile.block_k == 0 for tile in tiles.TILES)
    rows = [rule.max_m for rule in lower_skinny_mm.RULES[90]]
    assert rows == sorted(rows)
    assert rows[-1] <= tiles.MAX_ROWS


STORED = ("float8", "int8", "int4", "fp4")  # `test_quantized_linear` has those
BF16 = [v for v in (*linear.ahead(), *norm_linear.ahead()) if not any(kind in v.name for kind in STORED)]


def pytest_generate_tests(metafunc):
    if metafunc.function is test_programs_are_resident_at_once:
        every = [(variant, variant.archs[-1]) for variant in BF16]
        parametrize_pairs(metafunc, every, covering(every, product_facts))


def test_programs_are_resident_at_once(variant, arch):
    """One wave, as many programs as `choose` counts on, without spills."""
    used = ahead.compile_ahead(variant, arch)
    # ptxas of triton 3.6 makes calls of TMA loads on sm_120, which take 8 or 16 bytes of arguments on the stack: no spill.
    assert used.spill_bytes <= (16 if arch == 120 and triton.__version__.startswith("3.6.") else 0)
    assert ahead.as_counted_on(variant, used, arch)


def test_weights_are_asked_for_before_the_wait():
    ptx = ahead.compiled(next(linear.ahead()), 90).asm["ptx"]
    assert 0 < ptx.find("prefetch.global.L2") < ptx.find("griddepcontrol.wait") < ptx.find("cp.async.bulk.tensor")


def tensors(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(m + n + k)
    return [torch.randn(shape, generator=g, device="cuda").to(dtype) for shape in ((m, k), (n, k), (n,))]


def mean_error(got: torch.Tensor, x, weight, bias) -> float:
    return (got.double() - torch.nn.functional.linear(x.double(), weight.double(), bias.double())).square().mean().sqrt().item()


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_error_is_that_of_cublas(n, k, dtype):
    for m in (1, 3, 4, 8, 9, 16, 17, 32, 33, 64):
        x, weight, bias = tensors(m, n, k, dtype)
        ours = mean_error(skinny_mm_op(x, weight, bias), x, weight, bias)
        assert ours <= 1.1 * mean_error(torch.nn.functional.linear(x, weight, bias), x, weight, bias)


@GPU
def test_results_repeat():
    """Whoever is last to arrive: sums are in the order of k."""
    for m, n, k in ((4, 1536, 7168), (16, 2880, 4096), (9, 1000, 4096), (32, 4096, 4096), (64, 1536, 7168)):
        x, weight, _ = tensors(m, n, k)
        first = skinny_mm_op(x, weight, None)
        assert all(torch.equal(first, skinny_mm_op(x, weight, None)) for _ in range(200))


TURNS = [(4, 1536, 7168), (16, 2880, 4096), (4, 6144, 4096), (9, 1000, 1024), (32, 4096, 4096), (64, 1000, 4096)]


@GPU
def test_sizes_take_turns_in_a_graph():
    """Launches of other splits share the counters; a replay leaves them as it found them."""
    products = [tensors(m, n, k) for m, n, k in TURNS]
    want = [skinny_mm_op(*p) for p in products]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [skinny_mm_op(*p) for p in products * 3]
    for _ in range(20):
        for out in got:
            out.zero_()
        graph.replay()
        for i, out in enumerate(got):
            assert torch.equal(out, want[i % len(want)])
