"""The naive round: what the passes make of it, kernel by kernel, and that they change no number."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import sys

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import spec_ops
from spec_ops.models import PagedAttention
from spec_ops.passes import GraphReport, PassManager, explain
from spec_ops.passes.analysis import counts
from spec_ops.passes.analysis.counts import SUMMARY
from spec_ops.passes.elide_host_syncs import is_sync
from tests.helpers.csr_backend import CSR
from tests.helpers.forked import run_script
from tests.helpers.inductor_unbuilt import unbuilt
from tests.helpers.pass_harness import Traced, cache_copies, capture_for_cuda, registered, using_provider
from tests.helpers.paths import EXAMPLES
from tests.passes.test_compile import has_cpp_compiler

EXAMPLE = EXAMPLES / "naive_round.py"
spec = importlib.util.spec_from_file_location("naive_round", EXAMPLE)
naive_round = importlib.util.module_from_spec(spec)
sys.modules["naive_round"] = naive_round
spec.loader.exec_module(naive_round)
make_round = functools.partial(naive_round.make_round, layers=1, dtype=torch.float32)

CASES = [
    pytest.param(mla, width, id=f"{'mla' if mla else 'gqa'}-{'chain' if width == 1 else 'tree'}")
    for mla in (0, 1)
    for width in (1, 4)
]


@pytest.fixture(autouse=True)
def scalars_in_the_graph():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        yield


@functools.cache
def traced(mla: int, width: int) -> Traced:
    return Traced(make_round(bool(mla), width))


def plan_of(mla: int, width: int) -> GraphReport:
    """What `explain` gives, of the graph that other tests run."""
    plan = traced(mla, width).run(times=0).report
    assert plan is not None
    return plan


def table(report: GraphReport) -> dict[str, tuple[int, int]]:
    return {name: (report.before[name], report.after[name]) for name in SUMMARY}


def expected(width: int, **changes: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """What is left of metadata launches: one page table, one stack of lengths and one of draft slots, the slots that verify and
    extend share, and the length of the selected row; a tree's accepted path has two more, moved from and to."""
    moved = 2 * (width > 1)
    found = {
        counts.KV_GENERATIONS: (4, 0),
        counts.PAGE_TABLES: (4, 1),
        counts.HOST_COPIES: (0, 0),  # a CPU trace has none
        counts.ITEMS: (4, 0),
        counts.METADATA_LAUNCHES: (17 + moved, 5 + moved),
        counts.HEAD_ROWS: (8, 2),  # for 2 requests
        counts.PREFILLS: (1, 0),
        counts.HOST_PLANNED: (0, 0),
        counts.CUDA_GRAPHS: (2, 1),
        counts.COLLECTIVES: (0, 0),
        counts.WEIGHTS: (1, 1),
    }
    return found | {getattr(counts, name): pair for name, pair in changes.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("mla", "width"), [(0, 1), (1, 4)], ids=["gqa-chain", "mla-tree"])
def test_block_table_kernel_leaves_nothing_redundant(mla, width):
    plan = plan_of(mla, width)
    assert table(plan) == expected(width)
    # Latent attention projects to the queries' latents and to the cache's with a weight each.
    apart = {"2 products of one value: their weights are not rows of one input"} if mla else set()
    assert {note.text for result in plan.results for note in result.refused} == apart
    assert plan.host_plan_cost() is None
    for name, (before, after) in expected(width).items():
        assert f"{name:28s} {before:8d} {after:8d}\n" in plan.text(verbose=True) or name in (
            counts.HOST_COPIES,
            counts.CUDA_GRAPHS,
            counts.COLLECTIVES,
        )


@pytest.mark.slow
@pytest.mark.parametrize(("mla", "width"), [(0, 4), (1, 1)], ids=["gqa-tree", "mla-chain"])
def test_nothing_is_read_back_from_a_gpu(mla, width):
    """The same round on CUDA tensors. Its graph is not functional, so the extend's attention keeps its rows and length."""
    module = make_round(bool(mla), width)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    graph = capture_for_cuda(lambda given: torch.func.functional_call(module, given, ()), tensors).graph
    reports: list[GraphReport] = []
    PassManager(arch=90, listener=reports.append)(graph)
    before, after = expected(width)[counts.METADATA_LAUNCHES]
    found = table(reports[0])
    # Before torch 2.15 the trace keeps a mutation that ties the extend's attention to all rows: no length for one row.
    assert found[counts.METADATA_LAUNCHES] in ((before, after - 1), (before, after))
    changed = {"HOST_COPIES": (4, 0), "METADATA_LAUNCHES": found[counts.METADATA_LAUNCHES]}
    assert found == expected(width, **changed)
    assert not any(map(is_sync, graph.nodes))


