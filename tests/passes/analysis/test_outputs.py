"""What the manager checks after every pass (`passes/analysis/outputs.py`)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch

import spec_ops
from spec_ops.passes import GraphPass, PassManager, PassResult, manager
from spec_ops.passes.analysis.graph import insert
from spec_ops.passes.analysis.outputs import PassError, Watch
from spec_ops.passes.analysis.storage import base_of, is_view
from tests.helpers.pass_harness import capture

aten, prims = torch.ops.aten, torch.ops.prims


def arguments() -> tuple[torch.Tensor, ...]:
    cache, tables = torch.randn(2, 6, 4, 2, 16), torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    return torch.randn(2, 1, 4, 16), cache[0].clone(), cache[1].clone(), tables, torch.tensor([6, 3], dtype=torch.int32)


class Replaces(GraphPass):
    """Puts what `make` inserts before the graph's output `place` in its place."""

    name = "replaces"

    def __init__(self, place: int, make: Callable) -> None:
        self.place, self.make = place, make

    def run(self, graph, context, result):
        end = graph.output_node()
        outputs = list(end.args[0])
        outputs[self.place] = self.make(lambda target, *args: insert(graph, end, target, args), outputs)
        end.args = (tuple(outputs),)


def several(q, keys, values, tables, lens):
    out = spec_ops.mha_draft_decode(q, keys, values, tables, lens)
    rows = out.flatten(0, 1)
    return rows * 2, rows + 1, rows[:, 1], rows[0], keys[0], lens.sum()


def given(out: list) -> list:
    return out[0].graph.find_nodes(op="placeholder")


def twice(m: Callable, x: torch.fx.Node) -> torch.fx.Node:
    return m(aten.cat.default, [x, x], 2)


DEFECTS = {
    "another output": (1, lambda m, out: out[0], "memory of output 1 became memory of output 0"),
    "view of another": (1, lambda m, out: m(aten.view.default, out[0], [2, 4, 16]), "became memory of output 0"),
    "input": (
        4,
        lambda m, out: m(aten.select.int, given(out)[2], 0, 0),
        "memory of input arg1_1 became memory of input arg2_1",
    ),
    "memory of an input": (
        0,
        lambda m, out: m(aten.view.default, given(out)[0], [2, 4, 16]),
        "0 became memory of input arg0_1",
    ),
    "copy of a view": (3, lambda m, out: m(aten.clone.default, out[3]), "memory of output 2 became memory of output 3"),
    "copy of an input": (4, lambda m, out: m(aten.clone.default, out[4]), "memory of input arg1_1 became memory of output 4"),
    "dtype": (5, lambda m, out: m(prims.convert_element_type.default, out[5], torch.int32), "dtype torch.int64 became"),
    "shape": (5, lambda m, out: m(aten.view.default, out[5], [1]), "shape torch.Size([]) became torch.Size([1])"),
    "strides": (0, lambda m, out: m(aten.slice.Tensor, twice(m, out[0]), 2, 0, 16), "strides (64, 16, 1) became (128, 32, 1)"),
    "no tensor": (0, lambda m, out: None, "a tensor became none"),
}
SOUND = {
    "the same anew": (0, lambda m, out: m(aten.mul.Tensor, out[0].args[0], 2)),
    "the same view anew": (3, lambda m, out: m(aten.select.int, out[3].args[0], 0, 0)),
    "copied once more": (1, lambda m, out: m(aten.clone.default, out[1])),
}


@pytest.mark.parametrize("name", [*DEFECTS, *SOUND])
def test_no_pass_may_change_what_users_see(name, monkeypatch):
    place, make, *message = DEFECTS.get(name) or SOUND[name]
    monkeypatch.setattr(manager, "PASSES", (Replaces(place, make),))
    module, _ = capture(several, *arguments())
    with contextlib.nullcontext() if not message else pytest.raises(PassError, match=re.escape(message[0])) as error:
        PassManager()(module.graph)
    if message:
        assert f"the pass `replaces` changed output {place} of the graph [" in str(error.value)
        assert re.search(r"\[\S+test_outputs\.py:\d+\]", str(error.value))
        assert "passes={'replaces': False}" in str(error.value)


def test_what_reads_a_replaced_value_has_the_fake_value_of_what_is_there():
    """Inductor's own passes compare the storages of fake values."""
    module, _ = capture(several, *arguments())
    graph = module.graph
    watch = Watch(graph)
    rows = next(node for node in graph.nodes if node.op == "output").args[0][0].args[0]
    copied = insert(graph, rows.next, aten.clone.default, (rows,))
    rows.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
    watch.check(PassResult("by hand", matches=1))
    views = [node for node in graph.nodes if is_view(node) and base_of(node) is copied]
    assert len(views) == 2
    for node in views:
        assert node.meta["val"].untyped_storage()._cdata == copied.meta["val"].untyped_storage()._cdata
