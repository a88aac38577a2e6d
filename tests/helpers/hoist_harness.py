"""What the tests of `hoist_row_select` share: traced graphs before and after the pass, and forms of selecting rows."""

from __future__ import annotations

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from spec_ops.passes.analysis.graph import arg, attention_calls, value
from spec_ops.passes.analysis.outputs import Watch
from spec_ops.passes.base import PassContext, PassResult
from spec_ops.passes.hoist_row_select import HoistRowSelect

aten = torch.ops.aten


BS, D, K = 3, 4, 16


def hoist(graph: torch.fx.Graph) -> PassResult:
    result = PassResult(HoistRowSelect.name)
    watch = Watch(graph)
    HoistRowSelect().run(graph, PassContext(), result)
    graph.eliminate_dead_code()
    watch.check(result)
    graph.lint()
    return result


def product_rows(graph: torch.fx.Graph) -> list[int]:
    """Rows of every matrix product's left operand, in order."""
    found = [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default, aten.bmm.default)]
    return [value(n.args[-2]).shape[-2] for n in found]


def query_lengths(graph: torch.fx.Graph) -> list[int]:
    return [value(arg(n, "q")).shape[1] for n in attention_calls(graph)]


def trace(fn, *args) -> torch.fx.GraphModule:
    """A functional graph of `fn`, decomposed as for Inductor; tensors of enclosing scopes become attributes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(a) for a in args]
    with mode, torch.no_grad():
        module = make_fx(fn, decomposition_table=select_decomp_table())(*fakes)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(getattr(module, node.target))
    return module


def check(fn, *args, exact: bool = False) -> tuple[torch.fx.Graph, PassResult]:
    """Trace `fn`, run it, hoist, run it again: equal results, one graph."""
    module = trace(fn, *args)
    want, before = module(*args), str(module.graph)
    result = hoist(module.graph)
    module.recompile()
    got = module(*args)
    torch.testing.assert_close(got, want, **({"rtol": 0, "atol": 0} if exact else {}))
    if not result.matches:
        assert str(module.graph) == before
    for node in module.graph.nodes:  # fake values must describe what runs
        assert node.op != "call_function" or "val" in node.meta
    return module.graph, result


def weights(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) / shape[0] ** 0.5 for shape in shapes]


def rows_by_gather(x, row):
    return x.gather(1, row[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0]


def rows_by_arange(x, row):
    return x[torch.arange(x.shape[0]), row]


SELECTIONS = {
    "gather": rows_by_gather,
    "arange": rows_by_arange,
    "arange-int32-negative": lambda x, row: x[torch.arange(x.shape[0]), (row - x.shape[1]).to(torch.int32)],
    "arange-two": lambda x, row: x[torch.arange(x.shape[0])[:, None], torch.stack([row, (row + 1) % x.shape[1]], 1)],
    "gather-two": lambda x, row: x.gather(
        1, torch.stack([row, x.shape[1] - 1 - row], 1)[:, :, None].expand(-1, -1, x.shape[-1])
    ),
    "last": lambda x, row: x[:, -1],
    "second": lambda x, row: x.select(1, 1),
    "middle-two": lambda x, row: x[:, 1:3],
    "all-but-last": lambda x, row: x[:, :-1],
    "index-select": lambda x, row: x.index_select(1, row[:1]),
    "same-row": lambda x, row: x[:, row[:2]],
    "flat": lambda x, row: x.flatten(0, 1)[torch.arange(x.shape[0]) * x.shape[1] + row.clamp(0, x.shape[1] - 1)],
}
