"""Batch-invariant products, sums and norms in Triton's interpreter: right, and the same bits for every number of rows.

The interpreter multiplies tiles with numpy, whose order along k follows the shape of a tile, as a tensor core's does not. So
where bits are compared, sums within a split of k are exact in any order (`staged`), and sums of splits are not: what is left to
differ is what the kernels decide. `tests/gpu/test_invariant.py` asks the same of the tensor cores with any values.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.linear import invariant, quantized
from spec_ops.backends.triton.linear import skinny_mm as linear
from spec_ops.ops.reference import invariant as reference
from spec_ops.ops.reference import linear as reference_linear

EPS = 1e-5
ROWS = (1, 2, 7, 8, 9, 17, 33, 64, 65, 128, 130)


def tensors(m: int, n: int, k: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(n + k)
    return [torch.randn(shape, generator=g).half() for shape in ((m, k), (n, k), (n,))]


STAGES = 4  # splits of `staged`


def staged(m: int, n: int) -> list[torch.Tensor]:
    """Of four parts along k: large integers, small fractions, the negative of the first part, and small fractions. In float32
    the fractions lose bits to the first part only if they are added to it before the third one is: results tell the splits."""
    g = torch.Generator().manual_seed(n)

    def numbers(rows: int) -> list[torch.Tensor]:
        large, small, last = torch.randint(-8, 8, (3, rows, 512), generator=g).half().unbind()
        return [large, small * 2**-9, large, last * 2**-9]

    x, weight = torch.cat(numbers(m), 1), torch.cat(numbers(n), 1)
    weight[:, 1024:1536] *= -1
    return [x, weight, torch.randn(n, generator=g).half()]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.fixture
def few_slices(monkeypatch):
    """More than 128 rows go to the kernel of many rows, in tiles that the interpreter can compute."""
    monkeypatch.setattr(invariant, "SLICED", 128)
    monkeypatch.setattr(invariant, "tile_of", lambda *_: ((32, 64, 64), 3))


@pytest.mark.parametrize(("n", "k"), [(50, 1088), (130, 512)])
def test_products_like_float64(few_slices, n, k):
    x, weight, bias = tensors(140, n, k)
    want = reference_linear.skinny_mm(x.double(), weight.double(), bias.double())
    for rows in (3, 20, 70, 140):
        got = invariant.skinny_mm(x[:rows], weight, bias, invariant=True)
        torch.testing.assert_close(got.double(), want[:rows], rtol=2**-10, atol=1e-4)


def test_products_of_any_number_of_rows(few_slices):
    x, weight, bias = staged(max(ROWS), 50)
    assert invariant.config_of(1, 50, 2048, 4, 90).splits == STAGES
    whole = invariant.skinny_mm(x, weight, bias, invariant=True)
    for rows in ROWS:
        for start in {0, max(ROWS) - rows}:
            got = invariant.skinny_mm(x[start : start + rows], weight, bias, invariant=True)
            assert torch.equal(bits(got), bits(whole[start : start + rows])), (rows, start)


def test_slices_read_the_weight_for_128_rows_each():
    x, weight, bias = staged(140, 50)
    whole = invariant.skinny_mm(x, weight, bias, invariant=True)
    for rows in (12, 128):
        assert torch.equal(bits(invariant.skinny_mm(x[-rows:], weight, bias, invariant=True)), bits(whole[-rows:])), rows
    with pytest.raises(ValueError, match="skinny_mm: `x` must have at most 64 rows, got 128"):
        linear.skinny_mm(x[:128], weight, bias)


def test_splits_that_follow_the_rows_are_noticed(few_slices, monkeypatch):
    chosen, (x, weight, bias) = invariant.config_of, staged(16, 50)
    for of_few in (STAGES, 1, 2):

        def by_rows(m, *shape, of_few=of_few):
            config = chosen(m, *shape)
            return replace(config, splits=of_few) if m <= 8 else config

        monkeypatch.setattr(invariant, "config_of", by_rows)
        few, many = (bits(invariant.skinny_mm(x[:rows], weight, bias, invariant=True)) for rows in (8, 16))
        assert torch.equal(few, many[:8]) == (of_few == STAGES), of_few


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in (1536, 4096, 6144, 28_672, 128_256) for k in (4096, 14_336)])
def test_the_order_is_a_fact_of_the_weight(n, k):
    for arch in (90, 100, 120):
        configs = [invariant.config_of(m, n, k, 132, arch) for m in range(1, 129)]
        assert len({config.splits for config in configs}) == 1
        for config in configs:  # a split's first and last k
            blocks = k // config.block_k
            ends = [split * blocks // config.splits * config.block_k for split in range(config.splits + 1)]
            assert ends == [split * (k // 128) // config.splits * 128 for split in range(config.splits + 1)]
        # Below, each warp has a chunk of k, and sums are added apart. Above, sm_100 has another instruction.
        widths = {config.block_n for config in configs}
        assert widths <= {quantized.WARPGROUP.value, *([128, 256] if arch == 90 else [])}


@pytest.mark.parametrize(
    ("n", "k", "columns", "programs"),
    [
        (28_672, 4096, 256, 1), (128_256, 4096, 256, 1),  # 112 and 501 tiles for 132 multiprocessors
        (36_864, 7168, 128, 2),  # 144 tiles of 256 columns: 12 would come alone
        (6144, 4096, 128, 1),  # 192 programs of 64 columns: 60 multiprocessors would have two
        (4096, 4096, 64, 2), (4096, 14_336, 64, 2),  # 256 of 264
    ],
)  # fmt: skip
def test_many_rows_leave_no_multiprocessor_with_more_than_others(n, k, columns, programs):
    config = invariant.config_of(128, n, k, 132, 90)
    assert (config.block_n, config.programs) == (columns, programs)


@pytest.mark.parametrize("strides", ["plain", "transposed", "sliced"])
def test_batched_products(strides):
    g = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-8, 8, shape, generator=g).half() / 16 for shape in ((3, 70, 100), (3, 100, 50)))
    if strides == "transposed":
        a, b = a.transpose(0, 1).contiguous().transpose(0, 1), b.transpose(1, 2).contiguous().transpose(1, 2)
    elif strides == "sliced":
        a, b = torch.cat([a, a], 2)[:, :, 50:150], torch.cat([b, b], 1)[:, 50:150]
    whole = invariant.batched_mm(a, b, None)
    torch.testing.assert_close(whole.double(), a.double() @ b.double(), rtol=2**-10, atol=1e-4)
    for rows in (1, 2, 16, 17, 33):
        assert torch.equal(bits(invariant.batched_mm(a[:, 5 : 5 + rows], b, None)), bits(whole[:, 5 : 5 + rows])), rows


@pytest.mark.parametrize("n", [1, 96, 5000, 9000])
def test_sums_and_norms(n):
    g = torch.Generator().manual_seed(n)
    x, weight = torch.randn(9, n, generator=g).half(), torch.rand(n, generator=g).half()
    total = invariant.row_sum(x)
    torch.testing.assert_close(total.double(), x.double().sum(1), rtol=1e-5, atol=1e-4)
    for rounded in (False, True):
        normalized = invariant.rms_norm(x, weight, EPS, rounded)
        wanted = reference.rms_norm(x, weight, EPS, rounded)
        torch.testing.assert_close(normalized, wanted, rtol=2**-9, atol=1e-4)
        # Sums of another order move few numbers to a neighbour; a rounding more or less moves a quarter of them.
        assert (normalized != wanted).sum() <= 1 + x.numel() // 100
        for row in range(9):
            alone = slice(row, row + 1)
            assert torch.equal(bits(invariant.rms_norm(x[alone], weight, EPS, rounded)), bits(normalized[alone]))
            assert torch.equal(bits(invariant.row_sum(x[alone])), bits(total[alone]))


@pytest.mark.parametrize("n", [96, 5000, 9000])
def test_norms_of_sums_have_the_bits_of_two_operations(n):
    g = torch.Generator().manual_seed(n)
    x, residual = torch.randn(2, 9, n, generator=g).half()
    weight = torch.rand(n, generator=g).half()
    for rounded in (False, True):
        for rows in (slice(0, 9), slice(4, 5)):
            total, out = invariant.add_rms_norm(x[rows], residual[rows], weight, EPS, rounded)
            assert torch.equal(bits(total), bits((x + residual)[rows]))
            assert torch.equal(bits(out), bits(invariant.rms_norm(x + residual, weight, EPS, rounded)[rows]))


def test_bad_input():
    x, weight, _ = tensors(2, 64, 128)
    with pytest.raises(TypeError, match=r"row_sum: `x` must be float32, bfloat16 or float16 on CUDA, got torch.float64"):
        invariant.row_sum(x.double())
    with pytest.raises(ValueError, match="skinny_mm: `invariant` must be False with a weight of 8 or 4 bits"):
        invariant.skinny_mm(x, weight, None, torch.ones(1, 1), invariant=True)
    with pytest.raises(ValueError, match="columns of `weight`, got 64"):
        invariant.skinny_mm(x[:, :64], weight, None, invariant=True)
