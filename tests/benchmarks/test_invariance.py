"""`python -m benchmarks invariance` on the CPU: every way gives the text and the logits of plain decoding, and what differs is
noticed."""

from __future__ import annotations

import dataclasses
import json
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from benchmarks.invariance import command, models, ways
from benchmarks.invariance.models import DRAFTS, _that_begin_differently
from benchmarks.invariance.recorder import LogitsRecorder
from tests.helpers.command_line import refusal
from tests.helpers.command_line import run_benchmarks as run

SMALL = ["--device", "cpu", "--prompts", "2", "--prompt-tokens", "24", "--new-tokens", "6", "--no-price"]


def rows_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


@pytest.mark.slow
def test_every_way(tmp_path, monkeypatch):
    """Of fewer layers, of which the small draft has two here as well."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(models, "LAYERS", 3)
    path = tmp_path / "rows.json"
    result = run("invariance", *SMALL, "--model", "qwen3", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = rows_of(path)
    assert [row["way"] for row in rows if row["invariant"]] == [way.name for way in (ways.PLAIN, *ways.OTHERS)]
    assert [row["way"] for row in rows if not row["invariant"]] == [way.name for way in (ways.WITHOUT, *ways.OTHERS_WITHOUT)]
    for row in rows:
        assert f"qwen3, {row['way']}" in result.output
        if row["invariant"]:
            assert row["differ"] == row.get("logits_differ", 0) == 0
    assert any(row["accept_length"] > 1.5 for row in rows if row["way"].startswith("standalone, chain"))


@pytest.mark.slow
def test_the_price(tmp_path):
    path = tmp_path / "rows.json"
    small = ["--device", "cpu", "--no-texts", "--layers", "1", "--json", str(path)]
    result = run("invariance", *small)
    assert result.exit_code == 0, result.output
    prompt, step = json.loads(path.read_text())["price"]
    assert prompt["what"] == "prompt of 16"
    assert step["ratio"] == pytest.approx(step["invariant_ms"] / step["ms"])


def test_the_ways_are_those_of_the_promise():
    drafted = {way.draft for way in ways.OTHERS} - {None}
    assert drafted == set(DRAFTS)
    assert {way.steps for way in ways.OTHERS if way.draft and way.topk == 1} == {1, 3, 7}
    assert {way.topk for way in ways.OTHERS} == {1, 2, 4}
    assert {way.batch for way in ways.OTHERS} == {1, 2, 8, 32}
    assert any(way.more for way in ways.OTHERS)


@pytest.mark.slow
def test_what_differs_is_noticed(monkeypatch, tmp_path):
    """A text of its own; and the sums of torch, whose order follows the rows: logits differ where the tokens do not."""
    path = tmp_path / "rows.json"
    sizes = ways.Sizes("cpu", 6, 24, 12)
    plain = dataclasses.replace(ways.PLAIN, invariant=False)
    reference = ways.decode("pair", plain, sizes, None, True)
    alone = dataclasses.replace(ways.OTHERS[0], invariant=False)
    row = ways.compare("pair", alone, ways.decode("pair", alone, sizes, reference, True), reference)
    assert row["differ"] == 0
    assert 0 < row["logits_differ"] < row["tokens"]

    def decode(model, way, sizes, reference, whole):
        got = decoded(model, way, sizes, reference, whole)
        if reference is not None:
            got.tokens[0][-1] ^= 1
        return got

    decoded = ways.decode
    monkeypatch.setattr(command, "decode", decode)
    result = run("invariance", *SMALL, "--model", "pair", "--way", "lookup", "--no-without", "--json", str(path))
    assert result.exit_code == 1
    assert [row["differ"] for row in rows_of(path)] == [0, 1]


def test_a_way_that_fails_and_ways_that_are_left_out(monkeypatch, tmp_path):
    path = tmp_path / "rows.json"

    def decode(model, way, *rest):
        raise RuntimeError("no room\nand more")

    monkeypatch.setattr(command, "decode", decode)
    result = run("invariance", *SMALL, "--model", "pair", "--way", "lookup", "--no-without", "--json", str(path))
    assert result.exit_code == 1
    assert [row["error"] for row in rows_of(path)] == ["RuntimeError: no room"]
    assert "left out: pair, lookup, chain of 3, batch 32" in result.output

    class Never(command._Here):
        def submit(self, fn, /, *args, **kwargs):
            return Future()

    plans = [("pair", ways.PLAIN, ways.OTHERS[:1])]
    assert command.decode_all(Never(), plans, ways.Sizes("cpu", 1, 4, 4), False, time.monotonic()) == (
        [],
        ["pair, plain, batch 32", "pair, plain, batch 1"],
    )


def test_prompts_that_begin_alike():
    with pytest.raises(ValueError, match="LogitsRecorder: `prompts` must differ in their first 2 tokens"):
        LogitsRecorder([[1, 2], [1, 2, 3]], 8, 16, torch.device("cpu"))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [(["--model", "gpt"], "--model"), (["--way", "no such"], "--way"), (["--device", "mps"], "--device")],
)
def test_bad_input(arguments, option):
    assert option in refusal(run("invariance", *SMALL, *arguments), option)


def test_prompts_that_begin_alike_are_left_out():
    """The recorder tells texts apart by what all prompts have."""
    given = [[1, 2, 3], [1, 2, 4], [5, 6, 7], [8, 9, 10]]  # two thirds count
    assert _that_begin_differently(given, 3) == [[1, 2, 3], [5, 6, 7], [8, 9, 10]]
    with pytest.raises(ValueError, match="--prompts must be at most 3 with prompts of 3 tokens, got 4"):
        _that_begin_differently(given, 4)
