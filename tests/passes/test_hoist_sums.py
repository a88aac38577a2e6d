"""`hoist_row_select` and sums of ranks: what is selected of a sum is selected of the parts, and fewer bytes travel.

The group is a pretended one of two ranks, whose collectives send nothing. `tests/parallel` adds up for real.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from spec_ops.ops.collectives import all_reduce_add_op, all_reduce_op
from spec_ops.passes import PassManager, fuse_norm_linear, lower_skinny_mm
from spec_ops.passes.analysis.graph import value
from spec_ops.passes.analysis.rows import is_product
from spec_ops.passes.hoist_row_select import HoistRowSelect
from spec_ops.passes.lower_skinny_mm import Rule
from tests.helpers.groups import pretended
from tests.helpers.hoist_harness import BS, SELECTIONS, D, K, check, rows_by_gather, weights
from tests.helpers.pass_harness import capture, run_pass, targets

c10d = torch.ops._c10d_functional
GROUP = pretended(2)
SUM, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default
ROW = torch.tensor([1, 3, 0])
UP, DOWN, HEAD = weights((K, 32), (32, K), (K, 9))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BS, D, K, generator=torch.Generator().manual_seed(3))


def started(part: torch.Tensor, reduce: str = "sum") -> torch.Tensor:
    return c10d.all_reduce(part, reduce, GROUP)


def total(part: torch.Tensor, reduce: str = "sum") -> torch.Tensor:
    return c10d.wait_tensor(started(part, reduce))


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


def rows_of_products(graph: torch.fx.Graph) -> list[int]:
    return [value(node.args[-2]).shape[:-1].numel() for node in graph.nodes if is_product(node)]


def rows_of_sums(graph: torch.fx.Graph) -> list[int]:
    return [value(node).shape[:-1].numel() for node in graph.nodes if node.target is SUM]


@pytest.mark.parametrize("select", SELECTIONS)
def test_the_selected_rows_are_added_up(x, select):
    graph, result = check(lambda x, row: SELECTIONS[select](total(x @ UP), row), x, ROW)
    assert result.matches == 1
    rows = {"arange-two": 2, "gather-two": 2, "middle-two": 2, "same-row": 2, "all-but-last": 3}.get(select, 1)
    assert rows_of_products(graph) == rows_of_sums(graph) == [BS * rows]


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: total(F.silu(x @ UP) @ DOWN) + x,
        lambda x: norm(total(F.silu(x @ UP) @ DOWN) + x) @ HEAD,
        lambda x: total((x @ UP).flatten(0, 1)).view(BS, D, 32) @ DOWN,  # rows in one dimension
        lambda x: total((x @ UP).transpose(1, 2)).transpose(1, 2) @ DOWN,  # and in another place
        lambda x: total(total(F.silu(x @ UP) @ DOWN + x) @ UP),
    ],
)
def test_layers(x, layer):
    graph, result = check(lambda x, row: rows_by_gather(layer(x), row), x, ROW)
    assert result.matches == 1
    assert set(rows_of_products(graph)) == {BS}
    assert all(value(node).numel() in (BS * K, BS * 32) for node in graph.nodes if node.target in (SUM, WAIT))


@pytest.mark.parametrize("reduce", ["max", "min", "avg"])
def test_other_reductions(x, reduce):
    graph, result = check(lambda x, row: rows_by_gather(total(x @ HEAD, reduce).softmax(-1), row), x, ROW)
    assert result.matches == 1
    assert rows_of_products(graph) == rows_of_sums(graph) == [BS]


def test_tokens_that_ranks_agree_on(x):
    """Keys of one integer a row."""
    graph, result = check(lambda x, row: total((x @ HEAD).argmax(-1), "max").gather(1, row[:, None])[:, 0], x, ROW)
    assert result.matches == 1
    assert rows_of_products(graph) == [BS]
    assert [value(node).numel() for node in graph.nodes if node.target is SUM] == [BS]


def test_one_selection_twice_is_one_sum(x):
    def fn(x, row):
        y = total(x @ UP)
        return rows_by_gather(y, row) @ DOWN, rows_by_gather(y.exp(), row)

    graph, result = check(fn, x, ROW)
    assert result.matches == 1
    assert rows_of_sums(graph) == [BS]


NEAR_MISSES: dict[str, Callable] = {
    "columns": lambda y, row: y[:, :, row],
    "one column": lambda y, row: y[:, :, -1],
    "requests": lambda y, row: y[row.clamp(max=BS - 1)],
    "one request": lambda y, row: y[1],
    "the whole sum is returned": lambda y, row: (rows_by_gather(y, row), y),
    "the whole sum is read": lambda y, row: (rows_by_gather(y, row), y.mean(1)),
    "other rows": lambda y, row: (rows_by_gather(y, row), rows_by_gather(y, 3 - row)),
    "other rows, of a block": lambda y, row: (y[:, 1:3] * 2, rows_by_gather(y, row)),
    "rows that the sum decides": lambda y, row: rows_by_gather(y, y.amax((1, 2)).int().clamp(0, 3).long()),
}


@pytest.mark.parametrize("use", NEAR_MISSES)
def test_near_misses(x, use):
    graph, result = check(lambda x, row: NEAR_MISSES[use](total(x @ UP), row), x, ROW)
    assert not result.matches
    assert rows_of_sums(graph) == [BS * D]


@pytest.mark.parametrize(
    "whole",
    [
        lambda y, row: (rows_by_gather(y @ DOWN, row), y),
        lambda y, row: (rows_by_gather(y @ DOWN, row), rows_by_gather(y.exp(), 3 - row)),
    ],
)
def test_what_reads_a_whole_sum_moves_without_it(x, whole):
    """The sum is there once, for all rows; the product after it is of the selected ones."""
    graph, result = check(lambda x, row: whole(total(x @ UP), row), x, ROW)
    assert result.matches == 1
    assert rows_of_products(graph) == [BS * D, BS]
    assert rows_of_sums(graph) == [BS * D]


def waited_for_twice(x, row):
    sent = started(x @ UP)
    return rows_by_gather(c10d.wait_tensor(sent) @ DOWN, row), c10d.wait_tensor(sent)


def rows_waited_for_twice(x, row):
    sent = started(x @ UP)
    return rows_by_gather(c10d.wait_tensor(sent) @ DOWN, row), rows_by_gather(c10d.wait_tensor(sent) @ DOWN, 3 - row)


def sent_by_one(x, row):
    return rows_by_gather(c10d.wait_tensor(c10d.broadcast(x.tanh(), 0, GROUP)) @ UP, row)


def in_place(x, row):
    part = x @ UP
    return rows_by_gather(c10d.wait_tensor(c10d.all_reduce_(part, "sum", GROUP)) @ DOWN, row)


@pytest.mark.parametrize("fn", [waited_for_twice, rows_waited_for_twice, sent_by_one, in_place])
def test_nothing_is_read_before_it_is_there(x, fn):
    """A collective that stays whole is waited for before rows are taken of it: its result is not there yet."""
    graph, result = check(fn, x, ROW)
    assert result.matches
    assert BS in rows_of_products(graph)
    sent = [node for node in graph.nodes if node.target is not WAIT and str(node.target).startswith("_c10d_functional")]
    assert sent
    assert {user.target for node in sent for user in node.users} == {WAIT}
    assert {node.args[0] for node in graph.nodes if node.target is WAIT} == set(sent)


def test_a_sum_that_is_written_back(x):
    """All of its rows are; what follows it takes the selected ones."""

    def fn(x, y, row):
        y.copy_(total(x @ UP))
        return rows_by_gather(y @ DOWN, row)

    y = torch.zeros(BS, D, 32)
    module, inputs = capture(fn, x, y, ROW, write_back=True)
    want, kept = module(*inputs), y.clone()
    y.zero_()
    assert run_pass(HoistRowSelect(), module).matches == 1
    assert rows_of_sums(module.graph) == [BS * D]
    assert rows_of_products(module.graph) == [BS * D, BS]
    torch.testing.assert_close(module(*inputs), want)
    torch.testing.assert_close(y, kept)


def test_the_fused_sum_is_of_the_selected_rows(monkeypatch):
    """Selections come first, then our sums, then their norms: `all_reduce_add` has one row a request."""
    width = 256
    rule = Rule(max_m=64, max_n=1 << 20, min_k=width, min_bytes=0, max_bytes=1 << 30)
    monkeypatch.setattr(lower_skinny_mm, "RULES", {90: (rule,)})
    monkeypatch.setattr(fuse_norm_linear, "AFTER_NORM", {})
    shapes = ((512, width), (width, 512), (width,), (512, width))

    def fn(x, row, up, down, gain, head):
        y = total(F.linear(F.silu(F.linear(x, up)), down)) + x
        return rows_by_gather(F.linear(F.rms_norm(y, (width,), gain, 1e-5), head), row)

    module, _ = capture(fn, torch.randn(BS, D, width).bfloat16(), ROW, *(w.bfloat16() for w in weights(*shapes)))
    PassManager(arch=90, every_graph=True)(module.graph)
    assert all_reduce_op not in targets(module)
    (call,) = [node for node in module.graph.nodes if node.target is all_reduce_add_op]
    assert [value(operand).shape for operand in call.args[:2]] == [(BS, width), (BS, width)]
