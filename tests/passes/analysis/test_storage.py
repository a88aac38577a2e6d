"""Which values of a graph share memory (`passes/analysis/storage.py`)."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

import spec_ops
from spec_ops.passes.analysis.graph import AUTO_FUNCTIONALIZED
from spec_ops.passes.analysis.storage import base_of, is_returned, is_view, returned_tensors, storage_of
from tests.helpers.hoist_harness import trace
from tests.helpers.pass_harness import capture

aten = torch.ops.aten
X = torch.arange(24.0).reshape(4, 6)

VIEWS = {
    "view": lambda x: x.view(2, 12),
    "reshape": lambda x: aten.reshape.default(x, [2, 12]),
    "select": lambda x: x[1],
    "slice": lambda x: x[1:, ::2],
    "permute": lambda x: x.permute(1, 0),
    "expand": lambda x: x[:, None].expand(4, 3, 6),
    "squeeze": lambda x: x[:, None].squeeze(1),
    "as_strided": lambda x: x.as_strided((2, 2), (6, 1), 3),
    "dtype": lambda x: x.view(torch.int32),
    "unsafe": lambda x: aten._unsafe_view.default(x, [24]),
    "split": lambda x: x.split(2)[1],
    "unbind": lambda x: x.unbind(1)[3],
    "chain": lambda x: x.t()[2:].unflatten(0, (2, 2)).diagonal(),
}
COPIES = {
    "clone": lambda x: x.clone(),
    "index": lambda x: x[torch.arange(4)],
    "reshape": lambda x: aten.reshape.default(x.t(), [24]),
    "convert": lambda x: x.to(torch.float64),
    "product": lambda x: x @ x.t(),
    "sort": lambda x: x.sort(1)[0],
}


def results(fn) -> tuple[fx.Node, list[fx.Node]]:
    graph = trace(lambda x: (x + 1, fn(x + 2)), X).graph
    source = next(n for n in graph.nodes if n.target is aten.add.Tensor and n.args[1] == 2)
    return source, list(returned_tensors(graph))


@pytest.mark.parametrize("name", VIEWS)
def test_views_share(name):
    source, (other, view) = results(VIEWS[name])
    assert storage_of(view) == storage_of(source) != storage_of(other)
    assert base_of(view) is source
    assert is_view(view)
    assert not is_view(source)
    assert is_returned(source)


@pytest.mark.parametrize("name", COPIES)
def test_copies_do_not(name):
    source, (other, copied) = results(COPIES[name])
    assert len({storage_of(node) for node in (source, other, copied)}) == 3
    assert not is_returned(source)
    assert is_returned(copied)


@pytest.mark.parametrize("target", [aten.view.default, aten.reshape.default])
def test_a_replaced_source(target):
    """The fake value of a view is then of another storage than its source's."""
    graph = fx.Graph()
    with torch._subclasses.FakeTensorMode():
        first, second, view = torch.empty(4, 6), torch.empty(4, 6), torch.empty(4, 6).view(24)
    nodes = [graph.placeholder(name) for name in ("first", "second")]
    nodes.append(graph.call_function(target, (nodes[1], [24])))
    for node, fake in zip(nodes, (first, second, view), strict=True):
        node.meta["val"] = fake
    assert storage_of(nodes[2]) == storage_of(nodes[1]) != storage_of(nodes[0])


def test_results_of_one_call():
    """Two nodes that take the same result of a call are one tensor; its other results are others."""
    graph = trace(lambda x: x.sort(1), X).graph
    call = next(n for n in graph.nodes if isinstance(n.meta["val"], tuple))
    values, _ = call.users
    with graph.inserting_after(values):
        again = graph.call_function(operator.getitem, (call, 0))
    again.meta["val"] = values.meta["val"]
    assert storage_of(again) == storage_of(values)
    assert len(set(map(storage_of, call.users))) == 2
    assert is_returned(call)


def test_inputs_of_one_storage():
    pool = torch.zeros(2, 3, 4)
    nodes = trace(lambda a, b, c: a + b + c, pool[0], pool[1], torch.zeros(3, 4)).graph.find_nodes(op="placeholder")
    assert storage_of(nodes[0]) == storage_of(nodes[1]) != storage_of(nodes[2])


def test_written_bases():
    """New contents are a new value of the graph, in the memory of the base."""

    def fn(pool, x, slots):
        cache = x.new_zeros(3, 4, 2, 8)
        spec_ops.append_kv(pool, cache, x, x, slots)
        return pool[1], cache.flatten(), x + 1

    pool, x = torch.zeros(3, 4, 2, 8), torch.ones(3, 2, 8)
    graph = capture(fn, pool, x, torch.tensor([0, 4, 8]), write_back=True)[0].graph
    (call,) = (n for n in graph.nodes if n.target is AUTO_FUNCTIONALIZED)
    given, made = call.kwargs["_all_bases"]
    of_given, of_made, other = returned_tensors(graph)
    assert storage_of(of_given, written=True) == storage_of(given) != storage_of(of_given)
    assert storage_of(of_made, written=True) == storage_of(made) != storage_of(of_made)
    assert base_of(of_given, written=True) is given
    assert is_returned(given)
    assert is_returned(made)
    assert is_returned(call)
    assert not is_returned(next(n for n in graph.nodes if n.op == "placeholder" and n.meta["val"].shape == x.shape))
    assert storage_of(other, written=True) == storage_of(other)
