"""`hoist_row_select` through attention calls: drafts with a selection after them, masks and lengths of what is left, and what
keeps a call whole."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from spec_ops import ops
from spec_ops.models import PagedAttention, PagedKVCache
from spec_ops.passes import PassResult
from spec_ops.passes.analysis.graph import ATTENTION_OPS, arg, attention_calls, value
from tests.decoding.test_generate import VOCAB, make_draft, make_target
from tests.helpers.hoist_harness import (
    BS,
    SELECTIONS,
    D,
    K,
    check,
    hoist,
    product_rows,
    query_lengths,
    rows_by_arange,
    rows_by_gather,
    trace,
    weights,
)
from tests.helpers.pairs import pairwise
from tests.helpers.pass_harness import capture, using_provider


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


@dataclass
class Compiled:
    """What a module gives and leaves in its cache, by the graph that Inductor would see and by what the pass makes of it."""

    want: Any
    got: Any
    want_caches: list[torch.Tensor]
    got_caches: list[torch.Tensor]
    before: fx.Graph
    after: fx.Graph
    result: PassResult


def run_compiled(module: Extend, *args: torch.Tensor) -> Compiled:
    """Traced once, which takes most of the time; both runs begin with the same cache."""
    captured: list[fx.GraphModule] = []
    current: list[fx.GraphModule] = []

    def compiler(traced, inputs):
        captured.append(traced)
        return make_boxed_func(lambda *given: current[0](*given))

    backend = aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )

    def lowered(graph, inputs):
        call = backend(graph, inputs)
        current[:] = captured
        return call

    start = [tensor.clone() for tensor in module.cache.tensors()]
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=lowered, fullgraph=True, dynamic=False)
    with torch.no_grad():
        want = compiled(*args)
        want_caches = [tensor.clone() for tensor in module.cache.tensors()]
        (traced,) = captured
        passed = fx.GraphModule(traced, copy.deepcopy(traced.graph))
        result = hoist(passed.graph)
        passed.recompile()
        for tensor, contents in zip(module.cache.tensors(), start, strict=True):
            tensor.copy_(contents)
        current[:] = [passed]
        got = compiled(*args)
        assert captured == [traced]
    return Compiled(want, got, want_caches, list(module.cache.tensors()), traced.graph, passed.graph, result)


def extend_inputs(hidden_size: int, bs: int = BS):
    torch.manual_seed(4)
    lens = torch.tensor([9, 0, 4, 2][:bs], dtype=torch.int32)  # 0: a padded request; 2: fewer than the queries
    slots = (torch.arange(bs)[:, None] * 16 + lens[:, None] - D + torch.arange(D)).masked_fill(lens[:, None] < D, -1)
    row = torch.tensor([2, 0, 3, 1][:bs])
    return torch.randint(0, VOCAB, (bs, D)), torch.randn(bs, D, hidden_size), lens, row, slots


# Per draft layer kind: products whose rows shrink with the query side (o, 2 of the MLP, head; MLA: and q, W_UK, W_UV). GQA's
# queries come from one product with keys and values, which all rows need.
DRAFTS = [
    pytest.param(False, "eagle3", 1, 4, id="eagle3-gqa"),
    pytest.param(True, "mtp", 1, 7, id="mtp-mla"),
    pytest.param(False, "standalone", 2, 4, id="standalone-gqa"),
    pytest.param(True, "standalone", 2, 7, id="standalone-mla"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mla", "kind", "layers", "products", "bs"),
    [pytest.param(*draft.values, bs, id=f"{draft.id}-{bs}") for draft, bs in zip(DRAFTS, (1, 3, 3, 1), strict=True)],
)
def test_extend_computes_the_last_layers_queries_and_head_on_one_row(mla, kind, layers, products, bs):
    module = Extend(make_draft(kind, make_target(mla), layers=layers), rows_by_gather).eval()
    run = run_compiled(module, *extend_inputs(module.draft.config.hidden_size, bs))
    before, after, result = run.before, run.after, run.result
    torch.testing.assert_close(run.got, run.want)
    for cache, expected in zip(run.got_caches, run.want_caches, strict=True):
        assert torch.equal(cache, expected)
    assert result.matches == 1
    assert [n.text for n in result.done] == [f"1 of 4 rows per request in 1 attention call and {products} matrix products"]
    assert "hoist_harness.py" in result.done[0].where
    assert not result.refused
    assert query_lengths(before) == [D] * layers
    assert query_lengths(after) == [D] * (layers - 1) + [1]  # earlier layers feed later keys and values
    assert product_rows(before)[-1] == bs * D
    assert product_rows(after)[-1] == bs
    assert sum(product_rows(before)) - sum(product_rows(after)) == products * bs * (D - 1)
    assert len(product_rows(before)) == len(product_rows(after))


@pytest.mark.parametrize("select", SELECTIONS)
def test_every_form_of_selection(select):
    module, inputs = Verify(False, D, SELECTIONS[select]), verify_inputs(D, False)
    graph, result = check(module, *inputs)
    assert result.matches == 1
    rows = module(*inputs).numel() // 11
    assert product_rows(graph)[-1] == rows
    assert query_lengths(graph) == [rows // 4]


@pytest.mark.parametrize("select", ["arange-two", "flat"])
def test_forms_of_selection_after_a_draft(select):
    module = Extend(make_draft("eagle3", make_target(False)), SELECTIONS[select]).eval()
    eager, inputs = copy.deepcopy(module), extend_inputs(64)
    with torch.no_grad():
        want = eager(*inputs)
    run = run_compiled(module, *inputs)
    torch.testing.assert_close(run.got, want)
    assert run.result.matches == 1
    rows = want.numel() // want.shape[-1]
    assert product_rows(run.after)[-1] == rows
    assert query_lengths(run.after) == [rows // BS]


def test_selections_by_the_same_index_move_together():
    module = Extend(make_draft("mtp", make_target(False)), rows_by_arange, twice=True).eval()
    run = run_compiled(module, *extend_inputs(64))
    torch.testing.assert_close(run.got, run.want)
    assert run.result.matches == 1
    assert query_lengths(run.after) == [1]


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


@pairwise(mla=[False, True], tree=[False, True], options=OPTIONS, select=["gather", "gather-two", "last", "middle-two"])
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
    run = run_compiled(AppendsLater(make_draft("eagle3", make_target(False)), rows_by_gather).eval(), *extend_inputs(64))
    torch.testing.assert_close(run.got, run.want)
    for cache, expected in zip(run.got_caches, run.want_caches, strict=True):
        assert torch.equal(cache, expected)
    assert query_lengths(run.after) == [D]
    assert product_rows(run.after)[-1] == BS
    assert "would copy the cache" in run.result.done[0].text


def test_interleaved_views_of_a_cache_are_one_input():
    """Torch makes one input of them, which attention reads through `as_strided`."""
    wq, wo = weights((K, HEADS * DIM), (HEADS * DIM, 11))

    def fn(keys, values, x, row, slots):
        table = torch.arange(24, dtype=torch.int32).reshape(4, 6)
        q = (x @ wq).unflatten(-1, (HEADS, DIM))
        out = ops.mha_target_verify(q, keys, values, table, LENGTHS).flatten(-2)
        ops.append_kv(keys, values, x[:, :2, :DIM], x[:, 1:3, :DIM], slots)
        return rows_by_gather(out @ wo, row)

    pool = torch.randn(24, 2, PAGE, 2, DIM, generator=torch.Generator().manual_seed(7))
    x, row, _ = verify_inputs(5, False)
    module, _ = capture(fn, *pool.unbind(1), x, row, row)
    result = hoist(module.graph)
    (call,) = attention_calls(module.graph)
    assert arg(call, "k_cache").target is torch.ops.aten.as_strided.default
    assert query_lengths(module.graph) == [5]
    assert product_rows(module.graph)[-1] == 4
    assert "would copy the cache" in result.done[0].text


@pytest.mark.parametrize(("select", "asked"), [("gather", (1, False)), ("gather-two", (2, True)), ("middle-two", (2, False))])
def test_the_backend_must_support_fewer_queries(select, asked):
    def fewer(meta, arch):
        return f"needs 5 queries, not {meta.q_len} (mask: {meta.tree_mask})" if meta.q_len < 5 else None

    inputs = verify_inputs(5, False)
    for constraint, rows in ((fewer, 5), (None, asked[0])):
        with using_provider(constraint=constraint):
            graph, result = check(Verify(False, 5, SELECTIONS[select], backend="provider"), *inputs)
        assert result.matches == 1
        assert query_lengths(graph) == [rows]
        assert product_rows(graph) == ([20, 4 * asked[0]] if constraint else [4 * asked[0]] * 2)
        reason = "provider needs 5 queries, not {} (mask: {})".format(*asked)
        assert (reason in result.done[0].text) == (constraint is not None)


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
