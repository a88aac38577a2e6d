"""Processes of `benchmarks/round`: what compiles side by side, what is measured when, and what becomes of failures."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import __main__ as benchmarks
from benchmarks.kernels.measure import Note
from benchmarks.round import runner
from benchmarks.round import worker as round_worker
from benchmarks.round.jobs import fitting, groups, run
from benchmarks.round.measure import RoundCase
from benchmarks.round.runner import Report, plan
from spec_ops.backends import BackendError

CASE = RoundCase("tiny", 1, (40,), device="cpu", dtype="float32", compiled=False, repeats=2)

# Stands in for the worker: notes what it does when, in a file both in order and by process.
FAKE = """
import json, os, sys
def note(what):
    with open({log!r}, "a") as f:
        f.write(f"{{case['batch_size']}} {{what}}\\n")
case = json.loads(sys.stdin.readline())
cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
warm = os.path.isdir(cache)
os.makedirs(cache, exist_ok=True)
note("warm" if warm else "cold")
if case["batch_size"] == 8:
    sys.exit("out of luck")
print(json.dumps({{"compile_s": 1.04 if warm else 7.25}}), flush=True)
if sys.stdin.readline().strip() == "measure":
    note("measured")
    print(json.dumps({{"row": {{"bs": case["batch_size"]}}}}), flush=True)
    if case["batch_size"] == 4:
        print(json.dumps({{"error": "no such kernel", "failed": False}}), flush=True)
    print(json.dumps({{"done": True}}), flush=True)
"""

# A worker whose own process lives on, and writes to the caches, for a second.
HAUNTED = """
import json, os, subprocess, sys
cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
write = '''
import os, sys, time
end, i = time.monotonic() + 1, 0
while time.monotonic() < end:
    os.makedirs(sys.argv[1], exist_ok=True)
    open(os.path.join(sys.argv[1], str(i := i + 1)), "w").close()
'''
sys.stdin.readline()
subprocess.Popen([sys.executable, "-c", write, cache], stdout=subprocess.DEVNULL)
while not os.path.isdir(cache):
    pass
