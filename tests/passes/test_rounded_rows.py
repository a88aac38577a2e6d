"""lower_skinny_mm on rows that a graph rounds to float8: which meet a float8 weight as they are, and why others do not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

import spec_ops
from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.backends.weight_format import dequantized
from spec_ops.models import quantize
from spec_ops.models.stored_tensor import Inputs
from spec_ops.ops.linear import add_skinny_mm_op, float8_mm_op, skinny_mm_op
from spec_ops.passes.analysis.counts import WEIGHTS
from spec_ops.passes.analysis.rows import is_product
from spec_ops.passes.analysis.stored_weights import weight_bytes
from spec_ops.passes.compile_kernels import arguments, launches_of
from spec_ops.passes.fuse_norm_linear import FuseNormLinear
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm
from spec_ops.passes.manager import SLOT, PassManager
from spec_ops.passes.require_invariance import RequireInvariance
from tests.helpers.pass_harness import capture, compile_interpreted, run_pass, targets, texts
from tests.helpers.stored_weights import stored

aten = torch.ops.aten
M, N, K = 4, 320, 512
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def few_rows_too(monkeypatch):
    """Graphs of four rows are as good as others, and faster to run."""
    monkeypatch.setattr(hopper_tiles, "FLOAT8_LEAST_ROWS", 1)


def of(kind: str, seed: int = 0, m: int = M, n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Rows, and a weight with its scales."""
    g = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(shape, generator=g) for shape in ((m, k), (n, k)))
    return [x.to(dtype), *stored(weight, kind)[:2]]


