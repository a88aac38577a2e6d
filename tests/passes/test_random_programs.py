"""Random programs around the ops compute the same with each pass, and with all of them, as eagerly: results, what is written to
inputs, and which results share memory. Programs that once went wrong stay, as they were made smaller.

    pytest tests/passes/test_random_programs.py --seeds 2000-3999     prints the smallest program for each seed that fails
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from spec_ops.passes import GraphPass, PassContext, PassResult, manager
from spec_ops.passes.analysis.graph import insert
from tests.helpers.program_check import check, smallest
from tests.helpers.random_programs import Program, random_program

TABLE = "table = spec_ops.page_table(rtt, req, base, 4)"  # passes look only at graphs that call an op of ours
ATTEND = (TABLE, "att = spec_ops.mha_target_verify(heads(x), k, v, table, base).flatten(2)", "i = torch.arange(3)")


def program(*lines: str, results: tuple[str, ...] = ("s0", "s1"), layout: str = "own", data: int = 1) -> Program:
    return Program(3, 4, layout, data, lines, results)


def read(line: str, *offsets: int) -> tuple[str, ...]:
    """`line` for the table t{i} of each length `base + n`."""
    tables = [f"t{i} = spec_ops.page_table(rtt, req, base + {n}, 4)" for i, n in enumerate(offsets)]
    return (*tables, *(f"s{i} = " + line.format(i=i, n=n, page=2 + 2 * i) for i, n in enumerate(offsets)))


CASES: dict[str, Program] = {
    "views of equal tables": program(TABLE, TABLE.replace("table ", "again "), results=("table[:, :3]", "again[:, :5]")),
    "a snapshot before an append": program(
        "snap.copy_(k)",
        "rows = x[:, 0, :8].unflatten(-1, (1, 8))",
        "spec_ops.append_kv(k, v, rows, rows * 2, req * 4)",
        results=("base + 0",),
        layout="views",
    ),
    "one selection twice": program(*ATTEND, "l = att @ head", results=("l[i, row]", "l[i, row]")),
    "a selection of a part": program(*ATTEND, "l = att @ head", results=("l[i, row]", "l[..., :11][i, row]")),
    "a selection, converted": program(*ATTEND, results=("att[i, row]", "att.float()[i, row]")),
    "a clone of a selection": program(*ATTEND, "l = att @ head", results=("l[:, -1]", "l[:, -1].clone()")),
    "strides of a part": program(*ATTEND, "l = (att @ head)[..., :11]", results=("l[i, row]", "l[i, row].view(-1)")),
    "strides of a block": program(*ATTEND, results=("att[:, :3]",)),
    "products of one selection": program(
        *ATTEND, results=("(att @ head)[i, row]", "(x @ head)[i, row]", "(att @ head2)[i, row]")
    ),
    "a product between two of others": program(
        "y = x + 1",
        TABLE,
        "att = spec_ops.mha_target_verify(heads(y), k, v, table, base).flatten(2)",
        "i = torch.arange(3)",
        results=("(att @ head)[i, row]", "(x @ head)[i, row]", "((att + x) @ head2)[i, row]", "y"),
    ),
    "constants of two batch sizes": program(
        *(f"s{n - 2} = spec_ops.page_table(rtt, torch.full(({n},), 1), torch.full(({n},), 9), 4) + {n}" for n in (2, 3))
    ),
    "places before the first": program(
        *read("t{i}.gather(1, (((base + {n} + 1)[:, None] + torch.arange(0, -3, -1)) // 4).clamp(0, 7).long())", 1, 9)
    ),
    "rows of another shape": program(
        *read("t{i}.gather(1, (((base + {n} - 4)[:, None] + torch.arange(4)) // 4).clamp(0, 7).reshape(2, 6).long())", 4, 12),
        data=0,
    ),
    "a cache of smaller pages": program(
        "q = heads(x[:, :1])",
        "k2, v2, k4, v4 = halves(k), halves(v), k, v",
        *read("spec_ops.mha_draft_decode(q, k{page}, v{page}, t{i}, base + {n})", 6, 20),
    ),
    "a mask of more than 32 bits": program(
        *(
            "table = spec_ops.page_table(rtt, req, other + 20, 4)",
            *(f"m{n} = bits.int().long() + {n + 1}" for n in (0, 1)),
            *(
                f"s{n} = spec_ops.mha_target_verify(heads(x), k, v, table, other + 20, tree_mask=m{n}, mask_len=34)"
                for n in (0, 1)
            ),
        )
    ),
    "a base of -1": program(*read("t{i}.gather(1, ((base + {n} - 1)[:, None] // 4).clamp(0, 7).long())", 1, 5), data=6),
    "a limit that is data": program(
        TABLE,
        "l = x @ head",
        "n = row.max().item()",
        results=("l.flatten(0, 1)[torch.arange(3) * 4 + row.clamp(0, n)]", "table + 0"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_programs_that_went_wrong(case):
    assert check(CASES[case]) == {}


@pytest.mark.slow
def test_random_programs(seeds: Callable[[int], range]):
    found = []
    for seed in seeds(8):
        if wrong := check(made := random_program(seed)):
            found.append(f"seed {seed}: {wrong}\n{smallest(made, list(wrong))}")
    assert not found, "\n".join(found)


class Breaks(GraphPass):
    """What `name` says."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        output = graph.output_node()
        first, second = output.args[0]  # type: ignore[misc]
        if self.name == "one for two":
            output.args = ((first, first),)
        elif self.name == "strides":
            output.args = (
                (first, insert(graph, output, torch.ops.aten.slice.Tensor, (insert_wide(graph, output, second), 1, 0, 8))),
            )
        elif self.name == "values":
            output.args = ((insert(graph, output, torch.ops.aten.add.Tensor, (first, 1)), second),)
        else:
            raise ZeroDivisionError("a mistake")


def insert_wide(graph: fx.Graph, before: fx.Node, node: fx.Node) -> fx.Node:
    return insert(graph, before, torch.ops.aten.cat.default, ([node, node], 1))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one for two", "writing output 0 changes"),
        ("strides", "strides"),
        ("values", "output 0 differs"),
        ("raises", "ZeroDivision"),
    ],
)
def test_what_is_found(name, text, monkeypatch):
    """Passes that are wrong on purpose; the manager sees some of it first."""
    monkeypatch.setattr(manager, "PASSES", (Breaks(name),))
    made = program(TABLE, "again = table + 0", results=("table", "again"))
    (found,) = set(check(made, [name]).values())
    assert text in found or found.startswith("PassError")
    assert smallest(replace(made, lines=("other + 1", *made.lines)), [name]).lines == made.lines
