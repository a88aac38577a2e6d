"""What a report says: a verdict, what changed, and each reason once."""

from __future__ import annotations

import pytest
import torch

import spec_ops
from spec_ops.passes import GraphReport, Note, PassResult, explain
from spec_ops.passes.analysis import counts
from spec_ops.passes.report import Place
from spec_ops.passes.wording import groups, short_place, source_text
from tests.helpers.pass_harness import using_provider

CACHE = torch.randn(4, 4, 2, 64)
TABLE, LENS = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
Q = torch.randn(2, 1, 4, 64)


def step(q, lens, **options):
    cache = CACHE.to(q.dtype)
    return spec_ops.mha_draft_decode(q, cache, cache, TABLE, lens + 1, **options)


def two_steps(q, lens):
    """Each with lengths on the host, and the longest as a number."""
    for _ in range(2):
        q = step(q, lens, seq_lens_cpu=lens.cpu(), max_seq_len=lens.max().item())
    return q


@pytest.fixture(autouse=True)
def scalars_in_the_graph():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        yield


def test_the_verdict_comes_first():
    plan = explain(two_steps, Q.bfloat16(), LENS, arch="sm_90")
    assert str(plan).splitlines()[0] == (
        "Plan for sm_90, bf16: 1 CUDA graph instead of 2, no host syncs instead of 4, "
        "1 metadata launch instead of 2; attention by triton"
    )


def test_the_verdict_on_the_cpu_counts_no_cuda_graphs():
    verdict = explain(two_steps, Q, LENS).verdict()
    assert verdict.startswith("Plan for the CPU, fp32: no host syncs instead of 2, 1 metadata launch")
    assert verdict.endswith("; attention by reference")


def test_the_verdict_of_host_planned_kernels():
    with using_provider(host_plan=True):
        plan = explain(lambda q, lens: step(step(q, lens, backend="provider") * 2, lens), Q, LENS, arch=90)
    assert "Plan for sm_90, fp32: 2 CUDA graphs, no host syncs" in plan.verdict()
    assert "attention by provider and reference" in plan.verdict()
    assert str(plan).splitlines()[2] == "1 call plans on the host and runs outside CUDA graphs: 2 graphs instead of 1"


def test_counts_that_stay_say_nothing():
    plan = explain(two_steps, Q.bfloat16(), LENS, arch=90)
    short, verbose = str(plan).splitlines(), plan.text(verbose=True).splitlines()
    for name in counts.SUMMARY:
        row = f"{name:28s} {plan.before[name]:8d} {plan.after[name]:8d}"
        assert row in verbose
        assert (row in short) == (plan.before[name] != plan.after[name])
    assert not any(line.startswith("calls ") for line in short)
    assert any(line.startswith("calls ") for line in verbose)


def test_a_reason_is_said_once():
    plan = explain(two_steps, Q.bfloat16(), LENS, arch=90)
    reason = "triton does not read seq_lens_cpu"
    assert sum(note.text.endswith(reason) for result in plan.results for note in result.done) == 2
    assert str(plan).count(reason) == 1
    assert f"mha_draft_decode x2: {reason}  [" in str(plan)
    assert "plans on the host, which breaks a CUDA graph" not in str(plan)  # why not another kernel
    assert plan.text(verbose=True).count("not flashinfer-fa2: plans on the host") == 1
    assert "(flashinfer-trtllm" in plan.kernels()[0]


def test_everything_with_its_line():
    lines = explain(two_steps, Q.bfloat16(), LENS, arch=90).text(verbose=True).splitlines()
    place = next(i for i, line in enumerate(lines) if "does not read seq_lens_cpu (2 times)" in line)
    assert f"[{short_place(__file__ + ':1')[:-2]}:" in lines[place]
    assert lines[place + 1].strip() == "return spec_ops.mha_draft_decode(q, cache, cache, TABLE, lens + 1, **options)"
    assert any(line.startswith("found nothing to do: ") for line in lines)


def test_a_graph_without_work_for_the_passes():
    cache = CACHE.to(torch.float8_e4m3fn)
    plan = explain(
        lambda q: spec_ops.mha_draft_decode(q, cache, cache, TABLE, LENS, k_scale=1.0, v_scale=1.0), Q.bfloat16(), arch=90
    )
    verdict, _, title, kernels = str(plan).splitlines()
    assert verdict == "Plan for sm_90, bf16 with fp8 caches: 1 CUDA graph, no host syncs; attention by triton"
    assert (title, kernels) == ("attention kernels", "  triton: mha_draft_decode")


def test_many_kinds_are_cut_short():
    results = [PassResult("one_pass", about="Does something")]
    results[0].refused = [Note(f"mm: reason {i}", "file.py:3") for i in range(7)]
    report = GraphReport({}, {}, results, Place(100, ("bf16",)))
    assert "mm: reason 3  [file.py:3]\n    and 3 more kinds" in str(report)
    assert "reason 4" not in str(report)
    assert "reason 4" in str(GraphReport({}, {}, [PassResult("one_pass", refused=results[0].refused[:5])]))
    assert all(f"mm: reason {i}  [file.py:3]" in report.text(verbose=True) for i in range(7))


def test_groups_by_reason():
    notes = [
        Note("a: too large", "f.py:2"),
        Note("b: too large", "f.py:1"),
        Note("a: too large", "f.py:2"),
        Note("gone", "f.py:3"),
    ]
    first, second = groups(notes)
    assert (first.reason, dict(first.subjects), first.places) == ("too large", {"a": 2, "b": 1}, ["f.py:2", "f.py:1"])
    assert (second.reason, dict(second.subjects)) == ("gone", {"": 1})


def test_source_that_cannot_be_read():
    assert source_text("unknown source:0") == source_text("/no/such/file.py:3") == ""
    assert short_place("/no/such/file.py:3") == "/no/such/file.py:3"
