"""Custom ops are registered as fallbacks before Inductor meets them."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor import exc
from torch._inductor.lowering import constrain_to_fake_tensors, lowerings, maybe_layout_constraints

import spec_ops
from spec_ops.passes.fallbacks import register_fallbacks


@pytest.fixture
def library():
    with torch.library._scoped_library("spec_ops_test_fallbacks", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: 2 * x, "CPU")
        library.define("write(Tensor(a!) x) -> ()")
        torch.library.register_fake("spec_ops_test_fallbacks::double", torch.empty_like, lib=library)
        yield torch.ops.spec_ops_test_fallbacks


def test_custom_ops_are_registered(library):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(library.double.default, (x,))
    graph.call_function(auto_functionalized_v2, (library.write.default,), {"_all_bases": [x]})
    graph.call_function(torch.ops.aten.relu.default, (x,))
    relu = lowerings[torch.ops.aten.relu.default]
    register_fallbacks(graph)
    for op in (library.double.default, library.write.default):
        assert op in lowerings
        assert maybe_layout_constraints(op) is constrain_to_fake_tensors  # of an op without a layout tag, as Inductor's
    assert lowerings[torch.ops.aten.relu.default] is relu


def test_compiling_prints_no_argument(library, monkeypatch):
    """Printing is exponential in the depth of a graph, and torch 2.11 prints the arguments of an op at its first call."""

    def printed(target, *_):
        raise AssertionError(f"the arguments of {target} were printed")

    monkeypatch.setattr(exc.OperatorIssue, "operator_str", staticmethod(printed))

    def fn(x, weight):
        return library.double(torch.ops.spec_ops.skinny_mm(x + 1, weight, None) + 1)

    monkeypatch.delitem(lowerings, torch.ops.spec_ops.skinny_mm.default, raising=False)
    compiled = spec_ops.compile(fn, mode="default")
    with torch._inductor.config.patch(force_disable_caches=True):
        assert torch.equal(compiled(torch.ones(1, 4), torch.ones(4, 4)), torch.full((1, 4), 18.0))
