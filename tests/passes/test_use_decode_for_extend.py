"""use_decode_for_extend alone: what it matches, what it must not, and that the results are those of the ragged op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import spec_ops
from spec_ops.backends import measured, select_backend
from spec_ops.ops.attention import HOST_PLAN_OPS, OPS
from spec_ops.passes import PassContext, PassResult, manager
from spec_ops.passes.analysis.graph import arg, attention_call, attention_calls, set_arg
from spec_ops.passes.use_decode_for_extend import MAX_CONSTANT_ELEMENTS, Constants, NotConstant, UseDecodeForExtend
from tests.helpers.pass_harness import capture, run_pass, switched_off, targets, texts, using_provider

BS, N = 3, 4
# Each makes [0, 4, 8, 12] as some code somewhere does.
UNIFORM: dict[str, Callable[[], torch.Tensor]] = {
    "arange": lambda: torch.arange(0, (BS + 1) * N, N, dtype=torch.int32),
    "scaled": lambda: torch.arange(BS + 1, dtype=torch.int32) * N,
    "reversed operands": lambda: (12 - (12 - N * torch.arange(BS + 1))).int(),
    "tensor factor": lambda: (torch.arange(BS + 1) * torch.tensor(N)).to(torch.int32),
    "shifted": lambda: ((torch.arange(1, BS + 2) - 1).add(1).sub(1) * N).int(),
    "cat": lambda: torch.cat([torch.zeros(1, dtype=torch.int32), torch.full((BS,), N).cumsum(0, dtype=torch.int32)]),
    "pad": lambda: torch.nn.functional.pad(torch.full((BS,), N).cumsum(0), (1, 0)).int(),
    "slice": lambda: torch.arange(0, 40, N, dtype=torch.int32)[: BS + 1].clone(),
    "literal": lambda: torch.tensor([0, 4, 8, 12], dtype=torch.int32),
    "accumulated": lambda: torch.full((BS + 1,), N, dtype=torch.int32).cumsum(0, dtype=torch.int32) - N,
}


def assigned(seq_lens: torch.Tensor) -> torch.Tensor:
    q_indptr = seq_lens.new_zeros(BS + 1)
    q_indptr[1:] = torch.cumsum(torch.full_like(seq_lens, N), 0)
    return q_indptr


def inputs(kind: str = "mha", total: int = BS * N, bs: int = BS, lens: tuple[int, ...] = (7, 2, 0)) -> dict[str, torch.Tensor]:
    """Lengths longer than, shorter than, and without the queries."""
    g = torch.Generator().manual_seed(0)
    cache = [torch.randn(8, 4, 2, 8, generator=g) for _ in range(2)] if kind == "mha" else [torch.randn(8, 4, 8, generator=g)]
    return {
        "q": torch.randn(total, 4, 8, generator=g),
        **dict(zip(["k_cache", "v_cache"] if kind == "mha" else ["kv_cache"], cache, strict=True)),
        "block_tables": torch.tensor([[1, 2], [3, 4], [0, 5]], dtype=torch.int32)[:bs],
        "seq_lens": torch.tensor(lens, dtype=torch.int32)[:bs],
    }


def extend(make: Callable[..., torch.Tensor], kind: str = "mha", max_q_len: int = N, **options: Any) -> Callable:
    if kind == "mla":
        options = {"kv_lora_rank": 6, "scale": 0.3, **options}

    def fn(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return getattr(spec_ops, f"{kind}_extend")(**tensors, q_indptr=make(), max_q_len=max_q_len, **options)

    return fn


def check(fn: Callable, tensors: dict[str, torch.Tensor], op: str) -> PassResult:
    """The pass matches once, calls `op` instead, and changes no bit of the result."""
    module, args = capture(fn, tensors)
    expected = module(*args)
    result = run_pass(UseDecodeForExtend(), module)
    assert result.matches == 1, texts(result.refused)
    assert OPS[op] in targets(module)
    assert OPS[op.replace("draft_", "")] not in targets(module)
    actual = module(*args)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    return result


@pytest.mark.parametrize("make", [pytest.param(f, id=name) for name, f in UNIFORM.items()])
def test_every_way_to_write_uniform_lengths(make):
    assert make().tolist() == [0, 4, 8, 12]
    result = check(extend(make), inputs(), "mha_draft_extend")
    assert result.refused == []
    assert "4 queries per request becomes mha_draft_extend" in texts(result.done)
    assert __file__ in result.done[0].where


def test_slice_assignment():
    def fn(tensors):
        return spec_ops.mha_extend(**tensors, q_indptr=assigned(tensors["seq_lens"]), max_q_len=N)

    check(fn, inputs(), "mha_draft_extend")


@pytest.mark.parametrize("options", [{}, {"window_left": 2}, {"softcap": 5.0}, {"max_seq_len": 8}, {"backend": "reference"}])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_options_go_along(kind, options):
    check(extend(UNIFORM["arange"], kind, **options), inputs(kind), f"{kind}_draft_extend")


def test_a_loose_bound_and_one_query_each():
    """`max_q_len` may be larger than every length; a single query per request is a decode step."""
    module, args = capture(extend(UNIFORM["arange"], max_q_len=9), inputs())
    expected = module(*args)[0]
    assert run_pass(UseDecodeForExtend(), module).matches == 1
    # The reference pads to max_q_len, and another matrix size may sum in another order.
    torch.testing.assert_close(module(*args)[0], expected, rtol=1e-6, atol=1e-6)
    check(extend(lambda: torch.arange(BS + 1, dtype=torch.int32), max_q_len=1), inputs(total=BS), "mha_draft_extend")


def test_queries_that_are_a_strided_view():
    tensors = inputs()
    tensors["q"] = torch.randn(BS * N, 8, 8)[:, ::2]
    check(extend(UNIFORM["arange"]), tensors, "mha_draft_extend")


def test_two_calls_share_one_q_indptr():
    def fn(tensors):
        q_indptr = UNIFORM["cat"]()
        first = spec_ops.mha_extend(**tensors, q_indptr=q_indptr, max_q_len=N)
        return spec_ops.mha_extend(**{**tensors, "q": first}, q_indptr=q_indptr, max_q_len=N), q_indptr

    module, args = capture(fn, inputs())
    expected = module(*args)
    assert run_pass(UseDecodeForExtend(), module).matches == 2
    assert all(torch.equal(a, e) for a, e in zip(module(*args), expected, strict=True))


def test_off(monkeypatch):
    switched_off(UseDecodeForExtend(), capture(extend(UNIFORM["arange"]), inputs())[0], monkeypatch)


def literal(*entries: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(entries, dtype=torch.int32)


@pytest.mark.parametrize(
    ("fn", "tensors", "reason"),
    [
        pytest.param(extend(literal(0, 3, 7, 12), max_q_len=5), inputs(), "q_indptr is [0, 3, 7, 12]", id="one length differs"),
        pytest.param(
            extend(literal(0, 4, 8, 12), max_q_len=5), inputs(total=15), "not uniformly 5", id="stride is not rows per request"
        ),
        pytest.param(extend(literal(0, 4, 8, 12)), inputs(total=14), "14 query rows are not one", id="padded rows"),
        pytest.param(extend(literal(0, 4, 8, 8)), inputs(), "not uniformly 4", id="an empty request"),
        pytest.param(extend(literal(0, 65), max_q_len=65), inputs(total=65, bs=1), "65 queries per request", id="a prefill"),
    ],
)
def test_near_misses(fn, tensors, reason):
    module, args = capture(fn, tensors)
    expected = module(*args)
    before = str(module.graph)
    result = run_pass(UseDecodeForExtend(), module)
    assert result.matches == 0
    assert reason in texts(result.refused)
    assert str(module.graph) == before
    assert torch.equal(module(*args)[0], expected[0])


def test_lengths_that_the_graph_does_not_know():
    """As a graph input, computed from one, or through floating point."""

    def given_indptr(tensors, q_indptr):
        return spec_ops.mha_extend(**tensors, q_indptr=q_indptr, max_q_len=N)

    def from_lengths(tensors, lengths):
        return given_indptr(tensors, torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)))

    def through_floats(tensors, _):
        return given_indptr(tensors, (torch.arange(BS + 1, dtype=torch.float32) * 4.0).int())

    for fn, other, reason in (
        (given_indptr, UNIFORM["arange"](), "depends on the graph's input"),
        (from_lengths, torch.full((BS,), N, dtype=torch.int32), "depends on the graph's input"),
        (through_floats, torch.zeros(1), "is not integer"),
    ):
        result = run_pass(UseDecodeForExtend(), capture(fn, inputs(), other)[0])
        assert (result.matches, reason in texts(result.refused)) == (0, True), texts(result.refused)


def test_bound_below_the_lengths():
    module, _ = capture(extend(UNIFORM["arange"]), inputs())
    set_arg(next(iter(attention_calls(module.graph))), "max_q_len", N - 1)
    result = run_pass(UseDecodeForExtend(), module)
    assert (result.matches, "max_q_len 3 is less than the 4" in texts(result.refused)) == (0, True)


def test_measured_times_count_before_ranks(monkeypatch):
    """Of two backends that run both steps, the selection takes the one that was faster, whatever its rank."""
    names = {"first": 2.0, "provider": 1.0}
    row = measured.Times(90, "mha", "causal", "float32", 2, 8, N, 5, names, names)
    monkeypatch.setattr(measured, "table", lambda: (row,))
    with using_provider("first", rank=1), using_provider(rank=5):
        module, _ = capture(extend(UNIFORM["arange"]), inputs())
        result = run_pass(UseDecodeForExtend(), module, arch=90)
        assert result.matches == 1, texts(result.refused)
        (call,) = attention_calls(module.graph)
        meta = attention_call(call).meta()
        assert select_backend(meta, 90).backend.name == "provider"


def test_backends_whose_package_is_missing_do_not_count():
    with using_provider(rank=1, kernels=ONLY_EXTEND, requires=("no_such_module", "provider")):
        module, _ = capture(extend(UNIFORM["arange"]), inputs())
        assert "ranks after provider" in texts(run_pass(UseDecodeForExtend(), module, arch=90).refused)  # a plan for elsewhere
        assert run_pass(UseDecodeForExtend(), module).matches == 1


ONLY_EXTEND = {"mha_extend": "spec_ops.ops.reference.attention:attention"}


def test_kernels_that_are_not_there_or_worse():
    decode = {"mha_draft_extend": "spec_ops.ops.reference.attention:attention"}
    with using_provider(kernels=ONLY_EXTEND):
        for name, reason in (("provider", "provider has no kernel for mha_draft_extend"), ("auto", "ranks after provider")):
            result = run_pass(UseDecodeForExtend(), capture(extend(UNIFORM["arange"], backend=name), inputs())[0])
            assert (result.matches, reason in texts(result.refused)) == (0, True), texts(result.refused)
    with using_provider(kernels={**ONLY_EXTEND, **decode}, max_q_len=N - 1):
        module, _ = capture(extend(UNIFORM["arange"]), inputs())
        set_arg(next(iter(attention_calls(module.graph))), "backend", "provider")
        result = run_pass(UseDecodeForExtend(), module)
        assert (result.matches, "supports at most 3 queries" in texts(result.refused)) == (0, True)
    with using_provider(kernels=decode):  # the kernel that auto now prefers for the decode op
        check(extend(UNIFORM["arange"]), inputs(), "mha_draft_extend")


def test_a_host_planned_backend_keeps_its_overload():
    with using_provider(host_plan=True):
        module, args = capture(extend(UNIFORM["arange"], backend="provider"), inputs())
        expected = module(*args)
        assert run_pass(UseDecodeForExtend(), module).matches == 1
        assert HOST_PLAN_OPS["mha_draft_extend"] in targets(module)
        assert torch.equal(module(*args)[0], expected[0])


def constant_node(module: fx.GraphModule) -> fx.Node:
    return next(node for node in module.graph.nodes if node.op == "get_attr")


def test_attributes_that_are_no_constants():
    """A buffer may be replaced between calls; a constant that something writes to is none."""
    module, _ = capture(extend(UNIFORM["literal"]), inputs())
    node = constant_node(module)
    module.register_buffer("q_indptr", getattr(module, node.target))
    node.target = "q_indptr"
    result = run_pass(UseDecodeForExtend(), module)
    assert (result.matches, "may change between calls" in texts(result.refused)) == (0, True)

    module, _ = capture(extend(UNIFORM["literal"]), inputs())
    node = constant_node(module)
    with module.graph.inserting_after(node):
        module.graph.call_function(torch.ops.aten.add_.Scalar, (node, 1))
    result = run_pass(UseDecodeForExtend(), module)
    assert (result.matches, "may change" in texts(result.refused)) == (0, True)

    module, _ = capture(extend(UNIFORM["literal"]), inputs())
    delattr(module, constant_node(module).target)
    module.graph.owning_module = None  # type: ignore[assignment]
    result = PassResult("")
    UseDecodeForExtend().run(module.graph, PassContext(), result)
    assert (result.matches, "cannot be reached" in texts(result.refused)) == (0, True)


@functools.cache
def literal_graph() -> tuple[fx.GraphModule, list[torch.Tensor]]:
    return capture(extend(literal(0, 4, 8, 12), max_q_len=12), inputs())


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.permutations([4, 4, 4]), st.lists(st.integers(0, 6), min_size=3, max_size=3)))
def test_matches_exactly_the_uniform(lengths):
    """Any lengths that 12 rows can have: rewritten if and only if all are 4, and equal either way."""
    if sum(lengths) > BS * N:
        return
    module, args = literal_graph()
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    constant = next(node for node in module.graph.nodes if node.op == "get_attr")
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule({str(constant.target): ends}, graph)
    expected = copy(*args)
    assert run_pass(UseDecodeForExtend(), copy).matches == int(list(lengths) == [N] * BS)
    torch.testing.assert_close(copy(*args), expected, rtol=1e-6, atol=1e-6)


small = st.integers(-5, 9)
STEPS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "add": lambda x, c: x + c,
    "sub": lambda x, c: x - c,
    "rsub": lambda x, c: c - x,
    "mul": lambda x, c: c * x,
    "add tensor": lambda x, c: x.add(torch.full((), c, dtype=torch.int64), alpha=2),
    "int32": lambda x, c: x.to(torch.int32),
    "int64": lambda x, c: x.long(),
    "cumsum": lambda x, c: x.cumsum(0),
    "pad": lambda x, c: torch.nn.functional.pad(x, (1, 0), value=c),
    "cat": lambda x, c: torch.cat([x.new_zeros(1), x, x]),
    "slice": lambda x, c: x[1 :: max(c, 1)],
    "clone": lambda x, c: x.clone(),
    "plus itself": lambda x, c: x + x,
    "like": lambda x, c: torch.full_like(x, c),
    "view": lambda x, c: x[None].expand(2, -1).reshape(-1),
    "overflow": lambda x, c: x * (2**31 - 1 - c),
}
program = st.tuples(
    st.tuples(st.integers(-4, 4), st.integers(0, 9), st.integers(1, 4), st.booleans()),
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), small), max_size=7),
)


def evaluate(spec) -> torch.Tensor:
    (start, length, step, wide), steps = spec
    x = torch.arange(start, start + length * step, step, dtype=torch.int64 if wide else torch.int32)
    for name, c in steps:
        x = STEPS[name](x, c)
    return x


@settings(max_examples=80, deadline=None)
@given(program)
def test_constants_equal_the_graph(spec):
    """The interpreter against running the program, on traced graphs with Inductor's decompositions."""
    expected = evaluate(spec)
    module = make_fx(lambda: evaluate(spec), decomposition_table=select_decomp_table(), tracing_mode="fake")()
    actual = Constants()[module.graph.output_node().args[0]]
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)
    open_module = make_fx(lambda x: evaluate(spec) + x, decomposition_table=select_decomp_table(), tracing_mode="fake")(
        torch.ones(1, dtype=torch.int32)
    )
    with pytest.raises(NotConstant, match="graph's input"):
        _ = Constants()[open_module.graph.output_node().args[0]]


def test_large_constants_are_not_materialized():
    module = make_fx(lambda: torch.arange(MAX_CONSTANT_ELEMENTS + 1)[:4], tracing_mode="fake")()
    with pytest.raises(NotConstant, match="more than"):
        _ = Constants()[module.graph.output_node().args[0]]


def test_under_inductor(monkeypatch):
    """Where it runs in earnest: after Inductor's own passes, with strides kept for the kernel."""
    seen: list[Any] = []

    class Spy(UseDecodeForExtend):
        def run(self, graph, context, result):
            super().run(graph, context, result)
            seen.extend(
                "eager_input_vals" in n.meta
                for n in attention_calls(graph)
                if arg(n, "q").target is torch.ops.aten.view.default
            )

    monkeypatch.setattr(manager, "PASSES", (Spy(),))
    torch._dynamo.reset()
    fn, tensors = extend(UNIFORM["pad"]), inputs()
    compiled = spec_ops.compile(fn, mode="default", options={"force_disable_caches": True})
    assert torch.equal(compiled(tensors), fn(tensors))
    assert seen == [True]