@pytest.mark.slow
@pytest.mark.parametrize(("mla", "width"), [(0, 4), (1, 1)], ids=["gqa-tree", "mla-chain"])
def test_csr_kernel_gets_one_multi_step_generation(mla, width):
    """Verify and extend are of one length, hence of one list."""
    backend = dataclasses.replace(CSR, tree_mask=width > 1)
    traced(mla, width)  # and run once, with kernels that read page tables
    with registered(backend):
        plan = plan_of(mla, width)
    assert plan.before["draft_kv_indices"] == 2
    assert plan.after.get("draft_kv_indices", 0) == 0
    assert plan.after["draft_kv_indices_steps"] == 1
    assert plan.after["kv_indices"] == (1 if width == 1 else 2)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
def test_what_a_host_planned_kernel_costs(layers, monkeypatch):
    """Two draft steps, the target's layers, and the extend, each outside the graph; work before, between and after them."""
    monkeypatch.setattr(naive_round, "PagedAttention", functools.partial(PagedAttention, backend="provider"))
    with using_provider(host_plan=True):
        plan = explain(make_round(layers=layers))
    assert plan.after[counts.HOST_PLANNED] == layers + 3
    assert plan.after[counts.CUDA_GRAPHS] == layers + 4
    cost = f"{layers + 3} calls plan on the host and run outside CUDA graphs: {layers + 4} graphs instead of 1"
    assert plan.host_plan_cost() == cost
    assert cost in str(plan)


# With one CSR segment per branch a tree's kv-indices are a layout that the mask-based test kernel does not read.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mla", "width", "csr"),
    [
        pytest.param(*case.values, csr, id=f"{case.id}-{'csr' if csr else 'table'}")
        for case in CASES
        for csr in (False, True)
        if not csr or case.values[1] == 1
    ],
)
def test_numbers_stay_the_same(mla, width, csr):
    """Several rounds, so that a wrong cache or state shows. The passes change the shapes of a few matrix products (one row per
    request instead of all), hence their order of summation in fp32; everything else is exact."""
    with registered(CSR) if csr else contextlib.nullcontext():
        plain, passed = (traced(mla, width).run(times=6, on=on) for on in (False, True))
    for wanted, found in zip(plain.results, passed.results, strict=True):
        for want, got in zip(wanted, found, strict=True):
            assert torch.equal(got, want)
    start = dict(make_round(bool(mla), width).named_buffers())
    assert not all(torch.equal(plain.buffers[name], start[name]) for name in start)
    for name, want in plain.buffers.items():
        torch.testing.assert_close(passed.buffers[name], want, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor asks which C++ compiler there is")
def test_generated_code_copies_no_cache():
    """The whole way through Inductor, but for building its code: the rewritten round still updates its caches in place."""
    plain, passed = (make_round(steps=2, layers=1) for _ in range(2))
    with unbuilt():
        got, code = run_and_get_code(spec_ops.compile(passed, mode="default"))
    for a, b in zip(got, plain(), strict=True):
        assert torch.equal(a, b)
    assert any("append_kv" in text for text in code)
    assert not [line for text in code for line in cache_copies(text, passed.target_cache.k0)]
    for a, b in zip(passed.target_cache.tensors(), plain.target_cache.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # sums of fewer rows, in another order


@pytest.mark.slow
def test_example_prints_the_plan():
    """In bfloat16, and with the copies to the host, which a trace on the CPU lacks."""
    run = run_script(EXAMPLE, "--width", "2", "--arch", "sm100")
    assert run.returncode == 0, run.stderr
    assert "page tables                         4        1" in run.stdout
    assert "device-to-host copies               4        0" in run.stdout
    assert run.stdout.startswith("Plan for sm_100, bf16: 1 CUDA graph instead of 2, no host syncs instead of 8, ")
    assert "; attention by triton\n" in run.stdout
    assert "warning" not in run.stdout


@pytest.mark.slow
def test_example_warns_of_calls_without_a_kernel():
    run = run_script(EXAMPLE, "--width", "2", "--arch", "sm100", "--dtype", "float32")
    assert "warning: mha_target_verify runs on `reference`" in run.stdout
    assert "triton does not support query dtype torch.float32" in run.stdout


def test_example_names_an_unknown_architecture():
    run = run_script(EXAMPLE, "--arch", "blackwell")
    assert run.returncode == 2
    assert "sm120 sm121 (Blackwell), got 'blackwell'" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
