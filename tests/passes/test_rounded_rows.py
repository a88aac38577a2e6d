"""lower_skinny_mm on rows that a graph rounds to float8: which meet a float8 weight as they are, and why others do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.ops.linear import float8_mm_op, skinny_mm_op
from spec_ops.passes.compile_kernels import arguments, launches_of
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm
from tests.helpers.pass_harness import capture, run_pass, targets, texts
from tests.helpers.rounded_rows import FP8, K, M, N, close, exact, in_groups, in_rows, linear, of, only, run_to, steps_of

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def few_rows_too(monkeypatch):
    """Graphs of four rows are as good as others, and faster to run."""
    monkeypatch.setattr(hopper_tiles, "FLOAT8_LEAST_ROWS", 1)


def repeated(x, weight, scale):
    values, steps = steps_of(x, 128)
    numbers = (values / steps).to(FP8).view(x.shape)
    return linear((numbers.float() * steps.squeeze(-1).repeat_interleave(128, -1)).to(x.dtype), weight, scale)


def expanded(x, weight, scale):
    _, steps = steps_of(x, x.shape[-1])
    steps = steps.view(-1, 1).expand(x.shape)
    return linear(((x.float() / steps).to(FP8).float() * steps).to(x.dtype), weight, scale)


def in_their_dtype(x, weight, scale):
    values, steps = steps_of(x, 128, x.dtype)
    return linear(((values / steps).to(FP8).to(x.dtype) * steps).view(x.shape), weight, scale)


def in_batches(x, weight, scale):
    return in_groups(x.view(2, 2, -1), weight, scale).flatten(0, 1)


def all_alike(x, weight, scale):
    steps = x.float().abs().amax() / 448
    return linear((steps * (x.float() / steps).to(FP8).float()).to(x.dtype), weight, scale)


FORMS = {
    in_rows: (M, 1), in_groups: (M, K // 128), repeated: (M, K // 128), expanded: (M, 1), in_their_dtype: (M, K // 128),
    in_batches: (M, K // 128), all_alike: (1, 1),
}  # fmt: skip


def check(module: torch.fx.GraphModule, inputs: list[torch.Tensor], fn: Callable, args: list[torch.Tensor]) -> None:
    """The product of the numbers, rounded once; and about what eager computes, which rounds rows and weight to their dtype."""
    (got,) = module(*inputs)
    want = exact(only(module), inputs)
    unit = torch.finfo(got.dtype).eps
    assert bool(((got.double() - want).abs() <= (want.abs() + want.std() * 2**-10) * unit).all())
    assert close(got, fn(*args), 8 * unit)


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("form", FORMS)
def test_multiplied_as_they_are(form, kind):
    args = of(kind)
    module, inputs = capture(form, *args, dynamo=False)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert texts(result.done) == "float8_mm: 4 rows of 8 bits, weight 320 x 512 of 8 bits", texts(result.refused)
    node = only(module)
    assert [tuple(operand.meta["val"].shape) for operand in node.args[:4]] == [(M, K), FORMS[form], (N, K), args[2].shape]
    assert node.args[1].meta["val"].dtype == torch.float32
    assert node.args[2:4] == tuple(module.graph.find_nodes(op="placeholder"))[1:]
    assert node.args[4:] == (None, torch.bfloat16)
    assert not {aten.mm.default, aten.mul.Tensor} & set(targets(module))
    check(module, inputs, form, args)


@pytest.mark.parametrize("form", [in_rows, in_groups, in_their_dtype, all_alike])
def test_the_kernel_takes_them(form):
    """Its launcher, on tensors that stand for those on a Hopper GPU."""
    launch = pytest.importorskip("spec_ops.backends.triton.runtime.launch", reason="triton comes for Linux only")
    for kind in ("tensor", "row", "block"):
        module, _ = capture(form, *of(kind), dynamo=False)
        assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
        (found,) = launches_of(float8_mm_op, arguments(only(module)), launch.Target(90, 132))
        assert found.kernel.fn.__name__ == "hopper_float8_kernel"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 128])
def test_dtypes_rows_and_bias(m, dtype):
    args = [*of("row", m=m, dtype=dtype), torch.randn(N).to(dtype)]

    def fn(x, weight, scale, bias):
        values, steps = steps_of(x, 128)
        return linear(((values / steps).to(FP8).float() * steps).to(x.dtype).view(x.shape), weight, scale, bias)

    module, inputs = capture(fn, *args, dynamo=False)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert texts(result.done) == f"float8_mm: {m} rows of 8 bits, weight 320 x 512 of 8 bits", texts(result.refused)
    node = only(module)
    assert node.args[4:] == (module.graph.find_nodes(op="placeholder")[3], dtype)
    (got,) = module(*inputs)
    want = (exact(node, inputs) + args[3].double()).to(dtype)
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_numbers_and_scales_that_are_inputs():
    """As they are: scales in bfloat16 too. Rows that the kernel could not load are copied."""

    def fn(numbers, steps, weight, scale):
        return linear(numbers.to(torch.bfloat16) * steps, weight, scale)

    _, weight, scale = of("row")
    g = torch.Generator().manual_seed(1)
    wide = torch.randn(M, K + 8, generator=g).to(FP8)
    for numbers, copied in ((wide[:, :K].contiguous(), False), (wide[:, :K], True), (torch.randn(K, M).to(FP8).t(), True)):
        for steps in (torch.rand(M, 1, generator=g).bfloat16(), torch.rand(1, generator=g).bfloat16()):
            args = [numbers, steps, weight, scale]
            module, inputs = capture(fn, *args, dynamo=False)
            assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
            assert (aten.clone.default in targets(module)) == copied
            assert only(module).args[1].meta["val"].dtype == torch.bfloat16
            assert run_to(only(module).args[0], inputs).stride() == (K, 1)
            check(module, inputs, fn, args)


def other_arch(arch: int) -> str:
    return f"needs a GPU of sm_90 (Hopper), got sm_{arch}"


@pytest.mark.parametrize("arch", [100, 120])
def test_other_gpus_read_the_weight_as_it_is_stored(arch):
    args = of("block")
    module, inputs = capture(in_groups, *args, dynamo=False)
    result = run_pass(LowerSkinnyMm(), module, arch)
    assert texts(result.done) == "skinny_mm: 4 rows, weight 320 x 512 of 8 bits"
    assert texts(result.refused) == f"float8_mm of 4 x 512 and 512 x 320: {other_arch(arch)}"
    assert float8_mm_op not in targets(module)
    assert close(module(*inputs)[0], in_groups(*args), 2**-7)


def of_e5m2(x, weight, scale):
    _, steps = steps_of(x, x.shape[-1])
    rows = (x.float() / steps[..., 0]).to(torch.float8_e5m2).float() * steps[..., 0]
    return linear(rows.to(x.dtype), weight, scale)


def in_groups_of_64(x, weight, scale):
    values, steps = steps_of(x, 64)
    return linear(((values / steps).to(FP8).float() * steps).to(x.dtype).view(x.shape), weight, scale)


def groups_across_rows(x, weight, scale):
    values, steps = steps_of(x.view(-1), 2 * x.shape[-1])
    return linear(((values / steps).to(FP8).float() * steps).to(x.dtype).view(x.shape), weight, scale)


def of_columns(x, weight, scale):
    steps = x.float().abs().amax(0, keepdim=True) / 448
    return linear(((x.float() / steps).to(FP8).float() * steps).to(x.dtype), weight, scale)


def of_groups(spread: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Scales `[4, 4]` of groups, in another order or number than `repeated` has them."""

    def fn(x, weight, scale):
        values, steps = steps_of(x, 128)
        numbers = (values / steps).to(FP8).view(x.shape)
        return linear((numbers.float() * spread(steps.squeeze(-1))).to(x.dtype), weight, scale)

    return fn


