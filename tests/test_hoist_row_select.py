"""`hoist_row_select`: which work shrinks to the selected rows, which must not, and that no number changes.

Results are compared with an fp32 tolerance where a matrix product changed its number of rows: another tiling may sum in
another order. What is only pointwise stays exact.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from spec_ops import ops
from spec_ops.models import PagedAttention, PagedKVCache
from spec_ops.passes import PassManager, manager
from spec_ops.passes.base import PassContext, PassResult
from spec_ops.passes.graph import ATTENTION_OPS, arg, attention_calls, value
from spec_ops.passes.hoist_row_select import HoistRowSelect
from tests.test_generate import VOCAB, make_draft, make_target

aten = torch.ops.aten
BS, D, K = 3, 4, 16


def hoist(graph: torch.fx.Graph) -> PassResult:
    result = PassResult(HoistRowSelect.name)
    HoistRowSelect().run(graph, PassContext(), result)
    graph.eliminate_dead_code()
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


class Extend(torch.nn.Module):
    """A draft extend with logits of all rows, and the selection after them."""

    def __init__(self, draft, select, step: str = "draft_extend", twice: bool = False) -> None:
        super().__init__()
        self.draft, self.select, self.step, self.twice = draft, select, step, twice
        self.cache = PagedKVCache(draft.config, 16, 4, device="cpu", dtype=torch.float32)
        g = torch.Generator().manual_seed(3)
        for tensor in self.cache.tensors():
            tensor.normal_(generator=g)

    def forward(self, tokens, hidden, lens, row, slots):
        table = torch.arange(16, dtype=torch.int32).reshape(4, 4)[: lens.shape[0]]
        positions = (lens[:, None] - D + torch.arange(D)).clamp(min=0)
        attention = PagedAttention(self.cache, self.step, table, lens, slots)
        hidden = self.draft(tokens, hidden, positions, attention)
        selected = self.select(self.draft.logits(hidden), row)
        return (selected, self.select(hidden, row)) if self.twice else selected


def run_compiled(module, *args, on: bool):
    """`module(*args)` captured as Inductor would, with the pass or without; its result, graph and report."""
    captured = []

    def compiler(traced, inputs):
        captured.append((traced.graph, hoist(traced.graph) if on else None))
        traced.recompile()
        return make_boxed_func(traced.forward)

    backend = aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(*args)
    return out, *captured[0]


def extend_inputs(hidden_size: int, bs: int = BS):
    torch.manual_seed(4)
    lens = torch.tensor([9, 0, 4, 2][:bs], dtype=torch.int32)  # 0: a padded request; 2: fewer than the queries
    slots = (torch.arange(bs)[:, None] * 16 + lens[:, None] - D + torch.arange(D)).masked_fill(lens[:, None] < D, -1)
    row = torch.tensor([2, 0, 3, 1][:bs])
    return torch.randint(0, VOCAB, (bs, D)), torch.randn(bs, D, hidden_size), lens, row, slots


# Per draft layer kind: products whose rows shrink with the query side (q, o, 3 of the MLP, head; MLA: and W_UK, W_UV).
DRAFTS = [
    pytest.param(False, "eagle3", 1, 6, id="eagle3-gqa"),
    pytest.param(True, "mtp", 1, 8, id="mtp-mla"),
    pytest.param(False, "standalone", 2, 6, id="standalone-gqa"),
    pytest.param(True, "standalone", 2, 8, id="standalone-mla"),
]


@pytest.mark.parametrize("bs", [1, 3])
@pytest.mark.parametrize(("mla", "kind", "layers", "products"), DRAFTS)
def test_extend_computes_the_last_layers_queries_and_head_on_one_row(mla, kind, layers, products, bs):
    plain = Extend(make_draft(kind, make_target(mla)), rows_by_gather).eval()
    passed = copy.deepcopy(plain)
    inputs = extend_inputs(plain.draft.config.hidden_size, bs)
    want, before, _ = run_compiled(plain, *inputs, on=False)
    got, after, result = run_compiled(passed, *inputs, on=True)
    torch.testing.assert_close(got, want)
    for cache, expected in zip(passed.cache.tensors(), plain.cache.tensors(), strict=True):
        assert torch.equal(cache, expected)
    assert result.matches == 1
    assert [n.text for n in result.done] == [f"1 of 4 rows per request in 1 attention call and {products} matrix products"]
    assert "test_hoist_row_select.py" in result.done[0].where
    assert not result.refused
    assert query_lengths(before) == [D] * layers
    assert query_lengths(after) == [D] * (layers - 1) + [1]  # earlier layers feed later keys and values
    assert product_rows(before)[-1] == bs * D
    assert product_rows(after)[-1] == bs
    assert sum(product_rows(before)) - sum(product_rows(after)) == products * bs * (D - 1)
    assert len(product_rows(before)) == len(product_rows(after))


@pytest.mark.parametrize("select", SELECTIONS)
def test_every_form_of_selection(select):
    plain = Extend(make_draft("eagle3", make_target(False)), SELECTIONS[select]).eval()
    passed = copy.deepcopy(plain)
    inputs = extend_inputs(64)
    want, _, _ = run_compiled(plain, *inputs, on=False)
    got, graph, result = run_compiled(passed, *inputs, on=True)
    torch.testing.assert_close(got, want)
    assert result.matches == 1
    rows = want.numel() // want.shape[-1]
    assert product_rows(graph)[-1] == rows
    assert query_lengths(graph) == [rows // BS]


def test_selections_by_the_same_index_move_together():
    plain = Extend(make_draft("mtp", make_target(False)), rows_by_arange, twice=True).eval()
    passed = copy.deepcopy(plain)
    inputs = extend_inputs(64)
    want, _, _ = run_compiled(plain, *inputs, on=False)
    got, graph, result = run_compiled(passed, *inputs, on=True)
    torch.testing.assert_close(got, want)
    assert result.matches == 1
    assert query_lengths(graph) == [1]


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


def test_symbolic_shapes_are_left_alone(x):
    def fn(x, row, weight):
        return rows_by_gather(x @ weight, row)

    module = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="symbolic")(x, ROW, HEAD)
    assert hoist(module.graph).matches == 0


HEADS, DIM, PAGE = 4, 8, 4
LENGTHS = torch.tensor([9, 0, 1, 6], dtype=torch.int32)


class Verify(torch.nn.Module):
    """Query projection, attention over a filled cache, output projection, selection."""

    def __init__(self, mla: bool, q_len: int, select, **options) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mla, self.q_len, self.select, self.options = mla, q_len, select, options
        self.step = options.pop("step", "target_verify")
        self.wq, self.wo = weights((K, HEADS * DIM), (HEADS * (DIM - 2 if mla else DIM), 11))
        shape = (24, PAGE, DIM) if mla else (24, PAGE, 2, DIM)
        self.keys, self.values = torch.randn(shape), torch.randn(shape)
        self.table = torch.randperm(24).reshape(4, 6).to(torch.int32)

    def forward(self, x, row, lens, *mask):
        q = (x @ self.wq).unflatten(-1, (HEADS, DIM))
        options = dict(self.options)
        if mask:
            options |= {"tree_mask": mask[0], "mask_len": 7}
        if self.mla:
            op = getattr(ops, f"mla_{self.step}")
            out = op(q, self.keys, DIM - 2, self.table, lens, scale=0.3, **options)
        else:
            out = getattr(ops, f"mha_{self.step}")(q, self.keys, self.values, self.table, lens, **options)
        return self.select(out.flatten(-2) @ self.wo, row)


def verify_inputs(q_len: int, tree: bool):
    torch.manual_seed(6)
    x, row = torch.randn(4, q_len, K), torch.randint(0, q_len, (4,))
    if not tree:
        return x, row, LENGTHS
    ancestors = torch.randint(0, 2**q_len, (4, q_len)) & ((1 << torch.arange(q_len)) - 1)
    return x, row, LENGTHS, ancestors | (1 << torch.arange(q_len))


OPTIONS = {
    "plain": {},
    "window": {"window_left": 2},
    "window of self": {"window_left": 0},
    "sinks": {"sinks": torch.randn(HEADS)},
    "all": {"window_left": 3, "sinks": torch.randn(HEADS), "softcap": 5.0, "max_seq_len": 20, "step": "draft_decode"},
}


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("tree", [False, True], ids=["causal", "tree"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("select", ["gather", "gather-two", "last", "middle-two"])
def test_a_query_sees_what_it_saw(mla, tree, options, select):
    """Also with fewer keys than queries, and none: there the result is that of zeros."""
    module = Verify(mla, 5, SELECTIONS[select], **OPTIONS[options])
    inputs = verify_inputs(5, tree)
    graph, result = check(module, *inputs)
    assert result.matches == 1
    rows = 2 if "two" in select else 1
    assert query_lengths(graph) == [rows]
    call = next(attention_calls(graph))
    assert value(arg(call, "seq_lens")).dtype == torch.int32
    assert (arg(call, "tree_mask") is not None) == (tree or select == "gather-two")
    assert arg(call, "mask_len") == (7 if tree else 5 if select == "gather-two" else 0)


@pytest.mark.parametrize("q_len", [63, 64, 65])
def test_widest_causal_mask(q_len):
    def select(x, row):
        index = torch.stack([torch.full_like(row, q_len - 1), torch.full_like(row, q_len - 2)], 1)
        return x[torch.arange(4)[:, None], index]

    module = Verify(False, q_len, select)
    module.table = torch.arange(24, dtype=torch.int32).repeat(4, 1)
    row = torch.tensor([0, 1, 2, 3])
    lens = torch.tensor([q_len + 9, 0, 30, q_len], dtype=torch.int32)
    graph, result = check(module, torch.randn(4, q_len, K), row, lens)
    assert result.matches == 1
    assert product_rows(graph)[-1] == 8
    assert query_lengths(graph) == [2 if q_len <= 64 else 65]
    assert ("do not fit a tree mask" in result.done[0].text) == (q_len > 64)


def test_lengths_of_all_queries_keep_the_call_whole():
    module = Verify(False, 5, rows_by_gather, seq_lens_cpu=LENGTHS)
    graph, result = check(module, *verify_inputs(5, False))
    assert query_lengths(graph) == [5]
    assert product_rows(graph) == [20, 4]
    assert "seq_lens_cpu" in result.done[0].text


class AppendsLater(Extend):
    """A second append to the cache, between the attention call and the selection."""

    def forward(self, tokens, hidden, lens, row, slots):
        table = torch.arange(16, dtype=torch.int32).reshape(4, 4)[: lens.shape[0]]
        attention = PagedAttention(self.cache, self.step, table, lens, slots)
        hidden = self.draft(tokens, hidden, torch.arange(D).expand(BS, -1), attention)
        logits = self.draft.logits(hidden)
        k, v = self.cache.layer(0)
        ops.append_kv(k, v, k[0, :1] * 2, v[0, :1] * 2, row[:1])
        return self.select(logits, row)


def test_no_call_moves_past_a_write_to_its_cache():
    plain = AppendsLater(make_draft("eagle3", make_target(False)), rows_by_gather).eval()
    passed = copy.deepcopy(plain)
    inputs = extend_inputs(64)
    want, _, _ = run_compiled(plain, *inputs, on=False)
    got, graph, result = run_compiled(passed, *inputs, on=True)
    torch.testing.assert_close(got, want)
    for cache, expected in zip(passed.cache.tensors(), plain.cache.tensors(), strict=True):
        assert torch.equal(cache, expected)
    assert query_lengths(graph) == [D]
    assert product_rows(graph)[-1] == BS
    assert "would copy the cache" in result.done[0].text


def test_padded_requests_give_zeros():
    module = Verify(False, 5, rows_by_gather)
    traced = trace(module, *verify_inputs(5, False))
    hoist(traced.graph)
    traced.recompile()
    assert any(n.target in ATTENTION_OPS and query_lengths(traced.graph) == [1] for n in traced.graph.nodes)
    for row in range(5):
        x, _, _ = verify_inputs(5, False)
        out = traced(x, torch.full((4,), row), torch.zeros(4, dtype=torch.int32))
        assert torch.equal(out, torch.zeros_like(out))


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


@settings(max_examples=120, deadline=None, derandomize=True)
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
