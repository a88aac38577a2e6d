"""lower_skinny_mm alone: which products become `skinny_mm`, and which stay as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import spec_ops
from spec_ops.ops.linear import skinny_mm_op
from spec_ops.passes import lower_skinny_mm
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm, Rule
from tests.helpers.pass_harness import capture, capture_for_cuda, compile_interpreted, run_pass, switched_off, targets, texts
from tests.helpers.paths import RESULTS

aten = torch.ops.aten
SKINNY_MM = RESULTS / "h200-skinny-mm.json"
M, N, K = 4, 192, 512
SMALL = Rule(max_m=8, max_n=256, min_k=K, min_bytes=2 * N * K, max_bytes=4 * N * K)


@pytest.fixture(autouse=True)
def small_rule(monkeypatch):
    """What is measured on large weights, for small ones."""
    monkeypatch.setattr(lower_skinny_mm, "RULES", {90: (SMALL,)})


def tensors(m: int = M, n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """x, weight, bias"""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g).to(dtype) for shape in ((m, k), (n, k), (n,))]


def plain(x, weight, bias):
    return F.linear(x, weight)


def rewritten(fn: Callable, args: list[torch.Tensor], arch: int | None = 90) -> torch.fx.GraphModule:
    """`fn` with one product replaced, which is as exact as eager's."""
    module, inputs = capture(fn, *args)
    result = run_pass(LowerSkinnyMm(), module, arch)
    assert result.matches == 1, texts(result.refused)
    assert targets(module).count(skinny_mm_op) == 1
    assert not {aten.mm.default, aten.addmm.default} & set(targets(module))
    (got,) = module(*inputs)
    exact, eager = fn(*[a.double() for a in args]), fn(*args)
    assert (got.double() - exact).abs().max() <= 1.01 * (eager.double() - exact).abs().max()
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(plain, id="linear"),
        pytest.param(lambda x, weight, bias: F.linear(x, weight, bias), id="bias"),
        pytest.param(lambda x, weight, bias: F.linear(x.view(2, 2, K), weight), id="batched"),
        pytest.param(lambda x, weight, bias: F.linear(x[:, :256], weight[:, 256:]), id="slices"),
    ],
)
def test_product_is_replaced(fn, dtype, monkeypatch):
    monkeypatch.setattr(lower_skinny_mm, "RULES", {90: (Rule(8, 256, 0, 0, 4 * N * K),)})
    rewritten(fn, tensors(dtype=dtype))


def test_weight_is_taken_as_it_is_stored():
    module = rewritten(plain, tensors())
    (node,) = (n for n in module.graph.nodes if n.target is skinny_mm_op)
    assert [n.op for n in node.args[:2]] == ["placeholder", "placeholder"]
    assert aten.permute.default not in targets(module)


def test_weight_stored_the_other_way_round():
    """`[k, n]` with columns one after another."""
    x, weight, _ = tensors()
    module = rewritten(lambda x, right: x @ right, [x, weight.t()])
    (node,) = (n for n in module.graph.nodes if n.target is skinny_mm_op)
    assert node.args[1].meta["val"].shape == (N, K)
    assert node.args[1].meta["val"].is_contiguous()


def test_the_device_decides_without_a_stated_arch(monkeypatch):
    monkeypatch.setattr(lower_skinny_mm, "device_arch", lambda device: 90 if device.type == "cuda" else None)
    module = capture_for_cuda(plain, *tensors())
    result = run_pass(LowerSkinnyMm(), module)
    assert result.matches == 1
    assert texts(result.done) == "skinny_mm: 4 rows, weight 192 x 512"
    module, _ = capture(plain, *tensors())
    assert run_pass(LowerSkinnyMm(), module).matches == 0


def offset_weight(x, weight, bias):
    return F.linear(x[:, :K], weight[:, 4 : K + 4])


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        pytest.param(plain, tensors(m=9), "more than 8 rows", id="rows"),
        pytest.param(plain, tensors(n=257), "more than 256 columns", id="columns"),
        pytest.param(plain, tensors(k=256), "k is less than 512 or no multiple of 256", id="short k"),
        pytest.param(plain, tensors(k=576), "k is less than 512 or no multiple of 256", id="odd k"),
        pytest.param(plain, tensors(n=191), "the weight is not of 0.1875 to 0.375 MiB", id="small"),
        pytest.param(plain, tensors(k=1280), "the weight is not of 0.1875 to 0.375 MiB", id="large"),
        pytest.param(lambda x, weight, bias: x @ weight[:, :N], tensors(n=K), "rows are not contiguous", id="layout"),
        pytest.param(offset_weight, tensors(k=K + 8), "do not start at multiples of 16 bytes", id="offset"),
        pytest.param(lambda x, weight, bias: F.linear(x, weight * 2), tensors(), "the weight is computed here", id="computed"),
        pytest.param(
            lambda x, weight, bias: torch.addmm(bias, x, weight.t(), beta=2), tensors(), "a bias of", id="scaled bias"
        ),
        pytest.param(lambda x, weight, bias: torch.addmm(x[:, :1], x, weight.t()), tensors(), "a bias of", id="added column"),
        pytest.param(plain, tensors(dtype=torch.float32), "", id="float32"),
        pytest.param(lambda x, weight, bias: torch.bmm(x[None], weight.t()[None]), tensors(), "", id="bmm"),
    ],
)
def test_near_misses(fn, args, reason):
    module, _ = capture(fn, *args)
    before = str(module.graph)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert result.matches == 0
    assert str(module.graph) == before
    assert [reason in note.text for note in result.refused] == ([True] if reason else []), texts(result.refused)


