"""`hoist_row_select`: which work shrinks to the selected rows, which must not, and that no number changes.

Results are compared with an fp32 tolerance where a matrix product changed its number of rows: another tiling may sum in
another order. What is only pointwise stays exact.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from spec_ops.passes import PassManager, manager
from spec_ops.passes.hoist_row_select import HoistRowSelect
from tests.decoding.test_generate import make_draft, make_target
from tests.helpers.hoist_harness import (
    BS,
    SELECTIONS,
    D,
    K,
    check,
    hoist,
    product_rows,
    rows_by_arange,
    rows_by_gather,
    trace,
    weights,
)
from tests.helpers.pass_harness import capture, texts


def test_spellings_of_one_index_move_together(x):
    def fn(x, count):
        hidden = (x @ SQUARE[K]).tanh()
        row = (count - 1).clamp(min=0)
        return rows_by_gather(head(hidden), row.long()), rows_by_arange(hidden, (count - 1).clamp(min=0))

    graph, result = check(fn, x, torch.tensor([1, 4, 0], dtype=torch.int32))
    assert result.matches == 1
    assert set(product_rows(graph)) == {BS}


def test_one_selection_feeds_the_next(x):
    """Both take the last row, so they are one group; the second must read the first's new result, or the old chain stays."""

    def fn(x):
        first = head(x)[:, -1:]
        return (head(x * 2) * first)[:, -1:], first

    graph, result = check(fn, x)
    assert result.matches == 2
    assert product_rows(graph) == [BS, BS]


@pytest.mark.parametrize("select", ["gather", "arange", "arange-int32-negative", "last", "middle-two", "index-select", "flat"])
def test_one_request(select):
    x = torch.randn(1, D, K)
    graph, result = check(lambda x, row: SELECTIONS[select](head(x.tanh()).softmax(-1), row), x, torch.tensor([2]))
    assert result.matches == 1
    assert product_rows(graph) == [2 if "two" in select else 1]


def test_exact_where_sums_are():
    """Small integers: no sum is rounded, so another order of summation changes nothing, and neither may anything else."""
    g = torch.Generator().manual_seed(0)
    x, up, down = (torch.randint(-3, 4, shape, generator=g).float() for shape in ((BS, D, K), (K, 32), (32, 9)))
    graph, result = check(lambda x, row: rows_by_gather((x @ up).relu() @ down + x.amax(-1, True), row), x, ROW, exact=True)
    assert result.matches == 1
    assert set(product_rows(graph)) == {BS}


def test_bfloat16():
    draft = make_draft("mtp", make_target(False)).to(torch.bfloat16)
    head, norm = draft.lm_head, draft.norm
    x, row = torch.randn(BS, D, 64, dtype=torch.bfloat16), torch.tensor([0, 3, 1])
    with torch.no_grad():
        graph, result = check(lambda x, row: rows_by_gather(head(norm(x)).float().softmax(-1), row), x, row)
    assert result.matches == 1
    assert product_rows(graph) == [BS]


def test_off_switch(monkeypatch):
    w = weights((K, 9))[0]
    module = trace(lambda x, row: rows_by_gather(x @ w, row), torch.randn(BS, D, K), torch.tensor([1, 2, 3]))
    monkeypatch.setattr(manager, "PASSES", (HoistRowSelect(),))
    before = str(module.graph)
    PassManager({"hoist_row_select": False})(module.graph)
    assert str(module.graph) == before


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(BS, D, K)


ROW = torch.tensor([1, 3, 0])


HEAD, BIAS = weights((K, 9), (9,))


WIDTHS = (4, 8, 16, 32)


SQUARE, TO_K, TO_8 = (
    {n: weights(shape(n))[0] for n in WIDTHS} for shape in (lambda n: (n, n), lambda n: (n, K), lambda n: (8, n))
)


def head(x):
    return F.linear(x, HEAD.T, BIAS)


def test_nothing_to_gain(x):
    _, result = check(lambda x, row: rows_by_gather((x * 2).exp(), row), x, ROW)
    assert not result.matches
    assert not result.refused


