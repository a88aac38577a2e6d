"""`python -m benchmarks kernels`: its cases, what it counts as work and error, its rows, how it reports what goes wrong."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import spec_ops
from benchmarks import __main__ as benchmarks
from benchmarks import timing
from benchmarks.kernels import accuracy
from benchmarks.kernels import cases as kernel_cases
from benchmarks.kernels import measure as kernels
from benchmarks.kernels import report as kernel_report
from benchmarks.kernels.cases import Batch, Case, Heads, Pool, Problem
from benchmarks.timing import Ceilings, measure_ceilings, time_calls
from spec_ops.backends import AttentionCall, registry
from spec_ops.backends.call import STEPS
from spec_ops.ops.reference import attention as reference
from tests.helpers import dense_attention

GQA = Heads("gqa", 4, 2, 16, 16)
MLA = Heads("mla", 2, 1, 24, 16)
CPU = torch.device("cpu")
FIELDS = (
    "kind", "heads", "head_dim", "bs", "context", "q_len", "mask", "dtype", "page_size", "backend", "us", "floor_us", "error",
    "reference_error",
)  # fmt: skip
TINY = ("--device", "cpu", "--copy-rate", "1e10", "--matmul-rate", "1e11", "--page-size", "16", "--quick")


def problem(heads: Heads, batch: Batch, q_len: int, mask: str, sets: int = 1, fp8: bool = False, window: int = -1) -> Problem:
    torch.manual_seed(0)
    case = Case(heads, batch, q_len, mask, window)
    kv_dtype = torch.float8_e4m3fn if fp8 else torch.float32
    pages = kernel_cases.pages_needed(case, 16) * sets
    return Problem(case, Pool(heads, pages, 16, torch.bfloat16 if fp8 else torch.float32, kv_dtype, CPU), sets)


def parents_of(words: list[int]) -> list[int]:
    """Parents by the words: the ancestor with the most ancestors of its own."""
    bits = [[j for j in range(len(words)) if word >> j & 1 and j != i] for i, word in enumerate(words)]
    return [max(seen, key=lambda j: len(bits[j])) if seen else dense_attention.PREFIX for seen in bits]


def seen_keys(made: Problem, b: int) -> list[list[int]]:
    length, q_len = made.lens[b], made.case.q_len
    if made.tree_mask is None:
        return dense_attention.causal_keys(length, q_len, made.case.window)
    parents = parents_of(made.tree_mask[b].tolist())
    return dense_attention.tree_keys(length, parents, list(range(q_len)), made.case.window)


# The grid


def test_default_grid_is_the_one_published():
    cases = kernel_cases.select(None, None, None, None, None, quick=False)
    assert len(cases) == len(set(cases)) == 4 * 7 * 4  # heads; batches with the equal twin; 1, 4, 16 and a tree of 16
    shapes = {(c.heads.kind, str(c.heads), c.heads.head_dim) for c in cases}
    assert shapes == {("gqa", "32/8", 128), ("gqa", "64/8", 64), ("mla", "128", 576), ("mla", "16", 576)}
    assert {(c.q_len, c.mask) for c in cases} == {(1, "causal"), (4, "causal"), (16, "causal"), (16, "tree")}
    fixed = {(c.batch.bs, c.batch.low) for c in cases if not c.batch.unequal}
    assert {(1, 4096), (1, 81920), (8, 8192), (8, 81920), (64, 8192)} < fixed
    (drawn,) = {c.batch for c in cases if c.batch.unequal}
    assert (drawn.bs, drawn.low, drawn.high) == (32, 512, 65536)
    assert len(drawn.lens()) == 32
    assert all(512 <= n <= 65536 for n in drawn.lens())
    # Log-uniform: the mean of the logarithms is that of the bounds, within three standard errors of a uniform draw.
    logs, bounds = [math.log(n) for n in drawn.lens()], (math.log(512), math.log(65536))
    assert abs(sum(logs) / 32 - sum(bounds) / 2) < 3 * (bounds[1] - bounds[0]) / math.sqrt(12 * 32)
    twin = drawn.equalized()
    assert twin in {c.batch for c in cases}
    assert abs(sum(twin.lens()) - sum(drawn.lens())) <= 16


def test_options_select_and_combine():
    cases = kernel_cases.select("gqa", ["6/3", "4/2:32", "128"], ["2x64"], [3, 3], ["tree"], quick=False)
    assert cases == [
        Case(Heads("gqa", 6, 3, 128, 128), Batch(2, 64, 64), 3, "tree"),
        Case(Heads("gqa", 4, 2, 32, 32), Batch(2, 64, 64), 3, "tree"),
    ]
    assert len(kernel_cases.select("mla", None, None, None, None, quick=True)) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--kind", "mha"], "--kind"),
        (["--heads", "32x8"], "--heads"),
        (["--heads", "5/2"], "--heads"),
        (["--heads", "0"], "--heads"),
        (["--heads", "4/2:0"], "--heads"),
        (["--heads", "128", "--kind", "gqa"], "--heads"),
        (["--case", "8"], "--case"),
        (["--case", "0x8"], "--case"),
        (["--case", "2x64-32"], "--case"),
        (["--case", "2x64+0"], "--case"),
        (["--q-len", "0"], "--q-len"),
        (["--q-len", "65"], "--q-len"),
        (["--q-len", "9", "--case", "1x8"], "--q-len"),
        (["--mask", "full"], "--mask"),
        (["--backend", "nonsense"], "--backend"),
        (["--dtype", "int8"], "--dtype"),
        (["--page-size", "129"], "--page-size"),
        (["--window", "-2"], "--window"),
        (["--time-budget", "-1"], "--time-budget"),
        (["--copy-rate", "0"], "--copy-rate"),
    ],
)
def test_bad_options_are_named(options, named):
    result = CliRunner().invoke(benchmarks.app, ["kernels", "--device", "cpu", *options])
    assert result.exit_code == 2
    assert named in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu():
    result = CliRunner().invoke(benchmarks.app, ["kernels", "--quick"])
    assert result.exit_code == 2
    assert "CUDA" in result.output


# Inputs


def test_buffer_sets_outgrow_the_cache():
    small, large = (Case(GQA, Batch(1, n, n), 1, "causal") for n in (4096, 2**20))
    kv_bytes = 4096 * 2 * 2 * 16 * 2
    assert kernel_cases.num_sets(small, 2, 10 * kv_bytes) == 40  # four times the cache
    assert kernel_cases.num_sets(small, 1, 10 * kv_bytes) == kernel_cases.MAX_SETS  # half the bytes, so 80, and the cap
    assert kernel_cases.num_sets(large, 2, 10 * kv_bytes) == 1
    assert kernel_cases.num_sets(small, 2, 0) == 1


@pytest.mark.parametrize("heads", [GQA, MLA], ids=["gqa", "mla"])
def test_sets_use_disjoint_pages_in_random_order(heads):
    made = problem(heads, Batch(3, 20, 90), 4, "causal", sets=5)
    live = [[table[b, : -(-n // 16)].tolist() for b, n in enumerate(made.lens)] for table in made.tables]
    pages = [page for table in live for row in table for page in row]
    assert sorted(pages) == list(range(made.pool.caches[0].shape[0]))
    assert pages != sorted(pages)
    for table, slots in zip(live, made.kv_indices, strict=True):
        wanted = [row[p // 16] * 16 + p % 16 for row, n in zip(table, made.lens, strict=True) for p in range(n)]
        assert slots.tolist() == wanted
    assert made.kv_indptr.tolist() == [sum(made.lens[:b]) for b in range(4)]
    assert len({float(q.sum()) for q in made.q}) == 5


def test_random_trees_are_trees_of_any_width():
    words = kernel_cases.random_tree(64, random.Random(3))
    assert words[63] < 0  # bit 63 is the sign
    parents = parents_of([word & (2**64 - 1) for word in words])
    assert parents[0] == dense_attention.PREFIX
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert dense_attention.mask_words(parents, list(range(64))) == words
    depths = [len(dense_attention.path_to_root(parents, node)) for node in range(64)]
    assert 4 < max(depths) < 32  # neither a star nor a chain


@pytest.mark.parametrize("window", [-1, 1, 30])
@pytest.mark.parametrize("mask", ["causal", "tree"])
@pytest.mark.parametrize("heads", [GQA, MLA], ids=["gqa", "mla"])
def test_work_counts_bytes_and_operations(heads, mask, window):
    made = problem(heads, Batch(3, 20, 90), 5, mask, window=window)
    work = made.work()
    pairs = sum(len(keys) for b in range(3) for keys in seen_keys(made, b)) * heads.num_heads
    assert work.flops == pairs * 2 * (heads.head_dim + heads.v_head_dim)
    row = heads.head_dim if heads.kind == "mla" else heads.num_kv_heads * 2 * heads.head_dim
    queries = 3 * 5 * heads.num_heads * (heads.head_dim + heads.v_head_dim)
    read = sum(len(set().union(*seen_keys(made, b))) for b in range(3))
    assert work.bytes == 4 * (read * row + queries)
    assert read == made.case.tokens() <= sum(made.lens)


def test_fp8_work_counts_the_bytes_of_each_dtype():
    made = problem(GQA, Batch(2, 40, 40), 1, "causal", fp8=True)
    assert made.work().bytes == 80 * 2 * 2 * 16 + 2 * (2 * 4 * 32)


# Error


@pytest.mark.parametrize("window", [-1, 0, 3, 40])
@pytest.mark.parametrize("mask", ["causal", "tree"])
@pytest.mark.parametrize("heads", [GQA, MLA], ids=["gqa", "mla"])
def test_exact_and_torch_attention_against_the_oracle(heads, mask, window, monkeypatch):
    monkeypatch.setattr(accuracy, "MAX_LOGITS", 300)  # several chunks of queries
    made = problem(heads, Batch(2, 20, 90), 5, mask, window=window)
    for b, length in enumerate(made.lens):
        k, v = made.pool.rows(made.tables[0][b], length)
        inputs = (made.q[0][b], k, v, made.visible(b), heads.scale)
        pages = made.tables[0][b].tolist()
        dense = [dense_attention.contiguous_rows(cache, pages, length) for cache in made.pool.caches]
        keys, values = dense if heads.kind == "gqa" else (dense[0][:, None], dense[0][:, None, :16])
        wanted = dense_attention.attend(made.q[0][b], keys, values, seen_keys(made, b), scale=heads.scale)
        # float64 against float64: sums of at most 90 terms.
        torch.testing.assert_close(accuracy.exact_attention(*inputs), wanted.out, rtol=0, atol=1e-13)
        assert ((accuracy.torch_attention(*inputs).double() - wanted.out).abs() <= wanted.float32_error).all()


def test_relative_error():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert accuracy.relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert math.isnan(accuracy.relative_error(torch.tensor([3.0, math.nan]), exact))


# Time


def test_calls_run_in_turn_and_the_first_result_is_returned():
    order: list[int] = []

    def call(i: int) -> torch.Tensor:
        order.append(i)
        return torch.tensor([float(i)])

    result = time_calls([lambda i=i: call(i) for i in range(3)], min_ms=0.0, min_replays=4)
    assert order == [0] + [0, 1, 2] * 4
    assert result.output.item() == 0
    assert not result.cuda_graph
    with pytest.raises(ValueError, match="calls"):
        time_calls([])


def test_time_is_that_of_one_call(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))  # every round takes a second
    result = time_calls([lambda: torch.zeros(1)] * 4, min_ms=0.0, min_replays=3)
    assert result.us == pytest.approx(1e6 / 4)


def test_floor_is_the_slower_of_bytes_and_operations():
    ceilings = Ceilings(copy=1e12, matmul=1e15)
    assert ceilings.floor_us(5_000_000, 10**9) == pytest.approx(5.0)
    assert ceilings.floor_us(5_000_000, 7 * 10**9) == pytest.approx(7.0)


def test_ceilings_are_measured_unless_given():
    assert measure_ceilings(CPU, 1.0, 2.0) == Ceilings(1.0, 2.0)
    found = measure_ceilings(CPU)
    assert 1e7 < found.copy < 1e13  # bytes a second on any CPU; milliseconds taken for microseconds would leave this range
    assert 1e7 < found.matmul < 1e15


# The command


def bench(tmp_path: Path, *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(benchmarks.app, ["kernels", *TINY, "--out", str(path), *options])
    assert result.exit_code == code, result.output + repr(result.exception)
    return json.loads(path.read_text()), result.output


def test_windows(tmp_path):
    """Results are compared within the window, and what is read is all that counts as bytes."""
    shape = ["--heads", "4/2:16", "--case", "2x50", "--q-len", "4", "--mask", "causal", "--mask", "tree"]
    names = [f"--backend={name}" for name in ("reference", "torch-sdpa")]
    figures, shown = bench(tmp_path, *shape, *names, "--window", "9")
    assert [(row["backend"], row["window"], row["mask"], row["correct"]) for row in figures["rows"]] == [
        ("reference", 9, mask, True) for mask in ("causal", "tree")
    ]
    assert {row["bytes"] for row in figures["rows"]} == {2 * (2 * 13 * 2 * 2 * 16 + 2 * 4 * 4 * 32)}
    assert "2 x 50, window 9" in shown
    assert "without a window only" in " ".join(shown.split())
    everything, _ = bench(tmp_path, *shape, "--backend=reference")
    assert all("window" not in row and row["bytes"] > 2 * figures["rows"][0]["bytes"] for row in everything["rows"])


def test_one_long_request_and_pages_of_several_sizes(tmp_path):
    shape = ["--heads", "4/2:16", "--case", "5x10-20+300", "--q-len", "1", "--backend", "reference"]
    figures, shown = bench(tmp_path, *shape, "--page-size", "1")  # beside the 16 of `TINY`
    rows = {(row["page_size"], row["lengths"]): row for row in figures["rows"]}
    assert rows.keys() == {(page, lengths) for page in (1, 16) for lengths in ("log-uniform 10-20, one 300", "equal")}
    assert all(row["correct"] for row in rows.values())
    lens = Batch(5, 10, 20, 300).lens()
    assert sorted(lens)[-1] == 300 > 20 >= sorted(lens)[-2]
    assert rows[1, "log-uniform 10-20, one 300"]["context"] == round(sum(lens) / 5)
    assert "pages of 1" in shown


@pytest.mark.slow
def test_whole_path_on_cpu(tmp_path):
    picture = tmp_path / "plots" / "roofline.png"
    shapes = ["--heads", "4/2:16", "--heads", "2", "--case", "1x64", "--case", "3x20-70", "--q-len", "1", "--q-len", "4"]
    masks = ["--mask", "causal", "--mask", "tree"]
    names = [f"--backend={name}" for name in ("reference", "torch-sdpa", "torch-flex")]
    figures, shown = bench(tmp_path, *shapes, *masks, *names, "--plot", str(picture))
    assert figures["environment"]["torch"] == torch.__version__
    assert figures["ceilings"] == {"copy": 1e10, "matmul": 1e11}
    rows, cases = figures["rows"], 2 * 3 * 2 * 2
    by_backend = {name: [r for r in rows if r["backend"] == name] for name in ("reference", "torch-sdpa", "torch-flex")}
    # SDPA: causal and equal lengths only; flex: GQA only.
    assert {name: len(found) for name, found in by_backend.items()} == {
        "reference": cases,
        "torch-sdpa": 2 * 2,
        "torch-flex": cases // 2,
    }
    for row in rows:
        assert set(FIELDS) <= set(row)
        assert row["correct"]
        # bfloat16 results: the rounding of the output alone, up to that of every softmax weight as well.
        assert 5e-4 < row["error"] < 1e-2
        assert row["us"] > 0
        assert row["floor_us"] == pytest.approx(max(row["bytes"] / 1e10, row["flops"] / 1e11) * 1e6, abs=0.006)
        assert row["dtype"] == "bfloat16"
        assert row["page_size"] == 16
        assert not row["cuda_graph"]
        assert not row["plan_excluded"]
    assert {(r["kind"], r["heads"], r["head_dim"]) for r in rows} == {("gqa", "4/2", 16), ("mla", "2", 576)}
    assert {(r["bs"], r["lengths"]) for r in rows} == {(1, "equal"), (3, "equal"), (3, "log-uniform 20-70")}
    assert len(figures["notes"]) == 3 * cases - len(rows)
    assert not any(note["failed"] for note in figures["notes"])
    for text in ("microseconds", "reference", "dense mask", "GQA only", "3 x ~"):
        assert text in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_fp8_caches(tmp_path):
    figures, _ = bench(tmp_path, "--heads", "4/2:16", "--heads", "2", "--case", "1x64", "--q-len", "3", "--mask", "tree",
                       "--backend", "reference", "--dtype", "float8_e4m3fn")  # fmt: skip
    assert [(row["kind"], row["dtype"], row["correct"]) for row in figures["rows"]] == [
        ("gqa", "float8_e4m3fn", True),
        ("mla", "float8_e4m3fn", True),
    ]
    # The error is against the dequantized cache: no larger than without fp8.
    assert all(row["error"] < 1e-2 for row in figures["rows"])


ONE = ("--heads", "4/2:16", "--case", "3x64", "--q-len", "1")


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Registers, for one test, a backend whose kernel is a function of this file; other fields as `reference`'s."""
    before = dict(registry._BACKENDS)

    def add(name: str, kernel: str, **changes: Any) -> None:
        kernels_of = {step: f"{__name__}:{kernel}" for step in STEPS}
        spec_ops.register_backend(replace(before["reference"], name=name, kernels=kernels_of, **changes))

    yield add
    registry._BACKENDS.clear()
    registry._BACKENDS.update(before)
    registry._forget()