tiled = of_groups(lambda steps: steps.repeat(1, 128))
turned = of_groups(lambda steps: steps.t().repeat_interleave(128, 1))
cut = of_groups(lambda steps: torch.cat([steps, steps], 1).repeat_interleave(128, 1)[:, :K])
two_rows_each = of_groups(lambda steps: steps.repeat_interleave(2, 0)[:M].repeat_interleave(128, 1))


def spread_over_rows(x, weight, scale):
    numbers = x[:1].to(FP8)
    return linear((numbers.float() * (x.float().amax(1, keepdim=True))).to(x.dtype), weight, scale)


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (of_e5m2, of("row"), "its rows are torch.float8_e5m2, not float8_e4m3fn"),
        (in_groups_of_64, of("row"), "its rows have a scale for 64 columns, not for 128 or all"),
        (groups_across_rows, of("row"), "its rows have a scale for 1024 columns, not for 128 or all"),
        (of_columns, of("row"), "its rows of float8, [4, 512], have scales of shape [1, 512]"),
        *((fn, of("row"), "have scales of shape [4, 512]") for fn in (tiled, turned, cut, two_rows_each)),
        (spread_over_rows, of("row"), "its rows of float8 are fewer than their scales"),
        (in_rows, of("row", k=448), "the columns of `x` must be a multiple of 128, got 448"),
        (in_rows, of("group"), "its weight has scales of shape [320, 8]"),
    ],
)
def test_near_misses_keep_their_rows(fn, args, reason):
    """The weight is read as it is stored, and meets the rounded rows in their own dtype."""
    module, _ = capture(fn, *args, dynamo=False)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert float8_mm_op not in targets(module)
    assert reason in texts(result.refused)