@pytest.mark.parametrize(("m", "matches"), [(8, 0), (9, 1), (16, 1), (17, 0)])
def test_the_first_rule_that_holds_the_rows(m, matches, monkeypatch):
    """Up to 8 rows for fewer columns, up to 16 for more, beyond for none."""
    rules = (replace(SMALL, max_n=N - 1), replace(SMALL, max_m=16))
    monkeypatch.setattr(lower_skinny_mm, "RULES", {90: rules})
    module, _ = capture(plain, *tensors(m=m))
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert result.matches == matches
    assert ("more than 16 rows" in texts(result.refused)) == (m == 17)
    assert ("more than 191 columns" in texts(result.refused)) == (m == 8)


def test_an_architecture_without_figures():
    module, _ = capture(plain, *tensors())
    result = run_pass(LowerSkinnyMm(), module, 100)
    assert result.matches == 0
    assert texts(result.refused) == "product of 4 x 512 and 512 x 192: no figures for sm_100"
    assert "test_lower_skinny_mm.py" in result.refused[0].where


def test_sizes_that_are_not_known():
    module, _ = capture(plain, *tensors())
    (node,) = (n for n in module.graph.nodes if n.target is aten.mm.default)
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        node.args[0].meta["val"] = torch.empty(shapes.create_unbacked_symint(), K, dtype=torch.bfloat16)
    result = run_pass(LowerSkinnyMm(), module, 90)
    assert result.matches == 0
    assert "its sizes are not known while compiling" in texts(result.refused)


@pytest.mark.parametrize("option", ["max_autotune", "max_autotune_gemm"])
def test_products_that_inductor_times_are_left_to_it(option):
    module, _ = capture(plain, *tensors())
    with inductor_config.patch(**{option: True}):
        assert run_pass(LowerSkinnyMm(), module, 90).matches == 0


def test_off_switch(monkeypatch):
    module, _ = capture(plain, *tensors())
    switched_off(LowerSkinnyMm(), module, monkeypatch)


def test_in_a_model():
    """After the other passes, next to an op of ours; the report names it."""

    def fn(x, weight, bias, k_cache, v_cache, slots):
        q, k, v = F.linear(x, weight, bias).view(M, 3, 4, 16).unbind(1)
        spec_ops.append_kv(k_cache, v_cache, k, v, slots)
        return q

    caches = [torch.zeros(1, 4, 4, 16, dtype=torch.bfloat16) for _ in range(2)]
    args = [*tensors(), *caches, torch.arange(M)]
    expected = [a.clone() for a in args]
    want = fn(*expected)
    torch._dynamo.reset()
    compiled, reports = compile_interpreted(fn, arch=90)
    got = compiled(*args)
    assert reports[0].matches("lower_skinny_mm") == 1
    assert "skinny_mm: 4 rows, weight 192 x 512" in reports[0].text(verbose=True)
    for a, b in zip((got, *args), (want, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=0.05)  # one rounding to bfloat16 of another order of summation


# They gain, but lie outside of simple rules: a router, which follows a norm; 512 k; 4% at 32 rows, where less k loses.
NOT_TAKEN = {(128, 2048), (4096, 512), (6144, 2048)}


def test_the_measured_rule(monkeypatch):
    """On sm_90, rule by rule: every measured shape that loses at most 2% to cuBLAS at any of its m, and no other. Beyond 16
    rows, with one measured m for each rule: every shape that gains 3%, and no other."""
    monkeypatch.undo()
    gains: dict[tuple[int, int], dict[int | None, list[float]]] = {}
    taken: dict[tuple[int, int], dict[int | None, set[bool]]] = {}
    files = (SKINNY_MM, SKINNY_MM.with_name("h200-skinny-mm-shares.json"))
    for row in (row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]):
        m, n, k = row["m"], row["n"], row["k"]
        rule = next((rule.max_m for rule in lower_skinny_mm.RULES[90] if m <= rule.max_m), None)
        gains.setdefault((n, k), {}).setdefault(rule, []).append(row["torch_us"] / row["us"])
        taken.setdefault((n, k), {}).setdefault(rule, set()).add(lower_skinny_mm.refusal(90, m, n, k) is None)
    left = set()
    for shape, by_rule in gains.items():
        for rule, measured in by_rule.items():
            least = 0.98 if rule == 16 else 1.03
            gain = rule is not None and min(measured) > least
            if gain and taken[shape][rule] == {False} and shape in NOT_TAKEN:
                left.add(shape)
            else:
                assert taken[shape][rule] == {gain}, (shape, rule)
    assert left == NOT_TAKEN
    few = {(n, k) for (n, k), rules in gains.items() if 16 in rules and lower_skinny_mm.refusal(90, 4, n, k) is None}
    assert few >= {(6144, 4096), (4096, 4096), (4096, 14336), (2880, 4096), (1536, 7168)}
    assert few - {shape for shape in few if shape[1] > 4096} >= {(4096, 1024), (4096, 2048), (768, 4096), (2048, 3072)}
    more = {(n, k) for (n, k), rules in gains.items() if 32 in rules and lower_skinny_mm.refusal(90, 32, n, k) is None}
    assert more >= {(4096, 4096), (4096, 14336), (4096, 12288), (2880, 4096), (1536, 7168), (8192, 1024), (8192, 7168)}
    assert "more than 64 rows" in str(lower_skinny_mm.refusal(90, 65, 4096, 4096))