def plain(call):
    return reference.attention(call)


def half_wrong(call):
    out = reference.attention(call)
    out[:, :, 1] *= 1.02
    return out


def unwritten(call):
    out = reference.attention(call)
    out[1, 0, 2, 3] = math.nan  # in a request that is not compared with float64 if there are others
    return out


def crashing(call):
    raise RuntimeError("no kernel image [is] available\nmore lines")


@pytest.mark.parametrize("kernel", ["half_wrong", "unwritten"])
def test_wrong_results_are_shown_and_fail(tmp_path, register, kernel):
    register("wrong", kernel)
    figures, shown = bench(tmp_path, *ONE, "--backend", "wrong", "--backend", "reference", code=1)
    wrong, right = figures["rows"]
    assert (wrong["backend"], wrong["correct"], right["correct"]) == ("wrong", False, True)
    assert wrong["error"] is None if kernel == "unwritten" else wrong["error"] == pytest.approx(0.02 / 2, rel=0.3)
    assert "wrong" in shown
    assert "some results are wrong" in shown


def test_nan_anywhere_counts(register):
    """Also in a request that is not among those compared with float64."""
    made = problem(GQA, Batch(9, 20, 90), 1, "causal")
    expected = kernels.Expected(made)
    assert len(expected.requests) == 3
    assert {made.lens[b] for b in expected.requests} >= {min(made.lens), max(made.lens)}
    out = made.call(0, "reference")
    assert expected.error(out) < 1e-5  # float32
    out[next(b for b in range(9) if b not in expected.requests), 0, 0, 0] = math.nan
    assert math.isnan(expected.error(out))