def added(x, weight, scale):
    _, steps = steps_of(x, x.shape[-1])
    return linear(((x.float() / steps[..., 0]).to(FP8).float() * steps[..., 0] + 1).to(x.dtype), weight, scale)


def of_integers(x, weight, scale):
    _, steps = steps_of(x, x.shape[-1])
    return linear(((x.float() / steps[..., 0]).to(FP8).to(torch.int32).float() * steps[..., 0]).to(x.dtype), weight, scale)


def transposed(x, weight, scale):
    numbers = x.view(K, M).to(FP8)
    return linear((numbers.float() * 0.5 * x.float().amax()).to(x.dtype).t(), weight, scale)


def in_another_order(x, weight, scale):
    _, steps = steps_of(x, x.shape[-1])
    rows = ((x.float() / steps[..., 0]).to(FP8).float() * steps[..., 0]).to(x.dtype)
    return linear(rows.flip(1), weight, scale)


@pytest.mark.parametrize("fn", [added, of_integers, transposed, in_another_order, linear])
def test_rows_like_any_others(fn):
    args = of("row")
    module, inputs = capture(fn, *args, dynamo=False)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert texts(result.done) == "skinny_mm: 4 rows, weight 320 x 512 of 8 bits"
    assert "float8_mm" not in texts(result.refused)
    assert close(module(*inputs)[0], fn(*args), 2**-7)


def test_rows_of_float8_and_weights_of_int8():
    module, _ = capture(in_rows, *of("int8"), dynamo=False)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert (result.matches, texts(result.refused)) == (1, "")
    assert float8_mm_op not in targets(module)


def test_fewer_rows_than_are_faster(monkeypatch):
    """Which is no refusal: nobody loses by it."""
    monkeypatch.undo()
    least = hopper_tiles.FLOAT8_LEAST_ROWS
    assert 1 < least < 32
    for m in (least - 1, least):
        module, _ = capture(in_rows, *of("row", m=m), dynamo=False)
        result = run_pass(LowerSkinnyMm(), module, 90)
        assert targets(module).count(skinny_mm_op if m < least else float8_mm_op) == 1
        assert texts(result.refused) == ""


def test_129_rows_and_sizes_that_are_not_known():
    module, _ = capture(in_groups, *of("block", m=129), dynamo=False)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert result.matches == 0
    assert "`x` must have at most 128 rows, got 129" in texts(result.refused)
    assert "more than 128 rows, for which the weight is dequantized" in texts(result.refused)