print(json.dumps({"compile_s": 1.0}), flush=True)
sys.stdin.readline()
print(json.dumps({"row": {"bs": 1}}), flush=True)
print(json.dumps({"done": True}), flush=True)
"""

# The worker itself, on a case that never compiles. Of its two threads the main one is what is told.
SLOW = """
import sys, threading, time
from benchmarks.round import worker as round_worker
def compile_forever(case):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    time.sleep(60)
round_worker.CompiledRound = compile_forever
round_worker.program()
"""


def fake_run(tmp_path, sizes, **options) -> tuple[dict, list[str]]:
    log = tmp_path / "log"
    cases = [replace(CASE, batch_size=size) for size in sizes]
    command = (sys.executable, "-c", FAKE.format(log=str(log)))
    settings = {"limit": 60.0, "command": command} | options
    found = {case.batch_size: results for case, results in run(cases, **settings)}
    return found, log.read_text().splitlines()


def test_compiles_side_by_side_then_measures_one_by_one(tmp_path):
    found, log = fake_run(tmp_path, [1, 2, 4], jobs=3, memory=float("inf"), warm=False)
    assert {line for line in log[:3]} == {"1 cold", "2 cold", "4 cold"}
    assert log[3:] == ["4 measured", "2 measured", "1 measured"]  # the largest first
    assert found[1] == [{"bs": 1, "compile_cold_s": 7.2, "compile_warm_s": None}]
    assert isinstance(found[4][1], Note)
    assert (found[4][0]["bs"], found[4][1].reason, found[4][1].failed) == (4, "no such kernel", False)


def test_warm_compilations_find_the_cold_ones_cache(tmp_path):
    found, log = fake_run(tmp_path, [1, 2], jobs=1, memory=float("inf"), warm=True)
    assert log == ["2 cold", "2 measured", "2 warm", "1 cold", "1 measured", "1 warm"]
    assert found[1] == [{"bs": 1, "compile_cold_s": 7.2, "compile_warm_s": 1.0}]


def test_a_process_that_dies_is_a_failed_note(tmp_path):
    found, _ = fake_run(tmp_path, [8, 1], jobs=2, memory=float("inf"), warm=True)
    (note,) = found[8]
    assert note.failed
    assert "exit code 1; out of luck" in note.reason
    assert found[1][0]["compile_warm_s"] == 1.0


def test_a_process_that_lives_on_costs_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = (sys.executable, "-c", HAUNTED)
    ((_, (row,)),) = run([CASE], jobs=1, memory=float("inf"), warm=False, limit=60.0, command=command)
    assert row["bs"] == 1


@pytest.mark.slow
def test_a_case_that_does_not_compile_in_time_says_where_it_was():
    told: list[str] = []
    command = (sys.executable, "-c", SLOW)
    (case, (note,)), *rest = run([CASE], jobs=1, memory=float("inf"), warm=False, limit=2.0, tell=told.append, command=command)
    assert not rest
    assert case == CASE
    assert note.failed
    assert "took too long" in note.reason
    assert "compile_forever" in note.reason
    assert any(line.startswith("not compiled: ") and "compile_forever" in line for line in told)


def test_groups_fit_into_the_device():
    cases = [RoundCase("llama-8b", size, (1024, 24576)) for size in (1, 8, 32)] + [RoundCase("mla-stack", 1, (1024,))]
    memory = 142e9
    found = groups(cases, 8, memory)
    assert [[case.batch_size for case in group] for group in found] == [[32, 1], [8, 1]]
    assert all(sum(case.memory_bytes() for case in group) <= memory for group in found)
    assert [len(group) for group in groups(cases[:2] * 3, 2, 1e15)] == [2, 2, 2]


def test_side_by_side_less_than_all_of_the_memory_is_used(tmp_path):
    need = CASE.memory_bytes()
    _, log = fake_run(tmp_path, [1, 2], jobs=2, memory=2.1 * need, warm=False)
    assert log == ["2 cold", "2 measured", "1 cold", "1 measured"]


def test_contexts_that_do_not_fit_are_noted():
    kept, notes = fitting([RoundCase("llama-8b", 32, (1024, 32768, 24576)), RoundCase("llama-8b", 32, (10**6,))], 142e9)
    assert [case.contexts for case in kept] == [(1024, 24576)]
    assert [note.failed for note in notes] == [False, False]
    assert "context 32768 needs about" in notes[0].reason


def test_the_worker_answers_in_lines():
    answers = io.StringIO()
    round_worker.main(io.StringIO(CASE.to_json() + "\nmeasure\n"), answers)
    compiled, row, done = (json.loads(line) for line in answers.getvalue().splitlines())
    assert compiled == {"compile_s": None}
    assert row["row"]["context"] == 40
    assert done == {"done": True}
    only_compiled = io.StringIO()
    round_worker.main(io.StringIO(CASE.to_json() + "\n"), only_compiled)
    assert only_compiled.getvalue() == answers.getvalue().splitlines(keepends=True)[0]


@pytest.mark.parametrize(("backend", "failed"), [("triton", False), ("nonsense", True)])
def test_the_worker_tells_a_refusal_from_a_failure(backend, failed, capsys):
    answers = io.StringIO()
    round_worker.main(io.StringIO(replace(CASE, backend=backend).to_json() + "\nmeasure\n"), answers)
    answer = json.loads(answers.getvalue())
    assert answer["failed"] is failed
    assert (BackendError.__name__ in answer["error"]) is not failed
    assert backend in answer["error"]
    assert "Traceback" in capsys.readouterr().err


def bench_round(*args: str):
    return CliRunner().invoke(benchmarks.app, ["round", "--device", "cpu", "--model", "tiny", *args])


def run_here(cases: Sequence[RoundCase], **_: Any) -> Iterator[tuple[RoundCase, list]]:
    """Cases without processes of their own, whose imports take most of the time."""
    for case in cases:
        answers = io.StringIO()
        round_worker.main(io.StringIO(case.to_json() + "\nmeasure\n"), answers)
        first, *rows = map(json.loads, answers.getvalue().splitlines())
        if "error" in first:
            yield case, [Note(case.backend, str(case), first["error"], first["failed"])]
            continue
        assert "compile_s" in first
        assert rows.pop() == {"done": True}
        yield case, [row["row"] | {"compile_cold_s": None, "compile_warm_s": None} for row in rows]


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(runner, "run", run_here)


@pytest.mark.usefixtures("in_this_process")
def test_rows_of_two_runs_stand_in_one_file(tmp_path):
    path = tmp_path / "round.json"
    small = ["--batch-size", "1", "--context", "40", "--repeats", "2", "--accept-length", "2.5", "--json", str(path)]
    result = bench_round(*small, "--backend", "auto", "--backend", "triton")
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert [(row["round"], row["backend"], row["accept_length"]) for row in found["rows"]] == [("speculative", "auto", 2.5)]
    assert {note["backend"] for note in found["notes"]} == {"triton"}  # float32 and CPU are not for it
    assert found["bandwidth"] > 0
    again = bench_round(*small, "--plain", "--append", "--steps", "2")
    assert again.exit_code == 0, again.output
    both = json.loads(path.read_text())
    assert [(row["round"], row["steps"], row["accept_length"]) for row in both["rows"]] == [
        ("speculative", 3, 2.5), ("speculative", 2, 2.5), ("plain", 0, 1.0),
    ]  # fmt: skip
    assert both["earlier_runs"] == [found["environment"]]
    assert both["notes"] == found["notes"]
    assert "accept length of 2.5" in again.output
    assert "tokens a second" in again.output  # plain beside speculative


@pytest.mark.usefixtures("in_this_process")
def test_rounds_with_weights_of_fewer_bits_stand_beside_those_of_16(tmp_path):
    path = tmp_path / "round.json"
    small = ["--batch-size", "1", "--context", "40", "--repeats", "2", "--jobs", "3", "--bandwidth", "1e8"]
    result = bench_round(*small, "--weights", "float8", "--weights", "int4", "--json", str(path))
    assert result.exit_code == 0, result.output
    plain, *stored = json.loads(path.read_text())["rows"]
    assert "weights" not in plain
    assert [(row["weights"], row["bf16_ms"]) for row in stored] == [("float8", plain["ms"]), ("int4", plain["ms"])]
    assert plain["floor_ms"] > stored[0]["floor_ms"] > stored[1]["floor_ms"]
    assert "speculative, float8" in result.output


@pytest.mark.usefixtures("in_this_process")
def test_sampled_rounds_stand_beside_greedy_ones(tmp_path):
    path = tmp_path / "round.json"
    small = ["--batch-size", "1", "--context", "40", "--repeats", "2", "--jobs", "2", "--sampled", "--temperature", "0.8"]
    result = bench_round(*small, "--top-k", "9", "--top-p", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    greedy, sampled = json.loads(path.read_text())["rows"]
    assert "sampled" not in greedy
    said = {"sampled": True, "temperature": 0.8, "top_k": 9, "top_p": 1.0, "min_p": 0.0}
    assert {name: sampled[name] for name in said} == said
    assert "temperature 0.8, top-k 9" in result.output
    assert "speculative, sampled" in result.output
    report = Report(path, True, {})
    report.write([], [sampled | {"ms": 1.0}], [])  # it takes the sampled row's place, not the greedy one's
    assert [row["ms"] for row in json.loads(path.read_text())["rows"]] == [greedy["ms"], 1.0]


@pytest.mark.slow
def test_rounds_of_ranks_stand_beside_those_of_one_process(tmp_path, monkeypatch):
    """The ranks have a process each: real workers, which the other tests do without."""

    def ranks_alone(cases: Sequence[RoundCase], **options: Any) -> Iterator[tuple[RoundCase, list]]:
        yield from run_here([case for case in cases if case.processes == 1])
        yield from run([case for case in cases if case.processes > 1], **options)

    monkeypatch.setattr(runner, "run", ranks_alone)
    path = tmp_path / "round.json"
    small = ["--batch-size", "1", "--context", "40", "--repeats", "2", "--jobs", "2", "--tp", "1", "--tp", "2"]
    result = bench_round(*small, "--check-rounds", "8", "--bandwidth", "1e9", "--json", str(path))
    assert result.exit_code == 0, result.output
    whole, share = json.loads(path.read_text())["rows"]
    assert [(row["round"], row.get("tp"), row.get("gpus")) for row in (whole, share)] == [
        ("speculative", None, None), ("speculative", 2, 2),
    ]  # fmt: skip
    assert [row.get("same_tokens_rounds") for row in (whole, share)] == [None, 8]
    assert 0.5 * whole["weights_floor_ms"] <= share["weights_floor_ms"] < 0.8 * whole["weights_floor_ms"]
    assert 0.5 * whole["kv_floor_ms"] == pytest.approx(share["kv_floor_ms"], abs=0.002)
    assert "speculative, one of 2 ranks, push" in result.output


def test_the_cases_of_sampled_and_penalized_rounds():
    choices = [{}, {"temperature": 0.6, "top_p": 0.9}]
    choices += [choice | {"penalties": True} for choice in choices]
    shape = {"model": ["tiny"], "batch_size": [1], "context": [40], "layers": None, "steps": [3], "tree": (1, None)}
    options = {"backend": ["auto"], "passes": [True], "accept_length": None, "common": {}, "choices": choices}
    cases = plan(**shape, **options, extra=(True, True, False, False))
    found = [(case.round, case.sampled, case.penalties) for case in cases]
    every = [(False, False), (True, False), (False, True), (True, True)]
    speculative, plain = ([(kind, *choice) for choice in every] for kind in ("speculative", "plain"))
    assert found == [*speculative, ("naive", False, False), *plain]
    assert all(RoundCase.from_json(case.to_json()) == case for case in cases)
    looking = plan(**shape, **options, extra=(False, False, False, True))
    drafting, aside = ([(kind, *choice) for choice in every] for kind in ("lookup", "plain-lookup"))
    assert [(case.round, case.sampled, case.penalties) for case in looking] == [*speculative, *drafting, *aside]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--temperature", "0.5"], "--temperature"),
        (["--min-p", "0.1"], "--min-p"),
        (["--sampled", "--temperature", "0"], "--temperature"),
        (["--sampled", "--top-p", "0"], "--top-p"),
        (["--model", "llama"], "--model"),
        (["--device", "tpu"], "--device"),
        (["--passes", "some"], "--passes"),
        (["--path", "theirs"], "--path"),
        (["--accept-length", "4.5"], "--accept-length"),
        (["--tree-width", "2", "--tree-tokens", "99"], "--tree-tokens"),
        (["--tree-width", "2", "--naive"], "--naive"),
        (["--tree-width", "2", "--lookup"], "--lookup"),
        (["--tp", "2", "--lookup"], "--tp"),
        (["--timeline", "x.png"], "--timeline"),
        (["--tp", "2", "--weights", "int4"], "--tp"),
        (["--tp", "2", "--alone", "--collective", "nccl"], "--alone"),
        (["--tp", "2", "--alone", "--path", "transformers"], "--alone"),
        (["--tp", "2", "--expert-parallel"], "--expert-parallel"),
        (["--weights", "mxfp4_experts"], "--weights"),  # of which it has none
        (["--collective", "gloo"], "--collective"),
    ],
)
def test_bad_options_are_named(args, named):
    result = bench_round(*args)
    assert result.exit_code == 2
    assert named in result.output


def test_a_row_measured_again_keeps_its_place(tmp_path):
    path, settings = tmp_path / "round.json", {"bandwidth": 1.0, "jobs": 1}
    cases = [replace(CASE, batch_size=size) for size in (1, 2, 4)]
    first, second, third = (case.row(40, 3.0, (0, 0)) for case in cases)
    peer = {"peer": "an engine", "peer_ms": 4.0}  # written by hand
    Report(path, False, settings).write(cases[:2], [first | peer, second], [])
    again = first | {"ms": 2.0}
    Report(path, True, settings).write(cases, [third, again], [])
    assert json.loads(path.read_text())["rows"] == [again | peer, second, third]


def test_a_case_done_again_loses_its_old_note(tmp_path):
    path, settings = tmp_path / "round.json", {"bandwidth": 1.0, "jobs": 1}
    one, two = (replace(CASE, batch_size=size) for size in (1, 2))
    longer = replace(one, contexts=(10**6,))
    notes = [Note("auto", str(case), "no module", failed=True) for case in (one, two, longer)]
    Report(path, False, settings).write([one, two, longer], [], notes)
    Report(path, True, settings).write([one], [one.row(40, 3.0, (0, 0))], [])
    assert [note["case"] for note in json.loads(path.read_text())["notes"]] == [str(two), str(longer)]
