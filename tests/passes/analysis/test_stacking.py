"""Slots, positions and lengths of all steps as rows of one value: what belongs together, what must not, and that no entry
changes; that tables are shared although slots are gathered from them; how many kernels Inductor makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import spec_ops
from spec_ops import ops
from spec_ops.passes.analysis.graph import EAGER, calls, op_of, source_line
from spec_ops.passes.analysis.lengths import Values
from spec_ops.passes.analysis.stacking import Stacking
from spec_ops.passes.fuse_draft_steps import FuseDraftSteps
from tests.helpers.inductor_unbuilt import unbuilt
from tests.helpers.pass_harness import capture, run_pass
from tests.passes.test_compile import has_cpp_compiler

aten = torch.ops.aten
BS, WIDTH, PAGE = 3, 32, 4


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    pages = torch.randperm(BS * WIDTH // PAGE, generator=g).reshape(BS, -1)
    return {
        "table": pages.to(torch.int32),
        "rtt": (pages[:, :, None] * PAGE + torch.arange(PAGE)).reshape(BS, WIDTH).to(torch.int32),
        "req": torch.tensor([2, 0, 1]),
        "base": torch.tensor([5, 0, 11], dtype=torch.int32),
        "other": torch.tensor([3, 8, 1], dtype=torch.int32),
        "keep": torch.tensor([True, False, True]),
        "x": torch.randn(BS, 2, 4, generator=g),
    }


class Inputs(dict):
    def __getattr__(self, name: str) -> torch.Tensor:
        return self[name]

    def write(self, slots: torch.Tensor) -> torch.Tensor:
        """What an append into an empty cache leaves there."""
        k, v = (torch.zeros(BS * WIDTH // PAGE, PAGE, 2, 4) for _ in range(2))
        rows = self.x[:, None].expand(-1, slots.numel() // BS, -1, -1).flatten(0, 1) + 1
        ops.append_kv(k, v, rows, rows, slots.flatten())
        return k


Program = Callable[[Inputs], Any]


def stacked(program: Program, decompose: bool = True) -> tuple[fx.GraphModule, list[fx.Node], Any]:
    """`program` after the pass, the slots of its appends, and the report; results must be equal."""
    data = inputs()
    table = select_decomp_table() if decompose else None
    fn = make_fx(lambda *given: program(Inputs(zip(data, given, strict=True))), decomposition_table=table, tracing_mode="fake")
    module = fn(*data.values())
    want = module(*data.values())
    result = run_pass(FuseDraftSteps(), module)
    for a, b in zip(module(*data.values()), want, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    slots = [
        n.kwargs.get("slots", n.args[4] if len(n.args) > 4 else None)
        for n in module.graph.nodes
        if "append_kv" in str(op_of(n))
    ]
    return module, slots, result


def of_table(i: Inputs, position: torch.Tensor) -> torch.Tensor:
    """As `RoundState.slots`."""
    pages = i.table.gather(1, (position[:, None] // PAGE).clamp(0, WIDTH // PAGE - 1).long())
    return torch.where(i.keep[:, None], pages * PAGE + position[:, None] % PAGE, -1)


def of_requests(i: Inputs, position: torch.Tensor) -> torch.Tensor:
    return i.rtt[i.req[:, None], position[:, None] + torch.arange(2)]


SPELLINGS: dict[str, Callable[[Inputs, torch.Tensor], torch.Tensor]] = {
    "block table": of_table,
    "request table": of_requests,
    "index by arange": lambda i, p: i.table[torch.arange(BS), (p // PAGE).long()] * PAGE + p % PAGE,
    "contiguous": lambda i, p: torch.where(p < 14, i.req * WIDTH + p, -1),
    "shifts and masks": lambda i, p: (i.table.gather(1, (p >> 2)[:, None].long())[:, 0] << 2) | (p & 3),
    "branches of a tree": lambda i, p: i.rtt.gather(1, (p[:, None] + torch.arange(3)).long()),
    "int64 throughout": lambda i, p: i.table.long().gather(1, p.long()[:, None] // PAGE) * PAGE + p.long()[:, None] % PAGE,
    "expanded": lambda i, p: (p[:, None].expand(-1, 2) + 0 * p[:, None]).reshape(-1),
    "step in two places": lambda i, p: (
        i.rtt.gather(1, (p + 1).clamp(max=WIDTH - 1)[:, None].long()) + (p + 1)[:, None] - p[:, None]
    ),
    "indices computed too": lambda i, p: (i.rtt + p[:, None])[i.req, p.long()],
}


@pytest.mark.parametrize("decompose", [True, False], ids=["decomposed", "as written"])
@pytest.mark.parametrize("order", [(0, 1, 2), (3, 1, 2), (1, 5)])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_slots_of_all_steps_are_one_launch(spelling, order, decompose):
    """Of any spelling, also where `base + 0` is written (which tracing may drop) and steps come in another order."""
    module, slots, result = stacked(lambda i: [i.write(SPELLINGS[spelling](i, i.base + s)) for s in order], decompose)
    assert {node.target for node in slots} == {aten.select.int}
    assert len({node.args[0] for node in slots}) == 1
    assert [node.args[2] for node in slots] == [sorted(order).index(s) for s in order]
    assert result.matches == len(order)
    assert not result.refused
    before = str(module.graph)
    assert run_pass(FuseDraftSteps(), module).matches == 0
    assert str(module.graph) == before


def test_positions_and_lengths_that_ops_take():
    """`select_draft_tokens`' and `build_tree`'s lengths as well as attention's: whatever integer tensor an op of ours takes."""

    def program(i: Inputs):
        parents = torch.arange(-1, 2).expand(BS, -1).contiguous()
        chosen = torch.tensor([[0, 1]]).expand(BS, -1).contiguous()
        return [ops.build_tree(parents, chosen, i.base + s, 2).positions for s in (1, 4)]

    module, _, result = stacked(program)
    lens = [n.args[2] for n in module.graph.nodes if "build_tree" in str(n.target)]
    assert [n.args[2] for n in lens] == [0, 1]
    assert result.matches == 2


