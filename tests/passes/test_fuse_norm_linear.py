"""fuse_norm_linear alone: which RMS norms are divided among the products around them, and which keep their kernel."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import spec_ops
from spec_ops.ops.collectives import all_reduce_add_op, all_reduce_op
from spec_ops.ops.linear import add_skinny_mm_op, scaled_silu_mul_op, scaled_skinny_mm_op, skinny_mm_op
from spec_ops.ops.moe import add_moe_experts_op, moe_experts_op, scaled_moe_experts_op
from spec_ops.passes import fuse_norm_linear, lower_skinny_mm, pass_names
from spec_ops.passes.fuse_norm_linear import FuseNormLinear
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm, Rule
from tests.helpers.groups import alone
from tests.helpers.inductor_cuda import generate, launches
from tests.helpers.pass_harness import capture, run_pass, switched_off, targets, texts
from tests.helpers.paths import RESULTS

aten = torch.ops.aten
M, E, WIDE, EXPERTS = 4, 256, 768, 8  # rows, hidden size, intermediate size, experts of a mixture
# Of the products below, cuBLAS keeps those of more than 400 columns and those with weights of less than E x E.
RULE = Rule(max_m=64, max_n=400, min_k=E, min_bytes=2 * E * E, max_bytes=1 << 30)


FEW_AFTER_NORM, AFTER_NORM = fuse_norm_linear.AFTER_NORM[90]
SKINNY_MM = RESULTS / "h200-skinny-mm.json"


@pytest.fixture(autouse=True)
def small_rule(monkeypatch):
    monkeypatch.setattr(lower_skinny_mm, "RULES", {90: (RULE,)})
    monkeypatch.setattr(fuse_norm_linear, "AFTER_NORM", {})


def tensors(m: int = M, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Attention's output, residual; weights of o, its norm, gate_up, down, its norm, qkv."""
    g = torch.Generator().manual_seed(0)
    shapes = [(m, E), (m, E), (E, E), (E,), (2 * WIDE, E), (E, WIDE), (E,), (384, E)]
    made = [torch.randn(shape, generator=g) * (0.05 if shape[0] > m and len(shape) == 2 else 2.0) for shape in shapes]
    return [(t.abs() + 0.5 if t.dim() == 1 else t).to(dtype) for t in made]


def rms_norm(y, g):
    return F.rms_norm(y, y.shape[-1:], g, 1e-5)


def llama_norm(y, g):
    """As transformers writes it."""
    exact = y.to(torch.float32)
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)
    return g * exact.to(y.dtype)


def layer(att, r, o, g, gate_up, down, g2, qkv, norm=rms_norm):
    y = r + F.linear(att, o)
    gate, up = F.linear(norm(y, g), gate_up).chunk(2, -1)
    y2 = y + F.linear(F.silu(gate) * up, down)
    return y, y2, F.linear(norm(y2, g2), qkv)


def unpacked(att, r, o, g, gate_up, down, g2, qkv):
    """transformers' Llama: a product each for gate, up, q, k."""
    y = F.linear(att, o) + r
    h = llama_norm(y, g)
    y2 = F.linear(F.silu(F.linear(h, gate_up[:WIDE])) * F.linear(h, gate_up[WIDE:]), down) + y
    h = llama_norm(y2, g2)
    return y, y2, F.linear(h, o.contiguous()), F.linear(h, o)


def front(att, r, o, g, *_):
    """The shortest: a product, a norm, a product."""
    y = r + F.linear(att, o)
    return y, F.linear(rms_norm(y, g), o)


def lowered(fn: Callable, args: list[torch.Tensor], arch: int = 90, *, dynamo: bool = False):
    module, inputs = capture(fn, *args, dynamo=dynamo)
    run_pass(LowerSkinnyMm(), module, arch)
    return module, inputs


def errors(got, exact) -> list[float]:
    return [(a.double() - b).square().mean().sqrt().item() for a, b in zip(got, exact, strict=True)]


