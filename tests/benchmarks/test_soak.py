"""`python -m benchmarks soak`: what it looks for is found where it is planted, and not found in a generator."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import soak
from benchmarks.__main__ import app
from spec_ops.decoding import Generator, SpeculationConfig
from tests.decoding.test_generate import VOCAB, make_draft, make_target

LOADS = [soak.Load([[1 + (i * n) % (VOCAB - 1) for n in range(1, 4 + i)] for i in range(6)], [8, 2, 3, 7, 4, 5])]
SAMPLE = soak.Sample(0, 0.0, 2, 2, 4096, 300_000, 900.0)


@pytest.fixture(scope="module")
def generator():
    gc.collect()
    gc.freeze()  # each sample collects and counts objects, of which earlier tests left many
    target = make_target(False)
    return Generator(
        target, make_draft("eagle3", target), SpeculationConfig(2), max_batch_size=3, max_seq_len=80, page_size=4, num_pages=12
    )


def run(generator, rounds=20, loads=LOADS):
    return soak.soak(generator, loads, rounds, 10.0, lambda sample: None)


@pytest.mark.slow
def test_requests_come_and_go(generator):
    samples, wrong = run(generator)
    assert not wrong
    assert samples[-1].rounds >= 20
    assert not soak.grown(samples, len(soak.KINDS))
    given = {kind: LOADS[0].call(generator, kind)[0] for kind in soak.KINDS}
    assert [len(tokens) for tokens in given["greedy"]] == LOADS[0].limits
    assert given["sampled"] != given["greedy"]
    assert [len(tokens) for tokens in given["left"]] == [min(n, 5) if i % 3 == 0 else n for i, n in enumerate(LOADS[0].limits)]
    assert given["raised"].startswith("CallbackError")
    assert given["interrupted"].startswith("Interrupt")
    assert "num_pages=12 pages of 4" in given["too long"]


@pytest.mark.slow
def test_what_a_call_keeps_is_found(generator, monkeypatch):
    kept = []
    original = Generator.generate

    def keeping(self, *args, **kwargs):
        kept.extend([] for _ in range(soak.OBJECTS))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Generator, "generate", keeping)
    samples, wrong = run(generator)
    assert not wrong
    assert [problem.split(":")[0] for problem in soak.grown(samples, len(soak.KINDS))] == ["objects"]


def test_another_text_is_found(generator, monkeypatch):
    calls = []
    original = soak.Load.call

    def other(self, generator, kind):
        calls.append(kind)
        given, took = original(self, generator, kind)
        return (given[::-1], took) if kind == "left" and len(calls) > 2 * len(soak.KINDS) else (given, took)

    monkeypatch.setattr(soak.Load, "call", other)
    assert run(generator, rounds=1)[1] == ["cycle 2, load 0, left"]


def test_a_callback_that_never_raises_is_found(generator):
    none = [replace(LOADS[0], limits=[1] * 6)]  # too few calls of it
    assert run(generator, rounds=0, loads=none)[1] == ["failed: ['too long']"]


def test_a_recompile_raises(generator, monkeypatch):
    sizes = iter([1] * (2 * len(soak.KINDS)) + [2])  # another after the warm-up

    @torch.compile(backend="eager", dynamic=False)
    def compiled(x):
        return x + 1

    original = soak.Load.call

    def compiling(self, *args):
        compiled(torch.zeros(next(sizes)))
        return original(self, *args)

    monkeypatch.setattr(soak.Load, "call", compiling)
    with pytest.raises(torch._dynamo.exc.RecompileError):
        run(generator, rounds=1)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"rounds": 9, "seconds": 1.0, "objects": 300_117, "host_mib": 910.0}, []),
        ({"objects": 300_118}, ["objects: 300000 to 300118"]),
        ({"compiled": 3}, ["compiled: 2 to 3"]),
        ({"recorded": 3, "device_bytes": 4608}, ["recorded: 2 to 3", "device_bytes: 4096 to 4608"]),
        ({"host_mib": 917.0}, ["host_mib: 900.0 to 917.0"]),
    ],
)
def test_growth(change, found):
    assert soak.grown([SAMPLE, replace(SAMPLE, **change)], calls=18) == found


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    target = make_target(False)
    monkeypatch.setattr(soak, "load_pair", lambda **_: (target, make_draft("eagle3", target), None))
    monkeypatch.setattr(soak, "make_loads", lambda *_: LOADS)
    path = tmp_path / "soak.json"
    small = ["--rounds", "1", "--loads", "1", "--batch-size", "3", "--device", "cpu"]
    result = CliRunner().invoke(app, ["soak", *small, "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert rows[0]["rounds"] == 0 < rows[-1]["rounds"]
    monkeypatch.setattr(soak, "soak", lambda *_: ([SAMPLE, replace(SAMPLE, compiled=3)], []))
    result = CliRunner().invoke(app, ["soak", *small])
    assert result.exit_code == 1
    assert "compiled: 2 to 3" in result.output