MASKS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "there and back": lambda m, s: (m + s).int().long(),
    "and more": lambda m, s: m.int().long() + s,
    "sums that wrap": lambda m, s: (m.int() + s).long(),
    "wrapped and more": lambda m, s: (m.int() + s).long() + s,
    "of 32 bits": lambda m, s: ((m >> 40).int().clamp(min=2**31 - 2) + s).long(),
    "by promotion": lambda m, s: (m.int() + s) + torch.zeros((), dtype=torch.int64).expand(BS, 2),
    "selected": lambda m, s: torch.where(m > 3, m.int() + s, 0).long(),
}


@pytest.mark.parametrize("case", MASKS)
def test_bits_above_the_31st(case):
    """An integer need not be a length: tree masks use all 64 bits, and int32 sums wrap around."""

    def program(i: Inputs):
        mask = (i.base.long()[:, None] << torch.tensor([29, 30])) + (1 << 31) - 2
        return [i.write(MASKS[case](mask, s) >> 29 & 31) for s in (1, 2, 5)]

    _, slots, _ = stacked(program)
    assert {node.target for node in slots} == {aten.select.int}


def test_equal_slots_are_computed_once():
    """Verify and extend of a chain write the same slots; in the graph of an inference they are computed twice."""
    _, slots, result = stacked(lambda i: [i.write(of_requests(i, s + i.base) + 0) for s in (1, 1)])
    assert slots[0] is slots[1]
    assert [note.text for note in result.done] == ["slots: as computed before"]


MISSES: dict[str, Program] = {
    "one step": lambda i: [i.write(of_table(i, i.base + 1))],
    "other base": lambda i: [i.write(of_table(i, b)) for b in (i.base + 1, i.other + 2)],
    "other table": lambda i: [i.write(t.gather(1, (i.base[:, None] + s).long())) for s, t in ((1, i.rtt), (2, i.rtt.flip(0)))],
    "other mask": lambda i: [i.write(torch.where(m, i.base + s, -1)) for s, m in ((1, i.keep), (2, ~i.keep))],
    "other mask of zeros": lambda i: [i.write(torch.where(m, i.base + s, 0)) for s, m in ((1, i.keep), (2, ~i.keep))],
    "other factor": lambda i: [i.write(i.base * s) for s in (1, 2)],
    "other op": lambda i: [i.write(i.base * 2 + 1), i.write(i.base - 2 * i.other)],
    "other width": lambda i: [i.write(i.base[:, None] + torch.arange(n)) for n in (1, 2)],
    "other dtype": lambda i: [i.write(i.base + 1), i.write(i.base.long() + 2)],
    "float arithmetic": lambda i: [i.write(((i.base + s).float() * 2).int()) for s in (1, 2)],
    "data in the way": lambda i: [i.write(i.base + i.other.amax() + s * i.req.amin()) for s in (1, 2)],
    "inputs": lambda i: [i.write(i.base), i.write(i.other)],
    "a cumulative sum": lambda i: [i.write((i.base + s).cumsum(0)) for s in (1, 2)],
}  # fmt: skip