ROWWISE = {
    "softmax": lambda x: head(x).softmax(-1),
    "log_softmax of a temperature": lambda x: torch.log_softmax(head(x) / HEAD[:BS, :1, None].abs(), -1),
    "layer norm below": lambda x: head(F.layer_norm(x, (K,))),
    "per-head norm": lambda x: head(F.rms_norm(x.unflatten(-1, (4, 4)), (4,)).flatten(-2)),
    "split": lambda x: torch.mul(*head(x)[..., :8].split(4, -1)),
    "split with one part used": lambda x: head(x).split([4, 5], -1)[1].exp(),
    "chunk of a product": lambda x: F.silu((g := head(x)[..., :8].chunk(2, -1))[0]) * g[1],
    "argmax into a table": lambda x: torch.arange(9)[head(x).argmax(-1)][..., None],
    "embedding of the argmax": lambda x: F.embedding(head(x).argmax(-1), HEAD.T) @ HEAD,
    "reduced vocabulary": lambda x: head(x)[..., torch.tensor([7, 1, 3])],
    "var_mean": lambda x: torch.var_mean(head(x), -1, keepdim=True)[0],
    "topk": lambda x: head(x).topk(3, -1).values,
    "sort": lambda x: head(x).sort(-1).indices,
    "rows broadcast over requests": lambda x: head(x) * torch.arange(D)[:, None],
    "requests broadcast over rows": lambda x: head(x) * torch.arange(BS)[:, None, None],
    "residual": lambda x: (y := head(x) @ HEAD.T) + head(y) @ HEAD.T,
    "batched over heads": lambda x: torch.einsum("bdhk,hkv->bdhv", x.unflatten(-1, (4, 4)), HEAD.unflatten(0, (4, 4))).sum(2),
    "batched over requests": lambda x: torch.bmm(x, HEAD.expand(BS, -1, -1)),
    "rows of both operands": lambda x: (y := x.reshape(BS * D, 4, 4)).bmm(y).reshape(BS, D, K),
    "rows permuted into the middle": lambda x: (x.permute(2, 1, 0).permute(2, 1, 0).reshape(BS * D, K) @ HEAD).view(BS, D, -1),
    "cat and flip": lambda x: torch.cat([head(x), head(x).flip(-1), torch.zeros(BS, D, 2)], -1),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("select", ["gather", "arange-two", "last"])
def test_rowwise_work(x, name, select):
    graph, result = check(lambda x, row: SELECTIONS[select](ROWWISE[name](x), row), x, ROW)
    assert result.matches == 1
    assert not result.refused
    rows = 2 if "two" in select else 1
    if "operands" not in name:
        assert set(product_rows(graph)) <= {rows, BS * rows}


def test_matrix_products_are_not_repeated(x):
    """The hidden rows feed another product in full; the head alone shrinks, and reads a gather of them."""
    inner = weights((K, K))[0]

    def fn(x, row):
        hidden = (x @ inner).tanh()
        return rows_by_gather(head(hidden), row), hidden @ inner

    graph, result = check(fn, x, ROW)
    assert result.matches == 1
    assert product_rows(graph) == [BS * D, BS, BS * D] or sorted(product_rows(graph)) == [BS, BS * D, BS * D]


def test_index_may_depend_on_what_stays(x):
    """The index comes from the hidden rows; the head above them may still shrink."""
    graph, result = check(lambda x: rows_by_gather(head(x.tanh()), x.tanh().sum(-1).argmax(1)), x)
    assert result.matches == 1
    assert product_rows(graph) == [BS]


def test_a_product_that_mixes_rows_ends_the_way(x):
    mix = torch.rand(BS, D, D)
    graph, result = check(lambda x, row: rows_by_gather(mix @ head(x), row), x, ROW)
    assert result.matches == 1
    assert product_rows(graph) == [BS * D, 1]  # its own rows may shrink, what it reads may not


def select_again(x, row):
    logits = head(x)
    return rows_by_gather(logits, row), rows_by_gather(logits, (row + 1) % D)


NEAR_MISSES = {
    "index from the selected logits": (
        lambda x, row: rows_by_gather(y := head(x), y.amax(-1).argmax(1)),
        "index of the selection depends on the rows",
    ),
    "full logits returned": (lambda x, row: (y := head(x), rows_by_gather(y, row)), "the full result is returned"),
    "full logits read": (lambda x, row: ((y := head(x)).sum(), rows_by_gather(y, row)), "also read by sum"),
    "cumsum over rows": (lambda x, row: rows_by_gather(head(x).cumsum(1), row), "mixes rows"),
    "softmax over rows": (lambda x, row: rows_by_gather(head(x).softmax(1), row), "also read by sum"),
    "softmax over requests": (lambda x, row: rows_by_gather(head(x).softmax(0), row), "also read by sum"),
    "reversed rows": (lambda x, row: rows_by_gather(head(x).flip(1), row), "mixes rows"),
    "requests and rows exchanged": (
        lambda x, row: rows_by_gather(head(x).reshape(D, BS, 9).transpose(0, 1), row),
        "splits the rows' axis",
    ),
    "index varies inside a row": (
        lambda x, row: head(x).gather(1, torch.arange(9).remainder(D).expand(BS, 1, 9)),
        "varies inside a row",
    ),
    "part of a row": (lambda x, row: head(x).gather(1, row[:, None, None]), "a part of each row"),
    "another dimension": (lambda x, row: head(x).gather(2, row[:, None, None].expand(-1, D, 1)), None),
    "columns": (lambda x, row: head(x)[:, :, 2], None),
    "requests": (lambda x, row: head(x)[1], None),
    "all rows": (lambda x, row: head(x).gather(1, torch.arange(D)[None, :, None].expand(BS, -1, 9)), None),
    "two selections": (select_again, "also read by"),
    "foreign first index": (lambda x, row: head(x)[row % BS, row], "not provably 0, 1"),
    "flat rows of any request": (
        lambda x, row: head(x).flatten(0, 1)[torch.arange(BS) * D + row],
        "not provably request * rows + row",
    ),
    "flat rows of another width": (
        lambda x, row: head(x).flatten(0, 1)[torch.arange(BS) * (D - 1) + row.clamp(0, D - 1)],
        "not provably request * rows + row",
    ),
    "random": (lambda x, row: rows_by_gather(torch.rand_like(head(x)), row), None),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(x, name):
    fn, reason = NEAR_MISSES[name]
    module = trace(fn, x, ROW)
    before = product_rows(module.graph), len(module.graph.nodes)
    result = hoist(module.graph)
    assert result.matches == 0
    assert (product_rows(module.graph), len(module.graph.nodes)) == before or name == "random"
    texts = [note.text for note in result.refused]
    assert any(reason in text for text in texts) if reason else not texts
    assert all("test_hoist_row_select.py" in note.where or note.where.startswith("unknown") for note in result.refused)


SYMBOLIC = {
    "gather": (lambda x, row, weight: rows_by_gather(x @ weight, row), "its shape is symbolic"),
    "arange": (lambda x, row, weight: rows_by_arange(x @ weight, row), "its shape is symbolic"),
    "last": (lambda x, row, weight: (x @ weight)[:, -1], "its shape is symbolic"),
    "flat": (lambda x, row, weight: (x @ weight).flatten(0, 1)[row], "its shape is symbolic"),
    "a row by its number": (
        lambda x, row, weight: torch.ops.aten.select.int(x @ weight, 1, x.shape[0] - 1),
        "the row is a symbolic number",
    ),
    "the first rows": (lambda x, row, weight: (x @ weight)[:, : x.shape[0]], "the bounds of the rows are symbolic"),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_shapes_are_refused_with_the_reason(x, name):
    fn, reason = SYMBOLIC[name]
    module = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="symbolic")(x, ROW, HEAD)
    before = str(module.graph)
    result = hoist(module.graph)
    assert result.matches == 0
    assert str(module.graph) == before
    assert any(reason in note.text for note in result.refused)


LINKS = {
    "scale": lambda x, i: x * (i + 1.5),
    "tanh": lambda x, i: x.tanh(),
    "product": lambda x, i: x @ TO_K[x.shape[-1]].to(x.dtype),
    "bias": lambda x, i: F.linear(x, TO_8[x.shape[-1]].to(x.dtype), torch.ones(8, dtype=x.dtype)),
    "norm": lambda x, i: F.rms_norm(x, (x.shape[-1],)),
    "softmax": lambda x, i: x.softmax(-1),
    "gate": lambda x, i: x * (x @ SQUARE[x.shape[-1]].to(x.dtype)).sigmoid(),
    "halves": lambda x, i: torch.cat([x[..., x.shape[-1] // 2 :], -x[..., : x.shape[-1] // 2]], -1),
    "heads": lambda x, i: x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
    "flat": lambda x, i: x.flatten(0, 1).exp().clamp(max=9).unflatten(0, (x.shape[0], -1)),
    "middle": lambda x, i: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "swap": lambda x, i: (x.transpose(0, 1).reshape(-1, x.shape[-1]) * 2).unflatten(0, (x.shape[1], -1)).transpose(0, 1),
    "row number": lambda x, i: x + torch.arange(x.shape[1])[:, None],
    "cumsum of a row": lambda x, i: x.cumsum(-1),
    "mean": lambda x, i: x - x.mean(-1, keepdim=True),
    "mix rows": lambda x, i: x - x.mean(1, keepdim=True),
    "mix requests": lambda x, i: x.flip(0),
    "shift": lambda x, i: torch.cat([x[:, 1:], x[:, :1]], 1),
}


@pytest.mark.slow
@settings(max_examples=70, deadline=None, derandomize=True)
@given(
    links=st.lists(st.sampled_from(list(LINKS)), min_size=1, max_size=7),
    select=st.sampled_from(list(SELECTIONS)),
    bs=st.integers(1, 3),
    rows=st.integers(2, 4),
    kept=st.integers(0, 7),
)
def test_random_chains(links, select, bs, rows, kept):
    """Row-wise or not, also with an intermediate value that is returned in full. In float64: a chain of products amplifies the
    other order of summation, which fp32's default tolerance does not allow for."""

    def fn(x, row):
        values = [x]
        for i, link in enumerate(links):
            values.append(LINKS[link](values[-1], i))
        out = SELECTIONS[select](values[-1], row)
        return (out, values[kept]) if kept < len(values) else out

    torch.manual_seed(7)
    if select in ("middle-two", "same-row", "arange-two", "gather-two") and (rows < 3 or bs < 2):
        rows, bs = 3, 2
    check(fn, torch.randn(bs, rows, K, dtype=torch.float64), torch.randint(0, rows, (bs,)))


LIMITS = {
    "maximum": lambda row, n: row.clamp(0, n),
    "minimum": lambda row, n: row.clamp(n, D - 1),
    "both": lambda row, n: row.clamp(n, n),
    "inner": lambda row, n: row.clamp(0, n).clamp_max(D - 1),
    "outer": lambda row, n: row.clamp(0, n).clamp(0, D - 1),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_that_are_known_at_run_time(name):
    """Of `row * D + clamp(row)`, the rows of other requests; only a constant limit further out rules them out."""

    def fn(x, row):
        flat = head(x).flatten(0, 1)
        return flat[torch.arange(BS) * D + LIMITS[name](row, row.max().item())]

    x, row = weights((BS, D, K))[0], torch.tensor([1, 0, 2])
    module, _ = capture(fn, x, row)
    result = hoist(module.graph)
    assert result.matches == (name == "outer")
    assert (name == "outer") or "the rows are not provably request * rows + row" in texts(result.refused)


def test_a_step_that_is_known_at_run_time():
    def fn(x, row):
        flat = head(x).flatten(0, 1)
        kind = {"dtype": torch.int64, "device": "cpu", "requires_grad": False}
        return flat[torch.ops.prims.iota(BS, start=0, step=row.max().item(), **kind) + row.clamp(0, D - 1)]

    module, _ = capture(fn, weights((BS, D, K))[0], torch.tensor([1, 0, 2]))
    assert not hoist(module.graph).matches
