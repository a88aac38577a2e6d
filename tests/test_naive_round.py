"""The naive round: what the passes make of it, kernel by kernel, and that they change no number."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import spec_ops
from spec_ops.passes import GraphReport, explain
from spec_ops.passes.report import ITEMS
from tests.csr_backend import CSR
from tests.pass_harness import Uncached, cache_copies, compile_interpreted
from tests.test_compile import has_cpp_compiler
from tests.test_passes import registered

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "naive_round.py"
spec = importlib.util.spec_from_file_location("naive_round", EXAMPLE)
naive_round = importlib.util.module_from_spec(spec)
sys.modules["naive_round"] = naive_round
spec.loader.exec_module(naive_round)

CASES = [
    pytest.param(mla, width, id=f"{'mla' if mla else 'gqa'}-{'chain' if width == 1 else 'tree'}")
    for mla in (0, 1)
    for width in (1, 4)
]
INDEX_OPS = ("kv_indices", "draft_kv_indices", "draft_kv_indices_steps")


@pytest.fixture(autouse=True)
def scalars_in_the_graph():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        yield


def generations(counts: dict[str, int]) -> int:
    return sum(counts.get(name, 0) for name in INDEX_OPS)


def lm_head_rows(report: GraphReport) -> str:
    return "; ".join(n.text for r in report.results if r.name == "hoist_row_select" for n in r.done)


@pytest.mark.parametrize(("mla", "width"), CASES)
def test_block_table_kernel_leaves_nothing_redundant(mla, width):
    kind = "mla" if mla else "mha"
    report = explain(naive_round.make_round(bool(mla), width))
    before, after = report.before, report.after
    assert generations(before) == 4
    assert before["page_table"] == 4
    assert before[ITEMS] == 4
    assert before[f"{kind}_extend"] == 1

    assert generations(after) == 0
    assert after["page_table"] == 1
    assert after.get(ITEMS, 0) == 0
    assert f"{kind}_extend" not in after
    assert after[f"{kind}_draft_extend"] == 1
    assert "1 of 4 rows per request" in lm_head_rows(report)
    assert not [note.text for result in report.results for note in result.refused]


@pytest.mark.parametrize(("mla", "width"), CASES)
def test_csr_kernel_gets_one_multi_step_generation(mla, width):
    backend = CSR if width == 1 else CSR.__class__(**{**vars(CSR), "tree_mask": True})
    with registered(backend):
        report = explain(naive_round.make_round(bool(mla), width))
    assert report.before["draft_kv_indices"] == 2
    assert report.after.get("draft_kv_indices", 0) == 0
    assert report.after["draft_kv_indices_steps"] == 1


# With one CSR segment per branch a tree's kv-indices are a layout that the mask-based test kernel does not read.
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
        plain, passed = (naive_round.make_round(bool(mla), width) for _ in range(2))
        run_plain, _ = compile_interpreted(plain, on=False)
        run_passed, _ = compile_interpreted(passed)
        for _ in range(6):
            for want, got in zip(run_plain(), run_passed(), strict=True):
                assert torch.equal(got, want)
    for (name, want), got in zip(plain.named_buffers(), passed.buffers(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor needs a C++ compiler, which a fresh machine may lack")
def test_generated_code_copies_no_cache():
    """The whole way through Inductor: the rewritten round still updates its caches in place."""
    plain, passed = naive_round.make_round(), naive_round.make_round()
    with inductor_config.patch(post_grad_custom_post_pass=Uncached()):
        got, code = run_and_get_code(spec_ops.compile(passed, mode="default"))
    for a, b in zip(got, plain(), strict=True):
        assert torch.equal(a, b)
    assert any("append_kv" in text for text in code)
    assert not [line for text in code for line in cache_copies(text, passed.target_cache.k0)]
    for a, b in zip(passed.target_cache.tensors(), plain.target_cache.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # Inductor's fp32 sums in another order


def test_example_prints_the_plan():
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), "--mla", "--width", "2", "--arch", "sm100"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "page_table                          4        1" in run.stdout
