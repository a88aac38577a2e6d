"""Canonical lengths: what is seen through, and what ends the walk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from spec_ops.passes.analysis.lengths import Length, Values, constant, materialize

aten, prims = torch.ops.aten, torch.ops.prims
BASE, OTHER = torch.tensor([3, 0, 7], dtype=torch.int32), torch.tensor([1, 2, 3], dtype=torch.int32)
KEEP = torch.tensor([True, False, True])


def trace(fn) -> tuple[fx.Graph, dict[str, fx.Node], list[fx.Node]]:
    """Graph of `fn(base, other, keep)`, its inputs, and the nodes it returns."""
    graph = make_fx(fn, tracing_mode="fake")(BASE, OTHER, KEEP).graph
    names = dict(zip(("base", "other", "keep"), graph.find_nodes(op="placeholder"), strict=True))
    returned: Any = graph.output_node().args[0]
    return graph, names, list(returned) if isinstance(returned, (list, tuple)) else [returned]


def canonical(node: fx.Node) -> Length:
    return Values(node.graph).length(node)


def full(c, shape=(), dtype=torch.int32):
    return aten.full.default(list(shape), c, dtype=dtype)


SEEN = {
    "itself": (lambda b, o, k: b.clone(), 0, False),
    "plus": (lambda b, o, k: b + 2, 2, False),
    "commuted": (lambda b, o, k: 2 + b, 2, False),
    "method": (lambda b, o, k: b.add(2).add(1), 3, False),
    "accumulated": (lambda b, o, k: ((b + 1) + 1) + 1, 3, False),
    "minus": (lambda b, o, k: b + 3 - 1, 2, False),
    "minus tensor": (lambda b, o, k: aten.sub.Tensor(b, full(1)), -1, False),
    "rsub": (lambda b, o, k: aten.rsub.Tensor(full(1), b), -1, False),
    "add.Scalar": (lambda b, o, k: aten.add.Scalar(b, 4), 4, False),
    "0-dim constant": (lambda b, o, k: aten.add.Tensor(full(5), b), 5, False),
    "full of the shape": (lambda b, o, k: b + full(5, (3,)), 5, False),
    "ones_like": (lambda b, o, k: b + aten.full_like.default(b, 1), 1, False),
    "widened": (lambda b, o, k: b.long() + 2, 2, False),
    "narrowed again": (lambda b, o, k: (b.long() + 2).int() + 1, 3, False),
    "prims": (lambda b, o, k: prims.convert_element_type.default(b, torch.int64) + 1, 1, False),
    "int64 constant": (lambda b, o, k: b + full(1, (3,), torch.int64), 1, False),
    "there and back": (lambda b, o, k: (b[:, None] + 1).squeeze(1).view(3), 1, False),
    "where": (lambda b, o, k: aten.where.self(k, b + 2, full(0)), 2, True),
    "where scalar": (lambda b, o, k: torch.where(k, b + 2, 0), 2, True),
    "where ScalarOther": (lambda b, o, k: aten.where.ScalarOther(k, b + 2, 0), 2, True),
    "where in columns": (lambda b, o, k: torch.where(k[:, None], b[:, None] + 2, 0).flatten(), 2, True),
    "where twice": (lambda b, o, k: torch.where(k, torch.where(k, b + 1, 0) + 1, 0), 2, True),
    "converted where": (lambda b, o, k: torch.where(k, b.long() + 2, 0).int(), 2, True),
}


@pytest.mark.parametrize("case", SEEN)
def test_seen_through(case):
    fn, offset, masked = SEEN[case]
    _, names, (node,) = trace(fn)
    assert canonical(node) == Length(names["base"], offset, names["keep"] if masked else None)


STOPS = {
    "times one": lambda b, o, k: b * 1,
    "alpha": lambda b, o, k: aten.add.Tensor(b, full(1), alpha=2),
    "another tensor": lambda b, o, k: b + o,
    "from a constant": lambda b, o, k: 5 - b,
    "data dependent": lambda b, o, k: b + b.max(),
    "float": lambda b, o, k: (b.float() + 1).int(),
    "int16": lambda b, o, k: b.short().int(),
    "bool": lambda b, o, k: b.bool().int(),
    "other fill": lambda b, o, k: torch.where(k, b, 1),
    "fill is a tensor": lambda b, o, k: torch.where(k, b, o),
    "inverted where": lambda b, o, k: torch.where(k, 0, b),
    "plus after where": lambda b, o, k: torch.where(k, b, 0) + 1,
    "two masks": lambda b, o, k: torch.where(k, torch.where(o > 1, b, 0), 0),
    "reordered": lambda b, o, k: b.flip(0),
    "part": lambda b, o, k: b[:2],
    "broadcast": lambda b, o, k: b[:1] + full(0, (3,)),
    "expanded": lambda b, o, k: b[None].expand(2, 3),
    "transposed columns": lambda b, o, k: torch.where(k[None], b[:, None], 0),
    "clamped": lambda b, o, k: b.clamp(min=0),
}


@pytest.mark.parametrize("case", STOPS)
def test_ends_the_walk(case):
    _, names, (node,) = trace(STOPS[case])
    found = canonical(node)
    assert found != Length(names["base"], found.offset, None)
    assert found != Length(names["base"], found.offset, names["keep"])


def test_part_of_the_walk_counts():
    _, _names, (node,) = trace(lambda b, o, k: torch.where(k, b * 1 + 2, 0))
    found = canonical(node)
    assert found.base is not None
    assert found.base.target is aten.mul.Tensor
    assert found.offset == 2
    assert found.keep is not None


def test_bits_that_a_narrowing_loses():
    """Above the 31st. They are missing after widening again, unless there were none; in int32 nothing else was left of them."""
    _, _names, (wide, there_and_back, narrow, few) = trace(
        lambda b, o, k: (
            (wide := b.long() << 40),
            wide.int().long() + 1,
            (wide.int().long() + 1).int(),
            wide.clamp(0, 2**31 - 2).int().long() + 1,
        )
    )
    found = canonical(there_and_back)
    assert found.base not in (None, wide)
    assert found.offset == 1
    assert canonical(narrow) == Length(wide, 1)
    assert canonical(few).base.target is aten.clamp.default
    assert canonical(few).offset == 1


def test_equal_nodes_are_one_value():
    """Graphs for inference come without common-subexpression elimination."""
    _, _names, nodes = trace(
        lambda b, o, k: (torch.where(~k, b + o, 0), torch.where(~k, (b + o).long() + 1, 0), torch.where(~k, o + b, 0))
    )
    first, second, third = map(Values(nodes[0].graph).length, nodes)
    assert first.comparable(second)
    assert second.offset == 1
    assert not first.comparable(third)


def test_random_numbers_are_no_equal_values():
    _, _names, nodes = trace(lambda b, o, k: (torch.randint(0, 9, (3,)) + 1, torch.randint(0, 9, (3,)) + 1))
    first, second = map(Values(nodes[0].graph).length, nodes)
    assert not first.comparable(second)


def test_constants():
    _, _names, (one, two, real) = trace(lambda b, o, k: (full(1, (3,)), full(2, (3,)).long() + 1, torch.full((3,), 1.0)))
    assert canonical(one) == Length(None, 1, shape=(3,))
    assert canonical(two) == Length(None, 3, shape=(3,))
    assert constant(real) is None
    assert constant(True) is None


def test_within():
    _, names, _ = trace(lambda b, o, k: b)
    base, keep = names["base"], names["keep"]
    assert Length(base, 1).within(Length(base, 2))
    assert Length(base, 2, keep).within(Length(base, 2))
    assert Length(base, 1, keep).within(Length(base, 2, keep))
    assert not Length(base, 3).within(Length(base, 2))
    assert not Length(base, 1).within(Length(base, 2, keep))
    assert not Length(base, 1).within(Length(names["other"], 2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("masked", [False, True])
def test_materialize(dtype, masked):
    """From a base and a mask in columns to a row of another dtype."""
    graph, _, (node, result) = trace(
        lambda b, o, k: (
            (torch.where((k & k)[:, None], (b * 1)[:, None] + 2, 0) if masked else (b * 1)[:, None] + 2).flatten().to(dtype),
            b.to(dtype) + 0,
        )
    )
    length = canonical(node)
    assert length.base is not None
    made = materialize(graph, graph.output_node(), length, result)
    graph.output_node().args = ((node, made),)
    graph.lint()
    want, got = fx.GraphModule({}, graph)(BASE, OTHER, KEEP)
    assert got.dtype == dtype
    assert torch.equal(got, want)
    assert made.meta["val"].dtype == dtype