def test_a_crash_and_a_refusal_leave_the_rest(tmp_path, register):
    register("crashing", "crashing")
    register("small", "half_wrong", max_q_len=0)
    figures, shown = bench(tmp_path, *ONE, "--backend=crashing", "--backend=small", "--backend=reference", code=1)
    assert [row["backend"] for row in figures["rows"]] == ["reference"]
    crash, refusal = figures["notes"]
    assert (crash["failed"], refusal["failed"]) == (True, False)
    assert crash["reason"] == "RuntimeError: no kernel image [is] available\nmore lines"
    assert "supports at most 0 queries" in refusal["reason"]
    assert "[is]" in shown  # not taken for markup


def test_default_backends(register, monkeypatch):
    register("fast", "half_wrong", rank=1)
    register("slow", "half_wrong", rank=2000)
    register("elsewhere", "half_wrong", capabilities=(90, 90))
    register("absent", "half_wrong", requires=("no_such_module", "bench"))
    found = kernels.check_backends(None, CPU)
    assert found[0] == "fast"
    assert found[-2:] == ["slow", "torch-sdpa"]
    assert not {"reference", "elsewhere", "absent"} & set(found)
    assert kernels.check_backends(["auto", "auto", "elsewhere"], CPU) == ["auto", "elsewhere"]
    for arch in (80, 90, 100):
        monkeypatch.setattr(kernels, "device_arch", lambda device, arch=arch: arch)
        assert ("elsewhere" in kernels.check_backends(None, CPU)) == (arch == 90)