@pytest.mark.parametrize("case", MISSES)
def test_what_does_not_belong_together(case):
    module, slots, result = stacked(MISSES[case])
    assert result.matches == 0
    assert aten.select.int not in {node.target for node in slots}
    assert not [n for n in module.graph.nodes if "force_stride" in str(n.target)]


def test_shared_subexpressions_do_not_multiply():
    """`x + x` forty times: a walk without memory or bound would take 2 ** 40 steps."""

    def program(i: Inputs):
        out = []
        for s in (1, 2):
            x = i.base + s
            for _ in range(40):
                x = torch.maximum(x, x)
            out.append(i.write(x))
        return out

    _, slots, _ = stacked(program)
    assert len(slots) == 2


def test_rows_keep_strides_and_source_lines():
    """Inductor keeps the inputs of the ops to the strides that this note gives."""

    def program(i: Inputs):
        return [ops.page_table(i.rtt, i.req, i.base + s, PAGE)[:, :s] + 0 for s in (1, 2)]

    module, _, _ = stacked(program)
    for node in module.graph.nodes:
        if op_of(node) is not None:
            assert node.meta[EAGER][0][2].stride() == (1,)


def test_made_calls_carry_what_inductor_needs():
    """The strides that the user's call had, and its line in the user's source."""

    def program(*given: torch.Tensor):
        i = Inputs(zip(data, given, strict=True))
        return [t + 0 for s in (0, 1) for t in ops.draft_kv_indices(i.rtt, i.req, i.base, s, 2, 1, PAGE)]

    data = inputs()
    module, _ = capture(program, *data.values())
    run_pass(FuseDraftSteps(), module)
    (call,) = calls(module.graph, torch.ops.spec_ops.draft_kv_indices_steps.default)
    assert [tuple(a.shape) for a in call.meta[EAGER][0][:3]] == [(BS, WIDTH), (BS,), (BS,)]
    assert source_line(call).startswith(f"{__file__}:")


