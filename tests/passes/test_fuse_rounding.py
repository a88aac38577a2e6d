"""fuse_rounding: what is rounded in one launch, with which numbers and steps, and what Inductor keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.models.stored_tensor import Inputs
from spec_ops.ops.linear import float8_mm_op
from spec_ops.ops.rounding import add_norm_round_rows_op, gated_round_rows_op, norm_round_rows_op, round_rows_op
from spec_ops.passes.analysis.graph import arg
from spec_ops.passes.compile_kernels import arguments, launches_of
from spec_ops.passes.fuse_norm_linear import FuseNormLinear
from spec_ops.passes.fuse_rounding import FuseRounding
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm
from tests.helpers.pass_harness import capture, run_pass, targets, texts
from tests.helpers.rounded_rows import FP8, GROUP, ROW, K, M, N, linear, of, run_to
from tests.helpers.roundings import KINDS, measured

aten = torch.ops.aten
OPS = (round_rows_op, gated_round_rows_op, norm_round_rows_op, add_norm_round_rows_op)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def few_rows_too(monkeypatch):
    """Graphs of four rows are as good as others, and faster to run."""
    monkeypatch.setattr(hopper_tiles, "FLOAT8_LEAST_ROWS", 1)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


G = (1 + rand(K).float() / 8).to(BF16)


def products(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if node.target is float8_mm_op]


def read_rows(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each product multiplies its weight with, in float64."""
    found = []
    for node in products(module):
        numbers, steps = (run_to(operand, inputs) for operand in node.args[:2])
        found.append(numbers.double() * steps.double().repeat_interleave(numbers.shape[1] // steps.shape[1], 1))
    return found


def fused(fn: Callable, args: list[torch.Tensor], op: object, done: str) -> torch.fx.GraphModule:
    """The graph of `fn` with its rounding in `op` alone; rows and all results are what they were."""
    module, inputs = capture(fn, *args, dynamo=False)
    run_pass(LowerSkinnyMm(), module, 90)
    run_pass(FuseNormLinear(), module, 90)
    before, want = read_rows(module, inputs), module(*inputs)
    result = run_pass(FuseRounding(), module, 90)
    assert done in texts(result.done), texts(result.refused)
    assert [target for target in targets(module) if target in OPS] == [op]
    assert not {aten.amax.default, aten.div.Tensor, aten.rsqrt.default, aten.abs.default} & set(targets(module))
    for got, rows in zip(read_rows(module, inputs), before, strict=True):
        # Where a step's last bit differs, since a GPU multiplies by 1 / 448, a number in the middle goes the other way.
        assert ((got - rows).abs() > 2**-7 * rows.abs()).double().mean() < 2e-2
        torch.testing.assert_close(got, rows, rtol=0.13, atol=1e-3)
    for got, other in zip(module(*inputs), want, strict=True):
        assert got.shape == other.shape
        assert got.dtype == other.dtype
        assert (got.double() - other.double()).abs().max() <= 2**-6 * other.double().abs().max()
    return module


def call(module: torch.fx.GraphModule) -> torch.fx.Node:
    (node,) = (node for node in module.graph.nodes if node.target in OPS)
    return node


def args_of(kind: str, *rows: torch.Tensor) -> list[torch.Tensor]:
    scale = measured(kind, BF16)
    return [*rows, *of("row", 1)[1:], *([] if scale is None else [scale])]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_memory(kind):
    inputs, given = KINDS[kind]

    def fn(x, weight, scale, step=None):
        return (linear(inputs.rounded(x, step), weight, scale),)

    module = fused(fn, args_of(kind, rand(M, K)), round_rows_op, "alone")
    node, columns = call(module), inputs.group or K
    of_kind = torch.float32 if inputs.float32_scales else BF16
    assert arg(node, "columns") == columns
    assert (arg(node, "quotient_dtype"), arg(node, "step") is not None) == (of_kind, given)
    if not given:
        assert arg(node, "step_dtype") == of_kind
        small = (torch.finfo(torch.float32).tiny, 0.0) if inputs.float32_scales else (0.0, torch.finfo(BF16).eps)
        assert (arg(node, "least"), arg(node, "zero")) == small
    assert "numbers of float8 come from <built-in function getitem>" in texts(run_pass(FuseRounding(), module, 90).refused)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def sigmoid_times(gate):
    return (gate.float() * torch.sigmoid(gate.float())).to(gate.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_after_an_activation(name, kind):
    inputs, _ = KINDS[kind]

    def fn(both, weight, scale, step=None):
        gate, up = both.chunk(2, -1)
        return (linear(inputs.rounded(ACTIVATIONS[name](gate) * up, step), weight, scale),)

    module = fused(fn, args_of(kind, rand(2, 2, 2 * K)), gated_round_rows_op, f"after {name}(gate) * up")
    assert arg(call(module), "activation") == name
    assert aten.clone.default not in targets(module)


def test_other_ways_to_write_it():
    def apart(gate, up, weight, scale):
        return (linear(GROUP.rounded(up * sigmoid_times(gate), None), weight, scale),)

    def sliced(both, weight, scale):
        return (linear(ROW.rounded(both[:, K:] * F.silu(both[:, :K]), None), weight, scale),)

    fused(apart, args_of("groups", rand(M, K), rand(M, K, seed=1)), gated_round_rows_op, "after silu(gate) * up")
    fused(sliced, args_of("rows", rand(M, 2 * K)), gated_round_rows_op, "after silu(gate) * up")


def rms_norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def rms_norm_of_transformers(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [rms_norm, rms_norm_of_transformers])
def test_after_a_norm(norm, kind):
    inputs, _ = KINDS[kind]
    of_norm = (1 + rand(K, seed=3).float() / 8).to(BF16)

    def alone(x, g, weight, scale, step=None):
        return linear(inputs.rounded(norm(x, g), step), weight, scale), x.flatten()[:3]

    def added(x, residual, g, weight, scale, step=None):
        total = residual + x
        out = linear(inputs.rounded(norm(total, g), step), weight, scale)
        return out, total, total * 2

    module = fused(alone, args_of(kind, rand(2, 2, K), of_norm), norm_round_rows_op, "after an RMSNorm")
    assert arg(call(module), "roundings") == (2 if norm is rms_norm_of_transformers else 1)
    assert arg(call(module), "eps") == pytest.approx(1e-5 if norm is rms_norm else 1e-6)
    given = args_of(kind, rand(2, 2, K), rand(2, 2, K, seed=1), of_norm)
    module = fused(added, given, add_norm_round_rows_op, "after a residual sum and an RMSNorm")
    assert targets(module).count(aten.add.Tensor) == 0


def test_a_chain_of_residual_sums():
    """From an embedding, which Inductor computes: so it does the first norm, but not the sums, whose terms are read twice. The
    last sum no norm of all rows reads: Inductor adds, takes a row of each request and normalizes it."""

    def fn(ids, table, g, *weights):
        total = table[ids]
        for i in range(0, len(weights) - 2, 2):
            total = total + linear(GROUP.rounded(rms_norm(total, g), None), *weights[i : i + 2])
        return linear(GROUP.rounded(rms_norm(total.view(2, 2, K)[:, 1], g), None), *weights[-2:]), total

    weights = [part for seed in range(4) for part in of("block", seed, n=K)[1:]]
    module, inputs = capture(fn, torch.arange(M), rand(9, K), G, *weights, dynamo=False)
    run_pass(LowerSkinnyMm(), module, 90)
    want = module(*inputs)
    result = run_pass(FuseRounding(), module, 90)
    for target in ("index.Tensor", "select.int"):
        assert texts(result.refused).count(f"Inductor computes what is rounded by aten.{target}") == 1
    found = [target for target in targets(module) if target in OPS]
    assert found == [add_norm_round_rows_op] * 2
    assert targets(module).count(aten.add.Tensor) == 1
    for got, other in zip(module(*inputs), want, strict=True):
        assert (got.double() - other.double()).abs().max() <= 2**-5 * other.double().abs().max()


def norm_in_float32(x, g):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * g


def test_a_norm_whose_rounding_inductor_has_left_out():
    """As it does with a conversion to 16 bits and back: all reads float32, or the steps alone are of rounded rows."""

    def whole(x, g, weight, scale):
        return (linear(ROW.rounded(norm_in_float32(x, g), None).to(x.dtype), weight, scale),)

    def in_part(x, g, weight, scale):
        wide = norm_in_float32(x, g)
        steps = (wide.to(x.dtype).abs().amax(1, keepdim=True) / 448).float()
        numbers = (wide / steps).clamp(-448, 448).to(FP8)
        return (torch._scaled_mm(numbers, weight.t(), steps, scale.t(), out_dtype=x.dtype),)

    args = args_of("rows", rand(M, K), (1 + rand(K, seed=3).float() / 8).to(BF16))
    assert arg(call(fused(whole, args, norm_round_rows_op, "after an RMSNorm")), "roundings") == 0
    node = call(fused(in_part, args, norm_round_rows_op, "after an RMSNorm"))
    assert (arg(node, "roundings"), arg(node, "step_dtype"), arg(node, "quotient_dtype")) == (1, BF16, torch.float32)


def test_products_that_share_rows():
    """And one that reads them in its own dtype, since its weight has scales that `float8_mm` does not know."""
    other = of("group", 2)[1:]

    def fn(x, w0, s0, w1, s1, w2, s2):
        rows = ROW.rounded(x, None)
        return linear(rows, w0, s0), linear(rows, w1, s1), linear(rows, w2, s2)

    args = [rand(M, K), *of("row", 1)[1:], *of("block", 2)[1:], *other]
    module = fused(fn, args, round_rows_op, "alone")
    assert len(products(module)) == 2
    assert len({node.args[:2] for node in products(module)}) == 1


def test_products_that_share_rows_in_two_shapes():
    """Groups of 128 columns are the same ones, of whichever rows."""

    def fn(x, w0, s0, w1, s1):
        rows = GROUP.rounded(x, None)
        return linear(rows, w0, s0), linear(rows.view(2 * M, K // 2), w1, s1)

    fused(fn, [rand(M, K), *of("row", 1)[1:], *of("row", 2, k=K // 2)[1:]], round_rows_op, "alone")


def test_steps_that_others_look_at():
    def fn(x, weight, scale):
        values = x.float().view(M, -1, 128)
        steps = values.abs().amax(-1, keepdim=True) / 448
        numbers = (values / steps).clamp(-448, 448).to(FP8)
        rows = (numbers.float() * steps).to(x.dtype).view(x.shape)
        return linear(rows, weight, scale), steps.view(-1)

    fused(fn, args_of("rows", rand(M, K)), round_rows_op, "alone")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_that_stand_in_are_of_the_dtype_of_steps(dtype):
    """0.013 is a number of neither."""

    def least(x, weight, scale):
        return rounded(x, weight, scale, (x.abs().amax(-1, keepdim=True) / 448).clamp_min(0.013))

    def zero(x, weight, scale):
        steps = x.abs().amax(-1, keepdim=True) / 448
        return rounded(x, weight, scale, torch.where(steps == 0, 0.013, steps))

    def rounded(x, weight, scale, steps):
        rows = (x / steps).clamp(-448, 448).to(FP8).to(x.dtype) * steps
        return (linear(rows, weight, scale),)

    for fn, name, rows in ((least, "least", rand(M, K) / 8), (zero, "zero", torch.zeros(M, K))):
        module = fused(fn, [rows.to(dtype), *STORED], round_rows_op, "alone")
        assert arg(call(module), name) == torch.tensor(0.013, dtype=dtype).item()


def torchao_rows(x):
    """As `Float8Tensor` rounds its rows: steps in the rows' dtype, quotients in float32."""
    steps = (x.abs().amax([1], keepdim=True) / 448).reshape(x.shape[0], 1).to(torch.float32)
    return (x.to(torch.float32) / steps).clamp(-448, 448).to(FP8), steps


def test_rows_of_torchao():
    def fn(x, weight, scale):
        numbers, steps = torchao_rows(x)
        return (torch._scaled_mm(numbers, weight.t(), steps, scale.t(), out_dtype=BF16),)

    module = fused(fn, [rand(M, K), *of("row", 1)[1:]], round_rows_op, "alone")
    assert (arg(call(module), "step_dtype"), arg(call(module), "quotient_dtype")) == (BF16, torch.float32)


def test_two_steps_that_are_given_for_the_same_rows():
    """Inductor rounds to both in one kernel."""

    def fn(x, weight, scale, *steps):
        return tuple(linear(Inputs("float8").rounded(x, step), weight, scale) for step in steps)

    module, _ = capture(fn, rand(M, K), *of("row", 1)[1:], *(torch.tensor([s]).to(BF16) for s in (0.01, 0.02)), dynamo=False)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 2
    result = run_pass(FuseRounding(), module, 90)
    assert result.matches == 0
    assert texts(result.refused).count("aten.div.Tensor reads the rows too") == 2


def test_the_kernels_take_them():
    """Their launchers, on tensors that stand for those on a Hopper GPU: one launch, early unless a program has a whole row."""
    launch = pytest.importorskip("spec_ops.backends.triton.runtime.launch", reason="triton comes for Linux only")

    def fn(both, residual, g, w0, s0, w1, s1):
        gate, up = both.chunk(2, -1)
        down = linear(GROUP.rounded(F.silu(gate) * up, None), w0, s0)
        return linear(GROUP.rounded(rms_norm(residual + down, g), None), w1, s1), residual + down

    n = of("block", 1, n=K)[1:]
    module, _ = capture(fn, rand(M, 2 * K), rand(M, K), rand(K), *n, *of("block", 2)[1:], dynamo=False)
    run_pass(LowerSkinnyMm(), module, 90)
    assert run_pass(FuseRounding(), module, 90).matches == 2
    found = [node for node in module.graph.nodes if node.target in OPS]
    assert [node.target for node in found] == [gated_round_rows_op, add_norm_round_rows_op]
    for node in found:
        (made,) = launches_of(node.target, arguments(node), launch.Target(90, 132))
        assert made.kernel.fn.__name__ == "round_rows_kernel"
        assert made.early == (node.target is gated_round_rows_op)


def rounding(values: Callable | None = None, steps: Callable | None = None, numbers: Callable | None = None) -> Callable:
    """`ROW.rounded` with a step of it changed."""

    def fn(x, weight, scale):
        wide = x.float()
        step = (steps or (lambda v: v.abs().amax(-1, keepdim=True) / 448))(wide)
        quotient = (values or (lambda v: v))(wide) / step
        rows = (numbers or (lambda q: q.clamp(-448, 448)))(quotient).to(FP8)
        return (linear((rows.float() * step).to(x.dtype), weight, scale),)

    return fn


def of_float32(x, weight, scale):
    return (linear(ROW.rounded(x.float() * 2, None).to(x.dtype), weight, scale),)


def read_elsewhere(both, weight, scale):
    gate, up = both.chunk(2, -1)
    rows = F.silu(gate) * up
    return linear(ROW.rounded(rows, None), weight, scale), rows.sum()


def another_activation(both, weight, scale):
    gate, up = both.chunk(2, -1)
    return (linear(ROW.rounded(torch.tanh(gate) * up, None), weight, scale),)


def computed_gate(both, weight, scale):
    gate, up = both.chunk(2, -1)
    return (linear(ROW.rounded(F.silu(gate + 1) * up, None), weight, scale),)


def norm_read_elsewhere(x, g, weight, scale):
    rows = rms_norm(x, g)
    return linear(ROW.rounded(rows, None), weight, scale), rows * 2


def norm_of_a_sum_of_three(x, g, weight, scale):
    return (linear(ROW.rounded(rms_norm(x + x.flip(0) * 2, g), None), weight, scale),)


def norm_with_a_computed_weight(x, g, weight, scale):
    return (linear(ROW.rounded(rms_norm(x, g + 1), None), weight, scale),)


def norm_of_another_dtype(x, g, weight, scale):
    return (linear(ROW.rounded(norm_in_float32(x, g).to(torch.float16), None).to(x.dtype), weight, scale),)


def rounded_norm_of_another_dtype(x, g, weight, scale):
    rows = rms_norm_of_transformers(x, g).to(torch.float16)
    return (linear(ROW.rounded(rows, None).to(x.dtype), weight, scale),)


def transposed(x, weight, scale):
    return (linear(ROW.rounded(x.t(), None), weight, scale),)


def with_another_step(x, weight, scale):
    steps = x.float().abs().amax(-1, keepdim=True) / 448
    rows = (x.float() / (steps * 2)).clamp(-448, 448).to(FP8)
    return (linear((rows.float() * steps).to(x.dtype), weight, scale),)


def given_and_not_cut_off(x, weight, scale, step):
    return (linear(((x / step).to(FP8).to(x.dtype) * step), weight, scale),)


ROWS, BOTH = rand(M, K), rand(M, 2 * K)
STORED = of("row", 1)[1:]


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (rounding(steps=lambda v: v.abs().amax(-1, keepdim=True) / 448 + 1e-9), [ROWS], "steps are computed by aten.add"),
        (rounding(steps=lambda v: v.abs().amax(-1, keepdim=True) / 240), [ROWS], "not as the greatest magnitude over 448"),
        (rounding(steps=lambda v: v.abs().mean(-1, keepdim=True) / 448), [ROWS], "not those of the greatest magnitudes"),
        (rounding(steps=lambda v: v.amax(-1, keepdim=True) / 448), [ROWS], "not those of the greatest magnitudes"),
        (rounding(steps=lambda v: (v + 1).abs().amax(-1, keepdim=True) / 448), [ROWS], "steps are not those of the same rows"),
        (rounding(steps=lambda v: v.abs().amax() / 448), [ROWS], "a step is not of columns of one row"),
        (rounding(values=lambda v: v + 1), [ROWS], "steps are not those of the same rows"),
        (of_float32, [ROWS], "rows are torch.float32 before"),
        (rounding(numbers=lambda q: q.clamp(-240, 240)), [ROWS], "they are cut off at 240"),
        (rounding(numbers=lambda q: q * 0.5), [ROWS], "computed by aten.mul.Tensor, not as rows over their steps"),
        (with_another_step, [ROWS], "they are divided by other steps than multiply them"),
        (read_elsewhere, [BOTH], "reads the rows too"),
        (another_activation, [BOTH], "Inductor computes what is rounded by aten.mul.Tensor"),
        (computed_gate, [BOTH], "Inductor computes what is rounded by aten.add.Tensor"),
        (norm_read_elsewhere, [ROWS, G], "reads the rows too"),
        (norm_of_a_sum_of_three, [ROWS, G], "Inductor computes what is rounded by aten.mul.Tensor"),
        (norm_with_a_computed_weight, [ROWS, G], "the norm's weight is not an input of the rows' dtype"),
        (norm_of_another_dtype, [ROWS, G], "Inductor computes what is rounded by prims.convert_element_type"),
        (rounded_norm_of_another_dtype, [ROWS, G], "Inductor computes what is rounded by prims.convert_element_type"),
        (rounding(numbers=lambda q: q.int().float()), [ROWS], "they are rounded to torch.int32 on the way"),
        (rounding(numbers=lambda q: q.half().bfloat16()), [ROWS], "to torch.bfloat16 and torch.float16 on the way"),
        (transposed, [rand(K, M)], "numbers of float8 come from aten.clone.default"),
    ],
)
def test_near_misses(fn, args, reason):
    module, _ = capture(fn, *args, *STORED, dynamo=False)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
    before = str(module.graph)
    result = run_pass(FuseRounding(), module, 90)
    assert result.matches == 0
    assert reason in texts(result.refused)
    assert texts(result.refused).startswith("rounding of 4 x 512: ")
    assert str(module.graph) == before


def test_a_given_step_without_limits():
    module, _ = capture(given_and_not_cut_off, ROWS, *STORED, torch.tensor([0.01]).to(BF16), dynamo=False)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
    assert "they are not cut off at 448, and their step is given" in texts(run_pass(FuseRounding(), module, 90).refused)


def test_a_given_step_that_is_made_an_integer():
    def fn(x, weight, scale, step):
        return (linear(Inputs("float8", float32_scales=True).rounded(x, step.int().float()), weight, scale),)

    module, _ = capture(fn, ROWS, *STORED, torch.tensor([1.7]), dynamo=False)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
    assert "they are rounded to torch.int32 on the way" in texts(run_pass(FuseRounding(), module, 90).refused)


def test_a_given_step_that_is_a_part_of_an_input():
    def fn(x, weight, scale, steps):
        return (linear(Inputs("float8").rounded(x, steps[1:]), weight, scale),)

    module, _ = capture(fn, ROWS, *STORED, torch.tensor([0.02, 0.01]).to(BF16), dynamo=False)
    assert run_pass(LowerSkinnyMm(), module, 90).matches == 1
    assert "the step that is given is a part of an input" in texts(run_pass(FuseRounding(), module, 90).refused)


def test_long_rows(monkeypatch):
    monkeypatch.setattr("spec_ops.passes.fuse_rounding.MAX_COLUMNS", K - 1)
    for inputs, matches in ((ROW, 0), (GROUP, 1)):

        def fn(x, weight, scale, inputs=inputs):
            return (linear(inputs.rounded(x, None), weight, scale),)

        module, _ = capture(fn, ROWS, *STORED, dynamo=False)
        run_pass(LowerSkinnyMm(), module, 90)
        result = run_pass(FuseRounding(), module, 90)
        assert result.matches == matches
        assert ("rows of more than 511 columns" in texts(result.refused)) == (matches == 0)


def test_groups_of_64_are_rounded_by_inductor():
    """`float8_mm` does not take them either."""
    module, _ = capture(lambda x, w, s: (linear(Inputs("float8", 64).rounded(x, None), w, s),), ROWS, *STORED, dynamo=False)
    run_pass(LowerSkinnyMm(), module, 90)
    assert run_pass(FuseRounding(), module, 90).refused == []
    assert module.graph.output_node().args[0][0].meta["val"].shape[1] == N
