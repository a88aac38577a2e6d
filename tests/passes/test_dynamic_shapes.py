"""Sizes that vary: symbols stay symbols in the ops and the passes, which make no guard of their own; export and AOTInductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim

import spec_ops
from spec_ops.passes import PassManager, explain
from spec_ops.passes.analysis import counts
from tests.examples.test_naive_round import make_round, naive_round
from tests.helpers.pass_harness import compile_interpreted, texts, using_provider
from tests.passes.test_compile import has_cpp_compiler

LENGTHS = (5, 6, 7, 9, 11, 12, 13, 14, 15, 10)  # more than Dynamo's limit of 8 recompilations; no other size is one of them
PAGES, PAGE, KV_HEADS, DIM, HEADS, BS = 20, 4, 2, 16, 8, 3
CACHE = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM, generator=torch.Generator().manual_seed(0))
torch._dynamo.mark_static(CACHE)  # with `dynamic=True` every other tensor's sizes are symbols, also the heads and the page size
TABLE = torch.arange(18, dtype=torch.int32).reshape(BS, 6)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        yield


@pytest.fixture
def guards(monkeypatch) -> list[int]:
    """How many guards on sizes the passes made, for every graph."""
    made: list[int] = []
    run = PassManager.__call__

    def counting(self: PassManager, graph: torch.fx.Graph) -> None:
        shapes = next(
            size.node.shape_env
            for node in graph.nodes
            if isinstance(fake := node.meta.get("val"), torch.Tensor)
            for size in fake.shape
            if isinstance(size, torch.SymInt)
        )
        before = len(shapes.guards)
        run(self, graph)
        made.append(len(shapes.guards) - before)

    monkeypatch.setattr(PassManager, "__call__", counting)
    return made


def extend_call(n: int) -> tuple[Any, ...]:
    """`n` queries for each request."""
    q = torch.randn(BS * n, HEADS, DIM, generator=torch.Generator().manual_seed(n))
    lens, q_indptr = torch.full((BS,), n + 2, dtype=torch.int32), torch.arange(BS + 1, dtype=torch.int32) * n
    return q, CACHE[0].clone(), CACHE[1].clone(), TABLE, lens, q_indptr, n


def verify_call(n: int) -> tuple[Any, ...]:
    q, k_cache, v_cache, table, lens, *_ = extend_call(n)
    mask = (torch.ones(BS, n, dtype=torch.int64) << torch.arange(n)).contiguous()
    return q.unflatten(0, (BS, n)), k_cache, v_cache, table, lens, mask


def extend(q, k_cache, v_cache, table, lens, q_indptr, n):
    return spec_ops.mha_extend(q, k_cache, v_cache, table, lens, q_indptr, n)


def extend_on_a_static_cache(q, k_cache, v_cache, table, lens, q_indptr, n):
    q = q.view(-1, HEADS, DIM)
    return spec_ops.mha_extend(q, CACHE[0], CACHE[1], table, lens, q_indptr, n)


def extend_by_a_read(q, k_cache, v_cache, table, lens, q_indptr, n):
    longest = (q_indptr[1:] - q_indptr[:-1]).max().item()
    return spec_ops.mha_extend(q, CACHE[0], CACHE[1], table, lens, q_indptr, longest, max_seq_len=lens.max().item())


def verify(q, k_cache, v_cache, table, lens, mask):
    return spec_ops.mha_target_verify(q, k_cache, v_cache, table, lens)


def verify_tree(q, k_cache, v_cache, table, lens, mask):
    return spec_ops.mha_target_verify(q, k_cache, v_cache, table, lens, tree_mask=mask)


@pytest.mark.parametrize(
    ("fn", "call", "chosen"),
    [
        pytest.param(extend, extend_call, False, id="extend"),
        pytest.param(extend_on_a_static_cache, extend_call, True, id="extend, heads and pages known"),
        pytest.param(extend_by_a_read, extend_call, False, id="extend, max_q_len and max_seq_len read from the device"),
        pytest.param(verify, verify_call, False, id="verify"),
        pytest.param(verify_tree, verify_call, False, id="tree"),
    ],
)
def test_one_graph_for_all_lengths(fn, call, chosen, guards):
    """Under `dynamic=True`. What the passes cannot choose they leave to the call, and say so."""
    compiled, reports = compile_interpreted(fn, dynamic=True)
    compiled(*call(LENGTHS[0]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in LENGTHS:
            torch.testing.assert_close(compiled(*call(n)), fn(*call(n)), rtol=1e-5, atol=1e-5)
    assert set(guards) == {0}
    (result,) = (result for result in reports[-1].results if result.name == "select_backends")
    assert result.matches == int(chosen)
    assert ("is dynamic" in texts(result.refused) and "chosen when the call runs" in texts(result.refused)) != chosen


@pytest.mark.parametrize("bounded", [False, True])
def test_a_backend_for_few_queries_needs_a_bound(bounded):
    """One that the program states: the passes make none."""

    def fn(q, k_cache, v_cache, table, lens, q_indptr, n):
        if bounded:
            torch._check(n <= 32)
        return extend_on_a_static_cache(q, k_cache, v_cache, table, lens, q_indptr, n)

    with using_provider(max_q_len=32):
        compiled, reports = compile_interpreted(fn, dynamic=True)
        compiled(*extend_call(LENGTHS[0]))
    (kernel,) = reports[-1].kernels()
    assert kernel.startswith("mha_extend: provider" if bounded else "mha_extend: reference")
    assert ("provider supports at most 32 queries per request, not any number of them" in kernel) != bounded


@pytest.mark.slow
def test_a_round_of_any_batch_size(guards):
    """The naive round, its state given as arguments: one graph, and what eager gives."""
    module = make_round(width=2, steps=2, layers=1)

    def fn(state: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(module, state, ())

    def state_of(batch_size: int) -> dict[str, torch.Tensor]:
        other = naive_round.NaiveRound(module.target, module.draft, batch_size=batch_size, width=2, steps=2)
        state = {name: tensor.clone() for name, tensor in other.named_buffers(recurse=False)}
        caches = [*other.target_cache.tensors(), *other.draft_cache.tensors()]
        for tensor in (*state.values(), *caches):  # otherwise the caches of one batch size get a graph of their own
            torch._dynamo.mark_dynamic(tensor, 0)
        return {**dict(other.named_buffers()), **state}

    compiled, reports = compile_interpreted(fn, dynamic=None)
    compiled(state_of(5))
    for batch_size in (6, 9):
        for want, got in zip(fn(state_of(batch_size)), compiled(state_of(batch_size)), strict=True):
            assert torch.equal(got, want)
    assert len(reports) == 1
    assert set(guards) == {0}
    assert len(reports[-1].kernels()) == 3  # a draft step, verify and extend
    assert reports[-1].after[counts.ITEMS] == 0


def test_the_report_counts_the_rows_of_the_example():
    head = torch.randn(HEADS * DIM, 11)

    def fn(q, table, lens):
        rows = spec_ops.mha_draft_extend(q, CACHE[0], CACHE[1], table, lens).flatten(2)
        return (rows @ head).argmax(-1)

    q, _, _, table, lens, _ = verify_call(5)
    for tensor in (q, table, lens):
        torch._dynamo.mark_dynamic(tensor, 0)
    plan = explain(fn, q, table, lens)
    assert plan.before[counts.HEAD_ROWS] == BS * 5
    assert f"{counts.HEAD_ROWS:28s} {BS * 5:8d}" in plan.text(verbose=True)


class AppendAndVerify(torch.nn.Module):
    """What every layer of a verify does, with a batch that may vary."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(PAGES, PAGE, KV_HEADS, DIM))
        self.register_buffer("v_cache", torch.zeros(PAGES, PAGE, KV_HEADS, DIM))

    def forward(self, q, k, v, table, lens):
        slots = (lens - q.shape[1])[:, None] + torch.arange(q.shape[1], dtype=torch.int32)
        slots = table.gather(1, (slots // PAGE).long()) * PAGE + slots % PAGE
        spec_ops.append_kv(self.k_cache, self.v_cache, k.flatten(0, 1), v.flatten(0, 1), slots.flatten())
        return spec_ops.mha_target_verify(q, self.k_cache, self.v_cache, table, lens) * 2.0


def verify_inputs(batch_size: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(batch_size)
    q, k, v = (torch.randn(batch_size, 4, heads, DIM, generator=g) for heads in (HEADS, KV_HEADS, KV_HEADS))
    table = torch.arange(PAGES, dtype=torch.int32)[: 2 * batch_size].reshape(batch_size, 2)
    return q, k, v, table, torch.arange(4, 4 + batch_size, dtype=torch.int32).clamp(max=8)


def exported(strict: bool) -> torch.export.ExportedProgram:
    batch = Dim("batch", min=2, max=PAGES // 2)
    return torch.export.export(AppendAndVerify(), verify_inputs(3), dynamic_shapes=[{0: batch}] * 5, strict=strict)


def check(program: Callable) -> None:
    """Several batch sizes one after another, on caches that keep what was appended."""
    eager = AppendAndVerify()
    for batch_size in (3, 2, 7, 10):
        inputs = verify_inputs(batch_size)
        torch.testing.assert_close(program(*inputs), eager(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export_of_a_dynamic_batch(strict):
    check(exported(strict).module())


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="AOTInductor needs a C++ compiler, which a fresh machine may lack")
def test_an_aotinductor_package(tmp_path):
    """With the passes: the kernel is chosen when the package is made, for every batch size."""
    with spec_ops.passes.enabled() as manager:
        manager.listener = (reports := []).append
        once = {"aot_inductor.precompile_headers": False}  # which takes longer than one package
        path = torch._inductor.aoti_compile_and_package(
            exported(False), package_path=str(tmp_path / "verify.pt2"), inductor_configs=once
        )
    assert [kernel.split(" ")[1] for kernel in reports[0].kernels()] == ["reference"]
    check(torch._inductor.aoti_load_package(path))