def fused(fn: Callable, args: list[torch.Tensor], matches: int, of_ranks: int = 0, of_mixtures: int = 0) -> list:
    """The targets after the pass. The sums before the norms equal the unfused ones bit for bit, what follows is as exact."""
    module, inputs = lowered(fn, args)
    unfused = copy.deepcopy(module)
    result = run_pass(FuseNormLinear(), module, 90)
    assert result.matches == matches, texts(result.refused)
    assert targets(module).count(add_skinny_mm_op) == matches - of_ranks - of_mixtures
    assert targets(module).count(add_moe_experts_op) == of_mixtures
    assert targets(module).count(all_reduce_add_op) == of_ranks
    assert not {aten.rsqrt.default, aten.mean.dim} & set(targets(module))
    got, want = module(*inputs), unfused(*inputs)
    assert torch.equal(got[0], want[0])
    assert [(a.shape, a.dtype, a.stride()) for a in got] == [(a.shape, a.dtype, a.stride()) for a in want]
    exact = fn(*[a.double() if len(args) < 9 else a.float() for a in args])  # mixtures: experts are chosen in float32
    for ours, theirs in zip(errors(got, exact), errors(want, exact), strict=True):
        assert ours <= 1.1 * theirs  # as many roundings; how large each is depends on where a value lies between powers of two
    return targets(module)


@pytest.mark.parametrize("m", [M, 32])
@pytest.mark.parametrize("norm", [rms_norm, llama_norm])
def test_a_layer(norm, m):
    found = fused(lambda *args: layer(*args, norm=norm), tensors(m), 2)
    assert found.count(scaled_skinny_mm_op) == found.count(scaled_silu_mul_op) == found.count(aten.mm.default) == 1
    assert skinny_mm_op not in found
    assert aten.exp.default not in found


def test_layers_that_ranks_share():
    """The sum of ranks takes the place of the product, in any shape with the same rows. The group is one of one rank."""
    group = alone("cpu")

    def shared(att, r, o, g, gate_up, down, g2, qkv):
        y = r + torch.ops.spec_ops.all_reduce(F.linear(att, o).view(2, 2, E), "sum", group).view(M, E)
        gate, up = F.linear(rms_norm(y, g), gate_up).chunk(2, -1)
        y2 = torch.ops.spec_ops.all_reduce(F.linear(F.silu(gate) * up, down), "sum", group) + y
        return y, y2, F.linear(llama_norm(y2, g2), qkv)

    found = fused(shared, tensors(), 2, of_ranks=2)
    assert found.count(scaled_silu_mul_op) == found.count(scaled_skinny_mm_op) == 1
    assert all_reduce_op not in found


def experts_tensors(m: int = M, inner: int = 64) -> list[torch.Tensor]:
    """And the weights of a router, and of experts."""
    g = torch.Generator().manual_seed(1)
    shapes = ((EXPERTS, E), (EXPERTS, 2 * inner, E), (EXPERTS, E, inner))
    made = [torch.randn(shape, generator=g) * scale for shape, scale in zip(shapes, (0.02, 0.1, 0.2), strict=True)]
    return [*tensors(m), *(t.bfloat16() for t in made)]


