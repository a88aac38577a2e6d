"""fuse_topk alone: `topk` of softmaxes and of plain values becomes one launch, and what is something else stays."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from spec_ops.ops.topk import topk_logits_op
from spec_ops.passes.fuse_topk import FuseTopk
from tests.helpers.pass_harness import capture, capture_for_cuda, run_pass, switched_off, targets, texts

aten = torch.ops.aten
LOGITS = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))  # no ties


def fused(fn, *args, matches: int = 1):
    module = capture_for_cuda(fn, *args)
    want = module(*args)
    result = run_pass(FuseTopk(), module)
    assert result.matches == matches, texts(result.refused)
    for one, other in zip(module(*args), want, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other)
    return module, result


def call_of(module):
    (node,) = module.graph.find_nodes(op="call_function", target=topk_logits_op)
    return node


@pytest.mark.parametrize(
    ("fn", "scores"),
    [
        (lambda x: torch.log_softmax(x, -1).topk(4), "log_softmax"),
        (lambda x: x.log_softmax(2).topk(4, 2), "log_softmax"),
        (lambda x: torch.softmax(x, -1).topk(4), "softmax"),
        (lambda x: x.topk(4), "none"),
        (lambda x: (x * 0.5).topk(32), "none"),
    ],
)
def test_scores(fn, scores):
    module, _ = fused(fn, LOGITS)
    node = call_of(module)
    assert node.args[2] == scores
    assert (node.args[0].op == "placeholder") == (scores != "none" or aten.mul.Tensor not in targets(module))
    assert aten.topk.default not in targets(module)
    if scores != "none":  # nothing of the softmax is left
        assert aten.exp.default not in targets(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_converted_logits_are_read_as_they_are(dtype):
    spread = torch.arange(150).reshape(2, 75).to(dtype)  # no ties
    module, _ = fused(lambda x: torch.log_softmax(x.float(), -1).topk(4), spread)
    assert call_of(module).args[0].op == "placeholder"
    assert call_of(module).args[3] == torch.float32
    # Probabilities in 16 bits: rounded by the op.
    module, _ = fused(lambda x: torch.softmax(x, -1).topk(4), spread[:, :20])
    assert call_of(module).args[0].op == "placeholder"
    assert call_of(module).args[3] == dtype


def test_an_order_that_nobody_asked_for():
    module = capture_for_cuda(lambda x: x.topk(5, sorted=False), LOGITS)
    want = module(LOGITS)
    assert run_pass(FuseTopk(), module).matches == 1
    for one, other in zip(module(LOGITS), want, strict=True):
        assert torch.equal(one.sort().values, other.sort().values)


def test_one_result_alone():
    module, _ = fused(lambda x: (x.softmax(-1).topk(3).indices,), LOGITS)
    assert len(call_of(module).users) == 1
    fused(lambda x: (x.topk(3).values.clone(),), LOGITS)


def test_probabilities_that_others_read_stay():
    def fn(x):
        p = x.softmax(-1)
        return (p, *p.topk(3))

    module, _ = fused(fn, LOGITS)
    assert aten.exp.default in targets(module)
    assert call_of(module).args[2] == "none"


@pytest.mark.parametrize(
    "fn",
    [
        lambda p: (p >= p.topk(4).values[..., -1:],),
        lambda p: (p.gather(-1, p.topk(4).indices) == p.topk(4).values,),
        lambda p: (p.bfloat16().topk(4).values == p.topk(4).values.bfloat16(),),
        lambda p: (p.bfloat16().topk(4).values == p.gather(-1, p.topk(4).indices).bfloat16(),),
        lambda p: (p.topk(4).values == p.topk(40).values[..., :4],),
        lambda p: (p.topk(40).values[..., :4] == p.topk(4).values,),
        lambda p: (p.topk(1).values == p.amax(-1, True),),
    ],
)
@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax])
def test_what_is_compared_with_probabilities_is_of_the_same_bits(fn, softmax):
    def program(x):
        return fn(softmax(x, -1))

    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    module = capture_for_cuda(program, logits)
    want = module(logits)
    assert run_pass(FuseTopk(), module).matches
    assert torch.equal(module(logits)[0], want[0])
    assert {node.args[2] for node in module.graph.find_nodes(op="call_function", target=topk_logits_op)} == {"none"}


def test_two_of_one_softmax():
    def fn(x):
        p = x.log_softmax(-1)
        return (*p.topk(4), *p.topk(2))

    module, _ = fused(fn, LOGITS, matches=2)
    assert [node.args[2] for node in module.graph.find_nodes(op="call_function", target=topk_logits_op)] == ["log_softmax"] * 2
    assert aten.exp.default not in targets(module)


def test_one_after_another():
    def fn(x):
        values, ids = x.topk(8)
        best, place = values.softmax(-1).topk(2)
        return best, ids.gather(-1, place)

    module, _ = fused(fn, LOGITS, matches=2)
    scores = [node.args[2] for node in module.graph.find_nodes(op="call_function", target=topk_logits_op)]
    assert scores == ["none", "softmax"]


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x.topk(3, largest=False), "not of the largest"),
        (lambda x: x.topk(2, 1), "not of the largest"),
        (lambda x: x.topk(33), "33 values of a row"),
        (lambda x: x.double().topk(3), ""),
        (lambda x: x.long().topk(3), ""),
    ],
)
def test_near_misses(fn, reason):
    module, result = fused(fn, LOGITS, matches=0)
    assert aten.topk.default in targets(module)
    assert reason in texts(result.refused)


@pytest.mark.parametrize(("rows", "k", "matches"), [(4096, 8, 1), (16, 20, 1), (4096, 9, 0)])
def test_many_rows(rows, k, matches):
    module = capture_for_cuda(lambda x: x.topk(k), torch.empty(rows, 32000))
    result = run_pass(FuseTopk(), module)
    assert result.matches == matches
    assert matches or "torch's kernels find faster" in texts(result.refused)


def test_what_is_invariant_does_not_ask_for_the_number_of_rows():
    module = capture_for_cuda(lambda x: x.topk(32), torch.empty(4096, 32000))
    assert run_pass(FuseTopk(), module, invariant=True).matches == 1


@pytest.mark.parametrize(("size", "matches"), [(1 << 20, 1), ((1 << 20) + 1, 0)])
def test_long_rows(size, matches):
    module = capture_for_cuda(lambda x: x.topk(4), torch.empty(1, size))
    result = run_pass(FuseTopk(), module)
    assert result.matches == matches
    assert matches or "rows of 1048577 values" in texts(result.refused)


@pytest.mark.parametrize(("k", "matches"), [(4, 1), (9, 0)])
def test_rows_that_are_not_known_while_compiling(k, matches):
    module, shapes = capture_for_cuda(lambda x: x.topk(k), torch.empty(4, 50)), ShapeEnv()
    (node,) = module.graph.find_nodes(op="call_function", target=aten.topk.default)
    with FakeTensorMode(shape_env=shapes):
        rows = torch.empty(shapes.create_unbacked_symint(), 50, device="cuda")
    node.args[0].meta["val"] = rows
    assert run_pass(FuseTopk(), module).matches == matches
    if matches:
        assert str(call_of(module).meta["val"][1].shape) == str(torch.Size([rows.shape[0], k]))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x - x.amax(1, True) - (x - x.amax(1, True)).exp().sum(1, True).log()).topk(3),  # over another dimension
        lambda x: x.softmax(1).topk(3),
        lambda x: ((x - x.amax(-1, True)).exp() / (x - x.amax(-1, True)).exp().sum(-1, True).add(1)).topk(3),
        lambda x: ((x - x.amax(-1, True)).exp() / x.exp().sum(-1, True)).topk(3),  # not the sum of these powers
        lambda x: (x - x.amax(-1, True) - (x - x.amin(-1, True)).exp().sum(-1, True).log()).topk(3),
        lambda x: ((x - x.amin(-1, True)).exp() / (x - x.amin(-1, True)).exp().sum(-1, True)).topk(3),
        lambda x: (x.exp() / x.exp().sum(-1, True)).topk(3),
    ],
)
def test_what_is_no_softmax_is_ranked_as_it_is(fn):
    module, _ = fused(fn, LOGITS)
    assert call_of(module).args[2] == "none"


def test_on_a_cpu_it_stays():
    module, _ = capture(lambda x: x.topk(3), LOGITS)
    assert run_pass(FuseTopk(), module).matches == 0
    assert aten.topk.default in targets(module)


def test_switch(monkeypatch):
    switched_off(FuseTopk(), capture_for_cuda(lambda x: x.topk(3), LOGITS), monkeypatch)
