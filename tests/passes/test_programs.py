"""All passes together on programs that the naive round is not: several rounds in one graph, several draft layers, one of which
has a sliding window and a page table of its own, steps as separate functions, lengths in int64 or accumulated; and how much
work the passes do on growing rounds."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch

import spec_ops
from spec_ops.passes import PassManager
from spec_ops.passes.analysis import counts
from tests.examples.test_naive_round import naive_round, table
from tests.helpers.pass_harness import Traced, compile_interpreted

BS, HEADS, DIM, PAGE, WIDTH = 2, 2, 8, 4, 32


@pytest.fixture(autouse=True)
def scalars_in_the_graph():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        yield


class Rounds(torch.nn.Module):
    def __init__(self, count: int, **options: Any) -> None:
        super().__init__()
        self.count, self.round = count, naive_round.make_round(**options, dtype=torch.float32)

    def forward(self):
        return [part for _ in range(self.count) for part in self.round()]


@pytest.mark.slow
def test_several_rounds_in_one_graph():
    """Nothing of one round serves the other, whose lengths have another base: twice what one round leaves."""
    traced = Traced(Rounds(2, width=4, layers=1))
    plain, passed = traced.run(on=False), traced.run()
    for a, b in zip(passed.results[0], plain.results[0], strict=True):
        assert torch.equal(a, b)
    for name, want in plain.buffers.items():
        # The head runs on one row instead of all: another order of summation in fp32.
        torch.testing.assert_close(passed.buffers[name], want, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    found = table(passed.report)
    assert found[counts.KV_GENERATIONS] == (8, 0)
    assert found[counts.PAGE_TABLES] == (8, 2)
    assert found[counts.ITEMS] == (8, 0)
    assert found[counts.PREFILLS] == (2, 0)
    assert found[counts.HEAD_ROWS] == (16, 4)
    assert found[counts.CUDA_GRAPHS] == (3, 1)
    assert found[counts.METADATA_LAUNCHES][1] == 2 * 7


class WindowedDraft(torch.nn.Module):
    """Draft steps of two layers: full attention, and a sliding window with caches, slots and a page table of its own."""

    def __init__(self, lengths: str) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.lengths = lengths
        for layer in range(2):
            for name in "kv":
                self.register_buffer(f"{name}{layer}", torch.randn(BS * WIDTH // PAGE, PAGE, HEADS, DIM, generator=g))
            pages = torch.randperm(BS * WIDTH // PAGE, generator=g).reshape(BS, -1)
            slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).reshape(BS, WIDTH).to(torch.int32)
            self.register_buffer(f"slots{layer}", slots)
            self.register_buffer(f"weight{layer}", torch.randn(HEADS * DIM, HEADS * DIM, generator=g) / 4)
        self.register_buffer("requests", torch.tensor([1, 0]))
        self.register_buffer("committed", torch.tensor([6, 11], dtype=torch.int32))

    def layer(self, layer: int, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        table = spec_ops.page_table(getattr(self, f"slots{layer}"), self.requests, lens, PAGE)
        position = (lens - 1)[:, None]
        slots = table.gather(1, (position // PAGE).long()) * PAGE + position % PAGE
        k, v = getattr(self, f"k{layer}"), getattr(self, f"v{layer}")
        q = (x @ getattr(self, f"weight{layer}")).unflatten(-1, (HEADS, DIM))
        spec_ops.append_kv(k, v, q[:, 0] * 2, q[:, 0] + 1, slots.flatten())
        options = {"seq_lens_cpu": lens.int().cpu(), "max_seq_len": lens.max().item(), "window_left": 3 if layer else -1}
        return x + spec_ops.mha_draft_decode(q, k, v, table, lens.int(), **options).flatten(-2)

    def first(self, x):
        lens = (self.committed.long() if self.lengths == "int64" else self.committed) + 1
        return self.layer(1, self.layer(0, x, lens), lens), lens

    def second(self, x, lens):
        lens = self.committed.long() + 2 if self.lengths == "int64" else lens + 1
        return self.layer(1, self.layer(0, x, lens), lens), lens

    def third(self, x, running):
        longer = 3 + self.committed.to(running.dtype) if self.lengths == "int64" else running + 1
        x = self.layer(0, x, longer)
        return self.layer(1, x, longer)

    def forward(self, x):
        x, lens = self.first(x)
        x, lens = self.second(x, lens)
        return self.third(x, lens)


@pytest.mark.parametrize("lengths", ["accumulated", "int64"])
def test_layers_with_page_tables_of_their_own(lengths):
    """One table for each layer; lengths serve both; slots of each layer's steps are one launch, after its table."""
    x = torch.randn(BS, 1, HEADS * DIM, generator=torch.Generator().manual_seed(1))
    traced = Traced(WindowedDraft(lengths), x)
    plain, passed = traced.run(on=False), traced.run()
    # No matrix product changes its shape, so not a bit may differ.
    assert torch.equal(passed.results[0][0], plain.results[0][0])
    for name, want in plain.buffers.items():
        assert torch.equal(passed.buffers[name], want)
    found = passed.report
    assert (found.before["page_table"], found.after["page_table"]) == (6, 2)
    assert found.after[counts.ITEMS] == 0
    refused = [result for result in found.results if result.refused]
    assert {result.name for result in refused} <= {"fuse_rope_append"}  # nothing is rotated here
    # Tables and slots of two layers, and the lengths: in int64 those of the tables, in int32 those of attention.
    assert found.after[counts.METADATA_LAUNCHES] == 2 + 2 + (2 if lengths == "int64" else 1)


@functools.cache
def work(steps: int, layers: int) -> tuple[int, int]:
    """Python calls that the passes make on a naive round, and how many nodes it has. Counted, not timed: it repeats exactly."""
    calls, nodes = 0, 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    manager = PassManager.__call__

    def counted(self: PassManager, graph: torch.fx.Graph) -> None:
        nonlocal nodes
        nodes = len(graph.nodes)
        sys.setprofile(count)
        try:
            manager(self, graph)
        finally:
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassManager, "__call__", counted)
        compile_interpreted(naive_round.make_round(steps=steps, layers=layers, dtype=torch.float32))[0]()
    return calls, nodes


@pytest.mark.slow
@pytest.mark.parametrize("larger", [(6, 1), (2, 6)], ids=["steps", "layers"])
def test_work_grows_no_faster_than_the_graph(larger):
    """Calls per node stay within a fifth; a pass that is quadratic in steps or layers would double them with the graph."""
    per_node = [calls / nodes for calls, nodes in (work(2, 1), work(*larger))]
    assert max(per_node) < 1.2 * per_node[0], per_node
