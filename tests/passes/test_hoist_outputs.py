"""What a graph returns after `hoist_row_select`: strides and memory as in eager mode, and rewritten nodes in order."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import spec_ops
from spec_ops.passes.hoist_row_select import HoistRowSelect
from tests.helpers.hoist_harness import BS, D, K, hoist, product_rows, rows_by_arange, rows_by_gather, trace, weights
from tests.helpers.pass_harness import Uncached, switched_off

aten = torch.ops.aten
W, W2, U = weights((K, 32), (K, 32), (K, K))
ROW = torch.tensor([1, 0, 3])


def select(x, row):
    return x[torch.arange(BS), row]


def twice(x, row):
    logits = x @ W
    return select(logits, row), select(logits, row)


def beside_a_part(x, row):
    logits = x @ W
    return select(logits, row), select(logits[..., :11], row)


def beside_a_gather(x, row):
    logits = x @ W
    return select(logits, row), rows_by_gather(logits, row), logits.gather(1, row[:, None, None].expand(-1, 1, 32))


def beside_a_conversion(x, row):
    logits = x @ W
    return select(logits, row), select(logits.float(), row), select(logits.double(), row)


def last_and_its_copy(x, row):
    logits = x @ W
    return logits[:, -1], logits[:, -1].clone()


def views_of_rows(x, row):
    """Views of one selection share memory; those of another selection do not."""
    logits = x @ W
    first, second = select(logits, row), select(logits, row)
    return first[:, :5], second.view(-1), first.view(BS, 4, 8)


def part(x, row):
    return select((x @ W)[..., :11], row)


def last(x, row):
    return (x @ W)[:, -1]


def last_of_columns(x, row):
    return (x @ W).view(BS, D, 4, 8).transpose(2, 3)[:, 1:3]


def computed_from_columns(x, row):
    """Gathered rows are dense, and so is what is computed from them, whatever they are gathered from."""
    columns = (x @ W).view(BS, D, 4, 8).transpose(2, 3)
    return columns.gather(1, row[:, None, None, None].expand(-1, 1, 8, 4)) * 2


def copied_for_its_strides(x, row):
    """A reshape of strided rows copies them, each anew."""
    rows = (x @ W)[:, 1:3]
    return rows.reshape(-1), rows.reshape(-1)


def parts_interleave(x, row):
    """The second selection has nothing to do with the others, but reads the same rows of an input."""
    y = x.relu()
    return select((y @ U) @ W, row), select(x @ W, row), select((y @ U) @ W2, row)


def parts_share_rows(x, row):
    """Rows of `y`, which is returned, are gathered once for two parts whose selections interleave."""
    y = x.relu()
    left, right = (y @ U), (y @ W)
    a, b, c = select(left @ W, row), select(right, row), select(left @ W2, row)
    return a, b, c, y


REWRITTEN = [twice, beside_a_part, beside_a_gather, beside_a_conversion, last_and_its_copy, views_of_rows, part, last,
             last_of_columns, computed_from_columns, copied_for_its_strides, parts_interleave, parts_share_rows]  # fmt: skip


def seen(results: tuple[torch.Tensor, ...]) -> list[tuple]:
    """Strides, and the first result of the same memory."""
    memory = [result.untyped_storage().data_ptr() for result in results]
    return [(r.shape, r.dtype, r.stride(), memory.index(m)) for r, m in zip(results, memory, strict=True)]


def results_of(fn, x, row) -> tuple[torch.Tensor, ...]:
    found = fn(x, row)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("fn", REWRITTEN, ids=lambda fn: fn.__name__)
def test_strides_and_memory_are_those_of_eager_mode(fn):
    (x,) = weights((BS, D, K))
    want = results_of(fn, x, ROW)
    module = trace(fn, x, ROW)
    assert hoist(module.graph).matches
    module.recompile()
    got = results_of(module, x, ROW)
    torch.testing.assert_close(got, want)
    assert seen(got) == seen(want)
    assert set(product_rows(module.graph)) <= {BS, 2 * BS}
    for place, result in enumerate(got):  # a caller may write to one
        others = [other.clone() for other in got]
        result.fill_(float(place))
        mine = seen(want)[place][-1]
        for other, before, fact in zip(got, others, seen(want), strict=True):
            assert fact[-1] == mine or torch.equal(other, before)


def test_a_reshape_copies_as_often_as_before():
    """AOTAutograd writes it as a view or as a copy. Other passes write `reshape`, which is either, by the strides it meets."""
    (x,) = weights((BS, D, K))
    module = trace(copied_for_its_strides, x, ROW)
    for clone in module.graph.find_nodes(op="call_function", target=aten.clone.default):
        (view,) = clone.users
        view.target, view.args = aten.reshape.default, (clone.args[0], view.args[1])
        module.graph.erase_node(clone)
    assert hoist(module.graph).matches
    module.recompile()
    want, got = copied_for_its_strides(x, ROW), module(x, ROW)
    torch.testing.assert_close(got, want)
    assert seen(got) == seen(want)


@pytest.mark.parametrize("fn", [twice, part])
def test_off_switch(fn, monkeypatch):
    switched_off(HoistRowSelect(), trace(fn, *weights((BS, D, K)), ROW), monkeypatch)


def test_several_returned_views_of_the_same_rows_stay():
    """They share memory in eager mode, which rows of their own would not."""

    def fn(x, row):
        logits = x @ W
        return logits[:, -1], logits[:, -1:]

    result = hoist(trace(fn, *weights((BS, D, K)), ROW).graph)
    assert not result.matches
    assert [note.text for note in result.refused] == [
        "rows 3 to 3 of 4: several views of the rows are returned, and share memory"
    ]


def test_nothing_is_copied_where_nothing_is_seen():
    def fn(x, row):
        logits = x @ W
        return rows_by_arange(logits, row).argmax(-1), rows_by_gather(logits, row).softmax(-1)

    graph = trace(fn, *weights((BS, D, K)), ROW).graph
    assert hoist(graph).matches == 1
    assert not {torch.ops.aten.clone.default, torch.ops.aten.copy.default} & {node.target for node in graph.nodes}


def test_compiled():
    """Inductor honours both."""

    def fn(x, row):
        logits = x @ W
        lens = torch.full((BS,), 2, dtype=torch.int32)
        table = spec_ops.page_table(torch.arange(8, dtype=torch.int32).view(1, 8), row * 0, lens, 1, 8)  # an op of ours
        return select(logits, row), select(logits, row), select(logits[..., :11], row), (x @ W2)[:, -1], table

    (x,) = weights((BS, D, K))
    assert spec_ops.explain(fn, x, ROW).matches("hoist_row_select") == 2
    with torch._inductor.config.patch(post_grad_custom_post_pass=Uncached()):
        got, _ = run_and_get_code(spec_ops.compile(fn, mode="default"), x, ROW)
    want = fn(x, ROW)
    torch.testing.assert_close(got, want)
    assert seen(got) == seen(want)