def mixtures(att, r, o, g, gate_up, down, g2, qkv, router, stack, down_stack, layers=2):
    """A mixture for an MLP; rows in another shape outside of it. All experts, so that no rounding chooses others."""
    sums, rows = [], (2, att.shape[0] // 2, E)
    for _ in range(layers):
        r = r + F.linear(att, o).view(rows)
        h = rms_norm(r, g).view(-1, E)
        ids, weights = spec_ops.route_experts(F.linear(h, router), EXPERTS)
        sums.append(r)
        r = r + spec_ops.moe_experts(h, ids, weights, stack, down_stack).view(rows)
        sums.append(r)
        att = F.linear(rms_norm(r, g2), qkv[:E]).view(-1, E)
    return *sums, att


@pytest.mark.parametrize("m", [M, 32])
def test_mixtures(m, monkeypatch):
    """Norms on both sides of one, whose router reads the first; the sums before the first mixture are the same bits."""
    monkeypatch.setattr(fuse_norm_linear, "AFTER_NORM", {90: (replace(RULE, min_bytes=0),)})
    att, r, *weights = experts_tensors(m)
    args = [att, r.view(2, m // 2, E), *weights]
    found = fused(mixtures, args, 4, of_mixtures=2)
    assert found.count(scaled_skinny_mm_op) == 4  # two routers, two products after norms
    assert not {aten.mm.default, moe_experts_op, scaled_moe_experts_op} & set(found)
    module, _ = lowered(mixtures, args)
    assert texts(run_pass(FuseNormLinear(), module, 90).done).splitlines()[:2] == [
        f"RMSNorm of {m} x 256 in the product of 256 x 256 before it and 1 scaled_skinny_mm and mixture after it",
        f"RMSNorm of {m} x 256 in the mixture before it and 1 scaled_skinny_mm after it",
    ]


def mixture_alone(att, r, o, g, gate_up, down, g2, qkv, router, stack, down_stack):
    """Two results of its own: it is not fused with what is behind."""
    y = r + F.linear(att, o)
    h = rms_norm(y, g)
    ids, weights = spec_ops.route_experts(F.linear(h, router), EXPERTS)
    return y, spec_ops.moe_experts(h, ids, weights, stack, down_stack)


def test_a_mixture_that_no_norm_follows(monkeypatch):
    monkeypatch.setattr(fuse_norm_linear, "AFTER_NORM", {90: (replace(RULE, min_bytes=0),)})
    found = fused(mixture_alone, experts_tensors(), 1)
    assert found.count(scaled_moe_experts_op) == 1


def mixture_of_inputs(att, r, o, g, gate_up, down, g2, qkv, router, stack, down_stack):
    """No norm before it."""
    ids, weights = spec_ops.route_experts(F.linear(att, router), EXPERTS)
    made = spec_ops.moe_experts(att, ids, weights, stack, down_stack)
    y = r + made
    return y, F.linear(rms_norm(y, g), o), made


def test_a_mixture_that_no_norm_precedes():
    def fn(*args):
        return mixture_of_inputs(*args)[:2]

    fused(fn, experts_tensors(), 1, of_mixtures=1)


def mixture_read(*args):
    _, product, made = mixture_of_inputs(*args)
    return product, made * 2


def rows_are_shares(att, r, *rest):
    """The normalized value is what tokens go by, too."""
    *weights, _, stack, down_stack = rest
    h = rms_norm(r + F.linear(att, weights[0]), weights[1])
    return (spec_ops.moe_experts(h, torch.arange(M * E).view(M, E) % EXPERTS, h, stack, down_stack),)


@pytest.mark.parametrize(
    ("fn", "inner", "reason"),
    [
        (mixture_read, 64, "the product before it is read by more than the residual sum"),
        (rows_are_shares, 64, "spec_ops.moe_experts.default reads its value too"),
        (mixture_alone, 60, "an expert's sizes are no multiples of 8"),
    ],
)
def test_mixtures_that_stay(fn, inner, reason, monkeypatch):
    monkeypatch.setattr(fuse_norm_linear, "AFTER_NORM", {90: (replace(RULE, min_bytes=0),)})
    module, _ = lowered(fn, experts_tensors(inner=inner))
    result = run_pass(FuseNormLinear(), module, 90)
    assert result.matches == 0
    assert [reason in note.text for note in result.refused] == [True], texts(result.refused)


@pytest.mark.parametrize(("columns", "reason"), [(248, "its columns are no multiple of 16"), (E, "")])
def test_columns_of_a_sum_of_ranks(columns, reason):
    group = alone("cpu")

    def of_ranks(att, r, g, w):
        y = r + torch.ops.spec_ops.all_reduce(att, "sum", group)
        return y, F.linear(rms_norm(y, g), w)

    att, r, _, g, _, _, _, qkv = tensors()
    module, _ = lowered(of_ranks, [t[..., :columns].contiguous() for t in (att, r, g, qkv)])
    rules = {90: (replace(RULE, min_k=columns, min_bytes=0),)}
    with mock.patch.object(fuse_norm_linear, "AFTER_NORM", rules), mock.patch.object(lower_skinny_mm, "BLOCK_K", 8):
        result = run_pass(FuseNormLinear(), module, 90)
    assert (result.matches == 0) == bool(reason)
    assert reason in texts(result.refused)


def test_products_apart():
    found = fused(unpacked, tensors(), 2)
    assert found.count(scaled_silu_mul_op) == 1
    assert found.count(aten.mm.default) == found.count(scaled_skinny_mm_op) == 2


def batched(att, r, *weights):
    """`[bs, q_len, E]`; its sums are also what a draft takes."""
    y, y2, q = layer(att.view(2, 2, E), r.view(2, 2, E), *weights)
    return y, torch.cat([y, y2], -1), q


def with_bias(att, r, o, g, gate_up, down, g2, qkv):
    y = r + F.linear(att, o)
    return y, F.linear(rms_norm(y, g), o, g2)


def halves_swapped(att, r, o, g, gate_up, *_):
    y = r + F.linear(att, o)
    both = F.linear(rms_norm(y, g), gate_up)
    return y, both[:, :WIDE] * F.silu(both[:, WIDE:])


def by_sigmoid(att, r, o, g, gate_up, *_):
    y = r + F.linear(att, o)
    gate, up = F.linear(rms_norm(y, g), gate_up).split(WIDE, -1)
    gate = gate.float()
    return y, (gate * torch.sigmoid(gate)).to(up.dtype) * up


def written_later(att, r, *weights):
    """The residual is a buffer that is used again."""
    r = r.clone()
    y, q = front(att, r, *weights)
    r.mul_(2)
    return y, q + r


def shared(att, r, o, g, gate_up, *_):
    """A skinny product and a product of cuBLAS after one norm."""
    y = r + F.linear(att, o)
    h = rms_norm(y, g)
    gate, up = F.linear(h, gate_up).chunk(2, -1)
    return y, F.linear(h, o), F.silu(gate) * up


@pytest.mark.parametrize(
    ("fn", "matches"),
    [(batched, 2), (with_bias, 1), (halves_swapped, 1), (by_sigmoid, 1), (written_later, 1), (shared, 1), (front, 1)],
)
def test_forms(fn, matches):
    fused(fn, tensors(), matches)


def narrow_and_biased(att, r, o, g, gate_up, down, *_):
    y = r + F.linear(att, o)
    h = rms_norm(y, g)
    return y, F.linear(h, gate_up[:64]), F.linear(h, gate_up, gate_up[:, 0])


def test_products_that_cublas_computes_as_fast(monkeypatch):
    """Too narrow or too wide to gain without a norm in front."""
    monkeypatch.setattr(fuse_norm_linear, "AFTER_NORM", {90: (replace(RULE, max_n=2 * WIDE, min_bytes=0),)})
    found = fused(narrow_and_biased, tensors(), 1)
    assert found.count(scaled_skinny_mm_op) == 2
    assert not {aten.mm.default, aten.addmm.default, aten.permute.default} & set(found)


def test_what_counts_as_fast():
    """As measured: at 17 to 32 rows qkv of two models takes as long with cuBLAS, gate_up takes less. One of the two is slower
    after launches of its own kernel; a chain of layers gained."""
    measured = json.loads(SKINNY_MM.read_text(encoding="utf-8"))["rows"]
    weights = [r for r in measured if r["m"] == 32 and r["n"] < 10_000 and 2 * r["n"] * r["k"] <= 112 << 20]
    ties = {(r["n"], r["k"]) for r in weights if 0.97 < r["torch_us"] / r["us"] < 1.03}
    assert ties == {(6144, 8192)}
    in_a_chain = {(6144, 4096)}
    assert all(AFTER_NORM.refusal(n, k) is None for n, k in ties | in_a_chain)
    slower = {(r["n"], r["k"]) for r in measured if r["m"] in (16, 32) and r["torch_us"] / r["us"] < 0.97}
    assert slower > in_a_chain
    assert all(AFTER_NORM.refusal(n, k) for n, k in slower - in_a_chain)


@pytest.mark.parametrize(("n", "k"), [(5120, 2048), (128, 2048), (5120, 2880), (32, 2880)])
def test_qkv_and_routers_of_mixtures_count_as_fast(n, k):
    """Of Qwen3-30B-A3B and gpt-oss-20b, whose k is no multiple of a block; without a norm before them cuBLAS keeps those."""
    assert FEW_AFTER_NORM.refusal(n, k) is None
    assert FEW_AFTER_NORM.refusal(n, k + 32) == "k is less than 2048 or no multiple of 64"
    blocks = replace(FEW_AFTER_NORM, k_multiple=None)
    assert blocks.refusal(n, k) == (None if k % 256 == 0 else "k is less than 2048 or no multiple of 256")


def test_report_and_order():
    module, _ = lowered(layer, tensors(), dynamo=True)
    result = run_pass(FuseNormLinear(), module, 90)
    assert texts(result.done).splitlines() == [
        "RMSNorm of 4 x 256 in the product of 256 x 256 before it and SiLU after it",
        "RMSNorm of 4 x 256 in the product of 256 x 768 before it and 1 scaled_skinny_mm after it",
    ]
    assert "test_fuse_norm_linear.py" in result.done[0].where
    names = pass_names()
    assert names.index("fuse_norm_linear") == names.index("lower_skinny_mm") + 1


def test_off_switch(monkeypatch):
    module, _ = lowered(layer, tensors())
    switched_off(FuseNormLinear(), module, monkeypatch)


def norm_read(att, r, o, g, *_):
    h = rms_norm(r + F.linear(att, o), g)
    return F.linear(h, o), h


def transposed(att, r, o, g, *_):
    return (o @ rms_norm(r + F.linear(att, o), g).t(),)


def part_read(att, r, o, g, gate_up, *_):
    return (F.linear(rms_norm(r + F.linear(att, o), g)[:, :128], gate_up[:, :128]),)


def product_read(att, r, o, g, *_):
    product = F.linear(att, o)
    return F.linear(rms_norm(r + product, g), o), product * 2


def view_read(att, r, o, g, *_):
    product = F.linear(att.view(2, 2, E), o)
    return F.linear(rms_norm(r.view(2, 2, E) + product, g), o), product + 1


def written_between(att, r, o, g, *_):
    y = r + F.linear(att, o)
    y.add_(1)
    return (F.linear(rms_norm(y, g), o),)


def scaled_residual(att, r, o, g, *_):
    return (F.linear(rms_norm(torch.add(r, F.linear(att, o), alpha=2), g), o),)


def number_added(att, r, o, g, *_):
    return (F.linear(rms_norm(F.linear(att, o) + 1, g), o),)


def broadcast_residual(att, r, o, g, *_):
    return (F.linear(rms_norm(r[:1] + F.linear(att, o), g), o),)


def broadcast_product(att, r, o, g, *_):
    return (F.linear(rms_norm(r + F.linear(att[:1], o), g), o),)


def no_residual(att, r, o, g, *_):
    return (F.linear(rms_norm(F.linear(att, o), g), o),)


def sum_of_inputs(att, r, o, g, *_):
    return (F.linear(rms_norm(att + r, g), o),)


def bias_before(att, r, o, g, *_):
    return (F.linear(rms_norm(r + F.linear(att, o, g), g), o),)


def heads(att, r, o, g, *_):
    y = (r + F.linear(att, o)).view(M, 4, 64)
    return (F.linear(rms_norm(y, g[:64]).view(M, E), o),)


def exact_front(att, r, o, g, *_):
    y = (r + F.linear(att, o)).float()
    return (F.linear((y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * g).bfloat16(), o),)


def over_rows(att, r, o, g, *_):
    y = (r + F.linear(att, o)).float()
    return (F.linear((y * torch.rsqrt(y.pow(2).mean(0, keepdim=True) + 1e-5) * g).bfloat16(), o),)


def computed_weight(att, r, o, g, *_):
    return (F.linear(rms_norm(r + F.linear(att, o), 1 + g), o),)


def eps_of_rows(att, r, o, g, *_):
    y = (r + F.linear(att, o)).float()
    eps = r.float().abs().amax(-1, keepdim=True)
    return (F.linear((y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * g).bfloat16(), o),)


def scale_read(att, r, o, g, *_):
    y = (r + F.linear(att, o)).float()
    rstd = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return F.linear((y * rstd * g).bfloat16(), o), rstd * 2


def rows_of_inputs(att, r, o, g, *_):
    """A root mean that is no norm."""
    return F.linear(att, o) * torch.rsqrt(r.float().mean(-1, keepdim=True).abs() + 1), torch.rsqrt(att.mean(-1, True) + 1)


def fourth_power(att, r, o, g, *_):
    y = (r + F.linear(att, o)).float()
    return (F.linear((y * torch.rsqrt(y.pow(4).mean(-1, keepdim=True) + 1e-5) * g).bfloat16(), o),)


def other_activation(att, r, o, g, gate_up, *_):
    gate, up = F.linear(rms_norm(r + F.linear(att, o), g), gate_up).chunk(2, -1)
    return (F.gelu(gate) * up,)


def gate_read(att, r, o, g, gate_up, *_):
    gate, up = F.linear(rms_norm(r + F.linear(att, o), g), gate_up).chunk(2, -1)
    return F.silu(gate) * up, gate + 1


def silu_alone(att, r, o, g, gate_up, *_):
    return (F.silu(F.linear(rms_norm(r + F.linear(att, o), g), gate_up)),)


def other_up(att, r, o, g, gate_up, *_):
    h = rms_norm(r + F.linear(att, o), g)
    return (F.silu(F.linear(h, gate_up[:WIDE])) * F.linear(r, gate_up[WIDE:]),)


def narrow_product(att, r, o, g, gate_up, *_):
    """As transformers' k and v are: too small for skinny_mm."""
    h = rms_norm(r + F.linear(att, o), g)
    return F.linear(h, o), F.linear(h, gate_up[:64])


def bias_behind(att, r, o, g, gate_up, down, *_):
    return (F.linear(rms_norm(r + F.linear(att, o), g), gate_up, torch.cat([gate_up[:, 0]])),)


def not_as_rows(att, r, o, g, *_):
    return (o[:, :M] @ rms_norm(r + F.linear(att, o), g),)


SILU = "something other than silu(gate) * up reads"
NO_SUM = "what it normalizes is not the sum of a residual and a product"


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (norm_read, "output reads its value too"),
        (transposed, "aten.permute.default reads its value too"),
        (part_read, "aten.slice.Tensor reads its value too"),
        (product_read, "the product before it is read by more than the residual sum"),
        (view_read, "the product before it is read by more than the residual sum"),
        (written_between, "no term of the sum before it is a product"),
        (scaled_residual, NO_SUM),
        (number_added, "the residual has another shape or dtype than the product"),
        (broadcast_residual, "the residual has another shape or dtype than the product"),
        (broadcast_product, "the residual has another shape or dtype than the product"),
        (no_residual, NO_SUM),
        (sum_of_inputs, "no term of the sum before it is a product"),
        (bias_before, "the product before it has a bias"),
        (heads, NO_SUM),
        (over_rows, ""),
        (computed_weight, "its weight is not an input of 256 bfloat16 values"),
        (eps_of_rows, ""),
        (scale_read, ""),
        (fourth_power, ""),
        (rows_of_inputs, ""),
        (other_activation, SILU),
        (gate_read, SILU),
        (silu_alone, SILU),
        (other_up, SILU),
        (narrow_product, SILU),
        (bias_behind, "cuBLAS adds a bias to a product after it"),
        (not_as_rows, "aten.mm.default reads its value, but not as rows"),
    ],
)
def test_near_misses(fn, reason):
    stays(*lowered(fn, tensors())[:1], reason)


def stays(module, reason: str, arch: int = 90) -> None:
    assert skinny_mm_op in targets(module)
    before = str(module.graph)
    result = run_pass(FuseNormLinear(), module, arch)
    assert result.matches == 0
    assert str(module.graph) == before
    assert [reason in note.text for note in result.refused] == ([True] if reason else []), texts(result.refused)


def test_rows_dtype_and_architecture(monkeypatch):
    stays(lowered(front, tensors(33))[0], "RMSNorm of 33 x 256: more than 32 rows")
    stays(lowered(front, tensors(dtype=torch.float16))[0], "it is torch.float16")
    args = tensors()
    args[3] = args[3].float()  # the norm's weight
    stays(lowered(exact_front, args)[0], "its weight is not an input of 256 bfloat16 values")
    monkeypatch.setattr(lower_skinny_mm, "RULES", {100: (RULE,)})
    stays(lowered(front, tensors(), 100)[0], "no figures for sm_100", 100)


def test_a_graph_that_is_not_functional():
    """The product would move past a write to one of its inputs."""
    module, _ = lowered(front, tensors())
    product = next(node for node in module.graph.nodes if node.target is skinny_mm_op)
    with module.graph.inserting_after(product):
        module.graph.call_function(aten.zero_.default, (product.args[0],))
    stays(module, "something is written in place between the product and the residual sum")


def test_a_graph_without_our_products(monkeypatch):
    monkeypatch.setattr(lower_skinny_mm, "RULES", {})
    module, _ = lowered(layer, tensors())
    result = run_pass(FuseNormLinear(), module, 90)
    assert (result.matches, result.refused) == (0, [])


def test_code_for_cuda_of_mixtures(monkeypatch):
    """No norm has a kernel, and nothing is copied."""
    monkeypatch.setattr(fuse_norm_linear, "AFTER_NORM", {90: (replace(RULE, min_bytes=0),)})
    att, r, *weights = experts_tensors()
    found = launches(generate(mixtures, att, r.view(2, M // 2, E), *weights, passes={}).code)
    layer_of = ["add_skinny_mm", "scaled_skinny_mm", "route_experts", "add_moe_experts", "scaled_skinny_mm"]
    assert found == 2 * layer_of


@pytest.mark.parametrize("on", [True, False])
def test_code_for_cuda(on):
    """No kernel is left between the products; slices of gate_up are not copied."""

    def fn(*args):
        y, y2, q = layer(*args[:8])
        out, k, v = q.split([256, 64, 64], -1)
        spec_ops.append_kv(*args[8:10], k.view(M, 1, 64), v.view(M, 1, 64), args[10])
        return y, y2, out

    caches = [torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16) for _ in range(2)]
    code = generate(fn, *tensors(), *caches, torch.arange(M), passes={"fuse_norm_linear": on}).code
    found = launches(code)
    if on:
        assert found == ["add_skinny_mm", "mm", "scaled_silu_mul", "add_skinny_mm", "scaled_skinny_mm", "append_kv"]
    else:
        of_others = [name for name in found if not name.startswith("kernel")]
        assert of_others == ["skinny_mm", "mm", "skinny_mm", "skinny_mm", "append_kv"]
        assert len(found) - len(of_others) == 3  # two norms and SiLU
