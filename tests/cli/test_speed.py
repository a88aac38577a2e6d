"""What `generate --compare` goes on to show on a GPU: the report of measurements, and the whole path on the CPU, uncompiled."""

from __future__ import annotations

import dataclasses
import functools
import io
import re
import types

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from spec_ops import cli
from spec_ops.cli import generate, speed
from spec_ops.cli.speed import Counts, Speed, counted, remarks, speed_table, warm_up
from spec_ops.decoding import GenerationStats, Generator


def measured(tokens: int, rounds: int, seconds: float, **more) -> Speed:
    stats = GenerationStats(rounds, rounds, tokens + 1, 1, seconds * 2, seconds)
    return Speed(
        stats, **{"compile_seconds": 12.34, "counts": Counts(1, 0, 0), "kernels": ["triton (mha_target_verify x6)"]} | more
    )


def shown(speeds: dict[str, Speed]) -> dict[str, list[str]]:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(speed_table(speeds))
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in console.export_text().splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 3}


def test_the_report_of_a_gpu():
    speeds = {"plain": measured(300, 300, 0.6), "speculative": measured(300, 100, 0.25, counts=Counts(1.0, 0.2, 3))}
    assert shown(speeds) == {
        "": ["plain", "speculative"],
        "tokens/s": ["500.0", "1200.0"],
        "milliseconds a round": ["2.00", "2.50"],
        "tokens a round": ["1.00", "3.00"],
        "CUDA graphs a round": ["1", "1"],
        "other launches a round": ["0", "0.2"],
        "host syncs a round": ["0", "3"],
        "seconds to compile": ["12.3", "12.3"],
    }
    assert list(remarks(speeds)) == [
        "attention of the plain round by triton (mha_target_verify x6)",
        "attention of the speculative round by triton (mha_target_verify x6)",
        "speculative decoding gives 2.40 times the tokens/s of plain decoding",
    ]


def test_what_was_not_measured_has_no_row():
    rows = shown({kind: measured(8, 4, 1.0, counts=None, compile_seconds=None) for kind in ("plain", "speculative")})
    assert rows.keys() == {"", "tokens/s", "milliseconds a round", "tokens a round"}


def test_a_request_that_ends_with_its_first_token_divides_by_nothing():
    """Such as one whose first token is a stop token: no round, no seconds."""
    speeds = dict.fromkeys(("plain", "speculative"), measured(0, 0, 0.0))
    assert shown(speeds)["milliseconds a round"] == ["0.00", "0.00"]
    assert not any("times the tokens/s" in line for line in remarks(speeds))


def test_calls_of_the_driver_are_counted():
    names = [
        "cudaGraphLaunch",
        "cudaLaunchKernel",
        "cuLaunchKernelEx",
        "cudaLaunchKernelExC",
        "cudaStreamSynchronize",
        "aten::add",
    ]
    assert counted([*names, "cudaEventSynchronize", "cudaGraphLaunch"], 2) == Counts(1.0, 1.5, 1.0)


@pytest.mark.parametrize(
    ("place", "compiled", "goes_on"),
    [("cpu", False, False), ("cuda", False, True), ("cuda:1", False, True), ("cuda", True, False)],
)
def test_when_it_goes_on(place, compiled, goes_on):
    assert generate.shows_speed(torch.device(place), compiled) == goes_on


@pytest.mark.slow
def test_the_whole_path_on_the_cpu(monkeypatch):
    """As on a GPU, but for the compiler and the profiler: equal texts in float32, then rounds in bfloat16."""
    monkeypatch.setattr(generate, "shows_speed", lambda place, compiled: True)
    monkeypatch.setattr(generate, "show_speed", functools.partial(speed.show_speed, compiled=False))
    dtypes, invariant = [], []

    class Watched(Generator):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            dtypes.append((self.dtype, self.draft is not None, self.compile))
            invariant.append(self.invariant)

    monkeypatch.setattr(speed, "Generator", Watched)
    result = CliRunner().invoke(
        cli.app, ["generate", "--compare", "--max-new-tokens", "3", "--steps", "1", "--prompt", "x = ", "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    assert dtypes == [(torch.bfloat16, False, False), (torch.bfloat16, True, False)] * 2  # timed; batch-invariant
    assert invariant == [False, False, True, True]
    before, _, after = result.output.partition("texts are equal")
    assert "rounds in bfloat16 on the CPU" in after
    assert "warming up the plain round ...\nwarming up the plain round: " in after
    assert "attention of the speculative round by reference (" in after
    assert re.search(r"tokens/s\s+│\s+[\d.]+\s+│\s+[\d.]+", after)
    assert "bfloat16" not in before
    assert "texts in bfloat16 with invariant=True are equal" in after


@pytest.mark.parametrize(("lengths", "tokens"), [(None, [24, 24]), ((0, 3), [40, 40, 40])])
def test_it_warms_up_until_no_round_is_new(lengths, tokens):
    """Each length is compiled when it is first chosen, and the timed run must not be the first to choose it."""
    generator = types.SimpleNamespace(config=types.SimpleNamespace(lengths=lengths), buckets=types.SimpleNamespace(rounds={}))
    chosen, ran = iter([3, 0, 3] if lengths else [3, 3]), []

    def run(count: int) -> None:
        ran.append(count)
        generator.buckets.rounds[next(chosen)] = None

    warm_up(generator, run, 40)
    assert ran == tokens


def test_different_texts_end_it(monkeypatch):
    class Wrong(Generator):
        def generate(self, *args, **kwargs):
            result = super().generate(*args, **kwargs)
            if self.draft is not None:
                result.tokens[0][-1] ^= 1
            return result

    def ran(*_):
        raise AssertionError("timed rounds whose texts differ")

    monkeypatch.setattr(generate, "Generator", Wrong)
    monkeypatch.setattr(generate, "shows_speed", lambda place, compiled: True)
    monkeypatch.setattr(generate, "show_speed", ran)
    result = CliRunner().invoke(cli.app, ["generate", "--compare", "--max-new-tokens", "8", "--device", "cpu"])
    assert (result.exit_code, "texts differ" in result.output) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_different_texts_in_bfloat16_end_it(monkeypatch, wrong):
    """Those of timed rounds may differ, those of batch-invariant ones may not."""

    class Changed(Generator):
        def generate(self, *args, **kwargs):
            result = super().generate(*args, **kwargs)
            if self.draft is not None and wrong:
                result.tokens[0][2] ^= 1
            return result

    texts = {"plain": [1, 2, 3, 4], "speculative": [1, 2, 3, 5]}
    timed = {kind: dataclasses.replace(measured(4, 4, 1.0), tokens=tokens) for kind, tokens in texts.items()}
    monkeypatch.setattr(generate, "shows_speed", lambda place, compiled: True)
    monkeypatch.setattr(generate, "show_speed", lambda text, config: timed)
    monkeypatch.setattr(speed, "Generator", Changed)
    result = CliRunner().invoke(
        cli.app, ["generate", "--compare", "--max-new-tokens", "4", "--prompt", "x = ", "--device", "cpu"]
    )
    assert result.exit_code == wrong
    assert "texts of these rounds differ after 3 tokens" in result.output
    outcome = "differ after 2 tokens" if wrong else "are equal"
    assert f"texts in bfloat16 with invariant=True {outcome}" in result.output
