"""merge_linears alone: products of one value and neighbouring rows of one weight become one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spec_ops.passes.merge_linears import MergeLinears
from tests.helpers.pass_harness import capture, run_pass, targets, texts

aten = torch.ops.aten
X, WHOLE, BIAS = torch.randn(2, 3, 8), torch.randn(20, 8), torch.randn(20)


def merged(fn, *args, products: int, matches: int = 1):
    module, inputs = capture(fn, *args)
    want = fn(*args)
    result = run_pass(MergeLinears(), module)
    assert result.matches == matches, texts(result.refused)
    found = targets(module)
    assert found.count(aten.mm.default) + found.count(aten.addmm.default) == products
    got = module(*inputs)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)  # sums of 8 in float32
        assert one.stride() == other.stride()
    return module, result


def test_all_rows():
    def fn(x, whole):
        q, k, v = F.linear(x, whole[:12]), F.linear(x, whole[12:16]), F.linear(x, whole[16:])
        return q.sin(), k + v

    module, result = merged(fn, X, WHOLE, products=1)
    assert texts(result.done) == "3 products of one value: weight 12 + 4 + 4 x 8"
    assert [tuple(n.meta["val"].shape) for n in module.graph.nodes if n.target is aten.mm.default] == [(6, 20)]


def test_with_biases_in_any_order_and_some_of_the_rows():
    def fn(x, whole, bias):
        late, early = F.linear(x, whole[10:16], bias[10:16]), F.linear(x, whole[4:10], bias[4:10])
        return late.sin(), early.cos()

    module, _ = merged(fn, X, WHOLE, BIAS, products=1)
    assert [tuple(n.meta["val"].shape) for n in module.graph.nodes if n.target is aten.addmm.default] == [(6, 12)]


def test_two_runs():
    def fn(x, whole):
        parts = [F.linear(x, whole[a:b]) for a, b in ((0, 4), (4, 8), (12, 16), (16, 20))]
        return tuple(part.sin() for part in parts)

    merged(fn, X, WHOLE, products=2, matches=2)


def test_returned_products_keep_strides_and_memory_of_their_own():
    def fn(x, whole):
        return F.linear(x, whole[:12]), F.linear(x, whole[12:])

    merged(fn, X, WHOLE, products=1)
    module, inputs = capture(fn, X, WHOLE)
    run_pass(MergeLinears(), module)
    first, second = module(*inputs)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_products_without_a_bias_apart_from_those_with_one():
    def fn(x, whole, bias):
        return (
            F.linear(x, whole[:8]).sin(),
            F.linear(x, whole[8:14], bias[8:14]).sin(),
            F.linear(x, whole[14:], bias[14:]).sin(),
        )

    merged(fn, X, WHOLE, BIAS, products=2)


def other_value(x, whole):
    return F.linear(x, whole[:12]).sin(), F.linear(x + 1, whole[12:]).sin()


def a_gap(x, whole):
    return F.linear(x, whole[:12]).sin(), F.linear(x, whole[13:]).sin()


def an_overlap(x, whole):
    return F.linear(x, whole[:12]).sin(), F.linear(x, whole[11:]).sin()


def strided(x, whole):
    return F.linear(x, whole[:12:2]).sin(), F.linear(x, whole[12::2]).sin()


def computed(x, whole):
    whole = whole * 2
    return F.linear(x, whole[:12]).sin(), F.linear(x, whole[12:]).sin()


def other_rows_of_the_bias(x, whole):
    bias = whole.flatten()[:20]
    return F.linear(x, whole[:12], bias[:12]).sin(), F.linear(x, whole[12:], bias[:8]).sin()


def a_matrix_added(x, whole):
    rows = x.flatten(0, 1).repeat(2, 1)[:8]
    return tuple(torch.addmm(whole[a:b], rows, whole[a:b].t()).sin() for a, b in ((0, 8), (8, 16)))


@pytest.mark.parametrize(
    "fn",
    [other_value, a_gap, an_overlap, strided, computed, other_rows_of_the_bias, a_matrix_added],
    ids=lambda fn: fn.__name__,
)
def test_what_stays_apart(fn):
    merged(fn, X, WHOLE, products=2, matches=0)


def test_weights_that_are_inputs_of_their_own_are_named():
    def fn(x, first, second):
        return F.linear(x, first).sin(), F.linear(x, second).sin()

    _, result = merged(fn, X, WHOLE[:12].clone(), WHOLE[12:].clone(), products=2, matches=0)
    assert texts(result.refused) == "2 products of one value: their weights are not rows of one input"
