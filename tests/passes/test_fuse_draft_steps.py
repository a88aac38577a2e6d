"""fuse_draft_steps on small graphs: matches, numbers before and after, and near misses that must stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from spec_ops import ops
from spec_ops.passes import manager
from spec_ops.passes.analysis.graph import ATTENTION_OPS, INDEX_OPS, arg
from spec_ops.passes.base import PassContext, PassResult
from spec_ops.passes.fuse_draft_steps import FuseDraftSteps
from tests.helpers.pass_harness import compile_interpreted, run_pass

BS, WIDTH, PAGE, HEADS, DIM = 3, 32, 4, 1, 4
NAMES = {**ATTENTION_OPS, **INDEX_OPS}
STEPS_OP, STEP_OP = "draft_kv_indices_steps", "draft_kv_indices"


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    pages = torch.randperm(BS * WIDTH // PAGE, generator=g).reshape(BS, -1)
    slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).reshape(BS, WIDTH).to(torch.int32)
    cache = (BS * WIDTH // PAGE, PAGE, HEADS, DIM)
    return {
        "rtt": slots,
        "rtt2": slots.flip(0).contiguous(),
        "req": torch.tensor([2, 0, 1]),
        "base": torch.randint(0, 9, (BS,), generator=g, dtype=torch.int32),
        "other": torch.randint(0, 9, (BS,), generator=g, dtype=torch.int32),
        "keep": torch.tensor([True, False, True]),
        "q": torch.randn(BS, 1, HEADS, DIM, generator=g),
        "k": torch.randn(cache, generator=g),
        "v": torch.randn(cache, generator=g),
    }


class Inputs(dict):
    def __getattr__(self, name: str) -> torch.Tensor:
        return self[name]

    def table(self, lens: torch.Tensor, page_size: int = PAGE, **options: Any) -> torch.Tensor:
        return ops.page_table(options.pop("rtt", self.rtt), options.pop("req", self.req), lens, page_size, **options)

    def attend(self, table: torch.Tensor, lens: torch.Tensor, **options: Any) -> torch.Tensor:
        return ops.mha_draft_decode(self.q, self.k, self.v, table, lens, **options)

    def step(self, lens: torch.Tensor) -> torch.Tensor:
        """A table and the attention over it."""
        return self.attend(self.table(lens), lens)

    def indices(self, lens: torch.Tensor, step: int, num_steps: int = 2, topk: int = 1, **options: Any):
        return ops.draft_kv_indices(self.rtt, self.req, lens, step, num_steps, topk, PAGE, **options)


Program = Callable[[Inputs], Any]


def counts(graph: fx.Graph) -> Counter[str]:
    return Counter(NAMES[node.target] for node in graph.nodes if node.target in NAMES)


def fused(program: Program, seed: int = 0) -> tuple[fx.Graph, PassResult, Counter[str], Counter[str]]:
    """The graph of `program` after the pass, what was done, and op counts before and after. Results must be equal."""
    data = inputs(seed)
    module = make_fx(lambda *values: program(Inputs(zip(data, values, strict=True))), tracing_mode="fake")(*data.values())
    before, want = counts(module.graph), module(*data.values())
    result = PassResult(FuseDraftSteps.name)
    FuseDraftSteps().run(module.graph, PassContext(), result)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    got = module(*data.values())
    for expected, actual in zip(torch.utils._pytree.tree_leaves(want), torch.utils._pytree.tree_leaves(got), strict=True):
        assert actual.dtype == expected.dtype
        assert actual.is_contiguous()
        assert torch.equal(actual, expected)
    for node in module.graph.nodes:
        assert node.op == "output" or "val" in node.meta
    return module.graph, result, before, counts(module.graph)


def reasons(result: PassResult) -> str:
    return "; ".join(note.text for note in result.refused)


def where(i: Inputs, lens: torch.Tensor) -> torch.Tensor:
    return torch.where(i.keep, lens, 0)


FORMS: dict[str, Callable[[Inputs, int], torch.Tensor]] = {
    "base + i + 1": lambda i, s: i.base + s + 1,
    "methods": lambda i, s: i.base.add(s).add(1),
    "commuted": lambda i, s: 1 + (s + i.base),
    "through int64": lambda i, s: (i.base.long() + s + 1).int(),
    "masked": lambda i, s: where(i, i.base + s + 1),
    "mask made anew": lambda i, s: torch.where(~~i.keep, i.base + s + 1, 0),
    "accumulated": lambda i, s: i.base + 1 if s == 0 else FORMS["accumulated"](i, s - 1) + 1,
    "opaque base": lambda i, s: i.base * 1 + s + 1,
}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("form", FORMS)
def test_tables_of_all_steps_are_one(form, order):
    graph, result, before, after = fused(lambda i: [i.step(FORMS[form](i, s)) for s in order])
    assert before["page_table"] == 3
    assert after["page_table"] == 1
    assert sum("page_table" in note.text for note in result.done) == 2
    assert not result.refused
    lens = {arg(n, "seq_lens") for n in graph.nodes if n.target in NAMES}
    assert {n.target for n in lens} == {torch.ops.aten.select.int}
    assert len({n.args[0] for n in lens}) == 1


def test_off_leaves_the_graph(monkeypatch):
    monkeypatch.setattr(manager, "PASSES", (FuseDraftSteps(),))
    torch._dynamo.reset()
    data = inputs()

    def program(*values):
        i = Inputs(zip(data, values, strict=True))
        return [i.step(i.base + s) for s in (1, 2)]

    want = program(*data.values())
    for on in (False, True):
        torch._dynamo.reset()
        run, reports = compile_interpreted(program, {FuseDraftSteps.name: on})
        assert all(torch.equal(a, b) for a, b in zip(run(*data.values()), want, strict=True))
        assert reports[0].after["page_table"] == (1 if on else 2)
        assert reports[0].matches(FuseDraftSteps.name) == (4 if on else 0)
        if on:
            assert "test_fuse_draft_steps.py" in reports[0].results[0].done[0].where


def test_mutation_of_the_table_between_steps(monkeypatch):
    """In a functional graph the mutated table is another node."""
    monkeypatch.setattr(manager, "PASSES", (FuseDraftSteps(),))
    torch._dynamo.reset()
    data = inputs()

    def program(*values):
        i = Inputs(zip(data, values, strict=True))
        first = i.step(i.base + 1)
        i.rtt.copy_(i.rtt2)
        indices = [i.indices(i.base, s)[1] for s in (0, 1)]
        i.base.add_(1)
        return [first, i.step(i.base + 1), i.indices(i.base, 0)[1] + indices[0] + indices[1]]

    want = program(*(value.clone() for value in data.values()))
    run, reports = compile_interpreted(program)
    got = run(*(value.clone() for value in data.values()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert reports[0].after["page_table"] == 2
    assert (reports[0].after[STEPS_OP], reports[0].after[STEP_OP]) == (1, 1)


def test_verify_and_extend_share_the_table_of_drafts():
    def program(i: Inputs):
        drafts = [i.step(where(i, i.base + s)) for s in (1, 2)]
        q = i.q.expand(-1, 4, -1, -1).contiguous()
        lens = where(i, i.base + 4)
        verify = ops.mha_target_verify(q, i.k, i.v, i.table(lens), lens)
        return [*drafts, verify, ops.mha_draft_extend(q, i.k, i.v, i.table(lens), lens)]

    _, result, before, after = fused(program)
    assert (before["page_table"], after["page_table"]) == (4, 1)
    assert not result.refused


def test_a_table_without_a_mask_serves_masked_lengths():
    def program(i: Inputs):
        return [i.step(where(i, i.base + 1)), i.step(where(i, i.base + 2)), i.step(i.base + 4)]

    assert fused(program)[3]["page_table"] == 1


def test_a_masked_table_serves_no_unmasked_length():
    def program(i: Inputs):
        return [i.step(i.base + 1), i.step(where(i, i.base + 4))]

    assert fused(program)[3]["page_table"] == 2


def test_a_shorter_unmasked_table_stays_apart():
    def program(i: Inputs):
        return [i.step(i.base + 2), i.step(i.base + 1), i.step(where(i, i.base + 4)), i.step(where(i, i.base + 3))]

    assert fused(program)[3]["page_table"] == 2


def test_rounds_are_not_mixed():
    def program(i: Inputs):
        after = i.base + i.other.clamp(max=2)
        first = [i.step(i.base + s) for s in (1, 2, 3)]
        return first + [i.step(after + s) for s in (1, 2, 3)]

    _, _, before, after = fused(program)
    assert (before["page_table"], after["page_table"]) == (6, 2)


def test_layers_with_their_own_table_stay_apart():
    def program(i: Inputs):
        out: list[torch.Tensor] = []
        for s in (1, 2):
            lens = i.base + s
            out += [i.step(lens), i.attend(i.table(lens, rtt=i.rtt2), lens)]
        return out

    assert fused(program)[3]["page_table"] == 2


def read_twice(i: Inputs, table: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """The op itself, whose `kv_indices` may read any entry."""
    options = (None, 0, lens, table.view(-1), None, 1.0, -1, None, 0.0, 1.0, 1.0, None, "reference")
    return torch.ops.spec_ops.mha_draft_decode.default(i.q, i.k, i.v, table, lens, *options)


def fine(i: Inputs) -> Inputs:
    """The same caches in pages of half the size."""
    return Inputs({**i, "k": i.k.view(-1, PAGE // 2, HEADS, DIM), "v": i.v.view(-1, PAGE // 2, HEADS, DIM)})


TABLE_MISSES: dict[str, tuple[Program, str]] = {
    "cache of smaller pages": (
        lambda i: [fine(i).attend(i.table(i.base + 1), i.base + 1), i.step(i.base + 9)],
        "an entry for each 2 tokens, and the table has one for each 4",
    ),
    "int64 base cut to 32 bits": (
        lambda i: [i.attend(i.table(n := ((i.base.long() << 32) + i.base + s).int().long()), n.int()) for s in (1, 2)],
        "",
    ),
    "returned": (lambda i: [t := i.table(i.base + 1), i.attend(t, i.base + 1), i.step(i.base + 2)], "returned"),
    "gathered from": (
        lambda i: [(t := i.table(i.base + 1))[:, :1] + 0, i.attend(t, i.base + 1), i.step(i.base + 2)],
        "not as block_tables",
    ),
    "read twice by one call": (
        lambda i: [read_twice(i, i.table(i.base + 1), i.base + 1), i.step(i.base + 2)],
        "view reads it, not as block_tables alone",
    ),
    "longer reader": (
        lambda i: [i.attend(i.table(i.base + 1), i.base + 2), i.step(i.base + 3)],
        "not provably within",
    ),
    "reader of another base": (
        lambda i: [i.attend(i.table(i.base + 1), i.other), i.step(i.base + 3)],
        "not provably within",
    ),
    "unmasked reader of a masked table": (
        lambda i: [i.attend(i.table(where(i, i.base + 1)), i.base + 1), i.step(where(i, i.base + 3))],
        "not provably within",
    ),
    "other base": (lambda i: [i.step(i.base + 1), i.step(i.other + 2)], ""),
    "times one": (lambda i: [i.step(i.base * 1 + 1), i.step(i.base + 2)], ""),
    "plus a tensor": (lambda i: [i.step(i.base + 1), i.step(i.base + i.other)], ""),
    "other fill": (lambda i: [i.step(torch.where(i.keep, i.base + s, 1)) for s in (1, 2)], ""),
    "other mask": (lambda i: [i.step(where(i, i.base + 1)), i.step(torch.where(i.other > 4, i.base + 2, 0))], ""),
    "other table": (lambda i: [i.step(i.base + 1), i.attend(i.table(i.base + 2, rtt=i.rtt2), i.base + 2)], ""),
    "changed table": (lambda i: [i.step(i.base + 1), i.attend(i.table(i.base + 2, rtt=i.rtt + 0), i.base + 2)], ""),
    "other requests": (
        lambda i: [i.step(i.base + 1), i.attend(i.table(i.base + 2, req=i.req.flip(0)), i.base + 2)],
        "",
    ),
    "other width": (lambda i: [i.step(i.base + 1), i.attend(i.table(i.base + 2, max_pages=6), i.base + 2)], ""),
}


@pytest.mark.parametrize("case", TABLE_MISSES)
def test_tables_that_must_stay(case):
    program, reason = TABLE_MISSES[case]
    _, result, before, after = fused(program)
    assert before["page_table"] == after["page_table"] == 2
    assert not any("page_table" in note.text for note in result.done)
    assert reason in reasons(result)
    assert bool(reason) == bool(result.refused)


@pytest.mark.parametrize("width", [None, 8], ids=["own widths", "one width"])
def test_other_page_size_stays(width):
    def program(i: Inputs):
        half = {"k": i.k.view(-1, 2, HEADS, DIM), "v": i.v.view(-1, 2, HEADS, DIM)}
        fine = Inputs({**i, **half})
        tables = i.table(i.base + 1, max_pages=width), fine.table(i.base + 2, 2, max_pages=width)
        return [i.attend(tables[0], i.base + 1), fine.attend(tables[1], i.base + 2)]

    assert fused(program)[3]["page_table"] == 2


def test_a_cache_of_larger_pages_reads_fewer_entries():
    """What it reads is not what the user meant, but it is the same in both tables."""

    def program(i: Inputs):
        coarse = Inputs({**i, "k": i.k.view(-1, 2 * PAGE, HEADS, DIM), "v": i.v.view(-1, 2 * PAGE, HEADS, DIM)})
        tables = [i.table(i.base + s) for s in (1, 9)]
        return [coarse.attend(tables[0] // 2, i.base + 1), *(i.attend(t, i.base + 1) for t in tables)]

    assert fused(program)[3]["page_table"] == 2
    assert fused(lambda i: [fine(i).attend(fine(i).table(i.base + s, 2), i.base + s) for s in (1, 9)])[3]["page_table"] == 1


def test_the_longest_table_may_be_returned():
    def program(i: Inputs):
        return [i.step(i.base + 1), t := i.table(i.base + 3), i.attend(t, i.base + 3)]

    assert fused(program)[3]["page_table"] == 1


IDENTICAL: dict[str, Program] = {
    "tables": lambda i: [i.table(i.base + 1)[:, :2] + 0, i.table(1 + i.base)[:, 2:] + 0],
    "int64 lengths": lambda i: [i.table(i.base.long() + 1) + 0, i.table(i.base + 1, req=i.req.int()) + 1],
    "kv_indices": lambda i: [ops.kv_indices(i.rtt, i.req, i.base + s - s)[1] + s for s in (1, 2)],
    "draft_kv_indices": lambda i: [i.indices(i.base, 1)[s] + 0 for s in (0, 1)],
    "one is returned": lambda i: [i.table(i.base), i.table(i.base) + 1],
    "constant lengths": lambda i: [i.table(torch.full((BS,), 4)) + s for s in (0, 1)],
}


@pytest.mark.parametrize("case", IDENTICAL)
def test_identical_calls_are_one(case):
    _, result, before, after = fused(IDENTICAL[case])
    assert before.total() == 2
    assert after.total() == 1
    assert result.matches >= 1


def test_two_results_never_share_memory():
    """The caller may write one of them in place."""
    _, result, _, after = fused(lambda i: [i.table(i.base), i.table(i.base)])
    assert after["page_table"] == 2
    assert "returned" in reasons(result)
    _, result, _, after = fused(lambda i: [*i.indices(i.base, 0), *i.indices(i.base, 1), i.indices(i.base, 0)[0] + 0])
    assert after == {STEP_OP: 2}
    assert "returned" in reasons(result)


THROUGH_VIEWS: dict[str, Program] = {
    "slices": lambda i: [i.table(i.base)[:, :3], i.table(i.base)[:, :5]],
    "a slice and the whole": lambda i: [i.table(i.base), i.table(i.base).view(-1)[2:]],
    "views of views": lambda i: [i.table(i.base).t()[1].unsqueeze(0) for _ in range(2)],
    "as_strided": lambda i: [i.table(i.base).as_strided((2, 2), (1, 1)) for _ in range(2)],
    "one of two results": lambda i: [i.indices(i.base, 0)[1][:4], i.indices(i.base, 0)[1][2:]],
    "rows of steps": lambda i: [i.indices(i.base, step)[1].view(2, -1)[0] for step in (0, 1)],
}


@pytest.mark.parametrize("case", THROUGH_VIEWS)
def test_two_results_never_share_memory_through_views(case):
    data = inputs()
    program = THROUGH_VIEWS[case]
    module = make_fx(lambda *values: program(Inputs(zip(data, values, strict=True))), tracing_mode="fake")(*data.values())
    want = module(*data.values())
    run_pass(FuseDraftSteps(), module)
    got = module(*data.values())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    got[0].add_(1)
    assert torch.equal(got[1], want[1])


def test_a_view_that_stays_inside_may_be_shared():
    """The second table is returned, and its view is only read; so is the first, whatever becomes of the second."""
    _, _, _, after = fused(lambda i: [i.table(i.base)[:, :2] + 0, i.table(i.base)])
    assert after["page_table"] == 2
    _, _, _, after = fused(lambda i: [i.table(i.base), i.table(i.base)[:, :2] + 0])
    assert after["page_table"] == 1


CONSTANTS: dict[str, Callable[[Inputs, int], torch.Tensor]] = {
    "page tables": lambda i, n: i.table(torch.full((n,), 9), req=torch.full((n,), 1)),
    "sums": lambda i, n: i.table(torch.full((n,), 8) + 1, req=torch.full((n,), 1)),
    "kv_indices": lambda i, n: ops.kv_indices(i.rtt, torch.full((n,), 1), torch.full((n,), 9), 40)[0],
    "draft": lambda i, n: ops.draft_kv_indices(i.rtt, torch.full((n,), 1), torch.full((n,), 9), n - 2, 2, capacity=60)[0],
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_constants_of_several_batch_sizes(case):
    """9 tokens of request 1, twice and three times."""
    _, _, before, after = fused(lambda i: [CONSTANTS[case](i, n) + 0 for n in (2, 3)])
    assert before == after
    _, _, _, after = fused(lambda i: [CONSTANTS[case](i, 2) + s for s in (0, 1)])
    assert after.total() == 1


@pytest.mark.parametrize("spelling", ["gather", "index", "index a row"])
def test_a_base_of_minus_one(spelling):
    """A finished request: its length is 0, so is what it reads of its table, although that of the next step has a page."""

    def program(i: Inputs):
        base, out = i.base - i.base.amax() - 1 + torch.arange(BS, dtype=torch.int32), []
        base = torch.where(i.keep, base.clamp(min=-1), -1)
        for s in (0, 1, 6):
            table, position = i.table(base + s + 1), base + s
            column = (position // PAGE).clamp(0, WIDTH // PAGE - 1).long()
            if spelling == "gather":
                out.append(table.gather(1, column[:, None]) + 0)
            else:
                rows = torch.arange(BS)
                out.append(table[rows, column] + 0 if spelling == "index" else table[rows[:, None], column[:, None]] + 0)
        return out

    _, result, before, after = fused(program)
    assert (before["page_table"], after["page_table"]) == (3, 1)
    assert not result.refused


@pytest.mark.parametrize(("longer", "tables"), [(8, 1), (WIDTH - 2, 2)])
def test_an_index_that_wraps_around(longer, tables):
    """Of a finished request, whose base is -1, it reads the last entry: of no page here, and of one where a table is full."""

    def program(i: Inputs):
        base = torch.where(i.keep, i.base.clamp(max=0), -1)
        wrapped = i.table(base + 1)[torch.arange(BS), (base // PAGE).long()] + 0
        return [wrapped, i.step(base + 1), i.step(base + longer + 1)]

    assert fused(program)[3]["page_table"] == tables


def use(i: Inputs, indices: tuple[torch.Tensor, torch.Tensor], lens: torch.Tensor) -> torch.Tensor:
    return i.attend(i.table(i.base + 4), lens, kv_indptr=indices[0], kv_indices=indices[1])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2)])
@pytest.mark.parametrize("topk", [1, 2])
def test_kv_indices_of_all_steps_are_one_launch(topk, order):
    graph, result, before, after = fused(
        lambda i: [t + 0 for s in order for t in i.indices(i.base.long() if s else i.base, s, 3, topk)]
    )
    assert before == {STEP_OP: len(order)}
    assert after == {STEPS_OP: 1}
    assert result.matches == len(order)
    (launch,) = (n for n in graph.nodes if NAMES.get(n.target) == STEPS_OP)
    assert arg(launch, "num_steps") == 3
    assert sum(n.target is torch.ops.aten.select.int for n in graph.nodes) == 2 * len(order)


def test_kv_indices_feed_attention():
    _, _, before, after = fused(lambda i: [use(i, i.indices(i.base, s), i.base + s + 1) for s in (0, 1)])
    assert (before[STEP_OP], before["page_table"]) == (2, 2)
    assert (after[STEP_OP], after[STEPS_OP], after["page_table"]) == (0, 1, 1)


def test_a_chain_stops_at_its_last_live_step():
    """`req_to_token` need not hold the steps that nobody asked for."""

    def program(i: Inputs):
        lens = i.base.clamp(min=9, max=9) + (WIDTH - 11)
        return [t + 0 for s in (0, 1) for t in i.indices(lens, s, 8, capacity=BS * WIDTH)]

    graph, _, _, after = fused(program)
    assert after == {STEPS_OP: 1}
    assert [arg(n, "num_steps") for n in graph.nodes if NAMES.get(n.target) == STEPS_OP] == [2]


def test_a_tree_stops_at_its_last_live_step_too():
    """Its branches keep the layout of all three steps; the third, which nobody asked for, is not computed and need not fit."""

    def program(i: Inputs):
        return [t + 0 for s in (0, 1) for t in i.indices(i.base, s, 3, 2, capacity=2 * BS * (8 + 2))]

    graph, _, _, after = fused(program)
    assert after == {STEPS_OP: 1}
    (launch,) = (n for n in graph.nodes if NAMES.get(n.target) == STEPS_OP)
    assert (arg(launch, "num_steps"), arg(launch, "rows")) == (3, 2)


KV_MISSES: dict[str, Program] = {
    "one live step": lambda i: [i.indices(i.base, 1)[0] + 0],
    "only one step is read": lambda i: [i.indices(i.base, 1)[0] + 0, (i.indices(i.base, 0), i.base + 0)[1]],
    "returned": lambda i: [i.indices(i.base, 0)[1] + 0, i.indices(i.base, 1)[1]],
    "other base": lambda i: [i.indices(i.base, 0)[1] + 0, i.indices(i.other, 1)[1] + 0],
    "other offset": lambda i: [i.indices(i.base, 0)[1] + 0, i.indices(i.base + 1, 1)[1] + 0],
    "other topk": lambda i: [i.indices(i.base, 0)[1] + 0, i.indices(i.base, 1, 2, 2)[1] + 0],
    "other steps": lambda i: [i.indices(i.base, 0, 2, 2)[1] + 0, i.indices(i.base, 1, 3, 2)[1] + 0],
    "other capacity": lambda i: [i.indices(i.base, 0)[1] + 0, i.indices(i.base, 1, capacity=90)[1] + 0],
    "masked": lambda i: [i.indices(i.base, 0)[1] + 0, i.indices(where(i, i.base), 1)[1] + 0],
}


@pytest.mark.parametrize("case", KV_MISSES)
def test_kv_indices_that_must_stay(case):
    _, _, _, after = fused(KV_MISSES[case])
    assert after[STEPS_OP] == 0
    assert after[STEP_OP] >= 1


@pytest.mark.parametrize("offsets", [(1, 2, 3), (0, 2, 4), (1, 2, 5, 6, 9), (-1, 3, 4), (7, 3)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_are_one_launch(offsets, masked, dtype):
    """Page tables of different requests stay apart, so each has a length of its own."""

    def program(i: Inputs):
        out: list[torch.Tensor] = []
        for n, c in enumerate(offsets):
            base = (i.base + 1).clamp(min=1).to(torch.int64 if n % 2 else torch.int32)
            lens = (base + c).to(dtype)
            out.append(i.table(where(i, lens) if masked else lens, req=i.req + n * 0) + 0)
        return out

    graph, result, _, after = fused(program)
    rows = [arg(n, "seq_lens") for n in graph.nodes if NAMES.get(n.target) == "page_table"]
    assert len({row.args[0] for row in rows if row.target is torch.ops.aten.select.int}) == 1
    assert after["page_table"] >= 1
    assert result.matches >= sum(row.target is torch.ops.aten.select.int for row in rows)
    assert all(row.meta["val"].dtype == dtype and row.meta["val"].is_contiguous() for row in rows)
    assert not [n for n in graph.nodes if "copy" in str(n.target) and n.meta["val"].dim() == 0]


LENGTH_MISSES: dict[str, Program] = {
    "one length": lambda i: [i.step(i.base + 1)],
    "two bases": lambda i: [i.step(i.base + 1), i.step(i.other + 2)],
    "not constant": lambda i: [i.step(i.base + 1), i.step(i.base + i.other)],
    "two masks": lambda i: [i.step(i.base + 1), i.step(where(i, i.base + 2))],
    "two dtypes": lambda i: [i.table(i.base.long() + 1) + 0, i.table(i.base + 3) + 0],
    "only pointwise": lambda i: [i.base + 1, i.base + 2, i.step(i.base + 3)],
}


@pytest.mark.parametrize("case", LENGTH_MISSES)
def test_lengths_that_must_stay(case):
    graph, _, _, _ = fused(LENGTH_MISSES[case])
    assert not [n for n in graph.nodes if n.target is torch.ops.aten.select.int]


def test_a_second_run_changes_nothing():
    module_graph, _, _, _ = fused(lambda i: [use(i, i.indices(i.base, s), where(i, i.base + s + 1)) for s in (0, 1)])
    before = str(module_graph)
    result = PassResult(FuseDraftSteps.name)
    FuseDraftSteps().run(module_graph, PassContext(), result)
    assert result.matches == 0
    assert str(module_graph) == before


CALL = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["step", "table", "wide reader", "returned", "kv", "draft", "draft tree", "draft returned"]),
        "base": st.sampled_from(["base", "other", "sum"]),
        "offset": st.integers(0, 4),
        "form": st.sampled_from(["plain", "commuted", "long", "minus", "masked", "masked long", "times one", "column"]),
        "rtt": st.sampled_from(["rtt", "rtt", "rtt2"]),
        "step": st.integers(0, 2),
    }
)


def lens_of(i: Inputs, call: dict[str, Any]) -> torch.Tensor:
    base, c = i.base + i.other if call["base"] == "sum" else i[call["base"]], call["offset"]
    return {
        "plain": lambda: base + c,
        "commuted": lambda: c + base,
        "long": lambda: base.long() + c,
        "minus": lambda: base + (c + 2) - 2,
        "masked": lambda: where(i, base + c),
        "masked long": lambda: where(i, base.long() + c),
        "times one": lambda: base * 1 + c,
        "column": lambda: (base[:, None] + c).flatten(),
    }[call["form"]]()


@settings(max_examples=36, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=st.lists(CALL, min_size=2, max_size=7), seed=st.integers(0, 50))
def test_random_programs(program, seed):
    def run(i: Inputs):
        out: list[torch.Tensor] = []
        for call in program:
            kind, lens = call["kind"], lens_of(i, call)
            if kind.startswith("draft"):
                topk = 2 if kind == "draft tree" else 1
                rows = ops.draft_kv_indices(i[call["rtt"]], i.req, lens, call["step"], 3, topk, PAGE)
                out += rows if kind == "draft returned" else [row + 0 for row in rows]
            elif kind == "kv":
                out += [row + 0 for row in ops.kv_indices(i[call["rtt"]], i.req, lens)]
            else:
                table = i.table(lens, rtt=i[call["rtt"]])
                out += [table + 0] if kind == "table" else [table] if kind == "returned" else []
                out.append(i.attend(table, (lens + 1 if kind == "wide reader" else lens).int()))
        return out

    before, after = fused(run, seed)[2:]
    assert after.total() <= before.total()