def planning(call):
    raise AssertionError("a planned case must not go through the op")


def test_host_planning_is_left_out(tmp_path, register, monkeypatch):
    pytest.importorskip("triton", reason="triton comes for Linux only")
    from spec_ops.backends.flashinfer.planned import Planned

    planned: list[AttentionCall] = []

    def plan(call: AttentionCall) -> Planned:
        planned.append(call)
        out = torch.empty(*call.q.shape[:-1], call.v_head_dim)
        return Planned(lambda: out.copy_(reference.attention(call)), lambda: out)

    register("planned", "planning", host_plan=True)
    monkeypatch.setitem(kernels.PLANNERS, "planned", plan)
    figures, _ = bench(tmp_path, *ONE, "--backend", "planned")
    assert [(call.step, call.backend) for call in planned] == [("mha_draft_decode", "planned")]
    (row,) = figures["rows"]
    assert row["plan_excluded"]
    assert row["correct"]


def test_host_planning_stays_in_without_a_planner(tmp_path, register):
    register("planned", "plain", host_plan=True)
    figures, _ = bench(tmp_path, *ONE, "--backend", "planned")
    (row,) = figures["rows"]
    assert not row["plan_excluded"]
    assert row["correct"]


def test_time_budget_stops_cleanly(tmp_path, monkeypatch):
    options = ["--heads", "4/2:16", "--case", "1x64", "--q-len", "1", "--q-len", "2", "--backend", "reference"]
    figures, shown = bench(tmp_path, *options, "--time-budget", "0")
    assert figures["rows"] == []
    assert "2 of 2 not measured" in shown
    clock = iter([0.0, 0.0, math.inf])  # first case; its backend; second case
    monkeypatch.setattr(kernels, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    figures, shown = bench(tmp_path, *options, "--time-budget", "10")
    assert [row["q_len"] for row in figures["rows"]] == [1]
    assert "1 of 2 not measured" in shown


def test_an_interrupted_run_writes_what_it_has(tmp_path, monkeypatch):
    real, calls = kernels.time_calls, iter(range(10))

    def interrupted(*args, **kwargs):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(kernels, "time_calls", interrupted)
    options = ["--heads", "4/2:16", "--case", "1x64", "--q-len", "1", "--q-len", "2", "--backend", "reference"]
    figures, _ = bench(tmp_path, *options, code=130)
    assert [row["q_len"] for row in figures["rows"]] == [1]


def test_summary_compares_backends_and_lengths():
    case = {
        "kind": "gqa",
        "heads": "4/2",
        "head_dim": 16,
        "bs": 2,
        "context": 50,
        "q_len": 1,
        "mask": "causal",
        "page_size": 64,
    }
    shared = {"floor_us": 10.0, "share_of_floor": 0.5, "error": 2e-3, "reference_error": 1e-3, "correct": True}

    def row(backend: str, us: float, lengths: str = "equal", **changes: Any) -> dict[str, Any]:
        return {**case, **shared, "backend": backend, "us": us, "lengths": lengths, **changes}

    rows = [
        row("ours", 20.0),
        row("theirs", 60.0),
        row("broken", 1.0, correct=False, error=None),  # fast and wrong: nobody is compared with it
        row("ours", 25.0, "log-uniform 5-95"),
        row("theirs", 12.5, "log-uniform 5-95"),
    ]
    console = Console(width=200, record=True, highlight=False)
    console.print(kernel_report.summary_table(rows))
    lines = {name: line for line in console.export_text().splitlines() for name in ("ours", "theirs", "broken") if name in line}
    ours = [cell.strip() for cell in lines["ours"].strip("│ ").split("│")]
    # Share: sqrt(10/20 * 10/25); against the other: sqrt(60/20 * 12.5/25), worst 12.5/25; unequal over equal: 25/20.
    assert ours == ["gqa", "ours", "2", "45%", "1.22", "0.50", "1.25", "2.00 of torch's", "0"]
    assert lines["broken"].rstrip("│ ").endswith("1")


# On a GPU


@pytest.mark.gpu
def test_graph_replays_rotate_and_find_unwritten_results():
    counters = [torch.zeros(1, device="cuda") for _ in range(3)]

    def call(i: int) -> torch.Tensor:
        counters[i].add_(1)
        return counters[i] * 1.0

    result = time_calls([lambda i=i: call(i) for i in range(3)], min_ms=0.0, min_replays=3)
    assert result.cuda_graph
    assert len({int(c) for c in counters}) == 2  # the first call ran once more, to find the device
    assert result.output.item() > 3
    stale = torch.zeros(4, device="cuda")
    assert time_calls([lambda: stale], min_ms=0.0, graph=False).us > 0
    with pytest.raises(ValueError, match="calls"):
        time_calls([])

    def writes_half() -> torch.Tensor:
        stale[:2].fill_(1.0)
        return stale

    assert time_calls([writes_half], min_ms=0.0).output.isnan().tolist() == [False, False, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_a_measurement_starts_from_rest(monkeypatch, graph):
    rests = []
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: rests.append((seconds, torch.cuda.current_stream().query())))
    time_calls([lambda: torch.zeros(4, device="cuda")], min_ms=0.0, graph=graph)
    assert rests == [(timing.REST_S, True)]  # nothing was left to do when it began


@pytest.mark.gpu
@pytest.mark.parametrize("heads", ["32/8", "16"])
def test_quick_run(tmp_path, heads):
    path, picture = tmp_path / "rows.json", tmp_path / "roofline.png"
    options = ["--quick", "--heads", heads, "--case", "2x2048", "--case", "4x512-4096", "--backend", "reference", "--backend",
               "torch-sdpa", "--jobs", "2", "--out", str(path), "--plot", str(picture)]  # fmt: skip
    result = CliRunner().invoke(benchmarks.app, ["kernels", *options])
    assert result.exit_code == 0, result.output + repr(result.exception)
    figures = json.loads(path.read_text())
    assert 1e11 < figures["ceilings"]["copy"] < 2e13
    reference_rows = [row for row in figures["rows"] if row["backend"] == "reference"]
    assert len(reference_rows) == 3 * 3
    for row in figures["rows"]:
        assert row["cuda_graph"]
        assert row["correct"]
        assert row["us"] > 0.8 * row["floor_us"]  # reading alone can outrun the copy that the floor is measured with
        assert row["buffer_sets"] > 1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_flex_compiles_and_replays(tmp_path):
    path = tmp_path / "rows.json"
    options = [
        "--quick",
        "--heads",
        "32/8",
        "--case",
        "4x512-4096",
        "--q-len",
        "16",
        "--backend",
        "torch-flex",
        "--out",
        str(path),
    ]
    result = CliRunner().invoke(benchmarks.app, ["kernels", *options])
    assert result.exit_code == 0, result.output + repr(result.exception)
    rows = json.loads(path.read_text())["rows"]
    assert [row["cuda_graph"] for row in rows] == [True] * 4  # unequal and equal lengths, causal and tree
