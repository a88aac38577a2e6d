"""`python -m benchmarks sampling`: its cases, what it takes for right, its rows; stand-ins with FlashInfer's signatures."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import timing
from benchmarks.sampling import cases as sampling_cases
from benchmarks.sampling import kernels as sampling_kernels
from benchmarks.sampling import report
from benchmarks.sampling.cases import KINDS, SETTINGS, STEPS, Case, Problem, num_sets, random_logits
from benchmarks.sampling.expected import EPS, Expected, Rows
from benchmarks.sampling.kernels import KERNELS, READ, Kernel
from spec_ops import ops
from tests.helpers.command_line import refusal, run_benchmarks
from tests.helpers.provider_fakes import FLASHINFER
from tests.helpers.sampling_fakes import install

CPU = torch.device("cpu")
VOCAB = 300


def problem(job: str, setting: str, logits: str = "peaked", rows: int = 64, **more: Any) -> Problem:
    torch.manual_seed(0)
    return Problem(Case(job, VOCAB, rows, SETTINGS[setting], logits, **more), CPU, 1)


def result(made: Problem, kernel: str = "spec_ops") -> torch.Tensor:
    found = KERNELS[made.case.job][kernel]
    return found.function(made, 0, *(() if found.prepare is None else (found.prepare(made, 0),)))


# Cases and inputs


def test_the_default_grid():
    cases = sampling_cases.select(None, None, None, None, None, "bfloat16", 1.0)
    assert {case.vocab for case in cases} == {32000, 128256, 201088}
    assert {case.rows for case in cases if case.job == "draw"} == {1, 4, 8, 32, 128, 512}
    assert {case.rows for case in cases if case.job == "verify"} == {4, 8, 32, 128, 512}  # whole requests
    assert len(cases) == len(set(cases)) == 3 * 2 * 4 * (2 * 6 + 2 * 5)


def test_bytes_and_buffers():
    draw = Case("draw", 128256, 8, SETTINGS["nothing"], "flat")
    assert draw.read_bytes() == 8 * 128256 * 2
    assert replace(draw, job="verify").read_bytes() == (8 + 2) * 128256 * 2
    assert replace(draw, job="accept").read_bytes() == (2 * 2) * 128256 * 2
    l2 = 50 * 2**20
    assert num_sets(draw, l2) * draw.read_bytes() >= 2 * l2
    assert num_sets(replace(draw, rows=512), l2) == 1
    assert num_sets(replace(draw, vocab=200, rows=1), l2) == sampling_cases.MAX_SETS
    made = Problem(replace(draw, vocab=200, job="verify"), CPU, 3)
    assert len({float(x.float().sum()) for x in [*made.logits, *made.draft_logits]}) == 6


def test_peaked_and_flat_logits():
    generator = torch.Generator().manual_seed(0)
    kept = {}
    for kind in KINDS:
        logits = random_logits(kind, (4, 32000), torch.float32, generator)
        kept[kind] = Rows(logits, 1.0, SETTINGS["top-p"]).counts(0.0)[0].double().mean() / 32000
    assert kept["flat"] > 0.5
    assert kept["peaked"] < 0.05


# What is right


def test_counts_at_a_boundary_that_rounding_decides():
    """Weights of 8, 4, 2, 1, 1 and none: 0.75 of the whole is two tokens, or three if anything is rounded."""
    logits = torch.tensor([[1.0, 8.0, 0.0, 4.0, 1.0, 2.0]]).log()
    setting = replace(SETTINGS["top-p"], top_p=0.75)
    rows = Rows(logits, 1.0, setting)
    assert [int(count) for count in rows.counts(EPS)] == [2, 3]
    assert [int(count) for count in Rows(logits, 1.0, replace(setting, top_p=0.76)).counts(EPS)] == [3, 3]
    # Of the four most likely, 15: three quarters are two tokens.
    assert [int(count) for count in Rows(logits, 1.0, replace(setting, top_k=4)).counts(EPS)] == [2, 2]
    assert [int(count) for count in Rows(logits, 1.0, replace(SETTINGS["min-p"], min_p=0.2)).counts(EPS)] == [3, 3]
    assert [int(count) for count in Rows(logits, 1.0, replace(SETTINGS["min-p"], min_p=0.25)).counts(EPS)] == [2, 3]
    probs, slack = rows.probs()
    torch.testing.assert_close(probs, torch.tensor([[0, 8, 0, 4, 0, 2]], dtype=torch.float64) / 14)
    assert float(slack) == pytest.approx(2 / 14)


def test_equal_tokens_are_kept_from_the_lowest_id():
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]])
    rows = Rows(logits, 1.0, replace(SETTINGS["top-k-top-p"], top_k=3, top_p=1.0))
    total = int(rows.mass(torch.tensor([[3]])) * 2**44)
    assert rows.wrong_support(torch.tensor([[1, 0, total]])) == ""
    assert "number of tokens" in rows.wrong_support(torch.tensor([[1, 2, total]]))
    assert "likeliest" in rows.wrong_support(torch.tensor([[3, 0, total]]))
    assert "sum" in rows.wrong_support(torch.tensor([[1, 0, int(total * 1.0001)]]))
    assert "no token" in rows.wrong_support(torch.tensor([[1, -1, total]]))


@pytest.mark.parametrize("logits", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("job", KERNELS)
def test_right_results_are_right_and_near_misses_are_not(job, setting, logits):
    made = problem(job, setting, logits, temperature=0.7)
    expected, out = Expected(made), result(made)
    assert expected.wrong(out, exact=True) == ""
    if job == "draw":
        # The neighbour's token: it might have been drawn with another uniform, or is cut.
        moved = torch.where(torch.arange(64) == 20, out.roll(1), out)
        assert int(moved[20]) != int(out[20])
        assert expected.wrong(moved, exact=True) != ""
    elif job == "support":
        top, last, total = out.view(-1, 3).unbind(1)
        assert expected.wrong(torch.stack([top, last, total + (total >> 12)], 1), exact=True) == "another sum of the weights"
        if setting != "nothing":
            order = made.logits[0].double().sort(dim=-1, descending=True, stable=True).indices
            place = (order == last[:, None]).long().argmax(1)
            one_more = order.gather(1, (place + 1)[:, None])[:, 0]
            assert expected.wrong(torch.stack([top, one_more, total], 1), exact=True) == "another number of tokens is kept"
    else:
        lens = (out >= 0).sum(1)
        assert {1, STEPS + 1} <= set(lens.tolist())  # some drafts are accepted and some are not
        cut = out.clone()
        cut[lens > 1, 1:] = -1
        assert expected.wrong(cut, exact=True) in ("a coin decides otherwise", "a uniform falls on another token")
        first = torch.where((lens == 1)[:, None] & (torch.arange(STEPS + 1) == 0), made.candidates[0][:, 1:2], out)
        first[lens == 1, 1] = out[lens == 1, 0]
        assert expected.wrong(first, exact=True) != ""  # the first draft accepted all the same
        assert expected.wrong(out.flip(1), exact=True) == "not a path of tokens"


@pytest.mark.parametrize("setting", SETTINGS)
def test_blocks_and_tokens_are_told_apart(setting):
    made = problem("verify", setting, rows=256)
    expected, out = Expected(made), result(made, "spec_ops, block")
    assert expected.wrong(out, exact=True, block=True) == ""
    assert expected.wrong(out, exact=True, block=False) != ""
    assert expected.wrong(result(made), exact=True, block=True) != ""


def test_probabilities_by_total_variation():
    made = problem("support", "top-p")
    expected, probs = Expected(made), ops.sampling_probs(made.logits[0], *(made.temperature, None, made.top_p))
    assert expected.wrong(probs, exact=True) == ""
    assert "total variation" in expected.wrong(probs.roll(1, 0), exact=True)
    everything = ops.sampling_probs(made.logits[0], made.temperature)
    assert "total variation 1.0e-01" in expected.wrong(everything, exact=False)


# The command


def bench(tmp_path, *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    path = tmp_path / "rows.json"
    shape = ("--device", "cpu", "--vocab", str(VOCAB), "--rows", "8", "--copy-rate", "1e10")
    shown = run_benchmarks("sampling", *shape, "--json", str(path), *options)
    assert shown.exit_code == code, shown.output + repr(shown.exception)
    return json.loads(path.read_text()), shown.output


@pytest.mark.parametrize("package", FLASHINFER)
def test_whole_path_on_cpu(tmp_path, monkeypatch, package):
    fakes = install(monkeypatch, package)
    monkeypatch.setattr(timing, "MAX_REPLAYS", 1)
    figures, shown = bench(tmp_path, "--logits", "peaked")
    rows = figures["rows"]
    assert figures["environment"]["torch"] == torch.__version__
    for row in rows:
        assert row["us"] > 0
        assert row["correct"]
        assert row["floor_us"] == pytest.approx(row["bytes"] / 1e10 * 1e6, abs=0.01)
        assert (row["dtype"], row["vocab"], row["rows"], row["temperature"]) == ("bfloat16", VOCAB, 8, 1.0)
        assert not row["cuda_graph"]
    found = {(row["job"], row["setting"], row["kernel"]) for row in rows}
    assert len(found) == len(rows)
    missing = {
        (job, setting, kernel) for job in KERNELS for setting in SETTINGS for kernel in KERNELS[job]
    } - found  # fmt: skip
    assert missing == {
        ("draw", "nothing", "flashinfer, one number"),
        *((job, "min-p", "flashinfer") for job in ("support", "verify", "accept")),
    }
    assert not any(note["failed"] for note in figures["notes"])
    assert {path.partition(":")[2] for path, _ in fakes.calls} >= {
        "top_k_top_p_sampling_from_logits", "top_p_renorm_probs", "chain_speculative_sampling",
    }  # fmt: skip
    for text in ("draw, a token a row", "times as fast as FlashInfer", "no function for probabilities after min-p"):
        assert text in " ".join(shown.split())


def test_a_wrong_kernel_gets_no_time(tmp_path, monkeypatch):
    def off_by_one(made: Problem, index: int) -> torch.Tensor:
        return (sampling_kernels._draw(made, index) + 1) % VOCAB

    monkeypatch.setitem(KERNELS["draw"], "spec_ops", Kernel(off_by_one, exact=True))
    figures, shown = bench(tmp_path, "--job", "draw", "--kernel", "spec_ops", "--kernel", READ, "--setting", "top-p", code=1)
    assert {row["kernel"] for row in figures["rows"]} == {READ}
    assert all(note["failed"] and note["reason"].startswith("wrong: ") for note in figures["notes"])
    assert len(figures["notes"]) == 2
    assert "some of our results are wrong" in shown


def test_without_flashinfer_the_others_are_measured(tmp_path):
    if importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("flashinfer is installed")
    figures, shown = bench(tmp_path, "--job", "accept", "--logits", "flat", "--setting", "nothing")
    assert {row["kernel"] for row in figures["rows"]} == set(KERNELS["accept"]) - {"flashinfer"}
    assert "No module named 'flashinfer'" in shown


def test_figures_beside_flashinfer():
    def row(kernel: str, us: float, **more: Any) -> dict[str, Any]:
        case = {"job": "draw", "vocab": 9, "rows": 512, "setting": "top-p", "logits": "flat", "floor_us": 1.0}
        return case | {"kernel": kernel, "us": us} | more

    rows = [row("spec_ops", 3.0), row("flashinfer", 9.0), row("flashinfer, one number", 6.0), row(READ, 2.0)]
    rows += [row("spec_ops", 4.0, rows=4), row("flashinfer", 2.0, rows=4), row("torch", 1.0, rows=4)]
    assert report.ahead(rows, "draw") == [(("draw", 9, 512, "top-p", "flat"), 2.0), (("draw", 9, 4, "top-p", "flat"), 0.5)]
    cells = [list(column.cells) for column in report.summary_table(rows).columns]
    assert [cell for (cell,) in cells] == ["draw", "2", "1.00", "0.50", "9 4 top-p flat", "1.50", "1.50"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--job", "sort"], "--job"),
        (["--setting", "top-q"], "--setting"),
        (["--logits", "round"], "--logits"),
        (["--kernel", "nonsense"], "--kernel"),
        (["--job", "verify", "--rows", "6"], "--rows"),
        (["--dtype", "int8"], "--dtype"),
        (["--vocab", "1"], "--vocab"),
        (["--temperature", "0"], "--temperature"),
        (["--json", "."], "--json"),
    ],
)
def test_bad_options_are_named(options, named):
    shown = run_benchmarks("sampling", "--device", "cpu", *options)
    assert shown.exit_code == 2
    assert named in shown.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu():
    assert "no CUDA device" in refusal(run_benchmarks("sampling", "--quick"), "--device")


def test_results_are_overwritten_before_the_last_replay():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32):
        out = torch.zeros(2, dtype=dtype)
        timing._poison(out)
        assert bool((out != out).all() if dtype.is_floating_point else (out == torch.iinfo(dtype).min).all())


@pytest.mark.gpu
@pytest.mark.parametrize("job", KERNELS)
def test_quick_run_on_a_gpu(tmp_path, job):
    path = tmp_path / "rows.json"
    shown = run_benchmarks("sampling", "--job", job, "--vocab", "128256", "--rows", "4", "--json", str(path))
    assert shown.exit_code == 0, shown.output + repr(shown.exception)
    rows = json.loads(path.read_text())["rows"]
    assert {row["kernel"] for row in rows} >= {name for name in KERNELS[job] if not name.startswith("flashinfer")}
    for row in rows:
        assert row["cuda_graph"]
        assert row["buffer_sets"] > 1
        if row["kernel"] != READ:
            assert row["us"] > 0.8 * row["floor_us"]