TABLES: dict[str, tuple[Callable[[Inputs, torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "gather": (lambda i, t, p: t.gather(1, (p[:, None] // PAGE).long()) * PAGE + p[:, None] % PAGE, True),
    "clamped": (lambda i, t, p: t.gather(1, (p[:, None] // PAGE).clamp(0, WIDTH // PAGE - 1).long()), True),
    "index": (lambda i, t, p: t[torch.arange(BS)[:, None], (p[:, None] // PAGE).long()], True),
    "index of rows": (lambda i, t, p: t[torch.arange(BS), (p // PAGE).long()], True),
    "branches": (lambda i, t, p: t.gather(1, (((p - 1)[:, None] + torch.arange(2)) // PAGE).long()), True),
    "one past the length": (lambda i, t, p: t.gather(1, ((p + 1)[:, None] // PAGE).long()), False),
    "branches past it": (lambda i, t, p: t.gather(1, ((p[:, None] + torch.arange(2)) // PAGE).long()), False),
    "other page size": (lambda i, t, p: t.gather(1, (p[:, None] // (PAGE * 2)).long()), False),
    "of other requests": (lambda i, t, p: t[i.req, (p // PAGE).long()], False),
    "all rows of one": (lambda i, t, p: t.gather(1, (p[None] // PAGE).long()), False),
    "all rows by all": (lambda i, t, p: t[torch.arange(BS)[:, None], (p[None] // PAGE).long()], False),
    "of another base": (lambda i, t, p: t.gather(1, (i.other[:, None] // PAGE).long()), False),
    "by rows": (lambda i, t, p: t.gather(0, (p[None] // PAGE).clamp(max=BS - 1).long().expand(1, -1)), False),
    "clamped to a part": (lambda i, t, p: t.gather(1, (p[:, None] // PAGE).clamp(0, 2).long()), False),
    "raised": (lambda i, t, p: t.gather(1, (p[:, None] // PAGE).clamp(min=1).long()), False),
    "not floored": (lambda i, t, p: t.gather(1, (p[:, None] & 3).long()), False),
    "before the base": (lambda i, t, p: t.gather(1, ((p - 9).clamp(min=0)[:, None] // PAGE).long()), False),
    "places before it": (lambda i, t, p: t.gather(1, ((p[:, None] + torch.arange(0, -2, -1)) // PAGE).long()), True),
    "places before it, ending past": (
        lambda i, t, p: t.gather(1, ((p[:, None] + 1 + torch.arange(0, -2, -1)) // PAGE).long()),
        False,
    ),
    "odd steps": (lambda i, t, p: t.gather(1, ((p[:, None] - 3 + torch.arange(0, 5, 3)) // PAGE).clamp(min=0).long()), True),
    "odd steps past it": (
        lambda i, t, p: t.gather(1, ((p[:, None] + torch.arange(-3, 4, 3)) // PAGE).clamp(min=0).long()),
        False,
    ),
    "clamped places": (lambda i, t, p: t.gather(1, ((p[:, None] - torch.arange(9).clamp(max=1)) // PAGE).long()), True),
    "rows of another shape": (
        lambda i, t, p: t.gather(1, (((p - 1)[:, None] + torch.arange(2)) // PAGE).reshape(2, 3).long()),
        False,
    ),
    "three dimensions": (
        lambda i, t, p: t[torch.arange(BS), (((p - 2)[:, None] + torch.arange(BS)) // PAGE).view(BS, 1, BS).long()],
        False,
    ),
    "limits that are data": (lambda i, t, p: t.gather(1, (p[:, None] // PAGE).clamp(min=i.base.amin() * 0).long()), False),
    "the table twice": (lambda i, t, p: t.gather(1, t.clamp(max=7).long()), False),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
def test_a_table_that_slots_are_gathered_from(case):
    """Position `p` lies within length `p + 1`: the longest table has the same page there."""
    read, shared = TABLES[case]

    def program(i: Inputs):
        out = []
        for s in (1, 2, 6):
            p = i.base + s
            table = ops.page_table(i.rtt, i.req, p + 1, PAGE)
            out.append(read(i, table, p) + 0)
        return out

    module, _, result = stacked(program)
    tables = len(list(calls(module.graph, torch.ops.spec_ops.page_table.default)))
    assert tables == (1 if shared else 3)
    assert bool(result.refused) == (not shared)
    assert all("page_table: stays: " in note.text for note in result.refused)


def test_a_masked_and_an_unmasked_table_differ_where_slots_are_read():
    """Rows that the mask drops are empty in one and not in the other, and a gather sees that."""

    def program(i: Inputs):
        short = ops.page_table(i.rtt, i.req, torch.where(i.keep, i.base + 1, 0), PAGE)
        long = ops.page_table(i.rtt, i.req, i.base + 6, PAGE)
        return [short.gather(1, (i.base[:, None] // PAGE).long()) + 0, long.gather(1, (i.base[:, None] // PAGE).long()) + 0]

    module, _, result = stacked(program)
    assert len(list(calls(module.graph, torch.ops.spec_ops.page_table.default))) == 2
    assert "gathers from it" in result.refused[0].text


ARITHMETIC = {
    "plus": lambda x, y, c: x + y,
    "plus constant": lambda x, y, c: x + c,
    "times": lambda x, y, c: x * c,
    "floor": lambda x, y, c: x // (c + 1),
    "modulo": lambda x, y, c: x % (c + 1),
    "where": lambda x, y, c: torch.where(y > x, x, c),
    "zeroed": lambda x, y, c: torch.where(y > 4, x, 0),
    "clamp": lambda x, y, c: x.clamp(0, 9 + c),
    "long": lambda x, y, c: x.long(),
    "int": lambda x, y, c: x.int(),
    "column": lambda x, y, c: (x[:, None] + torch.arange(c + 1)).amax(1),
    "there and back": lambda x, y, c: (x[:, None].expand(-1, 2) * 2)[:, 0],
    "itself": lambda x, y, c: x - x + y,
}


@pytest.mark.slow
@settings(max_examples=36, deadline=None)
@given(
    steps=st.lists(st.integers(0, 5), min_size=2, max_size=4),
    links=st.lists(st.tuples(st.sampled_from(sorted(ARITHMETIC)), st.integers(0, 3), st.booleans()), max_size=6),
)
def test_random_arithmetic(steps, links):
    """Any chain of integer ops over `base + s` and over a value without a step; results are compared in `stacked`."""

    def program(i: Inputs):
        out = []
        for s in steps:
            x = i.base + s
            for name, c, swap in links:
                x = ARITHMETIC[name](*((x, i.other + s) if swap else (x, i.other)), c)
            out.append(i.write(i.rtt[i.req, x.long() % WIDTH]))
        return out

    _, slots, _ = stacked(program)
    if not any(name == "column" for name, _, _ in links):  # a reduction ends the walk; so may a constant that tracing folds
        assert len({node.args[0] for node in slots if node.target is aten.select.int}) <= 1


def launches(code: str) -> int:
    """Generated kernels that write integers only."""
    kernels = dict(re.findall(r"(cpp_fused\w+) = async_compile.cpp_pybinding\((\[.*?\])", code))
    body = code[code.index("def call(") :]
    outputs = {name: [p for p in re.findall(r"'(.+?)'", types) if not p.startswith("const")] for name, types in kernels.items()}
    return sum(all("int" in p for p in outputs[name]) for name in re.findall(r"^ +(cpp_fused\w+)\(", body, re.M))


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor asks which C++ compiler there is")
def test_how_many_kernels_inductor_makes():
    """With a model between the steps it fuses their slots no further than to one kernel each; the pass makes them one."""
    steps, depth = 2, 66  # Inductor fuses no two buffers that lie more than 64 nodes apart
    weight = torch.randn(4, 4) / 2

    def program(table, base, keep, x, k, v):
        for s in range(steps):
            position = (base + s)[:, None]
            pages = table.gather(1, (position // PAGE).long())
            slots = torch.where(keep[:, None], pages * PAGE + position % PAGE, -1).flatten()
            ops.append_kv(k, v, x, x, slots)
            for _ in range(depth):
                x = x @ weight
        return x

    data, found = inputs(), []
    for on in (False, True):
        torch._dynamo.reset()
        k, v = (torch.zeros(BS * WIDTH // PAGE, PAGE, 2, 4) for _ in range(2))
        compiled = spec_ops.compile(program, passes={"fuse_draft_steps": on}, mode="default")
        with unbuilt():
            _, code = run_and_get_code(compiled, data["table"], data["base"], data["keep"], data["x"], k, v)
        found.append(launches(code[0]))
    assert found == [steps, 1]


def test_forms_tell_constants_from_structure():
    def program(i: Inputs):
        return [of_table(i, i.base + 1), of_table(i, i.base + 7), of_table(i, i.other + 1)]

    data = inputs()
    graph = make_fx(lambda *given: program(Inputs(zip(data, given, strict=True))), tracing_mode="fake")(*data.values()).graph
    stacking = Stacking(graph, Values(graph))
    first, second, third = (stacking.form(node) for node in graph.output_node().args[0])
    assert first.kind == second.kind != third.kind
    assert first.offsets != second.offsets
    assert first.offsets == third.offsets


def test_the_first_of_equal_values_makes_the_place():
    """`other + base` and `other + (base + 0)` have one form but are two values: the rows come after the first."""

    def program(i: Inputs):
        early = i.write(i.rtt.gather(1, ((i.other + i.base)[:, None] + 1).long()))
        late = i.other + (i.base + 0)
        return [early, *(i.write(i.rtt.gather(1, (late[:, None] + s).long())) for s in (2, 1))]

    _, slots, result = stacked(program)
    assert [node.args[2] for node in slots] == [0, 1, 0]
    assert result.matches == 3


def test_a_computed_base_may_be_a_row():
    def program(i: Inputs):
        start = i.base + i.other
        return [i.write(start + s if s else start) for s in (0, 4)]

    _, slots, result = stacked(program)
    assert [node.args[2] for node in slots] == [0, 1]
    assert result.matches == 2
