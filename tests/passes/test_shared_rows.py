"""Float8 rows of several products and of whole layers: rounded once, beside norms, by Inductor, in batch-invariant rounds."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

import spec_ops
from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.models import quantize
from spec_ops.models.stored_tensor import Inputs
from spec_ops.ops.linear import add_skinny_mm_op, float8_mm_op, skinny_mm_op
from spec_ops.passes.analysis.counts import WEIGHTS
from spec_ops.passes.analysis.rows import is_product
from spec_ops.passes.analysis.stored_weights import weight_bytes
from spec_ops.passes.fuse_norm_linear import FuseNormLinear
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm
from spec_ops.passes.manager import SLOT, PassManager
from spec_ops.passes.require_invariance import RequireInvariance
from tests.helpers.pass_harness import capture, compile_interpreted, run_pass, targets, texts
from tests.helpers.rounded_rows import FP8, GROUP, ROW, K, M, N, close, exact, in_groups, linear, of, only

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def few_rows_too(monkeypatch):
    """Graphs of four rows are as good as others, and faster to run."""
    monkeypatch.setattr(hopper_tiles, "FLOAT8_LEAST_ROWS", 1)


def through_views(node: torch.fx.Node) -> torch.fx.Node:
    return through_views(node.args[0]) if node.target in (aten.reshape.default, aten.view.default) else node


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
    g = torch.Generator().manual_seed(0)
    residual, weight = torch.randn(M, K, generator=g).bfloat16(), torch.rand(K, generator=g).bfloat16() + 0.5
    args = [x, residual, weight, *first, *of("block", 1)[1:]]
    module, inputs = capture(fn, *args, dynamo=False)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 2
    products = [node.target for node in module.graph.nodes if node.target in (skinny_mm_op, float8_mm_op)]
    assert products == [float8_mm_op if rounded else skinny_mm_op for rounded in (before, after)]
    result = run_pass(FuseNormLinear(), module, 90)
    assert result.matches == (not before and not after)
    assert (add_skinny_mm_op in targets(module)) == (not before and not after)
    for got, want in zip(module(*inputs), fn(*args), strict=True):
        assert close(got, want, 2**-4)


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
    options = {SLOT: PassManager({"fuse_rounding": False}, arch=90, every_graph=True), "shape_padding": False}
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