def steps_of(x: torch.Tensor, group: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` in groups of its columns, and their scales."""
    values = x.to(dtype).unflatten(-1, (-1, group))
    return values, values.abs().amax(-1, keepdim=True) / 448 + 1e-9


def linear(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(rows, dequantized(weight, scale).to(rows.dtype), bias)


def in_rows(x, weight, scale):
    _, steps = steps_of(x, x.shape[-1])
    numbers = (x.float() / steps.squeeze(-1)).to(FP8)
    return linear((numbers.float() * steps.squeeze(-1)).to(x.dtype), weight, scale)


def in_groups(x, weight, scale):
    values, steps = steps_of(x, 128)
    return linear(((values / steps).to(FP8).float() * steps).to(x.dtype).view(x.shape), weight, scale)


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


def only(module: torch.fx.GraphModule) -> torch.fx.Node:
    (node,) = (node for node in module.graph.nodes if node.target is float8_mm_op)
    return node


def through_views(node: torch.fx.Node) -> torch.fx.Node:
    return through_views(node.args[0]) if node.target in (aten.reshape.default, aten.view.default) else node


def run_to(node: torch.fx.Node, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What `node` is for the graph's inputs."""
    values: dict[torch.fx.Node, torch.Tensor] = dict(zip(node.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for other in node.graph.nodes:
        if other.op == "call_function":
            values[other] = other.target(*torch.fx.node.map_arg(other.args, values.get), **other.kwargs)
        if other is node:
            break
    return values[node]


def exact(node: torch.fx.Node, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The product `float8_mm` of its operands, in float64."""
    x, steps, weight, scale = (run_to(operand, inputs) for operand in node.args[:4])
    rows = x.double() * steps.double().repeat_interleave(x.shape[1] // steps.shape[1], 1)
    return rows @ dequantized(weight, scale).double().t()


def close(got: torch.Tensor, want: torch.Tensor, part: float = 2**-5) -> bool:
    """Whether all differences are within that part of the greatest magnitude. A number that rounds to the other one of float8
    is a 16th of itself off."""
    return bool((got - want).abs().max() <= part * want.abs().max())


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
    monkeypatch.undo()
    least = hopper_tiles.FLOAT8_LEAST_ROWS
    assert 1 < least < 32
    for m in (least - 1, least):
        module, _ = capture(in_rows, *of("row", m=m), dynamo=False)
        result = run_pass(LowerSkinnyMm(), module, 90)
        assert targets(module).count(skinny_mm_op if m < least else float8_mm_op) == 1
        assert (f"fewer than {least} rows, for which that is no faster" in texts(result.refused)) == (m < least)


def test_129_rows_and_sizes_that_are_not_known():
    module, _ = capture(in_groups, *of("block", m=129), dynamo=False)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert result.matches == 0
    assert "`x` must have at most 128 rows, got 129" in texts(result.refused)
    assert "more than 128 rows, for which the weight is dequantized" in texts(result.refused)


ROW, GROUP = Inputs("float8", float32_scales=True), Inputs("float8", 128, float32_scales=True)
MEASURED = torch.tensor([0.01]).bfloat16()
KINDS = {
    "row": (ROW, None), "group": (GROUP, None), "group, bfloat16": (Inputs("float8", 128), None),
    "measured": (Inputs("float8"), MEASURED),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_products_that_read_one_value_round_it_once(kind):
    """As `StoredTensor` rounds, in float32 and in the rows' dtype, and with a scale that was measured before."""
    inputs_of, measured = KINDS[kind]
    args = [of("row")[0].view(2, 2, K), *of("block", 1)[1:], *of("row", 2)[1:], *([] if measured is None else [measured])]

    def fn(x, w0, s0, w1, s1, measured=None):
        return tuple(linear(inputs_of.rounded(x, measured), *weight) for weight in ((w0, s0), (w1, s1)))

    module, inputs = capture(fn, *args, dynamo=False)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert result.matches == 2, texts(result.refused)
    products = [node for node in module.graph.nodes if node.target is float8_mm_op]
    made = [node for node in module.graph.nodes if node.op == "call_function" and node.meta["val"].dtype == FP8]
    assert len([node for node in made if node.target not in (aten.reshape.default, aten.view.default)]) == 1
    assert len({through_views(node.args[1]) for node in products}) == 1
    assert targets(module).count(aten.amax.default) == (0 if kind == "measured" else 1)
    for node, got, eager in zip(products, module(*inputs), fn(*args), strict=True):
        assert close(got.view(M, N), exact(node, inputs), 2**-8)
        assert close(got, eager, 2**-6)


@pytest.mark.parametrize("arch", [90, 100, 89])
def test_products_that_keep_the_dtype_round_it_once_too(arch, monkeypatch):
    """Of fewer rows than are faster, on other GPUs, and where the weight is dequantized."""
    monkeypatch.undo()
    args = [*of("row"), *of("row", 2)[1:]]

    def fn(x, w0, s0, w1, s1):
        return tuple(linear(GROUP.rounded(x, None), *weight) for weight in ((w0, s0), (w1, s1)))

    module, inputs = capture(fn, *args, dynamo=False)
    assert run_pass(LowerSkinnyMm(), module, arch).matches == (0 if arch == 89 else 2)
    products = [node for node in module.graph.nodes if node.target in (skinny_mm_op, aten.mm.default)]
    assert len(products) == 2
    assert products[0].args[0] is products[1].args[0]
    assert targets(module).count(aten.amax.default) == 1
    for got, want in zip(module(*inputs), fn(*args), strict=True):
        assert close(got, want, 2**-7)


def to_a_range(x: torch.Tensor, greatest: float) -> torch.Tensor:
    steps = x.float().abs().amax(1, keepdim=True) / greatest
    return ((x.float() / steps).to(FP8).float() * steps).to(x.dtype)


def test_products_that_round_otherwise_have_numbers_of_their_own():
    """Other groups, dtypes, values and constants."""

    def fn(x, weight, scale):
        rounded = [inputs.rounded(x, None) for inputs in (ROW, GROUP, Inputs("float8"), ROW)]
        rounded += [ROW.rounded(x * 2, None), to_a_range(x, 300.0), to_a_range(x, 200.0)]
        return tuple(linear(rows, weight, scale) for rows in rounded)

    args = of("row")
    module, inputs = capture(fn, *args, dynamo=False)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 7
    products = [node for node in module.graph.nodes if node.target is float8_mm_op]
    assert products[0].args[0] is products[3].args[0]
    assert len({node.args[0] for node in products}) == 6
    for got, want in zip(module(*inputs), fn(*args), strict=True):
        assert close(got, want, 2**-6)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_norm_is_not_divided_across_the_rounding(before, after):
    """Neither where the product before it rounds its rows, nor where the one after it does."""

    def fn(x, residual, g, w0, s0, w1, s1):
        y = residual + linear(ROW.rounded(x, None) if before else x, w0, s0)
        h = F.rms_norm(y, y.shape[-1:], g, 1e-5)
        return y, linear(ROW.rounded(h, None) if after else h, w1, s1)

    x, *first = of("row", n=K)
    args = [x, torch.randn(M, K).bfloat16(), torch.rand(K).bfloat16() + 0.5, *first, *of("block", 1)[1:]]
    module, inputs = capture(fn, *args, dynamo=False)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 2
    products = [node.target for node in module.graph.nodes if node.target in (skinny_mm_op, float8_mm_op)]
    assert products == [float8_mm_op if rounded else skinny_mm_op for rounded in (before, after)]
    result = run_pass(FuseNormLinear(), module, 90)
    assert result.matches == (not before and not after)
    assert (add_skinny_mm_op in targets(module)) == (not before and not after)
    for got, want in zip(module(*inputs), fn(*args), strict=True):
        assert close(got, want)


def test_bytes_that_move_for_weights():
    for kind in ("row", "block"):
        args = of(kind)
        module, _ = capture(in_groups, *args, dynamo=False)
        (product,) = (node for node in module.graph.nodes if node.target is aten.mm.default)
        assert weight_bytes(product) == 2 * 2 * N * K + args[1].nbytes + args[2].nbytes
        run_pass(LowerSkinnyMm(), module, 90)
        assert weight_bytes(only(module)) == args[1].nbytes + args[2].nbytes
        assert is_product(only(module))  # of which rows of an LM head are counted


@pytest.mark.parametrize("kind", ["float8_dynamic", "float8_block_dynamic"])
@pytest.mark.parametrize("arch", [90, 100, None])
def test_a_compiled_layer(arch, kind):
    """Beside an op of ours, with all passes, in bfloat16; float32 stays as it is."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.o, self.norm = nn.Linear(512, 512, bias=False), nn.RMSNorm(512, eps=1e-5)
            self.gate, self.up, self.down = nn.Linear(512, 1024), nn.Linear(512, 1024), nn.Linear(1024, 512)

        def forward(self, x, residual, cache_k, cache_v, slots):
            spec_ops.append_kv(cache_k, cache_v, *x.view(4, 2, 4, 64).unbind(1), slots)
            y = residual + self.o(x)
            h = self.norm(y)
            return y, self.down(F.silu(self.gate(h)) * self.up(h))

    torch.manual_seed(0)
    dtype = torch.float32 if arch is None else torch.bfloat16
    block = quantize(Block().to(dtype).requires_grad_(False), kind)
    caches = [torch.zeros(1, 4, 4, 64, dtype=dtype) for _ in range(2)]
    args = [torch.randn(4, 512, dtype=dtype), torch.randn(4, 512, dtype=dtype), *caches, torch.arange(4)]
    want = block(*args)
    torch._dynamo.reset()
    compiled, reports = compile_interpreted(block, arch=arch or 90)
    got = compiled(*args)
    (report,) = reports
    products = [report.after.get(name, 0) for name in ("float8_mm", "skinny_mm", "add_skinny_mm", "scaled_skinny_mm")]
    assert products == {90: [4, 0, 0, 0], 100: [0, 4, 0, 0], None: [0] * 4}[arch]
    if arch is not None:
        assert report.after[WEIGHTS] < report.before[WEIGHTS] / 3
        assert ("got sm_100" in report.text(verbose=True)) == (arch == 100)
    for ours, eager in zip(got, want, strict=True):
        assert close(ours, eager, 1e-6 if arch is None else 2**-4)


@pytest.mark.slow
@torch.no_grad()
def test_inductor_rounds_in_one_kernel():
    """For a CPU, from a plan for Hopper: two layers take the same buffers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = nn.ModuleList([quantize(nn.Linear(K, N).bfloat16(), "float8_block_dynamic") for _ in range(2)])
    options = {SLOT: PassManager(arch=90, every_graph=True), "shape_padding": False}
    compiled = torch.compile(lambda x: tuple(layer(x) for layer in layers), fullgraph=True, dynamic=False, options=options)
    x = torch.randn(2, 2, K).bfloat16()
    got, (code,) = run_and_get_code(compiled, x)
    assert len(re.findall(r"^cpp_fused\w* = async_compile", code, re.MULTILINE)) == 1
    first, second = re.findall(r"spec_ops\.float8_mm\.default\((reinterpret_tensor\(.*?\), reinterpret_tensor\(.*?\)),", code)
    assert first == second
    for ours, layer in zip(got, layers, strict=True):
        assert close(ours, layer(x), 2**-6)


@pytest.mark.parametrize("inputs_of", [ROW, GROUP])
def test_invariant_rounds_dequantize_rows_that_are_rounded_each_for_itself(inputs_of):
    def fn(x, weight, scale):
        return linear(inputs_of.rounded(x, None), weight, scale)

    args = of("row", m=64)
    module, inputs = capture(fn, *args, dynamo=False)
    run_pass(LowerSkinnyMm(), module, 90, invariant=True)
    (product,) = (node for node in module.graph.nodes if node.target is skinny_mm_op)
    assert product.args[3:] == (None, None, None, True)
    assert run_pass(RequireInvariance(), module, 90, invariant=True).refused == []
    assert not {float8_mm_op, aten.mm.default} & set(targets(module))
    (whole,) = module(*inputs)
    turned = module(inputs[0].flip(0), *inputs[1:])[0]
    assert torch.equal(turned.flip(0), whole)
    loud = module(torch.cat([inputs[0][:1], 1000 * inputs[0][1:]]), *inputs[1:])[0]
    assert torch.equal(loud[0], whole[0])
